"""Samples that stay in a file: rows of a memory map, read when they are asked for."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite.data.faults import DataError

Array = npt.NDArray[Any]

_PIECE = 1 << 24  # bytes that are read at a time where all of them are looked at


@dataclass(frozen=True, eq=False)
class MappedRows:
    """Rows of the array in an ``.npy`` file; choosing some of them reads nothing, :meth:`read` does."""

    path: Path
    sha256: str
    """Of the array's bytes, as it was written."""
    chosen: npt.NDArray[np.int64] | None = None
    """The rows of the file, in this order; all of them if left out."""

    @functools.cached_property
    def _file(self) -> tuple[Array, tuple[int, ...]]:
        stamp = _stamp(self.path)
        return np.load(self.path, mmap_mode="r", allow_pickle=False), stamp

    @property
    def opened(self) -> Array:
        """The file that was at the path when it was first asked for."""
        return self._file[0]

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "_file"}  # pickled, a map would be its content

    def __len__(self) -> int:
        return len(self.opened) if self.chosen is None else len(self.chosen)

    @property
    def shape(self) -> tuple[int, ...]:
        """Samples, then the shape of each."""
        return (len(self), *self.opened.shape[1:])

    @property
    def ndim(self) -> int:
        """Axes, that of the samples included."""
        return self.opened.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored numbers."""
        return torch.from_numpy(np.empty(0, self.opened.dtype)).dtype

    @property
    def row_bytes(self) -> int:
        """Size of a sample."""
        return int(np.prod(self.opened.shape[1:], dtype=np.int64)) * self.opened.dtype.itemsize

    def __getitem__(self, rows: slice | Tensor | Array) -> MappedRows:
        """Some rows, still in the file."""
        if isinstance(rows, slice):
            at = np.arange(*rows.indices(len(self)))
        else:
            at = np.asarray(rows.cpu() if isinstance(rows, Tensor) else rows, np.int64)
        at = np.where(at < 0, at + len(self), at)
        if at.ndim != 1:
            raise IndexError("samples in a file are chosen by a slice or a list of rows; read() gives them")
        if len(at) and not 0 <= at.min() <= at.max() < len(self):
            raise IndexError(f"rows {at.min()} to {at.max()} of {len(self)}")
        found = replace(self, chosen=at if self.chosen is None else self.chosen[at])
        vars(found)["_file"] = self._file  # whatever is at the path by now
        return found

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        """The rows in memory, for NumPy."""
        return self.read().numpy().astype(dtype or self.opened.dtype, copy=False)

    def read(self, out: Tensor | None = None) -> Tensor:
        """The rows in memory, in ``out`` if it is given."""
        out = torch.empty(self.shape, dtype=self.dtype) if out is None else out
        self._check_unchanged()
        if self.chosen is None:
            out.numpy()[...] = self.opened
        else:  # clipping changes no row, and spares a second buffer
            np.take(self.opened, self.chosen, axis=0, out=out.numpy(), mode="clip")
        return out

    def _check_unchanged(self) -> None:
        """Refuse a file that was written to: its numbers may be others, and one that is cut off ends the process."""
        was = self._file[1]
        try:
            now = _stamp(self.path)
        except OSError:
            return  # removed or out of reach; the map still has it
        if now[:2] == was[:2] and now != was:
            raise DataError(f"{self.path} was changed while it was in use; open a folder that nobody writes to")

    def identity(self) -> str:
        """A text that tells these rows from others; that of a tensor in memory where it is all of them."""
        if self.chosen is None:
            return f"tensor {self.dtype} {self.shape} {self.sha256}"
        rows = hashlib.sha256(np.ascontiguousarray(self.chosen).tobytes()).hexdigest()
        return f"rows {rows} of {self.dtype} {self.opened.shape} {self.sha256}"

    def verify(self) -> None:
        """Read the whole file and refuse it if it is not what was written."""
        digest = hashlib.sha256()
        per = max(1, _PIECE // max(1, self.row_bytes))
        for a in range(0, len(self.opened), per):
            digest.update(np.ascontiguousarray(self.opened[a : a + per]).tobytes())
        if digest.hexdigest() != self.sha256:
            raise DataError(f"{self.path}: its content is not what was written; write the folder again")


def _stamp(path: Path) -> tuple[int, ...]:
    """Which file it is, and when and how long it was written."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def in_memory(rows: Tensor | MappedRows) -> Tensor:
    """The rows as a tensor."""
    return rows.read() if isinstance(rows, MappedRows) else rows
