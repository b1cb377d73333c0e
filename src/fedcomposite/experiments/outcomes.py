"""What a comparison came to: a table, figures, intervals over seeds, profiles over problems."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from fedcomposite.experiments import tables
from fedcomposite.experiments.allowances import Allowance
from fedcomposite.experiments.tuning import Chosen
from fedcomposite.plots import AXES, Axis, Band, Width, draw_histories, draw_steps
from fedcomposite.results import Result, counted
from fedcomposite.runtime import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = dict[str, list[list[Record]]]
"""The histories of each label, one per seed."""
Kind = Literal["curves", "profile", "anytime"]
_SAME = 1e-9
"""Part of a number below which a difference is rounding."""


@dataclass(repr=False)
class Comparison(Result):
    """Methods on one or several problems, each with every seed: what :func:`fedcomposite.compare` returns."""

    histories: dict[str, Runs]
    """The records that the budget paid for, by problem and label; a single problem may have no name."""
    statuses: dict[str, dict[str, list[str]]]
    """How each run ended."""
    methods: dict[str, str]
    """The class behind each label."""
    seeds: list[int]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What tells a problem from the others, columns of the table; none where there is one."""
    points: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """The values of grids, and those that were chosen, by problem and label."""
    chosen: dict[str, dict[str, Chosen]] = field(default_factory=dict)
    """How values were chosen."""
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)
    """Methods that cannot take a problem, and why."""
    budget: Allowance | None = None
    references: dict[str, float] = field(default_factory=dict)
    """The optimal value of a problem, where it is known."""
    name: str = ""

    # -- tables -------------------------------------------------------------------------------------------------------

    def to_frame(self) -> pd.DataFrame:
        """One row per problem and method: means over seeds, and in columns whose names end in ± their deviation."""
        own = {key: self.points.get(p, {}).get(label, {}) for p, label, key in self._keys}
        points = {key: {**self.settings.get(p, {}), **own[key]} for p, label, key in self._keys}
        outcomes = {key: [{"status": s} for s in self.statuses[p][label]] for p, label, key in self._keys}
        table = tables.tabulate(self.runs, outcomes, points=points)
        if self.references and len(table):
            gaps = [self._gap(p, self.histories[p][label]) for p, label, _ in self._keys]
            table.insert(list(table.columns).index("objective"), "suboptimality", gaps)
        return table

    def to_markdown(self) -> str:
        """The table for a page: "mean ± deviation" in a cell."""
        shown = tables.joined(self.to_frame())
        head = "| " + " | ".join(map(str, shown.columns)) + " |"
        rows = [[str(v).replace("|", "\\|") for v in row] for row in shown.itertuples(index=False)]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([head, "|" + " --- |" * len(shown.columns), *lines])

    def to_latex(self, caption: str = "", label: str = "") -> str:
        """The table for a paper; it needs booktabs."""
        return tables.latex(self.to_frame(), caption, label)

    def tests(self, measure: str | None = None) -> pd.DataFrame:
        """Each method beside the best of its problem, paired over seeds.

        Parameters
        ----------
        measure : str, optional
            A key of the last records; if left out, stationarity, as the logarithm (base 10) of it, or the objective
            where models are measured on a sample.

        Returns
        -------
        DataFrame
            ``difference`` (method minus best; positive is worse) with its 95 % interval by Student's t, ``p`` after
            Holm within a problem, and a ``verdict``. Seeds that change nothing, and a single one, settle nothing: what
            differs then is a fact about this problem, not about others like it.
        """
        rows = [row for problem in self.histories for row in self._tests(problem, measure)]
        columns = ["problem", "method", "against", "difference", "lower", "upper", "p", "verdict"]
        table = pd.DataFrame(rows, columns=columns)
        return table if len(self.histories) > 1 else table.drop(columns="problem")

    def _tests(self, problem: str, measure: str | None) -> list[dict[str, Any]]:
        runs = {label: _last(own, measure) for label, own in self.histories[problem].items() if own}
        runs = {label: v for label, v in runs.items() if np.isfinite(v).all()}
        if len(runs) < 2:
            return []
        best = min(runs, key=lambda label: float(runs[label].mean()))
        rows = [_pair(label, best, values - runs[best]) for label, values in runs.items() if label != best]
        for place, row in enumerate(sorted((r for r in rows if r["p"] == r["p"]), key=lambda r: r["p"])):
            row["p"] = min(1.0, row["p"] * (sum(r["p"] == r["p"] for r in rows) - place))
        return [{"problem": problem, **row, "verdict": _verdict(row)} for row in rows]

    def profile(self, target: float = 1e-4, cost: Axis = "gradients") -> pd.DataFrame:
        """What each method spends until it is there, as a multiple of the least that any spends (Dolan and More, 2002).

        A problem is solved when the gap to its reference, without one the stationarity, has fallen to ``target`` of its
        first value. One row per problem and seed, one column per method; inf where it never got there.
        """
        labels = list(dict.fromkeys(label for runs in self.histories.values() for label in runs))
        rows: dict[tuple[str, int], list[float]] = {}
        for problem, runs in self.histories.items():
            for i, seed in enumerate(self.seeds[: min(map(len, runs.values()), default=0)]):
                costs = [self.cost(problem, runs[x][i], target, cost) if x in runs else math.inf for x in labels]
                least = min(costs)
                rows[problem, seed] = [c / least if math.isfinite(c) else math.inf for c in costs]
        index = pd.MultiIndex.from_tuples(rows, names=["problem", "seed"])
        return pd.DataFrame(list(rows.values()), index=index, columns=labels)

    # -- figures ------------------------------------------------------------------------------------------------------

    def plot(
        self,
        path: str | Path | None = None,
        *,
        kind: Kind = "curves",
        x: Axis = "gradients",
        log_x: bool = True,
        target: float = 1e-4,
        panels: Sequence[str] | None = None,
        width: Width | float = "screen",
        band: Band = "sd",
    ) -> Figure:
        """Draw curves, a performance profile, or what was reached at any time; every method has its own look.

        Parameters
        ----------
        path : path, optional
            A picture to write.
        kind : {"curves", "profile", "anytime"}
            Curves of the first problem's runs (of all, if there is one); the share of problems solved against the
            multiple of the least cost; or the best accuracy so far against the cost, as a geometric mean over problems.
        x, log_x
            The cost, and whether its axis is logarithmic.
        target : float
            Of a profile: when a problem is solved.
        panels, width, band
            As in :func:`fedcomposite.plots.draw_histories`.
        """
        if kind == "profile":
            ratios = self.profile(target, x)
            steps = {str(c): _shares(ratios[c].to_numpy()) for c in ratios}
            name = f"{AXES[x][0]} to {target:g}, times the least"
            return draw_steps(steps, path, x=name, y="share of problems", methods=self.methods, width=width)
        if kind == "anytime":
            curves = self.anytime(x)
            lines = {str(c): (curves.index.to_numpy(), curves[c].to_numpy()) for c in curves}
            names = {"x": AXES[x][0], "y": "best accuracy so far / initial"}
            return draw_steps(lines, path, **names, methods=self.methods, width=width, log_x=log_x, log_y=True)
        methods = {key: self.methods[label] for _, label, key in self._keys}
        known = list(self.references.values())
        reference = known[0] if len(known) == 1 == len(self.histories) else None
        return draw_histories(
            self.runs, path, self.name, x=x, log_x=log_x, reference=reference, methods=methods, panels=panels,
            width=width, band=band,
        )  # fmt: skip

    def anytime(self, cost: Axis = "gradients", points: int = 60) -> pd.DataFrame:
        """The best accuracy up to a cost, relative to the start; geometric means over problems and seeds."""
        keys, unit = AXES[cost][1], AXES[cost][2]
        spent = [unit * sum(r[k] for k in keys) for _, _, h in self._all for r in h]
        low = min((s for s in spent if s > 0), default=1.0)
        grid = np.geomspace(low, max(max(spent, default=1.0), low), points)
        labels = list(dict.fromkeys(label for _, label, _ in self._all))
        found: dict[str, list[np.ndarray[Any, Any]]] = {label: [] for label in labels}
        for problem, label, h in self._all:
            at = np.asarray([unit * sum(r[k] for k in keys) for r in h])
            best = np.minimum.accumulate(np.maximum(self.accuracy(problem, h), 1e-16))
            found[label].append(np.log(best[np.maximum(np.searchsorted(at, grid, side="right") - 1, 0)]))
        return pd.DataFrame({k: np.exp(np.mean(v, axis=0)) for k, v in found.items()}, index=pd.Index(grid, name=cost))

    # -- helpers ------------------------------------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """What a reader must know beside the table: values at an end of their grid, values and methods left out."""
        lines = []
        for problem in dict.fromkeys([*self.chosen, *self.skipped]):
            head = f"{problem}: " if problem else ""
            for label, one in self.chosen.get(problem, {}).items():
                lines += [f"{head}{label}: {note}" for note in one.notes]
            for label, why in self.skipped.get(problem, {}).items():
                lines.append(f"{head}{label} was left out: {why.splitlines()[0]}")
        return lines

    @property
    def runs(self) -> Runs:
        """The histories of every method, under a label that tells its problem where there are several."""
        return {key: self.histories[p][label] for p, label, key in self._keys}

    @property
    def _keys(self) -> list[tuple[str, str, str]]:
        """Problem, label, and both in one."""
        return [
            (p, label, f"{label} [{p}]" if self.settings.get(p) else label)
            for p, runs in self.histories.items()
            for label in runs
        ]

    @property
    def _all(self) -> list[tuple[str, str, list[Record]]]:
        return [(p, label, h) for p, label, _ in self._keys for h in self.histories[p][label]]

    def accuracy(self, problem: str, history: Sequence[Record]) -> np.ndarray[Any, Any]:
        """How far each record is from solved, in units of the first."""
        if problem in self.references:
            found = np.asarray([r["objective"] for r in history], float) - self.references[problem]
        else:
            found = np.asarray([r["stationarity"] for r in history], float)
        found = np.where(np.isfinite(found), found, math.inf)
        return np.asarray(found / found[0] if found[0] > 0 else found)

    def _gap(self, problem: str, runs: Sequence[Sequence[Record]]) -> float:
        if problem not in self.references:
            return math.nan
        return float(np.mean([run[-1]["objective"] for run in runs])) - self.references[problem]

    def cost(self, problem: str, history: Sequence[Record], target: float, cost: Axis) -> float:
        """What a run spends until its accuracy is ``target``; inf if it never is."""
        there = np.flatnonzero(self.accuracy(problem, history) <= target)
        if not len(there):
            return math.inf
        return float(max(sum(history[int(there[0])][k] for k in AXES[cost][1]), 1e-12))

    def _line(self) -> str:
        problems, labels = len(self.histories), len(self.methods)
        spent = f", {self.budget} each" if self.budget is not None else ""
        noted = f"; {counted(len(self.notes), 'note')}" if self.notes else ""
        tried = f"{counted(labels, 'method')} on {counted(problems, 'problem')}, {counted(len(self.seeds), 'seed')}"
        return f"{tried}{spent}{noted}"

    def _repr_html_(self) -> str:
        from html import escape

        picture = base64.b64encode(self.plot(width=10.0)._repr_png_()).decode()  # type: ignore[attr-defined]
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        table = tables.joined(self.to_frame()).to_html(index=False)
        return f"<p>{escape(repr(self))}</p>\n{table}\n<ul>{notes}</ul>\n<img src='data:image/png;base64,{picture}'>"


