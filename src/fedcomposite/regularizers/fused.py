"""Total variation of a sequence: the fused lasso.

The prox is found by splitting at thresholds (Hochbaum 2001, Darbon & Sigelle 2006). The entries of the solution that
lie above a number t solve a problem with two values per entry, min over y in {0, 1}^d of
sum_i (t - v_i) y_i + lam sum_i |y_{i+1} - y_i|. Take for t the best constant for a whole stretch: if the two-valued
problem does not split the stretch, the solution is t on it, exactly. If it does, its parts lie above and below each
other, so the jumps between them are linear and each part is a smaller problem of the same kind. All stretches of all
vectors are split at once, and a level of splitting costs O(d) in whole-array operations; random data take a small
multiple of log2 d levels.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite._validation import ZeroOrMore
from fedcomposite.regularizers.base import Regularizer, Step
from fedcomposite.regularizers.separable import soft

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_SHORT = 1 << 15  # numbers of all vectors together, times those of one: steps that a string takes at most, twice


def _clamped_sums(c: Floats, first: Flags, bound: Floats) -> Floats:
    """u_i = clip(u_{i-1} + c_i, -bound_i, bound_i), with u_{i-1} = 0 where ``first``; the first entry is a first.

    A step is a map u -> clip(u + shift, low, high), and such maps compose to maps of the same kind. So the sequence is
    cut into columns that are walked side by side, and the columns' maps are then combined by doubling.
    """
    m = len(c)
    rows = min(64, math.isqrt(m))
    columns = -(-m // rows)

    def lay(t: Floats) -> Floats:
        padded = np.zeros(columns * rows)
        padded[:m] = t
        return np.ascontiguousarray(padded.reshape(columns, rows).T)

    start = np.clip(c, -bound, bound)  # a first entry forgets what came before: its map is constant
    shift, low, high = lay(c), lay(np.where(first, start, -bound)), lay(np.where(first, start, bound))
    for i in range(1, rows):
        a, b, s = low[i].copy(), high[i].copy(), shift[i]
        low[i] = np.minimum(np.maximum(low[i - 1] + s, a), b)
        high[i] = np.minimum(np.maximum(high[i - 1] + s, a), b)
        shift[i] += shift[i - 1]
    s, a, b = shift[-1].copy(), low[-1].copy(), high[-1].copy()
    k = 1
    while k < columns:
        ends = [np.minimum(np.maximum(t[:-k] + s[k:], a[k:]), b[k:]) for t in (a, b)]
        s[k:] = s[k:] + s[:-k]
        a[k:], b[k:] = ends
        k *= 2
    before = np.concatenate([[0.0], a[:-1]])  # from the first entry on every combined map is constant
    return np.minimum(np.maximum(before + shift, low), high).T.ravel()[:m]


def total_variation(v: Floats, lam: Floats, first: Flags) -> Floats:
    """argmin_u ||u - v||^2 / 2 + sum lam_i |u_{i+1} - u_i| over chains that begin where ``first``.

    ``lam`` is constant on a chain, and the first entry begins one.
    """
    result = np.empty_like(v)
    place = np.arange(len(v))
    left, right = np.zeros_like(v), np.zeros_like(v)  # +1 where the neighbour beyond a stretch's end is above, -1 below
    while True:
        m = len(v)
        starts = np.flatnonzero(first)
        ends = np.append(starts[1:], m) - 1
        sizes = ends - starts + 1
        weight = lam[starts]
        level = (np.add.reduceat(v, starts) + weight * (left[starts] + right[ends])) / sizes
        spread = np.repeat(level, sizes)
        result[place] = spread
        c = spread - v
        c[starts] -= weight * left[starts]
        c[ends] -= weight * right[ends]
        # c plus the clamped cost difference of the entries before: what choosing 1 rather than 0 costs so far.
        before = np.concatenate([[0.0], _clamped_sums(c, first, lam)[:-1]])
        before[starts] = 0.0
        cost = before + c
        bound = lam.copy()
        bound[ends] = 0.0
        above = cost < -bound
        decided = above | (cost >= bound)  # the others do as their right neighbour; the end of a stretch decides
        follows = np.minimum.accumulate(np.where(decided, np.arange(m), m)[::-1])[::-1]
        y = above[follows]
        cut = np.concatenate([[False], y[1:] != y[:-1]]) & ~first
        if not cut.any():
            return result
        at = np.flatnonzero(cut)
        left[at] = np.where(y[at - 1], 1.0, -1.0)
        right[at - 1] = np.where(y[at], 1.0, -1.0)
        keep = np.repeat(np.logical_or.reduceat(cut, starts), sizes)
        first = first | cut
        v, lam, first, place, left, right = (t[keep] for t in (v, lam, first, place, left, right))


def short_total_variation(v: Floats, lam: Floats, first: Flags) -> Floats:
    """The same for few numbers, which arrays would take longer to lay out than to work through: one after another.

    The taut string (Davies & Kovac 2001): cumulated sums of the result are the shortest way through a tube of radius
    lam around those of v. The way so far is known up to its last knot; from there it may go between the steepest and
    the flattest line that the tube still allows, and has a knot where these cross.
    """
    result = np.empty_like(v)
    starts = [*np.flatnonzero(first).tolist(), len(v)]
    for begin, end in pairwise(starts):
        knots = _taut(v[begin:end].tolist(), float(lam[begin]))
        at = np.array([place for place, _ in knots])
        sides = np.array([side for _, side in knots])  # of the tube: +1 above, -1 below, 0 in its middle
        level = (np.add.reduceat(v[begin:end], at[:-1]) + lam[begin] * np.diff(sides)) / np.diff(at)
        result[begin:end] = np.repeat(level, np.diff(at))
    return result


def _taut(v: list[float], lam: float) -> list[tuple[int, int]]:
    """The knots of the taut string, (place, side), from the first to the last."""
    knots, n, at, side = [(0, 0)], len(v), 0, 0
    while at < n:
        below = above = side * lam  # of the lower and upper side of the tube, beside the last knot
        least, most, low, high = math.inf, -math.inf, at, at
        total, found = 0.0, None
        for k in range(at, n):
            total += v[k]
            width = lam if k < n - 1 else 0.0
            size = k - at + 1
            up, down = (total + width - above) / size, (total - width - below) / size
            if down > least:  # above every line that the upper side allows: the string bends up there
                found = low, 1
                break
            if up < most:
                found = high, -1
                break
            if up <= least:
                least, low = up, k + 1
            if down >= most:
                most, high = down, k + 1
        at, side = found or (n, 0)
        knots.append((at, side))
    return knots


def _solve(v: Tensor, lam: Step, first: Tensor | None = None) -> Tensor:
    """Total variation prox of each vector; a compiler that traces the formula leaves it out, since it is in NumPy."""
    if "torch._dynamo" not in sys.modules:  # nobody compiles
        return _solved(v, lam, first)
    # Not a decorator, and not without need: that imports the compiler, half of the time this package takes to start.
    return cast(Tensor, torch.compiler.disable(_solved)(v, lam, first))  # type: ignore[no-untyped-call]


def _solved(v: Tensor, lam: Step, first: Tensor | None) -> Tensor:
    """Total variation prox of each vector, in float64 on the CPU; ``first`` begins further chains within vectors.

    A vector that is not finite gives no numbers.
    """
    if v.numel() == 0:
        return v.clone()
    sound = v.isfinite().all(-1, keepdim=True)
    v = torch.where(sound, v, 0.0)
    flags = torch.zeros(v.shape, dtype=torch.bool) if first is None else first.cpu().clone()
    flags[..., 0] = True
    weights = torch.as_tensor(lam, dtype=torch.float64).cpu()
    given = v.detach().cpu().double()
    if first is None and v.dim() == 2 and weights.numel() == 1 and bool((given == given[:1]).all()):
        made = _laid_out(given[:1], weights, flags[:1]).expand_as(v).to(v)  # rows that are alike, of a Jacobian
    else:
        made = _laid_out(given, weights, flags).to(v)
    if v.requires_grad and torch.is_grad_enabled():
        made = made + _followed(v, made, flags.to(v.device))
    return torch.where(sound, made, torch.nan)


def _laid_out(v: Tensor, weights: Tensor, flags: Tensor) -> Tensor:
    """All vectors as one sequence of chains."""
    way = total_variation if v.numel() * v.shape[-1] > _SHORT else short_total_variation
    laid = [t.broadcast_to(v.shape).reshape(-1).numpy().copy() for t in (v, weights, flags)]
    return torch.from_numpy(way(*laid)).view(v.shape)


def _followed(v: Tensor, made: Tensor, first: Tensor) -> Tensor:
    """Zero, with the derivative of the prox: a stretch of equal values moves with the mean of its entries in v."""
    starts = first.clone()
    starts[..., 1:] |= made.diff(dim=-1) != 0
    stretch = starts.reshape(-1).cumsum(0) - 1
    sums = v.new_zeros(int(stretch[-1]) + 1).index_add(0, stretch, v.reshape(-1))
    means = (sums / torch.bincount(stretch).to(v))[stretch].view_as(v)
    return means - means.detach()


@dataclass(frozen=True)
class FusedLasso(Regularizer):
    """h(x) = lam sum_j |x_{j+1} - x_j| + l1 sum_j |x_j|: piecewise constant vectors (Tibshirani et al. 2005).

    The prox is that of the total variation, exact up to rounding, followed by soft-thresholding at l1 * step
    (Friedman et al. 2007). It is computed on the CPU, in float64, for a whole batch at once; a device's tensor makes a
    round trip.

    Examples
    --------
    >>> FusedLasso(1.0).prox(torch.tensor([0.0, 1.0, 5.0, 6.0]), 1.0)
    tensor([1., 1., 5., 5.])
    """

    coefficients: ClassVar[tuple[str, ...]] = ("lam", "l1")
    lam: ZeroOrMore
    l1: ZeroOrMore = 0.0

    def value(self, x: Tensor) -> Tensor:
        """The total variation times lam, plus the sum of absolute values times l1."""
        return self.lam * x.diff(dim=-1).abs().sum(-1) + self.l1 * x.abs().sum(-1)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The prox of the total variation, then soft-thresholding."""
        return soft(_solve(v, self.lam * step), self.l1 * step)

    def subgradient(self, x: Tensor) -> Tensor:
        """The difference of the jumps' signs times lam, plus l1 sign(x)."""
        return self._jumps(x) + self.l1 * x.sign()

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Distance to the subdifferential: the jumps' signs are given, the rest is free within each constant stretch.

        What cannot be met within a stretch is the prox, there, of what is left of ``-gradient``.
        """
        rest = -gradient - self._jumps(x) - self.l1 * x.sign()
        first = torch.ones_like(x, dtype=torch.bool)
        first[..., 1:] = x.diff(dim=-1) != 0
        residual = _solve(rest, self.lam, first)
        residual = torch.where(x == 0, soft(residual, self.l1), residual)
        distance: Tensor = torch.linalg.vector_norm(residual, dim=-1)
        return distance

    def _jumps(self, x: Tensor) -> Tensor:
        """Gradient of lam sum_j |x_{j+1} - x_j| with the sign of no jump taken as zero."""
        signs = x.diff(dim=-1).sign()
        none = x.new_zeros((*x.shape[:-1], 1))
        return self.lam * torch.cat([none, signs, none], dim=-1).diff(dim=-1).neg()
