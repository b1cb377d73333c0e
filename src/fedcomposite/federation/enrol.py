"""From a site's folder to a site: its data, loaded and checked here, its limits and its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedcomposite.data import Silos
from fedcomposite.data.svmlight import is_svmlight
from fedcomposite.federation.folder import FolderError, SiteFolder
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
    if path is None or (wanted is None and not is_svmlight([path])):
        missing = "--data FILE" if path is None else "--target COLUMN"
        raise FolderError(f"{folder.path / 'site.toml'}: [data] is not complete; fill it in or give {missing}")
    silos = Silos.from_files(
        path,
        target=wanted,
        names=[folder.name],
        test=folder.path / section.test if section.test else None,
        **section.model_dump(exclude={"file", "target", "test", "classes"}),
    )
    return Site(folder.name, silos, StateStore(folder.state), folder.file.limits, log, section.classes)
