"""The one driver: it runs tasks, and what they ask at the same time travels in one exchange.

A method's rounds are one task; a path or a cross-validation is many; learning a recipe is one. What the driver has,
every task has: the settings of the process, the count of exchanges and bytes, a clock, somebody who watches, and a log
of answers from which an analysis goes on after it was killed, with the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedcomposite._version import __version__
from fedcomposite.privacy import Counters, StudyBudget
from fedcomposite.problems import Loss, Problem
from fedcomposite.runtime import process
from fedcomposite.runtime.answers import AT_HAND, AnswerLog, settled
from fedcomposite.runtime.identity import Identity, identify
from fedcomposite.runtime.protocol import Request, Sums, Task
from fedcomposite.runtime.transports.base import Parties, Transport
from fedcomposite.runtime.transports.noised_silos import NoisedSilos
from fedcomposite.runtime.transports.silo_answers import SiloTransport
from fedcomposite.runtime.transports.study_answers import StudyTransport

T = TypeVar("T")


@dataclass(frozen=True)
class Deadline:
    """When an analysis ends where it is; by a clock that a resumed analysis reads as the first one did."""

    at: float = math.inf
    clock: Callable[[], float] = time.monotonic

    @property
    def passed(self) -> bool:
        """Whether the time is up."""
        return self.at < math.inf and self.clock() > self.at


NEVER = Deadline()


def deadline(seconds: float | None, clock: Callable[[], float] = time.monotonic) -> Deadline:
    """So many seconds from now."""
    return NEVER if seconds is None else Deadline(clock() + seconds, clock)


class Driver:
    """The loop between tasks and a transport.

    Parameters
    ----------
    transport : Transport
        Who answers.
    log : AnswerLog, optional
        Where answers are written down. One that has some already is read first: tasks that ask the same again are
        answered from it, and the parties are asked from there on.
    watch : callable, optional
        Called after each exchange, with this driver.
    """

    budgeted = False
    """Whether what it tells has noise of which intervals have to know."""

    def __init__(
        self,
        transport: Transport,
        *,
        log: AnswerLog | None = None,
        watch: Callable[[Driver], None] | None = None,
    ) -> None:
        self.transport: Any = transport
        self.log, self.watch = log, watch
        self.exchanges = self.bytes_up = self.bytes_down = 0
        self.tasks = 0
        """How many are running."""
        self.asked: Sequence[Any] = ()
        """The requests of the last exchange."""
        self._began, self._elapsed = time.monotonic(), 0.0

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self, tasks: Sequence[Task[T]], *, settings: bool = True) -> list[T]:
        """Run tasks side by side to their ends; their results, in their order.

        ``settings`` allows the transport to change the process while they run, as the number of its threads.
        """
        results: dict[int, T] = {}
        waiting: dict[int, list[Any]] = {}

        def advance(i: int, answers: list[Any] | None) -> None:
            try:
                waiting[i] = next(tasks[i]) if answers is None else tasks[i].send(answers)
            except StopIteration as stop:
                waiting.pop(i, None)
                results[i] = stop.value

        with self._settings(settings):
            for i in range(len(tasks)):
                advance(i, None)
            while waiting:
                self.tasks, asked = len(waiting), list(waiting.items())
                answers, at = self.ask([request for _, requests in asked for request in requests]), 0
                for i, requests in asked:
                    advance(i, answers[at : at + len(requests)])
                    at += len(requests)
        return [results[i] for i in range(len(tasks))]

    def ask(self, requests: Sequence[Any]) -> list[Any]:
        """One exchange: the answers to some requests."""
        known, self.asked = None if self.log is None else self.log.recall(requests), requests
        if known is None:
            counter = self.transport.counter
            up, down = counter.bytes_up, counter.bytes_down
            answers: list[Any] = self.transport.ask(requests)
            self.bytes_up += counter.bytes_up - up
            self.bytes_down += counter.bytes_down - down
            if self.log is not None:
                self._elapsed, answers = self.seconds, settled(answers)
                self.log.append(requests, answers, self._elapsed, (self.bytes_up, self.bytes_down))
        else:
            self.transport.recalled(requests)
            answers, self._elapsed, (self.bytes_up, self.bytes_down) = known
            self._began = time.monotonic() - self._elapsed
        self.exchanges += 1
        if self.watch is not None:
            self.watch(self)
        return answers

    def _settings(self, wanted: bool) -> AbstractContextManager[None]:
        return self.transport.running() if wanted and process.on_main_thread() else nullcontext()

    # -- what analyses ask --------------------------------------------------------------------------------------------

    def each(self, requests: Sequence[Request]) -> list[list[Sums]]:
        """The answers of every site, for what is reported by site."""
        made = self.ask([replace(request, by_site=True) for request in requests])
        return [list(one) for one in zip(*made, strict=True)]

    def told(self, requests: Sequence[Request]) -> dict[str, list[Sums]]:
        """The answers of every site, by its name; where only sums are known, these under the name "all".

        Sums over the samples of one site that is left out are that site's answers, where sites tell them.
        """
        if self.by_site:
            return dict(zip(self.names, self.each(requests), strict=True))
        made: list[Sums] = self.ask(requests)
        owners = [one.rows.number for one in requests if one.rows.kind == "site" and one.rows.held]
        if len(owners) < len(requests):
            return {"all": made}
        none = [{key: torch.zeros_like(value) for key, value in one.items()} for one in made]
        return {
            name: [one if owner == id else zero for one, owner, zero in zip(made, owners, none, strict=True)]
            for name, id in zip(self.names, self.ids, strict=True)
        }

    def deadline(self, seconds: float | None) -> Deadline:
        """The time at which an analysis of so many seconds ends; after a resumption by the time that it took before."""
        return deadline(seconds, time.monotonic if self.log is None else lambda: self._elapsed)

    @property
    def seconds(self) -> float:
        """How long the analysis has taken so far, what it took before a resumption among it."""
        return time.monotonic() - self._began

    @property
    def _parties(self) -> Parties:
        parties: Parties = self.transport
        return parties

    @property
    def names(self) -> list[str]:
        """The parties."""
        return self._parties.names

    @property
    def ids(self) -> list[int]:
        """The numbers of those with samples."""
        return self._parties.ids

    @property
    def centre(self) -> Tensor | None:
        """About which the parties can take their features."""
        return self._parties.centre

    @property
    def copies(self) -> int:
        """How many completed copies of their samples the parties have."""
        return int(getattr(self.transport, "copies", 1))

    @property
    def by_site(self) -> bool:
        """Whether single sites' answers may be asked for."""
        return self._parties.by_site

    @property
    def noised(self) -> bool:
        """Whether some parties put noise on what they count at a model."""
        return self._parties.noised


