"""What is odd about a column at one site, judged beside the other sites; every flag is a question, not a verdict."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcomposite.data.learning import in_order
from fedcomposite.data.quantiles import simplest

UNITS = {
    38.67: "cholesterol: mmol/L and mg/dL",
    88.57: "triglycerides: mmol/L and mg/dL",
    18.02: "glucose: mmol/L and mg/dL",
    88.42: "creatinine: mg/dL and µmol/L",
    17.1: "bilirubin: mg/dL and µmol/L",
    2.54: "inches and centimetres",
    2.2046: "pounds and kilograms",
    10.0: "a power of ten",
    100.0: "a power of ten",
    1000.0: "a power of ten",
    365.25: "years and days",
    12.0: "years and months",
}
"""Ratios by which the same quantity differs in other units."""
_RATIO = 2.0  # medians further apart than this may be in other units
_NEAR = 0.12  # relative distance to a known ratio
_ROWS = 20  # from which on numbers in a row are no accident


def flags_of(group: Sequence[ColumnFacts], target: bool) -> list[list[str]]:
    """For each site's look at one feature, what is odd about it."""
    out = []
    for i, look in enumerate(group):
        others = [o for j, o in enumerate(group) if j != i and o.n > 0]
        found = [_gaps(look, others), _constant(look, others, target), _unit(look, others), _zeros(look)]
        found += [_code(look), _outlier(look), _levels(look, others), _identifier(look), _again(look)]
        if look.withheld:
            where = " at some site" if look.site == "all" else ""
            found.append(f"too few rows, or too few that differ{where}: not told")
        out.append([text for text in found if text])
    return out


def _gaps(look: ColumnFacts, others: Sequence[ColumnFacts]) -> str:
    if look.kind == "absent":
        return "no such column"
    if look.n == 0:
        return "all missing"
    share = look.missing / (look.n + look.missing)
    elsewhere = [o.missing / (o.n + o.missing) for o in others]
    if share >= 0.3 and elsewhere and float(np.median(elsewhere)) < share / 3:
        return f"{100 * share:.0f} % missing, elsewhere {100 * float(np.median(elsewhere)):.0f} %"
    return ""


def _constant(look: ColumnFacts, others: Sequence[ColumnFacts], target: bool) -> str:
    one = len(look.levels) == 1 and look.rest == 0 and next(iter(look.levels.values())) == look.n
    if not one:
        return ""
    value = next(iter(look.levels))
    if target:
        return f"one class only: {value}"
    if value == "0" and any(abs(o.median) > 0 for o in others if not o.category):
        return "every value is 0: not measured?"
    return f"constant: {value}"


def _unit(look: ColumnFacts, others: Sequence[ColumnFacts]) -> str:
    """Whether the middle half of the values lies apart from that of the others, by a large factor."""
    compared = [o for o in others if o.numeric and not o.category and o.median > 0]
    if not look.numeric or look.category or not look.median > 0 or not compared:
        return ""
    elsewhere = float(np.median([o.median for o in compared]))
    ratio = look.median / elsewhere
    size = max(ratio, 1 / ratio)
    apart = look.quantiles[3] < min(o.quantiles[1] for o in compared) or look.quantiles[1] > max(
        o.quantiles[3] for o in compared
    )
    if size < _RATIO or not apart:
        return ""
    near = min(UNITS, key=lambda known: abs(math.log(size / known)))
    hint = f" ({UNITS[near]}?)" if abs(size / near - 1) <= _NEAR else ""
    times = f"{size:.3g} times {'more' if ratio > 1 else 'less'} than elsewhere"
    return f"median {look.median:.3g}, {times}: another unit?{hint}"


def _zeros(look: ColumnFacts) -> str:
    """Zeros with nothing near them."""
    zeros = look.levels.get("0", 0)
    if not look.numeric or look.category or zeros == 0 or zeros == look.n or look.below(0.0) > 0:
        return ""
    middle = look.value_at(zeros + (look.n - zeros) / 2)
    near = look.below(0.2 * middle) - zeros
    return f"{zeros} zeros far from the other values: not measured?" if near <= 0.02 * look.n else ""


def _code(look: ColumnFacts) -> str:
    """A value that several rows have and no other is near to, or that alone is negative: 999, -9."""
    low, high = look.quantiles[1], look.quantiles[3]
    if not look.numeric or look.category or not high > low:
        return ""
    for text, count in look.levels.items():
        value, reach = float(text), 5 * (high - low)
        near = look.below(value + abs(value) / 20) - look.below(value - abs(value) / 20)
        far = not low - reach <= value <= high + reach and near <= 1.1 * count
        if count < look.n / 4 and (far or (value < 0 and look.below(0.0) <= 1.1 * count)):
            return f"{count} values are {text}, far from the others: not measured?"
    return ""


