"""Steps of a preparation, each with what it has learned: pure functions from a sheet to a sheet, written as JSON.

A site applies them to its own table; the steps themselves hold aggregates only and may travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from fedcomposite._validation import suggest
from fedcomposite.data.cells import level
from fedcomposite.data.chained import ConditionalModels
from fedcomposite.data.faults import DataError, Fault, refuse
from fedcomposite.data.sheets import Origin, Sheet

Floats = npt.NDArray[np.float64]
OTHER = "(other)"
"""The level of values that are too rare to have their own."""
SITE = "site"
"""The column that is not in any table: whose table it is."""


class Step(BaseModel):
    """One step; ``kind`` names it in JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def apply(self, sheet: Sheet) -> Sheet:
        """The sheet after this step."""
        raise NotImplementedError


def _not_zero(scale: float) -> float:
    if scale == 0:
        raise ValueError("scale = 0 would make all values alike")
    return scale


class Unit(BaseModel):
    """A linear change of units: ``scale * value + shift``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    scale: Annotated[FiniteFloat, AfterValidator(_not_zero)] = 1.0
    shift: FiniteFloat = 0.0

    def of(self, values: Floats) -> Floats:
        """The values in the common unit."""
        return self.scale * values + self.shift


class Local(Step):
    """What one site does to its own columns: rename, mark as missing, recode, change units, drop, in this order.

    ``missing`` are values as the site's file has them, before the change of units.
    """

    kind: Literal["local"] = "local"
    rename: dict[str, str] = {}
    """Common name = name in this site's file."""
    missing: dict[str, list[FiniteFloat | str]] = {}
    recode: dict[str, dict[str, str]] = {}
    """Level in this site's file = common level."""
    units: dict[str, Unit] = {}
    drop: list[str] = []

    def apply(self, sheet: Sheet) -> Sheet:
        """The sheet with the common names, units and gaps; a name that the site does not have is passed over."""
        common = {own: name for name, own in self.rename.items() if own in sheet.columns}
        twice = [name for name in common.values() if name in sheet.columns and name not in common]
        if twice:
            raise DataError(f"{sheet.name}: two columns are called {twice[0]!r} after renaming; drop one")
        left_out = {common.get(name, name) for name in self.drop}
        columns = {common.get(name, name): values for name, values in sheet.columns.items()}
        columns = {name: values for name, values in columns.items() if name not in left_out}
        for name, markers in self.missing.items():
            if name in columns:
                columns[name] = _without(columns[name], markers)
        made = sheet.having(columns)
        for name, levels in self.recode.items():
            if name in columns:
                texts = [None if text is None else levels.get(level(text), text) for text in made.texts(name)]
                columns[name] = np.array(texts, object)
        made = sheet.having(columns)
        named = {name: sheet.origin(own) for own, name in common.items()}
        origins = {name: one for name, one in ({**sheet.origins, **named}).items() if name in columns}
        return self._scaled(replace(made, origins=origins))

    def _scaled(self, sheet: Sheet) -> Sheet:
        """The sheet in other units, in which no two numbers become one."""
        columns, origins = dict(sheet.columns), dict(sheet.origins)
        for name, unit in self.units.items():
            if name in columns:
                before, values = sheet.origin(name), sheet.numbers(name)
                made = Origin(before.name, unit.scale * before.scale, unit.scale * before.shift + unit.shift)
                columns[name], origins[name] = unit.of(values), made
                if not Origin(name, unit.scale, unit.shift).keeps(columns[name], values):
                    raise DataError(f"{sheet.name}: units of {name!r}: numbers would lose digits; take a smaller shift")
        return replace(sheet, columns=columns, origins=origins)


def _without(values: npt.NDArray[Any], markers: Iterable[float | str]) -> npt.NDArray[Any]:
    """The values, those that mark absence being missing."""
    named = {level(marker) for marker in markers}
    if values.dtype == np.float64:
        return np.where(np.isin(values, [float(m) for m in named if _is_number(m)]), np.nan, values)
    return np.array([None if text is None or level(text) in named else text for text in values], object)


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


class Complete(Step):
    """Rows without a value in these columns are left out (the target's, as a rule)."""

    kind: Literal["complete"] = "complete"
    columns: list[str]

    def apply(self, sheet: Sheet) -> Sheet:
        """The sheet with fewer rows."""
        keep = ~np.any([sheet.missing(name) for name in self.columns], axis=0)
        return sheet.taking(keep)


class Absent(Step):
    """Columns that a site does not have are there, with nothing in them."""

    kind: Literal["absent"] = "absent"
    columns: list[str]

    def apply(self, sheet: Sheet) -> Sheet:
        """The sheet with these columns."""
        gone = {name: np.full(sheet.rows, np.nan) for name in self.columns if name not in sheet.columns}
        return sheet.having({**sheet.columns, **gone})


