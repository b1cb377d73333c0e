"""Comparisons from Python: problems and methods as they are, in memory; the engine of ``fedcomposite compare``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Unpack

import pandas as pd

from fedcomposite import algorithms, theory
from fedcomposite._validation import UserError, suggest
from fedcomposite.algorithms import AnyAlgorithm
from fedcomposite.algorithms.base import Algorithm
from fedcomposite.experiments.allowances import Allowance, spend
from fedcomposite.experiments.config import distinct
from fedcomposite.experiments.outcomes import Comparison
from fedcomposite.experiments.tuning import (
    EXTENSIONS,
    Attempt,
    Chosen,
    Point,
    TuningError,
    score,
    search,
    settle,
)
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import Loss
from fedcomposite.results import Result
from fedcomposite.runtime import Record
from fedcomposite.runtime.simulator import SimulateOptions

Method = AnyAlgorithm | type[AnyAlgorithm] | str | Callable[[Problem], AnyAlgorithm]
"""A method with its steps, a class or a name (practical steps from the problem), or a function of the problem."""
Grid = Mapping[str, Sequence[Any]]
Tune = Grid | Mapping[str, Grid] | Literal["auto"]
Budget = int | Mapping[str, float]
FACTORS = (0.25, 1.0, 4.0)
"""What ``tune="auto"`` multiplies a method's step with, before it looks further."""
TRIAL_SEED = 1000
"""The seed that values are chosen with, none of those that are reported."""


class _Key(NamedTuple):
    problem: str
    label: str

    def __str__(self) -> str:
        return f"{self.label} on {self.problem}" if self.problem else self.label


@dataclass(repr=False)
class Tuned(Result):
    """The values that :func:`tune` chose."""

    method: AnyAlgorithm
    """The method with them."""
    chosen: Chosen

    @property
    def notes(self) -> list[str]:
        """Values that were skipped, and fields whose best value is at an end of what was tried."""
        return self.chosen.notes

    def to_frame(self) -> pd.DataFrame:
        """Every point that was tried, the best first; ``refused`` says why one could not be run."""
        rows = [{**a.point, "score": a.score, "refused": a.refused} for a in self.chosen.attempts]
        table = pd.DataFrame(rows).sort_values("score", kind="stable", ignore_index=True)
        return table if (table["refused"] != "").any() else table.drop(columns="refused")

    def _line(self) -> str:
        return "; ".join([f"{self.method}, {len(self.chosen.attempts)} tried", *self.notes])


