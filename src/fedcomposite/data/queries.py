"""Questions about a site's table whose answers are counts and sums: all that leaves it before a model is fitted.

A query is data (JSON): what is asked, of which columns, and the steps of a preparation to do first. A site answers it
with :func:`answer` under its own :class:`Rules`; :meth:`Query.combine` adds the answers of several sites. The same
lines run here on files and at the site of a federation.

===========  ===========================================================================================================
schema       names and kinds of the columns, number of rows
gaps         per column: values and gaps; if asked, whether values of an identifier, or whole rows, occur again
moments      per column: values, gaps, sum and sum of squares of the distances to a centre: given, or the site's mean
below        per column and edge: how many values lie below it, as a lower and an upper bound (a histogram)
levels       per column: the levels that enough rows have, with counts; the others together
outside      per column: whether some value is none of the given levels
census       per column: how many values are in each of its cells or levels; told with noise only
lacking      per column with an equation of an imputation: 1 where the site has too few values for a model of its own
conditional  loss, gradient and Hessian of an imputation's model of a column, over all rows of a site that has it
===========  ===========================================================================================================

What a site does not tell, with m = ``min_count``: moments of a column with fewer than m values, or in which fewer than
m (but some) differ from the commonest one (rare indicators and their products); cells of a histogram with fewer than m
values, which are joined with their neighbours; levels of fewer than m rows, nor a rest of fewer than m; the least and
the largest value, but for the edges of :data:`GRID` around them; how many values or rows occur again, if fewer than m
do, but only that some do. What a step has put into gaps counts for none of
these: the asker has chosen it, and could hide one patient among such rows. Gaps are counted exactly, since every mean
needs its number of values.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from fedcomposite.data.cells import level
from fedcomposite.data.chained import ConditionalModels, State, told_sums
from fedcomposite.data.faults import DataError
from fedcomposite.data.repeats import of_identifier, of_rows
from fedcomposite.data.sheets import Origin, Sheet
from fedcomposite.data.steps import AnyStep, prepared

Answer = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]

_LARGEST = 8 << 20  # characters of a query or an answer
_EDGES = 4096  # of one column
_POSITIVE = [a * 10.0**k for k in range(-12, 12) for a in (1, 2, 5)] + [1e12]
GRID = [*(-v for v in reversed(_POSITIVE)), 0.0, *_POSITIVE]
"""The edges of a first histogram, 1, 2 and 5 times powers of ten: nobody needs to tell where the values lie."""
_AS_IT_IS = Origin("")


class RefusedQueryError(DataError):
    """A site does not answer a query; the text has no values in it and may travel."""


@dataclass(frozen=True)
class Rules:
    """What a site agrees to tell."""

    min_count: int = 5
    """Fewest rows behind a number."""
    max_levels: int = 100
    """Most levels of a category."""
    refuse: tuple[str, ...] = ()
    """Queries that are not answered at all."""
    noised: bool = False
    """Whether answers get noise before they leave, as those to a census have to."""

    def __post_init__(self) -> None:
        if self.min_count < 1 or self.max_levels < 1:
            raise DataError(f"min_count = {self.min_count}, max_levels = {self.max_levels}: both must be 1 or more")


class Query(BaseModel):
    """What is asked of every site; ``steps`` are done to its table before."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: list[AnyStep] = []
    only: tuple[str, str] | None = None
    """A column and a level of it: what is asked is asked of the rows that have it (:func:`rows_of`)."""

    def ask(self, sheet: Sheet, rules: Rules) -> Answer:
        """One site's answer."""
        raise NotImplementedError

    def combine(self, answers: Sequence[Answer]) -> Answer:
        """The answers of several sites together: their sums."""
        first = answers[0]
        if any(a.keys() != first.keys() or any(a[k].shape != first[k].shape for k in a) for a in answers):
            raise DataError("answers of different form cannot be added")
        return {key: np.sum([a[key] for a in answers], axis=0) for key in first}

    def sums(self) -> Answer:
        """Zeros in the form of what adds up in an answer: all that is told of a site's where only sums are known."""
        raise NotImplementedError

    def names(self, told: Answer) -> Answer:
        """What in an answer is no sum, and is told of each site even so: names."""
        return {}


