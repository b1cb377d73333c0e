"""SCAFFOLD-M: Cheng, Huang, Wu & Yuan, *Momentum benefits non-IID federated learning simply and provably*, ICLR 2024.

    y_0 = x,   y_{t+1} = y_t - eta (beta (g_i(y_t) - c_i + c) + (1 - beta) m)
    c_i+ = (1/tau) sum_t g_i(y_t),   c+ = c + |S|/n mean_S(c_i+ - c_i)
    m+ = mean_S(x - y_tau) / (eta tau),   x+ = x - gamma m+

Symbols: eta = ``step``, tau = ``local_steps``, beta = ``beta``, m (the paper's g) = ``momentum``; gamma =
``server_step`` eta tau, so that beta = 1 is SCAFFOLD with option 2. Assumptions: f smooth, h = 0. Clients that sit
out keep c_i, so c = mean_i c_i always. The momentum and the control variates start at zero. Written from memory of the
paper and checked by reductions.

Deviation. The clients' common term (1 - beta) m is added by the server: in their replies it would be weighed as they
are, and grow where a cohort weighs more than on average.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, Probability
from fedcomposite.algorithms.base import Algorithm, Gradient, Info
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x: Tensor  # global model
    momentum: Tensor  # last mean direction
    c: Tensor  # mean control variate


class Client(NamedTuple):
    c: Tensor  # own control variate


class Reply(NamedTuple):
    dx: Tensor  # model change without the momentum's
    dc: Tensor  # control variate change


@dataclass(frozen=True)
class ScaffoldM(Algorithm[Server, Client, Server, Reply]):
    """SCAFFOLD with the last round's direction mixed into every local step."""

    info: ClassVar[Info] = Info(
        "Cheng, Huang, Wu, Yuan: Momentum benefits non-IID federated learning simply and provably",
        2024,
        regularizer="none",
        participation="any",
        exact=True,
        secondary=True,
        arxiv="2306.16504",
        bibtex="cheng2024momentum",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"server_step", "step"})

    local_steps: Count
    step: Positive
    server_step: Positive = 1.0
    beta: Probability = 0.1

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0 with zero momentum and control variates."""
        zero = torch.zeros_like(x0)
        return Server(x0, zero, zero), Client(zero)

    def broadcast(self, server: Server) -> Server:
        """Send the model, the momentum and the mean control variate."""
        return server

    def local_round(self, message: Server, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Tau steps along the mixed direction; the mean gradient is the new control variate."""
        x, momentum, c = message
        y, total = x, torch.zeros_like(x)
        for t in range(self.local_steps):
            g = grad(y, t)
            y = y - self.step * (self.beta * (g - client.c + c) + (1 - self.beta) * momentum)
            total = total + g
        c_new = total / self.local_steps
        dc = c_new - client.c
        return Reply(-self.step * self.local_steps * self.beta * (dc + c), dc), Client(c_new)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Models and momentum over the participants; control variates over all clients."""
        reach = self.step * self.local_steps
        momentum = (1 - self.beta) * server.momentum - reply.dx / reach
        return Server(server.x - self.server_step * reach * momentum, momentum, server.c + share * reply.dc)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
