"""Compressed replies: any method whose clients send vectors sends parts of them, and what is left out comes later.

With C a delta-contractive compressor (:mod:`fedcomposite.compressors`) and r_i the reply that a client's rules make,

    everybody in every round (EControl):  d_i = C(r_i - v_i - theta e_i),   v_i+ = v_i + d_i,   e_i+ = e_i + v_i+ - r_i
                                          server:  v+ = v + mean_i d_i  takes the place of  mean_i r_i
    some of the clients (error feedback): d_i = C(r_i - e_i),               e_i+ = e_i + d_i - r_i
                                          server:  mean_S d_i           takes the place of  mean_S r_i

where theta = delta / (3 sqrt(1 - delta) (1 + sqrt(1 - delta))) and only d_i is sent. EControl is of Gao, Islamov and
Stich: EControl: fast distributed optimization with compression and error control, ICLR 2024; error feedback of Seide,
Fu, Droppo, Li and Yu, Interspeech 2014. Both are written for gradients there; that replies of any method are fed to
them is ours.

Theory: what the server was told in all, the sum of its means, differs from what the clients replied in all by mean e_i.
Where replies settle, v_i goes to them and e_i to zero, since C contracts what is left. So the fixed points are the
method's own, also of those that add replies up (control variates, duals), and an exact method stays exact. Without v_i
that holds for replies that go to zero; where they do not (gradients or local steps of sites that differ), e_i stays,
about (1 - delta) / delta of them, and with it a residual in proportion to the step. What a server is told is old by
up to d/k rounds, so steps near the limit of stability have to be smaller: how much is known for gradients (by delta).

Assumptions: a reply is vectors as long as the model, the same in every round, averaged by the server. Refused are
Hessians, replies that are compressed already, methods of two exchanges, and FedDC, whose drifts add up whole changes of
models: at a quarter of the entries it diverged with every step that was tried. A client keeps two vectors for each one
that it sends.
"""

from __future__ import annotations

import functools
import math
import typing
from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite.algorithms.base import Algorithm, AnyAlgorithm, Gradient, Info
from fedcomposite.compressors import Compressor, dense
from fedcomposite.regularizers.base import Regularizer

__all__ = ["Compressed"]

_COINS = 1 << 30  # the step of the compressor's own random numbers, which no local step has


class Reply(NamedTuple):
    """What is kept of all vectors of a reply, one after the other."""

    values: Tensor  # kept entries
    indices: Tensor  # where they belong
    size: Tensor  # length of all vectors together


