"""Folders: the federation's at the coordinator, and the one that each site receives.

====================  ===============================================================================================
federation.toml       host, port and the sites in their order (site i is client i)
ca/                   the authority: ``ca.crt``, ``ca.key``
server/               ``server.pem``, ``server.key``
keys/NAME.pub         the sites' public keys
sites/NAME/           an enrolment folder, to be carried to the site (and its ``site.key`` then deleted here)
state/                the service's database, the sites' node numbers, jobs
runs/                 run folders
====================  ===============================================================================================

An enrolment folder has ``ca.crt``, ``site.key``, ``site.toml`` and a README; at the site ``state/`` is added.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcomposite._validation import UserError, suggest
from fedcomposite.federation import pki
from fedcomposite.federation.site import Limits
from fedcomposite.files import write_atomic

_NAME = re.compile("[a-z0-9][a-z0-9_-]{0,62}")


class FolderError(UserError):
    """A folder that cannot be used, and why."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Federation(_Section):
    host: str
    port: int = Field(ge=1, le=65535)
    sites: list[str]


class _Site(_Section):
    name: str
    address: str


class DataSection(_Section):
    """``[data]`` of site.toml."""

    file: str | None = None
    target: str | None = None
    test: str | None = None
    drop: list[str] = []
    missing: list[str] = ["?"]
    columns: dict[str, str] = {}
    """Common name = name in this site's file."""
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    classes: list[int] | None = None
    """The labels that the target may have, if they are other than -1 and 1 or 0 and 1; they are told to others."""


class SiteFile(_Section):
    """site.toml."""

    site: _Site
    data: DataSection = DataSection()
    limits: Limits = Limits()


def _read(path: Path, model: type[BaseModel]) -> Any:
    try:
        return model.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError:
        raise FolderError(f"{path.parent}: no {path.name} there") from None
    except tomllib.TOMLDecodeError as error:
        raise FolderError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise FolderError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from None


class _FederationFile(_Section):
    federation: _Federation


class FederationFolder:
    """The coordinator's folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        content: _FederationFile = _read(self.path / "federation.toml", _FederationFile)
        self.host, self.port, self.sites = (
            content.federation.host,
            content.federation.port,
            content.federation.sites,
        )
        self.state, self.runs = self.path / "state", self.path / "runs"
        self.home = self.state / "flwr"
        self.authority = self.path / "ca" / "ca.crt"
        self.database = self.state / "superlink.db"

    @classmethod
    def create(cls, path: str | Path, host: str, port: int, sites: Sequence[str]) -> FederationFolder:
        """Make keys, certificates and one enrolment folder per site; port 0 takes a free one."""
        path = Path(path)
        for name in sites:
            if not _NAME.fullmatch(name):
                raise FolderError(f"site {name!r}: use small letters, digits, - and _ (at most 63)")
        if len(set(sites)) < len(sites) or not sites:
            raise FolderError("the sites must have different names, and there must be at least one")
        if path.exists() and any(path.iterdir()):
            raise FolderError(f"{path}: already holds files")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        port = port or free_port()
        pki.make_authority(path / "ca")
        pki.make_server_certificate(path / "ca", path / "server", host)
        (path / "keys").mkdir()
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for name in sites:
            folder = path / "sites" / name
            public = pki.make_site_key(folder / "site.key")
            (path / "keys" / f"{name}.pub").write_bytes(public + b"\n")
            (folder / "ca.crt").write_bytes((path / "ca" / "ca.crt").read_bytes())
            (folder / "site.toml").write_text(_SITE_TOML.format(name=name, address=address), encoding="utf-8")
            (folder / "README.md").write_text(_README.format(name=name, address=address), encoding="utf-8")
        content = {"federation": {"host": host, "port": port, "sites": list(sites)}}
        (path / "federation.toml").write_text(tomli_w.dumps(content), encoding="utf-8")
        return cls(path)

    @property
    def address(self) -> str:
        """Where this machine reaches the service."""
        host = self.host if _is_loopback(self.host) else "127.0.0.1"
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def bind(self) -> str:
        """The interface on which the service listens."""
        return self.host if _is_loopback(self.host) else "0.0.0.0"

    def write_client_config(self) -> None:
        """Tell Flower's command line where the service is."""
        self.home.mkdir(parents=True, exist_ok=True)
        content = {
            "superlink": {
                "default": "federation",
                "federation": {"address": self.address, "root-certificates": str(self.authority)},
            }
        }
        (self.home / "config.toml").write_text(tomli_w.dumps(content), encoding="utf-8")

    def nodes(self) -> dict[str, int]:
        """The registered sites and their node numbers."""
        return {k: v for k, v in self._registry().items() if k not in self.revoked()}

    def _registry(self) -> dict[str, int]:
        found: dict[str, int] = _json(self.state / "nodes.json", {})
        return found

    def set_node(self, site: str, node: int) -> None:
        """Remember a registration."""
        write_atomic(self.state / "nodes.json", json.dumps({**self._registry(), site: node}).encode())

    def forget_nodes(self) -> None:
        """Forget all registrations, as when the database is new."""
        (self.state / "nodes.json").unlink(missing_ok=True)

    def revoked(self) -> list[str]:
        """Sites that may no longer take part."""
        found: list[str] = _json(self.state / "revoked.json", [])
        return found

    def revoke(self, site: str) -> int | None:
        """Take a site's permission away; returns its node number, if it has one."""
        if site not in self.sites:
            raise FolderError(f"no site {site!r}{suggest(site, self.sites)} (sites: {', '.join(self.sites)})")
        write_atomic(self.state / "revoked.json", json.dumps(sorted({*self.revoked(), site})).encode())
        return self._registry().get(site)

    def job(self, name: str) -> Path:
        """The file that says what a job is."""
        return self.state / "jobs" / f"{name}.json"


