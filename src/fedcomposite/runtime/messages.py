"""Tuples of tensors: what moves between server and clients, and what it weighs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedcomposite.runtime import sparse_messages

T = TypeVar("T", bound=NamedTuple)


def nbytes(message: NamedTuple) -> int:
    """Bytes of a message: the sum over its tensors."""
    return sum(t.nbytes for t in message)


def sent(message: NamedTuple, clients: bool = False) -> int:
    """Bytes of a message on its way, where zeros take little; with ``clients``, of one from each of them, stacked."""
    return sum(sparse_messages.sizes(t, clients) for t in message)


def each(state: T, function: Any) -> T:
    """Apply a function to every tensor of a tuple."""
    return type(state)(*(function(t) for t in state))


def stack(state: T, n: int) -> T:
    """The same tuple for n clients, without copying."""
    return each(state, lambda t: t.expand(n, *t.shape))


def take(states: T, clients: Tensor) -> T:
    """The rows of some clients."""
    return each(states, lambda t: t[clients])


def put(states: T, clients: Tensor, new: T) -> None:
    """Write the rows of some clients, in place."""
    for old, fresh in zip(states, new, strict=True):
        old[clients] = fresh


def mean(replies: T, weights: Tensor | None = None) -> T:
    """Mean over the clients' axis; ``weights`` (one per client) multiply the replies before the plain mean."""
    if weights is None:
        return each(replies, lambda t: t.mean(0))
    return each(replies, lambda t: torch.tensordot(weights.to(t.dtype), t, dims=1) / len(weights))


def decoded(rules: Any, reply: T) -> T:
    """One client's reply as a method averages it."""
    dense: T = rules.decode(each(reply, lambda t: t[None]))
    return each(dense, lambda t: t[0])


def mean_buffers(buffers: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of the participants' buffers ``(m, b)``; weights are brought to sum 1."""
    if weights is None:
        return buffers.mean(0)
    mean: Tensor = torch.tensordot((weights / weights.sum()).to(buffers), buffers, dims=1)
    return mean


def join(parts: Any) -> Any:
    """Stacked tuples, or tensors, of several groups of clients as those of all."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return type(parts[0])(*map(torch.cat, zip(*parts, strict=True)))


def finite(state: NamedTuple) -> bool:
    """Whether every number in a tuple is finite."""
    return all(map(all_finite, state))


def all_finite(numbers: Tensor) -> bool:
    """Whether every number is finite. If one is not, their sum is not; if all are, it seldom overflows."""
    return math.isfinite(float(numbers.sum())) or bool(torch.isfinite(numbers).all())
