"""Several methods over several seeds and settings: checked as a whole, then run, a folder for each."""

from __future__ import annotations

import math
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedcomposite.data import DataError
from fedcomposite.experiments import grids, runner, toml, workers
from fedcomposite.experiments.allowances import Allowance
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.experiments.outcomes import Comparison
from fedcomposite.experiments.runner import Watch
from fedcomposite.experiments.store import RunFolder, StoreError, folder_names, leftovers
from fedcomposite.experiments.sweeps import Part, Sweep, named
from fedcomposite.experiments.tables import latex
from fedcomposite.experiments.tuning import TUNING, Attempt, Chosen, Point, TuningError, score, settle
from fedcomposite.experiments.workers import Task
from fedcomposite.files import write_atomic
from fedcomposite.locks import NAME as LOCK
from fedcomposite.locks import FolderLock


class Planned(NamedTuple):
    """Methods and seeds in one setting."""

    config: Config
    place: Path
    """Where its runs lie."""
    setting: dict[str, Any]
    """The values of the grids outside the methods."""
    points: dict[str, dict[str, Any]]
    """The values of the methods' grids by label."""


Begin = Callable[[str, int], Watch | None]


class Entry(NamedTuple):
    """One run of a comparison."""

    label: str
    seed: int
    folder: RunFolder
    config: Config
    finished: bool
    """Whether it was finished earlier."""
    point: dict[str, Any]
    """The values of the grids that it belongs to: the setting's, then the method's."""
    setting: dict[str, Any]
    """The setting's alone."""
    name: str
    """The label without the setting."""


def compare(
    experiment: Config | Sweep,
    out: Path,
    *,
    fresh: bool = False,
    jobs: int = 1,
    begin: Begin | None = None,
) -> pd.DataFrame:
    """The table of :func:`compared`."""
    return compared(experiment, out, fresh=fresh, jobs=jobs, begin=begin).to_frame()


def compared(
    experiment: Config | Sweep,
    out: Path,
    *,
    fresh: bool = False,
    jobs: int = 1,
    begin: Begin | None = None,
) -> Comparison:
    """Do every method with every seed in every setting below ``out``; runs that are finished there are not repeated.

    Everything is checked before the first run begins, and before the comparison that ``fresh`` replaces is removed.
    ``begin(label, seed)`` is called before each run and returns its watcher. ``jobs`` runs are done at a time, each in
    a process with one thread. The table is also written beside the plot, as CSV and LaTeX.
    """
    from fedcomposite.plots import draw_histories  # brings matplotlib

    sweep = Sweep.of(experiment)
    with FolderLock(out):
        tuned: ChosenValues = {}
        entries = carry_out(sweep, out, fresh=fresh, jobs=jobs, begin=begin, tuned=tuned)
        found = told(entries, str(sweep.content.get("name", "run")), tuned)
        table = found.to_frame()
        write_atomic(out / "comparison.csv", table.to_csv(index=False).encode())
        write_atomic(out / "comparison.tex", (latex(table) + "\n").encode())
        methods = {e.label: e.config.methods[e.config.labels[0]] for e in entries}
        draw_histories(found.runs, out / "plot.png", title=found.name, methods=methods)
    return found


def told(entries: Sequence[Entry], name: str, tuned: ChosenValues | None = None) -> Comparison:
    """What runs that are done came to."""
    allowance = entries[0].config.allowance if entries else None
    found = Comparison({}, {}, {}, list(dict.fromkeys(e.seed for e in entries)), budget=allowance, name=name)
    for e in entries:
        problem, history = named(e.setting), e.folder.history()
        paid = history if allowance is None else allowance.within(history)
        found.histories.setdefault(problem, {}).setdefault(e.name, []).append(paid)
        found.statuses.setdefault(problem, {}).setdefault(e.name, []).append(_ending(e, allowance))
        found.methods[e.name] = e.config.methods[e.config.labels[0]]
        found.settings[problem] = e.setting
        own = {k: v for k, v in e.point.items() if k not in e.setting}
        found.points.setdefault(problem, {})[e.name] = own
    found.chosen = {named(setting): chosen for setting, chosen in (tuned or {}).values()}
    return found


