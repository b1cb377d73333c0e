"""FedDR: Tran-Dinh, Pham, Phan & Nguyen, *FedDR: randomized Douglas-Rachford splitting algorithms for nonconvex
federated composite optimization*, NeurIPS 2021 (Algorithm 1).

    client in S:  y_i+ = y_i + alpha (x- - x_i),   x_i+ = prox of eta f_i at y_i+, inexactly,   x^_i+ = 2 x_i+ - y_i+
    server:       x~+ = x~ + (1/n) sum_S (x^_i+ - x^_i),   x-+ = P_eta(x~+)

Symbols: eta = ``prox_step``, alpha = ``alpha`` (1 is Douglas-Rachford, 2 Peaceman-Rachford); x- = ``x_bar`` is the
model, x~ = ``x_tilde``. The local prox takes ``local_steps`` gradient steps of length ``step`` <= 1 / (L + 1/eta) on
f_i + ||. - y_i||^2 / (2 eta). Assumptions: f smooth, h rho-weakly convex with eta rho < 1, any participation.

The solver starts at the client's previous x_i, as in the authors' code: then even one inner step is enough to be
exact, while a fixed number of steps from y_i leaves a bias.

Deviations. Everything starts at x0, so that x~ is the mean of all x^_i from the first round on; starting x_i at the
prox of x0 but x~ at x0 shifts the problem by a linear term for ever. x^_i = 2 x_i - y_i at all times, so it is not
kept.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, Self

import annotated_types as at
from torch import Tensor

from fedcomposite._validation import Count, Positive, formerly
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x_tilde: Tensor  # mean of reflections
    x_bar: Tensor  # global model


class Message(NamedTuple):
    x_bar: Tensor  # global model


class Client(NamedTuple):
    y: Tensor  # centre of its prox
    x: Tensor  # own model


class Reply(NamedTuple):
    dx_hat: Tensor  # change of its reflection


@formerly(inner_steps="local_steps", inner_step="step", eta="prox_step")
@dataclass(frozen=True)
class FedDR(Algorithm[Server, Client, Message, Reply]):
    """Randomized Douglas-Rachford splitting with inexact local proxes."""

    info: ClassVar[Info] = Info(
        "Tran-Dinh, Pham, Phan, Nguyen: FedDR, randomized Douglas-Rachford splitting algorithms for nonconvex "
        "federated composite optimization",
        2021,
        regularizer="weakly convex",
        participation="any",
        exact=True,
        arxiv="2103.03452",
        bibtex="trandinh2021feddr",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"prox_step", "step"})

    prox_step: Positive
    alpha: Annotated[float, at.Gt(0), at.Le(2)]
    local_steps: Count
    step: Positive

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Eta is as far as the inner steps reach, without relaxation, and the inner step the safe one."""
        eta = round_step(L, rho, local_steps)
        return cls(prox_step=eta, alpha=1.0, local_steps=local_steps, step=1 / (L + 1 / eta))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        return Server(x0, x0), Client(x0, x0)

    def broadcast(self, server: Server) -> Message:
        return Message(server.x_bar)

    def local_round(self, message: Message, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Move the centre, then gradient steps towards the prox of eta f_i."""
        y = client.y + self.alpha * (message.x_bar - client.x)
        x = client.x
        for t in range(self.local_steps):
            x = x - self.step * (grad(x, t) + (x - y) / self.prox_step)
        return Reply(2 * (x - client.x) - (y - client.y)), Client(y, x)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Renew the participants' part of the mean over all clients, and take the prox."""
        x_tilde = server.x_tilde + share * reply.dx_hat
        return Server(x_tilde, h.prox(x_tilde, self.prox_step))

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x_bar
