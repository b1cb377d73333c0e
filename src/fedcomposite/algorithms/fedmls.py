"""FedMLS: Palenzuela, Dadras, Yurtsever & Lofstedt, *Provable reduction in communication rounds for non-smooth convex
federated learning*, 2025 (Algorithm 1).

Accelerated proximal steps on a Moreau envelope of the problem over the clients' copies, for losses with kinks. In
round k = 1, 2, ... with b_k = 4 / (lam_k k), gamma_k = 2 / (k + 1) and th_t = 2 (t + 1) / (t (t + 3)),

    client:  v = z_i - (k/4) (y_i - y),   u = z_i,   and for t = 1, ..., T_k
                 u <- proj(u - (f_i'(u) / (n b_k) + u - v) / (1 + t/2)),   u~ <- (1 - th_t) u~ + th_t u
             z_i = u,   x_i = (1 - gamma_k) x_i + gamma_k u~,   y_i = (1 - gamma_{k+1}) x_i + gamma_{k+1} z_i
    server:  x = (1 - gamma_k) x + gamma_k z,   y = (1 - gamma_{k+1}) x + gamma_{k+1} z
             z = z - ((k + 1)/4) (y - mean_i y_i)

Here f_i' is a subgradient of f_i + h, proj the projection onto the ball of ``radius`` about zero, and
k/4 = 1 / (b_k lam_k). ``schedule="growing"`` is the practical rule lam_k = lam_0 / k, T_k = T_0 k; ``"constant"`` is
that of Corollary 3.2, lam_k = lam_0 = epsilon / G^2 and T_k = T_0 for an accuracy epsilon fixed beforehand.

Symbols: lam_0 = ``lambda0``, T_0 = ``first_steps``. The model is x. Assumptions: f_i and h convex and Lipschitz, all
clients take part. The error is O(1/k).

Deviations. The theory needs a radius; ``radius=None``, as in the authors' code, projects nothing. The projection acts
on the clients' iterates, as published: x may leave the ball on its way to the solution. y_i is recomputed from x_i
and z_i, not kept.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x: Tensor  # global model
    y: Tensor  # extrapolated global model
    z: Tensor  # global prox sequence
    k: Tensor  # number of the round


class Message(NamedTuple):
    y: Tensor  # extrapolated global model
    k: Tensor  # number of the round


class Client(NamedTuple):
    x: Tensor  # own averaged model
    z: Tensor  # own prox sequence


class Reply(NamedTuple):
    dy: Tensor  # own y minus global


@dataclass(frozen=True)
class FedMLS(Algorithm[Server, Client, Message, Reply]):
    """Accelerated consensus with ever more local subgradient steps, for non-smooth convex losses."""

    info: ClassVar[Info] = Info(
        "Palenzuela, Dadras, Yurtsever, Lofstedt: Provable reduction in communication rounds for non-smooth convex "
        "federated learning",
        2025,
        regularizer="subgradient",
        participation="full",
        exact=True,
        nonsmooth_loss=True,
        arxiv="2503.21627",
        bibtex="palenzuela2025provable",
    )
    recordable: ClassVar[bool] = False

    lambda0: Positive
    first_steps: Count = 1
    radius: Positive | None = None
    schedule: Literal["growing", "constant"] = "growing"

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """The paper's T_k = k: the number of local steps grows by itself."""
        return cls(lambda0=20 * round_step(L, rho))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Every sequence starts at x0."""
        return Server(x0, x0, x0, x0.new_ones(1, dtype=torch.int64)), Client(x0, x0)

    def broadcast(self, server: Server) -> Message:
        """Send y and the number of the round."""
        return Message(server.y, server.k)

    def local_round(self, message: Message, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """T_k subgradient steps towards a prox of f_i / n, then the client's side of the acceleration."""
        k = int(message.k.flatten()[0])
        grows = self.schedule == "growing"
        steps = self.first_steps * k if grows else self.first_steps
        weight = (self.lambda0 if grows else self.lambda0 * k) / (4 * grad.cohort)  # 1 / (n b_k)
        v = client.z - k / 4 * (_mix(client.x, client.z, k) - message.y)
        u = mean = client.z
        for t in range(1, steps + 1):
            u = u - (weight * (grad(u, t - 1) + h.subgradient(u)) + u - v) / (1 + t / 2)
            if self.radius is not None:
                norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
                u = u * (self.radius / norm.clamp(min=self.radius))
            theta = 2 * (t + 1) / (t * (t + 3))
            mean = (1 - theta) * mean + theta * u
        x = _mix(client.x, mean, k)
        return Reply(_mix(x, u, k + 1) - message.y), Client(x, u)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """The server's side of the acceleration, then z moves towards the clients' mean."""
        k = int(server.k)
        x = _mix(server.x, server.z, k)
        y = _mix(x, server.z, k + 1)
        z = server.z - (k + 1) / 4 * (y - (server.y + reply.dy))
        return Server(x, y, z, server.k + 1)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x


def _mix(x: Tensor, z: Tensor, k: int) -> Tensor:
    """(1 - gamma_k) x + gamma_k z, gamma_k = 2 / (k + 1)."""
    return x + 2 / (k + 1) * (z - x)
