"""Zhang, Hu & Johansson, *Non-convex composite federated learning with heterogeneous data*, 2025 (Algorithm 1).

With eta~ = eta_g eta tau and P_s the prox of s h, in round r

    client:  z^_0 = z_0 = P_eta~(x-),   z^_{t+1} = z^_t - eta (g_i(z_t) + c_i),   z_{t+1} = P_{(t+1) eta}(z^_{t+1})
    server:  x-+ = P_eta~(x-) + eta_g (mean_i z^_tau - P_eta~(x-))
    client:  c_i+ = (P_eta~(x-) - x-+) / eta~ - (1/tau) sum_t g_i(z_t)

Symbols: eta = ``step``, eta_g = ``server_step``, tau = ``local_steps``; x- (pre-proximal) = ``x_bar``, z^ = ``y``.
``growing_prox=False`` is the paper's ablation, P_eta in every local step: it does not stop at a stationary point.
Assumptions: f smooth; h convex in the paper (weakly convex works while eta~ rho < 1: the tests show it); all
clients take part, unless ``partial_participation`` is set.

Deviations. Clients finish c_i when the next x- arrives; until then they hold one vector, ``own`` = P_eta~(x-) -
eta~ (mean gradient): where their own gradients alone would have led, so that c_i+ = (own - x-+) / eta~. They send
own - P_eta~(x-): since sum_i c_i = 0, the mean of these is the paper's step. Sending z^_tau, which the c_i are part
of, would let the rounding of their mean add up from round to round. One vector goes each way, as in the paper. x0 is
taken as the pre-proximal start, so the first model is P_eta~(x0). The sums of (A.1)-(A.4) that start at t = 1 in the
paper start at t = 0. The prox after the last local step is not needed and not taken.

``partial_participation=True`` is ours, not the paper's: control variates as in SCAFFOLD. A client that sits out
keeps ``own`` = -eta~ (its last mean gradient), the server keeps and sends the mean of these over *all* clients, and
c_i = (own - mean) / eta~. A client sends the change of ``own``, from which the server forms both its step, P_eta~(x-)
+ mean + mean_S(change), and the new mean: two vectors down, one up. With everybody present the iterates are the
paper's.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x_bar: Tensor  # pre-proximal global model
    mean: Tensor  # mean of own; empty unless partial


class Client(NamedTuple):
    own: Tensor  # where own gradients lead


class Reply(NamedTuple):
    dx: Tensor  # own minus the model, or own's change


@dataclass(frozen=True)
class Zhang(Algorithm[Server, Client, Server, Reply]):
    """Pre-proximal averaging with a prox that grows along the local steps."""

    info: ClassVar[Info] = Info(
        "Zhang, Hu, Johansson: Non-convex composite federated learning with heterogeneous data",
        2025,
        regularizer="weakly convex",
        participation="full",
        exact=True,
        arxiv="2502.03958",
        bibtex="zhang2025nonconvex",
    )

    local_steps: Count
    step: Positive
    server_step: Positive = 1.0
    growing_prox: bool = True
    partial_participation: bool = False

    @property
    def partial(self) -> bool:
        return self.partial_participation

    @property
    def round_step(self) -> float:
        """Eta~, the step of a whole round."""
        return self.server_step * self.step * self.local_steps

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Half of 1/L for each local step, since control variates correct the drift."""
        return cls(local_steps, round_step(L, rho, local_steps) / local_steps)

    @classmethod
    def auto_partial(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Half of 1/L for a round, since control variates age."""
        return cls(local_steps, round_step(L, rho) / local_steps, partial_participation=True)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0, before the prox."""
        zero = torch.zeros_like(x0)
        return (Server(x0, zero), Client(zero)) if self.partial else (Server(x0, x0[:0]), Client(x0))

    def broadcast(self, server: Server) -> Server:
        """Send the pre-proximal model (and the mean)."""
        return server

    def local_round(self, message: Server, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Form the correction, then tau steps on the pre-proximal model with gradients at the post-proximal one."""
        c = (client.own - (message.mean if self.partial else message.x_bar)) / self.round_step
        x = h.prox(message.x_bar, self.round_step)
        y, z, total = x, x, torch.zeros_like(x)
        for t in range(self.local_steps):
            if t:
                z = h.prox(y, t * self.step if self.growing_prox else self.step)
            g = grad(z, t)
            y = y - self.step * (g + c)
            total = total + g
        if self.partial:
            own = -self.server_step * self.step * total
            return Reply(own - client.own), Client(own)
        own = x - self.server_step * self.step * total
        return Reply(own - x), Client(own)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Move the post-proximal model along the mean change."""
        x = h.prox(server.x_bar, self.round_step)
        if self.partial:
            return Server(x + server.mean + reply.dx, server.mean + share * reply.dx)
        return Server(x + reply.dx, server.mean)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return h.prox(server.x_bar, self.round_step)