class Schema(Query):
    """The columns of a table."""

    name: Literal["schema"] = "schema"

    def ask(self, sheet: Sheet, rules: Rules) -> Answer:
        """``columns``, their ``kinds`` and the number of ``rows``."""
        names = list(sheet.columns)
        return {
            "columns": np.array(names, np.str_),
            "kinds": np.array([sheet.kind(n) for n in names], np.str_),
            "rows": np.array([sheet.rows]),
        }

    def combine(self, answers: Sequence[Answer]) -> Answer:
        """Every column that a site has, in the order of the first sites; a kind that sites differ in is "mixed"."""
        kinds: dict[str, str] = {}
        for one in answers:
            for column, kind in zip(one["columns"].tolist(), one["kinds"].tolist(), strict=True):
                before = kinds.get(column, "empty")
                kinds[column] = kind if before in ("empty", kind) else before if kind == "empty" else "mixed"
        made = {"columns": np.array([*kinds], np.str_), "kinds": np.array([*kinds.values()], np.str_)}
        return made | {"rows": np.sum([a["rows"] for a in answers if "rows" in a], axis=0)}

    def sums(self) -> Answer:
        """Nothing: the number of rows is that of any column's values and gaps."""
        return {}

    def names(self, told: Answer) -> Answer:
        return {key: told[key] for key in ("columns", "kinds")}


class Gaps(Query):
    """How many values columns have, of whatever kind."""

    name: Literal["gaps"] = "gaps"
    columns: list[str]
    repeats: bool = False
    """Whether to look for patients who are there twice."""

    @model_validator(mode="after")
    def _as_it_is(self) -> Self:
        if self.repeats and (self.only or any(step.kind != "absent" for step in self.steps)):
            raise ValueError("repeats are looked for in the table as it is, without steps that change or choose rows")
        return self

    def ask(self, sheet: Sheet, rules: Rules) -> Answer:
        """``n`` and ``missing`` per column; with ``repeats`` also ``again``, and ``again:rows`` of whole rows.

        That is how many values of an identifier occur again; 1 stands for any number below ``min_count``.
        """
        missing = np.array([sheet.missing(name).sum() for name in self.columns], np.int64)
        out = {"n": sheet.rows - missing, "missing": missing}
        if self.repeats:
            again = [of_identifier(sheet, name, rules.min_count) for name in self.columns]
            told = [count if count >= rules.min_count else min(count, 1) for count in (*again, of_rows(sheet))]
            out |= {"again": np.array(told[:-1], np.int64), "again:rows": np.array(told[-1:], np.int64)}
        return out

    def sums(self) -> Answer:
        keys = ["n", "missing", *(["again"] if self.repeats else [])]
        rows = {"again:rows": np.zeros(1, np.int64)} if self.repeats else {}
        return {**{key: np.zeros(len(self.columns), np.int64) for key in keys}, **rows}


class Moments(Query):
    """Sums over columns of numbers; ask twice, about 0 and about the mean, for a variance without cancellation.

    ``own`` is about each site's own mean, for its own variance: far from a centre for all sites that would be lost.
    """

    name: Literal["moments"] = "moments"
    columns: list[str]
    centres: list[FiniteFloat] = []
    own: bool = False

    def ask(self, sheet: Sheet, rules: Rules) -> Answer:
        """``n``, ``missing``, ``sum`` and ``squares`` per column; ``withheld`` is 1 where the others are left at 0."""
        count = len(self.columns)
        if self.centres and len(self.centres) != count:
            raise RefusedQueryError(f"{len(self.centres)} centres for {count} columns")
        out, sums = self._counts(), self._totals()
        for j, name in enumerate(self.columns):
            values = sheet.numbers(name)
            there = ~np.isnan(values)
            own, values = values[there & sheet.own(name)], values[there]
            if not (enough(values, rules.min_count) and enough(own, rules.min_count)):
                out["withheld"][j] = 1
                continue
            out["n"][j], out["missing"][j] = len(values), sheet.rows - len(values)
            centre = self.centres[j] if self.centres else 0.0
            away = values - (values.mean() if self.own and len(values) else centre)
            sums["sum"][j], sums["squares"][j] = away.sum(), (away**2).sum()
        if not all(np.isfinite(s).all() for s in sums.values()):
            raise RefusedQueryError("a sum is beyond 1.8e308; rescale the column")
        return {**out, **sums}

    def _counts(self) -> Answer:
        return {key: np.zeros(len(self.columns), np.int64) for key in ("n", "missing", "withheld")}

    def _totals(self) -> Answer:
        return {key: np.zeros(len(self.columns)) for key in ("sum", "squares")}

    def sums(self) -> Answer:
        if self.own:
            raise RefusedQueryError("moments about each site's own mean do not add up to anything; give a centre")
        return {**self._counts(), **self._totals()}


