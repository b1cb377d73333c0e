"""A stranger's method gets a verdict: the contract, then all of this package's methods on the problems of the arena."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from fedcomposite._validation import UserError
from fedcomposite.algorithms import REGISTRY, AnyAlgorithm
from fedcomposite.algorithms.base import Algorithm
from fedcomposite.experiments.contests import Method, compare
from fedcomposite.experiments.outcomes import Comparison
from fedcomposite.experiments.tables import cell
from fedcomposite.files import write_atomic
from fedcomposite.problems import Problem
from fedcomposite.results import Result, counted
from fedcomposite.runtime import Record
from fedcomposite.testing.algorithms import LAWS, broken_laws
from fedcomposite.testing.arena import ARENA, optimum, twin
from fedcomposite.testing.longrun import residual

BUDGET = 12_000
"""Gradients that a run may take in the whole system: 150 rounds of ten local steps at eight sites."""
TARGET = 1e-4
"""Of the accuracy at the start, where a problem counts as solved."""
_STALLED = 1.5
"""What accuracy falls by in the second half of a run, at least, if it falls at all."""
_EXACT = 1e-8


class Entered(NamedTuple):
    """A method of somebody's file."""

    label: str
    method: AnyAlgorithm | type[AnyAlgorithm]
    """With its steps as the file has them, or the class, whose ``auto`` gives practical ones."""

    @property
    def probe(self) -> AnyAlgorithm:
        """The method with steps for the small problems of the contract."""
        return self.method if isinstance(self.method, Algorithm) else self.method.auto(L=0.25, local_steps=5)


class Level(NamedTuple):
    """Where a run came to, relative to its start, and whether it still fell."""

    reached: float
    stalled: bool

    def __str__(self) -> str:
        return f"{self.reached:.1e}" + (" (no longer falling)" if self.stalled else " (still falling)")