def compare(
    problems: Problem | Mapping[str, Problem] | Sequence[Problem],
    methods: Mapping[str, Method] | Iterable[Method],
    *,
    seeds: Iterable[int] = (0,),
    tune: Tune | None = None,
    budget: Budget = 200,
    criterion: str = "objective",
    trial_seed: int = TRIAL_SEED,
    extensions: int = EXTENSIONS,
    references: Mapping[str, float] | float | None = None,
    **options: Unpack[SimulateOptions],
) -> Comparison:
    """Run methods on problems, all with the same budget and seeds.

    Parameters
    ----------
    problems : Problem, mapping or sequence of them
        One problem, or several by name.
    methods : mapping or iterable
        Methods by label, or without labels: instances, classes and names (their steps are then the practical ones for
        the problem), or functions that make the method for a problem.
    seeds : iterable of int
        Each run is done with each; minibatches, cohorts and coins follow from it.
    tune : mapping or "auto", optional
        Values to choose from, by field for all methods that have it, or by label and field. They are tried with
        ``trial_seed``; where the best lies at an end the grid is continued, ``extensions`` times, and what cannot run
        is skipped; ``notes`` tells both. "auto" tries a quarter, once and four times each method's step.
    budget : int or mapping
        Rounds, or what a run may spend: ``{"bytes": 1e6}``, also gradients, proxes or seconds; records beyond are not
        told.
    criterion : str
        The key of the last record that values are chosen by.
    references : float or mapping, optional
        The optimal value of the problem, or by its name, as :func:`fedcomposite.solve` finds it; accuracy is then the
        gap to it.

    Other Parameters
    ----------------
    **options
        Of :func:`fedcomposite.simulate`: batch_size, participation, dtype, ...

    Returns
    -------
    Comparison
        A table (``to_frame``, ``to_latex``, ``to_markdown``), figures (``plot``), ``tests`` over seeds and the
        ``profile`` over problems. A method that cannot take a problem is left out there, and ``notes`` says why.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=4, features=6, samples=20)
    >>> problem = fc.Problem(silos, regularizer=fc.regularizers.L1(0.01))
    >>> found = fc.compare(problem, ["FedNMap", "FedAvg"], budget={"gradients": 400})
    >>> found
    Comparison(2 methods on 1 problem, 1 seed, 400 gradients each)
    >>> found.to_frame()["method"].to_list()
    ['FedNMap', 'FedAvg']
    """
    named = _problems(problems)
    contest = _Contest(named, _methods(methods), Allowance.of(budget), _numbers(seeds, trial_seed), dict(options))
    known = {"": references} if isinstance(references, int | float) else dict(references or {})
    if unknown := known.keys() - named.keys():
        raise UserError(f"references: no problem is called {', '.join(map(repr, sorted(unknown)))}")
    points = contest.tuned(tune, trial_seed, criterion, extensions)
    found = contest.run(points)
    found.references = {k: float(v) for k, v in known.items()}
    return found


def tune(
    problem: Problem,
    method: Method,
    grid: Grid | Literal["auto"] = "auto",
    *,
    budget: Budget = 200,
    criterion: str = "objective",
    trial_seed: int = TRIAL_SEED,
    extensions: int = EXTENSIONS,
    **options: Unpack[SimulateOptions],
) -> Tuned:
    """Choose values for the fields of a method.

    Parameters
    ----------
    problem, method, budget, criterion, extensions
        As in :func:`compare`.
    grid : mapping or "auto"
        Values to choose from, by field.
    trial_seed : int
        What they are tried with; report others.

    Other Parameters
    ----------------
    **options
        Of :func:`fedcomposite.simulate`.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> problem = fc.Problem(fc.data.load("synthetic", clients=4, features=6, samples=20))
    >>> found = fc.tune(problem, fc.algorithms.FedAvg(2, 0.1), {"step": [0.01, 0.1]}, budget=20)
    >>> found.method.step > 0.1  # the grid ended there, the optimum lies beyond
    True
    """
    entered = _methods([method])
    contest = _Contest({"": problem}, entered, Allowance.of(budget), [trial_seed], dict(options))
    [label] = entered
    found = contest.tuned(grid if grid == "auto" else {label: grid}, trial_seed, criterion, extensions)
    if not found:
        why = contest.skipped.get("", {}).get(label, "there is nothing to choose from")
        raise UserError(f"{label}: {why}")
    [(key, chosen)] = found.items()
    return Tuned(contest.method(key, chosen.point), chosen)


