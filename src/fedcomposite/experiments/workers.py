"""Runs of an experiment, one after another in this process or side by side in several, one thread each."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import threading
import tomllib
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch

from fedcomposite._validation import UserError
from fedcomposite.experiments import runner
from fedcomposite.experiments.config import Config
from fedcomposite.experiments.runner import Watch
from fedcomposite.experiments.store import RunFolder
from fedcomposite.problems import Problem

_KEPT = 4  # problems that a process keeps for its next run


class FailedRunsError(Exception):
    """Runs that failed while others went on; the message has a line for each."""


class Task(NamedTuple):
    """A run to do."""

    label: str
    seed: int
    folder: RunFolder
    config: Config


def carry_out(
    tasks: Iterable[Task], jobs: int = 1, begin: Callable[[str, int], Watch | None] | None = None, *, draw: bool = True
) -> None:
    """Do the runs that are left to do; ``jobs`` of them at a time.

    With one job ``begin(label, seed)`` is called before each run and returns its watcher. With several it is called
    when a run has ended, and the watcher sees the last record. ``draw=False`` leaves out pictures and warnings.
    """
    todo = list(tasks)
    if len({task.seed for task in todo}) > _KEPT:
        todo.sort(key=lambda task: task.seed)  # so that a seed's problem serves all methods
    if jobs <= 1 or len(todo) <= 1:
        for task in todo:
            watch = None if begin is None else begin(task.label, task.seed)
            with warnings.catch_warnings():
                if not draw:
                    warnings.simplefilter("ignore")  # the summaries say it
                runner.execute(task.config, task.folder, problem_of(task.config), watch, draw=draw)
        return
    _side_by_side(todo, min(jobs, len(todo)), begin, draw)


def problem_of(config: Config) -> Problem:
    """The problem of an experiment; the last few are kept."""
    sections = config.model_dump(include={"seed", "data", "partition", "problem", "model", "regularizer"})
    files = [Path(f) for f in (*config.data.get("files", ()), config.data.get("test")) if isinstance(f, str)]
    written = tuple((f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.is_file())  # they may have changed
    return _problem(json.dumps(sections, sort_keys=True), written)


@functools.lru_cache(maxsize=_KEPT)
def _problem(sections: str, written: tuple[tuple[int, int], ...]) -> Problem:
    return Config.model_validate({**json.loads(sections), "run": {"rounds": 0}}).make_problem()


class _Worker:
    """A process with one thread for one run at a time: should it be killed, it is known with which."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of this process's threads
        self.pool = ProcessPoolExecutor(1, mp_context=context)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            self.pool.submit(os.putenv, name, "1")  # before it imports what reads them
        self._pid = self.pool.submit(_ready)

    def signal(self, number: int) -> None:
        with contextlib.suppress(BrokenProcessPool, ProcessLookupError):  # it is gone
            os.kill(self._pid.result(), number)


def _side_by_side(tasks: list[Task], jobs: int, begin: Callable[[str, int], Watch | None] | None, draw: bool) -> None:
    """Do the runs in processes; all that failed are told when the others are done."""
    failed: list[str] = []
    waiting = tasks[::-1]
    idle, running = [_Worker() for _ in range(jobs)], dict[Future[str | None], tuple[Task, _Worker]]()
    try:
        while waiting or running:
            while waiting and idle:
                task, worker = waiting.pop(), idle.pop()
                running[worker.pool.submit(_work, task.config.text, task.folder.path, draw)] = task, worker
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                task, worker = running.pop(done)
                try:
                    problem = done.result()
                except BrokenProcessPool:
                    problem = "its process was killed (for memory?); the same command goes on from the checkpoints, "
                    problem += "fewer jobs take less memory"
                    worker = _Worker()
                idle.append(worker)
                if problem is not None:
                    failed.append(f"{task.label}, seed {task.seed}: {problem}")
                elif begin is not None and (watch := begin(task.label, task.seed)) is not None:
                    watch(task.folder.history()[-1])
    finally:
        _end([worker for _, worker in running.values()], idle)
    if failed:
        raise FailedRunsError(f"{len(failed)} of {len(tasks)} runs failed\n" + "\n".join(failed))


def _end(busy: list[_Worker], idle: list[_Worker]) -> None:
    """Have the busy ones come to the end of their rounds and complete their folders; a second Ctrl-C ends them now."""
    try:
        for worker in busy:
            worker.signal(signal.SIGINT)
        for worker in [*busy, *idle]:
            worker.pool.shutdown()
    except KeyboardInterrupt:
        for worker in busy:
            worker.signal(signal.SIGTERM)
        raise


_stop = threading.Event()  # in a process that does runs: whether it was told to stop


def _ready() -> int:
    """In a new process: the terminal's Ctrl-C is for its parent, which tells it to stop, and with which it ends."""

    def end_with(parent: BaseProcess) -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the summaries say it
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, lambda *_: _stop.set())
    threading.Thread(target=end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    return os.getpid()


def _work(text: str, path: Path, draw: bool) -> str | None:
    """Do a run; returns what went wrong, if anything."""
    waiting = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if _stop.is_set():
            return "interrupted"
        config = Config.check(tomllib.loads(text))
        runner.execute(config, RunFolder(path), problem_of(config), draw=draw)
    except (UserError, KeyboardInterrupt) as error:
        return str(error) or "interrupted"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGINT, waiting)
    return None
