"""TAMUNA: Condat, Agarsky, Malinovsky & Richtarik, *TAMUNA: doubly accelerated distributed optimization*, 2023.

A step of the method, with a cohort of c clients and l ~ Geometric(p) local steps, the same for all of it:

    exchange 1:  x_i = x,   l times  x_i <- x_i - gamma (g_i(x_i) - k_i);   x+ = (1/s) sum_i mask_i x_i
    exchange 2:  k_i+ = k_i + (eta/gamma) mask_i (x+ - x_i),    eta = p chi

The masks are the columns, in random order, of a d x c table with s ones in each row: here entry e = 0, 1, ..., sd - 1
is in row e // s and column e mod c. Client i sends its ceil(sd/c) kept entries only. Then sum_i k_i = 0 always.

Symbols: gamma = ``step``, p = ``p``, s = ``s`` (2 to c; c, no compression, if left out), chi = ``chi``, at most
n (s - 1) / (s (n - 1)); left out, it is (s - 1) / s, which is allowed whatever n. Assumptions: f smooth and strongly
convex, gamma < 2 / (L + mu), h = 0. Clients that sit out keep k_i. With c = n = s and chi = 1 it is Scaffnew.

k_i must see the x+ of its own step. (Updating it at the client's next participation, with that later model, as in
code in circulation, loses sum_i k_i = 0 and does not converge.) So a step is two exchanges with the same clients and
counts as two rounds; in the second nothing goes up. l and the order of the columns are drawn from ``seed`` and the
step by everybody alike. Clients send changes x_i - x, with three numbers that say where they belong.
"""

import functools
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, Self

import annotated_types as at
import numpy as np
import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite._validation import Positive, Probability
from fedcomposite.algorithms.base import Algorithm, Gradient, Info, round_step
from fedcomposite.regularizers.base import Regularizer
from fedcomposite.rng import geometric


class Server(NamedTuple):
    x: Tensor  # global model
    exchange: Tensor  # exchanges so far


class Client(NamedTuple):
    k: Tensor  # control variate
    x: Tensor  # model after local steps


class Reply(NamedTuple):
    values: Tensor  # kept entries of the change
    place: Tensor  # column, cohort and dimension


def kept(column: Tensor, cohort: int, s: int, d: int) -> tuple[Tensor, Tensor]:
    """Rows of the ones in a column of the table, ``(..., ceil(sd/c))``, and 1 where there is one (0 pads)."""
    entry = column + cohort * torch.arange(-(-s * d // cohort), device=column.device)
    return (entry // s).clamp(max=d - 1), (entry < s * d).long()


@functools.lru_cache(maxsize=16)
def columns(seed: int, number: int, cohort: int) -> Tensor:
    """The order of the table's columns in a step."""
    words = rng.words(seed, rng.Use.METHOD, np.uint64(rng.SERVER), number, np.uint64(1), cohort)
    return torch.from_numpy(np.argsort(words, kind="stable"))


@dataclass(frozen=True)
class TAMUNA(Algorithm[Server, Client, Server, Reply]):
    """Local training with control variates, masked uploads and partial participation."""

    info: ClassVar[Info] = Info(
        "Condat, Agarsky, Malinovsky, Richtarik: TAMUNA: Doubly accelerated distributed optimization",
        2023,
        regularizer="none",
        participation="any",
        exact=True,
        uniform_only=True,
        arxiv="2302.09832",
        bibtex="condat2023tamuna",
    )
    recordable: ClassVar[bool] = False
    exchanges: ClassVar[int] = 2

    step: Positive
    p: Probability
    s: Annotated[int, at.Ge(2)] | None = None
    chi: Probability | None = None
    seed: Annotated[int, at.Ge(0)] = 0

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """Steps of 1/L, on average ``local_steps`` of them between communications, two ones per row."""
        return cls(step=2 * round_step(L, rho), p=1 / local_steps, s=2)

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Client]:
        """Start at x0 with zero control variates."""
        return Server(x0, x0.new_zeros(1, dtype=torch.int64)), Client(torch.zeros_like(x0), x0)

    def broadcast(self, server: Server) -> Server:
        """Send the model and the number of the exchange."""
        return server

    def local_round(self, message: Server, client: Client, grad: Gradient, h: Regularizer) -> tuple[Reply, Client]:
        """Local steps and a masked upload, or the update of the control variate."""
        cohort, d, exchange = grad.cohort, message.x.shape[-1], int(message.exchange.flatten()[0])
        s = cohort if self.s is None else self.s
        if s > cohort:
            raise ValueError(f"TAMUNA: s = {s}, must be at most the number of participants, {cohort}")
        column = columns(self.seed, exchange // 2, cohort).to(grad.position.device)[grad.position]
        rows, ones = kept(column, cohort, s, d)
        if exchange % 2:
            mask = torch.zeros_like(client.k).scatter_add(-1, rows, ones.to(client.k.dtype))
            eta = self.p * ((s - 1) / s if self.chi is None else self.chi)
            k = client.k + (eta / self.step) * mask * (message.x - client.x)
            return Reply(k[..., :0], column[..., :0].int()), client._replace(k=k)
        x = message.x
        for t in range(geometric(self.p, self.seed, exchange // 2)):
            x = x - self.step * (grad(x, t) - client.k)
        values = (x - message.x).gather(-1, rows) * ones
        place = torch.cat([column, torch.full_like(column, cohort), torch.full_like(column, d)], dim=-1).int()
        return Reply(values, place), client._replace(x=x)

    def decode(self, reply: Reply) -> Reply:
        """Put the entries back in place, times c/s so that a mean over the c clients is a mean over the s ones."""
        values, place = reply
        if not place.shape[-1]:
            return Reply(values, values)
        cohort, d = place.reshape(-1, 3)[0, 1:].tolist()
        s = cohort if self.s is None else self.s
        rows, _ = kept(place[..., :1].long(), cohort, s, d)
        dense = values.new_zeros((*values.shape[:-1], d)).scatter_add(-1, rows, values * (cohort / s))
        return Reply(dense, values[..., :0])

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Average what was kept of each entry; after an exchange without uploads only count."""
        x, exchange = server
        return Server(x if bool(exchange % 2) else x + reply.values, exchange + 1)

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x
