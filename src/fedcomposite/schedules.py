"""Schedules: steps that change from round to round, as pure functions of the round.

A schedule takes the place of a number in the fields of a method that its ``schedulable`` names:

    FedAvg(local_steps=5, step=Cosine(start=0.1, end=0.001, rounds=200))

and in a configuration file, where it is a table, with the names of :data:`SCHEDULES`:

    step = {schedule = "cosine", start = 0.1, end = 0.001, rounds = 200}

In Python a function of the round does as well, ``step=lambda t: 0.1 / (t + 1)``.

Rounds count from 0. A schedule is frozen, its ``repr`` identifies it, and its value is positive and finite in every
round, so a resumed run, and every party of a federation, has the same steps. :class:`Warmup` gives any of them a slow
start.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any

import annotated_types as at

from fedcomposite._validation import Count, Positive, suggest, validate
from fedcomposite.registry import Registry

__all__ = [
    "SCHEDULES",
    "Constant",
    "Cosine",
    "Exponential",
    "Formula",
    "Inverse",
    "InverseSqrt",
    "Piecewise",
    "Power",
    "Ramp",
    "Schedule",
    "Staircase",
    "Warmup",
    "read",
]

Whole = Annotated[int, at.Ge(0)]


if TYPE_CHECKING:
    _Number = float  # to a type checker a schedule is what it stands for, so that every method's fields take one
else:
    _Number = object


class Schedule(ABC, _Number):
    """A positive number for every round; subclasses are frozen dataclasses."""

    def __post_init__(self) -> None:
        validate(self)

    def __call__(self, round: int) -> float:
        """The value in a round, counted from 0."""
        value = self.formula(round)
        if not 0 < value < math.inf:
            raise ValueError(f"{self} is {value:g} in round {round}, must be positive and finite")
        return value

    @abstractmethod
    def formula(self, round: int) -> float:
        """The formula."""

    @property
    def table(self) -> dict[str, Any]:
        """The schedule as a configuration file says it; :func:`read` takes it back, if a file can name it."""
        name = next((name for name, cls in SCHEDULES.items() if cls is type(self)), type(self).__name__)
        given = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        plain = {k: v.table if isinstance(v, Schedule) else v for k, v in given.items()}
        return {"schedule": name} | {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}


@dataclass(frozen=True)
class Constant(Schedule):
    """The same value in all rounds."""

    value: Positive

    def formula(self, round: int) -> float:
        return self.value


@dataclass(frozen=True)
class Power(Schedule):
    """start (offset / (t + offset))^power: it begins at start and has halved when t + offset = 2^(1/power) offset.

    power = 1/3 is STEM's rule, 1/2 and 1 are those for non-smooth and for strongly convex losses.
    """

    start: Positive
    power: Annotated[float, at.Gt(0), at.Le(2)]
    offset: Positive = 1.0

    def formula(self, round: int) -> float:
        return self.start * math.pow(self.offset / (round + self.offset), self.power)


@dataclass(frozen=True)
class InverseSqrt(Schedule):
    """start / sqrt(t + offset); eta_0 / sqrt(k) of the FedMLS paper's baselines, in rounds k = 1, 2, ..."""

    start: Positive
    offset: Positive = 1.0

    def formula(self, round: int) -> float:
        return self.start / math.sqrt(round + self.offset)