class Impute(Step):
    """Gaps are filled; ``indicators`` get a column of 0 and 1 beside them that says where."""

    kind: Literal["impute"] = "impute"
    values: dict[str, FiniteFloat | str] = {}
    indicators: list[str] = []
    within: dict[str, tuple[FiniteFloat, FiniteFloat]] = {}
    """Where a median of the pooled values lies for certain."""

    def apply(self, sheet: Sheet) -> Sheet:
        """The sheet without gaps in the columns that have a value here."""
        columns, filled = dict(sheet.columns), dict(sheet.filled)
        for name in self.indicators:
            columns[indicator(name)] = sheet.missing(name).astype(np.float64)
        for name, value in self.values.items():
            gone = filled[name] = sheet.missing(name)
            if isinstance(value, str):
                texts = sheet.texts(name).copy()
                texts[gone] = value
                columns[name] = texts
            else:
                columns[name] = np.where(gone, value, sheet.numbers(name))
        return replace(sheet, columns=columns, filled=filled)


def indicator(name: str) -> str:
    """The name of the column that says where another has gaps."""
    return f"{name} missing"


class Chained(Step):
    """Gaps are filled by draws from conditional models, in several copies; ``copy`` is the one that is made."""

    kind: Literal["chained"] = "chained"
    chain: ConditionalModels
    copy_number: int = 0

    def apply(self, sheet: Sheet) -> Sheet:
        """The copy without gaps in the columns that have an equation; as they begin where nothing may be drawn."""
        made = self.chain.completed(sheet)
        return made[min(self.copy_number, len(made) - 1)]


class Levels(BaseModel):
    """The levels of a category; the reference is coded by zeros."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    levels: list[str]
    reference: str

    @property
    def coded(self) -> list[str]:
        """The levels that have a column."""
        return [name for name in self.levels if name != self.reference]


class OneHot(Step):
    """A category becomes a column of 0 and 1 per level but the reference.

    What is not among the levels counts as :data:`OTHER` if that is one, as the reference if ``unknown`` says so, and is
    refused otherwise.
    """

    kind: Literal["one_hot"] = "one_hot"
    columns: dict[str, Levels]
    unknown: Literal["refuse", "reference"] = "refuse"

    def apply(self, sheet: Sheet) -> Sheet:
        """The sheet with the columns ``name=level`` in the place of ``name``."""
        out: dict[str, npt.NDArray[Any]] = {}
        for name, values in sheet.columns.items():
            if name in self.columns:
                coding, texts = self.columns[name], self._known(sheet, name)
                out |= {f"{name}={one}": (texts == one).astype(np.float64) for one in coding.coded}
            else:
                out[name] = values
        made_from = {f"{name}={one}": [name] for name, coding in self.columns.items() for one in coding.coded}
        return sheet.having(out, made_from)

    def _known(self, sheet: Sheet, name: str) -> npt.NDArray[Any]:
        coding, texts = self.columns[name], sheet.texts(name)
        if gone := int(sheet.missing(name).sum()):
            raise DataError(f"{sheet.name}: {gone} missing value(s) in {name!r}; impute them before coding the levels")
        strange = ~np.isin(texts.astype(str), coding.levels)
        if not strange.any():
            return texts
        if OTHER not in coding.levels and self.unknown == "refuse":
            raise DataError(
                f"{sheet.name}: {int(strange.sum())} value(s) of {name!r} are none of its levels "
                f"({', '.join(coding.levels)}); mend them, or set unknown = 'reference'"
            )
        return np.where(strange, OTHER if OTHER in coding.levels else coding.reference, texts)


class SiteTerms(Step):
    """A column of 0 and 1 for each site but the reference; a table of no such site has zeros, as the reference.

    Without a reference every site has one: what a penalty draws towards zero is then its distance from a common level.
    """

    kind: Literal["site"] = "site"
    sites: list[str]
    reference: str | None

    @property
    def terms(self) -> dict[str, str]:
        """The columns, each with its site."""
        return {f"{SITE}={name}": name for name in self.sites if name != self.reference}

    def apply(self, sheet: Sheet) -> Sheet:
        """The sheet with these columns at its end."""
        made = {term: np.full(sheet.rows, float(name == sheet.name)) for term, name in self.terms.items()}
        return sheet.having({**sheet.columns, **made})


class PerSite(Step):
    """Beside features a column for each site, which is the feature there and 0 elsewhere: ``age@north``.

    Their coefficients are what the site's own differ by from the common one. They are the last features, those of one
    feature side by side. A table of no such site has zeros: the common coefficients.
    """

    kind: Literal["per_site"] = "per_site"
    sites: list[str]
    columns: list[str]

    def terms(self, name: str) -> list[str]:
        """The names of a feature's columns."""
        return [f"{name}@{site}" for site in self.sites]

    def apply(self, sheet: Sheet) -> Sheet:
        """The sheet with these columns at its end."""
        zeros = np.zeros(sheet.rows)
        made = {
            term: sheet.numbers(name) if site == sheet.name else zeros
            for name in self.columns
            for term, site in zip(self.terms(name), self.sites, strict=True)
        }
        return sheet.having({**sheet.columns, **made}, {t: [name] for name in self.columns for t in self.terms(name)})


