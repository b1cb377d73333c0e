"""Constraints as regularizers: zero inside a set, infinite outside; the prox is the projection.

A projection is exact up to rounding, so a set with a curved or slanted boundary counts points as inside up to rounding
as well: 16 sqrt(d) eps relative to the size of the set, where eps is that of the points' dtype. Errors of d roundings
add up like a random walk, so that a sum of d terms exceeds lambda sqrt(d) eps with probability 2 exp(-lambda^2 / 2) at
most (Higham & Mary 2019).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.regularizers.base import Boxed, Regularizer, Separable, Step, ordinary, power_of_two


class Indicator(Regularizer):
    """h(x) = 0 if x is in a set, infinity if not; 0 and infinity do not scale."""

    coefficients: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def contains(self, x: Tensor) -> Tensor:
        """Whether each vector is in the set: true or false, of shape ``(...)``."""

    def value(self, x: Tensor) -> Tensor:
        """0 inside the set, infinity outside."""
        return x.new_zeros(x.shape[:-1]).masked_fill(~self.contains(x), torch.inf)

    def subgradient(self, x: Tensor) -> Tensor:
        """Refused: a constraint has no subgradient outside its set, so a subgradient step cannot keep it."""
        raise TypeError(
            f"{type(self).__name__} is a constraint and has no useful subgradient; use a method with a prox, "
            "for example FedNMap, Zhang, FedCanon or ProximalGradient"
        )


def rounding(x: Tensor) -> float:
    """The relative error up to which a vector of that length and dtype is inside."""
    return 16 * math.sqrt(x.shape[-1]) * torch.finfo(x.dtype).eps


def threshold(v: Tensor, total: Step) -> Tensor:
    """The t with sum_j max(v_j - t, 0) = total, of shape ``(..., 1)``.

    No k entries can exceed t by more than ``total`` in all, and the largest ones that do exceed it meet the bound: so
    t is the largest of (sum of the k largest - total)/k. Entries of -infinity are left out.
    """
    largest = v.sort(dim=-1, descending=True).values.cumsum(-1, dtype=torch.float64)
    k = torch.arange(1, v.shape[-1] + 1, device=v.device)
    return ((largest - total) / k).amax(-1, keepdim=True).to(v.dtype)


def _level(y: Tensor, support: Tensor) -> Tensor:
    """The t that minimises sum_S (y_j - t)^2 + sum_rest max(y_j - t, 0)^2, of shape ``(..., 1)``; S is not empty.

    As in :func:`threshold`, t is the largest of (sum of y over S and the k largest of the rest) / (|S| + k).
    """
    inside = y.masked_fill(~support, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    count = support.sum(-1, keepdim=True)
    rest = y.masked_fill(support, -torch.inf).sort(dim=-1, descending=True).values.cumsum(-1, dtype=torch.float64)
    k = torch.arange(1, y.shape[-1] + 1, device=y.device)
    best = ((inside + rest) / (count + k)).amax(-1, keepdim=True)
    return torch.maximum(best, inside / count.clamp(min=1)).to(y.dtype)


def _on_simplex(y: Tensor, total: float) -> Tensor:
    """The projection of y onto the simplex of sum ``total``, in float64.

    The largest entry is subtracted first, which changes nothing but the size of the numbers: those that matter are then
    below ``total``, whatever the size of y. What rounding left of the sum is shared out at the end.
    """
    y = y.double()
    y = y - y.amax(-1, keepdim=True)
    u = (y - threshold(y, total)).clamp(min=0)
    inside = u > 0
    missing = (total - u.sum(-1, keepdim=True)) / inside.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(inside, (u + missing).clamp(min=0), u)


def _norm(x: Tensor) -> Tensor:
    """The norm in float64. Long vectors go piece by piece, which is faster than converting them, and as accurate."""
    if x.shape[-1] >= 1 << 12:
        whole = x.shape[-1] // 64 * 64
        pieces = torch.linalg.vector_norm(x[..., :whole].reshape(*x.shape[:-1], whole // 64, 64), dim=-1)
        x = torch.cat([pieces, x[..., whole:]], dim=-1)
    size: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return size


def _large_norm(x: Tensor) -> Tensor:
    """The norm in float64, also where squares overflow in the dtype of x."""
    power = power_of_two(x)
    return _norm(x / power) * power.squeeze(-1).double()


def _diverged(v: Tensor, projection: Tensor) -> Tensor:
    """The projection, not a number where v is infinite: a vector that diverged must not look sound."""
    return torch.sub(projection, v, alpha=0)


class Bounds(Indicator, Separable):
    """The constraint low <= x_j <= high."""

    low: float
    high: float

    def contains(self, x: Tensor) -> Tensor:
        """Whether every entry is between the bounds."""
        return ((x >= self.low) & (x <= self.high)).all(dim=-1)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """Every entry brought between the bounds."""
        return _diverged(v, self._clamped(v))

    def _carried_out(self, v: Tensor, step: Step, out: Tensor | None) -> Tensor:
        if v.device.type == "cpu" and v.numel() >= 1 << 15:
            smallest, largest = torch.aminmax(v)  # a look at all entries costs less than a second operation on them
            if -math.inf < smallest and largest < math.inf:
                return self._clamped(v, out)
        return super()._carried_out(v, step, out)

    def _clamped(self, v: Tensor, out: Tensor | None = None) -> Tensor:
        most = torch.finfo(v.dtype).max
        return torch.clamp(v, max(self.low, -most), min(self.high, most), out=out)

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normal cone: {0} inside, a half-line on the boundary, empty (low > high) outside."""
        low = torch.zeros_like(x).masked_fill(x <= self.low, -torch.inf).masked_fill(x > self.high, torch.inf)
        high = torch.zeros_like(x).masked_fill(x >= self.high, torch.inf).masked_fill(x < self.low, -torch.inf)
        return low, high


