"""The naive form of Zhang, Hu & Johansson's method that their Section 2.2 argues against: no decoupling.

client:  z_{t+1} = P_{(t+1) eta}(z_t - eta (g_i(z_t) + c_i)),   z_tau goes up, after the prox
server:  x-+ = P_eta~(x-) + eta_g (mean_i z_tau - P_eta~(x-))
client:  c_i+ = (P_eta~(x-) - x-+) / eta~ - (1/tau) sum_t g_i(z_t)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Gradient, Info
from fedcomposite.regularizers import Regularizer


class Server(NamedTuple):
    """What the server keeps and sends."""

    x_bar: Tensor  # pre-proximal global model


class Client(NamedTuple):
    """What a client keeps."""

    own: Tensor  # P(x-) / eta~ minus the mean gradient
    begun: Tensor  # whether there was a round


class Reply(NamedTuple):
    """What a client sends."""

    dx: Tensor  # where the local steps led, minus the model


@dataclass(frozen=True)
class NaiveProx(Algorithm[Server, Client, Server, Reply]):
    """Corrected proximal steps whose post-proximal models are averaged."""

    info: ClassVar[Info] = Info(
        "Zhang, Hu, Johansson: Non-convex composite federated learning with heterogeneous data",
        2025,
        regularizer="weakly convex",
        participation="full",
        exact=False,
        arxiv="2502.03958",
        bibtex="zhang2025nonconvex",
    )

    local_steps: Count
    step: Positive
    server_step: Positive = 1.0

    @property
    def round_step(self) -> float:
        """Eta~, the step of a whole round."""
        return self.server_step * self.step * self.local_steps

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0, before the prox."""
        return Server(x0), Client(torch.zeros_like(x0), x0.new_zeros(1))

    def broadcast(self, server: Server) -> Server:
        return server

    def local_round(self, message: Server, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        c = client.begun * (client.own - message.x_bar / self.round_step)
        x = h.prox(message.x_bar, self.round_step)
        z, total = x, torch.zeros_like(x)
        for t in range(self.local_steps):
            g = grad(z, t)
            z = h.prox(z - self.step * (g + c), (t + 1) * self.step)
            total = total + g
        own = x / self.round_step - total / self.local_steps
        return Reply(z - x), Client(own, torch.ones_like(client.begun))

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Move the post-proximal model along the mean change."""
        return Server(h.prox(server.x_bar, self.round_step) + self.server_step * reply.dx)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return h.prox(server.x_bar, self.round_step)
