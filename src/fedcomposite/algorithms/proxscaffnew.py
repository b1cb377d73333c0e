"""Composite Scaffnew: ProxSkip (Mishchenko, Malinovsky, Stich & Richtarik, ICML 2022, Algorithm 1) on consensus plus h.

    client:  y_0 = x,   y_{t+1} = y_t - gamma (g_i(y_t) - k_i)   for T steps
    server:  x+ = P_{gamma/p}(mean_i(y_T - (gamma/p) k_i))
    client:  k_i+ = k_i + (p/gamma) (x+ - y_T)

T is geometric with mean 1/p, one number for all clients, as in Scaffnew. ProxSkip minimises phi + psi and takes the
prox of psi with probability p. Here phi = sum_i f_i(x_i), and psi is sum_i h(x_i) where all x_i agree, infinite
elsewhere: its prox is the prox of h at the mean. The paper sets h = 0 there, so that the k_i sum to zero and drop out
of the mean; with h they do not, and mean_i k_i tends to grad f(x*).

Symbols: gamma = ``step`` <= 1/L, p = ``p``, or ``local_steps`` for T = ``local_steps`` and p = 1/T without a coin;
``seed`` is that of the coin. Assumptions: f smooth and strongly convex, h convex in the theory of ProxSkip (the rule is
defined while gamma rho < p), all clients take part. Exact, with one prox per round, at the server.

As in Scaffnew the clients hold ``own`` = y_T - (gamma/p) k_i, of which the server needs just the mean: one vector goes
each way, and T goes down.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, Probability
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer
from fedcomposite.rng import geometric


class Server(NamedTuple):
    x: Tensor  # global model
    round: Tensor  # rounds done


class Message(NamedTuple):
    x: Tensor  # global model
    steps: Tensor  # local steps to take


class Client(NamedTuple):
    own: Tensor  # model that leaves k_i zero


class Reply(NamedTuple):
    dv: Tensor  # own minus the global model


@dataclass(frozen=True)
class ProxScaffnew(Algorithm[Server, Client, Message, Reply]):
    """Scaffnew for composite problems: one prox per round, at the server."""

    info: ClassVar[Info] = Info(
        "Mishchenko, Malinovsky, Stich, Richtarik: ProxSkip",
        2022,
        regularizer="weakly convex",
        participation="full",
        exact=True,
        arxiv="2202.09357",
        bibtex="mishchenko2022proxskip",
    )
    recordable: ClassVar[bool] = False

    step: Positive
    p: Probability | None = None
    local_steps: Count | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.p is None) == (self.local_steps is None):
            raise ValueError(
                f"ProxScaffnew: p = {self.p}, local_steps = {self.local_steps}, must have exactly one of them: "
                "p tosses a coin after each step, local_steps communicates after as many steps each time"
            )

    @property
    def probability(self) -> float:
        """P, also of the coin that is not tossed: 1 / local_steps."""
        return self.p if self.p is not None else 1 / (self.local_steps or 1)

    @property
    def scale(self) -> float:
        """Gamma / p, the prox parameter."""
        return self.step / self.probability

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Steps of 1/L, ``local_steps`` of them on average; only a weakly convex h makes them shrink with that."""
        return cls(step=2 * round_step(L, 2 * rho * local_steps), p=1 / local_steps)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0 with zero control variates."""
        return Server(x0, x0.new_zeros(1, dtype=torch.int64)), Client(x0)

    def broadcast(self, server: Server) -> Message:
        """Send the model and the outcome of the shared coin."""
        steps = self.local_steps or geometric(self.probability, self.seed, int(server.round))
        return Message(server.x, torch.full_like(server.round, steps))

    def local_round(self, message: Message, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Form the control variate, then the corrected steps, no prox."""
        k = (message.x - client.own) / self.scale
        y = message.x
        for t in range(int(message.steps.flatten()[0])):
            y = y - self.step * (grad(y, t) - k)
        own = y - self.scale * k
        return Reply(own - message.x), Client(own)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """The prox of the mean."""
        return Server(h.prox(server.x + reply.dv, self.scale), server.round + 1)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
