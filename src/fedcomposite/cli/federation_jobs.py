"""A federation's job as its analyst sees it: its files, its submission, and what it says until it ends."""

from __future__ import annotations

import contextlib
import json
import os
import time
import tomllib
import uuid
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
from rich.markup import escape

from fedcomposite.cli.console import out, print_frame
from fedcomposite.experiments.locks import FolderLock
from fedcomposite.experiments.store import RunFolder
from fedcomposite.experiments.toml import locate, read_text
from fedcomposite.federation import bundle, engine
from fedcomposite.federation.folder import FederationFolder, FolderError
from fedcomposite.federation.jobs import Job
from fedcomposite.federation.post import FederationError, Settings
from fedcomposite.federation.shape import parse, write
from fedcomposite.federation.supernode import reach


def say(line: str) -> None:
    """Print a line with the time."""
    out.print(f"{datetime.now():%H:%M:%S} {line}", markup=False, highlight=False, soft_wrap=True)


def show(frame: pd.DataFrame, caption: str) -> None:
    """Print a table and a line below it."""
    print_frame(frame, digits=6)
    out.print(escape(caption), highlight=False)


def begin(
    federation: FederationFolder, config: str | None, resume: Path | None, destination: Path | None, settings: Settings
) -> RunFolder:
    """Write, or take up, the job's files."""
    if (config is None) == (resume is None):
        raise FolderError("give a CONFIG, or --resume RUN to go on with an earlier run")
    if resume is not None:
        place = RunFolder(resume.absolute())
        name_file = place.path / "job"
        if not name_file.is_file():
            raise FolderError(f"--resume {resume}: no job there, so this is not a run of a federation")
        require_service(federation)
        job = Job.model_validate_json(federation.job(name_file.read_text().strip()).read_text(encoding="utf-8"))
        job = job.model_copy(update={"out": str(place.path), "settings": asdict(settings)})
    else:
        source = locate(str(config))
        text = read_text(source)
        experiment = parse(text, source.name)
        require_service(federation)
        chosen = destination or federation.runs / f"{experiment.name}-{datetime.now():%Y%m%d-%H%M%S}"
        place = RunFolder(chosen.absolute())
        place.create()
        place.config.write_text(write(experiment, callbacks=True), encoding="utf-8")
        written = tomllib.loads(text)
        job = Job(
            name=uuid.uuid4().hex[:16],
            out=str(place.path),
            settings=asdict(settings),
            data=written.get("data"),
            partition=written.get("partition"),
        )
        (place.path / "job").write_text(job.name + "\n", encoding="utf-8")
    with FolderLock(place.path):  # refused while the job runs
        for old in ("stop", "status.json"):
            (place.path / old).unlink(missing_ok=True)
    federation.job(job.name).parent.mkdir(parents=True, exist_ok=True)
    federation.job(job.name).write_text(job.model_dump_json(), encoding="utf-8")
    return place


def require_service(federation: FederationFolder) -> None:
    """Refuse to go on without the coordinator's service."""
    if reason := reach(federation.address, federation.authority):
        raise FederationError(f"{reason}; is `fedcomposite federation serve` running?")


def conduct(federation: FederationFolder, place: RunFolder) -> None:
    """Submit the job, follow it and print its result."""
    job = (place.path / "job").read_text().strip()
    label = bundle.write(federation.state / "bundle")
    said = len(_lines(place))
    engine.flwr(federation.home, "run", str(label), "federation", "--run-config", f'job="{job}"')
    hint = f"go on with: fedcomposite federation run {federation.path} --resume {place.path}"
    try:
        status = _follow(place, said)
    except KeyboardInterrupt:
        (place.path / "stop").touch()
        say("stopping; Ctrl-C again leaves at once")
        status = _follow(place, len(_lines(place)), quiet=True)
    if status["state"] != "finished":
        raise FederationError(f"{status.get('message', 'the server is gone')}; {hint}")
    summary, last = place.summary(), place.history()[-1]
    out.print(
        f"{summary['message']}: objective {last['objective']:.8g}, stationarity {last['stationarity']:.2e}, "
        f"{last['nonzeros']} nonzero, {(last['bytes_up'] + last['bytes_down']) / 1e6:.3g} MB sent, "
        f"{last['seconds']:.1f} s"
    )
    if (place.path / "coefficients.csv").is_file():  # a linear model
        found = pd.read_csv(place.path / "coefficients.csv")
        many = f"largest of {len(found)} nonzero coefficients" if len(found) > 15 else "nonzero coefficients"
        show(found.head(15), many)
    out.print(f"written: {escape(str(place.path))}")
    if summary["status"] == "interrupted":
        raise FederationError(f"{summary['message']}; {hint}")
    if summary["status"] == "diverged":
        raise FederationError(summary["message"])


def _lines(place: RunFolder) -> list[str]:
    log = place.path / "federation.log"
    return log.read_text(encoding="utf-8").splitlines() if log.is_file() else []


def _follow(place: RunFolder, seen: int, quiet: bool = False, starting: float = 90.0) -> dict[str, Any]:
    """Print a job's events, after the first ``seen``, and its records until it ends; its last status."""
    began, shown = time.monotonic(), -1
    while True:
        status = job_status(place)
        lines = _lines(place)
        for line in lines[seen:]:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        seen = len(lines)
        rounds = status.get("rounds", 0)
        if not quiet and status.get("round", -1) > shown and rounds and (place.path / "history.jsonl").is_file():
            shown = _show_record(place, shown, rounds)
        if status.get("state") in ("finished", "failed"):
            return status
        if status and not alive(status["pid"]):
            time.sleep(1.0)  # its last words may still be on their way to the disk
            status = job_status(place)
            return status if status.get("state") in ("finished", "failed") else {**status, "state": "gone"}
        if not status and time.monotonic() - began > starting:
            raise FederationError(f"the job did not start within {starting:g} s; see superlink.log")
        time.sleep(0.2)


def _show_record(place: RunFolder, shown: int, rounds: int) -> int:
    """Print the newest record if it is due; a line per tenth of the run."""
    with contextlib.suppress(ValueError):
        last = place.history()[-1]
        if last["round"] == 0 or last["round"] - max(shown, 0) >= max(1, rounds // 10) or last["round"] == rounds:
            seen = f"F {last['objective']:.6g}  ‖G‖ {last['stationarity']:.1e}  nnz {last['nonzeros']}"
            out.print(f"round {last['round']}/{rounds}  {seen}  {last['seconds']:.1f} s", highlight=False)
            return int(last["round"])
    return shown


def job_status(place: RunFolder) -> dict[str, Any]:
    """What a job says about itself; nothing before it has begun."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((place.path / "status.json").read_text(encoding="utf-8"))
        return found
    return {}


def alive(pid: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
