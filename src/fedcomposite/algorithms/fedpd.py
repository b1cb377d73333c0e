"""FedPD: Zhang, Hong, Dhople, Yin & Liu, *FedPD: a federated learning framework with adaptivity to non-IID data*, 2021.

    x_i = argmin f_i(y) + <l_i, y - x0_i> + ||y - x0_i||^2 / (2 eta),   l_i+ = l_i + (x_i - x0_i) / eta,
    x0_i+ = x_i + eta l_i+,   and with probability 1 - p, for all clients together,   x0_i+ <- mean_j x0_j+

Symbols: eta = ``prox_step``, p = ``p``; the model is the mean x0. Assumptions: f smooth, h = 0, all clients take part.

A round here ends with a communication: it holds a geometric number of local updates, drawn by the server from
``seed``, and one update when p = 0. With p > 0 the limit keeps a heterogeneity error: use 0 to compare methods.

Deviations. The argmin is ``local_steps`` gradient steps of size ``step`` from x0_i (the paper's oracle I); at
a solution they do not move, so a short inner solve leaves no bias.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, Self

import annotated_types as at
import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, formerly
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer
from fedcomposite.rng import geometric


class Server(NamedTuple):
    x: Tensor  # mean of the x0_i
    round: Tensor  # communications so far


class Message(NamedTuple):
    x: Tensor  # mean of the x0_i
    updates: Tensor  # updates before the next communication


class Client(NamedTuple):
    dual: Tensor  # multiplier l_i


class Reply(NamedTuple):
    dx: Tensor  # change of x0_i


@formerly(inner_steps="local_steps", inner_step="step", eta="prox_step")
@dataclass(frozen=True)
class FedPD(Algorithm[Server, Client, Message, Reply]):
    """Local primal-dual updates, averaged at random times."""

    info: ClassVar[Info] = Info(
        "Zhang, Hong, Dhople, Yin, Liu: FedPD: A federated learning framework with adaptivity to non-IID data",
        2021,
        regularizer="none",
        participation="full",
        exact=True,
        arxiv="2005.11418",
        bibtex="zhang2021fedpd",
    )
    recordable: ClassVar[bool] = False

    schedulable: ClassVar[frozenset[str]] = frozenset({"prox_step", "step"})

    prox_step: Positive
    local_steps: Count
    step: Positive
    p: Annotated[float, at.Ge(0), at.Lt(1)] = 0.0
    seed: Annotated[int, at.Ge(0)] = 0

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Eta = 1/L, and inner steps of 1/(L + 1/eta)."""
        return cls(prox_step=2 * round_step(L, rho), local_steps=local_steps, step=round_step(L, rho))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0 with zero multipliers."""
        return Server(x0, x0.new_zeros(1, dtype=torch.int64)), Client(torch.zeros_like(x0))

    def broadcast(self, server: Server) -> Message:
        """Send the model and the outcome of the shared coin."""
        updates = geometric(1 - self.p, self.seed, int(server.round))
        return Message(server.x, torch.full_like(server.round, updates))

    def local_round(self, message: Message, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """As many updates of x_i, l_i and x0_i as the shared coin says."""
        x, dual, k = message.x, client.dual, 0
        for _ in range(int(message.updates.flatten()[0])):
            y = x
            for _ in range(self.local_steps):
                y = y - self.step * (grad(y, k) + dual + (y - x) / self.prox_step)
                k += 1
            dual = dual + (y - x) / self.prox_step
            x = y + self.prox_step * dual
        return Reply(x - message.x), Client(dual)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """The mean of the x0_i."""
        return Server(server.x + reply.dx, server.round + 1)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        """The mean of the x0_i."""
        return server.x