class StudyDriver(Driver):
    """A driver of analyses under a budget: ``inner`` asks the parties, and is the one that counts, watches and logs.

    Analyses that share it share what was asked once: a path after a fit, and intervals after these, cost nothing more.
    """

    budgeted = True

    def __init__(self, inner: Driver, budget: StudyBudget, loss: Loss, bias: bool) -> None:
        super().__init__(StudyTransport(inner.ask, inner.transport, budget, loss, bias))
        self.inner = inner

    @classmethod
    def at_hand(
        cls,
        problem: Problem,
        budget: StudyBudget,
        *,
        seed: int = 0,
        log: AnswerLog | None = None,
        watch: Callable[[Driver], None] | None = None,
    ) -> StudyDriver:
        """On a problem's own silos, with the noise that a seed gives: for studies of what noise costs."""
        if not isinstance(budget, StudyBudget):
            raise ValueError(f"privacy = {budget!r:.80}, must be a privacy.StudyBudget for an analysis")
        inner = Driver(NoisedSilos(problem, budget, Counters(seed)), log=log, watch=watch)
        assert isinstance(problem.loss, Loss)  # silos have refused a network
        return cls(inner, budget, problem.loss, problem.bias)

    def ask(self, requests: Sequence[Any]) -> list[Any]:
        """Answers made of what the parties have told, or tell now."""
        self.inner.tasks = self.tasks
        answers: list[Any] = self.transport.ask(requests)
        inner = self.inner
        self.exchanges, self.bytes_up, self.bytes_down = inner.exchanges, inner.bytes_up, inner.bytes_down
        return answers


