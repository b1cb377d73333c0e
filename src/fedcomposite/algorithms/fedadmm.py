"""FedADMM: Wang, Marella & Anderson, *FedADMM: a federated primal-dual algorithm allowing partial participation*,
CDC 2022.

    client in S:  x_i+ = argmin f_i(x) + <lam_i, x - x-> + ||x - x-||^2 / (2 eta), inexactly
                  lam_i+ = lam_i + (x_i+ - x-) / eta,   x^_i+ = x_i+ + eta lam_i+
    server:       x~+ = x~ + (1/n) sum_S (x^_i+ - x^_i),   x-+ = P_eta(x~+)

Symbols: eta = ``prox_step`` (1/rho in the paper), lam = ``dual``; x- = ``x_bar`` is the model, x~ = ``x_tilde``. The
local problem takes ``local_steps`` gradient steps of length ``step`` <= 1 / (L + 1/eta) from the client's previous x_i.
Assumptions: f smooth, h rho-weakly convex with eta rho < 1, any participation.

The iterates are those of FedDR with alpha = 1. The methods of Gong, Li & Freris and of Zhou & Li carry the same name
and are different (both have h = 0).

Deviation. x^_i = x_i + eta lam_i at all times, so it is not kept.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, formerly
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x_tilde: Tensor  # mean of shifted models
    x_bar: Tensor  # global model


class Message(NamedTuple):
    x_bar: Tensor  # global model


class Client(NamedTuple):
    x: Tensor  # own model
    dual: Tensor  # multiplier of consensus


class Reply(NamedTuple):
    dx_hat: Tensor  # change of x + eta dual


@formerly(inner_steps="local_steps", inner_step="step", eta="prox_step")
@dataclass(frozen=True)
class FedADMM(Algorithm[Server, Client, Message, Reply]):
    """Consensus ADMM with inexact local problems and one prox at the server."""

    info: ClassVar[Info] = Info(
        "Wang, Marella, Anderson: FedADMM, a federated primal-dual algorithm allowing partial participation",
        2022,
        regularizer="weakly convex",
        participation="any",
        exact=True,
        arxiv="2203.15104",
        bibtex="wang2022fedadmm",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"step"})

    prox_step: Positive
    local_steps: Count
    step: Positive

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Eta is as far as the inner steps reach, and the inner step the safe one."""
        eta = round_step(L, rho, local_steps)
        return cls(prox_step=eta, local_steps=local_steps, step=1 / (L + 1 / eta))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """All models start at x0, the multipliers at zero."""
        return Server(x0, x0), Client(x0, torch.zeros_like(x0))

    def broadcast(self, server: Server) -> Message:
        return Message(server.x_bar)

    def local_round(self, message: Message, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Gradient steps on the augmented Lagrangian, then the multiplier."""
        x = client.x
        for t in range(self.local_steps):
            x = x - self.step * (grad(x, t) + client.dual + (x - message.x_bar) / self.prox_step)
        dual = client.dual + (x - message.x_bar) / self.prox_step
        # The change of what is kept, rounding included: the server's mean stays that of the clients.
        return Reply(x - client.x + self.prox_step * (dual - client.dual)), Client(x, dual)

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Renew the participants' part of the mean over all clients, and take the prox."""
        x_tilde = server.x_tilde + share * reply.dx_hat
        return Server(x_tilde, h.prox(x_tilde, self.prox_step))

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x_bar
