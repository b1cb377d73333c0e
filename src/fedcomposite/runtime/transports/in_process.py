"""Clients on this machine: all of them, or this process's share, with their data and their states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite.aggregators import Aggregator
from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.privacy import ClientLevel, Counters, Privacy
from fedcomposite.problems import Batches, ClientGradients, Counter, Evaluation, Problem, Smooth
from fedcomposite.problems.base import RoundInputs
from fedcomposite.problems.private import gradients
from fedcomposite.runtime import messages, process, states
from fedcomposite.runtime.counted import Counted
from fedcomposite.runtime.distributed import Alone, Group
from fedcomposite.runtime.protection import noised_mean
from fedcomposite.runtime.protocol import Round
from fedcomposite.runtime.transports.base import Gathered


class LocalTransport(ABC):
    """The clients of ``problem`` that this process works for; subclasses say how a round of theirs is carried out.

    In a ``group`` of processes it has the rows of this process's clients, which are consecutive.
    """

    def __init__(
        self,
        problem: Problem,
        algorithm: AnyAlgorithm,
        *,
        batches: Batches,
        dtype: torch.dtype,
        device: torch.device,
        cohort: int,
        replace: bool = False,
        state_dir: str | Path | None = None,
        memory_limit: float | None = None,
        group: Group | Alone | None = None,
        privacy: Privacy | None = None,
        aggregator: Aggregator | None = None,
    ) -> None:
        self.problem, self.algorithm, self.batches = problem, algorithm, batches
        self.group = group or Alone()
        self.lockstep = self.group.size > 1
        self.clients = n = len(problem.silos)
        self.span = self.group.span(n)
        self.smooth: Smooth = self.group.share(problem, dtype, device)
        self.counter = Counter()
        self.h = Counted(problem.regularizer, self.counter)
        self._limits = state_dir, memory_limit
        self._everyone = cohort == n and not replace
        self._cohort = cohort
        weights = problem.weights * n
        self._weights = None if problem.weighting == "uniform" else torch.from_numpy(weights).to(self.smooth.device)
        self._expect = 1
        self.privacy, self.aggregator, self.source = privacy, aggregator, Counters(batches.seed)
        self._asked = 0  # queries of each participant in the round of now
        self.rows: states.ClientStates

    def begin(self, client: NamedTuple) -> None:
        """Put every client into its state before the first round."""
        folder, limit = self._limits
        self.rows = states.ClientStates(client, self.span.stop - self.span.start, folder=folder, limit=limit)

    # -- an exchange ------------------------------------------------------------------------------------------------

    def ask(self, requests: Sequence[Round]) -> list[LocalExchange]:
        """Nothing is on its way here: what is asked for is done when it is asked for."""
        return [LocalExchange(self, request) for request in requests]

    def measure(self, model: Tensor, buffers: Tensor) -> Evaluation:
        """Loss, gradient and counts over all the data: one pass."""
        return self.group.merge(self.smooth.during(RoundInputs(buffers[None])).evaluate(model))

    def gather(self, request: Round) -> Gathered:
        """One round of the participants."""
        who, message = request.participants, request.message
        assert who is not None
        assert message is not None
        first, last = np.searchsorted(who, np.asarray(self.span, np.uint64)).tolist()
        mine, place = who[first:last] - np.uint64(self.span.start), (first, len(who))
        self._asked = 1 if isinstance(self.privacy, ClientLevel) else 0
        if len(mine):
            replies, buffers = self._carry_out(mine, message, request, place)
            decoded = self.algorithm.at(request.round).decode(replies)
            self.counter.bytes_up += messages.sent(replies, clients=True) + buffers.nbytes
        else:
            decoded, buffers = self._nothing(message, request, len(who))
        weights = None if self._weights is None else self._weights[torch.from_numpy(who.astype(np.int64))]
        self.counter.queries += self._asked
        self.counter.most_queries = max(self.counter.most_queries, self._asked)
        if self.aggregator is not None:
            together = self.aggregator.rule(buffers) if buffers.numel() else buffers[0]
            mean, stop = self.aggregator.combine(decoded), request.stop
        else:
            mean, together, stop = self.group.mean(decoded, buffers, weights, place, request.stop)
        if isinstance(self.privacy, ClientLevel):
            mean = noised_mean(decoded, self.privacy, self.source, request.round)
        self.counter.bytes_down += len(mine) * (messages.sent(message) + together.nbytes)
        return Gathered(mean, together, len(who), stop)

    @abstractmethod
    def _carry_out(
        self, who: rng.Ints, message: NamedTuple, request: Round, place: tuple[int, int]
    ) -> tuple[NamedTuple, Tensor]:
        """Stacked replies and buffers of some of this process's clients; it keeps their new states."""

    def _nothing(self, message: NamedTuple, request: Round, cohort: int) -> tuple[NamedTuple, Tensor]:
        """Decoded replies and buffers of no client; the first client here does the round for their shape alone."""
        grad = self.gradients(np.zeros(1, np.uint64), request.round, request.buffers, (0, cohort), Counter())
        rules = self.algorithm.at(request.round)
        h = self.problem.regularizer.during(request.round)
        replies, _ = rules.local_round(messages.stack(message, 1), self.rows.take([0]), grad, h)
        decoded: NamedTuple = messages.each(rules.decode(replies), lambda t: t[:0])
        return decoded, grad.buffers[:0]

    def gradients(
        self,
        who: rng.Ints,
        round: int,
        buffers: Tensor,
        place: tuple[int, int] | None = None,
        counter: Counter | None = None,
        *,
        stacked: bool = True,
    ) -> ClientGradients:
        """The gradient oracle of some of this process's clients in one round."""
        return gradients(
            self.smooth, who, round, self.batches, counter or self.counter, self.privacy, self.source,
            stacked=stacked, expect=self._expect, place=place, buffers=buffers,
        )  # fmt: skip

    # -- around the rounds ------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this is the first process."""
        return self.group.rank == 0

    def totals(self) -> Counter:
        """Work and bytes of all processes."""
        return self.group.totals(self.counter, self.smooth.device)

    def agree(self, stop: bool) -> bool:
        """Whether any process wants the run to end."""
        return self.group.agree(stop, self.smooth.device)

    @property
    def threads(self) -> int | None:
        """Threads that fit the size of a local step; None leaves the setting alone."""
        per = self.batches.size or int(self.smooth.sizes.max())
        return process.fitting_threads(self.smooth.reach(per, self._at_once), self.smooth.device)

    @property
    def _at_once(self) -> int:
        """Clients that one operation works on."""
        return self._cohort

    @contextmanager
    def running(self) -> Iterator[None]:
        """Settings of the process under which rounds are fastest: threads, and memory that is not given back."""
        with (
            process.threads(self.threads),
            process.keep_memory() if self.smooth.device.type == "cpu" else nullcontext(),
        ):
            yield

    def save(self, path: Path, name: str) -> NamedTuple:
        """Hand the states to a checkpoint, or write them beside it."""
        held: NamedTuple = self.rows.save(path, name, self.span.start, (self.group.rank, self.group.size))
        return held

    def saved(self, path: Path, name: str) -> None:
        """Remove what the last checkpoint had beside it."""
        if self.leads:
            states.tidy(path, name)
        self.group.wait()

    def load(self, path: Path, name: str) -> None:
        """Take the rows of this process's clients."""
        self.rows.load(path, name, self.span.start)

    @property
    def states(self) -> Any:
        """Tensors ``(n, ...)``; the store itself where they are very large."""
        return self.rows.everyone() if self.rows.small or self._everyone else self.rows

    @property
    def remark(self) -> str:
        """What the message of a run that ended says beside why; nothing here."""
        return ""


@dataclass(frozen=True)
class LocalExchange:
    """An exchange that is carried out part by part, as the driver asks."""

    _transport: LocalTransport
    _request: Round

    def measured(self) -> Evaluation:
        """One pass over all the data."""
        assert self._request.model is not None
        return self._transport.measure(self._request.model, self._request.buffers)

    def gathered(self) -> Gathered:
        """One round of the participants."""
        return self._transport.gather(self._request)

    def remarks(self) -> dict[str, int]:
        """Nothing: everybody is always here."""
        return {}
