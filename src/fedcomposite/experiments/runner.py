"""Carry out an experiment: one run, or a comparison of several methods over several seeds."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from fedcomposite.experiments.config import Config
from fedcomposite.experiments.store import RunFolder, StoreError
from fedcomposite.problems import Problem
from fedcomposite.runtime import DivergenceWarning, Interrupted, Record, Run, simulate


class TheoryWarning(UserWarning):
    """A run whose steps no theorem covers; it may well converge."""


Watch = Callable[[Record], None]


def execute(config: Config, folder: RunFolder, problem: Problem | None = None, watch: Watch | None = None) -> Run:
    """Do the run that ``config`` describes in ``folder``, from its checkpoint if there is one.

    At Ctrl-C the folder is completed with what there is, and :class:`fedcomposite.Interrupted` goes on to the caller.
    """
    problem = problem or config.make_problem()
    (spec,) = config.specs
    algorithm = config.make_algorithm(spec, problem)
    resolved = {"name": type(algorithm).__name__, **{k: v for k, v in vars(algorithm).items() if v is not None}}
    if "label" in spec:
        resolved["label"] = spec["label"]
    config = config.only(resolved, config.seed)
    if broken := config.outside_theory(algorithm, problem):
        warnings.warn(f"{config.labels[0]} leaves its proven range: {'; '.join(broken)}", TheoryWarning, stacklevel=2)
    config.write(folder.config)
    with (folder.path / "history.jsonl").open("w", encoding="utf-8") as file:

        def on_record(record: Record) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()
            if watch is not None:
                watch(record)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DivergenceWarning)  # the status and message say it
                run = simulate(
                    problem,
                    algorithm,
                    checkpoint=folder.checkpoint,
                    resume=True,
                    on_record=on_record,
                    **config.settings(),
                )
        except Interrupted as stop:
            folder.finish(stop.run, problem, config.labels[0])
            raise
    folder.finish(run, problem, config.labels[0])
    return run


def compare(
    config: Config,
    out: Path,
    *,
    begin: Callable[[str, int], Watch | None] | None = None,
) -> pd.DataFrame:
    """Do every method with every seed below ``out``; runs that are finished there already are read, not repeated.

    ``begin(label, seed)`` is called before each run and returns its watcher. Returns the table of :func:`tabulate`,
    which is also written beside the plot.
    """
    from fedcomposite.experiments.plots import draw_histories  # brings matplotlib

    seeds = config.seeds or [config.seed]
    config.write(out / "config.toml")
    histories: dict[str, list[list[Record]]] = {}
    outcomes: dict[str, list[dict[str, Any]]] = {}
    problems: dict[int, Problem] = {}
    for label, spec in zip(config.labels, config.specs, strict=True):
        for seed in seeds:
            folder = RunFolder(out / _slug(label) / f"seed-{seed}")
            watch = begin(label, seed) if begin is not None else None
            if not folder.finished:
                folder.path.mkdir(parents=True, exist_ok=True)
                single = config.only(spec, seed)
                if seed not in problems:
                    problems[seed] = single.make_problem()
                execute(single, folder, problems[seed], watch)
            histories.setdefault(label, []).append(folder.history())
            outcomes.setdefault(label, []).append(folder.summary())
    table = tabulate(histories, outcomes)
    table.to_csv(out / "comparison.csv", index=False)
    draw_histories(histories, out / "plot.png", title=config.name)
    return table


def tabulate(
    histories: dict[str, list[list[Record]]], outcomes: dict[str, list[dict[str, Any]]], target: float = 1e-6
) -> pd.DataFrame:
    """One row per method: rounds until stationarity fell to ``target`` of its first value, and where it ended.

    Numbers are means over seeds; ``±`` columns are half the range. Rounds count only seeds that got there.
    """
    rows = []
    for label, runs in histories.items():
        reached = [
            next((r["round"] for r in run if r["stationarity"] <= target * run[0]["stationarity"]), None)
            for run in runs
        ]
        there = [r for r in reached if r is not None]
        last = pd.DataFrame([run[-1] for run in runs])
        relative = pd.Series([run[-1]["stationarity"] / run[0]["stationarity"] for run in runs])
        spread = (last.max(numeric_only=True) - last.min(numeric_only=True)) / 2
        row: dict[str, Any] = {
            "method": label,
            f"rounds to {target:g}": sum(there) / len(there) if len(there) == len(runs) else None,
            "stationarity": relative.mean(),
            "stationarity ±": (relative.max() - relative.min()) / 2,
            "objective": last["objective"].mean(),
            "objective ±": spread["objective"],
            "nonzeros": last["nonzeros"].mean(),
            "MB": (last["bytes_up"] + last["bytes_down"]).mean() / 1e6,
            "seconds": last["seconds"].mean(),
            "status": ", ".join(sorted({o["status"] for o in outcomes[label]})),
        }
        if "test_accuracy" in last:
            row["test accuracy"] = last["test_accuracy"].mean()
        rows.append(row)
    return pd.DataFrame(rows)


def collect(paths: list[Path]) -> dict[str, list[list[Record]]]:
    """Histories of run folders, or of all runs of a comparison, by label."""
    found: dict[str, list[list[Record]]] = {}
    for path in paths:
        runs = (
            [path]
            if (path / "history.jsonl").exists()
            else sorted(p.parent for p in path.glob("*/seed-*/history.jsonl"))
        )
        if not runs:
            raise StoreError(f"{path}: neither a run folder nor a comparison (no history.jsonl in it)")
        for run in runs:
            folder = RunFolder(run)
            try:
                label = str(folder.summary()["label"])
            except StoreError:
                label = run.name
            if len(paths) > 1 and len(runs) == 1:
                label = f"{label} ({path.name})" if label in found else label
            found.setdefault(label, []).append(folder.history())
    return found


def clear(out: Path) -> None:
    """Remove an old comparison, and nothing else."""
    if not out.exists():
        return
    if not (out / "config.toml").exists():
        raise StoreError(f"{out}: is not a comparison (no config.toml), so it is not overwritten")
    for child in out.iterdir():
        if child.is_dir() and any(child.glob("seed-*/config.toml")):
            shutil.rmtree(child)
        elif child.name in ("config.toml", "comparison.csv", "plot.png"):
            child.unlink()


def _slug(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label).strip("-") or "run"
