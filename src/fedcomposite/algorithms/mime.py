"""Mime: Karimireddy et al., *Mime: mimicking centralized stochastic algorithms in federated learning*, 2020.

    exchange 1:  c = mean_S grad f_i(x),   m+ = (1 - beta) c + beta m
    exchange 2:  y_0 = x,   y_{t+1} = y_t - eta ((1 - beta) (g_i(y_t) - g_i(x) + c) + beta m),   x+ = mean_S y_tau

Symbols: eta = ``step``, tau = ``local_steps``, beta = ``beta``, m = ``momentum``; both g_i of a step use one minibatch;
the base method is SGD with momentum. Assumptions: f smooth, h = 0; clients remember nothing. Exact when all clients
take part; with a sample the error is that of sampling. Written from memory of the paper and checked by reductions.

Every step of the method is two exchanges with the same clients, so a step counts as two rounds. The direction equals
(1 - beta) (g_i(y_t) - g_i(x)) + m+, so m+ alone goes down with x in the second exchange; in the first nothing but x
does. What an exchange does not use is sent empty.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import annotated_types as at
import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x: Tensor  # global model
    momentum: Tensor  # mean of past gradients
    phase: Tensor  # 0: gradients, 1: local steps


class Reply(NamedTuple):
    gradient: Tensor  # at the global model
    dx: Tensor  # model change


@dataclass(frozen=True)
class Mime(Algorithm[Server, Empty, Server, Reply]):
    """Local steps with variance-reduced gradients and the server's momentum."""

    info: ClassVar[Info] = Info(
        "Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Mime: Mimicking centralized stochastic algorithms",
        2020,
        regularizer="none",
        participation="any",
        exact=True,
        secondary=True,
        arxiv="2008.03606",
        bibtex="karimireddy2020mime",
        exact_partial=False,
    )
    recordable: ClassVar[bool] = False
    exchanges: ClassVar[int] = 2

    schedulable: ClassVar[frozenset[str]] = frozenset({"step"})

    local_steps: Count
    step: Positive
    beta: Annotated[float, at.Ge(0), at.Lt(1)] = 0.9

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        """Start at x0 with zero momentum."""
        return Server(x0, torch.zeros_like(x0), x0.new_zeros(1, dtype=torch.int64)), Empty()

    def broadcast(self, server: Server) -> Server:
        """Send the model, and the new momentum once it is known."""
        return server if bool(server.phase) else server._replace(momentum=server.momentum[:0])

    def local_round(self, message: Server, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """A full gradient, or tau corrected steps."""
        x, momentum, phase = message
        if not bool(phase.any()):
            return Reply(grad.full(x), x[..., :0]), client
        y = x
        for t in range(self.local_steps):
            y = y - self.step * ((1 - self.beta) * (grad(y, t) - grad(x, t)) + momentum)
        return Reply(x[..., :0], y - x), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Average the gradients into the momentum, or the models."""
        x, momentum, phase = server
        if not bool(phase):
            return Server(x, (1 - self.beta) * reply.gradient + self.beta * momentum, 1 - phase)
        return Server(x + reply.dx, momentum, 1 - phase)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
