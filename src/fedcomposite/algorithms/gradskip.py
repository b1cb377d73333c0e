"""GradSkip: Maranjyan, Safaryan & Richtarik, *GradSkip: communication-accelerated local gradient methods*, 2022.

At every iteration, with one coin theta ~ Bernoulli(p) for all and a private coin e_i ~ Bernoulli(q_i),

    k^_i = k_i if e_i else g_i(x_i),   x^_i = x_i - gamma (g_i(x_i) - k^_i)
    x_i+ = mean_j(x^_j - (gamma/p) k^_j) if theta else x^_i,   k_i+ = k^_i + (p/gamma) (x_i+ - x^_i)

Symbols: gamma = ``step``, p = ``p`` (the probability of communicating), q_i = ``q``, one number or one per client.
After e_i = 0 nothing moves at the client until the next communication, so it stops computing. q = 1 is Scaffnew.
The paper takes p = 1/sqrt(kappa_max), q_i = (1 - 1/kappa_i) / (1 - 1/kappa_max); in general gamma <= min_i p^2 / (L_i
(1 - q_i (1 - p^2))). Assumptions: f smooth and strongly convex, h = 0, all clients take part. Written from memory of
the paper and checked by reductions.

A round here ends with a communication: it holds a geometric number of iterations, drawn by the server from ``seed``.
Clients keep what they sent, ``own`` = x^_i - (gamma/p) k^_i, and find k_i = (p/gamma) (x - own) when x arrives. Clients
computed side by side wait for the last one, whose gradients are then counted for all.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, Self

import annotated_types as at
import torch
from torch import Tensor

from fedcomposite._validation import Positive, Probability
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer
from fedcomposite.rng import geometric


class Server(NamedTuple):
    x: Tensor  # global model
    round: Tensor  # communications so far


class Message(NamedTuple):
    x: Tensor  # global model
    steps: Tensor  # iterations before the next communication


class Client(NamedTuple):
    own: Tensor  # what it sent last


class Reply(NamedTuple):
    dx: Tensor  # change to be averaged


Share = Annotated[float, at.Ge(0), at.Le(1)]


@dataclass(frozen=True)
class GradSkip(Algorithm[Server, Client, Message, Reply]):
    """Scaffnew whose well-conditioned clients stop computing early."""

    info: ClassVar[Info] = Info(
        "Maranjyan, Safaryan, Richtarik: GradSkip: Communication-accelerated local gradient methods",
        2022,
        regularizer="none",
        participation="full",
        exact=True,
        secondary=True,
        arxiv="2210.16402",
        bibtex="maranjyan2022gradskip",
    )
    recordable: ClassVar[bool] = False

    step: Positive
    p: Probability
    q: Share | tuple[Share, ...] = 1.0
    seed: Annotated[int, at.Ge(0)] = 0

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Steps of 1/L, and on average ``local_steps`` of them between communications."""
        return cls(step=2 * round_step(L, rho), p=1 / local_steps)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0 with k_i = 0."""
        return Server(x0, x0.new_zeros(1, dtype=torch.int64)), Client(x0)

    def broadcast(self, server: Server) -> Message:
        """Send the model and the outcome of the shared coin."""
        return Message(server.x, torch.full_like(server.round, geometric(self.p, self.seed, int(server.round))))

    def local_round(self, message: Message, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Iterate until the shared coin says to communicate; stop moving when the private one says so."""
        q = self._q(grad)
        x, k = message.x, (self.p / self.step) * (message.x - client.own)
        moving = torch.ones_like(x[..., :1], dtype=torch.bool)
        for t in range(int(message.steps.flatten()[0])):
            if not bool(moving.any()):
                break
            g, go = grad(x, t), grad.uniform(t) < q
            k = torch.where(moving & ~go, g, k)
            moving = moving & go
            x = torch.where(moving, x - self.step * (g - k), x)
        own = x - (self.step / self.p) * k
        return Reply(own - message.x), Client(own)

    def _q(self, grad: Gradient) -> Tensor | float:
        if isinstance(self.q, float):
            return self.q
        if len(self.q) != grad.cohort:
            raise ValueError(f"GradSkip: q has {len(self.q)} numbers for {grad.cohort} clients")
        return torch.tensor(self.q, dtype=torch.float64, device=grad.position.device)[grad.position]

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        return Server(server.x + reply.dx, server.round + 1)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
