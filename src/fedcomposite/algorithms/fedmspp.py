"""FedMSPP: Yuan & Li, *On convergence of FedProx: local dissimilarity invariant bounds, non-smoothness and beyond*,
NeurIPS 2022 (Algorithm 1).

    client:  x_i = argmin_y f_i(y; B) + h(y) + ||y - x||^2 / (2 eta), inexactly, B one minibatch of the round
    server:  x+ = x + mean_S(x_i - x)

Symbols: eta = ``prox_step``. The local problem takes steps y <- y - s (g_i(y; B) + h'(y) + (y - x) / eta) from x with
s = ``step`` and h' a subgradient: ``local_steps`` of them, or as many as bring the norm of that direction to
``tolerance`` (at most ``local_steps``, 10000 if not given). The minibatch is the same in all inner steps, which is the
whole difference to FedProx: with full gradients both coincide.

Assumptions: f G-Lipschitz, and either smooth or non-smooth and weakly convex (then eta = c / sqrt(T) with c below half
the inverse of its modulus); h with finite subgradients; any participation, in the paper with replacement.

Known limit. As for FedProx, a constant eta leaves an error of O(eta) on heterogeneous data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from torch import Tensor

from fedcomposite._validation import Count, Positive, ZeroOrMore, formerly
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info, round_step
from fedcomposite.algorithms.fedprox import descend, gradient_tolerance
from fedcomposite.regularizers.base import Regularizer


class Model(NamedTuple):
    x: Tensor  # global model


class Reply(NamedTuple):
    dx: Tensor  # model change


@formerly(inner_steps="local_steps", inner_step="step")
@dataclass(frozen=True)
class FedMSPP(Algorithm[Model, Empty, Model, Reply]):
    """Averaged inexact proximal points of the clients' losses on one minibatch each."""

    info: ClassVar[Info] = Info(
        "Yuan, Li: On convergence of FedProx: local dissimilarity invariant bounds, non-smoothness and beyond",
        2022,
        regularizer="subgradient",
        participation="any",
        exact=False,
        nonsmooth_loss=True,
        arxiv="2206.05187",
        bibtex="yuan2022convergence",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"step", "prox_step"})

    prox_step: Positive
    step: Positive
    local_steps: Count | None = None
    tolerance: ZeroOrMore | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_steps is None and self.tolerance is None:
            raise ValueError("FedMSPP needs local_steps (an integer >= 1), or tolerance (a number >= 0), or both")

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Eta is the step of a round, and the inner step the safe one."""
        eta = round_step(L, rho)
        return cls(prox_step=eta, step=1 / (L + 1 / eta), local_steps=local_steps)

    @classmethod
    def from_theory(
        cls, L: float, G: float, rounds: int, cohort: int, batch: int, local_steps: int | None = None
    ) -> Self:
        """Theorem 3, for L-smooth and G-Lipschitz losses, T ``rounds``, I = ``cohort`` clients, b = ``batch`` samples.

        eta = min(T^(-1/3), sqrt(b I / T)) / (8L), and each local problem within epsilon of its minimum, with

            epsilon = min(G^2 eta / (2 (L eta + 1)), G^2 eta / (8 b^2), L^2 G^2 eta^3 / (2 b I (L eta + 1)))

        Since eta is the same in all rounds, so is epsilon. The tolerance is
        :func:`fedcomposite.algorithms.fedprox.gradient_tolerance` of it.
        """
        eta = min(rounds ** (-1 / 3), math.sqrt(batch * cohort / rounds)) / (8 * L)
        epsilon = min(
            G**2 * eta / (2 * (L * eta + 1)),
            G**2 * eta / (8 * batch**2),
            L**2 * G**2 * eta**3 / (2 * batch * cohort * (L * eta + 1)),
        )
        return cls(eta, 1 / (L + 1 / eta), local_steps, gradient_tolerance(epsilon, eta, L))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Model, Empty]:
        return Model(x0), Empty()

    def broadcast(self, server: Model) -> Model:
        return server

    def local_round(self, message: Model, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """Steps towards the prox of the client's loss on the round's one minibatch."""
        x = message.x

        def direction(y: Tensor, t: int) -> Tensor:
            return grad(y, 0) + h.subgradient(y) + (y - x) / self.prox_step

        return Reply(descend(direction, x, self.step, self.local_steps, self.tolerance) - x), client

    def aggregate(self, server: Model, reply: Reply, share: float, h: Regularizer) -> Model:
        return Model(server.x + reply.dx)

    def solution(self, server: Model, h: Regularizer) -> Tensor:
        return server.x
