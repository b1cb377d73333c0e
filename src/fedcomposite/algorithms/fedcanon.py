"""FedCanon: Zhou, Zhong, Shi, Wen & Yu, *FedCanon: non-convex composite federated learning*, 2025 (Algorithm 1).

    client:  y_0 = z,   y_{t+1} = y_t - beta (g_i(y_t) + c_i),   Delta_i = (z - y_tau) / (beta tau)
    server:  Delta = mean_i Delta_i,   z+ = P_alpha(z - alpha Delta),   (Delta, z+) goes down
    client:  c_i+ = c_i + Delta - Delta_i

Symbols: beta = ``step``, alpha = ``server_step`` (in practice about beta tau), tau = K = ``local_steps``.
Assumptions: f smooth, h rho-weakly convex with alpha rho < 1, all clients take part, unless
``partial_participation`` is set.

Known limit. The local steps follow -grad f(x*), which is not zero at a solution of a composite problem, so with tau
> 1 and full gradients the method stops at a residual of about (beta/2) (tau - 1) ||[H grad f]_support||, H the
Hessian of f: it is removed only by beta -> 0.

Deviation. Clients keep c_i - Delta_i, minus their mean gradient, and add Delta when it arrives: one vector of memory
instead of two. They send their mean gradient in place of Delta_i: the mean is the same since sum_i c_i = 0, and the
rounding of that sum does not add up from round to round.

``partial_participation=True`` is ours, not the paper's: control variates as in SCAFFOLD. Delta, which goes down,
becomes the mean of the last mean gradients of *all* clients. A client sends the change of its own, from which the
server forms both its direction, Delta + mean_S(change), and the new Delta. The vectors sent are as many as before, and
with everybody present the iterates are the paper's.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    z: Tensor  # global model
    delta: Tensor  # last mean direction, of everybody


class Client(NamedTuple):
    pending: Tensor  # minus the mean gradient


class Reply(NamedTuple):
    delta: Tensor  # own mean gradient, or its change


@dataclass(frozen=True)
class FedCanon(Algorithm[Server, Client, Server, Reply]):
    """Corrected local gradient steps and one prox, at the server."""

    info: ClassVar[Info] = Info(
        "Zhou, Zhong, Shi, Wen, Yu: FedCanon: Non-convex composite federated learning",
        2025,
        regularizer="weakly convex",
        participation="full",
        exact=False,
        arxiv="2504.11903",
        bibtex="zhou2025fedcanon",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"server_step", "step"})

    local_steps: Count
    step: Positive
    server_step: Positive
    partial_participation: bool = False

    @property
    def partial(self) -> bool:
        return self.partial_participation

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """The local steps share the server's step, alpha = beta tau: 1/L, since larger ones leave a larger residual."""
        alpha = 2 * round_step(L, 2 * rho)
        return cls(local_steps, alpha / local_steps, alpha)

    @classmethod
    def auto_partial(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Half of that, since control variates age."""
        alpha = round_step(L, rho)
        return cls(local_steps, alpha / local_steps, alpha, partial_participation=True)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0 with zero control variates."""
        return Server(x0, torch.zeros_like(x0)), Client(torch.zeros_like(x0))

    def broadcast(self, server: Server) -> Server:
        """Send the model and the last mean direction."""
        return server

    def local_round(self, message: Server, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Tau corrected gradient steps, no prox."""
        c = client.pending + message.delta
        y = message.z
        for t in range(self.local_steps):
            y = y - self.step * (grad(y, t) + c)
        pending = c - (message.z - y) / (self.step * self.local_steps)
        return Reply(client.pending - pending if self.partial else -pending), Client(pending)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """One proximal step along the mean direction."""
        direction = everybody = reply.delta
        if self.partial:
            direction, everybody = server.delta + reply.delta, server.delta + share * reply.delta
        return Server(h.prox(server.z - self.server_step * direction, self.server_step), everybody)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.z
