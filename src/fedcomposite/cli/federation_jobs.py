"""A federation's job as its analyst sees it: its files, its submission, and what it says until it ends."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import tomllib
import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
from rich.markup import escape

from fedcomposite._validation import suggest
from fedcomposite.cli.console import out, rows
from fedcomposite.cli.federation_parties import say, show
from fedcomposite.experiments.store import RunFolder
from fedcomposite.experiments.toml import locate, overridden, read_text
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.inquiry import target_of
from fedcomposite.federation.coordinator.jobs import Job, carry_out
from fedcomposite.federation.engines import selection
from fedcomposite.federation.engines.selection import open_engine
from fedcomposite.federation.folders import FederationFolder, FolderError
from fedcomposite.federation.shape import parse, write
from fedcomposite.locks import FolderLock, LockedError
from fedcomposite.regularizers.base import StepError
from fedcomposite.runtime.history import Record


def chosen(federation: FederationFolder, sites: str | None) -> list[str]:
    """The sites of ``--sites a,b``; none if it was not given."""
    named = [] if sites is None else [site.strip() for site in sites.split(",")]
    for i, name in enumerate(named):
        if name not in federation.sites:
            raise FolderError(f"--sites: no site {name!r}{suggest(name, federation.sites)}")
        if name in named[:i]:
            raise FolderError(f"--sites: {name!r} is there twice")
    return named


def begin(
    federation: FederationFolder,
    config: str | None,
    resume: Path | None,
    destination: Path | None,
    settings: Settings,
    sites: list[str] | None = None,
    overrides: Sequence[str] = (),
) -> RunFolder:
    """Write, or take up, the job's files."""
    if (config is None) == (resume is None):
        raise FolderError("give a CONFIG, or --resume RUN to go on with an earlier run")
    if resume is not None:
        if overrides:
            raise FolderError("--set cannot be given with --resume")
        place = RunFolder(resume.absolute())
        name_file = place.path / "job"
        if not name_file.is_file():
            raise FolderError(f"--resume {resume}: no job there, so this is not a run of a federation")
        require_service(federation)
        job = Job.model_validate_json(federation.job(name_file.read_text().strip()).read_text(encoding="utf-8"))
        if job.kind != "run":
            raise FolderError(f"--resume {resume}: an analysis; go on with `federation {job.kind} --resume`")
        kept = replace(settings, secure=settings.secure or bool(job.settings.get("secure")))  # never less than it was
        job = job.model_copy(update={"out": str(place.path), "settings": asdict(kept)})
    else:
        source = locate(str(config))
        text = overridden(read_text(source), source, overrides)
        experiment, written = parse(text, source.name), tomllib.loads(text.removeprefix("\ufeff"))
        if experiment.recipe is not None:
            target_of(written.get("data"), f"{source.name}: [data]")
        require_service(federation)
        chosen = destination or federation.runs / f"{experiment.name}-{datetime.now():%Y%m%d-%H%M%S}"
        place = RunFolder(chosen.absolute())
        place.create()
        place.config.write_text(write(experiment, callbacks=True), encoding="utf-8")
        job = Job(
            name=uuid.uuid4().hex[:16],
            out=str(place.path),
            settings=asdict(settings),
            data=written.get("data"),
            partition=written.get("partition"),
            sites=sites,
        )
        (place.path / "job").write_text(job.name + "\n", encoding="utf-8")
    with FolderLock(place.path):  # refused while the job runs
        for old in ("stop", "status.json"):
            (place.path / old).unlink(missing_ok=True)
    keep(federation, job)
    return place


def keep(federation: FederationFolder, job: Job) -> None:
    """Write a job's file: it is the newest one now."""
    federation.job(job.name).parent.mkdir(parents=True, exist_ok=True)
    federation.job(job.name).write_text(job.model_dump_json(), encoding="utf-8")


def require_service(federation: FederationFolder) -> None:
    """An error where the engine's server does not run."""
    if reason := selection.unreachable(federation):
        raise FederationError(reason)


class Interrupt:
    """Ctrl-C, or a polite kill, asks the run to stop; the second time it leaves at once."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        self._old = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        say("stopping; Ctrl-C again leaves at once")


def conduct(federation: FederationFolder, place: RunFolder, told: dict[str, Any]) -> None:
    """Do the job, say what happens, and print its result."""
    job = (place.path / "job").read_text().strip()
    hint = f"go on with: fedcomposite federation run {federation.path} --resume {place.path}"
    rounds = parse(place.config.read_text(encoding="utf-8"), "config.toml").run.rounds
    try:
        with Interrupt() as interrupt, contextlib.closing(open_engine(federation, job, say)) as engine:
            carry_out(engine, federation, job, say, _Shown(rounds), lambda: interrupt.asked)
    except StepError:
        raise  # the experiment has to be changed, so there is nothing to go on with
    except Exception as error:
        raise FederationError(f"{failure(error, place)}; {hint}") from error
    summary, last = place.summary(), place.history()[-1]
    told |= {"status": summary["status"], "message": summary["message"], "folder": place.path, "last": last}
    out.print(
        f"{summary['message']}: objective {last['objective']:.8g}, stationarity {last['stationarity']:.2e}, "
        f"{last['nonzeros']} nonzero, {(last['bytes_up'] + last['bytes_down']) / 1e6:.3g} MB sent, "
        f"{last['seconds']:.1f} s" + (f", epsilon {last['epsilon']:.3g}" if "epsilon" in last else "")
    )
    if (place.path / "coefficients.csv").is_file():  # a linear model
        found = pd.read_csv(place.path / "coefficients.csv")
        told["coefficients"] = rows(found)
        many = f"largest of {len(found)} nonzero coefficients" if len(found) > 15 else "nonzero coefficients"
        show(found.head(15), many)
    out.print(f"written: {escape(str(place.path))}")
    if summary["status"] == "interrupted":
        raise FederationError(f"{summary['message']}; {hint}")
    if summary["status"] == "diverged":
        raise FederationError(summary["message"])


def failure(error: Exception, place: RunFolder) -> str:
    """Why a job failed, in one line."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left on the coordinator's disk ({place.path}); make room"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class _Shown:
    """Prints records; a line per tenth of the run."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._shown = rounds, -1

    def __call__(self, record: Record) -> None:
        now = record["round"]
        if now in (0, self._rounds) or now - max(self._shown, 0) >= max(1, self._rounds // 10):
            seen = f"F {record['objective']:.6g}  ‖G‖ {record['stationarity']:.1e}  nnz {record['nonzeros']}"
            seen += f"  ε {record['epsilon']:.3g}" if "epsilon" in record else ""
            out.print(f"round {now}/{self._rounds}  {seen}  {record['seconds']:.1f} s", highlight=False)
            self._shown = now


def job_status(place: RunFolder) -> dict[str, Any]:
    """What a job says about itself, and whether it still can; nothing before it has begun."""
    try:
        found: dict[str, Any] = json.loads((place.path / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if found.get("state") in ("preparing", "running") and not _in_use(place):
        found["state"] = "gone (go on with --resume)"
    return found


def _in_use(place: RunFolder) -> bool:
    """Whether a process works in a run folder; the system knows by its lock, whatever became of the process."""
    try:
        with FolderLock(place.path):
            return False
    except LockedError:
        return True
