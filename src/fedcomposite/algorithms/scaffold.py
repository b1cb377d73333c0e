"""SCAFFOLD: Karimireddy et al., *Stochastic controlled averaging for federated learning*, ICML 2020 (Algorithm 1).

    y_{t+1} = y_t - eta (g_i(y_t) - c_i + c)
    c_i+    = grad f_i(x)                           (option 1: one more pass, over all samples, at the server's model)
            = c_i - c + (x - y_tau) / (tau eta)     (option 2: the mean of the local gradients)
    x+ = x + eta_g mean_S(y_tau - x),   c+ = c + |S|/n mean_S(c_i+ - c_i)

Symbols: eta = ``step``, eta_g = ``server_step``, tau = ``local_steps``. Clients that sit out keep c_i, so c =
mean_i c_i always. Assumptions: f smooth, h = 0. A subgradient of h is added to the local gradients, as for FedAvg,
when h is not zero.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Gradient, Info
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x: Tensor  # global model
    c: Tensor  # mean control variate


class Client(NamedTuple):
    c: Tensor  # own control variate


class Reply(NamedTuple):
    dx: Tensor  # model change
    dc: Tensor  # control variate change


@dataclass(frozen=True)
class Scaffold(Algorithm[Server, Client, Server, Reply]):
    """Local steps corrected by control variates."""

    info: ClassVar[Info] = Info(
        "Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD",
        2020,
        regularizer="subgradient",
        participation="any",
        exact=True,
        arxiv="1910.06378",
        bibtex="karimireddy2020scaffold",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"server_step", "step"})

    local_steps: Count
    step: Positive
    server_step: Positive = 1.0
    option: Literal[1, 2] = 2

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0 with zero control variates."""
        return Server(x0, torch.zeros_like(x0)), Client(torch.zeros_like(x0))

    def broadcast(self, server: Server) -> Server:
        """Send the model and the mean control variate."""
        return server

    def local_round(self, message: Server, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Tau corrected steps, then the new control variate."""
        x, c = message
        y = x
        for t in range(self.local_steps):
            y = y - self.step * (grad(y, t) + h.subgradient(y) - client.c + c)
        if self.option == 1:
            c_new = grad.full(x) + h.subgradient(x)
        else:
            c_new = client.c - c + (x - y) / (self.local_steps * self.step)
        return Reply(y - x, c_new - client.c), Client(c_new)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Mean model change over participants; control variates over all clients."""
        return Server(server.x + self.server_step * reply.dx, server.c + share * reply.dc)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
