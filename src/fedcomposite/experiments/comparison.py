"""Several methods over several seeds and settings: checked as a whole, then run, a folder for each."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedcomposite.data import DataError
from fedcomposite.experiments import runner, toml, workers
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.experiments.runner import TUNING, Watch
from fedcomposite.experiments.store import RunFolder, StoreError, folder_names, leftovers
from fedcomposite.experiments.sweeps import Part, Sweep, named
from fedcomposite.experiments.tables import latex, tabulate
from fedcomposite.experiments.workers import Task
from fedcomposite.files import write_atomic
from fedcomposite.locks import NAME as LOCK
from fedcomposite.locks import FolderLock
from fedcomposite.runtime import Record


class Comparison(NamedTuple):
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


def compare(
    experiment: Config | Sweep,
    out: Path,
    *,
    fresh: bool = False,
    jobs: int = 1,
    begin: Begin | None = None,
) -> pd.DataFrame:
    """Do every method with every seed in every setting below ``out``; runs that are finished there are not repeated.

    Everything is checked before the first run begins, and before the comparison that ``fresh`` replaces is removed.
    ``begin(label, seed)`` is called before each run and returns its watcher. ``jobs`` runs are done at a time, each in
    a process with one thread. Returns the table of :func:`fedcomposite.experiments.tables.tabulate`, which is also
    written beside the plot, as CSV and LaTeX.
    """
    from fedcomposite.plots import draw_histories  # brings matplotlib

    sweep = Sweep.of(experiment)
    with FolderLock(out):
        entries = carry_out(sweep, out, fresh=fresh, jobs=jobs, begin=begin)
        histories: dict[str, list[list[Record]]] = {}
        outcomes: dict[str, list[dict[str, Any]]] = {}
        for entry in entries:
            histories.setdefault(entry.label, []).append(entry.folder.history())
            outcomes.setdefault(entry.label, []).append(entry.folder.summary())
        points = {e.label: e.point for e in entries}
        table = tabulate(histories, outcomes, points=points)
        write_atomic(out / "comparison.csv", table.to_csv(index=False).encode())
        write_atomic(out / "comparison.tex", (latex(table) + "\n").encode())
        methods = {e.label: e.config.methods[e.config.labels[0]] for e in entries}
        title = str(sweep.content.get("name", "run"))
        draw_histories(histories, out / "plot.png", title=title, methods=methods)
    return table


def carry_out(
    sweep: Sweep, out: Path, *, fresh: bool = False, jobs: int = 1, begin: Begin | None = None, draw: bool = True
) -> list[Entry]:
    """Do the runs of a sweep that are left to do, those that choose values first; returns all that are to be told."""
    with FolderLock(out):
        parts = list(zip(sweep.parts, _places(sweep, out), strict=True))
        trials = [Comparison(sweep.trials(p), at / TUNING, p.point, {}) for p, at in parts] if sweep.tuned else []
        first = plan(trials, fresh=fresh)
        entries: list[Entry] = []
        if fresh or not trials or not all(entry.finished for entry in first):
            entries = plan([_final(sweep, p, at, chosen=False) for p, at in parts], fresh=fresh or sweep.tuned)
        if fresh:
            clear(out)
        for old in leftovers(out):
            old.unlink()
        write_atomic(out / "config.toml", sweep.text.encode())
        if trials:
            workers.carry_out(_left(first, fresh), jobs, begin, draw=False)
            entries = plan([_final(sweep, p, at, chosen=True) for p, at in parts])
        workers.carry_out(_left(entries, fresh), jobs, begin, draw=draw)
        return entries


def finished(sweep: Sweep, out: Path) -> list[Entry]:
    """The runs of a sweep that are done, wherever they were done; nothing is checked or run."""
    found = []
    for part, place in zip(sweep.parts, _places(sweep, out), strict=True):
        try:
            config, _, setting, points = _final(sweep, part, place, chosen=True)
        except StoreError:
            continue  # its values are not chosen yet
        for label, name, spec in zip(config.labels, folder_names(config.labels), config.specs, strict=True):
            for seed in config.seeds or [config.seed]:
                folder = RunFolder(place / name / f"seed-{seed}")
                shown = f"{label} [{named(setting)}]" if setting else label
                if folder.finished:
                    point = {**setting, **points.get(label, {})}
                    found.append(Entry(shown, seed, folder, config.only(spec, seed), True, point))
    return found


def _left(entries: Sequence[Entry], fresh: bool) -> list[Task]:
    return [Task(e.label, e.seed, e.folder, e.config) for e in entries if fresh or not e.finished]


def _places(sweep: Sweep, out: Path) -> list[Path]:
    """The folder of each setting; that of the sweep if there is one."""
    points = [part.point for part in sweep.parts]
    return [out] if points == [{}] else [out / name for name in folder_names([named(point) for point in points])]


def _final(sweep: Sweep, part: Part, place: Path, *, chosen: bool) -> Comparison:
    """The comparison of a setting, with the values that were chosen, or the first of them."""
    config, points = sweep.final(part, place / TUNING if chosen else None)
    return Comparison(config, place, part.point, points)


def plan(comparisons: Sequence[Comparison], *, fresh: bool = False) -> list[Entry]:
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
                shown = f"{label} [{named(setting)}]" if setting else label
                found[label, seed] = Entry(shown, seed, folder, single, finished, {**setting, **points.get(label, {})})
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
