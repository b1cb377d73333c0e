"""A classifier's scores from counts with noise, and its calibration from sums without.

Sites count their samples of each class between a few dozen edges and put noise on these numbers. Its covariance is
known, so that what follows from them has bounds that hold but in one of 15,000 cases: those of exact counts in such
bins, and :data:`DEVIATIONS` standard deviations of the noise on either side (for average precision, of all counts below
edges at once; for the area, whose deviation depends on the counts, what :func:`pairs_off` proves). The calibration's
slope and intercept are found by Newton's method, from sums over all samples at each line that it tries, and are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcomposite.analysis.curves import calibration_line
from fedcomposite.analysis.score_bins import EDGE, NOTHING, Cells, Floats, Pair, sigmoid
from fedcomposite.runtime.driver import Driver
from fedcomposite.runtime.protocol import CALIBRATION, Request, Rows, Sums, calibration
from fedcomposite.runtime.tally_noise import factor

DEVIATIONS = 4.0
"""Of the noise, between a number and its bounds."""
BEYOND = NormalDist().cdf(-DEVIATIONS)
"""The probability with which a number is beyond its bounds, on one side."""

_OF_NORMAL = 0.8  # the share of it that is left to normal variables, where their variance has to be bounded as well

_EDGES = 56
_WITHIN = (np.arange(8) + 0.5) / 8  # places in a bin, from its lower end


@dataclass(frozen=True)
class NoisedCells(Cells):
    """Cells of bins, each of the weight that is likeliest beside the noise."""

    raw: Floats
    """Weights with noise ``(2, bins)``; they may be negative."""
    totals: Floats
    """Of each class, exact: weight, sums of p and of its square ``(2, 3)``."""
    variance: float
    """Of the noise of each part of the bins (:mod:`~fedcomposite.runtime.tally_noise`)."""
    shifted: float = 0.0
    """The variance of what sites have taken from one class's sum of p to the other's."""

    @classmethod
    def of(
        cls, edges: Floats, raw: Floats, totals: Floats, variance: float, unit: bool, shifted: float = 0.0
    ) -> NoisedCells:
        """From numbers with noise. Margins are taken for the middles of their bins."""
        outer = np.concatenate([edges[:1] * 2 - edges[1:2], edges, edges[-1:] * 2 - edges[-2:-1]])
        middle = (outer[1:] + outer[:-1]) / 2
        rows = []
        for kind, (weight, p, _) in enumerate(totals):
            counts = _likeliest(raw[kind], weight)
            at = np.flatnonzero(counts > 0)
            said = counts[at] * sigmoid(middle[at])
            said *= p / said.sum() if said.sum() > 0 else 0.0
            rows.append(np.column_stack([np.full(len(at), kind), at, at, counts[at], np.zeros((len(at), 3))]))
            rows[-1][:, 5] = said
        return cls(edges, np.concatenate(rows), unit, raw, totals, variance, shifted)

    @classmethod
    def told_with_noise(cls, answers: Sequence[Sums], edges: Tensor, unit: bool) -> NoisedCells:
        """From answers to requests about different samples."""
        raw, totals, variance = (sum(one[key].numpy() for one in answers) for key in ("tallies", "totals", "variance"))
        of_tallies, shifted = np.asarray(variance).tolist()
        return cls.of(edges.numpy(), np.asarray(raw), np.asarray(totals), of_tallies, unit, shifted)

    @classmethod
    def all(cls, each: Sequence[Cells]) -> NoisedCells:
        """Of several sites, with the same edges."""
        own = [one for one in each if isinstance(one, NoisedCells)]
        raw, totals = (np.sum([getattr(one, name) for one in own], axis=0) for name in ("raw", "totals"))
        variance, shifted = (sum(getattr(one, name) for one in own) for name in ("variance", "shifted"))
        return cls.of(own[0].edges, raw, totals, variance, all(one.unit for one in own), shifted)

    @cached_property
    def plain(self) -> bool:
        """Whether nothing but the width of bins is unknown."""
        return self.variance == 0

    @cached_property
    def auroc(self) -> tuple[float, Pair]:
        """The area under the ROC curve and its bounds; without a bias, since noise of two classes is independent."""
        pairs = float(self.totals[:, 0].prod())
        if not pairs:
            return math.nan, NOTHING
        tied = np.diag(self.points / 2)
        orders = np.tri(self.bins, k=-1) + tied, np.tri(self.bins) - tied  # which pairs surely are in order, and may be
        low, high = (float(self.raw[1] @ order @ self.raw[0]) for order in orders)
        less, more = (pairs_off(order, self.raw[0], self.raw[1], self.variance) for order in orders)
        value = min(max((low + high) / 2, 0.0), pairs)
        return value / pairs, (max(min(low, value) - less, 0.0) / pairs, min(max(high, value) + more, pairs) / pairs)

    @cached_property
    def auprc(self) -> tuple[float, Pair]:
        """Average precision and its bounds, from bounds of the counts below every edge that hold all at once.

        It never falls if samples of class 1 move up or those of class 0 down, so that it is least and largest where
        these counts are at their bounds. No slope is taken: at few samples one at the counts with noise says nothing
        of the true ones.
        """
        (zeros, ones), total = self.halves, float(self.totals[1, 0])
        if not total:
            return math.nan, NOTHING
        if self.plain:
            return super().auprc
        (low_zeros, high_zeros), (low_ones, high_ones) = (self._shifted(kind) for kind in (0, 1))
        low = self._least_precision(low_ones[::-1], high_zeros[::-1]) / total
        high = min(self._most_precision(low_ones, high_ones, low_zeros) / total, 1.0)
        return min(max(_precision(zeros, ones), low), high), (low, high)

    def _shifted(self, kind: int) -> tuple[Floats, Floats]:
        """Weights of a class in bins, as low and as high as they can be.

        A normal variable is beyond :data:`DEVIATIONS` with some probability. Each of the numbers below an edge, of two
        classes, is given this probability divided by how many they are: so all hold at once but with the whole of it,
        whatever their covariance is (Bonferroni).
        """
        beyond = BEYOND / (2 * (self.bins - 1))
        off = -NormalDist().inv_cdf(beyond) * np.sqrt(self.variance * self._of_edges)
        below, total = self.raw[kind].cumsum()[:-1], float(self.totals[kind, 0])
        least, most = (np.clip(below + side, 0.0, total) for side in (-off, off))
        if self.unit:
            least, most = np.ceil(least), np.floor(most)
        least, most = np.maximum.accumulate(least), np.minimum.accumulate(most[::-1])[::-1]
        low, high = (np.diff(v, prepend=0.0, append=total) for v in (np.maximum(least, most), least))
        return low, high

    @cached_property
    def _of_edges(self) -> Floats:
        """The variance of the noise of the number below each edge, where that of every part has variance 1."""
        made: Floats = np.square(factor(self.bins).cumsum(0)).sum(1)[:-1]
        return made

    def above(self, kind: int, margin: float) -> tuple[float, Pair]:
        value, (low, high) = super().above(kind, margin)
        beside = np.searchsorted(self.edges, [margin - EDGE, margin + EDGE]) - [0, 1]  # an edge, or one on either side
        largest = float(self._of_edges[beside.clip(0, len(self._of_edges) - 1)].max())
        off = DEVIATIONS * math.sqrt(self.variance * largest)
        return value, (max(low - off, 0.0), min(high + off, float(self.totals[kind, 0])))


def pairs_off(order: Floats, zeros: Floats, ones: Floats, variance: float, beyond: float = BEYOND) -> float:
    """Most that the number of pairs in an order is off on one side, but with a probability of ``beyond``.

    Numbers of two classes in bins are told as m + s R g (:mod:`~fedcomposite.runtime.tally_noise`), with a standard
    normal g for each class, so that y' O x is told for n' O m. It is off by s (w u + v z), where w = |R' O x|,
    v = |R' O' n|, and u and z are standard normal: u, along R' O x in the noise of y, and z, along R' O' n in that of
    x, are independent, whatever x is. Where w <= W, that is beyond k s hypot(W, v) only if W u + v z is, or v z alone
    and u < 0: with a probability of at most 1.5 Phi(-k).

    W and v are not known, but |R' O x| is a function of the noise of x with the Lipschitz constant L = s |R' O R|, so
    that it is beyond its mean by t L on either side with a probability of exp(-t^2 / 2) (Tsirelson, Ibragimov and
    Sudakov 1976), and its variance is at most L^2 (Poincare). So W = w + 2 t L and v^2 = (|R' O' y| + t L)^2 + L^2, but
    in three cases of that probability. A class of which some site tells nothing has less noise: all of it holds then.
    """
    if variance == 0:
        return 0.0
    root, s = factor(len(zeros)), math.sqrt(variance)
    L = s * float(np.linalg.norm(root.T @ order @ root, 2))
    k = -NormalDist().inv_cdf(_OF_NORMAL * beyond / 1.5)
    t = math.sqrt(-2 * math.log((1 - _OF_NORMAL) * beyond / 3))
    w, v = (float(np.linalg.norm(root.T @ o @ told)) for o, told in ((order, zeros), (order.T, ones)))
    return k * s * math.hypot(w + 2 * t * L, v + t * L, L)


def _likeliest(raw: Floats, total: float) -> Floats:
    """Weights in bins that are not negative, from ones with noise on those below each edge."""
    below = np.clip(raw.cumsum()[:-1], 0.0, total)
    rising = (np.maximum.accumulate(below) + np.minimum.accumulate(below[::-1])[::-1]) / 2
    return np.diff(rising, prepend=0.0, append=total)


def _precision(zeros: Floats, ones: Floats) -> float:
    """Average precision of weights evenly spread over their bins; they may be a bit below zero."""
    tp, fp = (v[::-1].cumsum() - np.outer(_WITHIN, v[::-1]) for v in (ones, zeros))
    tp, fp = np.maximum(tp, 0.0), np.maximum(fp, 0.0)
    return float((ones[::-1] * (tp / np.maximum(tp + fp, 1e-9))).sum() / (len(_WITHIN) * ones.sum()))


def tally_edges(sums: Floats, threshold: float = 0.5) -> Tensor:
    """Edges that divide margins into about equal parts, from sums of them, and that of a probability.

    Two around all if they are alike.
    """
    told = dict(zip(CALIBRATION, sums, strict=True))
    mean = told["z"] / told["weight"]
    spread = math.sqrt(max(told["zz"] / told["weight"] - mean**2, 0.0))
    if not spread > 1e-9 * max(1.0, abs(mean)):
        return torch.tensor([mean - 1e-6, mean + 1e-6], dtype=torch.float64)
    place = (torch.arange(_EDGES, dtype=torch.float64) + 0.5) / _EDGES
    spaced = mean + 0.6 * spread * torch.logit(place)  # further out than a normal distribution's
    return torch.from_numpy(np.union1d(spaced.numpy(), math.log(threshold / (1 - threshold))))


class Calibrated(NamedTuple):
    """By site and of all."""

    first: dict[str, Floats]
    """Sums at the line 0 + 1 z."""
    lines: dict[str, Pair]
    """The calibration's slope and intercept; NaN if there is none."""
    beside: Mapping[str, Sequence[Sums]]
    """Answers to what was asked beside it."""


