"""FedAvg with a subgradient of h: McMahan et al., *Communication-efficient learning of deep networks*, AISTATS 2017.

    y_0 = x,   y_{t+1} = y_t - eta (g_i(y_t) + h'(y_t)),   x+ = x + eta_g mean_i(y_tau - x)

Symbols: h' is a subgradient of h, eta = ``step``, eta_g = ``server_step``, tau = ``local_steps``.

Assumptions: f smooth; h with finite subgradients. The subgradient is the usual adaptation to composite problems (the
original has h = 0): it yields no exact zeros, and several local steps drift by O(eta (tau - 1)) on heterogeneous data.

With a share of zeros for h (``sparsity=0.9``) clients train the weights that are not zero and the server keeps the
largest ones, fewer from round to round: gradual magnitude pruning (Zhu & Gupta 2018), with messages sparse both ways.

``momentum`` is a heavy ball within a round: m = momentum m + (1 - momentum) g, the first m is the first g, and m takes
the place of g in every local step. It is made anew in each round, so clients remember nothing. ``server_optimizer`` is
one of :mod:`fedcomposite.algorithms.optimizers` (FedOpt), for the mean change of a round.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info
from fedcomposite.algorithms.optimizers import Decay, Optimizer, OptimizerState, moved, nothing
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x: Tensor  # global model
    first: Tensor  # optimizer's moments, empty without
    second: Tensor  # the same
    rounds: Tensor  # the same


class Model(NamedTuple):
    x: Tensor  # global model


class Reply(NamedTuple):
    dx: Tensor  # model change


@dataclass(frozen=True)
class FedAvg(Algorithm[Server, Empty, Model, Reply]):
    """Local subgradient steps and averaging of models."""

    info: ClassVar[Info] = Info(
        "McMahan, Moore, Ramage, Hampson, Arcas: Communication-efficient learning of deep networks",
        2017,
        regularizer="subgradient",
        participation="any",
        exact=False,
        arxiv="1602.05629",
        bibtex="mcmahan2017communication",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"server_step", "step"})

    local_steps: Count
    step: Positive
    server_step: Positive = 1.0
    momentum: Decay = 0.0
    server_optimizer: Optimizer | None = None

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        optimizer = self.server_optimizer
        return Server(x0, *(nothing(x0) if optimizer is None else optimizer.init(x0))), Empty()

    def broadcast(self, server: Server) -> Model:
        return Model(server.x)

    def local_round(self, message: Model, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        y, direction = message.x, h.descent(message.x)
        m = y
        for t in range(self.local_steps):
            g = direction(y, grad(y, t))
            m = self.momentum * m + (1 - self.momentum) * g if t and self.momentum else g
            y = y - self.step * m
        return Reply(y - message.x), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Move along the mean change."""
        if self.server_optimizer is None:
            return server._replace(x=h.nearest(server.x + self.server_step * reply.dx))
        reach, moments = self.step * self.local_steps, OptimizerState(*server[1:])
        x, _, moments = moved(self.server_optimizer, server.x, reply.dx, moments, reach, self.server_step)
        return Server(h.nearest(x), *moments)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
