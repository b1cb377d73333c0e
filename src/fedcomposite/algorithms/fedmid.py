"""FedMid (federated mirror descent): Yuan, Zaheer & Reddi, *Federated composite optimization*, ICML 2021.

    client:  y_0 = x,   y_{t+1} = P_eta(y_t - eta g_i(y_t))
    server:  x+ = P_{eta_g eta tau}(x + eta_g mean_i(y_tau - x))

Symbols: eta = ``step``, eta_g = ``server_step``, tau = ``local_steps``. ``server_prox_only=True`` is the paper's
variant without the clients' prox. Assumptions: f smooth, h convex in the paper (the rule is defined while eta_g eta
tau rho < 1), any participation.

Three prox parameters of the server are in circulation; eta_g eta tau is that of the authors' code.

Known limit. The clients regularize by eta tau in a round and the server does so once more: with one client, one local
step and l1 this is proximal gradient descent on f + 2h. The doubling goes away without the clients' prox; the drift
of several local steps, as in FedAvg, remains.

``momentum`` is a heavy ball within a round: m = momentum m + (1 - momentum) g, the first m is the first g, and m takes
the place of g in every local step. It is made anew in each round, so clients remember nothing. ``server_optimizer`` is
one of :mod:`fedcomposite.algorithms.optimizers` (FedOpt), for the mean change of a round; it needs
``server_prox_only``, and the server's prox is then taken with the optimizer's step.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info
from fedcomposite.algorithms.optimizers import Decay, Optimizer, OptimizerState, moved, nothing
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    x: Tensor  # global model
    first: Tensor  # optimizer's moments, empty without
    second: Tensor  # the same
    rounds: Tensor  # the same


class Model(NamedTuple):
    x: Tensor  # global model


class Reply(NamedTuple):
    dx: Tensor  # model change


@dataclass(frozen=True)
class FedMid(Algorithm[Server, Empty, Model, Reply]):
    """Local proximal gradient steps, averaging, and one more prox."""

    info: ClassVar[Info] = Info(
        "Yuan, Zaheer, Reddi: Federated composite optimization",
        2021,
        regularizer="weakly convex",
        participation="any",
        exact=False,
        arxiv="2011.08474",
        bibtex="yuan2021federated",
    )

    schedulable: ClassVar[frozenset[str]] = frozenset({"server_step", "step"})

    local_steps: Count
    step: Positive
    server_step: Positive = 1.0
    server_prox_only: bool = False
    momentum: Decay = 0.0
    server_optimizer: Optimizer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server_optimizer is not None and not self.server_prox_only:
            raise ValueError(
                "FedMid: server_optimizer needs server_prox_only = True: the clients' prox would enter its moments"
            )

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        if self.server_optimizer is None:
            return Server(x0, *nothing(x0)), Empty()
        self.server_optimizer.check(h, len(x0))
        return Server(x0, *self.server_optimizer.init(x0)), Empty()

    def broadcast(self, server: Server) -> Model:
        return Model(server.x)

    def local_round(self, message: Model, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        y = m = message.x
        for t in range(self.local_steps):
            g = grad(y, t)
            m = self.momentum * m + (1 - self.momentum) * g if t and self.momentum else g
            y = torch.sub(y, m, alpha=self.step)
            if not self.server_prox_only:
                y = h.prox(y, self.step)
        return Reply(y - message.x), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Move along the mean change, then take the prox of the whole round's step."""
        reach = self.step * self.local_steps
        if self.server_optimizer is None:
            before = server.x + self.server_step * reply.dx
            return server._replace(x=h.prox(before, self.server_step * self.step * self.local_steps))
        moments = OptimizerState(*server[1:])
        before, step, moments = moved(self.server_optimizer, server.x, reply.dx, moments, reach, self.server_step)
        return Server(h.prox(before, step), *moments)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
