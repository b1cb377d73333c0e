"""Fast-FedDA: Bao, Crawshaw, Luo & Liu, *Fast composite optimization and statistical recovery in federated learning*,
ICML 2022.

Dual averaging on a strongly convex minorant. With T = r tau + t the steps taken so far, weights a_s, A = sum_{s<T} a_s,
G = sum_{s<T} a_s g_s and W = sum_{s<T} a_s w_s, where g_s was taken at w_s, the next point is

    w_T = argmin_w  <G, w> + (mu/4) sum_{s<T} a_s ||w - w_s||^2 + A h(w) + (gamma/2) ||w - x0||^2
        = P_{A/q}((mu W / 2 + gamma x0 - G) / q),   q = mu A / 2 + gamma

    client:  for t < tau:  w = w_T(G_i, W_i),   W_i = W_i + a_T w,   G_i = G_i + a_T g_i(w)
    server:  G = mean_i G_i,   W = mean_i W_i;   the model is w_T(G, W)

Symbols: mu = ``mu`` (strong convexity of f; half of it enters the rule, the rest pays for drift), gamma = ``gamma``,
tau = ``local_steps``. ``weighting="constant"`` is a = 1, as in the authors' code; ``"quadratic"`` is a_T = (T + 1)^2,
the paper's kind of weight, under which the step decays like 6 / (mu T) and gamma should be small.

Assumptions: f smooth and strongly convex, h convex, any participation. Exact, at a sublinear rate: the steps decay.

Deviations. G starts at -gamma x0, so that x0 need not be known to the clients. They recompute w at the start of a
round: tau proxes per client and two vectors each way, where sending w would cost a third one down and save a prox.
W grows by tau points per round, the first of them the server's w: the authors' loop adds that one on top of tau local
points, and converges to a stationary point of f - (mu / (4 tau)) ||w||^2 + h.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, ZeroOrMore
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    G: Tensor  # weighted gradients, minus gamma x0
    W: Tensor  # weighted points
    clock: Tensor  # local steps so far


class Reply(NamedTuple):
    dG: Tensor  # change of G  # noqa: N815
    dW: Tensor  # change of W  # noqa: N815


@dataclass(frozen=True)
class FastFedDA(Algorithm[Server, Empty, Server, Reply]):
    """Local dual averaging with decaying steps for strongly convex losses."""

    info: ClassVar[Info] = Info(
        "Bao, Crawshaw, Luo, Liu: Fast composite optimization and statistical recovery in federated learning",
        2022,
        regularizer="convex",
        participation="any",
        exact=True,
        arxiv="2207.08204",
        bibtex="bao2022fast",
    )

    one_regularizer: ClassVar[str] = "its prox stands for h of all rounds so far"

    local_steps: Count
    mu: ZeroOrMore
    gamma: Positive
    weighting: Literal["constant", "quadratic"] = "constant"

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """First steps that share the step of a round, and mu a hundredth of L."""
        step = round_step(L, rho) / local_steps
        return cls(local_steps=local_steps, mu=L / 100, gamma=1 / step)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        if 2 * h.rho > self.mu:
            raise ValueError(
                f"FastFedDA needs a convex h, but {h} is only weakly convex (rho = {h.rho:g}): its prox step grows to "
                f"2/mu with mu = {self.mu:g} and would pass 1/rho; use FedNMap, Zhang, FedCanon or ProxScaffnew"
            )
        return Server(-self.gamma * x0, torch.zeros_like(x0), x0.new_zeros(1, dtype=torch.int64)), Empty()

    def broadcast(self, server: Server) -> Server:
        """Send both sums and the clock."""
        return server

    def local_round(self, message: Server, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """Tau steps of dual averaging."""
        G, W = message.G, message.W
        for t in range(self.local_steps):
            clock = (message.clock + t).to(G.dtype)
            w = self._point(G, W, clock, h)
            weight = 1.0 if self.weighting == "constant" else (clock + 1).square()
            W = W + weight * w
            G = G + weight * grad(w, t)
        return Reply(G - message.G, W - message.W), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        return Server(server.G + reply.dG, server.W + reply.dW, server.clock + self.local_steps)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        """The point of the averaged sums."""
        return self._point(server.G, server.W, server.clock.to(server.G.dtype), h)

    def _point(self, G: Tensor, W: Tensor, clock: Tensor, h: Regularizer) -> Tensor:
        """The minimiser of the surrogate after ``clock`` steps."""
        total = clock if self.weighting == "constant" else clock * (clock + 1) * (2 * clock + 1) / 6
        q = self.mu / 2 * total + self.gamma
        return h.prox((self.mu / 2 * W - G) / q, total / q)