@dataclass(frozen=True)
class Inverse(Schedule):
    """start / (t + offset); eta_0 / k for SCAFFOLD in the FedMLS paper, in rounds k = 1, 2, ..."""

    start: Positive
    offset: Positive = 1.0

    def formula(self, round: int) -> float:
        return self.start / (round + self.offset)


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from start, in round ``warmup``, to end, in round ``rounds`` - 1 and after.

    The first ``warmup`` rounds climb in a line: (t + 1) / (warmup + 1) of start. A single round after them is at start.
    """

    start: Positive
    end: Positive
    rounds: Count
    warmup: Whole = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup >= self.rounds:
            raise ValueError(f"Cosine: warmup = {self.warmup}, must be below rounds = {self.rounds}")

    def formula(self, round: int) -> float:
        if round < self.warmup:
            return self.start * (round + 1) / (self.warmup + 1)
        if round == self.warmup:
            return self.start
        if round >= self.rounds - 1:
            return self.end
        done = (round - self.warmup) / (self.rounds - 1 - self.warmup)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Exponential(Schedule):
    """start decay^t, but at least ``least``, which keeps it from becoming zero."""

    start: Positive
    decay: Annotated[float, at.Gt(0), at.Lt(1)]
    least: Positive = 1e-12

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.start:
            raise ValueError(f"Exponential: least = {self.least:g}, must not be above start = {self.start:g}")

    def formula(self, round: int) -> float:
        """The larger of the two."""
        return max(self.least, self.start * self.decay**round)


@dataclass(frozen=True)
class Piecewise(Schedule):
    """values[0] before round boundaries[0], values[1] from there on until boundaries[1], and so on."""

    values: tuple[Positive, ...]
    boundaries: tuple[Count, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"Piecewise: {len(self.values)} values and {len(self.boundaries)} boundaries, must be one value more"
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"Piecewise: boundaries = {self.boundaries}, must increase")

    def formula(self, round: int) -> float:
        """As many boundaries as were passed."""
        return self.values[sum(round >= b for b in self.boundaries)]


@dataclass(frozen=True)
class Ramp(Schedule):
    """end + (start - end) (1 - t / rounds)^power, and end from t = ``rounds`` on.

    t counts the rounds after the first ``delay``, which are at start.
    power = 1 is a line; 3, the default, moves fast at first and slowly at the end, as Zhu and Gupta (2017) prune.
    """

    start: Positive
    end: Positive
    rounds: Count
    power: Positive = 3.0
    delay: Whole = 0

    def formula(self, round: int) -> float:
        if round <= self.delay:
            return self.start
        left = 1 - (round - self.delay) / self.rounds
        return self.end + (self.start - self.end) * math.pow(max(0.0, left), self.power)


@dataclass(frozen=True)
class Warmup(Schedule):
    """Another schedule after ``rounds`` rounds, perhaps none, that climb in a line towards its first value."""

    rounds: Whole
    then: Schedule

    def __post_init__(self) -> None:
        object.__setattr__(self, "then", read(self.then))
        super().__post_init__()

    def formula(self, round: int) -> float:
        """A line, then the other one from its round 0."""
        if round < self.rounds:
            return self.then(0) * (round + 1) / (self.rounds + 1)
        return self.then(round - self.rounds)


@dataclass(frozen=True)
class Staircase(Schedule):
    """Another schedule, whose value is kept for ``every`` rounds: a GPU records rounds whose steps stay the same."""

    every: Count
    of: Schedule

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", read(self.of))
        super().__post_init__()

    def formula(self, round: int) -> float:
        """The other one in the first round of each stair."""
        return self.of(round - round % self.every)


@dataclass(frozen=True, repr=False)
class Formula(Schedule):
    """A function of the round. A checkpoint knows it by its name alone."""

    function: Callable[[int], float]

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    def formula(self, round: int) -> float:
        """What the function gives, which has to be a number."""
        return float(self.function(round))

    @property
    def table(self) -> dict[str, Any]:
        """Its name; no file has functions."""
        return {"schedule": repr(self)}


def _accept(name: str, thing: Any) -> type[Schedule]:
    if not (isinstance(thing, type) and issubclass(thing, Schedule) and is_dataclass(thing)):
        raise TypeError("it must be a dataclass that derives from Schedule")
    return thing


SCHEDULES: Registry[type[Schedule]] = Registry(
    "schedule",
    {
        "constant": Constant,
        "cosine": Cosine,
        "exponential": Exponential,
        "inverse": Inverse,
        "inverse_sqrt": InverseSqrt,
        "piecewise": Piecewise,
        "power": Power,
        "ramp": Ramp,
        "staircase": Staircase,
        "warmup": Warmup,
    },
    group="fedcomposite.schedules",
    accept=_accept,
)
"""By the name that a configuration file uses."""


def read(table: Any) -> Any:
    """The schedule that a table says, or a function is; everything else is given back as it is.

    >>> read({"schedule": "inverse_sqrt", "start": 0.1})
    InverseSqrt(start=0.1, offset=1.0)
    >>> read(0.1)
    0.1
    """
    if isinstance(table, FunctionType | partial):
        return Formula(table)
    if not isinstance(table, Mapping) or "schedule" not in table:
        return table
    given = dict(table)
    name = given.pop("schedule")
    cls = SCHEDULES.lookup(name, ValueError)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for field in given:
        if field not in known:
            near, listed = suggest(field, known), ", ".join(known)
            raise ValueError(f"schedule {name!r} has no field {field!r}{near} (its fields: {listed})")
    if missing := [f.name for f in known.values() if f.name not in given and f.default is MISSING]:
        raise ValueError(f"schedule {name!r} needs {', '.join(missing)}")
    return cls(**given)