def _ending(entry: Entry, allowance: Allowance | None) -> str:
    """How a run ended; the end of its allowance is the end that was meant."""
    summary = entry.folder.summary()
    spent = allowance is not None and summary["status"] == "stopped" and str(allowance) in str(summary["message"])
    return "completed" if spent else str(summary["status"])


def carry_out(
    sweep: Sweep,
    out: Path,
    *,
    fresh: bool = False,
    jobs: int = 1,
    begin: Begin | None = None,
    draw: bool = True,
    tuned: ChosenValues | None = None,
) -> list[Entry]:
    """Do the runs of a sweep that are left to do, those that choose values first; returns all that are to be told.

    What was chosen goes to ``tuned``, by the folder of each setting.
    """
    with FolderLock(out):
        parts = list(zip(sweep.parts, _places(sweep, out), strict=True))
        trials = _Trials(sweep, parts, fresh, lambda tasks: workers.carry_out(tasks, jobs, begin, draw=False))
        first = trials.begin() if sweep.tuned else {}
        entries: list[Entry] = []
        if fresh or not sweep.tuned or not trials.finished:
            entries = plan([_final(sweep, p, at, first.get(at)) for p, at in parts], fresh=fresh or sweep.tuned)
        if fresh:
            clear(out)
        for old in leftovers(out):
            old.unlink()
        write_atomic(out / "config.toml", sweep.text.encode())
        if sweep.tuned:
            chosen = trials.settle()
            entries = plan([_final(sweep, p, at, {i: c.point for i, c in chosen[at].items()}) for p, at in parts])
            if tuned is not None:
                tuned |= {at: (p.point, _by_label(sweep, p, chosen[at])) for p, at in parts}
        workers.carry_out(_left(entries, fresh), jobs, begin, draw=draw)
        return entries


def finished(sweep: Sweep, out: Path) -> list[Entry]:
    """The runs of a sweep that are done, wherever they were done; nothing is checked or run."""
    found = []

    def refuse(tasks: Sequence[Task]) -> None:
        if tasks:
            raise StoreError("values are not chosen yet")

    for part, place in zip(sweep.parts, _places(sweep, out), strict=True):
        try:
            trials = _Trials(sweep, [(part, place)], False, refuse)
            chosen = {i: c.point for i, c in trials.settle()[place].items()} if sweep.tuned else None
        except StoreError:
            continue
        config, _, setting, points = _final(sweep, part, place, chosen)
        for label, name, spec in zip(config.labels, folder_names(config.labels), config.specs, strict=True):
            for seed in config.seeds or [config.seed]:
                folder = RunFolder(place / name / f"seed-{seed}")
                if folder.finished:
                    point = {**setting, **points.get(label, {})}
                    shown = _shown(label, setting)
                    found.append(Entry(shown, seed, folder, config.only(spec, seed), True, point, setting, label))
    return found


ChosenValues = dict[Path, tuple[dict[str, Any], dict[str, Chosen]]]
"""For the folder of each setting its values, and what was chosen for each label."""


def _by_label(sweep: Sweep, part: Part, chosen: Mapping[int, Chosen]) -> dict[str, Chosen]:
    config, _ = sweep.final(part, {i: c.point for i, c in chosen.items()})
    return {config.labels[i]: one for i, one in chosen.items()}