@dataclass(frozen=True)
class Box(Bounds):
    """The constraint low <= x_j <= high; the prox clamps. Either bound may be infinite."""

    low: float
    high: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ValueError(f"Box: low = {self.low:g} is above high = {self.high:g}")


@dataclass(frozen=True)
class NonNegative(Bounds):
    """The constraint x_j >= 0; the prox is the positive part."""

    low: ClassVar[float] = 0.0  # type: ignore[misc]  # no fields
    high: ClassVar[float] = math.inf  # type: ignore[misc]


@dataclass(frozen=True)
class TopK(Indicator, Boxed):
    """The constraint that at most k entries are nonzero; the prox keeps the k largest in absolute value.

    Not weakly convex (the set is a union of subspaces), so rho is infinite. The prox is a projection for every step;
    where entries tie for the last place any of them may be kept.
    """

    k: Count

    @property
    def rho(self) -> float:
        return math.inf

    def contains(self, x: Tensor) -> Tensor:
        """Whether at most k entries are nonzero."""
        return (x != 0).sum(-1) <= self.k

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The k largest entries in absolute value, and zeros."""
        places = v.abs().topk(min(self.k, v.shape[-1]), dim=-1, sorted=False).indices
        return torch.zeros_like(v).scatter(-1, places, v.gather(-1, places))

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The regular normal cone: free off the support when it is full, {0} when it is not, empty outside."""
        count = (x != 0).sum(-1, keepdim=True)
        free = torch.zeros_like(x).masked_fill((x == 0) & (count == self.k), torch.inf)
        outside = count > self.k
        return (-free).masked_fill(outside, torch.inf), free.masked_fill(outside, -torch.inf)


@dataclass(frozen=True)
class L2Ball(Indicator):
    """The constraint ||x||_2 <= radius; the prox shrinks a longer vector to the radius."""

    radius: Positive

    def contains(self, x: Tensor) -> Tensor:
        """Whether the norm is at most the radius."""
        return _large_norm(x) <= self.radius * (1 + rounding(x))

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The direction of a longer vector, times the radius."""
        power = power_of_two(v)
        u = v / power
        size = _norm(u).unsqueeze(-1)
        return torch.where(size <= self.radius / power, v, u * (self.radius / size).to(v.dtype))

    def _carried_out(self, v: Tensor, step: Step, out: Tensor | None) -> Tensor:
        if not ordinary(v):
            return super()._carried_out(v, step, out)
        return torch.mul(v, (self.radius / _norm(v)).clamp(max=1).to(v.dtype).unsqueeze(-1), out=out)

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Distance to the normal cone: {0} inside, the ray along x on the sphere."""
        u = x / power_of_two(x)
        along = (-(gradient * u).sum(-1) / u.square().sum(-1)).clamp(min=0)
        along = torch.where(_large_norm(x) < self.radius * (1 - rounding(x)), 0.0, along)
        distance = _norm(gradient + along.unsqueeze(-1) * u).to(x.dtype)
        return distance.masked_fill(~self.contains(x), torch.inf)


