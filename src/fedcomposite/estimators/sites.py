"""Who answers requests: the silos at hand here; a federation's sites offer the same two methods."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite.data.sparse import tensors_only
from fedcomposite.estimators.requests import Request, Silo, Sums, answer
from fedcomposite.problems import Linear, Problem

T = TypeVar("T")
Task = Generator[list[Request], list[Sums], T]
"""A piece of an analysis: it yields requests, receives the sums, and returns its result."""


class Sites(Protocol):
    """The parties of an analysis; one call is one exchange with all of them."""

    exchanges: int
    bytes_up: int
    bytes_down: int

    def ask(self, requests: Sequence[Request]) -> list[Sums]:
        """The sums of all sites' answers to each request."""

    def each(self, requests: Sequence[Request]) -> list[list[Sums]]:
        """The answers of each site, for what is reported by site."""


class Local:
    """The silos of a problem with a linear model, each answering for itself."""

    def __init__(self, problem: Problem) -> None:
        self.silos = silos_of(problem)
        self.exchanges = self.bytes_up = self.bytes_down = 0

    def each(self, requests: Sequence[Request]) -> list[list[Sums]]:
        """Every silo's answers, one after another."""
        made = [[answer(silo, request) for request in requests] for silo in self.silos]
        self.exchanges += 1
        self.bytes_down += len(self.silos) * sum(r.nbytes for r in requests)
        self.bytes_up += sum(v.nbytes for one in made for sums in one for v in sums.values())
        return made

    def ask(self, requests: Sequence[Request]) -> list[Sums]:
        """The sums over silos, in their order."""
        made = self.each(requests)
        return [{k: torch.stack([one[i][k] for one in made]).sum(0) for k in made[0][i]} for i in range(len(requests))]


def silos_of(problem: Problem) -> list[Silo]:
    """The silos of a problem, as they answer requests."""
    smooth = problem.smooth()
    if not isinstance(smooth, Linear):
        raise ValueError("this needs a linear model; a network has no Hessian to send")
    if smooth.loss.reduction != "mean":
        raise ValueError(f"{smooth.loss}: a sum over samples; take the loss that is their mean")
    silos, nobody = problem.silos, len(problem.silos)
    tensors_only(silos.features, "an analysis by requests")
    if silos.margin_offsets is not None:
        raise ValueError("these silos have offsets of margins, which only fc.solve and fc.simulate take into account")
    X_all, held = smooth.X, {}
    assert isinstance(X_all, Tensor)
    for part, (X, y) in silos.held_out.items():
        owner = silos.held_by.get(part, torch.full((len(y),), nobody))
        design = smooth._design(X)
        assert isinstance(design, Tensor)
        held[part] = design, smooth.loss.prepare(silos, y), owner
    weights = torch.ones(len(silos.targets), dtype=torch.float64) if silos.weights is None else silos.weights
    made, ids = [], list(silos.ids)
    if any(bool((owner == nobody).any()) for _, _, owner in held.values()):
        ids.append(rng.SERVER)  # a party with held-out samples only
    for i, id in enumerate(ids):
        rows = slice(*(silos.offsets[i : i + 2] if i < nobody else (0, 0)))
        parts: dict[str, tuple[Tensor, Tensor]] = {
            part: (X[owner == i], b[owner == i]) for part, (X, b, owner) in held.items()
        }
        by_samples = problem.weighting == "samples"
        made.append(Silo(X_all[rows], smooth.b[rows], weights[rows], smooth.loss, id, by_samples, parts))
    return made


def together(tasks: Sequence[Task[T]], sites: Sites) -> list[T]:
    """Run tasks side by side; what they ask at the same time travels in one exchange."""
    results: dict[int, T] = {}
    waiting: dict[int, list[Request]] = {}

    def advance(i: int, sums: list[Sums] | None) -> None:
        try:
            waiting[i] = next(tasks[i]) if sums is None else tasks[i].send(sums)
        except StopIteration as stop:
            waiting.pop(i, None)
            results[i] = stop.value

    for i in range(len(tasks)):
        advance(i, None)
    while waiting:
        asked = list(waiting.items())
        sums = sites.ask([request for _, requests in asked for request in requests])
        at = 0
        for i, requests in asked:
            advance(i, sums[at : at + len(requests)])
            at += len(requests)
    return [results[i] for i in range(len(tasks))]
