"""Runs of an experiment, one after another in this process or side by side in several, one thread each."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import queue
import signal
import tomllib
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from fedcomposite._validation import UserError
from fedcomposite.experiments import runner
from fedcomposite.experiments.config import Config
from fedcomposite.experiments.runner import Watch
from fedcomposite.experiments.store import RunFolder
from fedcomposite.problems import Problem
from fedcomposite.runtime import Interrupted

_LOOK = 1.0  # seconds between looks at whether the processes are alive
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
    _Pool(min(jobs, len(todo))).carry_out(todo, begin, draw)


def problem_of(config: Config) -> Problem:
    """The problem of an experiment; the last few are kept."""
    sections = config.model_dump(include={"seed", "data", "partition", "problem", "model", "regularizer"})
    files = [Path(f) for f in (*config.data.get("files", ()), config.data.get("test")) if isinstance(f, str)]
    written = tuple((f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.is_file())  # they may have changed
    return _problem(json.dumps(sections, sort_keys=True), written)


@functools.lru_cache(maxsize=_KEPT)
def _problem(sections: str, written: tuple[tuple[int, int], ...]) -> Problem:
    return Config.model_validate({**json.loads(sections), "run": {"rounds": 0}}).make_problem()


class _Pool:
    """Processes that take runs from a queue until it is empty."""

    def __init__(self, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of this process's threads
        self.waiting: Any = context.Queue()
        self.done: Any = context.Queue()
        self.processes: list[BaseProcess] = [
            context.Process(target=_work, args=(self.waiting, self.done), daemon=True) for _ in range(jobs)
        ]

    def carry_out(self, tasks: list[Task], begin: Callable[[str, int], Watch | None] | None, draw: bool) -> None:
        for number, task in enumerate(tasks):
            self.waiting.put((number, task.config.text, str(task.folder.path), draw))
        for _ in self.processes:
            self.waiting.put(None)
        _start(self.processes)
        failed: list[str] = []
        left = len(tasks)
        try:
            while left:
                number, problem = self._next()
                left -= 1
                task = tasks[number]
                if problem is not None:
                    failed.append(f"{task.label}, seed {task.seed}: {problem}")
                elif begin is not None and (watch := begin(task.label, task.seed)) is not None:
                    watch(task.folder.history()[-1])
        except BaseException:
            self._end(stop=True)
            raise
        self._end()
        if failed:
            raise FailedRunsError(f"{len(failed)} of {len(tasks)} runs failed\n" + "\n".join(failed))

    def _next(self) -> tuple[int, str | None]:
        """The number of the next run that ended, and what went wrong with it, if anything."""
        while True:
            try:
                found: tuple[int, str | None] = self.done.get(timeout=_LOOK)
                return found
            except queue.Empty:
                dead = [p for p in self.processes if p.exitcode not in (None, 0)]
                if dead:
                    raise FailedRunsError(
                        f"a process ended with exit code {dead[0].exitcode} (killed for memory?); "
                        "the same command goes on from the checkpoints, fewer jobs take less memory"
                    ) from None

    def _end(self, stop: bool = False) -> None:
        """Wait for the processes; to ``stop``, each comes to the end of its round and completes its folder."""
        for process in self.processes:
            if stop and process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGINT)
        for process in self.processes:
            process.join(timeout=60)
            if process.is_alive():
                process.terminate()
        self.waiting.cancel_join_thread()


def _start(processes: list[BaseProcess]) -> None:
    """Start them with one thread each, which torch decides when it is imported."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        for process in processes:
            process.start()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _work(waiting: Any, done: Any) -> None:
    """Take runs until there are none left."""
    warnings.simplefilter("ignore")  # the summaries say it
    try:
        for number, text, path, draw in iter(waiting.get, None):
            problem = None
            try:
                config = Config.check(tomllib.loads(text))
                runner.execute(config, RunFolder(Path(path)), problem_of(config), draw=draw)
            except Interrupted:
                return
            except UserError as error:
                problem = str(error)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            done.put((number, problem))
    except KeyboardInterrupt:
        return