def enough(values: npt.NDArray[np.float64], least: int) -> bool:
    """Whether sums of these values say little about any of them: none, or many, of which none or many are unlike."""
    if len(values) == 0 or least <= 1:
        return True
    _, counts = np.unique(values, return_counts=True)
    unlike = len(values) - int(counts.max())
    return len(values) >= least and (unlike == 0 or unlike >= least)


class Below(Query):
    """Histograms on edges that the asker gives: the counts below each edge."""

    name: Literal["below"] = "below"
    edges: dict[str, list[FiniteFloat]]

    @field_validator("edges")
    @classmethod
    def _rising(cls, edges: dict[str, list[float]]) -> dict[str, list[float]]:
        for name, each in edges.items():
            if not 1 <= len(each) <= _EDGES or any(b <= a for a, b in pairwise(each)):
                raise ValueError(f"the edges of {name!r} must rise and be at most {_EDGES}")
        return edges

    def ask(self, sheet: Sheet, rules: Rules) -> Answer:
        """``low:NAME`` and ``high:NAME``: bounds of the number of values below each edge; ``n:NAME`` values in all.

        See :func:`told_below`; what filled gaps add is known. A column with fewer than ``min_count`` values counts as
        empty.
        """
        out: Answer = {}
        for name, each in self.edges.items():
            values = sheet.numbers(name)
            there = ~np.isnan(values)
            own, filled = values[there & sheet.own(name)], values[there & ~sheet.own(name)]
            if len(own) + len(filled) < rules.min_count or 0 < len(own) < rules.min_count:
                own = filled = values[:0]
            known = np.searchsorted(np.sort(filled), each, side="left")
            low, high = told_below(own, np.asarray(each), rules.min_count, sheet.origin(name))
            out[f"low:{name}"], out[f"high:{name}"] = low + known, high + known
            out[f"n:{name}"] = np.array([len(own) + len(filled)])
        return out

    def sums(self) -> Answer:
        sizes = {f"{end}:{name}": len(each) for name, each in self.edges.items() for end in ("low", "high")}
        sizes |= {f"n:{name}": 1 for name in self.edges}
        return {key: np.zeros(size, np.int64) for key, size in sizes.items()}


def told_below(
    values: npt.NDArray[np.float64], edges: npt.NDArray[np.float64], least: int, origin: Origin = _AS_IT_IS
) -> tuple[Ints, Ints]:
    """Bounds of how many values lie below each edge, when groups of fewer than ``least`` values are not told.

    The groups are those of the values, whatever the edges are: a value that ``least`` have is one, others are joined
    from left to right until there are enough. Edges inside of a group have the counts at its ends, so that no two
    histograms differ by fewer than ``least`` values. A group begins and ends at a number with few digits between its
    values and those of the next; the outer ones reach to the next edges of :data:`GRID`, so that nobody can tell the
    least and the largest value. All this is about numbers as the file has them (``origin``): by units of its choice
    an asker would have groups end elsewhere, and in many such units at their values.
    """
    if least <= 1 or not len(values):
        exact = np.searchsorted(np.sort(values), edges, side="left")
        return exact, exact
    turn = slice(None, None, -1 if origin.scale < 0 else 1)
    found, counts = np.unique(values, return_counts=True)
    found, counts = found[turn], counts[turn]
    places, sizes = _groups(counts, least)
    start, end = _extents(*origin.in_file(found[places]).T)
    if origin.units != _AS_IT_IS.units:
        low, high = np.sort(found[places], axis=1).T
        after, alone = np.nextafter(high, np.inf), low == high
        begin, finish = np.sort([origin.scale * start + origin.shift, origin.scale * end + origin.shift], axis=0)
        start = np.where(alone, low, np.minimum(begin, low))[turn]
        end, sizes = np.where(alone, after, np.maximum(finish, after))[turn], sizes[turn]
    total = np.concatenate([[0], np.cumsum(sizes)])
    place = np.searchsorted(end, edges, side="right")
    inside = edges > np.append(start, np.inf)[place]
    return total[place], total[np.minimum(place + inside, len(sizes))]


