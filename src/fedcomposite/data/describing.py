"""A look at the sites' tables before anything is fitted: what each has, and what is different somewhere.

All numbers come from the queries of :mod:`fedcomposite.data.queries`, so a federation's sites can be described alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Unpack

import numpy as np
import pandas as pd

from fedcomposite.data.cells import spread_of
from fedcomposite.data.census import NoisedTables
from fedcomposite.data.faults import DataError
from fedcomposite.data.flags import SHARES, ColumnFacts, flags_of
from fedcomposite.data.queries import (
    GRID,
    Answer,
    Ask,
    Below,
    Gaps,
    LevelCounts,
    Moments,
    Query,
    Rules,
    Schema,
    TablesAtHand,
)
from fedcomposite.data.recipe import Given, Recipe
from fedcomposite.data.sheets import Style
from fedcomposite.data.steps import Absent, AnyStep, known
from fedcomposite.privacy import StudyBudget

_EDGES = 4000  # of a column's second histogram, over all sites
_CELLS = 64  # at most of one site
_QUANTILES = [f"{100 * share:.0f} %" for share in SHARES]
_COLUMNS = ["site", "feature", "kind", "n", "missing", "mean", "sd", *_QUANTILES, "levels", "flags"]


def describe(
    given: Given,
    *,
    target: str | None = None,
    recipe: Recipe | None = None,
    rules: Rules | None = None,
    privacy: StudyBudget | None = None,
    seed: int = 0,
    names: Sequence[str] = (),
    **options: Unpack[Style],
) -> pd.DataFrame:
    """Describe tables: a row per feature and site, and what differs between the sites.

    Parameters
    ----------
    given : files, dict of DataFrames, or sheets
        One table per site.
    target : str, optional
        The column to predict: sites with a single class of it are flagged.
    recipe : Recipe, optional
        Its local parts (names, units, markers, how files are written) are done before; the rest is left aside.
    rules : Rules, optional
        What sites tell; if left out, everything, or what a recipe's own ``min_count`` allows: files at hand are
        one's own.
    privacy : StudyBudget, optional
        Look at its ``columns`` by one noised census of all sites together, in place of counts of each.
    seed : int
        Of the noise.
    names : list of str
        Other names for the sites.
    **options
        Of :func:`fedcomposite.data.sheets.read_sheets`, for files.

    Returns
    -------
    DataFrame
        Columns ``site``, ``feature``, ``kind``, ``n``, ``missing``, ``mean``, ``sd``, the quantiles (by histogram, to a
        64th of a site's rounded range), ``levels`` with counts, and ``flags``.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> table = describe(fc.data.frames("heart_disease"), target="num")
    >>> table[table["flags"].str.contains("0") & (table["feature"] == "chol")][["site", "flags"]].values.tolist()[0]
    ['switzerland', 'every value is 0: not measured?']
    """
    if not (recipe is None or isinstance(recipe, Recipe)):
        raise DataError(f"recipe = {recipe!r:.60}, must be a Recipe")
    made = recipe or Recipe()
    sheets = made.sheets(given, names=names, **options)
    if target is not None:
        everything = {name: None for s in sheets for name in (*s.columns, *made.local(s.name).rename)}
        known("target", [str(target)], everything)
    local = [made.local(s.name).apply(s) for s in sheets]
    if privacy is not None:
        noised = NoisedTables.at_hand(local, privacy, seed)
        return table_of(look_at(noised, noised.names, together=True), target)
    least = made.min_count if "min_count" in made.model_fields_set else 1
    ask = TablesAtHand(local, rules or Rules(least))
    looks = look_at(ask, ask.names)
    if rules is not None or least > 1:
        return table_of(looks, target)
    coarse = TablesAtHand(local, Rules())  # what is odd about a column is not what one patient has
    return table_of(looks, target, look_at(coarse, coarse.names))


def table_of(
    looks: Sequence[ColumnFacts], target: str | None = None, odd: Sequence[ColumnFacts] | None = None
) -> pd.DataFrame:
    """The looks as a table, with flags, which are from the looks ``odd`` if there are others."""
    rows = []
    features = list(dict.fromkeys(look.feature for look in looks))
    for feature in features:
        group = [look for look in looks if look.feature == feature]
        flagged = flags_of([look for look in odd or looks if look.feature == feature], feature == target)
        for look, found in zip(group, flagged, strict=True):
            shown = ", ".join(f"{name} {count}" for name, count in look.shown_levels)
            rest = f"{', ' if shown else ''}others {look.rest}" if look.rest and (shown or not look.numeric) else ""
            numbers = [look.mean, look.sd, *look.quantiles]
            rows.append([look.site, feature, look.kind, look.n, look.missing, *numbers, shown + rest, "; ".join(found)])
    return pd.DataFrame(rows, columns=_COLUMNS)


def look_at(ask: Ask, sites: Sequence[str], *, together: bool = False) -> list[ColumnFacts]:
    """Ask all that a description needs, in seven exchanges.

    With ``together`` only sums are looked at: there is one look per feature, at the site "all".
    """
    return _Looker(ask, ["all"] if together else list(sites), together).look()


@dataclass
class _Looker:
    """The answers so far."""

    ask: Ask
    sites: list[str]
    together: bool
    steps: list[AnyStep] = field(default_factory=list)

    def _ask(self, query: Query) -> list[Answer]:
        asked = query.model_copy(update={"steps": self.steps})
        answers = self.ask(asked)
        return [asked.combine(answers)] if self.together else answers

    def look(self) -> list[ColumnFacts]:
        """A look for every feature and site."""
        schema = self._ask(Schema())
        total = Schema().combine(schema)
        kinds = dict(zip(total["columns"].tolist(), total["kinds"].tolist(), strict=True))
        own = [dict(zip(a["columns"].tolist(), a["kinds"].tolist(), strict=True)) for a in schema]
        names = list(kinds)
        self.steps = [Absent(columns=names)]
        gaps = self._ask(Gaps(columns=names, repeats=True))
        looks = [
            ColumnFacts(site, name, own[i].get(name, "absent"), int(gaps[i]["n"][j]), int(gaps[i]["missing"][j]))
            for j, name in enumerate(names)
            for i, site in enumerate(self.sites)
        ]
        by_name = {name: looks[j * len(self.sites) : (j + 1) * len(self.sites)] for j, name in enumerate(names)}
        for i, found in enumerate(gaps):
            for j, name in enumerate(names):
                by_name[name][i].again = self._again(int(found["again"][j]))
            by_name[names[0]][i].rows_again = self._again(int(found["again:rows"][0]))
        self._levels({name: by_name[name] for name in names})
        numeric = [name for name in names if kinds[name] == "number"]
        if numeric:
            self._moments({name: by_name[name] for name in numeric})
            self._quantiles({name: by_name[name] for name in numeric})
        return looks

    def _again(self, count: int) -> int:
        """A site's 1 may be a few, so that a sum over sites says no more than whether there are some."""
        return min(count, 1) if self.together else count

    def _levels(self, looks: dict[str, list[ColumnFacts]]) -> None:
        for i, found in enumerate(self._ask(LevelCounts(columns=list(looks)))):
            for name, each in looks.items():
                levels, counts = found[f"levels:{name}"].tolist(), found[f"counts:{name}"].tolist()
                told = zip(levels, counts, strict=True)
                each[i].levels = dict(sorted(told, key=lambda one: (-one[1], one[0])) if self.together else told)
                each[i].rest = int(found[f"rest:{name}"][0])
        for each in looks.values():
            category = all(look.few for look in each if look.n)
            for look in each:
                look.category = category

    def _moments(self, looks: dict[str, list[ColumnFacts]]) -> None:
        names = list(looks)
        sums = self._ask(Moments(columns=names))
        if self.together:
            means = sums[0]["sum"] / np.maximum(sums[0]["n"], 1)
            squares = self._ask(Moments(columns=names, centres=means.tolist()))
        else:
            squares = self._ask(Moments(columns=names, own=True))
        for i, (about_zero, about_mean) in enumerate(zip(sums, squares, strict=True)):
            for j, name in enumerate(names):
                n, look = int(about_mean["n"][j]), looks[name][i]
                look.withheld = bool(about_mean["withheld"][j])
                if n and not look.withheld:  # of all sites, unless one of them does not tell
                    off = float(about_mean["sum"][j]) / n if self.together else 0.0  # of the centre, by rounding
                    look.mean = float(about_zero["sum"][j] / n) + off
                    look.sd = float(spread_of(look.mean, np.sqrt(max(about_mean["squares"][j] / n - off**2, 0.0))))
                    if look.sd == 0:
                        look.mean = float(next(iter(look.levels), look.mean))

    def _quantiles(self, looks: dict[str, list[ColumnFacts]]) -> None:
        """A fixed histogram says where each site's values lie, a second one divides that."""
        first = self._ask(Below(edges=dict.fromkeys(looks, GRID)))
        cells = max(8, min(_CELLS, _EDGES // (len(self.sites) + 1)))
        edges = {name: _second(name, first, cells) for name in looks}
        for i, found in enumerate(self._ask(Below(edges=edges))):
            for name, each in looks.items():
                n = int(found[f"n:{name}"][0])
                if n:
                    each[i].edges = np.asarray(edges[name])
                    low, high = found[f"low:{name}"], found[f"high:{name}"]
                    if self.together:  # hardly any edge is one of every site's joint cells
                        low = high = (low + high) / 2
                    each[i].low, each[i].high = low, high
                    each[i].quantiles = [each[i].value_at(share * n) for share in SHARES]


def _second(name: str, answers: Sequence[Answer], cells: int) -> list[float]:
    """Edges for the second histogram: each site's range on the grid, divided; 0 has a cell of its own."""
    edges: set[float] = {0.0, 1e-12}
    for found in answers:
        low, high, n = found[f"low:{name}"], found[f"high:{name}"], int(found[f"n:{name}"][0])
        if n:
            start = int(np.flatnonzero(high > 0)[0]) if bool((high > 0).any()) else len(GRID) - 1
            end = int(np.flatnonzero(low >= n)[0]) if bool((low >= n).any()) else len(GRID) - 1
            edges |= set(np.linspace(GRID[max(start - 1, 0)], GRID[end], cells + 1).tolist())
    made: list[float] = sorted(edges)
    return made
