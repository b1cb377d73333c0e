"""FedDA (federated dual averaging): Yuan, Zaheer & Reddi, *Federated composite optimization*, ICML 2021.

With E the step elapsed so far, E = eta_g eta tau r in round r = 0, 1, ...,

    client:  z_0 = z,   z_{t+1} = z_t - eta g_i(P_{E + t eta}(z_t))
    server:  z+ = z + eta_g mean_i(z_tau - z),   E+ = E + eta_g eta tau

Symbols: eta = ``step``, eta_g = ``server_step``, tau = ``local_steps``. The model is P_E(z), and z starts at x0 with
E = 0. Assumptions: f smooth, h convex, any participation. The prox parameter grows without bound, so a weakly
convex h is refused: s rho < 1 would fail after finitely many rounds.

Known limit. With tau = 1 this is dual averaging and exact; with tau > 1 and full gradients a residual linear in
eta remains (drift).
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    z: Tensor  # dual global model
    elapsed: Tensor  # sum of steps


class Reply(NamedTuple):
    dz: Tensor  # dual change


@dataclass(frozen=True)
class FedDA(Algorithm[Server, Empty, Server, Reply]):
    """Local dual averaging with a prox that grows with all steps taken."""

    info: ClassVar[Info] = Info(
        "Yuan, Zaheer, Reddi: Federated composite optimization",
        2021,
        regularizer="convex",
        participation="any",
        exact=False,
        arxiv="2011.08474",
        bibtex="yuan2021federated",
    )

    one_regularizer: ClassVar[str] = "its prox stands for h of all rounds so far"

    schedulable: ClassVar[frozenset[str]] = frozenset({"server_step", "step"})

    local_steps: Count
    step: Positive
    server_step: Positive = 1.0

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        """Start the dual model at x0."""
        if h.rho > 0:
            raise ValueError(
                f"FedDA needs a convex h, but {h} is only weakly convex (rho = {h.rho:g}): its prox step grows without "
                "bound and would pass 1/rho; use FedNMap, Zhang, FedCanon or ProxScaffnew"
            )
        return Server(x0, x0.new_zeros(1)), Empty()

    def broadcast(self, server: Server) -> Server:
        """Send the dual model and the elapsed step."""
        return server

    def local_round(self, message: Server, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """Tau gradient steps on the dual model, with gradients at its prox."""
        z = message.z
        for t in range(self.local_steps):
            z = z - self.step * grad(h.prox(z, message.elapsed + t * self.step), t)
        return Reply(z - message.z), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Move the dual model along the mean change; the clock runs on."""
        elapsed = server.elapsed + self.server_step * self.step * self.local_steps
        return Server(server.z + self.server_step * reply.dz, elapsed)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        """The prox of the dual model, over the elapsed step."""
        return h.prox(server.z, server.elapsed)