@dataclass(frozen=True)
class Compressed(Algorithm[Any, Any, Any, Reply]):
    """A method whose clients send what a compressor keeps of their replies, with error feedback.

    Parameters
    ----------
    method : Algorithm
        The method, with its steps.
    compressor : Compressor
        What is kept.
    everybody : bool
        Whether all clients take part in every round; else the form for some of them.
    """

    info: ClassVar[Info]
    recordable: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    method: Algorithm[Any, Any, Any, Any]
    compressor: Compressor
    everybody: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedulable", self.method.schedulable)
        super().__post_init__()
        if why := unable(self.method):
            raise ValueError(f"compressor: {why}")
        for name in ("info", "one_regularizer"):
            object.__setattr__(self, name, getattr(self.method, name))

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def table(self) -> dict[str, Any]:
        return {**self.method.table, "compressor": self.compressor.table}

    @property
    def schedules(self) -> dict[str, Any]:
        return self.method.schedules

    @property
    def partial(self) -> bool:
        return self.method.partial and not self.everybody

    def at(self, round: int) -> Self:
        return replace(self, method=self.method.at(round)) if self.schedules else self

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Any, Any]:
        """The method's own states, beside what was told and what is owed, all zero."""
        server, client = self.method.init(x0, h)
        none = x0.new_zeros(len(_replies(type(self.method))._fields) * len(x0))
        told = none if self.everybody else none[:0]
        return _beside(server, told=told), _beside(client, told=told, owed=none)

    def broadcast(self, server: Any) -> Any:
        return self.method.broadcast(_inner(server))

    def local_round(self, message: Any, client: Any, grad: Gradient, h: Regularizer) -> tuple[Reply, Any]:
        """The method's own round; of its reply, what the compressor keeps of the news."""
        reply, after = self.method.local_round(message, _inner(client), grad, h)
        count, d = len(reply), client.owed.shape[-1] // len(reply)
        if wrong := [name for name, t in reply._asdict().items() if t.shape[-1] != d]:
            raise ValueError(f"compressor: {wrong[0]} of {self.name}'s reply is no vector as long as the model")
        made = torch.cat(tuple(reply), dim=-1)
        known = client.told if self.everybody else torch.zeros_like(made)
        values, indices = self.compressor.compress(
            (made - known - self._control(d) * client.owed).unflatten(-1, (count, d)),
            lambda size: grad.uniform(_COINS, count * size).view(*made.shape[:-1], count, size),
        )
        first = d * torch.arange(count, dtype=indices.dtype, device=indices.device).unsqueeze(1)
        indices = (indices + first).flatten(-2)
        now = known + dense(values.flatten(-2), indices, count * d)
        # The change of what is kept, rounding included: what the server was told stays the mean of the clients'.
        change = now - known
        values = change.gather(-1, indices.long()) if indices.shape[-1] else change
        told = now if self.everybody else client.told
        size = torch.full_like(indices[..., :1], count * d)
        return Reply(values, indices, size), _beside(after, told=told, owed=client.owed + (now - made))

    def decode(self, reply: Reply) -> Reply:
        """Put the kept entries back in place."""
        values, indices, size = reply
        total = int(size.reshape(-1)[0]) if size.shape[-1] else values.shape[-1]
        return Reply(dense(values, indices, total), values[..., :0], values[..., :0])

    def aggregate(self, server: Any, reply: Reply, share: float, h: Regularizer) -> Any:
        """The method's own rule, with what the server knows of the mean reply."""
        made = _replies(type(self.method))
        known = server.told + reply.values if self.everybody else reply.values
        vectors = known.unflatten(-1, (len(made._fields), -1)).unbind(-2)
        after = self.method.aggregate(_inner(server), made(*vectors), share, h)
        return _beside(after, told=known if self.everybody else server.told)

    def solution(self, server: Any, h: Regularizer) -> Tensor:
        return self.method.solution(_inner(server), h)

    def _control(self, d: int) -> float:
        """How much of what is owed is asked for: theta, or all of it where nothing is remembered."""
        if not self.everybody:
            return 1.0
        delta = self.compressor.kept(d) / d
        return delta / (3 * math.sqrt(1 - delta) * (1 + math.sqrt(1 - delta))) if delta < 1 else 0.0


def unable(method: AnyAlgorithm) -> str:
    """Why a method's replies cannot be compressed, if so."""
    cls = type(method)
    if method.info.second_order:
        return f"{method.name} sends Hessians, or parts of them, which have to arrive whole"
    if cls.decode is not Algorithm.decode:
        return f"the replies of {method.name} are compressed already"
    if method.exchanges > 1:
        return f"a step of {method.name} is two exchanges, whose replies are of two kinds"
    if not cls.compressible:
        return f"{method.name} adds up what its clients reply, so that what comes later makes it diverge"
    if method.varying or not _replies(cls):
        return f"the replies of {method.name} are not known beforehand; local_round has to say which tuple it returns"
    return ""


@functools.cache
def _replies(cls: type[AnyAlgorithm]) -> Any:
    """The type of a method's replies, as its rule is annotated; None if it is not."""
    try:
        said = typing.get_args(typing.get_type_hints(cls.local_round).get("return"))
    except NameError:
        return None
    return said[0] if said and hasattr(said[0], "_fields") else None


@functools.cache
def _joined(inner: type[Any], more: tuple[str, ...]) -> Any:
    """A type of tuples with more fields."""
    flat = namedtuple("State", [*inner._fields, *more])  # type: ignore[misc]
    return type(inner.__name__, (flat,), {"__slots__": (), "_plain": inner})


def _beside(state: Any, **more: Tensor) -> Any:
    """A state of the method with more tensors after its own."""
    return _joined(type(state), tuple(more))(*state, *more.values())  # type: ignore[arg-type]


def _inner(state: Any) -> Any:
    """The method's own part of a state."""
    own = type(state)._plain
    return own(*state[: len(own._fields)])
