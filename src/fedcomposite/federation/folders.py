"""Folders: the federation's at the coordinator, and the one that each site receives.

====================  ===============================================================================================
federation.toml       host, port and the sites in their order (site i is client i)
ca/                   the authority: ``ca.crt``, ``ca.key``
server/               ``server.pem``, ``server.key``; ``orders.key``, with which orders are signed
keys/NAME.pub         the sites' public keys
sites/NAME/           an enrolment folder, to be carried to the site
state/                the service's socket and spool, the sites' node numbers, who is revoked, jobs
runs/                 run folders
====================  ===============================================================================================

An enrolment folder has ``ca.crt``, ``coordinator.pub``, ``site.toml``, a README, and in ``peers/`` the public keys of
the other sites. ``site.key`` is made at the site, or here if that was asked for (and then to be deleted here); at the
site ``state/`` is added.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcomposite._validation import UserError, suggest
from fedcomposite.data.spec import Recoding
from fedcomposite.data.steps import Unit
from fedcomposite.federation.engines import pki
from fedcomposite.federation.site.approval import Approval
from fedcomposite.federation.site.site import Limits
from fedcomposite.federation.templates import README, SITE_TOML
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
    new: str | None = None
    """Patients whom ``federation predict`` scores, for this site's own people; those of ``file`` if left out."""
    drop: list[str] = []
    missing: list[str] = ["?"]
    columns: dict[str, str] = {}
    """Common name = name in this site's file."""
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    weight: str | None = None
    """The column that says what each sample counts; its sum is told to the coordinator."""
    offset: str | None = None
    """The column that is added to each sample's margin."""
    features: int | None = Field(default=None, ge=1)
    """How many features an .svm file has."""
    thousands: str | None = None
    units: dict[str, Unit] = {}
    """What makes this site's numbers those of the common unit, by common name."""
    recode: dict[str, Recoding] = {}
    """Common name = {level in this file = common level}; for tables that recipes prepare."""
    classes: list[int] | None = None
    """The labels that the target may have, if they are other than -1 and 1 or 0 and 1; they are told to others."""
    recipe: bool = False
    """Whether the file is a table as people have it, which experiments' recipes prepare."""