def _last(runs: Sequence[Sequence[Record]], measure: str | None) -> np.ndarray[Any, Any]:
    """What each seed came to."""
    ends = [run[-1] for run in runs]
    if measure is None:
        measure = "objective" if "evaluated_samples" in ends[0] else "stationarity"
    if measure not in ends[0]:
        raise ValueError(f"measure = {measure!r} is not in the records (they have: {', '.join(ends[0])})")
    found = np.asarray([float(r[measure]) for r in ends])
    if "accuracy" in measure or measure in ("auc", "r2"):
        return -found
    return np.log10(np.maximum(found, 1e-300)) if measure == "stationarity" else found


def _pair(label: str, best: str, differences: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The mean of paired differences with its interval."""
    from scipy import stats  # takes a second

    n, mean = len(differences), float(differences.mean())
    row = {"method": label, "against": best, "difference": mean, "lower": math.nan, "upper": math.nan, "p": math.nan}
    deviation = float(differences.std(ddof=1)) if n > 1 else 0.0
    if deviation <= _SAME * max(abs(mean), 1.0):
        return row
    half = float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)
    p = 2 * float(stats.t.sf(abs(mean) / (deviation / math.sqrt(n)), n - 1))
    return {**row, "lower": mean - half, "upper": mean + half, "p": p}


def _verdict(row: Mapping[str, Any]) -> str:
    if row["p"] != row["p"]:
        return "alike" if abs(row["difference"]) <= _SAME else "seeds do not tell"
    return "worse" if row["p"] < 0.05 else "undecided"


def _shares(ratios: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A performance profile: ratios that some problem is solved at, and the share solved by then."""
    there = np.sort(ratios[np.isfinite(ratios)])
    return there, np.arange(1, len(there) + 1) / max(1, len(ratios))