class SiteFolder:
    """A site's folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.file: SiteFile = _read(self.path / "site.toml", SiteFile)
        self.name, self.address = self.file.site.name, self.file.site.address
        self.authority, self.key = self.path / "ca.crt", self.path / "site.key"
        self.state = self.path / "state"
        for path in (self.authority, self.key):
            if not path.is_file():
                raise FolderError(f"{path}: missing from the enrolment folder")


def _json(path: Path, default: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


_SITE_TOML = """\
# {name}: edit freely; this file stays at the site.
[site]
name = "{name}"
address = "{address}"

[data]
# file = "patients.csv"        # .csv, .parquet or .npz; or give --data
# target = "num"               # the column to predict; or give --target
# test = "held-out.csv"        # samples on which the common model is tested
# drop = ["patient_id"]
# missing = ["?"]
# separator = ";"              # only where it cannot be found from the .csv file
# decimal = ","                # the same
# encoding = "cp1252"          # if it is not UTF-8
# classes = [0, 1, 2]          # for a classifier, unless they are -1 and 1 or 0 and 1; these numbers are sent

[data.columns]                 # common name = name in this file
# age = "alter"

[limits]                       # whatever an experiment says
# max_rounds = 1000
# max_local_steps = 100
# methods = ["FedNMap", "FedAvg"]
# min_samples = 50
# min_batch = 20
# networks = true              # others than linear models: read docs/site-it.md first
# reproducible_batches = true  # the coordinator then knows which samples are in a minibatch
# evaluations_per_day = 1000
# max_message_mb = 100.0
"""

_README = """\
# Enrolment of {name}

This folder lets {name} take part in a federation. `site.key` is its private key: keep it on this machine, readable by
one account only. `ca.crt` is the authority that vouches for the coordinator at {address}. `site.toml` holds
your data's columns and your limits.

    pip install 'fedcomposite[flower]'
    fedcomposite federation join . --data patients.csv --target num

Nothing listens on this machine; it connects to {address} over TLS. Samples never leave. To leave the federation, stop
the command and delete this folder.
"""
