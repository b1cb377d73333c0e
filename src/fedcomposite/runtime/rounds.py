"""What every runtime does with a round, whoever carries the messages: averaging, record, verdict."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.problems import Counter, Evaluation, prox_gradient_norm
from fedcomposite.regularizers import Regularizer
from fedcomposite.runtime import messages
from fedcomposite.runtime.history import Record, Status

S = TypeVar("S", bound=NamedTuple)

DIVERGED = 1e10
"""Growth of the objective, in units of its first value (at least 1), at which a run counts as diverged."""


def advance(
    algorithm: AnyAlgorithm, server: S, replies: NamedTuple, weights: Tensor | None, share: float, h: Regularizer
) -> S:
    """The server's new state from the stacked replies ``(m, ...)`` of the participants."""
    moved: S = algorithm.aggregate(server, messages.mean(algorithm.decode(replies), weights), share, h)
    return moved


def mean_buffers(buffers: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of the participants' buffers ``(m, b)``; weights are brought to sum 1."""
    if weights is None:
        return buffers.mean(0)
    mean: Tensor = torch.tensordot((weights / weights.sum()).to(buffers), buffers, dims=1)
    return mean


def make_record(
    x: Tensor,
    seen: Evaluation,
    h: Regularizer,
    *,
    round: int,
    step: float,
    bytes_up: int,
    bytes_down: int,
    counter: Counter,
    seconds: float,
) -> Record:
    """One line of the history: the model x, seen on all the data."""
    loss, nonzeros = float(seen.loss), int((x != 0).sum())
    return Record(
        round=round,
        objective=loss + float(h.value(x)),
        loss=loss,
        stationarity=float(prox_gradient_norm(x, seen.gradient, h, step)),
        stationarity_step=step,
        nonzeros=nonzeros,
        sparsity=1 - nonzeros / len(x),
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        prox_evaluations=counter.proxes,
        gradient_evaluations=counter.gradients,
        **{k: v.item() for k, v in seen.metrics.items()},
        seconds=seconds,
    )


def verdict(last: Record, first: Record, tolerance: float | None) -> Status:
    """Whether a run ends with this record: "converged", "diverged", or "completed" to go on."""
    value, start = last["objective"], first["objective"]
    if not math.isfinite(value) or value > DIVERGED * max(1.0, abs(start)):
        return "diverged" if math.isfinite(start) else "completed"
    return "converged" if tolerance is not None and last["stationarity"] <= tolerance else "completed"


class _Still:
    """The oracle of a client that sees zero gradients: it asks for no data."""

    def __init__(self, cohort: int) -> None:
        self._cohort = cohort

    def __call__(self, x: Tensor, k: int) -> Tensor:
        return torch.zeros_like(x)

    def full(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def loss(self, x: Tensor) -> Tensor:
        return x.new_zeros(1)

    def hessian(self, x: Tensor, where: Tensor) -> Tensor:
        return x.new_zeros(2 * (int(where.sum()),))

    def uniform(self, k: int, count: int = 1) -> Tensor:
        return torch.full((count,), 0.5, dtype=torch.float64)

    @property
    def position(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64)

    @property
    def cohort(self) -> int:
        return self._cohort


def rehearse(
    algorithm: AnyAlgorithm, message: NamedTuple, client: Any, h: Regularizer, cohort: int
) -> tuple[NamedTuple, Any]:
    """The reply and state of a client with zero gradients: a server learns what form a reply must have."""
    reply, state = algorithm.local_round(message, client, _Still(cohort), h)
    return reply, state
