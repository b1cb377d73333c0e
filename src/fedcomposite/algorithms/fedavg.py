"""FedAvg with a subgradient of h: McMahan et al., *Communication-efficient learning of deep networks*, AISTATS 2017.

    y_0 = x,   y_{t+1} = y_t - eta (g_i(y_t) + h'(y_t)),   x+ = x + eta_g mean_i(y_tau - x)

Symbols: h' is a subgradient of h, eta = ``step``, eta_g = ``server_step``, tau = ``local_steps``.

Assumptions: f smooth; h with finite subgradients. The subgradient is the usual adaptation to composite problems (the
original has h = 0): it yields no exact zeros, and several local steps drift by O(eta (tau - 1)) on heterogeneous data.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info
from fedcomposite.regularizers.base import Regularizer


class Model(NamedTuple):
    """Server state and message."""

    x: Tensor  # global model


class Reply(NamedTuple):
    """What a client sends."""

    dx: Tensor  # model change


@dataclass(frozen=True)
class FedAvg(Algorithm[Model, Empty, Model, Reply]):
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

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Model, Empty]:
        """Start at x0."""
        return Model(x0), Empty()

    def broadcast(self, server: Model) -> Model:
        """Send the model."""
        return server

    def local_round(self, message: Model, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """Tau subgradient steps."""
        y = message.x
        for t in range(self.local_steps):
            y = y - self.step * (grad(y, t) + h.subgradient(y))
        return Reply(y - message.x), client

    def aggregate(self, server: Model, reply: Reply, share: float, h: Regularizer) -> Model:
        """Move along the mean change."""
        return Model(server.x + self.server_step * reply.dx)

    def solution(self, server: Model, h: Regularizer) -> Tensor:
        """The global model."""
        return server.x
