"""EControlDA: Gao, Rodomanov, Rack & Stich, *Composite optimization with error feedback*, 2025.

    client:  d_i = C(g_i(x) - v_i - theta e_i),   v_i+ = v_i + d_i,   e_i+ = e_i + v_i+ - g_i(x);    only d_i is sent
    server:  v+ = v + mean_i d_i,   G+ = G + v+,   x+ = P_{r/gamma}(x0 - G+ / gamma) after r rounds

C keeps a part of a vector (:mod:`fedcomposite.compressors`) and is delta-contractive; theta = delta / (3 sqrt(1 -
delta) (1 + sqrt(1 - delta))). The first message is not compressed. No local steps.

Symbols: 1/gamma = ``step``, C = ``compressor`` that keeps ``ratio`` of the entries, v_i = ``estimate``, e_i =
``error``. Assumptions: f smooth, all clients take part, h convex: the prox step r/gamma grows without bound, so it
would pass 1/rho for a weakly convex h. Weights a_r = 1. The paper's theory is for sampled virtual iterates; the model
here is the true iterate. With the identity it is dual averaging, FedDA with one local step. Written from summaries of
the paper and checked by reductions.

The model is a small difference of x0 - G+ / gamma and the prox step, which both grow with the rounds, so the server
keeps them in twice the precision. (FedDA's clients would have to be sent as much; its residual is larger than that.)
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Positive, Probability
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.compressors import Compressor, Identity, KeepLargest, KeepRandom, dense
from fedcomposite.regularizers.base import Regularizer


class Server(NamedTuple):
    z: Tensor  # pre-proximal global model
    rest: Tensor  # of z, below its rounding
    x: Tensor  # global model
    estimate: Tensor  # of the mean gradient
    elapsed: Tensor  # sum of the steps, and its rest


class Client(NamedTuple):
    estimate: Tensor  # of its gradient
    error: Tensor  # accumulated compression error
    started: Tensor  # 1 after a round


class Message(NamedTuple):
    x: Tensor  # global model


class Reply(NamedTuple):
    values: Tensor  # kept entries
    indices: Tensor  # where they belong
    size: Tensor  # length of the vector


@dataclass(frozen=True)
class EControlDA(Algorithm[Server, Client, Message, Reply]):
    """Dual averaging with compressed gradients and controlled error feedback."""

    info: ClassVar[Info] = Info(
        "Gao, Rodomanov, Rack, Stich: Composite optimization with error feedback: the dual averaging approach",
        2025,
        regularizer="convex",
        participation="full",
        exact=True,
        secondary=True,
        arxiv="2510.03507",
        bibtex="gao2025composite",
    )

    recordable: ClassVar[bool] = False  # the first round sends everything, the others what is kept

    one_regularizer: ClassVar[str] = "its prox stands for h of all rounds so far"

    schedulable: ClassVar[frozenset[str]] = frozenset({"step"})

    step: Positive
    compressor: Literal["identity", "largest", "random"] = "largest"
    ratio: Probability = 0.1

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """One step per round, a tenth of the usual one since a tenth of the entries is kept."""
        return cls(step=0.1 * round_step(L, rho))

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0 with zero estimates."""
        if h.rho > 0:
            raise ValueError(
                f"EControlDA needs a convex regularizer: its prox step grows with the rounds and would pass "
                f"1/rho = {1 / h.rho:g} of {h}; use FedNMap, Zhang or FedCanon"
            )
        zero = torch.zeros_like(x0)
        return Server(x0, zero, x0, zero, x0.new_zeros(2)), Client(zero, zero, x0.new_zeros(1))

    def broadcast(self, server: Server) -> Message:
        return Message(server.x)

    def local_round(self, message: Message, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """One gradient; send what the compressor keeps of its news."""
        d = message.x.shape[-1]
        compressor = self._compressor() if bool(client.started.any()) else Identity()
        delta = compressor.kept(d) / d
        # Nothing is lost when everything is kept, and there is no error to control.
        theta = delta / (3 * math.sqrt(1 - delta) * (1 + math.sqrt(1 - delta))) if delta < 1 else 0.0
        g = grad(message.x, 0)
        values, indices = compressor.compress(
            g - client.estimate - theta * client.error, lambda count: grad.uniform(0, count)
        )
        estimate = client.estimate + dense(values, indices, d)
        # The change of what is kept, rounding included: the server's estimate stays the mean of the clients'.
        change = estimate - client.estimate
        values = change.gather(-1, indices.long()) if indices.shape[-1] else change
        size = torch.full_like(indices[..., :1], d)
        return Reply(values, indices, size), Client(
            estimate, client.error + (estimate - g), torch.ones_like(client.started)
        )

    def _compressor(self) -> Compressor:
        if self.compressor == "identity":
            return Identity()
        return KeepLargest(self.ratio) if self.compressor == "largest" else KeepRandom(self.ratio)

    def decode(self, reply: Reply) -> Reply:
        """Put the kept entries back in place."""
        values, indices, size = reply
        d = int(size.reshape(-1)[0]) if size.shape[-1] else values.shape[-1]
        return Reply(dense(values, indices, d), values[..., :0], values[..., :0])

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """One step of dual averaging along the mean estimate."""
        estimate = server.estimate + reply.values
        z = server.z.double() + server.rest.double() - self.step * estimate.double()
        elapsed = server.elapsed.double().sum(-1, keepdim=True) + self.step
        return Server(
            *_split(z, server.z), h.prox(z, elapsed).to(server.z.dtype), estimate,
            torch.cat(_split(elapsed, server.elapsed)),
        )  # fmt: skip

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x


def _split(value: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """A number of double precision as two of another one: rounded, and the rest."""
    rounded = value.to(like.dtype)
    return rounded, (value - rounded.double()).to(like.dtype)
