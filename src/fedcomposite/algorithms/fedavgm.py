"""FedAvg-M: Cheng, Huang, Wu & Yuan, *Momentum benefits non-IID federated learning simply and provably*, ICLR 2024.

    y_0 = x,   y_{t+1} = y_t - eta (beta g_i(y_t) + (1 - beta) m)
    m+ = mean_i(x - y_tau) / (eta tau),   x+ = x - gamma m+

Symbols: eta = ``step``, tau = ``local_steps``, beta = ``beta``, m (the paper's g) = ``momentum``; gamma =
``server_step`` eta tau, so that beta = 1 is FedAvg. The momentum acts inside the local steps: it is not the server's
heavy ball that other packages call FedAvgM. Assumptions: f smooth, h = 0, all clients take part. The drift on
heterogeneous data is about beta times FedAvg's. Written from memory of the paper and checked by reductions. The
momentum starts at zero.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, Probability
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x: Tensor  # global model
    momentum: Tensor  # last mean direction


class Reply(NamedTuple):
    dx: Tensor  # model change


@dataclass(frozen=True)
class FedAvgM(Algorithm[Server, Empty, Server, Reply]):
    """FedAvg with the last round's direction mixed into every local step."""

    info: ClassVar[Info] = Info(
        "Cheng, Huang, Wu, Yuan: Momentum benefits non-IID federated learning simply and provably",
        2024,
        regularizer="none",
        participation="full",
        exact=False,
        secondary=True,
        arxiv="2306.16504",
        bibtex="cheng2024momentum",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"server_step", "step"})

    local_steps: Count
    step: Positive
    server_step: Positive = 1.0
    beta: Probability = 0.1

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        """Start at x0 with zero momentum."""
        return Server(x0, torch.zeros_like(x0)), Empty()

    def broadcast(self, server: Server) -> Server:
        """Send the model and the momentum."""
        return server

    def local_round(self, message: Server, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """Tau steps along the mixed direction."""
        y = message.x
        for t in range(self.local_steps):
            y = y - self.step * (self.beta * grad(y, t) + (1 - self.beta) * message.momentum)
        return Reply(y - message.x), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Move along the mean change, which is also the next momentum."""
        return Server(server.x + self.server_step * reply.dx, -reply.dx / (self.step * self.local_steps))

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
