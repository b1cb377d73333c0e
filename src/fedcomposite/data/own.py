"""Your own data by name, for experiment files: a saved folder, and folders of images."""

from __future__ import annotations

from typing import Any

from fedcomposite.data.silos import Silos

NAMES = ("mapped", "image_folders")


def mapped(*, folder: str, in_memory: bool = False, verify: bool = False) -> Silos:
    """Silos that ``silos.save(folder)`` wrote; features stay in their files unless ``in_memory``."""
    silos = Silos.open(folder, verify=verify)
    return silos.dense() if in_memory else silos


def image_folders(
    *,
    folders: tuple[str, ...],
    test: str | None = None,
    size: tuple[int, ...] | None = None,
    channels: int | None = None,
) -> Silos:
    """PNG and JPEG images as bytes: a folder per client, with a folder per class in it."""
    options: dict[str, Any] = {"test": test, "size": size, "channels": channels}
    return Silos.from_folders(folders, **options)
