"""Tuning that is the same for every method: a grid over its step and its own number, an optimum that lies inside."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from fedcomposite.papers.measuring import Study

Point = tuple[float, ...]


@dataclass
class Search:
    """The numbers of one method on one problem that are to be chosen."""

    fixed: dict[str, Any]
    """The rest of the cell."""
    grid: dict[str, list[float]]
    """Values of each number, ascending by a common factor."""
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Where a number may not lie: at these values or beyond."""
    extensions: int = 0
    """How often an edge was best, and the grid grew there."""

    def points(self) -> list[Point]:
        """All points of the grid."""
        return list(itertools.product(*self.grid.values()))

    def cell(self, point: Point) -> dict[str, Any]:
        """What is measured for a point."""
        return {**self.fixed, **dict(zip(self.grid, point, strict=True))}

    def grow(self, best: Point) -> bool:
        """Extend the grid by one value beyond each edge that the best point lies on; whether there was one."""
        grown = False
        for (name, values), value in zip(self.grid.items(), best, strict=True):
            if len(values) < 2:
                continue
            low, high = self.limits.get(name, (0.0, math.inf))
            if value == values[0] and (wish := values[0] ** 2 / values[1]) > low:
                self.grid[name], grown = [wish, *values], True
            elif value == values[-1] and (wish := values[-1] ** 2 / values[-2]) < high:
                self.grid[name], grown = [*values, wish], True
        self.extensions += grown
        return grown


def tuned(
    study: Study,
    function: Callable[[dict[str, Any]], pd.DataFrame],
    searches: Mapping[str, Search],
    score: Callable[[pd.DataFrame], float],
    *,
    extensions: int = 4,
) -> tuple[dict[str, dict[str, float]], pd.DataFrame]:
    """The best numbers of every search, and a table of all trials.

    A trial's score is ``score`` of its rows, the lower the better; nan loses to everything. All searches go on side by
    side: what is missing of their grids is measured, the grids whose best point is at an edge grow, and again.

    Parameters
    ----------
    study : Study
        Measures the cells, and keeps them.
    function : function
        From a cell to its rows, as for :meth:`Study.each`.
    searches : mapping of str to Search
        By a label.
    score : function
        From a trial's rows to its score.
    extensions : int
        How often a grid may grow.
    """
    names = sorted({name for search in searches.values() for name in search.grid})
    while True:
        every = {label: {p: search.cell(p) for p in search.points()} for label, search in searches.items()}
        found = study.measured(function, [cell for cells in every.values() for cell in cells.values()])
        scores: dict[str, dict[Point, float]] = {}
        for label, cells in every.items():
            there = {p: found[key] for p, cell in cells.items() if (key := study.key(function, cell)) in found}
            scores[label] = {p: _number(score(rows)) for p, rows in there.items()}
        best = {label: min(each, key=lambda p, e=each: e[p]) for label, each in scores.items() if each}  # type: ignore[misc]
        grown = [
            label
            for label, point in best.items()
            if searches[label].extensions < extensions and not study.partial and searches[label].grow(point)
        ]
        if not grown:
            break
    rows = [
        {
            "search": label, "score": value, "chosen": point == best[label],
            **dict(zip(searches[label].grid, point, strict=True)),
        }
        for label, each in scores.items()
        for point, value in each.items()
    ]  # fmt: skip
    chosen = {label: dict(zip(searches[label].grid, point, strict=True)) for label, point in best.items()}
    return chosen, pd.DataFrame(rows, columns=["search", *names, "score", "chosen"])


def inside(trials: pd.DataFrame) -> pd.Series:
    """For every search whether its best point lies inside its grid, number by number."""
    found = {}
    numbers = [c for c in trials if c not in ("search", "score", "chosen")]
    for label, rows in trials.groupby("search", sort=False):
        best = rows[rows["chosen"]].iloc[0]
        spans = [(rows[c].min(), best[c], rows[c].max()) for c in numbers if rows[c].nunique() > 1]
        found[str(label)] = all(low < value < high for low, value, high in spans)
    return pd.Series(found, dtype=bool)


def _number(value: float) -> float:
    return math.inf if math.isnan(value) else float(value)
