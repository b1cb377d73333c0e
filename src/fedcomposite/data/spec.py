"""What a recipe says, as it is written in Python or under ``[recipe]`` in TOML."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from fedcomposite._validation import suggest
from fedcomposite.data.cells import level
from fedcomposite.data.faults import DataError
from fedcomposite.data.steps import Local, Unit

METHODS = ("mean", "median", "most_frequent")
KNOTS = {
    3: (0.1, 0.5, 0.9),
    4: (0.05, 0.35, 0.65, 0.95),
    5: (0.05, 0.275, 0.5, 0.725, 0.95),
    6: (0.05, 0.23, 0.41, 0.59, 0.77, 0.95),
    7: (0.025, 0.1833, 0.3417, 0.5, 0.6583, 0.8167, 0.975),
}
"""Quantiles at which knots lie (Harrell, Regression Modeling Strategies)."""

Markers = Annotated[list[FiniteFloat | str], BeforeValidator(lambda v: [v] if isinstance(v, int | float | str) else v)]
Units = Annotated[Unit, BeforeValidator(lambda v: {"scale": v} if isinstance(v, int | float) else v)]
_Level = Annotated[str, BeforeValidator(lambda v: level(v) if isinstance(v, int | float | str) else v)]
Recoding = dict[_Level, _Level]
"""Level in a file = common level."""
Names = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class ConstantFill(BaseModel):
    """``{constant = VALUE}``: gaps are filled with this value."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    constant: FiniteFloat | str


Filling = Literal["mean", "median", "most_frequent", "chained", "complete"] | FiniteFloat | ConstantFill


