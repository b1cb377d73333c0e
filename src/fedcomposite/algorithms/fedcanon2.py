"""FedCanon II: Zhou, Zhong, Shi, Wen & Yu, *FedCanon: non-convex composite federated learning*, 2025 (Algorithm 2).

FedCanon with the prox moved to the clients, so that only Delta travels down:

    client:  z = P_alpha(z_prev - alpha Delta),   c_i = c_i + Delta - Delta_i,   tau steps y <- y - beta (g_i(y) + c_i)
    server:  Delta = mean_i Delta_i,   Delta_i = (z - y_tau) / (beta tau)

Symbols, assumptions, residual and what is sent for Delta_i as in FedCanon. The iterates are the same as FedCanon's; one
vector goes each way and every client takes one prox per round. The server repeats that prox to know the model, so n + 1
are counted where the paper says n.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    z: Tensor  # global model
    delta: Tensor  # last mean direction


class Message(NamedTuple):
    delta: Tensor  # last mean direction


class Client(NamedTuple):
    z: Tensor  # own copy of the model
    pending: Tensor  # minus the mean gradient
    started: Tensor  # 1 after a round


class Reply(NamedTuple):
    delta: Tensor  # own mean gradient


@dataclass(frozen=True)
class FedCanonII(Algorithm[Server, Client, Message, Reply]):
    """FedCanon with the prox at the clients and one vector each way."""

    info: ClassVar[Info] = Info(
        "Zhou, Zhong, Shi, Wen, Yu: FedCanon: Non-convex composite federated learning",
        2025,
        regularizer="weakly convex",
        participation="full",
        exact=False,
        arxiv="2504.11903",
        bibtex="zhou2025fedcanon",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"step"})
    one_regularizer: ClassVar[str] = (
        "its clients repeat the server's prox of the round before; FedCanon has no such rule"
    )

    local_steps: Count
    step: Positive
    server_step: Positive

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """The local steps share the server's step, alpha = beta tau; it is 1/L, larger ones leave a larger residual."""
        alpha = 2 * round_step(L, 2 * rho)
        return cls(local_steps=local_steps, step=alpha / local_steps, server_step=alpha)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Everyone starts at x0 with zero control variates."""
        zero = torch.zeros_like(x0)
        return Server(x0, zero), Client(x0, zero, x0.new_zeros(1))

    def broadcast(self, server: Server) -> Message:
        """Send the last mean direction only."""
        return Message(server.delta)

    def local_round(self, message: Message, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Finish the last round's prox (there was none before the first), then tau corrected gradient steps."""
        moved = h.prox(client.z - self.server_step * message.delta, self.server_step)
        z = torch.where(client.started > 0, moved, client.z)
        c = client.pending + message.delta
        y = z
        for t in range(self.local_steps):
            y = y - self.step * (grad(y, t) + c)
        pending = c - (z - y) / (self.step * self.local_steps)
        return Reply(-pending), Client(z, pending, torch.ones_like(client.started))

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Average the directions, and follow the clients' model."""
        return Server(h.prox(server.z - self.server_step * reply.delta, self.server_step), reply.delta)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        """The model all clients agree on."""
        return server.z
