"""Images as bytes: pictures of Pillow, and folders with a folder of them per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedcomposite.data.faults import DataError, Fault

SUFFIXES = (".png", ".jpg", ".jpeg")
_MODES = {1: "L", 3: "RGB"}
_IGNORED = ("thumbs.db", "desktop.ini")  # beside names that begin with a dot

Channels = Literal[1, 3]


def is_picture(value: Any) -> bool:
    """Whether this is an image of Pillow, without importing it."""
    return type(value).__module__.startswith("PIL.") and hasattr(value, "convert")


def picture(image: Any, size: tuple[int, int] | None = None, channels: Channels | None = None) -> npt.NDArray[np.uint8]:
    """An image as bytes ``(channels, height, width)``.

    Without ``channels`` a grey one has 1 and a colour one 3; what would lose something is refused.
    """
    if channels is None and image.mode not in _MODES.values():
        raise ValueError(f"an image of mode {image.mode!r}, neither 'L' nor 'RGB'; say channels=1 or 3 to convert it")
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"an image of mode {image.mode!r} has more than 8 bits; give numbers as arrays")
    if channels is not None:
        image = image.convert(_MODES[channels])
    if size is not None:
        image = image.resize((size[1], size[0]), resample=2)  # bilinear, over all pixels that are covered
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


class ImageFolder:
    """The images of a folder with a folder per class, ``(bytes, number of the class)``."""

    def __init__(
        self, path: Path, classes: Sequence[str], size: tuple[int, int] | None, channels: Channels | None
    ) -> None:
        self._size, self._channels = size, channels
        self.files = [(file, n) for n, name in enumerate(classes) for file in _inside(path / name)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[npt.NDArray[np.uint8], int]:
        from PIL import Image

        path, number = self.files[i]
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            return picture(image, self._size, self._channels), number

    def label(self, i: int) -> str:
        """What item i is called."""
        path = self.files[i][0]
        return f"item {i} ({path.parent.name}/{path.name})"


def _inside(folder: Path) -> list[Path]:
    """The files of a class, in the order of their names."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.name.lower() not in _IGNORED)


def class_names(folders: Sequence[str | Path]) -> tuple[str, ...]:
    """The classes of some folders of images, as they are numbered: by name, or by value where all are whole numbers.

    A class that only some of the folders have counts in all of them.
    """
    found = {p.name for folder in map(Path, folders) for p in _subfolders(folder)}
    return tuple(sorted(found, key=int) if all(name.isdecimal() for name in found) else sorted(found))


def _subfolders(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")] if folder.is_dir() else []


def check_size(size: Any, channels: Any) -> None:
    """Refuse what is no size of an image, and no number of channels."""
    pair = isinstance(size, tuple | list) and len(size) == 2
    if size is not None and not (pair and all(type(n) is int and n > 0 for n in size)):
        raise DataError(f"size = {size!r}, must be (height, width) in pixels")
    if channels not in (None, 1, 3):
        raise DataError(f"channels = {channels!r}, must be 1 (grey) or 3 (colour)")


def folder_faults(path: Path, who: str) -> list[Fault]:
    """What is wrong with a folder of images, as far as names tell."""
    if not path.is_dir():
        return [Fault(who, f"{path} is no folder", "give folders that have a folder of images per class")]
    classes = _subfolders(path)
    if not classes:
        return [Fault(who, f"{path} has no folders in it", "put the images of each class into a folder of its own")]
    other = [p for c in classes for p in _inside(c) if p.suffix.lower() not in SUFFIXES or not p.is_file()]
    if other:
        shown = f"{other[0].parent.name}/{other[0].name}"
        return [Fault(who, f"{len(other)} file(s) are no PNG or JPEG, such as {shown}", "move them", count=len(other))]
    return []
