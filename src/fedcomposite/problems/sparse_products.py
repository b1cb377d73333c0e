"""Products with sparse samples, for all clients at once, at a cost that grows with the stored values.

A client's design, its intercept's column of ones included, is R diag(scale) + 1 shift' with the stored rows R:
standardising scales and shifts, and an intercept is a shift of one more, empty column. So a product with it is one with
R and a correction of rank one.

scipy's compressed rows are the fastest products on a CPU both ways (torch's transposed one takes 40 times as long).
Clients with few values are put into one block-diagonal matrix, since a call takes longer than their product; others
share memory with the silos. Values stay in the type that they are stored in: float32 values times float64 vectors
are computed in float64.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import Tensor

from fedcomposite.data.sparse import SparseRows, gathered

Ints = npt.NDArray[np.int64]

_PACKED = 1 << 14  # values up to which clients share a matrix
_DENSE = 0.25  # share of nonzeros in chosen columns from which a dense product is faster


@dataclass(frozen=True, eq=False)
class Stack:
    """The designs of n clients, each padded to m rows; padded rows are zero."""

    parts: list[tuple[slice, Any, Any]]  # some clients, their block-diagonal rows, and the transpose
    shape: tuple[int, int, int]
    scale: Tensor | None  # (d,)
    shift: Tensor | None  # (d,)
    inside: Tensor | None = None  # (n, m), false on padding; None without any

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return torch.from_numpy(self.parts[0][1].data[:0]).dtype

    def margins(self, w: Tensor) -> Tensor:
        """``(n, d) -> (n, m)``, ``(n, d, C) -> (n, m, C)``."""
        n, m, _ = self.shape
        v = w if self.scale is None else w * _along(self.scale, w)
        z = w.new_empty(n, m, *w.shape[2:])
        for who, rows, _ in self.parts:
            z[who] = torch.from_numpy(rows @ _flat(v[who])).view(z[who].shape)
        if self.shift is not None:
            z += torch.tensordot(w, self.shift, dims=([1], [0])).unsqueeze(1)
        if self.inside is not None:
            z.masked_fill_(~_along_rows(self.inside, z), 0.0)
        return z

    def combine(self, r: Tensor) -> Tensor:
        """``(n, m) -> (n, d)``, ``(n, m, C) -> (n, d, C)``; r is zero on padding."""
        n, _, d = self.shape
        g = r.new_empty(n, d, *r.shape[2:])
        for who, _, columns in self.parts:
            g[who] = torch.from_numpy(columns @ _flat(r[who])).view(g[who].shape)
        if self.scale is not None:
            g *= _along(self.scale, g)
        if self.shift is not None:
            g += _along(self.shift, g) * r.sum(1, keepdim=True)
        return g

    def unbind(self) -> list[Stack]:
        """The clients one by one."""
        out = []
        for who, rows, _ in self.parts:
            for i in range(who.stop - who.start):
                inside = None if self.inside is None else self.inside[who.start + i][None]
                one = _part(slice(0, 1), self._client(rows, i))
                out.append(Stack([one], (1, *self.shape[1:]), self.scale, self.shift, inside))
        return out

    def _client(self, rows: Any, i: int) -> Any:
        _, m, d = self.shape
        return rows if rows.shape == (m, d) else rows[i * m : (i + 1) * m, i * d : (i + 1) * d]

    def squares(self) -> Tensor:
        """||a||^2 of every row, ``(n, m)``; not for padded ones."""
        n, m, d = self.shape
        out = torch.empty(n, m, dtype=torch.float64)
        scale = np.ones(d) if self.scale is None else self.scale.numpy()
        shift = np.zeros(d) if self.shift is None else self.shift.numpy()
        for who, rows, _ in self.parts:
            at = rows.indices % d
            moved = rows.data * scale[at]
            gain = sparse.csr_array((moved * (moved + 2 * shift[at]), rows.indices, rows.indptr), shape=rows.shape)
            out[who] = torch.from_numpy(np.asarray(gain.sum(1)).reshape(-1, m))
        return (out + float(shift @ shift)).clamp_min_(0)

    def hessians(self, second: Tensor, weight: Tensor, at: Tensor, outputs: int) -> Tensor:
        """``(n, k, k)``: see :func:`fedcomposite.problems.products.hessians`."""
        n, m, _ = self.shape
        feature, output = (at // outputs).numpy(), (at % outputs).numpy()
        bent = second * weight.view(n, m, *(1,) * (second.ndim - 2))
        out = second.new_empty(n, len(at), len(at))
        groups = [np.flatnonzero(output == one) for one in range(outputs)]
        i = 0
        for who, rows, _ in self.parts:
            for j in range(who.stop - who.start):
                chosen = self._client(rows, j)[:, feature]
                for (a, left), (b, right) in itertools.product(enumerate(groups), repeat=2):
                    if a <= b and len(left) and len(right):
                        D = bent[i] if outputs == 1 else bent[i, :, a, b]
                        block = self._block(chosen, left, right, feature, D.numpy())
                        out[i, left[:, None], right] = block
                        out[i, right[:, None], left] = block.t()
                i += 1
        return out

    def columns(self, at: Tensor) -> Tensor:
        """Some columns as a dense tensor, ``(n, m, k)``."""
        n, m, _ = self.shape
        made = torch.empty(n, m, len(at), dtype=torch.float64)
        for who, rows, _ in self.parts:
            for i in range(who.start, who.stop):
                made[i] = torch.from_numpy(self._client(rows, i - who.start)[:, at.numpy()].toarray())
        if self.scale is not None:
            made *= self.scale[at]
        if self.shift is not None:
            made += self.shift[at]
        return made if self.inside is None else made * self.inside.unsqueeze(2)

    def _block(self, chosen: Any, left: Ints, right: Ints, feature: Ints, bent: Any) -> Tensor:
        """A_l' D A_r of two lists of columns of one client."""
        whole = len(left) == chosen.shape[1]
        Z, Y = (chosen, chosen) if whole else (chosen[:, left], chosen[:, right])
        product = _gram(Z, Y, bent)
        H = torch.from_numpy(product).to(torch.from_numpy(bent))
        sums = [torch.from_numpy(np.asarray(V.T @ bent)) for V in (Z, Y)]
        places = [torch.from_numpy(feature[c]) for c in (left, right)]
        if self.scale is not None:
            scales = [self.scale[p] for p in places]
            H = H * scales[0].unsqueeze(1) * scales[1]
            sums = [s * c for s, c in zip(sums, scales, strict=True)]
        if self.shift is not None:
            a, b = (self.shift[p] for p in places)
            H = H + torch.outer(sums[0], b) + torch.outer(a, sums[1]) + float(bent.sum()) * torch.outer(a, b)
        return H

    def grams(self, weight: Tensor) -> Tensor:
        """The smaller of X' W X and W^(1/2) X X' W^(1/2), of each client, ``(n, k, k)`` in float64."""
        n, m, d = self.shape
        if d <= m:
            ones = torch.ones(n, m, dtype=torch.float64)
            return self.hessians(ones, weight.double(), torch.arange(d), 1)
        out = torch.empty(n, m, m, dtype=torch.float64)
        root = weight.double().sqrt()
        for i, one in enumerate(self.unbind()):
            rows = one.parts[0][1].astype(np.float64)
            if one.scale is not None:
                rows = sparse.csr_array(
                    (rows.data * one.scale.numpy()[rows.indices], rows.indices, rows.indptr), rows.shape
                )
            K = torch.from_numpy((rows @ rows.T).toarray())
            if one.shift is not None:
                shift = one.shift.double()
                along = torch.from_numpy(rows @ shift.numpy())
                K = K + along.unsqueeze(1) + along + float(shift @ shift)
            out[i] = K * root[i].unsqueeze(1) * root[i]  # padding has weight zero
        return out


