"""Table 1 of a paper: who was studied, by site or by the levels of a column, from counts and sums of the sites.

What it asks are the queries of :mod:`fedcomposite.data.queries`, so that files at hand and the sites of a federation,
plain or in secure sums, are described by the same lines. Everything but quantiles and rank tests is exact; these come
with bounds that hold for certain, and are exact, too, where sites tell which values are equal.

* numbers: mean (sample standard deviation); Welch's t-test of two groups, analysis of variance of more
* numbers named in ``median``: median [quartiles]; Kruskal-Wallis, bounded by what the bins leave open
* categories: n (%) of those with a value; Pearson's chi-squared, with Yates's correction in a fourfold table, and
  Fisher's exact test there if a count of fewer than five is expected
* standardised mean differences: of means over the root of the mean variance; of shares by Yang and Dalton (2012). Of
  several groups it is the largest of any two
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy  # which loads what is used of it

from fedcomposite._validation import refuse, wrong_arguments
from fedcomposite.data.census import NoisedTables
from fedcomposite.data.faults import DataError
from fedcomposite.data.learning import in_order
from fedcomposite.data.quantiles import quantiles_of_each, simplest
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
from fedcomposite.data.steps import Absent, AnyStep, Complete, known
from fedcomposite.experiments.tables import latex
from fedcomposite.files import write_atomic
from fedcomposite.privacy import StudyBudget
from fedcomposite.results import Result, counted

Floats = npt.NDArray[np.float64]
LEGEND = (
    "n (%) of those with a value, mean (standard deviation), median [quartiles]; SMD: standardised mean difference, of "
    "several groups the largest of any two; p: Welch's t-test or analysis of variance, chi-squared or Fisher's exact "
    "test, Kruskal-Wallis, not adjusted for their number"
)
_LEVELS = 8  # most levels of numbers that are taken for a category
_COVERED = 0.8  # of the values that these levels have at least
_BINS = 800  # with about as many samples each, for a rank test
_REST = "(other)"  # levels that too few rows of a site have for it to tell them
_SEEN = 0.005  # bounds of p that are closer are not shown


@dataclass(frozen=True, repr=False)
class TableOne(Result):
    """Table 1, as it is printed and as numbers."""

    table: pd.DataFrame
    """As it is printed: texts."""
    numbers: pd.DataFrame
    """A row per variable, level and column: ``n``, ``missing``, ``count``, ``percent``, ``mean``, ``sd``, ``median``,
    ``q1``, ``q3``."""
    tests: pd.DataFrame
    """A row per variable: ``smd``, the two groups ``between`` which it is, ``test``, ``statistic``, ``p``, and where
    the bins leave it open its bounds ``p_low`` and ``p_high``."""
    notes: list[str] = field(default_factory=list)
    """What the table does not tell, and what is odd."""

    def to_frame(self) -> pd.DataFrame:
        return self.table

    def _line(self) -> str:
        groups = [c for c in self.numbers["group"].unique() if c != "total"]
        return f"{counted(len(self.tests), 'variable')}, {', '.join(groups) or 'no groups'}"

    def to_latex(self, caption: str = "", label: str = "tab:one") -> str:
        """The table for a paper (booktabs), what it shows and its notes in the caption."""
        return latex(self.table, " ".join([caption, *(f"{one}." for one in (LEGEND, *self.notes))]).strip(), label)

    def to_markdown(self) -> str:
        """The table as Markdown, with what it shows and its notes below."""
        lines = [list(self.table.columns), ["---"] * self.table.shape[1], *self.table.to_numpy().tolist()]
        shown = [[re.sub("^  ", "&emsp;", str(cell)).replace("|", "\\|") for cell in line] for line in lines]
        return "\n\n".join(["\n".join(f"| {' | '.join(line)} |" for line in shown), f"{LEGEND}.", *self.notes]) + "\n"

    def to_html(self) -> str:
        """The table as HTML, with what it shows and its notes below."""
        table = self.table.assign(variable=self.table["variable"].str.replace("^  ", "\u2003", regex=True))
        said = pd.DataFrame([f"{LEGEND}.", *self.notes])
        return table.to_html(index=False) + said.to_html(index=False, header=False)

    def write(self, path: str | Path) -> Path:
        """Write a ``.tex``, ``.md``, ``.html`` or ``.csv`` file."""
        place = Path(path)
        ways = {".tex": self.to_latex, ".md": self.to_markdown, ".html": self.to_html}
        ways[".csv"] = lambda: self.table.to_csv(index=False)
        if (suffix := place.suffix.casefold()) not in ways:
            raise ValueError(f"{place}: a table is written as {', '.join(ways)}")
        write_atomic(place, ways[suffix]().encode())
        return place

    def content(self) -> dict[str, Any]:
        """All of it as plain data."""
        names = {"table": self.table, "numbers": self.numbers, "tests": self.tests}
        return {**{name: frame.to_dict("records") for name, frame in names.items()}, "notes": self.notes}


def table_one(
    given: Given,
    *,
    by: str | None = None,
    columns: Sequence[str] | None = None,
    median: Sequence[str] = (),
    categorical: Sequence[str] = (),
    target: str | None = None,
    recipe: Recipe | None = None,
    rules: Rules | None = None,
    privacy: StudyBudget | None = None,
    seed: int = 0,
    names: Sequence[str] = (),
    **options: Unpack[Style],
) -> TableOne:
    """Who was studied: a total and a column per site, or per level of a column, with tests and differences.

    Parameters
    ----------
    given : files, dict of DataFrames, or sheets
        One table per site.
    by : str, optional
        The column whose levels are compared; the sites if left out.
    columns : list of str, optional
        The variables, in their order; all if left out.
    median : list of str
        Numbers that are shown as median [quartiles] and compared by ranks; the others as mean (SD).
    categorical : list of str
        Numbers that are levels; those of at most eight levels are taken for such.
    target : str, optional
        The column to predict; rows without one are left out if the recipe leaves them out.
    recipe : Recipe, optional
        Its local parts (names, units, markers, how files are written) are done before; its categories are categorical.
    rules : Rules, optional
        What sites tell; everything if left out, since the files are at hand.
    privacy, seed, names, **options
        As in :func:`fedcomposite.describe`.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> made = fc.table_one(fc.data.frames("heart_disease"), columns=["age", "sex"], by="num")
    >>> made.table[["variable", "total", "0", "4"]].to_dict("records")[1]
    {'variable': 'age, mean (SD)', 'total': '53.5 (9.4)', '0': '50.5 (9.4)', '4': '59.2 (8.3)'}
    """
    refuse(wrong_arguments(table_one, {k: v for k, v in locals().items() if k not in ("given", "options")}))
    made = recipe or Recipe()
    sheets = [made.local(sheet.name).apply(sheet) for sheet in made.sheets(given, names=names, **options)]
    wishes = Wishes.of(made, target, by=by, columns=columns, median=median, categorical=categorical)
    if privacy is not None:
        noised = NoisedTables.at_hand(sheets, privacy, seed)
        return table_from(noised, noised.names, wishes, together=True, noised=True)
    ask = TablesAtHand(sheets, rules or Rules(min_count=1))
    return table_from(ask, ask.names, wishes)


class Wishes(NamedTuple):
    """What the table is to show."""

    by: str | None
    columns: Sequence[str] | None
    median: Sequence[str]
    categorical: Sequence[str]
    coded: Sequence[str]
    """Categories of the recipe."""
    complete: Sequence[str]
    """Columns without a value of which a row is left out."""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        target: str | None,
        by: str | None = None,
        columns: Sequence[str] | None = None,
        median: Sequence[str] = (),
        categorical: Sequence[str] = (),
    ) -> Wishes:
        """What a caller, or a section of an experiment, says beside its recipe."""
        for what, names in {"columns": columns or (), "median": median, "categorical": categorical}.items():
            if isinstance(names, str) or not isinstance(names, Iterable):
                raise DataError(f"{what} = {names!r}, must be a list of names")
        complete = [target] if target is not None and recipe.missing_target == "drop" else []
        return cls(by, columns, list(median), list(categorical), list(recipe.one_hot_columns), complete)


def table_from(
    ask: Ask, sites: Sequence[str], wishes: Wishes, *, together: bool = False, noised: bool = False
) -> TableOne:
    """Ask all that the table needs; with ``together`` only sums are looked at."""
    if noised and wishes.by is not None:
        raise DataError("by: a noised census knows no two columns at once; leave it out, or leave the budget out")
    return _Maker(ask, list(sites), wishes, together).table()


class _Group(NamedTuple):
    """What is known of a variable in a column of the table."""

    n: int
    missing: int
    withheld: bool = False
    mean: float = math.nan
    sd: float = math.nan
    counts: tuple[int, ...] = ()
    rest: int = 0
    quartiles: tuple[float, ...] = ()


class _Maker:
    """The answers so far."""

    def __init__(self, ask: Ask, sites: list[str], wishes: Wishes, together: bool) -> None:
        self._asked, self._sites, self._wishes, self._together = ask, sites, wishes, together
        self._steps: list[AnyStep] = []
        self._groups: list[str] = []
        self._notes: list[str] = []

    def _sum(self, query: Query) -> Answer:
        return query.combine(self._asked(query))

    def _each(self, query: Query) -> list[Answer]:
        """The answer of all, and that of each group."""
        asked = query.model_copy(update={"steps": self._steps})
        if (by := self._wishes.by) is not None:
            chosen = [asked.model_copy(update={"only": (by, one)}) for one in self._groups]
            return [self._sum(one) for one in (asked, *chosen)]
        answers = self._asked(asked)
        return [asked.combine(answers), *(answers if self._groups else [])]

    def table(self) -> TableOne:
        """Everything, in the order of the table."""
        names, kinds = self._look()
        gaps = self._each(Gaps(columns=names))
        found = self._sum(LevelCounts(columns=names, steps=self._steps))
        levels = {name: in_order(found[f"levels:{name}"].tolist()) for name in names}
        category = [name for name in names if self._is_category(name, kinds[name], found, levels[name])]
        numbers = [name for name in names if kinds[name] == "number" and name not in category]
        if left := [name for name in names if name not in (*category, *numbers)]:
            self._notes.append(f"left out, as no numbers and no few levels: {', '.join(left)}")
        about: dict[str, list[_Group]] = {}
        shape = {name: [(int(g["n"][j]), int(g["missing"][j])) for g in gaps] for j, name in enumerate(names)}
        if numbers:
            about |= self._numbers(numbers, shape)
        tests = {name: _of_means(about[name][1:]) for name in numbers}
        if middle := [name for name in numbers if name in self._wishes.median]:
            told = quantiles_of_each(self._each, {name: [0.25, 0.5, 0.75] for name in middle}, self._steps)
            for name in middle:
                points = [tuple(q.value for q in one) for one in told[name]]
                about[name] = [one._replace(quartiles=q) for one, q in zip(about[name], points, strict=True)]
            for name, ranked in (self._ranked(middle) if len(self._groups) > 1 else {}).items():
                tests[name] |= ranked
        if category:
            each = self._each(LevelCounts(columns=category, known={name: levels[name] for name in category}))
            for name in category:
                counts = [tuple(int(c) for c in one[f"counts:{name}"]) for one in each]
                about[name] = [
                    _Group(n, missing, counts=each_level, rest=n - sum(each_level))
                    for (n, missing), each_level in zip(shape[name], counts, strict=True)
                ]
                tests[name] = _of_shares(about[name][1:])
        order = [name for name in names if name in about]
        rows = [int(one["n"][0] + one["missing"][0]) for one in gaps]
        return _Printer(["total", *self._groups], about, levels, tests, order, self._notes, rows).made()

    def _look(self) -> tuple[list[str], dict[str, str]]:
        """The variables and their kinds; what is there twice is noted."""
        wish, schema = self._wishes, self._sum(Schema())
        kinds = dict(zip(schema["columns"].tolist(), schema["kinds"].tolist(), strict=True))
        named = {"by": [wish.by] if wish.by else [], "columns": wish.columns or [], "median": wish.median}
        for what, given in {**named, "categorical": wish.categorical, "target": wish.complete}.items():
            known(f"table one: {what}", [str(name) for name in given], kinds)
        absent = Absent(columns=list(kinds))
        self._repeats(list(kinds), absent)
        self._steps = [absent, *([Complete(columns=list(wish.complete))] if wish.complete else [])]
        names = list(dict.fromkeys(wish.columns)) if wish.columns is not None else list(kinds)
        names = [name for name in names if name != wish.by]
        if not names:
            raise DataError("columns: a table needs a variable")
        if wish.by is not None:
            found = self._sum(LevelCounts(columns=[wish.by], steps=self._steps))
            self._groups = in_order(found[f"levels:{wish.by}"].tolist())
            if not self._groups:
                raise DataError(f"by: no level of {wish.by!r} that enough rows have, or too many levels")
        elif not self._together and len(self._sites) > 1:
            self._groups = self._sites
        dates = [name for name in names if kinds[name] in ("date", "empty", "mixed")]
        if dates:
            self._notes.append(f"left out, as dates, empty or of several kinds: {', '.join(dates)}")
        return [name for name in names if name not in dates], kinds

    def _repeats(self, names: list[str], absent: Absent) -> None:
        """Patients who are there twice, as their site sees it; of a sum one knows no more than whether there are."""
        query = Gaps(columns=names, repeats=True, steps=[absent])
        sites, answers = self._sites, self._asked(query)
        if self._together:
            sites, answers = ["some site"], [query.combine(answers)]
        for site, told in zip(sites, answers, strict=True):
            again = {f"values of {name}": int(count) for name, count in zip(names, told["again"], strict=True)}
            for what, count in (again | {"whole rows": int(told["again:rows"][0])}).items():
                if count:
                    many = count if count > 1 and not self._together else "some"
                    self._notes.append(f"{site}: {many} {what} occur again: patients twice?")

    def _is_category(self, name: str, kind: str, found: Answer, levels: Sequence[str]) -> bool:
        if not levels or found[f"many:{name}"][0]:
            return False
        if kind == "text" or name in (*self._wishes.categorical, *self._wishes.coded):
            return True
        told = int(found[f"counts:{name}"].sum())
        few = len(levels) <= _LEVELS and told >= _COVERED * (told + int(found[f"rest:{name}"][0]))
        return few and name not in self._wishes.median

    def _numbers(self, names: list[str], shape: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, list[_Group]]:
        """Means, and deviations from sums about the mean of all."""
        first = self._each(Moments(columns=names))
        centres = first[0]["sum"] / np.maximum(first[0]["n"], 1)
        second = self._each(Moments(columns=names, centres=centres.tolist()))
        made: dict[str, list[_Group]] = {}
        for j, name in enumerate(names):
            made[name] = []
            for i, one in enumerate(second):
                n, away = int(one["n"][j]), float(one["sum"][j])
                mean = centres[j] + away / n if n else math.nan
                square = float(one["squares"][j]) - away**2 / n if n else 0.0
                sd = math.sqrt(max(square, 0.0) / (n - 1)) if n > 1 else math.nan
                hidden = bool(one["withheld"][j])
                told = (math.nan, math.nan) if hidden else (mean, sd)
                made[name].append(_Group(*shape[name][i], hidden, *told))
        return made

    def _ranked(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """Kruskal and Wallis's test from counts in bins: of about as many samples each, then of one value each."""
        edges: dict[str, list[float]] = dict.fromkeys(names, GRID)
        for last in (False, False, False, True, True, None):
            told = self._each(Below(edges=edges))
            if last is None:
                break
            edges = {name: _divided(np.array(edges[name]), told[0], name, last) for name in names}
        made = {}
        for name in names:
            groups = [(one[f"low:{name}"], one[f"high:{name}"], int(one[f"n:{name}"][0])) for one in told[1:]]
            at = np.array(edges[name])
            alone = np.concatenate([[False], at[1:] == np.nextafter(at[:-1], np.inf), [False]])
            made[name] = _of_ranks([one for one in groups if one[2]], alone)
        return made