class _Trials:
    """The runs of a sweep that values are chosen by, in the folders of its settings."""

    def __init__(
        self,
        sweep: Sweep,
        parts: Sequence[tuple[Part, Path]],
        fresh: bool,
        work: Callable[[Sequence[Task]], None],
    ) -> None:
        self.sweep, self.fresh, self.work = sweep, fresh, work
        self.parts = {at: part for part, at in parts}
        self._planned: list[Attempt | Entry] | None = None

    @property
    def finished(self) -> bool:
        """Whether the first of the trials are done."""
        return all(isinstance(p, Attempt) or p.finished for p in self._planned or ())

    def begin(self) -> dict[Path, dict[int, Point]]:
        """Check the first trials; returns the first point of each method that can be run."""
        searches = {(at, i): s for at, part in self.parts.items() for i, s in self.sweep.searches(part).items()}
        asked = [(at, i, p) for (at, i), one in searches.items() for p in next(one)]
        self._planned = self._plan(asked)
        found: dict[Path, dict[int, Point]] = {}
        for (at, i, point), made in zip(asked, self._planned, strict=True):
            if isinstance(made, Entry):
                found.setdefault(at, {}).setdefault(i, point)
        for at, i, _ in asked:
            if i not in found.get(at, {}):
                own = [m for (a, j, _), m in zip(asked, self._planned, strict=True) if (a, j) == (at, i)]
                raise ConfigError("\n".join(dict.fromkeys(m.refused for m in own if isinstance(m, Attempt))))
        return found

    def settle(self) -> dict[Path, dict[int, Chosen]]:
        """Do the trials, and more of them where the best is at an end of its grid."""
        searches = {(at, i): s for at, part in self.parts.items() for i, s in self.sweep.searches(part).items()}

        def attempt(batch: list[tuple[tuple[Path, int], Point]]) -> list[Attempt]:
            planned = self._planned or self._plan([(at, i, point) for (at, i), point in batch])
            self._planned = None
            self.work(_left([p for p in planned if isinstance(p, Entry)], self.fresh))
            return [self._judged(p, point) for p, (_, point) in zip(planned, batch, strict=True)]

        try:
            chosen = settle(searches, attempt)
        except TuningError as error:
            raise ConfigError(str(error)) from None
        found: dict[Path, dict[int, Chosen]] = {at: {} for at in self.parts}
        for (at, i), one in chosen.items():
            found[at][i] = one
        return found

    def _plan(self, asked: Sequence[tuple[Path, int, Point]]) -> list[Attempt | Entry]:
        """The run of each point, or why there can be none."""
        found: list[Attempt | Entry] = []
        for at, i, point in asked:
            part = self.parts[at]
            try:
                config = Config.check(self.sweep.trial_content(part, [(i, point)]), self.sweep.name)
                found += plan([Planned(config, at / TUNING, part.point, {})], fresh=self.fresh)
            except ConfigError as error:
                label = grids.labelled({}, self.sweep.names(part)[i], point)["label"]
                why = str(error).removeprefix(f"{named(part.point)}: ").removeprefix(f"{label}: ")
                found.append(Attempt(point, math.inf, why))
        return found

    def _judged(self, made: Attempt | Entry, point: Point) -> Attempt:
        if isinstance(made, Attempt):
            return made
        history, allowance = made.folder.history(), made.config.allowance
        last = (history if allowance is None else allowance.within(history))[-1]
        part = next(p for at, p in self.parts.items() if made.folder.path.is_relative_to(at / TUNING))
        criterion = self.sweep.tuning(part).criterion
        try:
            value = score(last, made.folder.summary()["status"], criterion)
        except ValueError as error:
            raise ConfigError(f"[trials] {error}") from None
        return Attempt(point, value)


def _left(entries: Sequence[Entry], fresh: bool) -> list[Task]:
    return [Task(e.label, e.seed, e.folder, e.config) for e in entries if fresh or not e.finished]


def _places(sweep: Sweep, out: Path) -> list[Path]:
    """The folder of each setting; that of the sweep if there is one."""
    points = [part.point for part in sweep.parts]
    return [out] if points == [{}] else [out / name for name in folder_names([named(point) for point in points])]


def _final(sweep: Sweep, part: Part, place: Path, chosen: Mapping[int, Point] | None) -> Planned:
    """The comparison of a setting, with the values that were chosen, or the first of them."""
    config, points = sweep.final(part, chosen)
    return Planned(config, place, part.point, points)


def _shown(label: str, setting: Mapping[str, Any]) -> str:
    return f"{label} [{named(setting)}]" if setting else label


