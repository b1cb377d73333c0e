"""FedSplit: Pathak & Wainwright, *FedSplit: an algorithmic framework for fast federated optimization*, NeurIPS 2020.

Peaceman-Rachford splitting of the consensus problem:

    client:  u_i = prox_{eta f_i}(2 x - z_i),   z_i+ = z_i + 2 (u_i - x)
    server:  x+ = mean_i z_i+

Symbols: eta = ``prox_step``; 1/sqrt(mu L) is best for mu-strongly convex, L-smooth clients. z_i stays with the client
from round to round: resetting it to x, as seen in circulation, is another method and stalls. Assumptions: f smooth and
strongly convex (the splitting need not converge otherwise), h = 0, all clients take part.

Deviations. The prox is ``local_steps`` gradient steps of size ``step`` from x, which is where u_i is at a
solution, so a short inner solve leaves no bias.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from torch import Tensor

from fedcomposite._validation import Count, Positive, formerly
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Model(NamedTuple):
    x: Tensor  # mean of the z_i


class Client(NamedTuple):
    z: Tensor  # splitting variable


class Reply(NamedTuple):
    dz: Tensor  # z_i minus the model


@formerly(inner_steps="local_steps", inner_step="step", eta="prox_step")
@dataclass(frozen=True)
class FedSplit(Algorithm[Model, Client, Model, Reply]):
    """Peaceman-Rachford splitting with a local prox."""

    info: ClassVar[Info] = Info(
        "Pathak, Wainwright: FedSplit: An algorithmic framework for fast federated optimization",
        2020,
        regularizer="none",
        participation="full",
        exact=True,
        arxiv="2005.05238",
        bibtex="pathak2020fedsplit",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"prox_step", "step"})

    prox_step: Positive
    local_steps: Count
    step: Positive

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Eta = 1/L, and inner steps of 1/(L + 1/eta)."""
        return cls(prox_step=2 * round_step(L, rho), local_steps=local_steps, step=round_step(L, rho))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Model, Client]:
        return Model(x0), Client(x0)

    def broadcast(self, server: Model) -> Model:
        return server

    def local_round(self, message: Model, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """The local prox at the reflection of z_i, then a double step."""
        centre = 2 * message.x - client.z
        u = message.x
        for t in range(self.local_steps):
            u = u - self.step * (grad(u, t) + (u - centre) / self.prox_step)
        z = client.z + 2 * (u - message.x)
        return Reply(z - message.x), Client(z)

    def aggregate(self, server: Model, reply: Reply, share: float, h: Regularizer) -> Model:
        """The mean of the z_i."""
        return Model(server.x + reply.dz)

    def solution(self, server: Model, h: Regularizer) -> Tensor:
        """The mean of the z_i."""
        return server.x
