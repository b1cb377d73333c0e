"""What sparse federated training is compared with, written from the papers' descriptions as methods of ours.

All take h as a :class:`SparsityTarget`, whose prox at step 0 keeps the largest weights, and train weights (``weights``:
where they lie in the vector) on masks; biases and normalisation are always dense.

FLASH (Babakniya et al., *Revisiting sparsity hunting in federated learning*, TMLR 2023), whose layers get their shares
from a dense warm-up and keep their mask, is ``FedAvg`` with a share that jumps: see ``benchmarks.knob``.

* :class:`Regrown`: a constant share; in the middle of each round a client drops the smallest weights of its mask and
  lets as many others grow where its gradient is largest; the server averages a weight over the clients that have it
  (FedDST: Bibikar, Vikalo, Wang, Chen, *Federated dynamic sparse training*, AAAI 2022). There masks change every 10 to
  20 rounds by more; here in every round by less.
* :class:`Powered`: weights are sign(t)|t|^b of what is trained, so that small ones hardly move, and a client keeps the
  largest before it replies (SparsyFed: Guastella et al., ICLR 2025; without its pruned activations, which save work).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

import annotated_types as at
import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, ZeroOrMore
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info
from fedcomposite.regularizers.base import Regularizer

Runs = tuple[tuple[Annotated[int, at.Ge(0)], Count], ...]
_INFO = Info("-", 2025, regularizer="weakly convex", participation="any", exact=False)


class Server(NamedTuple):
    """The state of all of them, which they also send."""

    x: Tensor  # global model


class Reply(NamedTuple):
    """What most reply."""

    dx: Tensor  # model change


class Shares(NamedTuple):
    """What :class:`Regrown` replies."""

    y: Tensor  # weights of the client's mask
    mask: Tensor  # which these are


@functools.cache
def always(weights: Runs, dimension: int, device: torch.device) -> Tensor:
    """Coordinates that are no weights."""
    free = torch.ones(dimension, dtype=torch.bool)
    for a, b in weights:
        free[a:b] = False
    return free.to(device)


@dataclass(frozen=True)
class Regrown(Algorithm[Server, Empty, Server, Shares]):
    """Masks that every client changes a little in every round: ``changed`` of its ``kept`` weights."""

    info: ClassVar[Info] = _INFO
    schedulable: ClassVar[frozenset[str]] = frozenset({"step"})
    local_steps: Count
    step: Positive
    decay: ZeroOrMore = 0.0
    kept: Count = field(kw_only=True)
    changed: Count = field(kw_only=True)
    weights: Runs = field(kw_only=True)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        return Server(h.prox(x0, 0.0)), Empty()

    def broadcast(self, server: Server) -> Server:
        return server

    def local_round(self, message: Server, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Shares, Empty]:
        y = message.x
        free = always(self.weights, y.shape[-1], y.device)
        mask = ((y != 0) | free).to(y)
        for t in range(self.local_steps):
            g = grad(y, t) + self.decay * y
            if t == self.local_steps // 2:
                mask = self._regrown(y, g, mask, free)
                y = y * mask
            y = y - self.step * mask * g
        return Shares(y * mask, mask), client

    def _regrown(self, y: Tensor, g: Tensor, mask: Tensor, free: Tensor) -> Tensor:
        sizes = y.abs().masked_fill(free, 0.0)
        least = sizes.topk(self.kept - self.changed, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        slopes = g.abs().masked_fill(mask > 0, 0.0)
        steep = slopes.topk(self.changed, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        return (free | ((sizes >= least) & (sizes > 0)) | (slopes >= steep)).to(y)

    def aggregate(self, server: Server, reply: Shares, share: float, h: Regularizer) -> Server:
        return Server(h.prox(reply.y / reply.mask.clamp(min=1e-6), 0.0))

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x


@dataclass(frozen=True)
class Powered(Algorithm[Server, Empty, Server, Reply]):
    """Small weights move slowly, and clients keep the largest."""

    info: ClassVar[Info] = _INFO
    schedulable: ClassVar[frozenset[str]] = frozenset({"step"})
    local_steps: Count
    step: Positive
    decay: ZeroOrMore = 0.0
    power: Positive = 1.25
    weights: Runs = field(kw_only=True)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        return Server(x0), Empty()  # dense until clients have replied

    def broadcast(self, server: Server) -> Server:
        return server

    def local_round(self, message: Server, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        y = message.x
        free = always(self.weights, y.shape[-1], y.device)
        root = torch.where(free, y, y.abs().pow(1 / self.power).copysign(y))
        for t in range(self.local_steps):
            slope = torch.where(free, 1.0, self.power * root.abs().pow(self.power - 1))
            root = root - self.step * slope * (grad(y, t) + self.decay * y)
            y = torch.where(free, root, root.abs().pow(self.power).copysign(root))
        return Reply(h.prox(y, 0.0) - message.x), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        return Server(h.prox(server.x + reply.dx, 0.0))

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
