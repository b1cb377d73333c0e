"""Scaffnew: Mishchenko, Malinovsky, Stich & Richtarik, *ProxSkip: yes! Local gradient steps provably lead to
communication acceleration! Finally!*, ICML 2022 (Algorithm 2).

    client:  y_0 = x,   y_{t+1} = y_t - gamma (g_i(y_t) - k_i)   for T steps
    server:  x+ = mean_i y_T
    client:  k_i+ = k_i + (p/gamma) (x+ - y_T)

T is geometric with mean 1/p, one number for all clients: a shared coin communicates after each step with probability p.

Symbols: gamma = ``step`` <= 1/L, p = ``p``. ``local_steps`` in place of ``p`` tosses no coin: T = ``local_steps``
and p = 1/T, which is SCAFFOLD (option 2) with server step 1. ``seed`` is that of the coin. Assumptions: f smooth and
strongly convex, h = 0, all clients take part; then sum_i k_i = 0 always and k_i tends to grad f_i(x*). A subgradient
of h is added to the local gradients, as for FedAvg, when h is not zero; ProxScaffnew is the composite method.

Deviation. Clients finish k_i when the next x arrives; until then they hold ``own`` = y_T - (gamma/p) k_i, and
k_i+ = (p/gamma) (x+ - own). They send own in place of y_T: the mean is the same, and the rounding of sum_i k_i = 0 does
not add up from round to round. One vector goes each way, and T goes down.
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
    dx: Tensor  # own minus the global model


@dataclass(frozen=True)
class Scaffnew(Algorithm[Server, Client, Message, Reply]):
    """Local steps corrected by control variates, with communication at random times."""

    info: ClassVar[Info] = Info(
        "Mishchenko, Malinovsky, Stich, Richtarik: ProxSkip",
        2022,
        regularizer="subgradient",
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
                f"Scaffnew: p = {self.p}, local_steps = {self.local_steps}, must have exactly one of them: "
                "p tosses a coin after each step, local_steps communicates after as many steps each time"
            )

    @property
    def probability(self) -> float:
        """P, also of the coin that is not tossed: 1 / local_steps."""
        return self.p if self.p is not None else 1 / (self.local_steps or 1)

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """A coin with ``local_steps`` steps on average; the step need not shrink with their number."""
        return cls(step=round_step(L, rho), p=1 / local_steps)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0 with zero control variates."""
        return Server(x0, x0.new_zeros(1, dtype=torch.int64)), Client(x0)

    def broadcast(self, server: Server) -> Message:
        """Send the model and the outcome of the shared coin."""
        steps = self.local_steps or geometric(self.probability, self.seed, int(server.round))
        return Message(server.x, torch.full_like(server.round, steps))

    def local_round(self, message: Message, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Form the control variate, then the corrected steps."""
        scale = self.step / self.probability
        k = (message.x - client.own) / scale
        y = message.x
        for t in range(int(message.steps.flatten()[0])):
            y = y - self.step * (grad(y, t) + h.subgradient(y) - k)
        own = y - scale * k
        return Reply(own - message.x), Client(own)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Move to the mean model."""
        return Server(server.x + reply.dx, server.round + 1)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
