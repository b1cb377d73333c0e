"""FedNMap: Huang & Pu, *Achieving linear speedup for composite federated learning*, 2026 (equations (3)-(7)).

The normal map F_i(z) = g_i(P_gamma(z)) + (z - P_gamma(z)) / gamma is linear in the gradient, so it stays unbiased
under sampling:

    client:  z_0 = z,   z_{t+1} = z_t - eta (F_i(z_t) + c_i),   y_i = (z - z_tau) / (eta tau)
    server:  y = mean_i y_i,   z+ = z - eta_s eta tau y
    client:  c_i+ = c_i + y - y_i

Symbols: eta = ``step``, eta_s = ``server_step``, tau = ``local_steps``, gamma = ``gamma`` (prox parameter, free of
the steps). The model is P_gamma(z). Assumptions: f smooth, h rho-weakly convex with gamma rho < 1, all clients take
part, unless ``partial_participation`` is set. Exact for any tau with full gradients.

Deviations. The paper sends z and y down; y = (z - z+) / (eta_s eta tau), so the clients recover it and one vector
goes each way. They hold ``own`` = z - eta_s eta tau (mean of their F_i), where their own directions alone would lead,
and c_i+ = (own - z+) / (eta_s eta tau). They send own - z: since sum_i c_i = 0, the mean of these is the paper's step.
Sending z_tau - z instead, which the c_i are part of, would let the rounding of their mean add up from round to round.
x0 is the start z of the normal map: the first model is P_gamma(x0).

``partial_participation=True`` is ours, not the paper's: control variates as in SCAFFOLD. A client that sits out
keeps ``own`` = -(its last mean F_i), the server keeps and sends the mean of these over *all* clients, and c_i = own -
mean. A client sends the change of ``own``, from which the server forms both its direction, mean + mean_S(change), and
the new mean: two vectors down, one up. With everybody present the iterates are the paper's.

Both steps may change from round to round: the client remembers which one its ``own`` was made with.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    z: Tensor  # normal-map variable
    mean: Tensor  # mean of own; empty unless partial


class Client(NamedTuple):
    own: Tensor  # where own directions lead, or they
    reach: Tensor  # round's step it was made with


class Reply(NamedTuple):
    dz: Tensor  # own minus z, or own's change


@dataclass(frozen=True)
class FedNMap(Algorithm[Server, Client, Server, Reply]):
    """Corrected local steps along the normal map."""

    info: ClassVar[Info] = Info(
        "Huang, Pu: Achieving linear speedup for composite federated learning",
        2026,
        regularizer="weakly convex",
        participation="full",
        exact=True,
        arxiv="2602.03357",
        bibtex="huang2026achieving",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"server_step", "step"})

    local_steps: Count
    step: Positive
    server_step: Positive = 1.0
    gamma: Positive = field(kw_only=True)
    partial_participation: bool = False

    @property
    def partial(self) -> bool:
        return self.partial_participation

    @property
    def round_step(self) -> float:
        """The step of a whole round, eta_s eta tau."""
        return self.server_step * self.step * self.local_steps

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Half of 1/L for each local step, since control variates correct the drift; gamma is the step of a round."""
        gamma = round_step(L, rho, local_steps)
        return cls(local_steps, gamma / local_steps, gamma=gamma)

    @classmethod
    def auto_partial(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Half of 1/L for a round, since control variates age."""
        gamma = round_step(L, rho)
        return cls(local_steps, gamma / local_steps, gamma=gamma, partial_participation=True)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start the normal map at x0."""
        zero, one = torch.zeros_like(x0), x0.new_ones(1)
        return (Server(x0, zero), Client(zero, one)) if self.partial else (Server(x0, x0[:0]), Client(x0, one))

    def broadcast(self, server: Server) -> Server:
        """Send z (and the mean)."""
        return server

    def local_round(self, message: Server, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        c = (client.own - (message.mean if self.partial else message.z)) / client.reach
        z, total = message.z, torch.zeros_like(message.z)
        for t in range(self.local_steps):
            x = h.prox(z, self.gamma)
            direction = grad(x, t) + (z - x) / self.gamma
            z = z - self.step * (direction + c)
            total = total + direction
        if self.partial:
            own = -total / self.local_steps
            return Reply(own - client.own), Client(own, client.reach)
        own = message.z - self.server_step * self.step * total
        return Reply(own - message.z), Client(own, torch.full_like(client.reach, self.round_step))

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Move z along the mean direction."""
        if self.partial:
            z = server.z + self.round_step * (server.mean + reply.dz)
            return Server(z, server.mean + share * reply.dz)
        return Server(server.z + reply.dz, server.mean)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return h.prox(server.z, self.gamma)