def _divided(edges: Floats, told: Answer, name: str, values: bool) -> list[float]:
    """Edges between which about equally many values lie; then also around the simplest number of every bin."""
    n = int(told[f"n:{name}"][0])
    middle = (told[f"low:{name}"] + told[f"high:{name}"]) / 2
    if values:
        filled = np.flatnonzero((np.diff(middle) > 1) & (edges[1:] > np.nextafter(edges[:-1], np.inf)))
        simple = np.array([simplest(edges[i], edges[i + 1]) for i in filled])
        made = np.unique(np.concatenate([edges, simple, np.nextafter(simple, np.inf)]))
        return made.tolist()  # type: ignore[no-any-return]
    rising = np.maximum.accumulate(middle) + 1e-9 * np.arange(len(edges))  # where no value is, the next edge counts
    return np.unique(np.interp(np.linspace(0, n, _BINS + 1), rising, edges)).tolist()  # type: ignore[no-any-return]


# -- tests and differences --------------------------------------------------------------------------------------------


def _no_test() -> dict[str, Any]:
    numbers = dict.fromkeys(("smd", "statistic", "p", "p_low", "p_high"), math.nan)
    return {**numbers, "between": "", "test": ""}


def _largest(differences: Mapping[tuple[int, int], float]) -> dict[str, Any]:
    """The largest of the differences that are known, with the places of its groups."""
    known_ones = {pair: d for pair, d in differences.items() if not math.isnan(d)}
    if not known_ones:
        return {}
    pair = max(known_ones, key=lambda one: known_ones[one])
    return {"smd": known_ones[pair], "between": pair}


