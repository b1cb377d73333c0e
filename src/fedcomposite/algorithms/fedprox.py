"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar & Smith, *Federated optimization in heterogeneous networks*, MLSys
2020; analysed without a bound on heterogeneity by Yuan & Li, *On convergence of FedProx*, NeurIPS 2022.

    client:  x_i = argmin_y f_i(y) + h(y) + ||y - x||^2 / (2 eta), inexactly
    server:  x+ = x + mean_S(x_i - x)

Symbols: eta = ``prox_step`` = 1/mu; ``prox_step=None`` is mu = 0, which is FedAvg. The local problem takes steps
y <- y - s (g_i(y) + h'(y) + (y - x) / eta) from x with s = ``step`` and h' a subgradient, each on its own
minibatch: ``local_steps`` of them, or as many as bring the norm of that direction to ``tolerance`` (at most
``local_steps``, 10000 if not given). Assumptions: f smooth, h with finite subgradients, any participation.

Known limit. The clients' prox points average to a fixed point that is off by O(eta) on heterogeneous data.

Deviation. Clients are averaged uniformly and all do the same work (the authors' code weights by samples and lets
stragglers stop early).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, ZeroOrMore, formerly
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer

CAP = 10_000
"""Inner steps after which a local problem with a tolerance gives up."""


def descend(
    direction: Callable[[Tensor, int], Tensor], x: Tensor, step: float, steps: int | None, tolerance: float | None
) -> Tensor:
    """``steps`` moves y <- y - step direction(y, t) from x; a client stops when its direction is <= ``tolerance``."""
    y, going = x, torch.ones_like(x[..., :1], dtype=torch.bool)
    for t in range(CAP if steps is None else steps):
        d = direction(y, t)
        if tolerance is not None:
            # Stacked clients finish at different times: those that are done stay where they are.
            going = going & (torch.linalg.vector_norm(d, dim=-1, keepdim=True) > tolerance)
            if not going.any():
                break
            d = torch.where(going, d, 0.0)
        y = y - step * d
    return y


def gradient_tolerance(epsilon: float, prox_step: float, L: float) -> float:
    """sqrt(2 m epsilon), m = 1/eta - L: a gradient this small means that f_i + ||. - x||^2 / (2 eta), which is
    m-strongly convex for any L-smooth f_i, is within epsilon of its minimum.
    """
    return math.sqrt(2 * (1 / prox_step - L) * epsilon)


class Model(NamedTuple):
    x: Tensor  # global model


class Reply(NamedTuple):
    dx: Tensor  # model change


@formerly(inner_steps="local_steps", inner_step="step")
@dataclass(frozen=True)
class FedProx(Algorithm[Model, Empty, Model, Reply]):
    """Averaged inexact proximal points of the clients' losses."""

    info: ClassVar[Info] = Info(
        "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous networks",
        2020,
        regularizer="subgradient",
        participation="any",
        exact=False,
        arxiv="1812.06127",
        bibtex="li2020federated",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"step", "prox_step"})

    prox_step: Positive | None
    step: Positive
    local_steps: Count | None = None
    tolerance: ZeroOrMore | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_steps is None and self.tolerance is None:
            raise ValueError("FedProx needs local_steps (an integer >= 1), or tolerance (a number >= 0), or both")

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Eta is the step of a round, and the inner step the safe one."""
        eta = round_step(L, rho)
        return cls(prox_step=eta, step=1 / (L + 1 / eta), local_steps=local_steps)

    @classmethod
    def from_theory(cls, L: float, G: float, rounds: int, cohort: int, local_steps: int | None = None) -> Self:
        """Theorem 1 of Yuan & Li, for L-smooth and G-Lipschitz losses, T ``rounds`` and I = ``cohort`` clients in each.

        eta = min(T^(-1/3), sqrt(I/T)) / (3L), and each local problem within epsilon of its minimum, with

            epsilon = min(2 L^2 G^2 eta^3 / I^2, G^2 eta / (2 I)) / (L eta + 1)

        Since eta is the same in all rounds, so is epsilon. The tolerance is :func:`gradient_tolerance` of it.
        """
        eta = min(rounds ** (-1 / 3), math.sqrt(cohort / rounds)) / (3 * L)
        epsilon = min(2 * L**2 * G**2 * eta**3 / cohort**2, G**2 * eta / (2 * cohort)) / (L * eta + 1)
        return cls(eta, 1 / (L + 1 / eta), local_steps, gradient_tolerance(epsilon, eta, L))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Model, Empty]:
        return Model(x0), Empty()

    def broadcast(self, server: Model) -> Model:
        return server

    def local_round(self, message: Model, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """Steps towards the prox of the client's loss, each on a fresh minibatch."""
        x, mu = message.x, 0.0 if self.prox_step is None else 1 / self.prox_step

        def direction(y: Tensor, t: int) -> Tensor:
            return grad(y, t) + h.subgradient(y) + mu * (y - x)

        return Reply(descend(direction, x, self.step, self.local_steps, self.tolerance) - x), client

    def aggregate(self, server: Model, reply: Reply, share: float, h: Regularizer) -> Model:
        return Model(server.x + reply.dx)

    def solution(self, server: Model, h: Regularizer) -> Tensor:
        return server.x
