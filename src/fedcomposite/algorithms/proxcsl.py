"""proxCSL: Lu, Curtin, Raff, Ferraro & Holt, *High-dimensional distributed sparse classification*, 2024.

    exchange 1:  g = mean_i grad f_i(x)
    exchange 2:  x+ ~ argmin_u f_1(u) + <g - grad f_1(x), u> + (alpha/2) ||u - x||^2 + h(u)      (client 1, the lead)

The surrogate likelihood of one client, whose Hessian stands for that of all: where clients are alike every step gains a
factor like 1/sqrt(m) of the lead's m samples; where the lead's Hessian is less than half of what others see, alpha = 0
diverges, and alpha has to be about how much the Hessians differ.

Symbols: alpha = ``alpha``; the lead is the first client. Assumptions: f smooth, h convex, or weakly convex with
alpha + mu_1 > rho; all clients. Deviations: the argmin is ``local_steps`` proximal gradient steps
from x of size ``step``, so that it holds for every model and prox, the paper's is proximal Newton with coordinate
descent for l1; x0 is what the user says, not a mean of local solutions; the paper raises alpha tenfold after a test at
the lead where more than 1,000 coefficients are nonzero, here it is given.

What the coordinator learns in exchange 2 is the lead's step alone, also in secure sums: that is the method. A step is
two exchanges and counts as two rounds. What an exchange does not use is sent empty.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, ZeroOrMore
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x: Tensor  # global model
    gradient: Tensor  # at x
    phase: Tensor  # 0: gradients, 1: the lead's step


class Message(NamedTuple):
    x: Tensor  # global model
    gradient: Tensor  # at x, or nothing


class Reply(NamedTuple):
    gradient: Tensor  # at x
    dx: Tensor  # the lead's change of x
    lead: Tensor  # 1 from the lead, 0 from the others


@dataclass(frozen=True)
class ProxCSL(Algorithm[Server, Empty, Message, Reply]):
    """One client's loss, corrected by the mean gradient, in place of all of them.

    Parameters
    ----------
    local_steps : int
        Proximal gradient steps of the lead's argmin.
    step : float
        Their size.
    alpha : float
        Damping of the lead's problem.
    """

    info: ClassVar[Info] = Info(
        "Lu, Curtin, Raff, Ferraro, Holt: High-dimensional distributed sparse classification with scalable "
        "communication-efficient global updates",
        2024,
        regularizer="weakly convex",
        participation="full",
        exact=True,
        lead=True,
        arxiv="2407.06346",
        doi="10.1145/3637528.3672038",
        bibtex="lu2024high",
    )
    recordable: ClassVar[bool] = False
    exchanges: ClassVar[int] = 2

    schedulable: ClassVar[frozenset[str]] = frozenset({"alpha", "step"})

    local_steps: Count
    step: Positive
    alpha: ZeroOrMore = 1e-4

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Alpha = L, which is as much as the Hessians of convex clients can differ."""
        return cls(local_steps=local_steps, step=round_step(L, rho), alpha=max(L, 2 * rho))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        """Start at x0."""
        return Server(x0, torch.zeros_like(x0), x0.new_zeros(1, dtype=torch.int64)), Empty()

    def broadcast(self, server: Server) -> Message:
        """Send the model, and the gradient there once it is known."""
        return Message(server.x, server.gradient if bool(server.phase) else server.gradient[:0])

    def local_round(self, message: Message, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """The gradient at the model, or the lead's step; the others send zeros then."""
        x, gradient = message
        if not gradient.shape[-1]:
            return Reply(grad.full(x), x[..., :0], x[..., :0]), client
        # Written from x, so that a step of nothing is exactly zero; the quadratic is part of the prox.
        weight, away, u = self.step * self.alpha, gradient - grad.full(x), x
        for k in range(self.local_steps):
            u = h.prox((u - self.step * (grad(u, k) + away) + weight * x) / (1 + weight), self.step / (1 + weight))
        lead = (grad.position == 0).to(x.dtype)
        return Reply(x[..., :0], lead * (u - x), lead), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Take the mean gradient, or the lead's model."""
        if not bool(server.phase):
            return server._replace(gradient=reply.gradient, phase=1 - server.phase)
        return Server(server.x + reply.dx / reply.lead, torch.zeros_like(server.x), 1 - server.phase)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
