"""STEM: Khanduri et al., *STEM: a stochastic two-sided momentum algorithm for federated learning*, NeurIPS 2021.

    v_{t+1} = g_i(y_t; xi) + (1 - a) (v_t - g_i(y_{t-1}; xi)),   y_{t+1} = y_t - eta v_{t+1}
    every tau steps:   y <- mean_i y_tau,   v <- mean_i v_tau

with both gradients of a step on one minibatch xi.
Symbols: eta = ``step``, tau = ``local_steps``, a = ``a``. The point before the last step is needed to go on; after
averaging it is y + eta v, so two vectors go each way and clients remember nothing. The first direction of a run is the
full local gradient. Assumptions: f smooth, h = 0, all clients take part. Not exact on heterogeneous data. Written
from memory of the paper and checked by reductions: a = 1 is FedAvg. We take y_{t-1} as averaged, too; keeping each
client's own one would be another reading, with other residuals.

Deviation. The paper decreases eta and a within a round, too (eta_t ~ t^(-1/3), a ~ eta_t^2); here a is constant and
eta may follow a schedule of the rounds, such as ``Power(start, 1/3)``. The server remembers the step that led to y.
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
    direction: Tensor  # mean last direction
    step: Tensor  # that led here; 0 at first


class Reply(NamedTuple):
    dx: Tensor  # model change
    dv: Tensor  # direction change


@dataclass(frozen=True)
class STEM(Algorithm[Server, Empty, Server, Reply]):
    """Recursive momentum at the clients and, by averaging it, at the server."""

    info: ClassVar[Info] = Info(
        "Khanduri, Sharma, Yang, Hong, Liu, Rajawat, Varshney: STEM: A stochastic two-sided momentum algorithm",
        2021,
        regularizer="none",
        participation="full",
        exact=False,
        secondary=True,
        arxiv="2106.10435",
        bibtex="khanduri2021stem",
    )
    recordable: ClassVar[bool] = False

    schedulable: ClassVar[frozenset[str]] = frozenset({"step"})

    local_steps: Count
    step: Positive
    a: Probability = 0.1

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        """Start at x0, with no direction yet."""
        return Server(x0, torch.zeros_like(x0), x0.new_zeros(1)), Empty()

    def broadcast(self, server: Server) -> Server:
        """Send the model and the direction that led to it."""
        return server

    def local_round(self, message: Server, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """Tau steps along the corrected directions."""
        y, v, step = message
        before, first = y + step * v, not bool(step.any())
        for t in range(self.local_steps):
            v = grad.full(y) if first and t == 0 else grad(y, t) + (1 - self.a) * (v - grad(before, t))
            before, y = y, y - self.step * v
        return Reply(y - message.x, v - message.direction), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Average the models and the directions."""
        return Server(server.x + reply.dx, server.direction + reply.dv, torch.full_like(server.step, self.step))

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
