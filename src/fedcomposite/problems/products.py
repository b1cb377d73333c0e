"""The two products behind every linear model's gradient, for all clients at once: X_i w_i and X_i' r_i.

``torch.bmm`` with a single column is slow on a CPU, so the shape decides: large silos go through one matrix-vector
product each (a BLAS call that runs at memory speed and dwarfs the call's overhead), small ones are multiplied and
summed together, in chunks of clients whose temporaries stay in cache. The rule depends on the shape only, never on
a timing, so that a resumed run repeats every bit. ``benchmarks/simulator.py`` measures it.

Models with C outputs have a matrix per client in place of the vectors w_i and r_i; there ``torch.bmm`` is fast. Sparse
samples have products of their own, :mod:`fedcomposite.problems.sparse_products`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedcomposite.problems.sparse_products import Design, Stack

_LARGE = 1 << 14  # elements of one silo from which a matrix-vector product of its own pays
_CHUNK = 1 << 17  # elements of a temporary


def _chunks(X: Tensor) -> list[slice]:
    per = max(1, _CHUNK // (X.shape[1] * X.shape[2]))
    return [slice(a, a + per) for a in range(0, X.shape[0], per)]


def margins(X: Tensor | Stack, w: Tensor) -> Tensor:
    """``(n, m, d), (n, d) -> (n, m)``: the rows of each client's X times its own w; ``(n, d, C) -> (n, m, C)``."""
    if isinstance(X, Stack):
        return X.margins(w)
    if w.ndim == 3:
        return torch.bmm(X, w)
    n, m, d = X.shape
    if X.device.type != "cpu":
        return torch.bmm(X, w.unsqueeze(2)).squeeze(2)
    if m * d >= _LARGE:
        return torch.stack([torch.mv(a, b) for a, b in zip(X.unbind(0), w.unbind(0), strict=True)])
    if n * m * d <= _CHUNK:
        return (X * w.unsqueeze(1)).sum(2)
    z = X.new_empty(n, m)
    for c in _chunks(X):
        torch.sum(X[c] * w[c].unsqueeze(1), dim=2, out=z[c])
    return z


def combine(X: Tensor | Stack, r: Tensor) -> Tensor:
    """``(n, m, d), (n, m) -> (n, d)``: sums of rows weighted by r; ``(n, m, C) -> (n, d, C)``."""
    if isinstance(X, Stack):
        return X.combine(r)
    if r.ndim == 3:
        return torch.bmm(X.transpose(1, 2), r)
    n, m, d = X.shape
    if X.device.type != "cpu":
        return torch.bmm(r.unsqueeze(1), X).squeeze(1)
    if m * d >= _LARGE:
        return torch.stack([torch.mv(a.t(), b) for a, b in zip(X.unbind(0), r.unbind(0), strict=True)])
    if n * m * d <= _CHUNK:
        return (X * r.unsqueeze(2)).sum(1)
    g = X.new_empty(n, d)
    for c in _chunks(X):
        torch.sum(X[c] * r[c].unsqueeze(2), dim=1, out=g[c])
    return g


def transposed(X: Tensor | Design, r: Tensor) -> Tensor:
    """X' r for the pooled samples."""
    return X.combine(r) if isinstance(X, Design) else X.t() @ r


_CHUNK = 1 << 22  # elements of the selected columns that are worked on at a time


def hessians(X: Tensor | Stack, second: Tensor, weight: Tensor, at: Tensor, outputs: int) -> Tensor:
    """``(n, k, k)``: the Hessians of n clients on the k coordinates ``at``.

    ``X`` is ``(n, m, features)``, ``second`` ``(n, m)`` or ``(n, m, C, C)``, ``weight`` holds 1/m_i on client i's
    samples.
    """
    if isinstance(X, Stack):
        return X.hessians(second, weight, at, outputs)
    n, m = X.shape[:2]
    k = len(at)
    feature, output = at // outputs, at % outputs
    out = X.new_empty(n, k, k)
    per = max(1, _CHUNK // max(1, m * k))
    for a in range(0, n, per):
        c = slice(a, a + per)
        Z = X[c] if outputs == 1 and k == X.shape[2] else X[c].index_select(2, feature)
        bent = second[c] * weight[c].view(*weight[c].shape[:2], *(1,) * (second.ndim - 2))
        if outputs == 1:
            torch.bmm(Z.transpose(1, 2), Z * bent.unsqueeze(2), out=out[c])
            continue
        for one in range(outputs):
            rows = (output == one).nonzero().squeeze(1)
            right = Z * bent[:, :, one].index_select(2, output)
            out[c, rows] = torch.bmm(Z.index_select(2, rows).transpose(1, 2), right)
    return out