class CopiesDriver(Driver):
    """A driver whose answers are means over the completed copies of tables whose gaps were imputed by draws.

    What is fitted, scored and measured through it is so on all copies together, each sample in so many shares; counts
    with noise, of which sites tell few, on the first.
    """

    def __init__(self, inner: Driver, copies: int) -> None:
        super().__init__(inner.transport)
        self.inner, self._several = inner, copies

    @property
    def copies(self) -> int:
        return self._several

    def ask(self, requests: Sequence[Any]) -> list[Any]:
        """The mean answers, in one exchange."""
        mean = getattr(self.transport, "means_copies", False)  # then parties tell means of their own
        alone = [
            mean or not isinstance(one, Request) or one.rows.copy_number > 0 or one.name == "tallies"
            for one in requests
        ]
        numbers = [(0,) if lone else range(1, self._several + 1) for lone in alone]
        every = [_of_copy(one, k) for one, each in zip(requests, numbers, strict=True) for k in each]
        self.inner.tasks = self.tasks
        answers, inner = iter(self.inner.ask(every)), self.inner
        self.exchanges, self.bytes_up, self.bytes_down = inner.exchanges, inner.bytes_up, inner.bytes_down
        return [_mean([next(answers) for _ in each]) for each in numbers]


def _of_copy(one: Any, number: int) -> Any:
    return replace(one, rows=replace(one.rows, copy_number=number)) if number else one


def _mean(answers: list[Any]) -> Any:
    if len(answers) == 1:
        return answers[0]
    if isinstance(answers[0], list):  # by site
        return [_mean(list(one)) for one in zip(*answers, strict=True)]
    return {key: torch.stack([one[key] for one in answers]).mean(0) for key in answers[0]}


def over_copies(driver: Driver) -> Driver:
    """The driver itself, or one of the means over the copies that its parties have."""
    several = driver.copies > 1 and not isinstance(driver, CopiesDriver)
    return CopiesDriver(driver, driver.copies) if several else driver


def driver_of(problem: Problem, driver: Driver | None = None) -> Driver:
    """The driver that was given, or one on a problem's own silos."""
    return over_copies(Driver(SiloTransport(problem)) if driver is None else driver)


def identify_analysis(problem: Problem, **settings: Any) -> Identity:
    """What an analysis of a problem's own silos is: samples, model, settings, and the version that asks."""
    silos = problem.silos
    held = silos.held_out, silos.held_by, silos.held_margin_offsets
    return identify(problem, Tensor(), held=held, version=__version__, **settings)


_NOT_IDENTITY = ("problem", "driver", "checkpoint", "resume", "on_exchange")


@contextmanager
def driving(function: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[Driver]:
    """The driver of an analysis, from the arguments of its function.

    It is the one that was given, or one on the problem's own silos, whose answers are written to ``checkpoint`` as long
    as the analysis lasts.
    """
    problem, driver, watch, path = (given[name] for name in ("problem", "driver", "on_exchange", "checkpoint"))
    if given["resume"] and path is None:
        raise ValueError("resume needs a file: checkpoint=PATH")
    if driver is not None:
        if path is not None or watch is not None or given.get("privacy") is not None:
            raise ValueError(
                "a driver has its own log, watch and budget: give Driver(transport, log=..., watch=...), or no driver"
            )
        yield over_copies(driver)
        return
    budget, seed = given.get("privacy"), given.get("seed", 0)

    def made(log: AnswerLog | None = None) -> Driver:
        if budget is not None:
            return StudyDriver.at_hand(problem, budget, seed=seed, log=log, watch=watch)
        return Driver(SiloTransport(problem), log=log, watch=watch)

    if path is None:
        yield over_copies(made())
        return
    settings = {key: value for key, value in given.items() if key not in _NOT_IDENTITY}
    identity = identify_analysis(problem, analysis=function.__name__, **settings)
    with closing(AnswerLog(path, identity, resume=given["resume"], most=AT_HAND)) as log:
        driver = over_copies(made(log))
        yield driver
        (driver.inner if isinstance(driver, StudyDriver | CopiesDriver) else driver).log = None  # a result may ask more
    log.remove()
