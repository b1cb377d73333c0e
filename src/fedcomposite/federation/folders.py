"""Folders: the federation's at the coordinator; what each site receives is read in ``site_folders``.

====================  ===============================================================================================
federation.toml       engine, host, port and the sites in their order (site i is client i)
orders.key            the key with which orders are signed
keys/NAME.pub         the sites' public keys
sites/NAME/           an enrolment folder, to be carried to the site
flare/                NVIDIA FLARE's project file, its authority and certificates, the server's and the
                      administrator's kits
flower/               Flower's certificates, where that is the engine
state/                sockets, logs and stores of the engine, who is revoked, jobs
runs/                 run folders
====================  ===============================================================================================

An enrolment folder has ``coordinator.pub``, ``site.toml``, a README, in ``peers/`` the public keys of the other sites,
and what the engine needs: ``flare/``, FLARE's startup kit, or ``ca.crt`` of Flower's server. ``site.key`` is made at
the site, or here if that was asked for (and then to be deleted here); at the site ``state/`` is added.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import socket
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcomposite._faults import UserError, suggest
from fedcomposite.durable import write_atomic
from fedcomposite.federation.engines import nvflare_kits, pki
from fedcomposite.federation.engines.engine import check_installed
from fedcomposite.federation.templates import EXTRAS, README, SITE_TOML

EngineName = Literal["nvflare", "flower", "local"]
"""What carries orders: NVIDIA FLARE, Flower, or nothing but this machine."""
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
_NAME = re.compile("[a-z0-9][a-z0-9_-]{0,62}")


class FolderError(UserError):
    """A folder that cannot be used, and why."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Federation(_Section):
    engine: EngineName
    host: str
    port: int = Field(ge=1, le=65535)
    sites: list[str]


def read_toml(path: Path, model: type[BaseModel]) -> Any:
    """A folder's file, checked."""
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
        content: _FederationFile = read_toml(self.path / "federation.toml", _FederationFile)
        self.engine, self.host, self.port, self.sites = (
            content.federation.engine,
            content.federation.host,
            content.federation.port,
            content.federation.sites,
        )
        self.state, self.runs = self.path / "state", self.path / "runs"

    @classmethod
    def create(
        cls,
        path: str | Path,
        host: str,
        port: int,
        sites: Sequence[str],
        keys: bool = True,
        engine: EngineName = "nvflare",
    ) -> FederationFolder:
        """Make what the engine needs, and with ``keys`` the sites' keys in their folders; port 0 takes a free one.

        Without, every site makes its own and is admitted by its request.
        """
        path = Path(path)
        check_names(sites)
        if path.exists() and any(path.iterdir()):
            raise FolderError(f"{path}: already holds files")
        check_installed(engine)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        port = port or free_port()
        pki.make_order_key(path / "orders.key")
        (path / "keys").mkdir()
        _write_federation(path, engine, host, port, sites)
        made = cls(path)
        made.state.mkdir(mode=0o700)
        if engine == "flower":
            pki.make_authority(path / "flower")
            pki.make_server_certificate(path / "flower", path / "flower", host)
        for name in sites if keys else []:
            made._enrol(name)
        made.equip()
        return made

    def equip(self, fresh: bool = False) -> list[Path]:
        """Give every party that has none its part of the engine; ``fresh`` gives all of them new certificates.

        Returns the folders that are to be carried to sites.
        """
        if self.engine != "nvflare":
            return []
        place = self.path / "flare"
        nvflare_kits.write_project(place, self.host, self.port, self.sites)
        if fresh:
            nvflare_kits.forget_certificates(place)
        kits, carried = nvflare_kits.provision(place), []
        for owner, target in {nvflare_kits.SERVER: place / "server", nvflare_kits.ADMIN: place / "admin"}.items():
            nvflare_kits.carry(kits[owner], target)
        nvflare_kits.harden(place / "server", self.state / "flare")
        for name in self.sites:
            target = self.path / "sites" / name / "flare"
            if self.public_key(name).exists() and (fresh or not target.exists()):
                nvflare_kits.carry(kits[name], target)
                nvflare_kits.harden(target)
                carried.append(target)
        shutil.rmtree(kits[nvflare_kits.SERVER].parent)
        return carried

    def _enrol(self, name: str, public: bytes | None = None) -> Path:
        """Write a site's enrolment folder, with a new key unless the site has one; what is in site.toml stays."""
        folder, coordinator = self.path / "sites" / name, pki.public_part(self.order_key)
        (folder / "site.key").unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        if public is None:
            public = pki.make_site_key(folder / "site.key")
        (folder / "coordinator.pub").write_bytes(coordinator)
        if self.engine == "flower":
            (folder / "ca.crt").write_bytes((self.path / "flower" / "ca.crt").read_bytes())
        words = {"name": name, "address": self.reached, "engine": self.engine, "extra": EXTRAS[self.engine]}
        if not (folder / "site.toml").exists():
            (folder / "site.toml").write_text(SITE_TOML.format(**words), encoding="utf-8")
        (folder / "README.md").write_text(README.format(**words), encoding="utf-8")
        write_atomic(self.public_key(name), public + b"\n")
        self._introduce(name)
        return folder

    @property
    def reached(self) -> str:
        """Where sites reach the coordinator: an address, or a folder of this machine."""
        if self.engine == "local":
            return str(self.state / "sites")
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

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
            _write_federation(self.path, self.engine, self.host, self.port, self.sites)
        self.equip()
        return folder

    def add_site(self, name: str) -> Path:
        """A new site, the last in the order of the clients; returns its enrolment folder."""
        check_names([*self.sites, name])
        folder = self._enrol(name)
        self.sites = [*self.sites, name]
        _write_federation(self.path, self.engine, self.host, self.port, self.sites)
        self.equip()
        return folder

    def rekey(self, name: str) -> Path:
        """A new key for a site; the old one counts no more. Returns the enrolment folder."""
        self._check_known(name)
        return self._enrol(name)

    @property
    def order_key(self) -> Path:
        """The key with which orders are signed."""
        return self.path / "orders.key"

    def rotate(self) -> list[Path]:
        """A new key for orders; returns the sites' new ``coordinator.pub``, to be carried to them."""
        fresh = self.path / "orders.new"
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
        host = self.host if _is_loopback(self.host) else "127.0.0.1"
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def answers(self) -> bool:
        """Whether somebody answers at the engine's port, seen from this machine."""
        host, port = self.address.rsplit(":", 1)
        try:
            socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
        except OSError:
            return False
        return True

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


def check_names(sites: Sequence[str]) -> None:
    """Names that can be files and addresses, all different."""
    for name in sites:
        if not _NAME.fullmatch(name):
            raise FolderError(f"site {name!r}: use small letters, digits, - and _ (at most 63)")
    if len(set(sites)) < len(sites) or not sites:
        raise FolderError("the sites must have different names, and there must be at least one")


def _write_federation(path: Path, engine: EngineName, host: str, port: int, sites: Sequence[str]) -> None:
    content = {"federation": {"engine": engine, "host": host, "port": port, "sites": list(sites)}}
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