def _groups(counts: Ints, least: int) -> tuple[Ints, Ints]:
    """Places of the first and the last value of each group, and its size."""
    groups: list[list[int]] = []  # first place, last place, size
    begin, size = 0, 0
    for i, count in enumerate(counts.tolist()):
        begin, size = (i, count) if size == 0 else (begin, size + count)
        if size >= least:
            groups.append([begin, i, size])
            size = 0
    if size and groups:
        groups[-1][1], groups[-1][2] = len(counts) - 1, groups[-1][2] + size
    elif size:
        groups.append([begin, len(counts) - 1, size])
    made = np.array(groups, np.int64)
    return made[:, :2], made[:, 2]


def _extents(
    first: npt.NDArray[np.float64], last: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Where groups begin and end: one of a single value at it, others between their neighbours."""
    alone = first == last
    unit = 10.0 ** np.floor(np.log10(np.maximum(first[1:] - last[:-1], 1e-300)))
    between = np.floor(first[1:] / unit) * unit
    between = np.where((between > last[:-1]) & (between <= first[1:]), between, first[1:])
    outer = [-np.inf, *GRID, np.inf]
    floor = outer[int(np.searchsorted(outer, first[0], side="right")) - 1]
    ceiling = outer[int(np.searchsorted(outer, last[-1], side="right"))]
    after = np.nextafter(last, np.inf)
    start = np.concatenate([[floor], between])
    end = np.concatenate([np.where(alone[1:], first[1:], between), [ceiling]])
    return np.where(alone, first, start), np.where(alone, after, end)


class LevelCounts(Query):
    """The levels of categories."""

    name: Literal["levels"] = "levels"
    columns: list[str]
    known: dict[str, list[str]] | None = None
    """For each column the levels that are counted, in this order; those that a site tells of if left out."""

    @model_validator(mode="after")
    def _of_columns(self) -> Self:
        if self.known is not None and self.known.keys() != set(self.columns):
            raise ValueError("levels are known of other columns than those that are asked for")
        return self

    def ask(self, sheet: Sheet, rules: Rules) -> Answer:
        """``levels:NAME`` with their ``counts:NAME``; ``rest:NAME`` counts the others, ``many:NAME`` is 1 if too many.

        A rest of fewer than ``min_count`` rows takes the least of the told levels in. Of ``known`` levels the counts
        are those that would be told, or 0.
        """
        out: Answer = {}
        for name in self.columns:
            there = ~sheet.missing(name)
            values, ours = sheet[name][there], sheet.own(name)[there]
            listed = values if values.dtype == np.float64 else values.astype(np.str_)
            found, place, counts = np.unique(listed, return_inverse=True, return_counts=True)
            own = np.bincount(place[ours], minlength=len(found))
            least, name_of = rules.min_count, level if values.dtype == np.float64 else str
            order = [i for i in np.argsort(-counts, kind="stable") if counts[i] >= least and not 0 < own[i] < least]
            many = len(order) > rules.max_levels
            told = [] if many else [(name_of(found[i]), int(counts[i]), int(own[i])) for i in order]
            rest, of_own = len(values) - sum(n for _, n, _ in told), int(ours.sum()) - sum(n for *_, n in told)
            while 0 < rest < least or 0 < of_own < least:
                helping = [i for i, (*_, n) in enumerate(told) if n or not 0 < of_own < least]
                if not helping:
                    break
                _, more, more_own = told.pop(helping[-1])
                rest, of_own = rest + more, of_own + more_own
            counted = {text: count for text, count, _ in told}
            if self.known is None:
                out[f"levels:{name}"] = np.array([*counted], np.str_)
            order_of = counted if self.known is None else self.known[name]
            out[f"counts:{name}"] = np.array([counted.get(text, 0) for text in order_of], np.int64)
            out[f"rest:{name}"] = np.array([0 if rest < least or 0 < of_own < least else rest])
            out[f"many:{name}"] = np.array([int(many)])
        return out

    def combine(self, answers: Sequence[Answer]) -> Answer:
        """The union of the levels; a level that one site tells may be in the rest of another."""
        if self.known is not None:
            return super().combine(answers)
        out: Answer = {}
        for name in self.columns:
            total: dict[str, int] = {}
            for one in answers:
                for text, count in zip(one[f"levels:{name}"].tolist(), one[f"counts:{name}"].tolist(), strict=True):
                    total[text] = total.get(text, 0) + count
            out[f"levels:{name}"] = np.array([*total], np.str_)
            out[f"counts:{name}"] = np.array([*total.values()], np.int64)
            for key in ("rest", "many"):
                out[f"{key}:{name}"] = np.sum([a[f"{key}:{name}"] for a in answers], axis=0)
        return out

    def sums(self) -> Answer:
        """Zeros in the form of an answer about known levels; nothing where they are asked for."""
        if self.known is None:
            return {}
        sizes = {f"counts:{name}": len(self.known[name]) for name in self.columns}
        sizes |= {f"{key}:{name}": 1 for name in self.columns for key in ("rest", "many")}
        return {key: np.zeros(size, np.int64) for key, size in sizes.items()}

    def names(self, told: Answer) -> Answer:
        """The levels, by the alphabet: by their counts they would say which is more common."""
        return {} if self.known is not None else {f"levels:{n}": np.sort(told[f"levels:{n}"]) for n in self.columns}


class Outside(Query):
    """Whether the given levels are all there are."""

    name: Literal["outside"] = "outside"
    known: dict[str, list[str]]

    def ask(self, sheet: Sheet, rules: Rules) -> Answer:
        """``outside:NAME`` is 1 if some value of the column is none of its levels."""
        out: Answer = {}
        for name, levels in self.known.items():
            strange = {text for text in sheet.texts(name) if text is not None} - set(levels)
            out[f"outside:{name}"] = np.array([int(bool(strange))])
        return out

    def sums(self) -> Answer:
        return {f"outside:{name}": np.zeros(1, np.int64) for name in self.known}


class Census(Query):
    """Where the values of declared columns lie: cells of a range of numbers, or levels; told with noise only.

    Of a column of numbers the entries are the cells of its range, values beyond it counting at its ends, and the gaps;
    of a category its levels, all others together, and the gaps. A row is in one entry of each column, so that it adds a
    vector of norm sqrt(columns) to the answer.
    """

    name: Literal["census"] = "census"
    columns: dict[str, list[FiniteFloat] | list[str]]
    cells: int = Field(default=16, ge=2, le=1000)

    @model_validator(mode="after")
    def _declared(self) -> Self:
        if (
            self.steps
            or self.only
            or any(isinstance(g[0], float) and not (len(g) == 2 and g[0] < g[1]) for g in self.columns.values() if g)
        ):
            raise ValueError("a census is of the table as it is; numbers need two rising bounds")
        return self

    def ask(self, sheet: Sheet, rules: Rules) -> Answer:
        """``cells:NAME``: counts, as numbers that noise can be added to."""
        if not rules.noised:
            raise RefusedQueryError("a census is told with noise only: [privacy] level = 'study' is needed")
        sizes = self.sums()
        return {key: np.bincount(self._places(sheet, key[6:]), minlength=len(zeros)).astype(np.float64)
                for key, zeros in sizes.items()}  # fmt: skip

    def _places(self, sheet: Sheet, name: str) -> Ints:
        """The entry of every row."""
        given, last = self.columns[name], len(self.sums()[f"cells:{name}"]) - 1
        if name not in sheet.columns:
            return np.full(sheet.rows, last, np.int64)
        if given and isinstance(given[0], float):
            low, high = map(float, given)
            values = one_by_one(sheet[name])
            at = np.floor((np.clip(np.nan_to_num(values, nan=low), low, high) - low) / (high - low) * self.cells)
            return np.where(np.isnan(values), last, np.minimum(at, self.cells - 1)).astype(np.int64)
        place = {level(str(one)): i for i, one in enumerate(given)}
        found, back = np.unique(
            np.array([_MISSING if t is None else t for t in sheet.texts(name)]), return_inverse=True
        )
        known = [last if t == _MISSING else place.get(level(str(t)), last - 1) for t in found]
        return np.array(known, np.int64)[back]

    def sums(self) -> Answer:
        sizes = {n: self.cells + 1 if g and isinstance(g[0], float) else len(g) + 2 for n, g in self.columns.items()}
        return {f"cells:{name}": np.zeros(size) for name, size in sizes.items()}


_MISSING = "\0missing"  # a text that no file has


def one_by_one(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Numbers, each read by itself: what is none is missing, and changes nothing for the others."""
    if values.dtype == np.float64:
        return np.where(np.isfinite(values), values, np.nan)
    return np.array([_number(text) for text in values], np.float64)


def _number(text: str | None) -> float:
    try:
        found = float(text or "nan")
    except ValueError:
        return float("nan")
    return found if np.isfinite(found) else float("nan")


class Lacking(Query):
    """Which columns with gaps a site has too few values of for a conditional model of its own."""

    name: Literal["lacking"] = "lacking"
    chain: ConditionalModels

    def ask(self, sheet: Sheet, rules: Rules) -> Answer:
        """``lacking``: 1 for each such equation."""
        state = State(self.chain, _drawing(sheet))
        return {"lacking": np.array([int(name in state.lacking) for name in self.chain.equations])}

    def sums(self) -> Answer:
        return {"lacking": np.zeros(len(self.chain.equations), np.int64)}


class Conditional(Query):
    """What the model of a column that some sites lack takes: sums over a site that has it, for every copy."""

    name: Literal["conditional"] = "conditional"
    chain: ConditionalModels
    equation: str
    points: list[list[FiniteFloat]]

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        chain = self.chain
        if self.equation not in chain.borrowed:
            raise ValueError(f"no site lacks {self.equation!r}")
        if [len(one) for one in self.points] != [self.width] * chain.copies:
            raise ValueError(f"points must be {chain.copies} lists of {self.width} numbers")
        return self

    @property
    def width(self) -> int:
        """How many coefficients the equation has."""
        return self.chain.outputs(self.equation) * self.chain.width(self.equation)

    def ask(self, sheet: Sheet, rules: Rules) -> Answer:
        """``n`` rows; of each copy ``loss``, ``gradient``, the triangle of the ``hessian``; zeros if withheld."""
        state = State(self.chain, _drawing(sheet))
        made = told_sums(state, self.equation, np.array(self.points), rules.min_count)
        if made is None:
            return self.sums()
        i, j = np.triu_indices(self.width)
        flat = {"n": np.array([made.n]), "loss": made.loss, "gradient": made.gradient, "hessian": made.hessian[:, i, j]}
        if not all(np.isfinite(one).all() for one in flat.values()):
            raise RefusedQueryError("sums of a conditional model left the finite range; rescale the columns")
        return {key: one.ravel() for key, one in flat.items()}

    def sums(self) -> Answer:
        copies, d = self.chain.copies, self.width
        sizes = {"n": 1, "loss": copies, "gradient": copies * d, "hessian": copies * d * (d + 1) // 2}
        return {key: np.zeros(size) for key, size in sizes.items()}


def _drawing(sheet: Sheet) -> Sheet:
    if sheet.drawing is None:
        raise RefusedQueryError(f"{sheet.name}: nothing is drawn here, so that gaps cannot be imputed by equations")
    return sheet


AnyQuery = Annotated[
    Schema | Gaps | Moments | Below | LevelCounts | Outside | Census | Lacking | Conditional,
    Field(discriminator="name"),
]
QUERIES: dict[str, type[Query]] = {kind.model_fields["name"].default: kind for kind in get_args(get_args(AnyQuery)[0])}
"""The queries by name."""
_PARSER: TypeAdapter[Any] = TypeAdapter(AnyQuery)


def answer(sheet: Sheet, query: Query, rules: Rules) -> Answer:
    """What a site tells: the one place where a query meets a table."""
    name = type(query).model_fields["name"].default
    if name in rules.refuse:
        raise RefusedQueryError(f"{sheet.name}: the query {name!r} is not answered here")
    table = prepared(sheet, query.steps)
    if table.rows < rules.min_count:
        raise RefusedQueryError(f"{sheet.name}: fewer rows than its min_count = {rules.min_count}")
    return query.ask(table if query.only is None else table.taking(rows_of(table, *query.only, rules)), rules)


def rows_of(sheet: Sheet, column: str, wanted: str, rules: Rules) -> npt.NDArray[np.bool_]:
    """The rows with a level of a column; none if it is one that is not told.

    Levels of fewer than ``min_count`` rows are not told, and where the rows of all these, and gaps, are fewer than
    that, the least of the others is not told either: so no sum over a level, or difference of sums, is about few.
    """
    texts = sheet.texts(column)
    there = [text for text in texts.tolist() if text is not None]
    told = [one for one in Counter(there).most_common() if one[1] >= rules.min_count]
    rest = sheet.rows - sum(count for _, count in told)
    while told and 0 < rest < rules.min_count:
        rest += told.pop()[1]
    chosen = wanted in dict(told) and len(told) <= rules.max_levels
    made: npt.NDArray[np.bool_] = (texts == wanted) & chosen
    return made


# -- as text ----------------------------------------------------------------------------------------------------------


def parse_query(text: str) -> Query:
    """A query that came as JSON, checked."""
    if len(text) > _LARGEST:
        raise RefusedQueryError(f"a query of {len(text)} characters; at most {_LARGEST} are read")
    try:
        made: Query = _PARSER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise RefusedQueryError(f"query: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return made


def write_answer(given: Answer) -> str:
    """An answer as JSON; every number is read back as it was."""
    return json.dumps({key: values.tolist() for key, values in given.items()}, allow_nan=False)


def parse_answer(text: str) -> Answer:
    """An answer that came as JSON, checked: named lists of whole numbers, numbers or texts."""
    if len(text) > _LARGEST:
        raise DataError(f"an answer of {len(text)} characters; at most {_LARGEST} are read")
    try:
        content = json.loads(text)
    except ValueError:
        raise DataError("an answer that is not JSON") from None
    if not isinstance(content, dict):
        raise DataError("an answer that is not a table of lists")
    return {str(key): _listed(str(key), values) for key, values in content.items()}


def _listed(key: str, values: Any) -> npt.NDArray[Any]:
    if isinstance(values, list):
        if all(isinstance(v, str) for v in values) and (values or key.split(":")[0] in ("levels", "columns", "kinds")):
            return np.array(values, np.str_)
        if all(isinstance(v, int) and not isinstance(v, bool) and abs(v) < 2**53 for v in values):
            return np.array(values, np.int64)
        if all(isinstance(v, int | float) and not isinstance(v, bool) and np.isfinite(v) for v in values):
            return np.array(values, np.float64)
    raise DataError(f"answer: {key!r} is not a list of numbers or of texts")


# -- asking -----------------------------------------------------------------------------------------------------------

Ask = Callable[[Query], list[Answer]]
"""Asks every site and gives their answers in the order of the sites."""


class TablesAtHand:
    """Sheets that are asked here, as sites of a federation are asked there."""

    def __init__(self, sheets: Sequence[Sheet], rules: Rules | Mapping[str, Rules] | None = None) -> None:
        self.sheets, self.exchanges = list(sheets), 0
        own = rules if isinstance(rules, Mapping) else {s.name: rules or Rules() for s in self.sheets}
        self.rules = [own.get(s.name, Rules()) for s in self.sheets]

    def __call__(self, query: Query) -> list[Answer]:
        """The sites' answers."""
        self.exchanges += 1
        return [answer(sheet, query, rules) for sheet, rules in zip(self.sheets, self.rules, strict=True)]

    @property
    def names(self) -> list[str]:
        """What the sites are called."""
        return [sheet.name for sheet in self.sheets]
