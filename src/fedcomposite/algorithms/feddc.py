"""FedDC: Gao et al., *Federated learning with non-IID data via local drift decoupling and correction*, CVPR 2022.

    client:  y_{t+1} = y_t - eta (g_i(y_t) + alpha (y_t + D_i - w) - c_i + c),   y_0 = w,   delta = y_tau - w
             D_i+ = D_i + delta,   c_i+ = c_i - c - delta / (tau eta)
    server:  c+ = c + |S|/n mean_S(c_i+ - c_i),   w+ = mean_S y_tau + mean_all D_i+

Symbols: eta = ``step``, tau = ``local_steps``, alpha = ``alpha``; D_i is the drift, c_i includes the gradient of the
penalty. The server keeps the mean drift from the changes alone. Assumptions: f smooth, h = 0. Exact also when clients
sit out, who keep D_i and c_i. The authors' code weighs clients by their sizes; here the runtime does.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, ZeroOrMore
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    w: Tensor  # global model
    c: Tensor  # mean control variate
    drift: Tensor  # mean drift


class Client(NamedTuple):
    drift: Tensor  # own drift
    c: Tensor  # own control variate


class Message(NamedTuple):
    w: Tensor  # global model
    c: Tensor  # mean control variate


class Reply(NamedTuple):
    dw: Tensor  # model change
    dc: Tensor  # control variate change


@dataclass(frozen=True)
class FedDC(Algorithm[Server, Client, Message, Reply]):
    """Local steps with a drift variable, a penalty on it and control variates."""

    info: ClassVar[Info] = Info(
        "Gao, Fu, Li, Chen, Xu, Xu: FedDC: Federated learning via local drift decoupling and correction",
        2022,
        regularizer="none",
        participation="any",
        exact=True,
        arxiv="2203.11751",
        bibtex="gao2022feddc",
    )

    compressible: ClassVar[bool] = False  # drifts add up whole changes of models, however small the steps

    schedulable: ClassVar[frozenset[str]] = frozenset({"step"})

    local_steps: Count
    step: Positive
    alpha: ZeroOrMore = 0.1

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """The steps of a round shared equally; alpha is a curvature, so a tenth of L."""
        return cls(local_steps, round_step(L, rho) / local_steps, 0.1 * L)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0 with zero drifts and control variates."""
        zero = torch.zeros_like(x0)
        return Server(x0, zero, zero), Client(zero, zero)

    def broadcast(self, server: Server) -> Message:
        """Send the model and the mean control variate."""
        return Message(server.w, server.c)

    def local_round(self, message: Message, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Tau corrected and penalised steps, then the new drift and control variate."""
        w, c = message
        y = w
        for t in range(self.local_steps):
            y = y - self.step * (grad(y, t) + self.alpha * (y + client.drift - w) - client.c + c)
        c_new = client.c - c - (y - w) / (self.local_steps * self.step)
        return Reply(y - w, c_new - client.c), Client(client.drift + (y - w), c_new)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Models over the participants; drifts and control variates over all clients."""
        drift = server.drift + share * reply.dw
        return Server(server.w + reply.dw + drift, server.c + share * reply.dc, drift)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.w
