"""MimeLite: Karimireddy et al., *Mime: mimicking centralized stochastic algorithms in federated learning*, 2020.

Mime without its correction of the local gradients, and so with one exchange per round:

    y_0 = x,   y_{t+1} = y_t - eta ((1 - beta) g_i(y_t) + beta m),   m frozen during the local steps
    x+ = mean_S y_tau,   m+ = (1 - beta) mean_S grad f_i(x) + beta m

Symbols: eta = ``step``, tau = ``local_steps``, beta = ``beta``, m = ``momentum``; the base method is SGD with
momentum. Assumptions: f smooth, h = 0; clients remember nothing. Not exact on heterogeneous data. Written from memory
of the paper and checked by reductions (beta = 0 is FedAvg).
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


class Reply(NamedTuple):
    dx: Tensor  # model change
    gradient: Tensor  # at the global model


@dataclass(frozen=True)
class MimeLite(Algorithm[Server, Empty, Server, Reply]):
    """Local steps with the server's momentum, which only full gradients at the global model update."""

    info: ClassVar[Info] = Info(
        "Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Mime: Mimicking centralized stochastic algorithms",
        2020,
        regularizer="none",
        participation="any",
        exact=False,
        secondary=True,
        arxiv="2008.03606",
        bibtex="karimireddy2020mime",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"step"})

    local_steps: Count
    step: Positive
    beta: Annotated[float, at.Ge(0), at.Lt(1)] = 0.9

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        """Start at x0 with zero momentum."""
        return Server(x0, torch.zeros_like(x0)), Empty()

    def broadcast(self, server: Server) -> Server:
        """Send the model and the momentum."""
        return server

    def local_round(self, message: Server, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """Tau steps with frozen momentum, and one full gradient."""
        y = message.x
        for t in range(self.local_steps):
            y = y - self.step * ((1 - self.beta) * grad(y, t) + self.beta * message.momentum)
        return Reply(y - message.x, grad.full(message.x)), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Average the models, and the gradients into the momentum."""
        return Server(server.x + reply.dx, (1 - self.beta) * reply.gradient + self.beta * server.momentum)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
