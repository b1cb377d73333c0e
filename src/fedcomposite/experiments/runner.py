"""Carry out an experiment: one run, or a comparison of several methods over several seeds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedcomposite import algorithms
from fedcomposite.algorithms import AnyAlgorithm
from fedcomposite.experiments.checks import check_run
from fedcomposite.experiments.config import Config
from fedcomposite.experiments.store import Journal, RunFolder, StoreError
from fedcomposite.experiments.tuning import TUNING
from fedcomposite.locks import FolderLock
from fedcomposite.problems import Problem
from fedcomposite.runtime import DivergenceWarning, Interrupted, Record, Run, simulate


class TheoryWarning(UserWarning):
    """A run whose steps no theorem covers; it may well converge."""


Watch = Callable[[Record], None]


class Prepared(NamedTuple):
    """A run that nothing speaks against."""

    config: Config
    """The experiment, with every choice resolved."""
    problem: Problem
    algorithm: AnyAlgorithm


def resolve(config: Config, problem: Problem | None) -> tuple[Config, AnyAlgorithm]:
    """The experiment of one method with its steps as numbers, and that method."""
    (spec,) = config.specs
    algorithm = config.make_algorithm(spec, problem)
    resolved = algorithms.spec(algorithm)
    if "label" in spec:
        resolved["label"] = spec["label"]
    return config.only(resolved, config.seed), algorithm


def prepare(
    config: Config, folder: RunFolder | None = None, problem: Problem | None = None, *, fresh: bool = False
) -> Prepared:
    """Build everything that ``config`` describes, and refuse what cannot be run; changes nothing on disk.

    Unless ``fresh``, the folder's checkpoint, if there is one, must be one of this run.
    """
    settings = config.settings()
    problem = problem or config.make_problem()
    config, algorithm = resolve(config, problem)
    watchers = config.make_callbacks(Path())
    check_run(problem, algorithm, settings, None if folder is None or fresh else folder.checkpoint, watchers)
    return Prepared(config, problem, algorithm)


def execute(
    config: Config,
    folder: RunFolder,
    problem: Problem | None = None,
    watch: Watch | None = None,
    *,
    fresh: bool = False,
    draw: bool = True,
) -> Run:
    """Do the run that ``config`` describes in ``folder``, from its checkpoint if there is one.

    ``fresh`` begins anew and replaces what the folder holds of an earlier run. At Ctrl-C the folder is completed
    with what there is, and :class:`fedcomposite.Interrupted` goes on to the caller. ``draw=False`` leaves out plot.png.
    """
    with FolderLock(folder.path):
        return carry_out(prepare(config, folder, problem, fresh=fresh), folder, watch, fresh=fresh, draw=draw)


def carry_out(
    prepared: Prepared, folder: RunFolder, watch: Watch | None = None, *, fresh: bool = False, draw: bool = True
) -> Run:
    """Do a run that was prepared."""
    config, problem, algorithm = prepared
    (label,) = config.labels
    if not config.practical and (broken := config.outside_theory(algorithm, problem)):
        warnings.warn(f"{label} leaves its proven range: {'; '.join(broken)}", TheoryWarning, stacklevel=3)
    with FolderLock(folder.path):
        journal = Journal(folder, config.text, fresh, watch)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DivergenceWarning)  # the status and message say it
                run = simulate(
                    problem,
                    algorithm,
                    checkpoint=folder.checkpoint,
                    resume=not fresh,
                    on_record=journal,
                    callbacks=config.make_callbacks(folder.path),
                    progress=False,
                    **config.settings(),
                )
        except Interrupted as stop:
            journal.close()
            folder.finish(stop.run, problem, label, draw=draw)
            raise
        journal.close()
        folder.finish(run, problem, label, draw=draw)
    return run


def collect(paths: list[Path]) -> tuple[dict[str, list[list[Record]]], dict[str, str]]:
    """Histories of run folders, or of all runs of a comparison, by label; and the method behind each label."""
    found: dict[str, list[list[Record]]] = {}
    methods: dict[str, str] = {}
    for path in paths:
        runs = (
            [path]
            if (path / "history.jsonl").exists()
            else sorted(
                p.parent for p in path.glob("**/seed-*/history.jsonl") if TUNING not in p.relative_to(path).parts
            )
        )
        if not runs:
            raise StoreError(f"{path}: neither a run folder nor a comparison (no history.jsonl in it)")
        names: dict[tuple[Path, str], str] = {}  # of this folder's labels, which must not be taken for another's seeds
        for run in runs:
            folder, setting = RunFolder(run), run.parent.parent
            try:
                label = str(folder.summary()["label"])
            except StoreError:
                label = run.name
            if (setting, label) not in names:
                plain = label if run == path or setting == path else f"{label} [{setting.relative_to(path)}]"
                name, number = plain, 2
                while name in found:
                    name = f"{plain} ({path.name})" if number == 2 else f"{plain} ({path.name}, {number - 1})"
                    number += 1
                names[setting, label] = name
                methods[name] = folder.method or label
            found.setdefault(names[setting, label], []).append(folder.history())
    return found, methods