class SitePart(BaseModel):
    """What is special about one site: its names, units, markers of absent values, and how its file is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    rename: dict[str, str] = {}
    missing: dict[str, Markers] = {}
    recode: dict[str, Recoding] = {}
    units: dict[str, Units] = {}
    drop: Names = []
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    thousands: str | None = None

    @property
    def style(self) -> dict[str, str | None]:
        """How the file is written."""
        return self.model_dump(include={"separator", "decimal", "encoding", "thousands"}, exclude_none=True)


class RecipeSpec(BaseModel):
    """The fields of :class:`fedcomposite.Recipe`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    rename: dict[str, str] = {}
    missing: dict[str, Markers] = {}
    recode: dict[str, Recoding] = {}
    units: dict[str, Units] = {}
    drop: Names = []
    sites: dict[str, SitePart] = {}
    absent: Literal["refuse", "missing"] = "refuse"
    target: dict[str, FiniteFloat] = {}
    missing_target: Literal["refuse", "drop"] = "refuse"
    time: str | None = None
    entry: str | None = None
    strata: str | None = None
    weight: str | None = None
    offset: str | None = None
    impute: Filling | dict[str, Filling] = {}
    copies: Annotated[int, Field(ge=2, le=100)] = 20
    iterations: Annotated[int, Field(ge=1, le=50)] = 10
    indicators: bool | Names = False
    one_hot: Names | dict[str, str] = []
    unknown: Literal["refuse", "reference"] = "refuse"
    site: bool | str = False
    per_site: bool | Names = False
    log: Names | dict[str, FiniteFloat] = []
    splines: dict[str, int | list[FiniteFloat]] = {}
    interactions: list[tuple[str, str]] = []
    standardize: bool | Literal["all"] | Names = True
    rare: Annotated[int, Field(ge=0)] = 0
    min_count: Annotated[int, Field(ge=1)] = 5

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise DataError("; ".join(dict.fromkeys(_line(one, type(self)) for one in error.errors()))) from None

    @model_validator(mode="after")
    def _check(self) -> RecipeSpec:
        for name, knots in self.splines.items():
            if isinstance(knots, int):
                if knots not in KNOTS:
                    raise ValueError(f"splines: {name} = {knots}, must be 3 to 7 knots, or a list of them")
            elif len(knots) < 3 or sorted(set(knots)) != list(knots):
                raise ValueError(f"splines: {name} = {knots}, must be 3 or more rising knots")
        pairs = [frozenset(pair) for pair in self.interactions]
        for first, second in self.interactions:
            if pairs.count(frozenset((first, second))) > 1:
                raise ValueError(f"interactions: {first!r} and {second!r} are there twice")
        for name in self.one_hot_columns:
            for option, names in (("log", self.log_offsets), ("splines", self.splines)):
                if name in names:
                    raise ValueError(f"{option}: {name!r} is also in one_hot")
        if self.site == "":
            raise ValueError("site: must be true, 'all', or the name of the site that the others are compared with")
        if self.time is None and (self.entry or self.strata):
            raise ValueError("entry and strata go with time, the column of times to an event")
        return self

    # -- in normal form -----------------------------------------------------------------------------------------------

    @property
    def one_hot_columns(self) -> dict[str, str]:
        """Each category and its reference level; an empty one is to be found."""
        return self.one_hot if isinstance(self.one_hot, dict) else dict.fromkeys(self.one_hot, "")

    @property
    def log_offsets(self) -> dict[str, float]:
        """What is added before each logarithm."""
        return self.log if isinstance(self.log, dict) else dict.fromkeys(self.log, 0.0)

    def filling(self, name: str) -> Filling | None:
        """How gaps of a column are filled."""
        if isinstance(self.impute, dict):
            return self.impute.get(name, self.impute.get("default"))
        return self.impute

    @property
    def draws(self) -> bool:
        """Whether gaps of some columns are imputed by draws."""
        return "chained" in (self.impute.values() if isinstance(self.impute, dict) else [self.impute])

    @property
    def times(self) -> list[str]:
        """The columns that make a target of times, beside the event."""
        return [name for name in (self.time, self.entry, self.strata) if name is not None]

    @property
    def special(self) -> list[str]:
        """The columns that are no features, beside the target."""
        return [*self.times, *(name for name in (self.weight, self.offset) if name is not None)]

    @property
    def named(self) -> dict[str, list[str]]:
        """The features that each part of the recipe names."""
        return {
            "impute": [n for n in self.impute if n != "default"] if isinstance(self.impute, dict) else [],
            "indicators": self.indicators if isinstance(self.indicators, list) else [],
            "one_hot": list(self.one_hot_columns),
            "log": list(self.log_offsets),
            "splines": list(self.splines),
        }

    def local(self, site: str) -> Local:
        """What a site does to its own table; its own parts win over the common ones."""
        own = self.sites.get(site, SitePart())
        return Local(
            rename=self.rename | own.rename,
            missing={k: self.missing.get(k, []) + own.missing.get(k, []) for k in {**self.missing, **own.missing}},
            recode={k: self.recode.get(k, {}) | own.recode.get(k, {}) for k in {**self.recode, **own.recode}},
            units=self.units | own.units,
            drop=[*self.drop, *own.drop],
        )

    def texts(self, sites: Iterable[str]) -> set[str]:
        """Names, in the files, of columns that are categories."""
        own = [self.local(site) for site in sites]
        return {
            name
            for one in own
            for name in each_name(
                [*self.one_hot_columns, *one.recode, *([self.strata] if self.strata else [])], one.rename
            )
        }


def each_name(columns: Iterable[str], rename: dict[str, str]) -> list[str]:
    """The common names and those that a site has for them."""
    return [found for name in columns for found in (name, rename.get(name, name))]


def _line(problem: Any, model: type[BaseModel]) -> str:
    place = [str(part) for part in problem["loc"] if not str(part).startswith(("function-", "list[", "dict[", "union"))]
    where = ".".join(place)
    if problem["type"] == "extra_forbidden":
        known: Iterable[str] = model.model_fields if len(place) == 1 else SitePart.model_fields
        return f"recipe: {where} is not a known field{suggest(place[-1], known)} (known: {', '.join(known)})"
    said = problem["msg"].removeprefix("Value error, ")
    return f"recipe: {where + ': ' if where else ''}{said[0].lower()}{said[1:]}"
