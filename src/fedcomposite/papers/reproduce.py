"""From a name to a folder with the figure, the data and a verdict on every claim."""

from __future__ import annotations

import functools
import io
import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from fedcomposite._version import __version__
from fedcomposite.data import load as load_data
from fedcomposite.experiments import ConfigError, FolderLock
from fedcomposite.files import write_atomic
from fedcomposite.papers.base import Paper, digest_of, load, read_state
from fedcomposite.papers.measuring import Say, Study
from fedcomposite.papers.verdicts import NOT_JUDGED, Claim, cell, decide, multiplicity, table
from fedcomposite.runtime.fit import device_fault


class Reproduced(NamedTuple):
    """What a reproduction came to."""

    paper: Paper
    folder: Path
    claims: list[Claim]
    state: dict[str, Any]


def reproduce(
    name: str,
    out: Path,
    *,
    quick: bool = False,
    device: str = "cpu",
    jobs: int = 1,
    partial: bool = False,
    overrides: Sequence[str] = (),
    say: Say = print,
) -> Reproduced:
    """Make the figure, ``data.csv`` and ``verdict.md`` of a name in ``out/NAME``.

    What is there of an earlier call is used: runs that are finished are not repeated, those that were interrupted go
    on from their checkpoints, and if the data are complete only figure and verdict are made again. Runs of another
    machine, or their data, may be copied in as folders; ``partial`` keeps partial data whose runs are not there.

    Parameters
    ----------
    name : str
        One of :func:`names`.
    out : path
        The folder above that of the name.
    quick : bool
        The reduced form.
    device, jobs
        Where the runs are done, and how many at a time.
    partial : bool
        Do nothing new: data, figure and verdict of the runs that are finished.
    overrides : sequence of str
        ``section.field=value`` of the experiment.
    say : function
        Receives a line of progress.
    """
    check(name, out, quick=quick, device=device, overrides=overrides, partial=partial)
    paper = load(name)
    content, folder = paper.experiment(quick=quick, overrides=overrides), out / name
    digest = digest_of(content)
    with FolderLock(folder):
        state = read_state(folder)
        file = folder / "data.csv"
        same = state.get("experiment") == digest and file.is_file()
        if not (same and (state.get("complete") or (partial and not (folder / "runs").is_dir()))):
            study = Study(paper, folder, content, device, jobs, partial, say)
            before = state if partial or state.get("experiment") == digest else {}
            state = _measure(study, before, quick, digest, overrides)
        data = pd.read_csv(file) if file.stat().st_size > 1 else pd.DataFrame()
        claims = judge(paper, data, quick=bool(state.get("quick")))
        if len(data):
            for kind in ("pdf", "png"):
                paper.module.draw(data, folder / f"figure.{kind}")
        write_atomic(folder / "verdict.md", verdict(paper, claims, state, _tuned(folder)).encode())
    return Reproduced(paper, folder, claims, state)


def check(
    name: str,
    out: Path,
    *,
    quick: bool = False,
    device: str = "cpu",
    overrides: Sequence[str] = (),
    partial: bool = False,
) -> None:
    """Refuse what cannot be done here: a name, a device or data that are not there; what is done needs neither."""
    paper = load(name)
    content = paper.experiment(quick=quick, overrides=overrides)
    state = read_state(out / name)
    if partial or (state.get("complete") and state.get("experiment") == digest_of(content)):
        return
    if fault := device_fault(device):
        raise ConfigError(fault)
    for one in paper.datasets(content):
        _found(one)


@functools.cache
def _found(name: str) -> None:
    """Nothing, if a data set is there; otherwise the error that says where it may be put."""
    load_data(name)


