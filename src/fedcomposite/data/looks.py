"""What was told about one column of one site."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcomposite.data.learning import in_order
from fedcomposite.data.quantiles import simplest

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
_MANY = 8  # most levels of a category that is written as numbers


@dataclass
class Look:
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
        """About how many values lie below each edge; evenly spread over joint cells."""
        known = self.low == self.high
        spread: npt.NDArray[np.float64] = np.interp(self.edges, self.edges[known], self.low[known])
        return spread

    def value_at(self, count: float) -> float:
        """The value below which about so many lie: the simplest number of its cell."""
        ends = np.flatnonzero(self.counts >= count)
        j = int(ends[0]) if len(ends) else len(self.edges) - 1
        return simplest(float(self.edges[max(j - 1, 0)]), float(self.edges[j]))

    def below(self, value: float) -> float:
        """About how many values lie below a number."""
        return float(np.interp(value, self.edges, self.counts)) if len(self.edges) else math.nan