def _tested(name: str, statistic: float, p: float) -> dict[str, Any]:
    return {} if math.isnan(p) else {"test": name, "statistic": float(statistic), "p": float(p)}


def _of_means(groups: Sequence[_Group]) -> dict[str, Any]:
    """Welch's t-test or analysis of variance, from means and deviations."""
    pairs = itertools.combinations(range(len(groups)), 2)
    made = _no_test() | _largest({(a, b): _mean_difference(groups[a], groups[b]) for a, b in pairs})
    some = [g for g in groups if g.n > 1 and not math.isnan(g.sd)]
    if len(some) < 2 or not any(g.sd > 0 for g in some):
        return made
    if len(some) == 2:
        from scipy import stats  # it takes a second, and parties of a federation load this module

        a, b = some
        found = stats.ttest_ind_from_stats(a.mean, a.sd, a.n, b.mean, b.sd, b.n, equal_var=False)
        return made | _tested("Welch's t", float(found.statistic), float(found.pvalue))
    n, means, sd = (np.array([getattr(g, key) for g in some], float) for key in ("n", "mean", "sd"))
    middle, inner = n @ means / n.sum(), (n - 1) @ sd**2
    degrees = len(some) - 1, n.sum() - len(some)
    ratio = (n @ (means - middle) ** 2 / degrees[0]) / (inner / degrees[1])
    return made | _tested("ANOVA", ratio, scipy.special.fdtrc(*degrees, ratio))