def _outlier(look: ColumnFacts) -> str:
    """A deviation that nearly all values together do not explain."""
    spread = look.quantiles[4] - look.quantiles[0]
    if not look.numeric or look.category or not spread > 0 or not look.sd > 5 * spread:
        return ""
    return "mean and deviation come from a few values far from all others: typing errors?"


def _levels(look: ColumnFacts, others: Sequence[ColumnFacts]) -> str:
    """Levels that only this site has, or that it alone does not have."""
    compared = [o for o in others if o.category]
    if not look.category or not look.n or not compared:
        return ""
    elsewhere = set().union(*(o.levels for o in compared))
    said = []
    if only := sorted(set(look.levels) - elsewhere):
        folded = {name.casefold(): name for name in elsewhere}
        twins = [f"{name!r} is {folded[name.casefold()]!r} elsewhere" for name in only if name.casefold() in folded]
        said.append(twins[0] if twins else f"only here: {', '.join(only)}")
    common = set(compared[0].levels).intersection(*(o.levels for o in compared)) - set(look.levels)
    if common and look.rest == 0:
        said.append(f"no {', '.join(sorted(common))} here")
    return "; ".join(said)


def _identifier(look: ColumnFacts) -> str:
    if look.kind == "date":
        return "dates"
    if look.kind == "text" and not look.levels and look.n:
        return "no value is common: an identifier or free text?"
    if look.numeric and look.n >= _ROWS and not look.missing and not look.levels:
        return "consecutive numbers: an identifier?" if _consecutive(look) else ""
    return ""


def _again(look: ColumnFacts) -> str:
    """Patients who are there twice."""
    said = []
    for count, what in ((look.again, "values of an identifier"), (look.rows_again, "whole rows of this table")):
        if count:
            said.append(f"{f'{count} {what}' if count > 1 else f'some {what}'} occur again: patients twice?")
    return "; ".join(said)


def _consecutive(look: ColumnFacts) -> bool:
    """Whether mean and deviation are those of n numbers in a row."""
    first = look.mean - (look.n - 1) / 2
    return abs(look.sd - math.sqrt((look.n**2 - 1) / 12)) < 1e-9 * look.n and abs(first - round(first)) < 1e-6


SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
_MANY = 8  # most levels of a category that is written as numbers


@dataclass
class ColumnFacts:
    """A column of a site; NaN is what it does not have or does not tell."""

    site: str
    feature: str
    kind: str
    n: int
    missing: int
    mean: float = math.nan
    sd: float = math.nan
    quantiles: list[float] = field(default_factory=lambda: [math.nan] * len(SHARES))
    levels: dict[str, int] = field(default_factory=dict)
    rest: int = 0
    withheld: bool = False
    again: int = 0
    """Values of an identifier that occur again; 1 may be a few."""
    rows_again: int = 0
    """Whole rows of the site that occur again, in the look at its first column."""
    category: bool = False
    """Whether the column looks like levels at every site."""
    edges: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    low: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0))
    high: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0))

    @property
    def numeric(self) -> bool:
        """Whether it holds numbers."""
        return self.kind == "number"

    @property
    def few(self) -> bool:
        """Whether its values look like levels: text, or a few numbers that most rows have."""
        told = 0 < len(self.levels) <= _MANY and sum(self.levels.values()) >= 0.8 * self.n
        return self.kind == "text" or (self.numeric and told)

    @property
    def shown_levels(self) -> list[tuple[str, int]]:
        """The levels with their counts, if it is a category."""
        return [(name, self.levels[name]) for name in in_order(self.levels)] if self.category else []

    @property
    def median(self) -> float:
        """The middle value, by histogram."""
        return self.quantiles[2]

    @functools.cached_property
    def counts(self) -> npt.NDArray[np.float64]:
        """About how many values lie below each edge; those of a group are spread evenly over the edges inside of it."""
        same = np.append(False, (np.diff(self.low) == 0) & (np.diff(self.high) == 0))
        run = np.cumsum(~same) - 1  # edges with the same bounds are inside of the same group
        first, last = np.flatnonzero(~same), np.append(np.flatnonzero(~same)[1:] - 1, len(self.edges) - 1)
        start, end = (
            self.edges[np.maximum(first - 1, 0)][run],
            self.edges[np.minimum(last + 1, len(self.edges) - 1)][run],
        )
        share = np.clip((self.edges - start) / np.maximum(end - start, 1e-300), 0.0, 1.0)
        made: npt.NDArray[np.float64] = self.low + share * (self.high - self.low)
        return made

    def value_at(self, count: float) -> float:
        """The value below which about so many lie: the simplest number of its cell."""
        ends = np.flatnonzero(self.counts >= count)
        j = int(ends[0]) if len(ends) else len(self.edges) - 1
        return simplest(float(self.edges[max(j - 1, 0)]), float(self.edges[j]))

    def below(self, value: float) -> float:
        """About how many values lie below a number."""
        return float(np.interp(value, self.edges, self.counts)) if len(self.edges) else math.nan
