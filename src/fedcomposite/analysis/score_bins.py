"""Samples in ranges of bins: what a site tells of a classifier's scores, and the bounds of ranks that follow.

A cell is a set of samples of one class at one site of which sums are known, and between which two bins their margins
are: one and the same, unless the site has joined bins to keep its minimum counts. Every bound here holds wherever the
samples are in their ranges, and however they are ordered within a bin. A bin that is one number wide is a point: its
samples are ties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite.analysis.curves import average_precision
from fedcomposite.runtime.protocol import HIGHEST, LOWEST

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Pair = tuple[float, float]
"""A lower and an upper bound."""

NOTHING: Pair = (-math.inf, math.inf)
EDGE = 1e-9
"""A margin this close to an edge is the edge."""


@dataclass(frozen=True)
class Cells:
    """Cells in the bins between some edges."""

    edges: Floats
    table: Floats
    """A row per cell: class, lowest bin, highest bin, weight, sums of z, p and z p (margins and probabilities)."""
    unit: bool
    """Whether every sample counts one."""

    @classmethod
    def told(cls, answers: Sequence[Tensor], edges: Tensor, unit: bool) -> Cells:
        """From the ``counts`` that one site answered to requests about different samples."""
        counts = torch.stack(list(answers)).sum(0).numpy()
        rows = []
        for kind, sums in enumerate(counts):
            low, high = (np.flatnonzero(sums[:, which]) for which in (LOWEST, HIGHEST))
            if len(low) != len(high) or (low > high).any():
                raise ValueError("counts of scores whose groups end before they begin")
            more = np.delete(sums[low], HIGHEST, 1)
            rows.append(np.column_stack([np.full(len(low), kind), low, high, more]))
        return cls(edges.numpy(), np.concatenate(rows), unit)

    @classmethod
    def summed(cls, answers: Sequence[Tensor], edges: Tensor, unit: bool) -> Cells:
        """From sums over sites of their :func:`~fedcomposite.runtime.protocol.ranges_of`.

        The cells are those of the sites, where they can be told apart; ranges that overlap and cannot are one cell,
        from the lowest to the highest of their bins.
        """
        tables = torch.stack(list(answers)).sum(0).numpy()
        found = [np.insert(_told_apart(table), 0, kind, axis=1) for kind, table in enumerate(tables)]
        return cls.all([cls(edges.numpy(), np.concatenate(found), unit)])

    @classmethod
    def all(cls, each: Sequence[Cells]) -> Cells:
        """Of several sites; cells in the same bins become one."""
        first, table = each[0], np.concatenate([one.table for one in each])
        keys, place = np.unique(table[:, :3], axis=0, return_inverse=True)
        sums = np.zeros((len(keys), table.shape[1] - 3))
        np.add.at(sums, place.ravel(), table[:, 3:])
        return cls(first.edges, np.column_stack([keys, sums]), all(one.unit for one in each))

    def column(self, name: str) -> Floats:
        """One of the columns."""
        made: Floats = self.table[:, ("class", "low", "high", "weight", "z", "p", "zp").index(name)]
        return made

    @cached_property
    def bins(self) -> int:
        """How many bins there are."""
        return len(self.edges) + 1

    @cached_property
    def ends(self) -> tuple[Floats, Floats]:
        """Between which margins each cell is."""
        outer = np.concatenate([[-np.inf], self.edges, [np.inf]])
        return outer[self.column("low").astype(int)], outer[self.column("high").astype(int) + 1]

    @cached_property
    def plain(self) -> bool:
        """Whether every cell is in one bin: no bins were joined."""
        return bool((self.column("low") == self.column("high")).all())

    @cached_property
    def points(self) -> Bools:
        """Which bins are one number wide."""
        inner = np.nextafter(self.edges[:-1], np.inf) >= self.edges[1:]
        return np.concatenate([[False], inner, [False]])[: self.bins]

    @cached_property
    def exact(self) -> bool:
        """Whether every cell is a point: nothing is unknown."""
        return self.plain and bool(self.points[self.column("low").astype(int)].all())

    @cached_property
    def _placements(self) -> Floats:
        """Weights ``(2, classes, bins)``: no sample is lower than in the first, nor higher than in the second."""
        low, high, weight = self.column("low").astype(int), self.column("high").astype(int), self.column("weight")
        made = np.zeros((2, 2, self.bins))
        joined = low < high
        for end, place in enumerate((low, high)):
            for kind in (0, 1):
                own = ~joined & (self.column("class") == kind)
                made[end, kind] = _binned(place[own], weight[own], self.bins)
        for i in np.flatnonzero(joined):
            between = self.edges[low[i] : high[i]]
            means = self.table[i, 4:] / weight[i]
            ends = float(self.ends[0][i]), float(self.ends[1][i])
            for end, beyond in enumerate(shares_beyond(between, ends, means, weight[i] if self.unit else None)):
                made[end, int(self.column("class")[i]), low[i] : high[i] + 1] += weight[i] * -np.diff([1, *beyond, 0])
        return made

    def placed(self, kind: int, end: str) -> Floats:
        """Weights of a class in bins, as ``"low"`` or as ``"high"`` as they can be."""
        made: Floats = self._placements[("low", "high").index(end), kind]
        return made

    @cached_property
    def halves(self) -> tuple[Floats, Floats]:
        """Weights of class 0 and 1 in bins, half of them as low and half of them as high as can be."""
        zeros, ones = ((self.placed(kind, "low") + self.placed(kind, "high")) / 2 for kind in (0, 1))
        return zeros, ones

    @cached_property
    def auroc(self) -> tuple[float, Pair]:
        """The area under the ROC curve, ties counting one half, and its bounds: pairs that may be in either order."""
        zeros, ones = self.halves
        pairs = zeros.sum() * ones.sum()
        if not pairs:
            return math.nan, NOTHING
        tied = 0.0
        if self.points.any():
            own = (self.column("low") == self.column("high")) & self.points[self.column("low").astype(int)]
            at, w, kind = self.column("low").astype(int), self.column("weight") * own, self.column("class")
            tied = float((_binned(at, w * (kind == 0), self.bins) * _binned(at, w * (kind == 1), self.bins)).sum()) / 2
        above = self.placed(0, "high").cumsum()
        low = float((self.placed(1, "low")[1:] * above[:-1]).sum()) + tied
        high = float((self.placed(1, "high") * self.placed(0, "low").cumsum()).sum()) - tied
        value = float((ones * (zeros.cumsum() - zeros / 2)).sum())
        return value / pairs, (low / pairs, high / pairs)

    @cached_property
    def auprc(self) -> tuple[float, Pair]:
        """Average precision and its bounds.

        Sorted from the top, the sample of class 1 at place u has at least u of its class at or above it, and at most
        those whose ranges reach up to its bin; and so for class 0.
        """
        (zeros, ones), total = self.halves, self.halves[1].sum()
        if not total:
            return math.nan, NOTHING
        value = average_precision(zeros[::-1], ones[::-1])
        if self.exact:
            return value, (value, value)
        low = self._least_precision(self.placed(1, "low")[::-1], self.placed(0, "high")[::-1]) / total
        lower, upper = self.placed(1, "low"), self.placed(1, "high")
        high = self._most_precision(lower, upper, self.placed(0, "low")) / total
        return min(max(value, low), high), (low, high)

    def _least_precision(self, ones: Floats, zeros: Floats) -> float:
        """The sum of precisions if zeros are as high as can be, and ahead of ones in their bin; the top bin first."""
        after, ahead = ones.cumsum(), zeros.cumsum()
        some = ones > 0
        before, after, ahead = (after - ones)[some], after[some], ahead[some]
        tied = self.points[::-1][some] if self.plain else np.zeros(len(after), bool)
        if self.unit:  # the sample of a rank is where those that can be above it end
            rank = np.arange(1.0, round(after[-1]) + 1)
            place = np.minimum(np.searchsorted(after, rank - 1 + _ROUNDING, "right"), len(after) - 1)
            each = _binned(place, rank / (rank + ahead[place]), len(after))
        else:  # the weight up to a sample is at least its place: the integral of u / (u + ahead)
            over = np.divide(after - before, before + ahead, out=np.zeros_like(ahead), where=ahead > 0)
            each = (after - before) - ahead * np.log1p(over)
        return float(np.where(tied, (after - before) * after / (after + ahead), each).sum())

    def _most_precision(self, lower: Floats, upper: Floats, zeros: Floats) -> float:
        """The sum of precisions if ones are tied as high as can be, and zeros as low; placed as low and as high."""
        reach = upper[::-1].cumsum()[::-1]
        ahead = zeros[::-1].cumsum()[::-1] - zeros
        if self.plain:
            ahead = ahead + np.where(self.points, zeros, 0.0)
        best = np.divide(reach, reach + ahead, out=np.zeros_like(reach), where=reach > 0)
        # the place u from the top is in the bins between those of the two placements
        steps = np.unique(np.concatenate([upper[::-1].cumsum(), lower[::-1].cumsum()]))
        steps = steps[steps > 0]
        sizes = np.diff(steps, prepend=0.0)
        middle = steps - sizes / 2
        top = self.bins - 1 - np.searchsorted(upper[::-1].cumsum()[:-1], middle)
        bottom = self.bins - 1 - np.searchsorted(lower[::-1].cumsum()[:-1], middle)  # sums may differ by rounding
        return float((sizes * _largest(best, np.minimum(bottom, top), top)).sum())

    def above(self, kind: int, margin: float) -> tuple[float, Pair]:
        """The weight of a class at or above a margin, and its bounds."""
        first = int(np.searchsorted(self.edges, margin - EDGE))
        exact = first < len(self.edges) and abs(self.edges[first] - margin) <= EDGE
        first += 1  # the bin that begins at this edge
        within = first if exact else first - 1  # or the one that the margin is inside of
        least, most = float(self.placed(kind, "low")[first:].sum()), float(self.placed(kind, "high")[within:].sum())
        value = float(self.halves[kind][first:].sum() + self.halves[kind][within:].sum()) / 2
        return value, (least, most)


def _told_apart(table: Floats) -> Floats:
    """The ranges in a sum ``(2, bins, 7)``: rows of lowest bin, highest bin, weight, sums of z, p and z p.

    A bin in which ranges begin (end) that all end (begin) in one other is read off, and what was read is taken away
    from the other side, where more can be read then. Counts, ends and squares are whole numbers, and exact.
    """
    left, rows, found = table.copy(), [np.zeros((0, 6))], True
    while found:
        found = False
        for end in (0, 1):
            count, other, squares = left[end, :, :3].T
            at = np.flatnonzero((count > 0) & (count * squares == other**2))
            if not len(at):
                continue
            found, there = True, np.rint(other[at] / count[at]).astype(int)
            if not ((there >= 0) & (there < left.shape[1]) & ((there - at) * (1 - 2 * end) >= 0)).all():
                raise ValueError("counts of scores whose groups end before they begin")
            rows.append(np.column_stack([(at, there)[end], (there, at)[end], left[end, at, 3:]]))
            taken = np.column_stack([count[at], count[at] * at, count[at] * at.astype(float) ** 2, left[end, at, 3:]])
            np.subtract.at(left[1 - end], there, taken)
            left[end, at] = 0.0
            left[1 - end][left[1 - end][:, 0] == 0] = 0.0  # without what rounding has left
    begin, stop = left[0, :, 0].cumsum(), left[1, :, 0].cumsum()
    for last in np.flatnonzero((begin > 0) & (begin == stop) & (left[1, :, 0] > 0)):  # no range reaches beyond
        first = int(np.flatnonzero(left[0, : last + 1, 0])[0])
        rows.append(np.array([[first, last, *left[0, first : last + 1, 3:].sum(0)]]))
        left[0, : last + 1] = 0.0
    return np.concatenate(rows)


_ROUNDING = 1e-9  # of shares and ranks
_NOISE = 1e-13  # of means, in units of the numbers that they are of: where p is close to 1, little is left of 1 - p
_CENTRES = 16


def shares_beyond(at: Floats, ends: Pair, means: Floats, count: float | None) -> tuple[Floats, Floats]:
    """The least and the largest share of a cell's samples that can be at or above some margins.

    Markov's inequality for z and for p, and for (z - a) (p - s(a)), which is positive and grows to both sides of a:
    the means of all of them follow from those of z, p and z p. ``count`` is the number of samples, if it is known: a
    share is a whole number of them.
    """
    z, p, zp = means.tolist()
    (low, high), inverse = ends, sigmoid(at)
    first, last = sigmoid(np.array(ends))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        noise = _NOISE * (1 + abs(z))
        above = [(p - first + noise) / (inverse - first), (z - low + noise) / (at - low)]
        below = [(last - p + noise) / (last - inverse), (high - z + noise) / (high - at)]
        widest = max(1.0, float(np.sqrt(max(zp - z * p, 0.0) / max(p * (1 - p), 1e-3))))
        for step in widest * np.geomspace(0.02, 8.0, _CENTRES):
            for side, found in ((-1.0, above), (1.0, below)):
                centre = z + side * step
                share = float(sigmoid(np.array(centre)))
                size = np.abs((at - centre) * (inverse - share))  # 0 where both are 1 to rounding
                mean = max(zp - centre * p - share * z + centre * share, 0.0) + noise + _NOISE * abs(centre)
                found.append(np.where((at - centre) * side < 0, mean / size, 1.0))
        most, fewest = (np.nanmin(np.stack([np.ones_like(at), *found]), axis=0) for found in (above, below))
    most, fewest = (np.clip(v + _ROUNDING, 0.0, 1.0) for v in (most, fewest))
    if count is not None:
        most, fewest = (np.floor(v * count + _ROUNDING * count) / count for v in (most, fewest))
    return np.maximum.accumulate((1 - fewest)[::-1])[::-1], np.minimum.accumulate(most)


def sigmoid(t: Floats) -> Floats:
    """Probabilities of margins."""
    e = np.exp(-np.abs(t))
    return np.asarray(np.where(t >= 0, 1.0, e) / (1 + e))


def _binned(at: npt.NDArray[np.int64], weights: Floats, bins: int) -> Floats:
    return np.bincount(at, weights, bins).astype(np.float64)


def _largest(values: Floats, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> Floats:
    """The largest value between two places, for many pairs of them: maxima over 1, 2, 4, ... places are looked up."""
    levels = [values]
    while 2 ** len(levels) <= len(values):
        before, half = levels[-1], 2 ** (len(levels) - 1)
        levels.append(np.maximum(before[:-half], before[half:]))
    level = np.log2(last - first + 1).astype(int)
    made = np.empty(len(first))
    for k in np.unique(level):
        at = level == k
        made[at] = np.maximum(levels[k][first[at]], levels[k][last[at] + 1 - 2**k])
    return made
