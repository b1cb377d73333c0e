"""From a site's folder to a site: its data, loaded and checked here, its limits and its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedcomposite._validation import suggest
from fedcomposite.data import Silos
from fedcomposite.data.client_files import is_svmlight
from fedcomposite.data.databases import StoredTable, placed
from fedcomposite.data.sparse import Features, tensors_only
from fedcomposite.data.steps import Local, Unit
from fedcomposite.federation.engines import pki
from fedcomposite.federation.folders import FolderError, check_names
from fedcomposite.federation.secure.keys import MaskKeys
from fedcomposite.federation.site.approval import Approvals
from fedcomposite.federation.site.audit import Audit
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.site import Site
from fedcomposite.federation.site.table_files import Newcomers, TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.federation.site_folders import SiteFolder

_WRITING = ("separator", "decimal", "encoding", "thousands")
_UNPREPARED = ("features", "test", "time", "entry", "strata")
"""What is for samples, not for tables."""
_REMEDIES = {"test": '; patients for `federation predict` are `new = "FILE"`'}


def open_site(
    folder: SiteFolder,
    data: Path | None = None,
    target: str | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Site:
    """Load the data that site.toml, or the caller, names; paths in site.toml are relative to it."""
    section = folder.file.data
    path = data or (folder.path / section.file if section.file else None)
    if (section.database is not None or section.query is not None) and data is None:
        return _of_database(folder, log)
    wanted = target or section.target
    if section.recipe and path is not None:
        source = _source(folder, path, _UNPREPARED)
        source.check()
        return TableSite(*_common(folder, log), source=source, newcomers=_newcomers(folder, source), **_own(folder))
    if path is None or (wanted is None and not is_svmlight([path])):
        missing = "--data FILE" if path is None else "--target COLUMN"
        raise FolderError(f"{folder.path / 'site.toml'}: [data] is not complete; fill it in or give {missing}")
    if section.recode:
        raise FolderError(f"{folder.path / 'site.toml'}: [data.recode] is for recipe = true; samples are numbers")
    silos = Silos.from_files(
        path,
        target=wanted,
        names=[folder.name],
        test=folder.path / section.test if section.test else None,
        **section.model_dump(
            exclude={"file", "target", "test", "new", "classes", "units", "recode", "recipe", "database", "query"}
        ),
    )
    silos = _in_units(silos, section.units, str(folder.path / "site.toml"))
    name, *rest = _common(folder, log)
    return Site(name, silos, *rest, newcomers=_newcomers(folder, _source(folder, path), wanted), **_own(folder))


def _of_database(folder: SiteFolder, log: Callable[[str], None]) -> Site:
    """A site whose table is the answer to a query."""
    section, where = folder.file.data, f"{folder.path / 'site.toml'}: [data]"
    if section.database is None or section.query is None or section.file is not None:
        raise FolderError(f"{where} database and query go together, in place of file")
    if not section.recipe:
        raise FolderError(f"{where} a database holds a table, which recipes prepare: set recipe = true")
    if said := [name for name in (*_WRITING, "missing") if getattr(section, name) not in (None, ["?"])]:
        raise FolderError(f"{where} {', '.join(said)}: for files only; say it in the query")
    source = _source(folder, StoredTable(placed(section.database, folder.path), section.query), _UNPREPARED)
    source.check()
    return TableSite(*_common(folder, log), source=source, newcomers=_newcomers(folder, source), **_own(folder))


def _common(folder: SiteFolder, log: Callable[[str], None]) -> tuple[Any, ...]:
    """What every site has, whatever its data are: name, memory, limits, log, classes."""
    return folder.name, StateStore(folder.books), folder.file.limits, log, folder.file.data.classes


def _own(folder: SiteFolder) -> dict[str, Any]:
    """What its people decide: keys, approvals, the audit log."""
    limits, key = folder.file.limits, pki.read_private(folder.key)
    peers = {name: pki.read_public(path) for name, path in folder.peers.items()}
    return {
        "vault": MaskKeys(folder.name, limits, key, peers),
        "approvals": Approvals(folder.state, folder.file.approval),
        "audit": Audit(folder.state, key, pki.fingerprint(pki.read_public(folder.coordinator))),
        "device": _device(folder),
    }


def _device(folder: SiteFolder) -> str:
    """Where rounds are computed; a device that this machine lacks is refused, never replaced."""
    device = folder.file.site.device
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FolderError(
            f"{folder.path / 'site.toml'}: [site] device = {device!r} cannot be used here: {reason}"
        ) from None
    return device


def _newcomers(folder: SiteFolder, source: TableFile, target: str | None = None) -> Newcomers:
    """The patients whom models may score here."""
    section = folder.file.data
    times = tuple(name for name in (section.time, section.entry) if name is not None)
    made = Newcomers(source, folder.path / "scored", target, section.offset, times)
    return made.at(folder.path / section.new) if section.new else made


def _source(folder: SiteFolder, path: Path | StoredTable, without: Sequence[str] = ()) -> TableFile:
    """A site's table, as site.toml says that it is written."""
    section, where = folder.file.data, folder.path / "site.toml"
    for option in without:
        if getattr(section, option) is not None:
            raise FolderError(f"{where}: [data] {option} does not go with recipe = true{_REMEDIES.get(option, '')}")
    style = section.model_dump(include={*_WRITING}, exclude_none=True)
    local = Local(rename=section.columns, recode=section.recode, units=section.units, drop=section.drop)
    return TableFile(folder.name, path, local, {**style, "missing": section.missing}, section.weight, section.offset)


def _in_units(silos: Silos, units: Mapping[str, Unit], where: str) -> Silos:
    """The samples in the units that all sites agreed on."""
    if not units:
        return silos
    for name in units:
        if name not in silos.feature_names:
            raise FolderError(f"{where}: [data.units] {name!r} is no feature{suggest(name, silos.feature_names)}")
    each = [units.get(name, Unit()) for name in silos.feature_names]
    scale, shift = (torch.tensor([getattr(u, part) for u in each], dtype=torch.float64) for part in ("scale", "shift"))

    def converted(X: Features) -> torch.Tensor:
        return tensors_only(X, "[data.units]") * scale + shift

    held: dict[str, Any] = {part: (converted(X), y) for part, (X, y) in silos.held_out.items()}
    return replace(silos, features=converted(silos.features), **held)


def make_request(path: Path, name: str) -> Path:
    """At the site: a key that never leaves it, and the request by which a coordinator admits its owner."""
    check_names([name])
    if not (path / "site.key").exists():
        pki.make_site_key(path / "site.key")
    made = path / f"{name}.csr"
    made.write_bytes(pki.request(path / "site.key", name))
    return made
