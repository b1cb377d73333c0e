"""Samples of which most features are zero: compressed rows, never made dense.

Standardised rows are (a - mean) / sd of the stored ones a. The two vectors are kept beside the numbers and enter where
rows are multiplied, as a scaling and a correction of rank one, so that zeros stay unstored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import Tensor

from fedcomposite.data.cells import EXACT, spread_of
from fedcomposite.data.faults import DataError
from fedcomposite.data.mapped import MappedRows, in_memory

Array = npt.NDArray[Any]

_FLOATS = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}
_NARROW = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Samples as compressed rows: row i has ``values[starts[i]:starts[i+1]]`` in the columns ``indices[...]``.

    Columns rise within a row and no value is zero, so that the same samples have the same arrays.
    """

    values: Array  # float32 or float64
    indices: npt.NDArray[np.int32] | npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    width: int
    mean: npt.NDArray[np.float64] | None = None
    """Subtracted from every row, and ``sd`` divides it, in effect; both or none."""
    sd: npt.NDArray[np.float64] | None = None

    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:
        """Samples and features."""
        return len(self.starts) - 1, self.width

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return _FLOATS[self.values.dtype]

    @property
    def nonzeros(self) -> int:
        """Stored values."""
        return len(self.values)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, rows: slice | Tensor | Array) -> SparseRows:
        """Some rows; consecutive ones share memory with these."""
        if isinstance(rows, slice):
            first, last, step = rows.indices(len(self))
            if step == 1:
                a, b = int(self.starts[first]), int(self.starts[max(first, last)])
                starts = self.starts[first : max(first, last) + 1] - a
                return replace(self, values=self.values[a:b], indices=self.indices[a:b], starts=starts)
            rows = np.arange(first, last, step)
        at = np.asarray(rows, np.int64)
        taken, starts = gathered(self.starts, np.where(at < 0, at + len(self), at))
        return replace(self, values=self.values[taken], indices=self.indices[taken], starts=starts)

    def tensors(self) -> dict[str, Tensor]:
        """All arrays, by name."""
        found = {
            "values": self.values,
            "indices": self.indices,
            "starts": self.starts,
            "mean": self.mean,
            "sd": self.sd,
        }
        return {name: torch.from_numpy(array) for name, array in found.items() if array is not None}

    def csr(self) -> sparse.csr_array:
        """The stored numbers as scipy has them, without a copy."""
        starts = self.starts.astype(self.indices.dtype) if self.nonzeros <= _NARROW else self.starts
        return sparse.csr_array((self.values, self.indices, starts), shape=self.shape)

    def __matmul__(self, w: Tensor) -> Tensor:
        """Products of the rows with a vector or the columns of a matrix."""
        if self.mean is None or self.sd is None:
            return torch.from_numpy(self.csr() @ w.numpy()).to(w)
        mean, sd = torch.from_numpy(self.mean), torch.from_numpy(self.sd)
        v = (w.double().t() / sd).t()
        return (torch.from_numpy(self.csr() @ v.numpy()) - mean @ v).to(w)

    def columns(self, order: Sequence[int]) -> SparseRows:
        """The features in another order."""
        place = np.empty(self.width, self.indices.dtype)
        place[np.asarray(order)] = np.arange(self.width)
        parts = [None if v is None else v[np.asarray(order)] for v in (self.mean, self.sd)]
        moved = self.csr()
        moved = sparse.csr_array((moved.data.copy(), place[moved.indices], moved.indptr), shape=self.shape)
        moved.sort_indices()
        return replace(self, values=moved.data, indices=moved.indices, mean=parts[0], sd=parts[1])

    def dense(self) -> Tensor:
        """The rows as a tensor; standardised ones in float64."""
        plain = torch.from_numpy(self.csr().toarray())
        if self.mean is None or self.sd is None:
            return plain
        return (plain.double() - torch.from_numpy(self.mean)) / torch.from_numpy(self.sd)

    def standardized(self, by: SparseRows) -> SparseRows:
        """These rows with every feature scaled to mean 0 and variance 1 of ``by``; one that is constant there stays."""
        count, width = by.shape
        values = by.values.astype(np.float64)
        filled = np.bincount(by.indices, minlength=width)
        mean = np.bincount(by.indices, weights=values, minlength=width) / count
        away = (values - mean[by.indices]) ** 2
        square = np.bincount(by.indices, weights=away, minlength=width) + (count - filled) * mean**2
        sd = spread_of(mean, np.sqrt(square / count))
        varies = sd > 0
        before = (np.zeros(width), np.ones(width)) if by.mean is None or by.sd is None else (by.mean, by.sd)
        return replace(self, mean=np.where(varies, mean, before[0]), sd=np.where(varies, sd, before[1]))


Features = Tensor | SparseRows | MappedRows
"""Samples: a tensor, compressed rows, or rows of a file."""


def gathered(starts: Array, rows: Array) -> tuple[Array, Array]:
    """The places of the stored values of some rows, one row after another, and where each row starts among them."""
    counts = starts[rows + 1] - starts[rows]
    ends = np.cumsum(counts)
    new = np.concatenate([[0], ends])
    return np.arange(new[-1]) + np.repeat(starts[rows] - (ends - counts), counts), new