def _mean_difference(a: _Group, b: _Group) -> float:
    spread = math.sqrt((a.sd**2 + b.sd**2) / 2)
    return abs(a.mean - b.mean) / spread if spread > 0 else math.nan


def _of_shares(groups: Sequence[_Group]) -> dict[str, Any]:
    """Pearson's chi-squared or Fisher's exact test, of the levels that are told."""
    pairs = itertools.combinations(range(len(groups)), 2)
    made = _no_test() | _largest({(a, b): _share_difference(groups[a], groups[b]) for a, b in pairs})
    table = np.array([g.counts for g in groups if sum(g.counts)], float)
    table = table[:, table.sum(0) > 0] if table.size else table
    if min(table.shape, default=0) < 2:
        return made
    from scipy import stats

    found = stats.chi2_contingency(table)
    if table.shape == (2, 2) and found.expected_freq.min() < 5:
        exact = stats.fisher_exact(table.astype(int))
        return made | _tested("Fisher's exact", exact.statistic, exact.pvalue)
    return made | _tested("chi-squared", found.statistic, found.pvalue)


def _share_difference(a: _Group, b: _Group) -> float:
    """The root of (p - q)' S^-1 (p - q) without the last level, S the mean of both multinomial covariances."""
    if not sum(a.counts) or not sum(b.counts):
        return math.nan
    p, q = (np.array(g.counts, float) / sum(g.counts) for g in (a, b))
    some = np.flatnonzero(p + q)[:-1]
    p, q = p[some], q[some]
    covariance = (np.diag(p) - np.outer(p, p) + np.diag(q) - np.outer(q, q)) / 2
    if not len(some) or np.linalg.matrix_rank(covariance) < len(some):
        return 0.0 if not len(some) else math.nan
    return float(math.sqrt((p - q) @ np.linalg.solve(covariance, p - q)))