class Design:
    """All clients' rows on a CPU in one type of vectors; stacks are cut from it."""

    def __init__(self, rows: SparseRows, dtype: torch.dtype, intercept: bool) -> None:
        narrow = dtype == torch.float32 and rows.values.dtype == np.float64
        self.rows = (
            SparseRows(rows.values.astype(np.float32), rows.indices, rows.starts, rows.width) if narrow else rows
        )
        self.width = d = rows.width + intercept
        self.shape = len(rows), d
        self.scale, self.shift = _correction(rows, dtype, intercept)
        whole = _view(self.rows, 0, len(rows), len(rows), d)
        self.pooled = self._stack([_part(slice(0, 1), whole)], (1, len(rows), d))

    def _stack(self, parts: list[tuple[slice, Any, Any]], shape: tuple[int, int, int], inside: Any = None) -> Stack:
        padded = inside is not None and self.shift is not None and not bool(inside.all())
        return Stack(parts, shape, self.scale, self.shift, torch.from_numpy(inside) if padded else None)

    def __matmul__(self, w: Tensor) -> Tensor:
        return self.pooled.margins(w[None])[0]

    def combine(self, r: Tensor) -> Tensor:
        """X' r."""
        return self.pooled.combine(r[None])[0]

    def take(self, rows: Tensor) -> Stack:
        """The rows of minibatches, ``(n, b)``."""
        n, b = rows.shape
        made = _packed(self.rows, rows.numpy(), None, self.width)
        return self._stack([_part(slice(0, n), made)], (n, b, self.width))

    def blocks(self, first: Ints, sizes: Ints) -> Stack:
        """Clients whose samples start at ``first``, padded to the longest."""
        n, longest = len(first), int(sizes.max())
        starts = self.rows.starts
        counts = starts[first + sizes] - starts[first]
        inside = np.arange(longest)[None, :] < sizes[:, None]
        parts, a = [], 0
        while a < n:
            b = a + 1
            while b < n and counts[a : b + 1].sum() <= _PACKED:
                b += 1
            if b == a + 1:
                made = _view(self.rows, int(first[a]), int(sizes[a]), longest, self.width)
            else:
                places = first[a:b, None] + np.where(inside[a:b], np.arange(longest), 0)
                made = _packed(self.rows, places, inside[a:b], self.width)
            parts.append(_part(slice(a, b), made))
            a = b
        return self._stack(parts, (n, longest, self.width), inside)