def _measure(study: Study, state: dict[str, Any], quick: bool, digest: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Make data.csv; the time of every call is added up."""
    began, spent = time.perf_counter(), float(state.get("seconds", 0.0))
    measure = getattr(study.paper.module, "measure", Study.sweep)
    versions = {"fedcomposite": __version__, "torch": torch.__version__, "python": platform.python_version()}
    made: dict[str, Any] = {"device": _device(study), "commit": commit()}
    made = {k: _joined(str(state.get(k, "")), now) for k, now in made.items()} | {"versions": versions}
    if study.partial:  # which does nothing itself
        made |= {k: state[k] for k in made if k in state}
    head = {"name": study.paper.name, "experiment": digest, "quick": quick, "complete": False}
    state = {**head, **({"set": list(overrides)} if overrides else {}), **made, "seeds": _seeds(study.content)}
    try:
        data: pd.DataFrame = measure(study)
        text = io.StringIO()
        data.to_csv(text, index=False, float_format="%.7g")
        write_atomic(study.folder / "data.csv", text.getvalue().encode())
        state["complete"] = not study.partial
    finally:
        state["seconds"] = round(spent + time.perf_counter() - began, 1)
        state["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
        write_atomic(study.folder / "state.json", (json.dumps(state, indent=2) + "\n").encode())
    return state


def judge(paper: Paper, data: pd.DataFrame, *, quick: bool = False) -> list[Claim]:
    """The claims with their verdicts, from the data alone; see :mod:`fedcomposite.papers.verdicts`."""
    if not len(data):
        return [Claim("all of it", verdict=NOT_JUDGED)]
    return decide(paper.module.claims(data), quick=quick)


def _tuned(folder: Path) -> str:
    """What tuning.csv says of the numbers that were tuned: whether each best one lies inside its grid."""
    file = folder / "tuning.csv"
    if not file.is_file():
        return ""
    chosen = pd.read_csv(file).query("chosen")
    out = chosen["search"][~chosen["inside"].astype(bool)]
    told = "all lie inside their grids" if not len(out) else f"at an end of their grids lie those of {'; '.join(out)}"
    return f"{len(chosen)} searches tuned their numbers, trials in `tuning.csv`: {told}."


def verdict(paper: Paper, claims: Sequence[Claim], state: dict[str, Any], tuning: str = "") -> str:
    """The text of verdict.md."""
    card = paper.card
    form = "the reduced form (`--quick`)" if state.get("quick") else "the full form"
    form += "" if same_settings(paper, state) else ", with other settings than those of its file"
    short = "**This is the reduced form: it shows that everything works, and is no verdict on the paper.**"
    lines = [f"# {paper.name}: {card['title']}", "", f"{card['source']}.", "", str(card["about"]).strip(), ""]
    lines += [short, ""] if state.get("quick") else []
    lines += ["| | the paper's claim, in our words | measured | verdict |", "| --- | --- | --- | --- |"]
    lines += [f"| {i} | {cell(c.says)} | {cell(c.measured)} | **{cell(c.verdict)}** |" for i, c in enumerate(claims, 1)]
    changed = "".join(f" --set {shlex.quote(one)}" for one in state.get("set", ()))
    again = f"`fedcomposite reproduce {paper.name}{' --quick' if state.get('quick') else ''}{changed}`"
    lines += [
        "",
        "![figure](figure.png)",
        "",
        f"Drawn by {again}.",
        "",
        "## What the verdicts rest on",
        "",
        *table(claims),
        "",
    ]
    lines += [multiplicity(claims), ""]
    lines += [tuning, ""] if tuning else []
    partly = "" if state.get("complete") else " Not all runs are finished: what is there is partial."
    lines += [
        f"Measured in {form}, {state.get('seconds', 0) / 60:.1f} minutes on {state.get('device', 'a computer')}, "
        f"{state.get('date', '')}, by commit {state.get('commit', 'unknown')}, with {_made_with(state)}.{partly} "
        f"Again: {again}; the numbers are in `data.csv`.",
        "",
    ]
    return "\n".join(lines)


def same_settings(paper: Paper, state: Mapping[str, Any]) -> bool:
    """Whether data were made with the settings that the reproduction has."""
    return bool(state.get("experiment") == digest_of(paper.experiment(quick=bool(state.get("quick")))))


def _made_with(state: Mapping[str, Any]) -> str:
    """Seeds and versions in words."""
    seeds = state.get("seeds", "unknown")
    told = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if isinstance(seeds, list) else f"{seeds} seeds"
    versions = state.get("versions", {})
    return ", ".join([told, *(f"{k} {v}" for k, v in versions.items())])


@functools.cache
def commit() -> str:
    """The commit of this code: that of its repository, or FEDCOMPOSITE_COMMIT where there is none at hand."""
    here = Path(__file__).parent
    try:
        git = ["git", "-C", str(here)]
        subprocess.run([*git, "ls-files", "--error-unmatch", "reproduce.py"], capture_output=True, check=True)
        found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "--", "."], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FEDCOMPOSITE_COMMIT", "unknown")
    return found + ("+changes" if changed.stdout.strip() else "")


def _seeds(content: Mapping[str, Any]) -> Any:
    """The seeds of an experiment, or how many there are, from 0 on."""
    return content.get("settings", {}).get("seeds", content.get("seeds", [0]))


def _device(study: Study) -> str:
    """What it is measured on."""
    cores = f"{study.jobs} CPU core{'s' if study.jobs > 1 else ''}"
    return torch.cuda.get_device_name() if study.device.startswith("cuda") else cores


def _joined(before: str, now: str) -> str:
    """What an earlier call had and what this one has: parts of the data may be of either."""
    return before if now in before else f"{before} and {now}" if before else now