@dataclass(repr=False)
class Verdict(Result):
    """What the referee has to say of a method."""

    label: str
    laws: dict[str, str]
    """Laws of the contract that are broken, and how."""
    found: Comparison
    """All methods on all problems."""
    levels: dict[str, Level | None]
    """What was measured to say why; None where it could not be run."""
    claims: pd.DataFrame
    """What the method's card claims, and what was measured."""
    seconds: float

    def to_frame(self) -> pd.DataFrame:
        """One row per problem: the method's rank, what it reached, the best one, and why it is not first."""
        return pd.DataFrame([self._row(name) for name in self.found.histories])

    def _row(self, name: str) -> dict[str, Any]:
        runs = self.found.histories[name]
        row: dict[str, Any] = {"problem": name, "what": ARENA[name].what}
        if self.label not in runs:
            return {**row, "why": self.found.skipped.get(name, {}).get(self.label, "").splitlines()[0]}
        table = {}
        for label, own in runs.items():
            ends = [float(self.found.accuracy(name, h)[-1]) for h in own]
            mean = [
                float(np.mean([self.found.cost(name, h, TARGET, unit) for h in own]))
                for unit in ("gradients", "rounds")
            ]
            table[label] = (*mean, float(np.mean(np.maximum(ends, 0.0))))
        orders = [sorted(table, key=lambda x, i=i: (table[x][i], table[x][2])) for i in (0, 1)]  # type: ignore[misc]
        first, mine = orders[0][0] if orders[0][0] != self.label else orders[0][1], table[self.label]
        row |= {"rank by gradients": orders[0].index(self.label) + 1, "by rounds": orders[1].index(self.label) + 1}
        row |= {"of": len(table), "accuracy": mine[2], f"gradients to {TARGET:g}": mine[0], "best other": first}
        row |= {"its accuracy": table[first][2], "its gradients": table[first][0]}
        return row | {"why": self._why(name, mine, table[first])}

    def _why(self, name: str, mine: tuple[float, ...], best: tuple[float, ...]) -> str:
        """Why a method is where it is on a problem."""
        if mine[:1] + mine[2:] <= best[:1] + best[2:]:
            return "first"
        if "diverged" in self.found.statuses[name][self.label] or not math.isfinite(mine[2]):
            return "diverged: its step is too large here"
        level = _level([self.found.accuracy(name, h) for h in self.found.histories[name][self.label]])
        if math.isfinite(mine[0]):
            return f"solved, with {mine[0] / best[0]:.3g} times the gradients"
        if not level.stalled:
            return f"slow: still falling when the budget ends, at {mine[2]:.1e}"
        kind = "minibatches" if name == "noise" else "sites that sit out" if name == "partial" else ""
        if kind:
            return f"a floor of {mine[2]:.1e} from {kind}; with neither it reaches {self.levels['full']}"
        return f"a residual of {mine[2]:.1e}{', which is drift' if self.drifts else ''}"

    @property
    def drifts(self) -> bool:
        """Whether what it leaves is left because sites differ."""
        full, same = self.levels["full"], self.levels["equal sites"]
        return full is not None and same is not None and full.stalled and same.reached < 0.1 * full.reached

    @property
    def firsts(self) -> list[str]:
        """Problems on which it is first by gradients."""
        table = self.to_frame()
        if "rank by gradients" not in table:
            return []
        return [str(p) for p in table.loc[table["rank by gradients"] == 1, "problem"]]

    def _line(self) -> str:
        kept = f"{len(LAWS) - len(self.laws)} of {len(LAWS)} laws"
        where = f": {', '.join(self.firsts)}" if self.firsts else ""
        share = f"{len(self.firsts)} of {counted(len(self.found.histories), 'problem')}"
        return f"{self.label}: {kept}; first of {len(self.found.methods)} methods on {share}{where}"

    def to_markdown(self) -> str:
        """The page of one method: where it is first, where not and why, laws it breaks, and what its card claims."""
        table = self.to_frame()
        shown = table.drop(columns="what").map(_shown)
        laws = [f"* broken: `{name}`: {how}" for name, how in self.laws.items()] or ["* none is broken"]
        levels = [f"* {what}: {'cannot be run' if level is None else level}" for what, level in self.levels.items()]
        optima = [f"* `{n}`: {ARENA[n].what}; {optimum(n).certificate}" for n in self.found.histories]
        notes = [f"* {note}" for note in self.found.notes if self.label in note] or ["* none"]
        parts = [
            f"# {self.label}", f"{self._line()}.",
            "## The contract", f"{len(LAWS) - len(self.laws)} of {len(LAWS)} laws hold.", *laws,
            "## Where it is first, and where not",
            f"{counted(len(self.found.methods), 'method')}, {self.found.budget} each, "
            f"{'steps that were tuned' if any(self.found.chosen.values()) else 'practical steps'}; a problem is solved "
            f"where the accuracy is {TARGET:g} of that at the start: the gap to the certified "
            "optimum; where no bound on it is known, as without convexity, the stationarity.",
            _markdown(shown), "![profile](profile.png)", "![anytime](anytime.png)",
            "## Why", "Accuracy on `drift` after four times the budget, relative to the start.", *levels,
            self._cause(), "## Beside what its card claims", _markdown(self.claims.map(str)),
            "## The problems", *optima, "## Notes", *notes,
            f"Made in {self.seconds:.0f} s by `fedcomposite referee`.",
        ]  # fmt: skip
        return re.sub(r"(\n\* [^\n]*)\n(?=\n\* )", r"\1", "\n\n".join(parts)) + "\n"

    def _cause(self) -> str:
        full, half = self.levels["full"], self.levels["full, half the step"]
        if full is None:
            return "It cannot be run there."
        if not full.stalled or full.reached <= _EXACT:
            return "**No residual was found** with full gradients and all sites."
        less = f"; half the step leaves {half.reached / full.reached:.2g} of it" if half is not None else ""
        cause = (
            "It is drift: with the same samples at all sites it goes away" if self.drifts else "It is not drift alone"
        )
        return f"**It leaves a residual**, {full.reached:.1e} of the start{less}. {cause}."

    def save(self, folder: str | Path) -> Path:
        """Write the page (``verdict.md``), its pictures and the table of all methods (``results.csv``)."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self.found.plot(place / "profile.png", kind="profile", target=TARGET)
        self.found.plot(place / "anytime.png", kind="anytime")
        write_atomic(place / "results.csv", self.found.to_frame().to_csv(index=False).encode())
        write_atomic(place / "verdict.md", self.to_markdown().encode())
        return place / "verdict.md"


def _shown(value: Any) -> str:
    """A value of the table."""
    if isinstance(value, float) and value == math.inf:
        return "not reached"
    return f"{value:.2g}" if isinstance(value, float) and value == value else cell(value)


def _markdown(table: pd.DataFrame) -> str:
    cells: list[list[Any]] = [table.columns.tolist(), *table.to_numpy().tolist()]
    rows = [" | ".join(str(v).replace("|", "\\|") for v in row) for row in cells]
    return "\n".join([f"| {rows[0]} |", "|" + " --- |" * len(table.columns), *(f"| {row} |" for row in rows[1:])])


def entered(source: str | Path | AnyAlgorithm | type[AnyAlgorithm]) -> list[Entered]:
    """The methods of a file: those that it makes with their steps, else every class of a method in it."""
    if isinstance(source, Algorithm):
        return [Entered(_free(type(source).__name__), source)]
    if isinstance(source, type):
        return [Entered(_free(source.__name__), source)]
    path = Path(source)
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a Python file with a method in it")
    name = f"fedcomposite_referee_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look their annotations up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    own = [v for v in vars(module).values() if isinstance(v, Algorithm)]
    classes = [
        v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Algorithm) and v.__module__ == name
    ]
    found = [Entered(_free(type(m).__name__), m) for m in own] or [Entered(_free(c.__name__), c) for c in classes]
    if not found:
        raise UserError(f"{path}: has no method: a dataclass that derives from fedcomposite.algorithms.Algorithm")
    for one in found:
        try:
            _ = one.probe
        except Exception as error:
            raise UserError(
                f"{path}: {one.label}.auto(L, rho, local_steps) gives no method ({type(error).__name__}: {error}); "
                f"write it, or make one in the file: method = {one.label}(...)"
            ) from error
    return found


def _free(name: str) -> str:
    return f"{name} (yours)" if name in REGISTRY else name


def judge(
    source: str | Path | AnyAlgorithm | type[AnyAlgorithm],
    *,
    budget: int = BUDGET,
    jobs: int = 2,
    problems: Sequence[str] = tuple(ARENA),
    against: Sequence[str] | None = None,
    tuned: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> list[Verdict]:
    """Judge the methods of a file, or a method that is here.

    Parameters
    ----------
    source : path, method or class
        With ``jobs`` above 1 a file, which every process reads for itself.
    budget : int
        Gradients of each run, in the whole system.
    problems, against : sequence of str
        Of the arena; and the methods to meet, all of the package's if left out.
    tuned : bool
        Whether steps are chosen for every method (a quarter, once, four times the practical one, and further), on a
        seed of its own; it takes about five times as long.
    say : callable
        Told of each problem that is done.
    """
    mine = entered(source)
    if unknown := [p for p in problems if p not in ARENA]:
        raise UserError(f"problem {unknown[0]!r} is not in the arena (there are: {', '.join(ARENA)})")
    began = time.perf_counter()
    others = list(REGISTRY) if against is None else list(against)
    tasks = [(name, source, others, budget, tuned) for name in problems]
    laws = {one.label: broken_laws(one.probe) for one in mine}
    say("the contract is checked")
    founds: dict[str, Comparison] = {}
    if jobs > 1 and len(tasks) > 1 and isinstance(source, str | Path):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_alone) as pool:
            for name, made in zip(problems, pool.map(_meet, tasks), strict=True):
                founds[name] = made
                say(f"{name}: {ARENA[name].what}")
    else:
        for task in tasks:
            founds[task[0]] = _meet(task)
            say(f"{task[0]}: {ARENA[task[0]].what}")
    whole = _joined(founds)
    return [
        Verdict(
            one.label, laws[one.label], whole, _levels(one, budget), _claims(one, laws[one.label], whole),
            time.perf_counter() - began,
        )
        for one in mine
    ]  # fmt: skip


def _alone() -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


def _meet(task: tuple[str, Any, Sequence[str], int, bool]) -> Comparison:
    """All methods on one problem of the arena."""
    name, source, others, budget, tuned = task
    bout = ARENA[name]
    methods: dict[str, Method] = {one.label: one.method for one in entered(source)}
    methods |= {other: other for other in others}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kinks, minibatches: that is what the problems are for
        found = compare(
            bout.make(), methods, seeds=bout.seeds, budget={"gradients": budget}, tune="auto" if tuned else None,
            **bout.options,
        )  # fmt: skip
    known = optimum(name)
    found.references = {"": known.value} if known.bound == known.bound else {}
    return found


def _joined(founds: dict[str, Comparison]) -> Comparison:
    """The comparisons of several problems as one."""
    made = Comparison({}, {}, {}, [0, 1])
    for name, one in founds.items():
        made.histories[name], made.statuses[name] = one.histories[""], one.statuses[""]
        made.methods |= one.methods
        made.settings[name] = {"problem": name}
        made.points[name], made.chosen[name] = one.points.get("", {}), one.chosen.get("", {})
        made.skipped[name] = one.skipped.get("", {})
        if "" in one.references:
            made.references[name] = one.references[""]
        made.budget = one.budget
    return made


def _level(accuracies: Sequence[Any]) -> Level:
    """Where runs came to, and whether they fell in their second half; seeds are averaged."""
    ends = [float(np.median(a[-max(1, len(a) // 10) :])) for a in accuracies]
    middle = [float(np.median(a[len(a) // 2 : len(a) // 2 + max(1, len(a) // 10)])) for a in accuracies]
    reached = float(np.mean(np.maximum(ends, 0.0)))
    return Level(reached, reached > _EXACT and float(np.mean(middle)) < _STALLED * reached)


def _levels(one: Entered, budget: int) -> dict[str, Level | None]:
    """Runs that tell drift, residual and noise apart: full gradients, half the step, equal sites, minibatches."""
    differ, same = ARENA["drift"].make(), twin()
    half = _halved(one, differ)
    runs: dict[str, tuple[Problem, Any, dict[str, Any]]] = {
        "full": (differ, one.method, {}),
        "full, half the step": (differ, half, {}),
        "equal sites": (same, one.method, {}),
        "minibatches of 8": (differ, one.method, {"batch_size": 8}),
        "minibatches of 32": (differ, one.method, {"batch_size": 32}),
        "half of the sites a round": (differ, one.method, {"participation": 0.5}),
    }
    found: dict[str, Level | None] = {}
    for what, (problem, method, options) in runs.items():
        found[what] = None
        if method is None:
            continue
        try:
            made = compare(problem, {one.label: method}, budget={"gradients": 4 * budget}, **options)
        except UserError:
            continue
        made.references = {"": optimum("drift").value}
        history: list[Record] = made.histories[""][one.label][0]
        found[what] = _level([made.accuracy("", history)])
    return found


def _halved(one: Entered, problem: Problem) -> AnyAlgorithm | None:
    """The method with half of its step."""
    made: Any = one.method if isinstance(one.method, Algorithm) else one.method.auto(problem.smoothness())
    step = getattr(made, "step", None)
    return dataclasses.replace(made, step=step / 2) if isinstance(step, float) else None


def _claims(one: Entered, laws: dict[str, str], found: Comparison) -> pd.DataFrame:
    """The card's claims beside what was measured."""
    info, probe = type(one.probe).info, one.probe
    takes = {name: one.label in found.histories.get(name, {}) for name in found.histories}
    rows = []

    def claim(what: str, said: Any, measured: str) -> None:
        rows.append({"claim": what, "card": said, "measured": measured})

    kinds = {"convex": ("drift",), "weakly convex": ("mcp", "scad")}
    for kind, names in kinds.items():
        there = [f"{n}: {_end(found, n, one.label)}" for n in names if n in found.histories]
        claim(f"takes a {kind} h", info.regularizer, "; ".join(there) or "not in this round")
    for what, said, cohort in (("exact, all sites", info.exact, None), ("exact, some sites", info.exact_partial, 3)):
        if cohort is not None and not probe.partial:
            continue
        left = _residual(probe, cohort)
        claim(what, "yes" if said else "no", left)
    half = {True: "half of the sites: taken", False: "half of the sites: refused", None: "not in this round"}
    claim("participation", info.participation, half[takes.get("partial")])
    drift = "holds" if "does_not_drift" not in laws else f"broken: {laws['does_not_drift']}"
    claim("single precision", "no drift over 20,000 rounds", drift)
    return pd.DataFrame(rows)


def _end(found: Comparison, name: str, label: str) -> str:
    if label not in found.histories[name]:
        return "refused"
    return f"{float(np.mean([found.accuracy(name, h)[-1] for h in found.histories[name][label]])):.1e}"


def _residual(probe: AnyAlgorithm, cohort: int | None) -> str:
    try:
        return f"residual {residual(probe, cohort=cohort):.1e} on quadratics"
    except Exception as error:
        return f"cannot be measured ({type(error).__name__}: {error})"
