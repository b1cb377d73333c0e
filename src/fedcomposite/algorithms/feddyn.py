"""FedDyn: Acar et al., *Federated learning based on dynamic regularization*, ICLR 2021 (Algorithm 1).

    client:  theta_i = argmin f_i(y) - <n_i, y> + (alpha/2) ||y - theta||^2,    n_i+ = n_i - alpha (theta_i - theta)
    server:  m+ = m - alpha |S|/n mean_S(theta_i - theta),    theta+ = mean_S theta_i - m+ / alpha

Symbols: alpha = ``alpha``; n_i (the paper's grad L_i) and m (its h) are linear terms, and m = mean_i n_i always.
Assumptions: f smooth, h = 0. Exact also when clients sit out, who keep n_i.

Deviations. The argmin is ``local_steps`` gradient steps of size ``step`` from theta, as in the authors' code; at
a solution they do not move, so a short inner solve leaves no bias. The authors' code weighs alpha by the clients'
sizes and clips gradients; here neither.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, formerly
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x: Tensor  # global model
    linear: Tensor  # mean linear term


class Client(NamedTuple):
    linear: Tensor  # own linear term


class Message(NamedTuple):
    x: Tensor  # global model


class Reply(NamedTuple):
    dx: Tensor  # model change


@formerly(inner_steps="local_steps", inner_step="step")
@dataclass(frozen=True)
class FedDyn(Algorithm[Server, Client, Message, Reply]):
    """Local solves with a linear and a quadratic term that make their minimisers agree."""

    info: ClassVar[Info] = Info(
        "Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: Federated learning based on dynamic regularization",
        2021,
        regularizer="none",
        participation="any",
        exact=True,
        arxiv="2111.04263",
        bibtex="acar2021federated",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"alpha", "step"})

    alpha: Positive
    local_steps: Count
    step: Positive

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Alpha = 2 L, since m goes on acting while clients sit out, and inner steps of 1/(L + alpha)."""
        return cls(alpha=1 / round_step(L, rho), local_steps=local_steps, step=2 / 3 * round_step(L, rho))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0 with zero linear terms."""
        return Server(x0, torch.zeros_like(x0)), Client(torch.zeros_like(x0))

    def broadcast(self, server: Server) -> Message:
        return Message(server.x)

    def local_round(self, message: Message, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """The local solve, then the linear term that makes its result stationary."""
        y = message.x
        for t in range(self.local_steps):
            y = y - self.step * (grad(y, t) - client.linear + self.alpha * (y - message.x))
        dx = y - message.x
        return Reply(dx), Client(client.linear - self.alpha * dx)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """The linear term over all clients, the models over the participants."""
        linear = server.linear - self.alpha * share * reply.dx
        return Server(server.x + reply.dx - linear / self.alpha, linear)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
