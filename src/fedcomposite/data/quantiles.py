"""Quantiles from histograms: no value is sent, and where the pooled quantile lies is known for certain.

The first histogram has fixed edges (0 and 1, 2, 5 times powers of ten), so nobody tells a least or a largest value.
The cell that holds a value of the wanted rank is then divided again and again, as far as ``min_count`` lets the sites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedcomposite.data.faults import DataError
from fedcomposite.data.queries import GRID, Answer, Ask, Below, Query
from fedcomposite.data.steps import AnyStep

_CELLS = 64  # into which a cell is divided
_EDGES = 4000  # of one column
_ROUNDS = 8
_SMALL = 1e-12  # the least edge of the grid above 0
_NARROW = 1e-9  # relative width at which a value counts as found
_EXACT = Context(prec=60)


class BoundedQuantile(NamedTuple):
    """A quantile as numpy defines it (linear between order statistics), and bounds that hold for certain."""

    value: float
    low: float
    high: float


class _Rank:
    """The interval that holds the value of one rank, counted from 1."""

    def __init__(self, rank: int) -> None:
        self.rank, self.low, self.high = rank, -math.inf, math.inf
        self.counts = 0.0, 0.0  # about how many values lie below the two ends
        self.done = False

    def look(self, edges: npt.NDArray[np.float64], low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]) -> None:
        """Narrow the interval by bounds of the counts below the edges."""
        width = self.high - self.low
        middle = (low + high) / 2
        starts, ends = np.flatnonzero(high < self.rank), np.flatnonzero(low >= self.rank)
        if len(starts) and edges[starts[-1]] >= self.low:
            self.low, self.counts = float(edges[starts[-1]]), (float(middle[starts[-1]]), self.counts[1])
        if len(ends) and edges[ends[0]] <= self.high:
            self.high, self.counts = float(edges[ends[0]]), (self.counts[0], float(middle[ends[0]]))
        scale = max(abs(self.low), abs(self.high))
        new = self.high - self.low
        self.done = new <= max(_NARROW * scale, _SMALL) or (math.isfinite(width) and new > 0.9 * width)

    def edges(self, cells: int) -> list[float]:
        """Where to divide the interval into so many cells."""
        return [] if self.done else np.linspace(self.low, self.high, cells + 1).tolist()

    @property
    def value(self) -> float:
        """The simplest decimal number of a narrow interval; otherwise the place that the counts suggest."""
        if self.high - self.low <= 1e-6 * max(abs(self.low), abs(self.high)) or self.high <= _SMALL:
            return simplest(self.low, self.high)
        below, upto = self.counts
        share = (self.rank - 0.5 - below) / (upto - below) if upto > below else 0.5
        return self.low + min(max(share, 0.0), 1.0) * (self.high - self.low)


def simplest(low: float, high: float) -> float:
    """The number with the fewest digits in [low, high)."""
    if low <= 0.0 < high:
        return 0.0
    first = -math.floor(math.log10(max(abs(low), abs(high)))) - 1
    for digits in range(first, first + 19):
        unit = Decimal(1).scaleb(-digits)
        for rounding in (ROUND_CEILING, ROUND_FLOOR):
            whole = _EXACT.divide(Decimal(low), unit).to_integral_value(rounding)
            found = float(_EXACT.multiply(whole, unit))
            if low <= found < high:
                return found
    return low


def quantiles(
    ask: Ask, wanted: Mapping[str, Sequence[float]], steps: Sequence[AnyStep] = ()
) -> dict[str, list[BoundedQuantile]]:
    """The quantiles of columns over all sites.

    Parameters
    ----------
    ask : callable
        Asks the sites.
    wanted : dict
        For each column the quantiles, from 0 to 1.
    steps : list of steps
        What is done to the tables before.
    """

    def together(query: Query) -> list[Answer]:
        return [query.combine(ask(query))]

    found = quantiles_of_each(together, wanted, steps)
    for name, (one,) in found.items():
        if not one:
            raise DataError(f"no site has enough values of {name!r} to tell a quantile; drop it or lower min_count")
    return {name: one for name, (one,) in found.items()}


def quantiles_of_each(
    ask: Ask, wanted: Mapping[str, Sequence[float]], steps: Sequence[AnyStep] = ()
) -> dict[str, list[list[BoundedQuantile]]]:
    """The quantiles of columns in each answer to a query, in the same exchanges; none of an answer without values."""
    first = _ask(ask, dict.fromkeys(wanted, GRID), steps)
    counts = {name: [int(one[f"n:{name}"][0]) for one in first] for name in wanted}
    ranks: dict[str, list[dict[int, _Rank]]] = {}
    for name, shares in wanted.items():
        both = [{rank for share in shares for rank in _ranks(n, share)[:2]} if n else () for n in counts[name]]
        ranks[name] = [{rank: _Rank(rank) for rank in sorted(one)} for one in both]
        _look(ranks[name], GRID, first, name)
        if not all(math.isfinite(r.low + r.high) for each in ranks[name] for r in each.values()):
            raise DataError(f"column {name!r} has values beyond 1e12; change its unit")
    for _ in range(_ROUNDS):
        edges: dict[str, list[float]] = {}
        for name, each in ranks.items():
            searched = [r for one in each for r in one.values() if not r.done]
            cells = min(_CELLS, _EDGES // max(len(searched), 1))
            if searched:
                edges[name] = sorted({e for r in searched for e in r.edges(cells)})
        if not edges:
            break
        found = _ask(ask, edges, steps)
        for name, at in edges.items():
            _look(ranks[name], at, found, name)
    return {
        name: [[_between(one, n, share) for share in shares] if n else []
               for one, n in zip(ranks[name], counts[name], strict=True)]
        for name, shares in wanted.items()
    }  # fmt: skip


def _ask(ask: Ask, edges: Mapping[str, Sequence[float]], steps: Sequence[AnyStep]) -> list[Answer]:
    return ask(Below(edges={name: list(each) for name, each in edges.items()}, steps=list(steps)))


def _look(each: Sequence[Mapping[int, _Rank]], edges: Sequence[float], found: Sequence[Answer], name: str) -> None:
    for ranks, told in zip(each, found, strict=True):
        for rank in ranks.values():
            if not rank.done:
                rank.look(np.asarray(edges), told[f"low:{name}"], told[f"high:{name}"])


def _ranks(n: int, share: float) -> tuple[int, int, float]:
    """The ranks between which a quantile lies, and how far it is from the first."""
    if not 0 <= share <= 1:
        raise DataError(f"a quantile of {share}, must be between 0 and 1")
    place = (n - 1) * share
    first = math.floor(place)
    return first + 1, min(first + (place > first), n - 1) + 1, place - first


def _between(ranks: Mapping[int, _Rank], n: int, share: float) -> BoundedQuantile:
    first, second, weight = _ranks(n, share)
    a, b = ranks[first], ranks[second]
    mixed = [(1 - weight) * x + weight * y for x, y in ((a.value, b.value), (a.low, b.low), (a.high, b.high))]
    return BoundedQuantile(*mixed)