def _correction(rows: SparseRows, dtype: torch.dtype, intercept: bool) -> tuple[Tensor | None, Tensor | None]:
    """Scale and shift of the columns."""
    if rows.mean is None or rows.sd is None:
        if not intercept:
            return None, None
        scale, shift = None, np.zeros(rows.width)
    else:
        scale, shift = 1 / rows.sd, -rows.mean / rows.sd
    if intercept:
        scale, shift = None if scale is None else np.append(scale, 0.0), np.append(shift, 1.0)
    return None if scale is None else torch.from_numpy(scale).to(dtype), torch.from_numpy(shift).to(dtype)


def _part(who: slice, rows: Any) -> tuple[slice, Any, Any]:
    return who, rows, rows.T


def _view(rows: SparseRows, first: int, size: int, longest: int, width: int) -> Any:
    """Consecutive rows, padded to ``longest``: values and columns are not copied."""
    a, b = int(rows.starts[first]), int(rows.starts[first + size])
    kind = rows.indices.dtype if b - a <= np.iinfo(rows.indices.dtype).max else np.dtype(np.int64)
    starts = np.full(longest + 1, b - a, kind)
    starts[: size + 1] = rows.starts[first : first + size + 1] - a
    return sparse.csr_array((rows.values[a:b], rows.indices[a:b], starts), shape=(longest, width))


def _packed(rows: SparseRows, places: Ints, inside: Any, width: int) -> Any:
    """The rows ``(n, m)`` as one block-diagonal matrix, those that are not inside being empty."""
    n, m = places.shape
    taken, starts = gathered(rows.starts, places.ravel())
    if inside is not None and not inside.all():
        counts = np.diff(starts)
        taken = taken[np.repeat(inside.ravel(), counts)]
        starts = np.concatenate([[0], np.cumsum(np.where(inside.ravel(), counts, 0))])
    kind = np.int32 if max(n * width, len(taken)) <= np.iinfo(np.int32).max else np.int64
    indices: npt.NDArray[Any] = rows.indices[taken].astype(kind)
    indices += np.repeat(np.arange(n) * width, np.diff(starts[::m])).astype(kind)
    return sparse.csr_array((rows.values[taken], indices, starts.astype(kind)), shape=(n * m, n * width))


def _gram(Z: Any, Y: Any, bent: Any) -> Any:
    """Z' diag(bent) Y as a dense array."""
    if Z.nnz > _DENSE * Z.shape[0] * Z.shape[1]:
        return Z.toarray().T.astype(bent.dtype) @ (Y.toarray() * bent[:, None])
    weighed = sparse.csr_array((Y.data * np.repeat(bent, np.diff(Y.indptr)), Y.indices, Y.indptr), shape=Y.shape)
    return (Z.T @ weighed).toarray()


def _flat(v: Tensor) -> Any:
    """``(n, d)`` as a vector, ``(n, d, C)`` as a matrix of C columns."""
    return v.reshape(-1, *v.shape[2:]).numpy()


def _along(vector: Tensor, like: Tensor) -> Tensor:
    """A vector of features for the second axis of ``like``."""
    return vector.view(-1, *(1,) * (like.ndim - 2))


def _along_rows(inside: Tensor, like: Tensor) -> Tensor:
    return inside.view(*inside.shape, *(1,) * (like.ndim - 2))