class SiteFile(_Section):
    """site.toml."""

    site: _Site
    data: DataSection = DataSection()
    limits: Limits = Limits()
    approval: Approval = Approval()


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
        self.authority = self.path / "ca" / "ca.crt"
        self.spool = self.state / "spool"

    @classmethod
    def create(
        cls, path: str | Path, host: str, port: int, sites: Sequence[str], keys: bool = True
    ) -> FederationFolder:
        """Make an authority, certificates, and with ``keys`` the sites' keys in their folders; port 0 takes a free one.

        Without, every site makes its own and is admitted by its request.
        """
        path = Path(path)
        check_names(sites)
        if path.exists() and any(path.iterdir()):
            raise FolderError(f"{path}: already holds files")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        port = port or free_port()
        pki.make_authority(path / "ca")
        pki.make_server_certificate(path / "ca", path / "server", host)
        pki.make_order_key(path / "server" / "orders.key")
        (path / "keys").mkdir()
        _write_federation(path, host, port, sites)
        made = cls(path)
        made.state.mkdir(mode=0o700)
        for name in sites if keys else []:
            made._enrol(name)
        return made

    def _enrol(self, name: str, public: bytes | None = None) -> Path:
        """Write a site's enrolment folder, with a new key unless the site has one; what is in site.toml stays."""
        folder, coordinator = self.path / "sites" / name, pki.public_part(self.order_key)
        address = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        (folder / "site.key").unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        if public is None:
            public = pki.make_site_key(folder / "site.key")
        (folder / "ca.crt").write_bytes(self.authority.read_bytes())
        (folder / "coordinator.pub").write_bytes(coordinator)
        if not (folder / "site.toml").exists():
            (folder / "site.toml").write_text(SITE_TOML.format(name=name, address=address), encoding="utf-8")
        (folder / "README.md").write_text(README.format(name=name, address=address), encoding="utf-8")
        write_atomic(self.public_key(name), public + b"\n")
        self._introduce(name)
        return folder

    def _introduce(self, name: str) -> None:
        """Put a site's public key into the others' folders, and theirs into its: with these they know each other."""
        own = self.public_key(name).read_bytes()
        for other in sorted((self.path / "keys").glob("*.pub")):
            if other.stem != name:
                for site, peer, key in ((name, other.stem, other.read_bytes()), (other.stem, name, own)):
                    folder = self.path / "sites" / site / "peers"
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / f"{peer}.pub").write_bytes(key)

    def admit(self, name: str, public: bytes, replace: bool = False) -> Path:
        """A site by the public key of its request; returns the folder to be carried to it."""
        check_names([*(s for s in self.sites if s != name), name])
        if self.public_key(name).exists() and not replace and self.public_key(name).read_bytes().strip() != public:
            raise FolderError(f"{name} has another key already; --replace takes this one in its place")
        folder = self._enrol(name, public)
        if name not in self.sites:
            self.sites = [*self.sites, name]
            _write_federation(self.path, self.host, self.port, self.sites)
        return folder

    def add_site(self, name: str) -> Path:
        """A new site, the last in the order of the clients; returns its enrolment folder."""
        check_names([*self.sites, name])
        folder = self._enrol(name)
        self.sites = [*self.sites, name]
        _write_federation(self.path, self.host, self.port, self.sites)
        return folder

    def rekey(self, name: str) -> Path:
        """A new key for a site; the old one counts no more. Returns the enrolment folder."""
        self._check_known(name)
        return self._enrol(name)

    @property
    def order_key(self) -> Path:
        """The key with which orders are signed."""
        key = self.path / "server" / "orders.key"
        if not key.is_file():
            raise FolderError(
                f"{self.path}: has no key for orders, as in folders of older versions; make one with: "
                f"fedcomposite federation rotate {self.path}"
            )
        return key

    def rotate(self) -> list[Path]:
        """A new key for orders; returns the sites' new ``coordinator.pub``, to be carried to them."""
        fresh = self.path / "server" / "orders.new"
        fresh.unlink(missing_ok=True)
        pki.make_order_key(fresh)
        folders = [self.path / "sites" / name for name in self.sites]
        made = [folder / "coordinator.pub" for folder in folders if folder.is_dir()]  # others are not admitted yet
        for file in made:
            write_atomic(file, pki.public_part(fresh))
        os.replace(fresh, fresh.with_name("orders.key"))
        return made

    @property
    def address(self) -> str:
        """Where this machine reaches the service."""
        host = self.host if _is_loopback(self.host) else ("::1" if self.bind == "::" else "127.0.0.1")
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def bind(self) -> str:
        """The interface on which the service listens: all of the host's family, both for a name."""
        if _is_loopback(self.host):
            return "127.0.0.1" if self.host == "localhost" else self.host
        try:
            return "::" if ipaddress.ip_address(self.host).version == 6 else "0.0.0.0"
        except ValueError:
            return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"

    def public_key(self, site: str) -> Path:
        """The file with a site's public key."""
        return self.path / "keys" / f"{site}.pub"

    def revoked(self) -> list[str]:
        """Sites that may no longer take part."""
        found: list[str] = _json(self.state / "revoked.json", [])
        return found

    def permitted(self) -> list[str]:
        """Sites that may take part."""
        out = set(self.revoked())
        return [s for s in self.sites if s not in out and self.public_key(s).exists()]

    def awaited(self) -> list[str]:
        """Sites that have not sent a request yet."""
        return [s for s in self.sites if not self.public_key(s).exists()]

    def _check_known(self, site: str) -> None:
        if site not in self.sites:
            raise FolderError(f"no site {site!r}{suggest(site, self.sites)} (sites: {', '.join(self.sites)})")

    def revoke(self, site: str) -> None:
        """Take a site's permission away."""
        self._check_known(site)
        write_atomic(self.state / "revoked.json", json.dumps(sorted({*self.revoked(), site})).encode())

    def reinstate(self, site: str) -> None:
        """Give a site's permission back."""
        self._check_known(site)
        write_atomic(self.state / "revoked.json", json.dumps(sorted({*self.revoked()} - {site})).encode())

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
        self.coordinator = self.path / "coordinator.pub"
        self.state = self.path / "state"
        for path in (self.authority, self.key, self.coordinator):
            if not path.is_file():
                hint = "; ask the coordinator for it (its command is: federation rotate)" * (path == self.coordinator)
                raise FolderError(f"{path}: missing from the enrolment folder{hint}")

    @property
    def peers(self) -> dict[str, Path]:
        """The other sites' public keys."""
        return {p.stem: p for p in sorted((self.path / "peers").glob("*.pub"))}


def check_names(sites: Sequence[str]) -> None:
    """Names that can be files and addresses, all different."""
    for name in sites:
        if not _NAME.fullmatch(name):
            raise FolderError(f"site {name!r}: use small letters, digits, - and _ (at most 63)")
    if len(set(sites)) < len(sites) or not sites:
        raise FolderError("the sites must have different names, and there must be at least one")


def _write_federation(path: Path, host: str, port: int, sites: Sequence[str]) -> None:
    content = {"federation": {"host": host, "port": port, "sites": list(sites)}}
    write_atomic(path / "federation.toml", tomli_w.dumps(content).encode())


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