class _Contest:
    """Methods that meet on problems."""

    def __init__(
        self,
        problems: dict[str, Problem],
        methods: dict[str, Method],
        allowance: Allowance,
        seeds: list[int],
        options: dict[str, Any],
    ) -> None:
        self.problems, self.entered, self.allowance, self.seeds = problems, methods, allowance, seeds
        if mine := options.keys() & {"seed", "rounds", "progress"}:
            raise UserError(f"compare: {', '.join(sorted(mine))} follow from seeds and budget; leave them out")
        self.options = options
        self.skipped: dict[str, dict[str, str]] = {}
        self._made: dict[_Key, AnyAlgorithm] = {}
        for name in problems:
            for label in methods:
                self._enter(_Key(name, label))

    def _enter(self, key: _Key) -> None:
        try:
            self._made[key] = self._make(key)
            self._check(key, self._made[key])
        except (ValueError, TypeError, ArithmeticError) as error:
            self._made.pop(key, None)
            self.skipped.setdefault(key.problem, {})[key.label] = str(error)

    def _make(self, key: _Key) -> AnyAlgorithm:
        """The method for a problem."""
        given, problem = self.entered[key.label], self.problems[key.problem]
        if isinstance(given, Algorithm):
            return given
        if isinstance(given, str | type):
            name = given if isinstance(given, str) else given.__name__
            cls = algorithms.lookup(name) if isinstance(given, str) else given
            if not isinstance(problem.loss, Loss):
                raise ValueError(f"the smoothness of a network is unknown; give {name} its steps")
            share, batch = self.options.get("participation", 1.0), self.options.get("batch_size")
            known = theory.constants(problem, batch=batch, participation=share)
            return theory.choose(cls, "auto", known, {})
        return given(problem)

    def _check(self, key: _Key, method: AnyAlgorithm) -> None:
        """Refuse what cannot be run."""
        from fedcomposite.experiments.checks import check_run

        check_run(self.problems[key.problem], method, {"participation": 1.0, **self.options, "rounds": 1})

    def method(self, key: _Key, point: Point) -> AnyAlgorithm:
        """A method with values in place of its own."""
        made = self._made[key]
        return dataclasses.replace(made, **point) if point else made  # type: ignore[type-var]

    def _go(self, key: _Key, point: Point, seed: int) -> tuple[list[Record], str]:
        """What a run was paid for, and how it ended."""
        run = spend(self.problems[key.problem], self.method(key, point), self.allowance, {**self.options, "seed": seed})
        status = "completed" if run.status == "stopped" and str(self.allowance) in run.message else run.status
        return self.allowance.within(run.history), status

    def tuned(self, tune: Tune | None, seed: int, criterion: str, extensions: int) -> dict[_Key, Chosen]:
        """The values that were chosen for each method on each problem."""
        grids = {key: grid for key in self._made if (grid := self._grid(key, tune))}

        def attempt(batch: list[tuple[_Key, Point]]) -> list[Attempt]:
            return [self._attempt(key, point, seed, criterion) for key, point in batch]

        found: dict[_Key, Chosen] = {}
        for key, grid in grids.items():
            try:
                found |= settle({key: search(grid, extensions)}, attempt)
            except TuningError as error:
                self.skipped.setdefault(key.problem, {})[key.label] = str(error)
                self._made.pop(key)
        return found

    def _attempt(self, key: _Key, point: Point, seed: int, criterion: str) -> Attempt:
        try:
            self._check(key, self.method(key, point))
        except (ValueError, TypeError, ArithmeticError) as error:
            return Attempt(point, math.inf, str(error))
        records, status = self._go(key, point, seed)
        return Attempt(point, score(records[-1], status, criterion))

    def _grid(self, key: _Key, tune: Tune | None) -> dict[str, list[Any]]:
        """The values to choose from for a method."""
        own = {f.name for f in dataclasses.fields(self._made[key])}  # type: ignore[arg-type]
        if tune is None:
            return {}
        if tune == "auto":
            step = getattr(self._made[key], "step", None)
            return {"step": [f * step for f in FACTORS]} if isinstance(step, float) else {}
        mine: dict[str, Any] = dict(tune)
        if any(isinstance(v, Mapping) for v in mine.values()):
            if strange := [k for k in mine if k not in self.entered]:
                near = suggest(strange[0], self.entered)
                raise UserError(
                    f"tune: no method is called {strange[0]!r}{near} (there are: {', '.join(self.entered)})"
                )
            mine = dict(mine.get(key.label, {}))
            if strange := [k for k in mine if k not in own]:
                raise UserError(f"tune: {key.label} has no field {strange[0]!r}{suggest(strange[0], own)}")
        elif strange := [k for k in mine if not any(_has(m, k) for m in self._made.values())]:
            raise UserError(f"tune: no method has a field {strange[0]!r}")
        for name, values in mine.items():
            if isinstance(values, str) or not isinstance(values, Iterable) or not list(values):
                raise UserError(f"tune: {name} = {values!r}, must be a list of values")
        return {k: list(dict.fromkeys(v)) for k, v in mine.items() if k in own}

    def run(self, points: Mapping[_Key, Chosen]) -> Comparison:
        """Every method on every problem with every seed."""
        if not self._made:
            raise UserError("\n".join(f"{k}: {why}" for each in self.skipped.values() for k, why in each.items()))
        found = Comparison({}, {}, {}, self.seeds, skipped=self.skipped, budget=self.allowance)
        for key in self._made:
            chosen = points.get(key)
            point = {} if chosen is None else chosen.point
            ended = [self._go(key, point, seed) for seed in self.seeds]
            found.histories.setdefault(key.problem, {})[key.label] = [records for records, _ in ended]
            found.statuses.setdefault(key.problem, {})[key.label] = [status for _, status in ended]
            found.points.setdefault(key.problem, {})[key.label] = point
            found.methods[key.label] = type(self._made[key]).__name__
            found.settings[key.problem] = {"problem": key.problem} if key.problem else {}
            if chosen is not None:
                found.chosen.setdefault(key.problem, {})[key.label] = chosen
        return found


