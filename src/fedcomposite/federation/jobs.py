"""A job: one experiment at the coordinator, from its run folder to its end, with what others need to follow it.

Beside the files of every run folder there are ``status.json`` (what is happening now, renewed every second),
``federation.log`` (one line per event) and, when somebody asks the job to stop, ``stop``.
"""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from flwr.serverapp import Grid
from pydantic import BaseModel, ConfigDict

from fedcomposite.experiments.locks import FolderLock
from fedcomposite.experiments.store import Journal, RunFolder
from fedcomposite.federation.folder import FederationFolder
from fedcomposite.federation.post import Settings
from fedcomposite.federation.server import Coordinator
from fedcomposite.federation.shape import parse
from fedcomposite.files import write_atomic
from fedcomposite.runtime.history import Run

State = Literal["preparing", "running", "finished", "failed"]


class Job(BaseModel):
    """What a job's file says."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    out: str
    settings: dict[str, Any] = {}
    data: dict[str, Any] | None = None
    """The ``[data]`` of the experiment as written, kept for the run folder; a federation does not use it."""
    partition: dict[str, Any] | None = None


class _Diary:
    """status.json and federation.log."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._renewed = folder, 0.0
        self.fields: dict[str, Any] = {"pid": os.getpid(), "state": "preparing", "round": 0, "missing": {}}

    def log(self, line: str) -> None:
        with (self._folder / "federation.log").open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now():%H:%M:%S} {line}\n")

    def write(self, **fields: Any) -> None:
        self.fields |= fields
        self._renewed = time.monotonic()
        write_atomic(self._folder / "status.json", json.dumps({**self.fields, "time": time.time()}).encode())

    def renew(self, missing: dict[str, float]) -> None:
        if time.monotonic() - self._renewed > 1.0:
            self.write(missing={k: round(v) for k, v in missing.items()})


def carry_out(grid: Grid, federation: FederationFolder, name: str) -> Run:
    """Do a job, from its checkpoint if there is one, and leave its run folder complete."""
    job = Job.model_validate_json(federation.job(name).read_text(encoding="utf-8"))
    folder = RunFolder(job.out)
    with FolderLock(folder.path):
        diary = _Diary(folder.path)
        diary.write()
        try:
            run = _conduct(grid, federation, job, folder, diary)
        except BaseException as error:
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            diary.log(f"failed: {line}")
            diary.write(state="failed", message=line, missing={})
            raise
        diary.log(run.message)
        diary.write(state="finished", message=run.message, missing={})
    return run


def _conduct(grid: Grid, federation: FederationFolder, job: Job, folder: RunFolder, diary: _Diary) -> Run:
    """Meet the sites and do the rounds."""
    config = parse(folder.config.read_text(encoding="utf-8"), "config.toml")
    coordinator: Coordinator | None = None

    def stop() -> bool:
        diary.renew(coordinator.post.missing if coordinator is not None else {})
        return (folder.path / "stop").exists()

    coordinator = Coordinator(
        grid, federation.sites, federation.nodes, config, job.name, Settings(**job.settings), log=diary.log, stop=stop
    )
    coordinator.prepare(folder.checkpoint)
    resolved = coordinator.config
    if job.data is not None:
        resolved = resolved.model_copy(update={"data": job.data, "partition": job.partition})
    diary.write(state="running", rounds=config.run.rounds)
    journal = Journal(folder, resolved.text, watch=lambda record: diary.write(round=record["round"]))
    run = coordinator.run(folder.checkpoint, journal, config.make_callbacks(folder.path))
    journal.close()
    folder.finish(run, coordinator.problem, resolved.labels[0])
    return run
