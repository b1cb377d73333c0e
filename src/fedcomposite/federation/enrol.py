"""From a site's folder to a site: its data, loaded and checked here, its limits and its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedcomposite.data import Silos
from fedcomposite.federation import pki
from fedcomposite.federation.approval import Approvals
from fedcomposite.federation.audit import Audit
from fedcomposite.federation.folder import FolderError, SiteFolder, check_names
from fedcomposite.federation.secure import Vault
from fedcomposite.federation.site import Site
from fedcomposite.federation.states import StateStore


def open_site(
    folder: SiteFolder,
    data: Path | None = None,
    target: str | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Site:
    """Load the data that site.toml, or the caller, names; paths in site.toml are relative to it."""
    section = folder.file.data
    path = data or (folder.path / section.file if section.file else None)
    wanted = target or section.target
    if path is None or wanted is None:
        missing = "--data FILE" if path is None else "--target COLUMN"
        raise FolderError(f"{folder.path / 'site.toml'}: [data] is not complete; fill it in or give {missing}")
    silos = Silos.from_files(
        path,
        target=wanted,
        names=[folder.name],
        test=folder.path / section.test if section.test else None,
        **section.model_dump(exclude={"file", "target", "test", "classes"}),
    )
    limits, key = folder.file.limits, pki.read_site_key(folder.key)
    peers = {name: pki.read_public(path) for name, path in folder.peers.items()}
    return Site(
        folder.name,
        silos,
        StateStore(folder.state),
        limits,
        log,
        section.classes,
        vault=Vault(folder.name, limits, key, peers),
        approvals=Approvals(folder.state, folder.file.approval),
        audit=Audit(folder.state, key, pki.fingerprint(pki.read_public(folder.coordinator))),
    )


def make_request(path: Path, name: str) -> Path:
    """At the site: a key that never leaves it, and the request by which a coordinator admits its owner."""
    check_names([name])
    if not (path / "site.key").exists():
        pki.make_site_key(path / "site.key")
    made = path / f"{name}.csr"
    made.write_bytes(pki.request(path / "site.key", name))
    return made
