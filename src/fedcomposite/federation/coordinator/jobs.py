"""A job: one experiment or analysis at the coordinator, from its run folder to its end, and what others see of it.

Beside the files of every run folder there are ``status.json`` (what is happening now, renewed every second),
``federation.log`` (one line per event) and, when somebody asks the job to stop, ``stop``. The job is done by the
process of ``federation run``, or of the analysis, itself: there is none to outlive it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fedcomposite.data import FittedRecipe
from fedcomposite.experiments.config import Config
from fedcomposite.experiments.store import Journal, RunFolder
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.coordinator.delivery import Settings
from fedcomposite.federation.coordinator.inquiry import Inquiry, learn, target_of
from fedcomposite.federation.coordinator.plans import plan_of
from fedcomposite.federation.engines.engine import Engine
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.shape import parse
from fedcomposite.files import write_atomic
from fedcomposite.locks import FolderLock
from fedcomposite.runtime import Driver
from fedcomposite.runtime.history import Record, Run
from fedcomposite.runtime.process import reuse_memory
from fedcomposite.runtime.transports import StoppedError

State = Literal["preparing", "running", "finished", "failed", "interrupted"]


class Job(BaseModel):
    """What a job's file says."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    out: str
    kind: Literal["run", "fit", "path", "cv"] = "run"
    settings: dict[str, Any] = {}
    data: dict[str, Any] | None = None
    """The ``[data]`` of the experiment as written, kept for the run folder; a federation does not use it."""
    partition: dict[str, Any] | None = None
    sites: list[str] | None = None
    """Who takes part; all sites of the federation if not said."""


class Diary:
    """status.json and federation.log."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self._folder, self._tell, self._renewed = folder, tell, 0.0
        self.fields: dict[str, Any] = {"pid": os.getpid(), "state": "preparing", "missing": {}}

    def log(self, line: str) -> None:
        """Write a line down, and say it."""
        with (self._folder / "federation.log").open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now():%H:%M:%S} {line}\n")
        self._tell(line)

    def write(self, **fields: Any) -> None:
        """Say what is happening now."""
        self.fields |= fields
        self._renewed = time.monotonic()
        write_atomic(self._folder / "status.json", json.dumps({**self.fields, "time": time.time()}).encode())

    def renew(self, missing: dict[str, float], **fields: Any) -> None:
        """Say it at most every second."""
        self.fields |= fields
        if time.monotonic() - self._renewed > 1.0:
            self.write(missing={k: round(v) for k, v in missing.items()})


@contextlib.contextmanager
def followed(folder: Path, tell: Callable[[str], None], **fields: Any) -> Iterator[Diary]:
    """What others see of a job while it lasts, ``fields`` at first; how it failed is the last of it."""
    diary = Diary(folder, tell)
    diary.write(**fields)
    try:
        yield diary
    except BaseException as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        stopped = isinstance(error, KeyboardInterrupt | StoppedError)
        state, said = ("interrupted", "interrupted") if stopped else ("failed", f"failed: {line}")
        with contextlib.suppress(OSError):  # of a full disk, which is then the error itself
            diary.log(said)
            diary.write(state=state, message="" if stopped else line, missing={})
        raise


def carry_out(
    engine: Engine,
    federation: FederationFolder,
    name: str,
    log: Callable[[str], None] = lambda line: None,
    watch: Callable[[Record], None] = lambda record: None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Do a job, from its checkpoint if there is one, and leave its run folder complete.

    ``log`` and ``watch`` are told each event and each record; ``stop()`` is asked between looks.
    """
    job = Job.model_validate_json(federation.job(name).read_text(encoding="utf-8"))
    folder = RunFolder(job.out)
    with FolderLock(folder.path), followed(folder.path, log, round=0) as diary:
        run = _conduct(engine, federation, job, folder, diary, watch, stop)
        diary.log(run.message)
        diary.write(state="finished", message=run.message, missing={}, unapproved=[])
    return run


def _conduct(
    engine: Engine,
    federation: FederationFolder,
    job: Job,
    folder: RunFolder,
    diary: Diary,
    watch: Callable[[Record], None],
    asked: Callable[[], bool],
) -> Run:
    """Meet the sites and do the rounds."""
    reuse_memory()
    config = parse(folder.config.read_text(encoding="utf-8"), "config.toml")
    coordinator: Coordinator | None = None

    def stop() -> bool:
        post = None if coordinator is None else coordinator.post
        diary.renew({} if post is None else post.missing, unapproved=[] if post is None else list(post.unapproved))
        return asked() or (folder.path / "stop").exists()

    def on_record(record: Record) -> None:
        diary.write(round=record["round"])
        watch(record)

    settings = Settings(**job.settings)
    sites = _parties(federation, job, settings, diary)
    recipe = _recipe(engine, federation, job, folder, config, sites, settings, diary, stop)
    coordinator = Coordinator(
        engine, sites, federation.permitted, config, job.name, settings, recipe=recipe, log=diary.log, stop=stop
    )
    coordinator.prepare(folder.checkpoint)
    resolved = coordinator.config
    if job.data is not None:
        resolved = resolved.model_copy(update={"data": job.data, "partition": job.partition})
    diary.write(state="running", rounds=config.run.rounds)
    journal = Journal(folder, resolved.text, watch=on_record)
    run = coordinator.run(folder.checkpoint, journal, config.make_callbacks(folder.path))
    journal.close()
    folder.finish(run, coordinator.problem, resolved.labels[0])
    return run


def _recipe(
    engine: Engine,
    federation: FederationFolder,
    job: Job,
    folder: RunFolder,
    config: Config,
    sites: list[str],
    settings: Settings,
    diary: Diary,
    stop: Callable[[], bool],
) -> FittedRecipe | None:
    """The learned recipe of an experiment that has one: that of the folder, or of what all sites answer now.

    At the sites the learning is a job of its own: they do not go back in its exchanges, and a run that was stopped
    before the recipe was there learns it again.
    """
    if config.recipe is None:
        return None
    kept = folder.path / "recipe.json"
    if kept.is_file():
        return FittedRecipe.read(kept)
    name = f"{job.name}-{secrets.token_hex(4)}"
    asking = Inquiry(
        engine,
        sites,
        federation.permitted,
        config,
        name,
        settings,
        plan=plan_of("recipe", config),
        log=diary.log,
        stop=stop,
    )
    driver = Driver(asking)
    made = learn(driver, asking.config, target_of(job.data, "[data]"))
    assert made is not None
    made.write(kept)
    diary.log(f"the recipe is learned from {len(sites)} sites, in {driver.exchanges} exchanges")
    return made


def _parties(federation: FederationFolder, job: Job, settings: Settings, diary: Diary) -> list[str]:
    """The sites of a job: those it names, or all; "skip" begins without the revoked ones."""
    sites = federation.sites if job.sites is None else job.sites
    out = [s for s in sites if s in federation.revoked()]
    if job.sites is not None or settings.policy == "wait" or not out:
        return sites
    diary.log(f"without {', '.join(out)}: revoked")
    return [s for s in sites if s not in out]
