"""Acc-S-DANE: Jiang, Rodomanov & Stich, *Stabilized proximal-point methods for federated optimization*, 2024, Alg. 2.

With A = 0, B = 1 and v = x at the start, and a the positive root of lambda a^2 = (A + a) B,

    exchange 1:  y = (A x + a v) / (A + a),   g = mean_i grad f_i(y)
    exchange 2:  x_i ~ argmin_u f_i(u) + <g - grad f_i(y), u> + (lambda/2) ||u - y||^2,   x+ = mean_i x_i
                 v+ = argmin_u a mean_i [<grad f_i(x_i), u> + (mu/2) ||u - x_i||^2] + (B/2) ||u - v||^2
                    = (B v + a mu x+ - a mean_i grad f_i(x_i)) / (B + a mu)
                 A+ = A + a,   B+ = B + a mu

Monteiro and Svaiter's acceleration of :class:`SDANE`, which is the same with y = v and a = B/lambda in every step.

Symbols: 1/lambda = ``prox_step``, mu = ``mu``. Assumptions: f convex and smooth, h = 0. Theory: with lambda = 2 delta
(delta bounds how much the Hessians of the clients differ), argmins that are good enough and all clients,
f(x) - f* <= ||x0 - x*||^2 / (2 A), and A grows like r^2 / (4 lambda) over r steps, and geometrically with mu > 0. The
argmin is ``local_steps`` proximal gradient steps from y, as in :class:`SDANE`. The paper also samples clients, with a
lambda that grows with what that costs; here all take part, since a grows and multiplies the error of a sample.

A step of the method is two exchanges with the same clients and counts as two rounds. What an exchange does not use is
sent empty.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, ZeroOrMore
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x: Tensor  # mean of the local models
    v: Tensor  # second sequence
    gradient: Tensor  # at y
    weights: Tensor  # A and B
    phase: Tensor  # 0: gradients, 1: local steps


class Message(NamedTuple):
    y: Tensor  # prox centre
    gradient: Tensor  # at y, or nothing


class Reply(NamedTuple):
    gradient: Tensor  # at y, or at the local model
    dx: Tensor  # local model less y


@dataclass(frozen=True)
class AccSDANE(Algorithm[Server, Empty, Message, Reply]):
    """Accelerated local proximal points.

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
        participation="full",
        exact=True,
        arxiv="2407.07084",
        bibtex="jiang2024stabilized",
    )
    recordable: ClassVar[bool] = False
    exchanges: ClassVar[int] = 2

    local_steps: Count
    step: Positive
    prox_step: Positive
    mu: ZeroOrMore = 0.0

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Lambda = L, which is as much as the Hessians of convex clients can differ."""
        return cls(local_steps=local_steps, step=round_step(L, rho), prox_step=2 * round_step(L, rho))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        """Start with both sequences at x0."""
        weights = x0.new_tensor([0.0, 1.0])
        return Server(x0, x0, torch.zeros_like(x0), weights, x0.new_zeros(1, dtype=torch.int64)), Empty()

    def broadcast(self, server: Server) -> Message:
        """Send the centre, and the gradient there once it is known."""
        return Message(self._centre(server), server.gradient if bool(server.phase) else server.gradient[:0])

    def local_round(self, message: Message, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """The gradient at the centre, or the local argmin and the gradient there."""
        centre, gradient = message
        if not gradient.shape[-1]:
            return Reply(grad.full(centre), centre[..., :0]), client
        weight, away, y = self.step / self.prox_step, gradient - grad.full(centre), centre
        for k in range(self.local_steps):
            y = (y - self.step * (grad(y, k) + away) + weight * centre) / (1 + weight)
        return Reply(grad.full(y), y - centre), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Take the mean gradient, or move both sequences."""
        if not bool(server.phase):
            return server._replace(gradient=reply.gradient, phase=1 - server.phase)
        (A, B), a = server.weights.tolist(), self._weight(server)
        x, v = self._centre(server) + reply.dx, server.v
        moved = v + (a * self.mu * (x - v) - a * reply.gradient) / (B + a * self.mu)
        weights = x.new_tensor([A + a, B + a * self.mu])
        return Server(x, moved, torch.zeros_like(x), weights, 1 - server.phase)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        """The mean of the local models."""
        return server.x

    def _weight(self, server: Server) -> float:
        """The positive root a of a^2 = prox_step (A + a) B."""
        A, B = (float(weight) for weight in server.weights)
        half = self.prox_step * B / 2
        return half + math.sqrt(half * half + 2 * half * A)

    def _centre(self, server: Server) -> Tensor:
        """The point y between the two sequences."""
        a, A = self._weight(server), float(server.weights[0])
        return server.x + a / (A + a) * (server.v - server.x)
