"""S-DANE: Jiang, Rodomanov & Stich, *Stabilized proximal-point methods for federated optimization*, 2024, Algorithm 1.

    exchange 1:  g = mean_S grad f_i(v)
    exchange 2:  x_i ~ argmin_y f_i(y) + <g - grad f_i(v), y> + (lambda/2) ||y - v||^2,   x+ = mean_S x_i
                 v+ = argmin_y mean_S [<grad f_i(x_i), y> + (mu/2) ||y - x_i||^2] + (lambda/2) ||y - v||^2
                    = (lambda v + mu x+ - mean_S grad f_i(x_i)) / (lambda + mu)

DANE with a prox centre v of its own: with exact argmins and S all clients, v+ = x+, which is DANE; the centre is what
lets a rough argmin do, ||grad F_i(x_i)|| <= (lambda/2) ||x_i - v|| on average.

Symbols: 1/lambda = ``prox_step``, mu = ``mu``. Assumptions: f convex and smooth, h = 0. Theory: lambda = 2 delta, where
delta bounds how much the Hessians of the clients differ, and a rate in lambda/mu; with a sample of the clients there is
an error of sampling. Clients weigh the same. The argmin is ``local_steps`` proximal gradient steps from v, as in the
authors' code,

    y+ = (y - step (g_i(y) + g - grad f_i(v)) + step lambda v) / (1 + step lambda)

A step of the method is two exchanges with the same clients and counts as two rounds. What an exchange does not use is
sent empty.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, ZeroOrMore
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x: Tensor  # mean of the local models
    v: Tensor  # prox centre
    gradient: Tensor  # at v
    phase: Tensor  # 0: gradients, 1: local steps


class Message(NamedTuple):
    v: Tensor  # prox centre
    gradient: Tensor  # at v, or nothing


class Reply(NamedTuple):
    gradient: Tensor  # at v, or at the local model
    dx: Tensor  # local model less v


@dataclass(frozen=True)
class SDANE(Algorithm[Server, Empty, Message, Reply]):
    """Local proximal points around a centre that takes extragradient steps.

    Parameters
    ----------
    local_steps : int
        Gradient steps of a local argmin.
    step : float
        Their size.
    prox_step : float
        1/lambda.
    mu : float
        Strong convexity of the clients' losses, as far as it is known.
    """

    info: ClassVar[Info] = Info(
        "Jiang, Rodomanov, Stich: Stabilized proximal-point methods for federated optimization",
        2024,
        regularizer="none",
        participation="any",
        exact=True,
        exact_partial=False,
        uniform_only=True,
        arxiv="2407.07084",
        bibtex="jiang2024stabilized",
    )
    recordable: ClassVar[bool] = False
    exchanges: ClassVar[int] = 2

    schedulable: ClassVar[frozenset[str]] = frozenset({"prox_step", "step"})

    local_steps: Count
    step: Positive
    prox_step: Positive
    mu: ZeroOrMore = 0.0

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Lambda = L, which is as much as the Hessians of convex clients can differ."""
        return cls(local_steps=local_steps, step=round_step(L, rho), prox_step=2 * round_step(L, rho))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        """Start with model and centre at x0."""
        return Server(x0, x0, torch.zeros_like(x0), x0.new_zeros(1, dtype=torch.int64)), Empty()

    def broadcast(self, server: Server) -> Message:
        """Send the centre, and the gradient there once it is known."""
        return Message(server.v, server.gradient if bool(server.phase) else server.gradient[:0])

    def local_round(self, message: Message, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """The gradient at the centre, or the local argmin and the gradient there."""
        v, gradient = message
        if not gradient.shape[-1]:
            return Reply(grad.full(v), v[..., :0]), client
        weight, away, y = self.step / self.prox_step, gradient - grad.full(v), v
        for k in range(self.local_steps):
            y = (y - self.step * (grad(y, k) + away) + weight * v) / (1 + weight)
        return Reply(grad.full(y), y - v), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Take the mean gradient, or move model and centre."""
        v = server.v
        if not bool(server.phase):
            return server._replace(gradient=reply.gradient, phase=1 - server.phase)
        weight = self.prox_step * self.mu
        moved = v + (weight * reply.dx - self.prox_step * reply.gradient) / (1 + weight)
        return Server(v + reply.dx, moved, torch.zeros_like(v), 1 - server.phase)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        """The mean of the local models."""
        return server.x
