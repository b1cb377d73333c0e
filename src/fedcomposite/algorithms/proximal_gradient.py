"""Proximal gradient descent, the centralised reference, run as one more method (every client sends its gradient).

    x+ = P_s(x - s mean_i g_i(x))

Symbols: s = ``step``. Assumptions: f L-smooth, step < 2/L for convex h (1/L for descent), step * rho < 1. Exact when
all clients take part; with a sample the model keeps moving by the error of sampling, as for SGD.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from torch import Tensor

from fedcomposite._validation import Positive
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Model(NamedTuple):
    x: Tensor  # global model


class Reply(NamedTuple):
    gradient: Tensor  # at the global model


@dataclass(frozen=True)
class ProximalGradient(Algorithm[Model, Empty, Model, Reply]):
    """One gradient per client and one prox per round."""

    info: ClassVar[Info] = Info(
        "Combettes, Wajs: Signal recovery by proximal forward-backward splitting",
        2005,
        regularizer="weakly convex",
        participation="any",
        exact=True,
        doi="10.1137/050626090",
        bibtex="combettes2005signal",
        exact_partial=False,
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"step"})
    linear_replies: ClassVar[bool] = True

    step: Positive

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """One step per round, 1/L."""
        return cls(step=2 * round_step(L, 2 * rho))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Model, Empty]:
        return Model(x0), Empty()

    def broadcast(self, server: Model) -> Model:
        return server

    def local_round(self, message: Model, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        return Reply(grad(message.x, 0)), client

    def aggregate(self, server: Model, reply: Reply, share: float, h: Regularizer) -> Model:
        return Model(h.prox(server.x - self.step * reply.gradient, self.step))

    def solution(self, server: Model, h: Regularizer) -> Tensor:
        return server.x
