"""Tables under a budget: a noised census, and a table that is like the sites', of which all else is asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fedcomposite.data.cells import level
from fedcomposite.data.queries import Answer, Census, Ints, Query, Rules, Schema, answer
from fedcomposite.data.sheets import Array, Sheet
from fedcomposite.privacy import BudgetError, Counters, StudyBudget

Floats = npt.NDArray[np.float64]


def noised_census(sheet: Sheet, query: Census, budget: StudyBudget, normal: Callable[[int], Floats]) -> Answer:
    """What a site says to a census under a budget; whoever calls this has charged for it before.

    A row adds a 1 to one entry of each column, a vector of norm sqrt(columns), and the noise is in proportion to that:
    one Gaussian query of sensitivity 1.
    """
    exact = query.ask(sheet, Rules(min_count=1, noised=True))
    scale = budget.noise * math.sqrt(budget.share * len(query.columns))
    return {key: counts + scale * normal(len(counts)) for key, counts in exact.items()}


class NoisedTables:
    """Answers queries from a table that is like the sites', all together: see :data:`fedcomposite.data.queries.Ask`.

    ``census`` asks the sites, once; ``sites`` are their names.
    """

    def __init__(self, census: Callable[[Census], list[Answer]], budget: StudyBudget, sites: Sequence[str]) -> None:
        self._census, self._budget, self.names = census, budget, list(sites)
        self._sheet: Sheet | None = None

    @classmethod
    def at_hand(cls, sheets: Sequence[Sheet], budget: StudyBudget, seed: int = 0) -> NoisedTables:
        """Of sheets here, with the noise that a seed gives; the budget is charged when the first query comes."""

        def census(query: Census) -> list[Answer]:
            budget.charge(1)
            ids, source = np.arange(len(sheets), dtype=np.uint64), Counters(seed)
            drawn = source.normal(ids, 0, 0, sum(map(len, query.sums().values())))
            return [noised_census(s, query, budget, _taking(row)) for s, row in zip(sheets, drawn, strict=True)]

        return cls(census, budget, [sheet.name for sheet in sheets])

    @property
    def sheet(self) -> Sheet:
        """The table, made when it is needed first."""
        if self._sheet is None:
            if not self._budget.columns:
                raise BudgetError("columns of the budget: say which ones a description or a recipe may look at")
            columns = {name: list(given) for name, given in self._budget.columns.items()}
            query = Census(columns=columns, cells=self._budget.cells)
            self._sheet = like(query, query.combine(self._census(query)))
        return self._sheet

    def __call__(self, query: Query) -> list[Answer]:
        """The one answer there is; of the columns' names one of each site."""
        found = answer(self.sheet, query, Rules(min_count=1))
        found |= {key: np.zeros_like(v) for key, v in found.items() if key.startswith("again")}
        return [found] * (len(self.names) if isinstance(query, Schema) else 1)


def _taking(numbers: Floats) -> Callable[[int], Floats]:
    """Gives numbers one after another."""
    rest = iter(numbers.tolist())
    return lambda count: np.array([next(rest) for _ in range(count)])


def like(census: Census, told: Answer) -> Sheet:
    """A sheet whose columns have the counts of a census, up to its noise.

    The number of rows is the mean of what the columns add up to. In a cell of a range values are spread evenly. Rows
    of different columns belong together by chance, so that it tells nothing about two columns at once.
    """
    totals = [float(counts.sum()) for counts in told.values()]
    rows = max(1, round(float(np.mean(totals))))
    columns: dict[str, Array] = {}
    for j, (name, given) in enumerate(census.columns.items()):
        counts = whole(nonnegative(told[f"cells:{name}"], rows), rows)
        if given and isinstance(given[0], float):
            low, width = float(given[0]), (float(given[1]) - float(given[0])) / census.cells
            steps = [low + width * (i + (np.arange(n) + 0.5) / n) for i, n in enumerate(counts[:-1]) if n]
            values: Array = np.concatenate([*steps, np.full(counts[-1], np.nan)])
        else:
            values = _levels([level(str(one)) for one in given], counts)
        columns[name] = np.random.default_rng(j).permutation(values)
    return Sheet("all", columns, rows)


def _levels(names: list[str], counts: Ints) -> Array:
    """Levels as often as they are counted, as numbers if all of them are; what is none of them has no value."""
    try:
        every: Array = np.array([*map(float, names), np.nan, np.nan])
    except ValueError:
        every = np.array([*names, None, None], object)
    return np.repeat(every, counts)


def nonnegative(counts: Floats, total: float) -> Floats:
    """The nearest counts that are not negative and add up to a total, which is positive."""
    falling = np.sort(counts)[::-1]
    above = (np.cumsum(falling) - total) / np.arange(1, len(counts) + 1)
    made: Floats = np.maximum(counts - above[np.flatnonzero(falling > above)[-1]], 0.0)
    return made


def whole(counts: Floats, total: int) -> Ints:
    """Whole numbers next to counts, with their total."""
    made = np.floor(counts).astype(np.int64)
    rest = total - int(made.sum())
    made[np.argsort(made - counts, kind="stable")[:rest]] += 1
    return made