@dataclass(frozen=True)
class L1Ball(Indicator):
    """The constraint ||x||_1 <= radius; the prox soft-thresholds at a level found by sorting (Duchi et al. 2008)."""

    radius: Positive

    def contains(self, x: Tensor) -> Tensor:
        """Whether the sum of absolute values is at most the radius."""
        return x.abs().sum(-1, dtype=torch.float64) <= self.radius * (1 + rounding(x))

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The projection of |v| onto a simplex with v's signs, if v is outside."""
        if v.shape[-1] == 0:
            return v.clone()
        inside = v.abs().sum(-1, keepdim=True, dtype=torch.float64) <= self.radius
        u = _on_simplex(v.abs(), self.radius).to(v.dtype)
        return torch.where(inside, v, torch.where(u > 0, u.copysign(v), u))

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Distance to the normal cone: {0} inside, t times the subdifferential of ||x||_1, t >= 0, on the boundary."""
        support = x != 0
        y = torch.where(support, -gradient * x.sign(), gradient.abs())
        t = _level(y, support).clamp(min=0)
        edge = _norm(torch.where(support, y - t, (y - t).clamp(min=0)))
        inside = x.abs().sum(-1, dtype=torch.float64) < self.radius * (1 - rounding(x))
        distance = torch.where(inside, _norm(gradient), edge).to(x.dtype)
        return distance.masked_fill(~self.contains(x), torch.inf)


@dataclass(frozen=True)
class Simplex(Indicator):
    """The constraint x_j >= 0, sum_j x_j = total; the prox subtracts a level found by sorting and clips at zero."""

    total: Positive = 1.0

    def contains(self, x: Tensor) -> Tensor:
        """Whether no entry is negative and they sum to the total."""
        missing = (x.sum(-1, dtype=torch.float64) - self.total).abs()
        return (x >= 0).all(dim=-1) & (missing <= self.total * rounding(x))

    def formula(self, v: Tensor, step: Step) -> Tensor:
        if v.shape[-1] == 0:
            raise ValueError(f"Simplex: a vector of no entries cannot sum to {self.total:g}")
        return _diverged(v, _on_simplex(v, self.total).to(v.dtype))

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Distance to the normal cone: one level t on the support, at most t off it."""
        support = x > 0
        excess = -gradient - _level(-gradient, support)
        distance = _norm(torch.where(support, excess, excess.clamp(min=0))).to(x.dtype)
        return distance.masked_fill(~self.contains(x), torch.inf)


@dataclass(frozen=True)
class Affine(Indicator):
    """The constraint A x = b; the prox is v - A'(A A')^+ (A v - b).

    ``A`` is a list of rows. They may depend on each other as long as some x satisfies them all. The row space is
    factorised once (a singular value decomposition).

    Examples
    --------
    >>> Affine(A=[[1.0, 1.0]], b=[2.0]).prox(torch.tensor([4.0, 1.0]), 1.0)
    tensor([ 2.5000, -0.5000])
    """

    A: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = {len(row) for row in self.A}
        if len(widths) != 1 or 0 in widths:
            raise ValueError("Affine: A must have at least one row, and rows of one length")
        if len(self.A) != len(self.b):
            raise ValueError(f"Affine: A has {len(self.A)} rows, b has {len(self.b)} entries")
        A, b = torch.tensor(self.A, dtype=torch.float64), torch.tensor(self.b, dtype=torch.float64)
        if not (A.isfinite().all() and b.isfinite().all()):
            raise ValueError("Affine: A and b must be finite")
        rows, values = self._rows
        _, smallest = self._factors
        missed = (rows @ smallest - values).abs()
        if (missed > 1e-12 * (1 + _norm(smallest) + values.abs())).any():
            best = torch.linalg.lstsq(A, b.unsqueeze(1), driver="gelsd").solution.squeeze(1)
            raise ValueError(
                f"Affine: no x satisfies A x = b (the best one misses by {float(_norm(A @ best - b)):.3g})"
            )

    @property
    def _rows(self) -> tuple[Tensor, Tensor]:
        """The equations with rows of length 1, so that none counts for less because of its units; zero rows stay."""
        A, b = torch.tensor(self.A, dtype=torch.float64), torch.tensor(self.b, dtype=torch.float64)
        power = power_of_two(A)
        size = _norm(A / power).unsqueeze(1)
        size = power * torch.where(size > 0, size, 1.0)
        return A / size, b / size.squeeze(1)

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """An orthonormal basis of the row space, ``(d, rank)``, and the smallest x with A x = b."""
        rows, values = self._rows
        U, S, Vh = torch.linalg.svd(rows, full_matrices=False)
        rank = int(S.gt(max(rows.shape) * torch.finfo(rows.dtype).eps * S[0]).sum())
        return Vh[:rank].T.contiguous(), Vh[:rank].T @ ((U[:, :rank].T @ values) / S[:rank])

    @cached_property
    def _placed(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def _at(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The factors on a device, kept for the next call."""
        if like.shape[-1] != len(self.A[0]):
            raise ValueError(f"Affine: A has {len(self.A[0])} columns, the vector has {like.shape[-1]} coordinates")
        if like.device not in self._placed:
            basis, smallest = self._factors
            self._placed[like.device] = basis.to(like.device), smallest.to(like.device)
        return self._placed[like.device]

    def contains(self, x: Tensor) -> Tensor:
        """Whether A x = b, measured by the distance of x to the set."""
        basis, smallest = self._at(x)
        u = x.double()
        return _norm((u - smallest) @ basis) <= rounding(x) * (_norm(u) + _norm(smallest))

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The projection, in float64, three times: of a v much longer than it rounding leaves something."""
        basis, smallest = self._at(v)
        u = v.double()
        for _ in range(3):
            u = u - ((u - smallest) @ basis) @ basis.T
        return u.to(v.dtype)

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Distance to the normal cone, which is the row space of A."""
        basis, _ = self._at(x)
        g = gradient.double()
        distance = _norm(g - (g @ basis) @ basis.T).to(x.dtype)
        return distance.masked_fill(~self.contains(x), torch.inf)
