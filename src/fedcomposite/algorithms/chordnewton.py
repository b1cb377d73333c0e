"""ChordNewton: proximal Newton with the Hessian of the first round (linear models with a smooth loss).

The chord, or simplified Newton, method with h: see Ortega, Rheinboldt: Iterative solution of nonlinear equations in
several variables, 1970, section 7.3, and Lee, Sun, Saunders (2014) for the proximal step. Clients send their Hessian
once, at the start, and a gradient in every round:

    H = V max(Lambda, damping) V',  V Lambda V' the mean Hessian at x0
    x+ = argmin_u  g'(u - x) + (u - x)'H(u - x)/(2 step) + h(u)

It is made for noised answers (:mod:`fedcomposite.privacy`): a Hessian is one query, so a run of R rounds costs R + 1,
and there is no line search, which noise would mislead. At x0 = 0 the Hessian of the logistic loss is its largest one
(its second derivative is at most the one at margin 0), so every step with step = 1 lowers the objective, as in
Böhning, Lindsay (1988); for least squares it is the Hessian everywhere, and one round solves the problem. ``damping``
bounds what noise in H can do; ``step`` may fall like 1/r, which averages the noise of the gradients.

Assumptions: f twice differentiable at x0, h convex or weakly convex, all clients in every round. Minibatches are not
used. Replies are linear in what clients compute, so shares of noise add up under secure aggregation.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Positive, ZeroOrMore
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info
from fedcomposite.algorithms.inner import QuadraticModel, minimise
from fedcomposite.regularizers.base import Regularizer

_LARGEST = 4000  # coordinates: half of their square is sent by every client, once


class Server(NamedTuple):
    x: Tensor  # model
    hessian: Tensor  # upper triangle, damped
    wanted: Tensor  # mask of coordinates asked for


class Message(NamedTuple):
    x: Tensor  # model
    wanted: Tensor  # mask of coordinates of the Hessian


class Reply(NamedTuple):
    gradient: Tensor  # at x
    hessian: Tensor  # upper triangle, or nothing


@dataclass(frozen=True)
class ChordNewton(Algorithm[Server, Empty, Message, Reply]):
    """One Hessian, then gradients: Newton steps with h at the server.

    Parameters
    ----------
    step : float
        Step in the metric of H; 1 is Newton's.
    damping : float
        Least eigenvalue of H.
    """

    info: ClassVar[Info] = Info(
        "Lee, Sun, Saunders: Proximal Newton-type methods for minimizing composite functions",
        2014,
        regularizer="weakly convex",
        participation="full",
        exact=True,
        second_order=True,
        doi="10.1137/130921428",
    )
    varying: ClassVar[bool] = True
    recordable: ClassVar[bool] = False
    one_regularizer: ClassVar[str] = "it solves one problem, to the end"
    linear_replies: ClassVar[bool] = True
    schedulable: ClassVar[frozenset[str]] = frozenset({"step"})

    step: Positive = 1.0
    damping: ZeroOrMore = 1e-9

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Newton's step; h must not be more concave than H is convex."""
        return cls(damping=2 * rho if rho > 0 else 1e-9 * L)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        if not h.weakly_convex:
            raise ValueError(f"ChordNewton needs a convex or weakly convex h, and {h} has no finite rho; try FedNMap")
        d = len(x0)
        if d > _LARGEST:
            raise ValueError(f"ChordNewton takes Hessians of up to {_LARGEST} coordinates, not {d}; try FedNMap")
        return Server(x0, x0.new_zeros(d * (d + 1) // 2), torch.ones_like(x0, dtype=torch.bool)), Empty()

    def broadcast(self, server: Server) -> Message:
        """Send the model, and whether the Hessian is wanted."""
        return Message(server.x, server.wanted)

    def local_round(self, message: Message, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """The gradient, and the Hessian if it is wanted."""
        x = message.x
        if not bool(message.wanted.any()):
            return Reply(grad.full(x), x[..., :0]), client
        H = grad.hessian(x, message.wanted)
        i, j = torch.triu_indices(H.shape[-1], H.shape[-1], device=x.device)
        return Reply(grad.full(x), H[..., i, j]), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        x, d = server.x, len(server.x)
        i, j = torch.triu_indices(d, d, device=x.device)
        H = x.new_empty(d, d)
        if len(reply.hessian):
            H[i, j] = H[j, i] = reply.hessian
            values, V = torch.linalg.eigh(H)
            H = (V * values.clamp(min=self.damping)) @ V.t()
        else:
            H[i, j] = H[j, i] = server.hessian
        separable = torch.unique(h.coupling(d)).numel() == d
        model = QuadraticModel(x, reply.gradient, H / self.step, h, separable)
        residual = float(h.optimality(x, reply.gradient))
        found, _ = minimise(model, 1e-13 * residual)
        return Server(found, H[i, j], torch.zeros_like(server.wanted))

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