def calibrated_lines(
    driver: Driver,
    pairs: Sequence[tuple[Tensor, Rows]],
    part: str,
    beside: Callable[[Mapping[str, Floats]], Sequence[Request]],
) -> Calibrated:
    """Calibrate by Newton's method; ``beside`` says, by the sums at the first line, what else is asked with the next.

    All take their steps in the same exchanges. A line at which a site does not tell its sums is not known.
    """
    start, _ = _at_lines(driver, pairs, part, [(0.0, 1.0)])
    first = {name: sums[0] for name, sums in start.items() if sums[0, 0] > 0}
    also, answers = beside(first), dict[str, Sequence[Sums]]()
    tasks = {(name, free): calibration_line(free) for name in first for free in (True, False)}
    tried = {key: next(task) for key, task in tasks.items()}
    sums, found = {key: first[key[0]] for key in tried}, dict[tuple[str, bool], Pair]()
    while tried or also:
        for key in list(tried):
            own, whole = sums[key], first[key[0]][0]
            known = abs(own[0] - whole) <= 1e-9 * whole
            try:
                tried[key] = tasks[key].send(dict(zip(CALIBRATION, own, strict=True)) if known else None)
            except StopIteration as stop:
                found[key] = stop.value
                del tried[key]
        if tried or also:
            told, more = _at_lines(driver, pairs, part, list(tried.values()), also)
            sums, also, answers = {key: told[key[0]][k] for k, key in enumerate(tried)}, (), answers or more
    return Calibrated(first, {name: (found[name, True][1], found[name, False][0]) for name in first}, answers)


def _at_lines(
    driver: Driver,
    pairs: Sequence[tuple[Tensor, Rows]],
    part: str,
    lines: Sequence[Pair],
    also: Sequence[Request] = (),
) -> tuple[Mapping[str, Floats], dict[str, Sequence[Sums]]]:
    """Sums at some lines of each site, and of all; and answers to what else is asked."""
    at = torch.tensor(lines, dtype=torch.float64)
    told = driver.told([*also, *(calibration(x, at, part, rows) for x, rows in (pairs if lines else ()))])
    others: dict[str, Sequence[Sums]] = {name: answers[: len(also)] for name, answers in told.items()}
    if not lines:
        return {}, others
    own = {name: torch.stack([one["sums"] for one in each[len(also) :]]).sum(0).numpy() for name, each in told.items()}
    made = own if "all" in own and not driver.by_site else {**own, "all": np.sum(list(own.values()), axis=0)}
    return made, others