def _of_ranks(groups: Sequence[tuple[Any, Any, int]], alone: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Kruskal and Wallis's H from bounds of the counts below edges; ``alone`` are the bins of one value.

    For each two groups the number of pairs in which the first one's value is larger lies between what comes of the
    earliest and of the latest places that the bounds leave; the mean ranks follow, and the least and the largest H.
    Ties in bins of several values are between none and as many as fit.
    """
    empty = {"test": "", **dict.fromkeys(("statistic", "p"), math.nan)}
    if len(groups) < 2:
        return empty
    sizes = np.array([n for *_, n in groups], float)
    total = sizes.sum()
    early, late = (
        np.array([np.diff(np.concatenate([[0], each[which], [each[2]]])) for each in groups], float) for which in (1, 0)
    )
    share = np.where(alone, 0.5, 1.0)
    least, most = np.zeros(len(groups)), np.zeros(len(groups))
    for i, j in itertools.permutations(range(len(groups)), 2):
        most[i] += late[i] @ (np.cumsum(early[j]) - early[j] + share * early[j])
        least[i] += early[i] @ (np.cumsum(late[j]) - late[j] + (1 - share) * late[j])
    own = (sizes + 1) / 2
    low, high = least / sizes + own - (total + 1) / 2, most / sizes + own - (total + 1) / 2
    scale = 12 / (total * (total + 1))
    middle = scale * sizes @ ((low + high) / 2) ** 2
    nearest = np.where((low <= 0) & (high >= 0), 0.0, np.minimum(abs(low), abs(high)))
    bounds = scale * sizes @ nearest**2, scale * sizes @ np.maximum(abs(low), abs(high)) ** 2
    inside = [np.diff(np.concatenate([[0], sum(g[k] for g in groups), [total]])) for k in (0, 1)]
    below, above = sum(g[0] for g in groups), sum(g[1] for g in groups)
    most_in = np.concatenate([above, [total]]) - np.concatenate([[0], below])
    known_ties = np.where(alone, np.minimum(*inside), 0.0)
    free = most_in[~alone].max(initial=0.0)
    cubes = total**3 - total
    ties = (known_ties**3 - known_ties).sum() / cubes, min(((most_in[alone] ** 3).sum() + free**2 * total) / cubes, 1.0)
    if free <= 1 and bool((inside[0] == inside[1]).all()):
        ties = ties[0], ties[0]
    if ties[0] >= 1:
        return empty
    freedom = len(groups) - 1
    h = middle / (1 - ties[0])
    ends = bounds[0] / (1 - ties[0]), bounds[1] / (1 - ties[1]) if ties[1] < 1 else math.inf
    p = [float(scipy.special.chdtrc(freedom, value)) for value in (h, *ends)]
    return {"test": "Kruskal-Wallis", "statistic": float(h), "p": p[0], "p_low": p[2], "p_high": p[1]}


# -- printing ---------------------------------------------------------------------------------------------------------


def _decimals(spread: float) -> int:
    """So many that a spread has two digits or three."""
    return 1 if not spread > 0 else min(max(0, 1 - math.floor(math.log10(spread) + 1e-9)), 6)


class _Printer:
    """Puts what was found into rows."""

    def __init__(
        self,
        columns: list[str],
        about: Mapping[str, Sequence[_Group]],
        levels: Mapping[str, Sequence[str]],
        tests: Mapping[str, dict[str, Any]],
        order: Sequence[str],
        notes: list[str],
        rows: Sequence[int],
    ) -> None:
        self.columns, self.about, self.levels, self.tests = columns, about, levels, tests
        self.order, self.notes, self.rows = order, notes, rows
        self.lines: list[dict[str, str]] = []
        self.numbers: list[dict[str, Any]] = []

    def made(self) -> TableOne:
        """Table 1 of all columns: counts and shares of levels, means or quantiles of numbers."""
        self._line("n", [str(n) for n in self.rows])
        for name in self.order:
            groups = self.about[name]
            category = bool(groups[0].counts)
            (self._category if category else self._number)(name, groups)
            if any(g.missing for g in groups):
                sizes = [g.n + g.missing for g in groups]
                self._line("  missing, n (%)", [_share(g.missing, n) for g, n in zip(groups, sizes, strict=True)])
        compared = len(self.columns) > 2
        more = {"SMD": "smd", "p": "p", "test": "test"} if compared else {}
        table = pd.DataFrame(self.lines, columns=["variable", *self.columns, *more]).fillna("")
        tests = pd.DataFrame([{"variable": name, **self._named(self.tests[name])} for name in self.order])
        return TableOne(table, pd.DataFrame(self.numbers), tests, self._told())

    def _named(self, test: dict[str, Any]) -> dict[str, Any]:
        pair = test["between"] or ()
        return {**test, "between": " and ".join(self.columns[1 + place] for place in pair)}

    def _told(self) -> list[str]:
        few = [name for name in self.order if any(g.rest for g in self.about[name]) and self.about[name][0].counts]
        hidden = [name for name in self.order if any(g.withheld for g in self.about[name])]
        said = list(self.notes)
        if few:
            said.append(f"{_REST}: levels that too few rows of a site have, in no test ({', '.join(few)})")
        if hidden:
            said.append(f"–: too few rows, or too few that differ, for sites to tell ({', '.join(hidden)})")
        if any(test["p_high"] - test["p_low"] > _SEEN for test in self.tests.values()):
            said.append("p of Kruskal-Wallis with the bounds that counts in bins leave")
        return said

    def _line(self, label: str, cells: Sequence[str], name: str = "") -> None:
        line = {"variable": label, **dict(zip(self.columns, cells, strict=True))}
        if name:
            test = self.tests[name]
            line |= {
                "SMD": "" if math.isnan(test["smd"]) else f"{test['smd']:.3f}",
                "p": _p(test),
                "test": test["test"],
            }
        self.lines.append(line)

    def _count(self, name: str, level: str, groups: Sequence[_Group], **numbers: Sequence[Any]) -> None:
        for i, (column, g) in enumerate(zip(self.columns, groups, strict=True)):
            row = {"variable": name, "level": level, "group": column, "n": g.n, "missing": g.missing}
            self.numbers.append(row | {key: values[i] for key, values in numbers.items()})

    def _number(self, name: str, groups: Sequence[_Group]) -> None:
        middle = any(g.quartiles for g in groups)
        quartiles = [g.quartiles or (math.nan,) * 3 for g in groups]
        if middle:
            digits = _decimals(quartiles[0][2] - quartiles[0][0])
            cells = [f"{b:.{digits}f} [{a:.{digits}f}, {c:.{digits}f}]" if b == b else "–" for a, b, c in quartiles]
            self._line(f"{name}, median [quartiles]", cells, name)
        else:
            digits = _decimals(next((g.sd for g in groups if g.sd > 0), 0.0))
            deviation = ["" if math.isnan(g.sd) else f" ({g.sd:.{digits}f})" for g in groups]
            cells = [
                f"{g.mean:.{digits}f}{sd}" if g.mean == g.mean else "–" for g, sd in zip(groups, deviation, strict=True)
            ]
            self._line(f"{name}, mean (SD)", cells, name)
        told = {"mean": [g.mean for g in groups], "sd": [g.sd for g in groups]}
        points = {key: [q[k] for q in quartiles] for k, key in enumerate(("q1", "median", "q3"))}
        self._count(name, "", groups, **told, **(points if middle else {}))

    def _category(self, name: str, groups: Sequence[_Group]) -> None:
        levels = list(self.levels[name])
        rest = [g.rest for g in groups]
        every = [*enumerate(levels), *([(-1, _REST)] if any(rest) else [])]
        if one := levels == ["0", "1"] and not any(rest):
            every = every[1:]
        else:
            self._line(f"{name}, n (%)", [""] * len(self.columns), name)
        for k, level in every:
            counts = rest if k < 0 else [g.counts[k] for g in groups]
            cells = [_share(count, g.n) for count, g in zip(counts, groups, strict=True)]
            self._line(*((f"{name} = 1, n (%)", cells, name) if one else (f"  {level}", cells)))
        for k, level in [*enumerate(levels), *([(-1, _REST)] if any(rest) else [])]:
            counts = rest if k < 0 else [g.counts[k] for g in groups]
            shares = [100 * count / g.n if g.n else math.nan for count, g in zip(counts, groups, strict=True)]
            self._count(name, level, groups, count=counts, percent=shares)


def _share(count: int, of: int) -> str:
    return f"{count} ({100 * count / of:.1f})" if of else "–"


def _p(test: Mapping[str, Any]) -> str:
    def shown(p: float) -> str:
        return "<0.001" if p < 0.0005 else f"{p:.3f}"

    if math.isnan(test["p"]):
        return ""
    if not test["p_high"] - test["p_low"] > _SEEN:
        return shown(test["p"])
    return f"{shown(test['p'])} ({shown(test['p_low'])} to {shown(test['p_high'])})"