def plan(comparisons: Sequence[Planned], *, fresh: bool = False) -> list[Entry]:
    """Every run, which nothing speaks against, or one error that tells all that does; changes nothing on disk."""
    mistakes: dict[str, list[str]] = {}  # what is wrong, in order, and with which methods
    entries = []
    for config, place, setting, points in comparisons:
        for path in place.glob("*/seed-*"):
            with FolderLock(path):  # nobody else is at it
                pass
        told, labels = f"{named(setting)}: " if setting else "", config.labels
        where = dict(zip(labels, folder_names(labels), strict=True))
        seeds = config.seeds or [config.seed]
        found: dict[tuple[str, int], Entry] = {}
        for seed in seeds:  # a seed's problem serves all methods
            for label, spec in zip(labels, config.specs, strict=True):
                folder, single = RunFolder(place / where[label] / f"seed-{seed}"), config.only(spec, seed)
                finished = folder.finished and not fresh
                point = {**setting, **points.get(label, {})}
                shown = _shown(label, setting)
                found[label, seed] = Entry(shown, seed, folder, single, finished, point, setting, label)
                try:
                    _check(single, folder, finished=finished, fresh=fresh)
                except (ConfigError, DataError) as error:
                    whole = isinstance(error, DataError) or str(error).startswith("[data]")  # whatever the method
                    at = mistakes.setdefault(f"{told}{error}" if whole else str(error), [])
                    at += [] if whole or f"{told}{label}" in at else [f"{told}{label}"]
        entries += [found[label, seed] for label in labels for seed in seeds]
    if mistakes:
        raise ConfigError("\n".join(_told(error, at) for error, at in mistakes.items()))
    return entries


def _told(error: str, at: Sequence[str]) -> str:
    """A mistake with the first of the runs that have it, and how many more."""
    return f"{at[0]}{f' and {len(at) - 1} more' if len(at) > 1 else ''}: {error}" if at else error


def _check(config: Config, folder: RunFolder, *, finished: bool, fresh: bool) -> None:
    """Refuse a run that cannot be done, or whose folder holds another."""
    chosen = "steps" in config.specs[0]  # numbers for the steps come from the data
    problem = workers.problem_of(config) if chosen or not finished else None
    if folder.config.is_file() and not fresh:
        _check_same(folder, runner.resolve(config, problem)[0], finished=finished)
    if not finished:
        runner.prepare(config, folder, problem, fresh=fresh)


def _check_same(folder: RunFolder, wanted: Config, *, finished: bool) -> None:
    """Refuse results of another experiment; the device of a run matters only where it goes on."""
    stored, asked = (tomllib.loads(text) for text in (Config.read(folder.config).text, wanted.text))
    if finished and stored["run"]["device"] != asked["run"]["device"]:  # each device has its mode
        asked["run"] |= {key: stored["run"][key] for key in ("device", "mode")}
    if found := toml.difference(stored, asked):
        raise StoreError(f"{folder.path}: was run with {found}; use --overwrite or another --out")


def check_folder(out: Path, *, anew: bool, overwrite: bool = False) -> None:
    """Refuse a folder that holds something else; to begin anew, one that holds anything, unless it is overwritten.

    Changes nothing.
    """
    if (out / "history.jsonl").exists():
        raise StoreError(f"{out}: is the folder of a single run, not a comparison; use `run`, or another --out")
    if anew and {p for p in out.iterdir() if p.name != LOCK} - set(leftovers(out)):
        if not overwrite:
            raise StoreError(f"{out}: already holds files; use --resume, --overwrite or another --out")
        if not (out / "config.toml").exists():
            raise StoreError(f"{out}: is not a comparison (no config.toml), so it is not overwritten")


def clear(out: Path) -> None:
    """Remove an old comparison, and nothing else; the experiment goes last, so that what is left can be resumed."""
    for child in out.iterdir():
        if child.is_dir() and any(child.glob("**/seed-*/config.toml")):
            shutil.rmtree(child)
        elif child.name in ("comparison.csv", "comparison.tex", "plot.png"):
            child.unlink()