def is_sparse(values: Any) -> bool:
    """Whether these are a matrix of scipy.sparse, a sparse tensor, or rows as above."""
    return (
        isinstance(values, SparseRows)
        or bool(sparse.issparse(values))
        or (isinstance(values, Tensor) and values.layout != torch.strided)
    )


def dense(features: Features) -> Tensor:
    """The samples as a tensor."""
    return features.dense() if isinstance(features, SparseRows) else in_memory(features)


def columns(features: Features, order: Sequence[int]) -> Features:
    """The samples with their features in another order."""
    return features.columns(order) if isinstance(features, SparseRows) else tensors_only(features, "an order")[:, order]


def tensors_only(features: Features, what: str) -> Tensor:
    """The samples, where they are a tensor; ``what`` needs one."""
    rows = not_sparse(features, what)
    if isinstance(rows, MappedRows):
        raise DataError(f"{what} needs samples in memory, these are in a file; read them with silos.dense()")
    return rows


def not_sparse(features: Features, what: str) -> Tensor | MappedRows:
    """The samples, where they are a tensor or rows of a file; ``what`` needs one of these."""
    if isinstance(features, SparseRows):
        raise DataError(f"{what} needs dense features, these are sparse; make them dense with silos.dense()")
    return features


def sparse_rows(values: Any, what: str) -> SparseRows:
    """Rows of a sparse matrix, checked: real, finite, indices within the width; duplicates are added up."""
    if isinstance(values, SparseRows):
        return values
    matrix = _from_torch(values, what) if isinstance(values, Tensor) else values
    if matrix.ndim != 2:
        raise DataError(f"{what} have shape {matrix.shape}, expected (samples, features)")
    try:
        made = sparse.csr_array(matrix, copy=True)
        made.check_format(full_check=True)
    except (ValueError, TypeError) as error:
        raise DataError(f"{what}: not a valid sparse matrix ({str(error).splitlines()[0]}); build it again") from None
    made.data = _as_floats(made.data, what)
    made.sum_duplicates()
    if not np.isfinite(made.data).all():
        bad = np.flatnonzero(~np.isfinite(made.data))
        row = int(np.searchsorted(made.indptr, bad[0], side="right")) - 1
        raise DataError(
            f"{what}: {len(bad)} value(s) are NaN or infinite, the first in row {row}, column {made.indices[bad[0]]}; "
            "impute or drop them before the run"
        )
    made.eliminate_zeros()
    narrow = np.int32 if made.shape[1] <= _NARROW else np.int64
    columns: Any = made.indices.astype(narrow, copy=False)
    return SparseRows(made.data, columns, made.indptr.astype(np.int64), made.shape[1])


def joined(parts: Sequence[SparseRows]) -> SparseRows:
    """The rows of several, one after another, with the wider type of values."""
    scales = [np.concatenate([part.mean, part.sd]) for part in parts if part.mean is not None and part.sd is not None]
    if scales and (len(scales) < len(parts) or any(not np.array_equal(scales[0], other) for other in scales)):
        raise DataError("sparse rows that are standardised differently; put them together first: silos.standardize()")
    values = np.concatenate([part.values for part in parts])
    indices = np.concatenate([part.indices for part in parts])
    counts = np.concatenate([np.diff(part.starts) for part in parts])
    return replace(parts[0], values=values, indices=indices, starts=np.concatenate([[0], np.cumsum(counts)]))


def _from_torch(values: Tensor, what: str) -> Any:
    """A sparse tensor of any layout as scipy's compressed rows."""
    plain = values.detach().cpu()
    if plain.layout == torch.sparse_coo:
        plain = plain.coalesce()
        if plain.sparse_dim() != 2 or plain.dense_dim():
            raise DataError(f"{what} have shape {tuple(plain.shape)}, expected (samples, features)")
        at: Any = tuple(plain.indices().numpy())
        return sparse.coo_array((plain.values().numpy(), at), shape=(plain.shape[0], plain.shape[1]))
    if plain.ndim != 2:
        raise DataError(f"{what} have shape {tuple(plain.shape)}, expected (samples, features)")
    rows = plain.to_sparse_csr()
    parts = rows.values().numpy(), rows.col_indices().numpy(), rows.crow_indices().numpy()
    return sparse.csr_array(parts, shape=(rows.shape[0], rows.shape[1]))


def _as_floats(values: Array, what: str) -> Array:
    """Values as float32 or float64, whichever holds them; whole numbers as float64."""
    kind = values.dtype.kind
    if kind not in "biuf" or values.dtype.itemsize > 8:
        raise DataError(f"{what}: numbers of type {values.dtype} are not supported; cast them to float64")
    if kind in "iu" and values.dtype.itemsize == 8:
        large = values[(values > EXACT) | (values < -EXACT)] if kind == "i" else values[values > EXACT]
        lost = sum(int(float(v)) != int(v) for v in large)
        if lost:
            raise DataError(
                f"{what}: {lost} whole number(s) beyond 2^53 would lose digits as float64; "
                "drop the column if it is an identifier, or rescale it"
            )
    narrow = kind == "f" and values.dtype.itemsize <= 4
    return values.astype(np.float32 if narrow else np.float64, copy=False)
