"""FedMid (federated mirror descent): Yuan, Zaheer & Reddi, *Federated composite optimization*, ICML 2021.

    client:  y_0 = x,   y_{t+1} = P_eta(y_t - eta g_i(y_t))
    server:  x+ = P_{eta_g eta tau}(x + eta_g mean_i(y_tau - x))

Symbols: eta = ``step``, eta_g = ``server_step``, tau = ``local_steps``. ``server_prox_only=True`` is the paper's
variant without the clients' prox. Assumptions: f smooth, h convex in the paper (the rule is defined while eta_g eta
tau rho < 1), any participation.

Three prox parameters of the server are in circulation; eta_g eta tau is that of the authors' code.

Known limit. The clients regularize by eta tau in a round and the server does so once more: with one client, one local
step and l1 this is proximal gradient descent on f + 2h. The doubling goes away without the clients' prox; the drift
of several local steps, as in FedAvg, remains.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info
from fedcomposite.regularizers.base import Regularizer


class Model(NamedTuple):
    """Server state and message."""

    x: Tensor  # global model


class Reply(NamedTuple):
    """What a client sends."""

    dx: Tensor  # model change


@dataclass(frozen=True)
class FedMid(Algorithm[Model, Empty, Model, Reply]):
    """Local proximal gradient steps, averaging, and one more prox."""

    info: ClassVar[Info] = Info(
        "Yuan, Zaheer, Reddi: Federated composite optimization",
        2021,
        regularizer="weakly convex",
        participation="any",
        exact=False,
        arxiv="2011.08474",
        bibtex="yuan2021federated",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"server_step", "step"})

    local_steps: Count
    step: Positive
    server_step: Positive = 1.0
    server_prox_only: bool = False

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Model, Empty]:
        """Start at x0."""
        return Model(x0), Empty()

    def broadcast(self, server: Model) -> Model:
        """Send the model."""
        return server

    def local_round(self, message: Model, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """Tau proximal gradient steps."""
        y = message.x
        for t in range(self.local_steps):
            y = torch.sub(y, grad(y, t), alpha=self.step)
            if not self.server_prox_only:
                y = h.prox(y, self.step)
        return Reply(y - message.x), client

    def aggregate(self, server: Model, reply: Reply, share: float, h: Regularizer) -> Model:
        """Move along the mean change, then take the prox of the whole round's step."""
        moved = server.x + self.server_step * reply.dx
        return Model(h.prox(moved, self.server_step * self.step * self.local_steps))

    def solution(self, server: Model, h: Regularizer) -> Tensor:
        """The global model."""
        return server.x
