"""One client after another, each as at a real site: slow, and names a client that fails."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite._faults import FailedError
from fedcomposite.regularizers.base import StepError
from fedcomposite.runtime import messages
from fedcomposite.runtime.client import Client, Outcome
from fedcomposite.runtime.history import DivergenceWarning
from fedcomposite.runtime.protocol import Round
from fedcomposite.runtime.transports.in_process import LocalTransport


class ClientError(FailedError):
    """A client failed; the message names it and the round."""


class Loop(LocalTransport):
    """Clients with vectors ``(d,)``."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._clients: dict[int, Client] = {}

    def _client(self, i: int) -> Client:
        if i not in self._clients:
            h = self.problem.regularizer
            self._clients[i] = Client(self.algorithm, self.smooth, h, self.batches, self.counter, number=i,
                                       privacy=self.privacy, source=self.source)  # fmt: skip
        return self._clients[i]

    def _carry_out(
        self, who: rng.Ints, message: NamedTuple, request: Round, place: tuple[int, int]
    ) -> tuple[NamedTuple, Tensor]:
        done = [self._one(int(i), message, request, (at, place[1])) for at, i in enumerate(who, place[0])]
        states = [outcome.state for outcome in done]
        self._asked = max(self._asked, *(outcome.queries for outcome in done))
        new = type(states[0])(*map(torch.stack, zip(*states, strict=True)))
        self.rows.put(None if self._everyone else who, new)
        replies: list[Any] = [outcome.reply for outcome in done]
        stacked: NamedTuple = type(replies[0])(*map(torch.stack, zip(*replies, strict=True)))
        return stacked, torch.stack([outcome.buffers for outcome in done])

    def _one(self, i: int, message: NamedTuple, request: Round, place: tuple[int, int]) -> Outcome:
        state = messages.each(self.rows.take([i]), lambda t: t[0])
        number = i + self.span.start
        name, r = f"{self.problem.silos.names[number]} (number {number})", request.round + 1
        try:
            done = self._client(i).train(message, state, request.round, place, request.buffers)
        except StepError:
            raise  # the method's fault, not this client's
        except Exception as error:
            raise ClientError(f"{name} failed in round {r}: {error}") from error
        if not (messages.finite(done.reply) and messages.finite(done.state)):
            warnings.warn(f"{name} sent NaN or infinity in round {r}", DivergenceWarning, stacklevel=8)
        return done

    @property
    def _at_once(self) -> int:
        return 1