class Log(Step):
    """log(value + offset) in the place of a column."""

    kind: Literal["log"] = "log"
    offsets: dict[str, FiniteFloat]

    def apply(self, sheet: Sheet) -> Sheet:
        """The sheet with the columns ``log(name)``."""
        out: dict[str, npt.NDArray[Any]] = {}
        for name, values in sheet.columns.items():
            if name not in self.offsets:
                out[name] = values
                continue
            shifted = sheet.numbers(name) + self.offsets[name]
            if low := int((shifted <= 0).sum()):
                remedy = "mark zeros as missing, or add an offset"
                raise DataError(f"{sheet.name}: {low} value(s) of {name!r} have no logarithm; {remedy}")
            out[logarithm(name, self.offsets[name])] = np.log(shifted)
        return sheet.having(out, {logarithm(name, offset): [name] for name, offset in self.offsets.items()})


def logarithm(name: str, offset: float) -> str:
    """The name of a logarithm."""
    return f"log({name})" if offset == 0 else f"log({name} + {offset:g})"


class Spline(Step):
    """Natural cubic splines: beside a column its nonlinear terms ``name spline 1``, ..., one less than knots - 1.

    Term j is ((x - t_j)+^3 - (x - t_(k-1))+^3 (t_k - t_j) / d + (x - t_k)+^3 (t_(k-1) - t_j) / d) / (t_k - t_1)^2
    with d = t_k - t_(k-1): linear beyond the outer knots, as in Harrell's restricted cubic splines.
    """

    kind: Literal["spline"] = "spline"
    knots: dict[str, list[FiniteFloat]]
    within: dict[str, list[tuple[FiniteFloat, FiniteFloat]]] = {}

    def terms(self, name: str) -> list[str]:
        """The names of a column's nonlinear terms."""
        return [f"{name} spline {j + 1}" for j in range(len(self.knots[name]) - 2)]

    def apply(self, sheet: Sheet) -> Sheet:
        """The sheet with the terms after their column."""
        out: dict[str, npt.NDArray[Any]] = {}
        made_from: dict[str, list[str]] = {}
        for name, values in sheet.columns.items():
            out[name] = values
            if name in self.knots:
                terms = natural_spline(sheet.numbers(name), self.knots[name])
                named = dict(zip(self.terms(name), terms.T, strict=True))
                out |= named
                made_from |= {term: [name] for term in named}
        return sheet.having(out, made_from)


def natural_spline(x: Floats, knots: Sequence[float]) -> Floats:
    """The nonlinear terms of a natural cubic spline, ``(samples, knots - 2)``."""
    t = np.asarray(knots, np.float64)
    cubes = np.maximum(x[:, None] - t, 0.0) ** 3
    first, last, width = t[:-2], t[-1], t[-1] - t[-2]
    terms = cubes[:, :-2] - cubes[:, [-2]] * (last - first) / width + cubes[:, [-1]] * (t[-2] - first) / width
    made: Floats = terms / (last - t[0]) ** 2
    return made


class Interact(Step):
    """Products of pairs of columns, ``a:b``."""

    kind: Literal["interact"] = "interact"
    pairs: list[tuple[str, str]]

    def apply(self, sheet: Sheet) -> Sheet:
        """The sheet with the products at its end."""
        made = {f"{a}:{b}": sheet.numbers(a) * sheet.numbers(b) for a, b in self.pairs}
        return sheet.having({**sheet.columns, **made}, {f"{a}:{b}": [a, b] for a, b in self.pairs})


class Standardize(Step):
    """(x - mean) / sd; 0 for a column that was constant, up to rounding, where the recipe was learned."""

    kind: Literal["standardize"] = "standardize"
    mean: dict[str, FiniteFloat]
    sd: dict[str, Annotated[FiniteFloat, Field(gt=0)]]
    constant: list[str] = []

    def apply(self, sheet: Sheet) -> Sheet:
        """The sheet with these columns scaled."""
        scaled = {name: (sheet.numbers(name) - self.mean[name]) / self.sd[name] for name in self.mean}
        gone = {name: np.where(np.isnan(scaled[name]), np.nan, 0.0) for name in self.constant}
        return sheet.having({**sheet.columns, **scaled, **gone})


AnyStep = Annotated[
    Local | Complete | Absent | Impute | Chained | OneHot | SiteTerms | Log | Spline | Interact | Standardize | PerSite,
    Field(discriminator="kind"),
]


def prepared(sheet: Sheet, steps: Iterable[Step]) -> Sheet:
    """The sheet after all the steps."""
    for step in steps:
        sheet = step.apply(sheet)
    return sheet


def known(what: str, given: Iterable[str], columns: Mapping[str, Any] | Sequence[str]) -> None:
    """Refuse names of columns that nobody has."""
    refuse(unknown(what, given, columns))


def unknown(what: str, given: Iterable[str], columns: Mapping[str, Any] | Sequence[str]) -> list[Fault]:
    """A fault for every name of a column that nobody has."""
    there = f"there are: {', '.join(columns)}"
    return [Fault(what, f"no column {n!r}{suggest(n, columns)}", there, n) for n in given if n not in columns]
