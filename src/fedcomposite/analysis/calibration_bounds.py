"""Bounds of calibration slope and intercept from cells: sums of margins z and probabilities p, and a range of z.

The slope b and the intercept a of a logistic regression on margins solve sum s(a + b z) = n_1 and
sum z s(a + b z) = sum of z in class 1, whose right sides are known. Of the left sides each cell bounds its share: the
function of z is approximated on the cell's range by a combination of 1, z, p and z p, whose means over the cell are
known, and the approximation's least and largest error on the range bound what is left. Close to a = 0, b = 1, where the
functions are p and z p themselves, nothing is left.

The deviance minimised over a is convex in b. So if its derivative is certainly positive at some b, the slope is below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedcomposite.analysis.curves import recalibrated
from fedcomposite.analysis.score_bins import NOTHING, Cells, Pair, sigmoid

Floats = npt.NDArray[np.float64]

_NARROW = 0.1  # cells of at most this width take two terms of Taylor's series
_TAIL = 25.0  # cells that reach beyond have no end there
_FAR = 60.0  # where the grid ends
_NODES = 129
_NOISE = 1e-14  # of means, and of functions on the grid
_FLAT = 0.05  # slopes below do not tell tails apart
_LARGEST = 8.0  # distance from the estimate at which a bound is given up


def _both(least: Floats, most: Floats, weight: Floats) -> Floats:
    """Weighted sums of lower and upper bounds."""
    return np.array([weight @ least, weight @ most])


class _Narrow:
    """Cells whose margins are close to their means."""

    def __init__(self, n: Floats, z: Floats, low: Floats, high: Floats) -> None:
        self.n, self.z, self.width = n, z, high - low
        self.spread = np.maximum((high - z) * (z - low), 0.0)

    def sums(self, a: float, b: float, c: float | None) -> Floats:
        """Bounds of the sum of s(a + b z), or of (z - c) s(a + b z)."""
        t = a + b * self.z
        s = sigmoid(t)
        grown = np.exp(abs(b) * self.width) * s * sigmoid(-t)  # s' anywhere in the cell
        if c is None:
            value, second = s, b**2 * grown
        else:
            away = self.z - c
            value, second = away * s, grown * (2 * abs(b) + (np.abs(away) + self.width) * b**2)
        off = second * self.spread / 2
        return _both(value - off, value + off, self.n)


class _Wide:
    """Cells with a grid on their range; those without an end lack functions that are unbounded there."""

    def __init__(self, n: Floats, z: Floats, p: Floats, zp: Floats, low: Floats, high: Floats) -> None:
        self.n, self.left, self.right = n, low < -_TAIL, high > _TAIL
        ends = np.arcsinh(np.where(self.left, -_FAR, low)), np.arcsinh(np.where(self.right, _FAR, high))
        self.nodes = np.sinh(ends[0][:, None] + (ends[1] - ends[0])[:, None] * np.linspace(0, 1, _NODES))
        gaps = np.diff(self.nodes, axis=1)
        self.gap = np.maximum(np.pad(gaps, ((0, 0), (1, 0))), np.pad(gaps, ((0, 0), (0, 1))))
        self.p = sigmoid(self.nodes)
        inner = ~self.left & ~self.right
        self.product = np.where(self.left & self.right, 0, np.where(self.right, -1, 1))  # of z p among the functions
        flat = self.nodes * np.where(self.right, 1, 0)[:, None]  # z - z p falls to 0 on the right
        product = self.product[:, None] * self.nodes * self.p + np.where(self.product[:, None] < 0, flat, 0)
        self.basis = np.stack([np.ones_like(self.p), self.p, product, self.nodes * inner[:, None]], 2)
        known = self.product * zp + np.where(self.product < 0, z, 0)
        self.known = np.stack([np.ones_like(p), p, known, z * inner], 1)
        self.inverse = np.linalg.pinv(self.basis, rcond=1e-7)
        self.z, self.zp = z, zp

    def sums(self, a: float, b: float, c: float | None) -> Floats:
        """Bounds of the sum of s(a + b z), or of (z - c) s(a + b z)."""
        if bool((self.left | self.right).any()) and abs(b) < _FLAT:
            return np.array(NOTHING)
        z, t = self.nodes, a + b * self.nodes
        s = sigmoid(t)
        bent = s * sigmoid(-t)
        fixed = np.zeros(len(z))
        if c is None:
            value, second, products = s, b**2 * bent, np.zeros(len(z))
        else:
            value = (z - c) * s
            second = bent * (2 * abs(b) + (np.abs(z - c) + self.gap) * b**2)
            value, fixed, products = self._without_tails(value, fixed, b, c)
        made = (self.inverse @ value[:, :, None])[:, :, 0]
        rest = value - (self.basis @ made[:, :, None])[:, :, 0]
        curved = np.abs(made[:, 1:2]) + (np.abs(made[:, 2:3]) + np.abs(products)[:, None]) * (2 + np.abs(z) + self.gap)
        slack = (
            self.gap**2 / 8 * (second * np.exp(abs(b) * self.gap) + self.p * (1 - self.p) * curved * np.exp(self.gap))
        )
        end = np.where(self.left | self.right, self._beyond(a, b, c), 0.0)
        end = end + _NOISE * np.abs(made).sum(1) * (1 + np.abs(self.z) + np.abs(z).max(1) * ~(self.left | self.right))
        middle = fixed + (self.known * made).sum(1)
        return _both(middle + (rest - slack).min(1) - end, middle + (rest + slack).max(1) + end, self.n)

    def _without_tails(self, value: Floats, fixed: Floats, b: float, c: float) -> tuple[Floats, Floats, Floats]:
        """(z - c) s less what it grows like where a range has no end; its known mean, and its part of z p."""
        grows = self.right if b > 0 else self.left  # there s goes to 1
        one = grows & ~(self.left & self.right)
        both = self.left & self.right
        sign = np.where(both, 1.0 if b > 0 else -1.0, 0.0)  # z p goes to 0 and z, z - z p to z and 0
        rising = self.nodes * (self.p if b > 0 else 1 - self.p)
        value = value - one[:, None] * (self.nodes - c) - both[:, None] * rising
        fixed = fixed + one * (self.z - c) + both * (self.zp if b > 0 else self.z - self.zp)
        return value, fixed, sign

    @staticmethod
    def _beyond(a: float, b: float, c: float | None) -> float:
        """Most that the functions and those that approximate them change beyond the grid."""
        tail = math.exp(min(abs(a) - abs(b) * _FAR, 0.0)) + math.exp(-_FAR / 2)
        return 2 * tail * (1.0 if c is None else 2 * _FAR + abs(c))


class CalibrationBounds:
    """Slope and intercept of the logistic regression of outcomes on margins, and what they may be."""

    def __init__(self, cells: Cells) -> None:
        self._n, ones = cells.column("weight"), cells.column("class") == 1
        self._z, self._p, self._zp = (cells.column(name) / self._n for name in ("z", "p", "zp"))
        self._ones = np.where(ones, self._n, 0.0)
        self._both = 0 < self._ones.sum() < self._n.sum()
        self._target = float((cells.column("z") * ones).sum())
        low, high = cells.ends
        narrow = high - low <= _NARROW
        self._exact, self._parts = cells.exact, list[_Narrow | _Wide]()
        if narrow.any():
            self._parts.append(_Narrow(*(v[narrow] for v in (self._n, self._z, low, high))))
        if not narrow.all():
            self._parts.append(_Wide(*(v[~narrow] for v in (self._n, self._z, self._p, self._zp, low, high))))

    def _sums(self, a: float, b: float, c: float | None = None) -> Floats:
        return np.asarray(np.sum([part.sums(a, b, c) for part in self._parts], axis=0))

    @cached_property
    def _spread_out(self) -> tuple[Floats, Floats, Floats]:
        """Margins that stand for those of each cell: their mean less and plus their deviation; samples, positives.

        The deviation follows from the covariance of z and p, which is that of z times p (1 - p).
        """
        shared = np.maximum(self._zp - self._z * self._p, 0.0)
        shared = np.where(shared > 1e-12 * (1 + np.abs(self._z)), shared, 0.0)
        off = np.minimum(np.sqrt(shared / np.maximum(self._p * (1 - self._p), 1e-10)), 2.0)
        return np.concatenate([self._z - off, self._z + off]), np.tile(self._n / 2, 2), np.tile(self._ones / 2, 2)

    @cached_property
    def slope(self) -> tuple[float, Pair]:
        """The slope and its bounds."""
        value = recalibrated(*self._spread_out)[1] if self._both else math.nan
        if math.isnan(value):
            return value, NOTHING
        if self._exact:
            return value, (value, value)
        about = self._derivative(value)
        if about is None:
            return value, NOTHING
        low, high, curvature = about
        below = _certain(value, -1.0, high / curvature, lambda b: self._is_beyond(b, -1.0))
        above = _certain(value, 1.0, -low / curvature, lambda b: self._is_beyond(b, 1.0))
        return value, (below, above)

    @cached_property
    def intercept(self) -> tuple[float, Pair]:
        """The intercept of the regression with slope 1, and its bounds."""
        value = recalibrated(*self._spread_out, slope=False)[0] if self._both else math.nan
        if math.isnan(value):
            return value, NOTHING
        return value, (value, value) if self._exact else self._intercepts(value, 1.0)

    def _intercepts(self, start: float, b: float) -> Pair:
        """Bounds of the intercept that belongs to a slope, from an estimate of it."""
        z, n, ones = self._spread_out
        total = float(ones.sum())
        low, high = self._sums(start, b)
        curvature = float((n * sigmoid(start + b * z) * sigmoid(-start - b * z)).sum())
        if not (math.isfinite(high - low) and curvature > 0):
            return NOTHING
        below = _certain(start, -1.0, (high - total) / curvature, lambda a: bool(self._sums(a, b)[1] <= total))
        above = _certain(start, 1.0, (total - low) / curvature, lambda a: bool(self._sums(a, b)[0] >= total))
        return below, above

    def _derivative(self, b: float) -> tuple[float, float, float] | None:
        """Bounds of the derivative in b of the least deviance, and about the second one; None if there are none."""
        z, n, ones = self._spread_out
        start = recalibrated(b * z, n, ones, slope=False)[0]
        v = n * sigmoid(start + b * z) * sigmoid(-start - b * z)
        if not math.isfinite(start) or not v.sum() > 0:
            return None
        c = float((v * z).sum() / v.sum())
        curvature = float((v * (z - c) ** 2).sum())
        low, high = self._intercepts(start, b)
        if not (math.isfinite(high - low) and curvature > 0):
            return None
        wanted = self._target - c * float(self._ones.sum())
        ends = np.array([self._sums(a, b, c) for a in (low, high)]) - wanted
        # between the two the derivative is close to a line in a: |z - c| |s''| is bounded, since |t| s'(t) < 0.23
        bent = (0.23 + max(abs(low), abs(high)) / 4) / abs(b) + 0.1 * abs(c)
        slack = float(self._n.sum()) * bent * (high - low) ** 2 / 8
        return float(ends[:, 0].min()) - slack, float(ends[:, 1].max()) + slack, curvature

    def _is_beyond(self, b: float, side: float) -> bool:
        """Whether the slope is certainly below b (``side`` 1), or above it."""
        about = self._derivative(b)
        return about is not None and (about[0] > 0 if side > 0 else about[1] < 0)


def _certain(value: float, side: float, step: float, beyond: Callable[[float], bool]) -> float:
    """A number on one side of an estimate that is certainly beyond the truth, from about how far that is."""
    step = max(step, 0.0) * 1.02 + 1e-9 * max(1.0, abs(value))
    while step <= _LARGEST:
        if beyond(value + side * step):
            return value + side * step
        step *= 1.15
    return side * math.inf
