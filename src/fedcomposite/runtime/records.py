"""What a driver says of a round, whoever carried it: record, verdict, and what a reply looks like."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.problems import Counter, Evaluation, prox_gradient_norm
from fedcomposite.regularizers import Regularizer
from fedcomposite.runtime.history import Record, Status

S = TypeVar("S", bound=NamedTuple)

DIVERGED = 1e10
"""Growth of the objective, in units of its first value (at least 1), at which a run ends as diverged at once."""

NOISE, DOUBLED = 0.01, 1.0
"""Growth of the objective over a whole run, in units of its first value: up to the first a run may be "completed", with
more it is "not_converged", and beyond the second "diverged". The same for every method; see :func:`ending`."""


def make_record(
    x: Tensor,
    seen: Evaluation,
    h: Regularizer,
    *,
    round: int,
    step: float,
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
        bytes_up=counter.bytes_up,
        bytes_down=counter.bytes_down,
        prox_evaluations=counter.proxes,
        gradient_evaluations=counter.gradients,
        **seen.measures.summarise(seen.counts),
        seconds=seconds,
    )


def verdict(last: Record, first: Record, tolerance: float | None) -> Status:
    """Whether a run ends with this record: "converged", "diverged", or "completed" to go on."""
    value, start = last["objective"], first["objective"]
    if not math.isfinite(value) or value > DIVERGED * max(1.0, abs(start)):
        return "diverged" if math.isfinite(start) else "completed"
    return "converged" if tolerance is not None and last["stationarity"] <= tolerance else "completed"


def growth(last: Record, first: Record) -> float:
    """How far the last objective is above the first, in units of the first; 0 where there is no first to compare."""
    end, start = last["objective"], first["objective"]
    return (end - start) / max(abs(start), 1e-12) if math.isfinite(start) else 0.0


def ending(last: Record, first: Record) -> Status:
    """What to say of a run that did all its rounds: "completed" only if its objective did not grow beyond noise.

    A minimisation that ends above its start has failed, whatever the method, and its last model should not be taken
    for an answer. A hundredth is allowed, since minibatches move a model that starts near the optimum; up to twice the
    first value it is "not_converged", and above that "diverged".
    """
    grown = growth(last, first)
    return "completed" if grown <= NOISE else "not_converged" if grown <= DOUBLED else "diverged"


def grew(last: Record, first: Record) -> str:
    """A sentence on an objective that grew beyond noise; empty if it did not."""
    if growth(last, first) <= NOISE:
        return ""
    return f"the objective grew from {first['objective']:.4g} to {last['objective']:.4g}"


class _Still:
    """The oracle of a client that sees zero gradients: it asks for no data."""

    def __init__(self, cohort: int) -> None:
        self._cohort = cohort
        self.asked = 0

    def __call__(self, x: Tensor, k: int) -> Tensor:
        self.asked += 1
        return torch.zeros_like(x)

    def full(self, x: Tensor) -> Tensor:
        self.asked += 1
        return torch.zeros_like(x)

    def loss(self, x: Tensor) -> Tensor:
        self.asked += 1
        return x.new_zeros(1)

    def hessian(self, x: Tensor, where: Tensor) -> Tensor:
        self.asked += 1
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


def planned_queries(algorithm: AnyAlgorithm, x0: Tensor, h: Regularizer, rounds: int, cohort: int) -> int:
    """How often a client is asked for something about its data in so many rounds, from rehearsing the first few.

    A method that tosses coins for its steps may ask more, or less.
    """
    server, client = algorithm.at(0).init(x0, h.during(0))
    asked: list[int] = []
    e = algorithm.exchanges
    for r in range(min(rounds, 2 * e)):
        rules, now, still = algorithm.at(r), h.during(r), _Still(cohort)
        reply, client = rules.local_round(rules.broadcast(server), client, still, now)
        server = rules.aggregate(server, rules.decode(reply), 1.0, now)
        asked.append(still.asked)
    return sum(asked) + sum(asked[e + r % e] for r in range(rounds - len(asked)))