def _has(method: AnyAlgorithm, name: str) -> bool:
    return name in {f.name for f in dataclasses.fields(method)}  # type: ignore[arg-type]


def _problems(given: object) -> dict[str, Problem]:
    if isinstance(given, Problem):
        return {"": given}
    if isinstance(given, Mapping):
        found = {str(k): v for k, v in given.items()}
    elif isinstance(given, Sequence) and not isinstance(given, str):
        found = {str(i + 1): v for i, v in enumerate(given)}
    else:
        found = {}
    if wrong := [v for v in found.values() if not isinstance(v, Problem)]:
        raise UserError(f"problems: {type(wrong[0]).__name__} is not a problem; make it with fc.Problem(...)")
    if not found:
        raise UserError("problems must be a Problem, or several in a list or by name")
    return found


def _methods(given: object) -> dict[str, Method]:
    if isinstance(given, Mapping):
        found: dict[str, Method] = {str(k): v for k, v in given.items()}
    elif isinstance(given, Iterable) and not isinstance(given, str):
        listed = list(given)
        found = dict(zip(distinct([_label(m) for m in listed]), listed, strict=True))
    else:
        raise UserError(f"methods = {given!r:.60}, must be a list of methods, or methods by label")
    for label, method in found.items():
        known = isinstance(method, Algorithm | str) or (isinstance(method, type) and issubclass(method, Algorithm))
        if not known and (isinstance(method, type) or not callable(method)):
            raise UserError(f"methods: {label} is a {type(method).__name__}, no method, class or name of one")
        if isinstance(method, str):
            algorithms.lookup(method)  # a name that is unknown is refused at once
    if not found:
        raise UserError("methods: none to compare")
    return found


def _label(method: object) -> str:
    if isinstance(method, str):
        return algorithms.lookup(method).__name__
    return type(method).__name__ if isinstance(method, Algorithm) else getattr(method, "__name__", "method")


def _numbers(seeds: Iterable[int], trial: int) -> list[int]:
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise UserError(f"seeds = {seeds!r}, must be a list of seeds, such as [0] or range(3)")
    found: list[int] = list(seeds)
    if not found or any(isinstance(s, bool) or not isinstance(s, int) or s < 0 for s in found):
        raise UserError(f"seeds = {found!r}, must be whole numbers from 0 on")
    if len(set(found)) < len(found) or trial in found:
        raise UserError(f"seeds = {found!r}: each once, and not the one that values are chosen with ({trial})")
    return found
