"""The largest eigenvalue of X' diag(w) X, from above: step sizes rest on it, so that it may not be too small.

Where features or samples are few it is an eigenvalue of a small matrix, exact to rounding. Otherwise it comes from
Lanczos' iteration, which needs products only. After k steps from a unit vector v its polynomial p, with the Ritz values
t_1 >= ... >= t_k as zeros, is the one that makes p(A) v smallest, and the norm of that is the product of the b_j beside
the diagonal. An eigenvector whose component of v is c therefore has an eigenvalue with

    c |p(eigenvalue)| <= b_1 ... b_k,

and a random v has c < e with a probability of at most e sqrt(2d / pi). Choosing e for a probability of 1e-12, no
eigenvalue lies beyond the point above t_1 where e p exceeds the product (van Dorsselaer, Hochstenbach & van der
Vorst, SIAM J. Matrix Anal. Appl. 22, 2000). Steps are taken until that point is at most 1.01 t_1: some 160 of them for
the worst spectra, and a few where the top stands out. The start is the same every time, so that the result is too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedcomposite.problems.sparse_products import Stack

_SMALL = 512  # features or samples up to which a matrix of that size is formed
_CHUNK = 1 << 24  # elements of a temporary
_EXCESS = 0.01  # by which the bound may be too large
_RISK = 1e-12  # probability that it is too small
_MOST = 400  # steps, more than twice what any spectrum needs


def largest_eigenvalues(X: Tensor | Stack, weight: Tensor) -> Tensor:
    """Upper bounds ``(n,)`` on the largest eigenvalues of X_i' diag(w_i) X_i: X is ``(n, m, d)``, w >= 0 ``(n, m)``."""
    n, m, d = X.shape
    if min(m, d) > _SMALL:
        each: Sequence[Tensor | Stack] = X.unbind()
        products = [_product(A, w) for A, w in zip(each, weight.unbind(), strict=True)]
        v = weight if isinstance(X, Stack) else X  # values of sparse rows may be narrower than the vectors
        return torch.tensor([_lanczos(p, d, v.dtype, v.device) for p in products], dtype=torch.float64)
    if isinstance(X, Stack):
        return _largest(X.grams(weight), m + d)
    per = max(1, _CHUNK // (m * d))
    chunks = [slice(a, a + per) for a in range(0, n, per)]
    return torch.cat([_exact(X[c].double(), weight[c].double()) for c in chunks])


def _exact(X: Tensor, weight: Tensor) -> Tensor:
    """From the smaller of the two Gram matrices, rounded up by more than the errors of its sums."""
    rows = X * weight.sqrt().unsqueeze(2)
    gram = rows.transpose(1, 2) @ rows if X.shape[2] <= X.shape[1] else rows @ rows.transpose(1, 2)
    return _largest(gram, sum(X.shape[1:]))


def _largest(gram: Tensor, terms: int) -> Tensor:
    largest: Tensor = torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0)
    return largest * (1 + terms * torch.finfo(torch.float64).eps)


def _product(X: Tensor | Stack, weight: Tensor) -> Callable[[Tensor], Tensor]:
    if isinstance(X, Stack):
        return lambda v: X.combine(X.margins(v[None]) * weight[None])[0]
    return lambda v: ((X @ v) * weight) @ X


def _lanczos(product: Callable[[Tensor], Tensor], d: int, dtype: torch.dtype, device: torch.device) -> float:
    v = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    basis = torch.empty(min(_MOST, d), d, dtype=torch.float64, device=device)  # memory is taken as it is filled
    basis[0] = v / v.norm()
    component = math.log(_RISK / math.sqrt(2 * d / math.pi))
    diagonal: list[float] = []
    beside: list[float] = []
    bound = 0.0
    for k in range(len(basis)):
        u = product(basis[k].to(dtype)).double()
        diagonal.append(float(u @ basis[k]))
        for _ in range(2):  # the second time takes away what rounding has left
            u = u - (basis[: k + 1] @ u) @ basis[: k + 1]
        beside.append(float(u.norm()))
        used_up = beside[-1] <= 8 * torch.finfo(dtype).eps * max(diagonal)
        if used_up or k % 4 == 3 or k + 1 == len(basis):
            largest, bound = _above(diagonal, beside[:-1], 0.0 if used_up else beside[-1], component)
            if bound <= (1 + _EXCESS) * largest:
                break
        if k + 1 < len(basis):
            basis[k + 1] = u / beside[-1]
    return bound * (1 + 64 * torch.finfo(dtype).eps)


def _above(diagonal: list[float], beside: list[float], last: float, component: float) -> tuple[float, float]:
    """The largest Ritz value, and the point beyond which there is no eigenvalue."""
    T = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        T += torch.diag(torch.tensor(beside, dtype=torch.float64), -1)
    ritz = torch.linalg.eigvalsh(T)
    top = max(0.0, float(ritz[-1]))
    if last == 0:
        return top, top
    product = sum(math.log(b) for b in beside) + math.log(last) - component

    def beyond(point: float) -> bool:
        return point > top and float((point - ritz).log().sum()) >= product

    high = (1 + _EXCESS) * top
    while not beyond(high):
        high *= 2
    low = top
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return top, high
