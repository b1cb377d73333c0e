"""Several methods over several seeds: checked as a whole, then run one after another, a folder for each."""

from __future__ import annotations

import hashlib
import shutil
import tomllib
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedcomposite.experiments import runner, toml
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.experiments.locks import NAME as LOCK
from fedcomposite.experiments.locks import FolderLock
from fedcomposite.experiments.runner import Prepared, Watch
from fedcomposite.experiments.store import RunFolder, StoreError, leftovers
from fedcomposite.files import write_atomic
from fedcomposite.problems import Problem
from fedcomposite.runtime import Record

_LONGEST = 60  # letters of a label in a folder's name


class Entry(NamedTuple):
    """One run of a comparison."""

    label: str
    seed: int
    folder: RunFolder
    prepared: Prepared | None
    """None if the run was finished earlier."""


def compare(
    config: Config,
    out: Path,
    *,
    fresh: bool = False,
    begin: Callable[[str, int], Watch | None] | None = None,
) -> pd.DataFrame:
    """Do every method with every seed below ``out``; runs that are finished there already are read, not repeated.

    Everything is checked before the first run begins, and before the comparison that ``fresh`` replaces is removed.
    ``begin(label, seed)`` is called before each run and returns its watcher. Returns the table of :func:`tabulate`,
    which is also written beside the plot.
    """
    from fedcomposite.plots import draw_histories  # brings matplotlib

    with FolderLock(out):
        entries = plan(config, out, fresh=fresh)
        if fresh:
            clear(out)
        for old in leftovers(out):
            old.unlink()
        config.write(out / "config.toml")
        histories: dict[str, list[list[Record]]] = {}
        outcomes: dict[str, list[dict[str, Any]]] = {}
        for entry in entries:
            watch = begin(entry.label, entry.seed) if begin is not None else None
            if entry.prepared is not None:
                runner.carry_out(entry.prepared, entry.folder, watch)
            histories.setdefault(entry.label, []).append(entry.folder.history())
            outcomes.setdefault(entry.label, []).append(entry.folder.summary())
        table = tabulate(histories, outcomes)
        write_atomic(out / "comparison.csv", table.to_csv(index=False).encode())
        draw_histories(histories, out / "plot.png", title=config.name, methods=config.methods)
    return table


def plan(config: Config, out: Path, *, fresh: bool = False) -> list[Entry]:
    """Every run, ready to be carried out, or an error for the whole; changes nothing on disk."""
    for path in out.glob("*/seed-*"):
        with FolderLock(path):  # nobody else is at it
            pass
    entries, problems, labels = [], dict[int, Problem](), config.labels
    mistakes: dict[str, None] = {}  # in order, once
    for label, place, spec in zip(labels, folder_names(labels), config.specs, strict=True):
        for seed in config.seeds or [config.seed]:
            folder = RunFolder(out / place / f"seed-{seed}")
            single, prepared = config.only(spec, seed), None
            finished = folder.finished and not fresh
            if not finished or "steps" in spec:  # numbers for the steps come from the data
                problems[seed] = problems.get(seed) or single.make_problem()
            if folder.config.is_file() and not fresh:
                _check_same(folder, runner.resolve(single, problems.get(seed))[0])
            if not finished:
                try:
                    prepared = runner.prepare(single, folder, problems[seed], fresh=fresh)
                except ConfigError as error:
                    mistakes[f"{label}: {error}"] = None
            entries.append(Entry(label, seed, folder, prepared))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return entries


def _check_same(folder: RunFolder, wanted: Config) -> None:
    """Refuse results of another experiment."""
    stored = tomllib.loads(Config.read(folder.config).text)
    if found := toml.difference(stored, tomllib.loads(wanted.text)):
        raise StoreError(f"{folder.path}: was run with {found}; use --overwrite or another --out")


def folder_names(labels: Sequence[str]) -> list[str]:
    """A folder name for each label, different ones also where case does not count.

    A label of letters, digits and inner hyphens is its own name; any other gets a digest of itself.

    Examples
    --------
    >>> folder_names(["FedAvg", "a-b", "a b"])
    ['FedAvg', 'a-b', 'a-b-c8687a08']
    """
    found: list[str] = []
    taken: set[str] = set()
    for label in labels:
        name = "".join(c if c.isalnum() else "-" for c in label).strip("-")
        plain = name == label == unicodedata.normalize("NFC", label) and 0 < len(name) <= _LONGEST
        if not plain or name.casefold() in taken:
            digest = hashlib.sha256(label.encode()).hexdigest()[:8]
            name = f"{name[:_LONGEST] or 'run'}-{digest}"
        if name.casefold() in taken:
            raise ConfigError(f"label {label!r}: gives the same folder as another; choose another label")
        taken.add(name.casefold())
        found.append(name)
    return found


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
        if "epsilon" in last:
            row["epsilon"] = last["epsilon"].mean()
        rows.append(row)
    return pd.DataFrame(rows)


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
        if child.is_dir() and any(child.glob("seed-*/config.toml")):
            shutil.rmtree(child)
        elif child.name in ("comparison.csv", "plot.png"):
            child.unlink()
