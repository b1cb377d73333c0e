"""A method's rounds as a task of the driver, with history, verdict, checkpoint and callbacks.

A round is the same everywhere: broadcast, carry the message to the participants, take the mean of their replies,
aggregate, now and then measure. Who carries the message is the transport's matter.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.problems import Evaluation
from fedcomposite.regularizers import Regularizer
from fedcomposite.regularizers.base import StepError
from fedcomposite.runtime import checkpoint as checkpoints
from fedcomposite.runtime import messages, process
from fedcomposite.runtime.callbacks.base import AnyCallback, View, attach
from fedcomposite.runtime.cohorts import Cohorts
from fedcomposite.runtime.counted import Counted
from fedcomposite.runtime.driver import Driver
from fedcomposite.runtime.history import Best, Record, Run, Status
from fedcomposite.runtime.identity import Identity
from fedcomposite.runtime.protection import Spending
from fedcomposite.runtime.protocol import Round, Task
from fedcomposite.runtime.records import ending, grew, make_record, verdict
from fedcomposite.runtime.transports.base import Exchange, Gathered, MethodTransport, StoppedError


@dataclass
class Plan:
    """How long a run goes, how often it is measured and saved, and who watches it."""

    rounds: int
    evaluate_every: int = 1
    tolerance: float | None = None
    checkpoint: Path | None = None
    checkpoint_every: int = 0
    keep_solutions: bool = False
    callbacks: Sequence[AnyCallback] = ()
    process_settings: bool = True
    """Whether the run may change threads, memory and Ctrl-C of its process while it lasts."""
    blame: Callable[[int], str] = field(default=lambda r: f"diverged in round {r}: try smaller steps")
    """A sentence for a run that diverged in some round."""
    dead: Callable[[Tensor, Tensor], str] = field(default=lambda x, buffers: "")
    """A sentence on a model that can learn nothing more, empty for others; with it a run ends."""


class Rounds:
    """One method on one transport, round by round.

    ``server`` is the server's state after ``round`` rounds; ``buffers`` is what a model keeps beside its parameters,
    averaged over the participants of each round (empty for most models).
    """

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        h: Regularizer,
        transport: MethodTransport,
        x0: Tensor,
        *,
        cohorts: Cohorts,
        buffers: Tensor,
        stationarity_step: float = 1.0,
        identity: Identity | None = None,
        spending: Spending | None = None,
    ) -> None:
        self.algorithm, self.regularizer, self.transport, self.x0 = algorithm, h, transport, x0
        self.driver = Driver(transport)
        self.cohorts, self.buffers, self.stationarity_step = cohorts, buffers, stationarity_step
        self.identity = identity or {}
        self.spending = spending
        self.round = 0
        self.server = algorithm.at(0).init(x0, h.during(0))[0]
        self.history: list[Record] = []
        self.best: Best | None = None
        self.status: Status = "completed"
        self._h = Counted(h, transport.counter) if transport.leads else h  # several processes count the server once
        self._reason = self._dead = ""
        self._stop = False
        self._seconds, self._began = 0.0, time.perf_counter()
        self._saved = -1, 0

    @property
    def solution(self) -> Tensor:
        """The model to evaluate now."""
        last = max(0, self.round - 1)
        return self.algorithm.at(last).solution(self.server, self.regularizer.during(last))

    def participants(self, r: int) -> rng.Ints:
        """The clients of round r, sorted."""
        return self.cohorts.draw(r // self.algorithm.exchanges)

    def stop(self, reason: str) -> None:
        """Ask the run to end after this record; ``reason`` becomes part of its message."""
        self._stop, self._reason = True, self._reason or reason

    def keep(self, metric: str, value: float) -> None:
        """Take the model of now for the best one so far."""
        self.best = Best(self.round, metric, value, self.solution.detach().clone(), self.buffers.clone())

    # -- one round --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Do one round, whatever the plan."""
        self._aggregate(self._ask(self._request(training=True)).gathered())

    def measure(self, stationarity_step: float | None = None, seconds: float = 0.0) -> Record:
        """Evaluate the model: one pass over all the data."""
        seen = self._ask(self._request(measuring=True)).measured()
        return self._record(seen, self.stationarity_step if stationarity_step is None else stationarity_step, seconds)

    def look(self, x: Tensor) -> Evaluation:
        """Loss and gradient of f at any model: one exchange that leaves no trace in the history."""
        return self._ask(Round(self.round, self.buffers, None, None, x)).measured()

    def _ask(self, request: Round) -> Exchange:
        [made] = self.driver.ask([request])
        exchange: Exchange = made
        return exchange

    def _request(self, *, training: bool = False, measuring: bool = False, stop: bool = False) -> Round:
        return Round(
            self.round,
            self.buffers,
            self.algorithm.at(self.round).broadcast(self.server) if training else None,
            self.participants(self.round) if training else None,
            self.solution if measuring else None,
            stop,
        )

    def _aggregate(self, got: Gathered) -> bool:
        """Move the server on by a round; whether its numbers are still finite (else it stays where it was)."""
        rules, share = self.algorithm.at(self.round), got.participants / self.cohorts.clients
        moved = rules.aggregate(self.server, got.mean, share, self._h.during(self.round))
        self.round += 1
        if not messages.finite(moved):
            return False
        self.server, self.buffers = moved, got.buffers
        return True

    def _record(self, seen: Evaluation, step: float, seconds: float) -> Record:
        counter = self.transport.totals()
        made = make_record(
            self.solution, seen, self.regularizer, round=self.round, step=step, counter=counter, seconds=seconds
        )
        if self.spending is not None:
            made["epsilon"] = self.spending.epsilon(self.round, counter)
        return made

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self, plan: Plan) -> Run:
        """Do the rounds that are left, and say how it ended."""
        kept = [self.solution] if plan.keep_solutions else []
        view = View(
            self, plan.rounds
        )  # not kept: a cycle would keep a GPU's recorded rounds until some later collection
        watchers = attach(plan.callbacks) if self.transport.leads else []

        def watch() -> None:
            for watcher in watchers:
                watcher(view)

        with ExitStack() as stack:
            interrupted = self._prepare(plan, stack)
            for watcher in watchers:
                stack.callback(watcher.end, view)
                watcher.begin(view)
            self._began = time.perf_counter() - self._seconds
            try:
                self.driver.run([self._task(plan, watch, interrupted, kept)], settings=plan.process_settings)
            except StoppedError:
                if not self.history:
                    raise
                self.status = "interrupted"
            except StepError as error:  # a schedule may come to it in any round
                raise StepError(f"round {self.round + 1}: {error}") from error
            else:
                self._save(plan)
                if self.status == "interrupted" and self.history[-1]["round"] != self.round:
                    # After the checkpoint, which must not know a record that an uninterrupted run does not have.
                    self._measured(self._ask(self._request(measuring=True)), plan, watch)
        return self._finish(plan, kept)

    def _prepare(self, plan: Plan, stack: ExitStack) -> threading.Event:
        """Make Ctrl-C a flag for the time of the run, where that is wanted and possible."""
        if not (plan.process_settings and process.on_main_thread()):
            return threading.Event()
        return stack.enter_context(process.interrupts())

    def _task(
        self, plan: Plan, watch: Callable[[], None], interrupted: threading.Event, kept: list[Tensor]
    ) -> Task[None]:
        """The rounds that are left, one exchange each."""
        agreed = False
        self.status = verdict(self.history[-1], self.history[0], plan.tolerance) if self.history else "completed"
        if self.history and self.history[-1]["round"] == self.round:  # a resumed run, which may have been stopped there
            self._look(plan)
            self._heed(plan)
        while self.status == "completed":
            due, training = self._due(plan), self.round < plan.rounds
            if not (due or training):
                break
            [exchange] = yield [self._request(training=training, measuring=due, stop=interrupted.is_set())]
            if due:
                self._measured(exchange, plan, watch)
            if self.status != "completed" or not training:
                break
            if agreed if self.transport.lockstep else interrupted.is_set():
                self.status = "interrupted"
                break
            got = exchange.gathered()
            agreed = got.stop
            if not self._aggregate(got):
                self.status = "diverged"
                break
            if kept:
                kept.append(self.solution)
            if plan.checkpoint_every and self.round % plan.checkpoint_every == 0:
                self._save(plan)

    def _due(self, plan: Plan) -> bool:
        """Whether the model of now has to be measured."""
        if self.history and self.history[-1]["round"] == self.round:
            return False
        return not self.history or self.round % plan.evaluate_every == 0 or self.round == plan.rounds

    def _measured(self, exchange: Exchange, plan: Plan, watch: Callable[[], None]) -> None:
        """Take a record, show it to the callbacks, and judge the run by it."""
        self._seconds = time.perf_counter() - self._began
        seen = exchange.measured()
        made = Record(self._record(seen, self.stationarity_step, self._seconds) | exchange.remarks())
        self.history.append(made)
        if self.status == "completed":
            self.status = verdict(made, self.history[0], plan.tolerance)
        self._look(plan)
        watch()
        self._heed(plan)

    def _look(self, plan: Plan) -> None:
        """Whether the model that was trained so far is dead."""
        if self.status == "completed" and self.round:
            self._dead = plan.dead(self.solution, self.buffers)
            self.status = "dead" if self._dead else self.status

    def _heed(self, plan: Plan) -> None:
        """Stop, where a callback has asked for it."""
        if self.transport.agree(self._stop) and self.status == "completed" and self.round < plan.rounds:
            self.status = "stopped"

    def _finish(self, plan: Plan, kept: list[Tensor]) -> Run:
        last, grown = self.history[-1], grew(self.history[-1], self.history[0])
        done = f"all {plan.rounds} rounds done"
        if self.status == "completed":  # after the checkpoint, which lets a run go on that grew at first
            self.status = ending(last, self.history[0])
        message = {
            "completed": done,
            "not_converged": done,
            "dead": self._dead,
            "converged": f"stationarity reached {last['stationarity']:.2e} in round {last['round']}",
            "stopped": f"stopped after round {self.round}: {self._reason or 'a callback asked for it'}",
            "interrupted": f"interrupted after round {self.round}",
            "diverged": "",
        }[self.status]
        if self.status == "diverged":
            message = (f"{grown}: " if grown else "") + plan.blame(self.round)  # it may take long to find the cause
        else:
            if grown:
                message += f", but {grown}: the steps are probably too large"
            if self.best is not None:
                message += f"; best {self.best.metric} {self.best.value:.6g} in round {self.best.round}"
            if self.transport.remark:
                message += f" ({self.transport.remark})"
        return Run(
            self.solution, self.history, self.status, message, self.round, self.server, self.transport.states,
            torch.stack(kept) if kept else None, self.buffers, self.identity, best=self.best,
        )  # fmt: skip

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save(self, plan: Plan) -> None:
        """Write the checkpoint, unless it is there; never that of a run that diverged."""
        now = self.round, len(self.history)
        if plan.checkpoint is None or self._saved == now or self.status == "diverged":
            return
        self._saved = now
        path, name = plan.checkpoint, self._name()
        held = self.transport.save(path, name)
        counter = self.transport.totals()  # nobody gets past this before all processes have come to it
        if self.transport.leads:
            seconds = time.perf_counter() - self._began
            checkpoints.save(
                path,
                checkpoints.Snapshot(
                    self.round, self.server, held, counter, seconds, self.history, self.buffers, self.best
                ),
                self.identity,
            )
        self.transport.saved(path, name)

    def resume(self, path: Path) -> None:
        """Go back to a checkpoint of this very run."""
        old = checkpoints.load(path, self.server, self.identity)
        self.round, self.server, self.buffers = old.round, old.server, old.buffers
        self.history, self.best, self._seconds = old.history, old.best, old.seconds
        self.transport.load(path, self._name())
        if self.transport.leads:  # what was counted before
            for name, value in vars(old.counter).items():
                setattr(self.transport.counter, name, value)

    def _name(self) -> str:
        """A name of this run and round, for what lies beside a checkpoint."""
        known = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        return f"{known[:16]}-{self.round}"
