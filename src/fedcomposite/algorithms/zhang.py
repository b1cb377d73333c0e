"""Zhang, Hu & Johansson, *Non-convex composite federated learning with heterogeneous data*, 2025 (Algorithm 1).

With eta~ = eta_g eta tau and P_s the prox of s h, in round r

    client:  z^_0 = z_0 = P_eta~(x-),   z^_{t+1} = z^_t - eta (g_i(z_t) + c_i),   z_{t+1} = P_{(t+1) eta}(z^_{t+1})
    server:  x-+ = P_eta~(x-) + eta_g (mean_i z^_tau - P_eta~(x-))
    client:  c_i+ = (P_eta~(x-) - x-+) / eta~ - (1/tau) sum_t g_i(z_t)

Symbols: eta = ``step``, eta_g = ``server_step``, tau = ``local_steps``; x- (pre-proximal) = ``x_bar``, z^ = ``y``.
``growing_prox=False`` is the paper's ablation, P_eta in every local step: it does not stop at a stationary point.
Assumptions: f smooth; h convex in the paper (weakly convex works while eta~ rho < 1: the tests show it); all
clients take part.

Deviations. Clients finish c_i when the next x- arrives; until then they hold one vector, ``own`` = P_eta~(x-) -
eta~ (mean gradient): where their own gradients alone would have led, so that c_i+ = (own - x-+) / eta~. One vector
goes each way, as in the paper. x0 is taken as the pre-proximal start, so the first model is P_eta~(x0). The sums of
(A.1)-(A.4) that start at t = 1 in the paper start at t = 0. The prox after the last local step is not needed and
not taken.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Gradient, Info
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    """Server state and message."""

    x_bar: Tensor  # pre-proximal global model


class Client(NamedTuple):
    """What a client remembers."""

    own: Tensor  # pre-proximal model without the others


class Reply(NamedTuple):
    """What a client sends."""

    dx: Tensor  # pre-proximal local change


@dataclass(frozen=True)
class Zhang(Algorithm[Server, Client, Server, Reply]):
    """Pre-proximal averaging with a prox that grows along the local steps."""

    info: ClassVar[Info] = Info(
        "Zhang, Hu, Johansson: Non-convex composite federated learning with heterogeneous data",
        2025,
        regularizer="weakly convex",
        participation="full",
        exact=True,
    )

    local_steps: Count
    step: Positive
    server_step: Positive = 1.0
    growing_prox: bool = True

    @property
    def round_step(self) -> float:
        """Eta~, the step of a whole round."""
        return self.server_step * self.step * self.local_steps

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0, before the prox."""
        return Server(x0), Client(x0)

    def broadcast(self, server: Server) -> Server:
        """Send the pre-proximal model."""
        return server

    def local_round(self, message: Server, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Form the correction, then tau steps on the pre-proximal model with gradients at the post-proximal one."""
        c = (client.own - message.x_bar) / self.round_step
        x = h.prox(message.x_bar, self.round_step)
        y, z, total = x, x, torch.zeros_like(x)
        for t in range(self.local_steps):
            if t:
                z = h.prox(y, t * self.step if self.growing_prox else self.step)
            g = grad(z, t)
            y = y - self.step * (g + c)
            total = total + g
        return Reply(y - x), Client(x - self.server_step * self.step * total)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Move the post-proximal model along the mean change."""
        return Server(h.prox(server.x_bar, self.round_step) + self.server_step * reply.dx)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        """The post-proximal model."""
        return h.prox(server.x_bar, self.round_step)
