"""Who answers requests: the silos at hand here; a federation's sites offer the same two methods."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedcomposite.data import DataError, Silos
from fedcomposite.problems import Linear, Problem
from fedcomposite.problems.requests import Request, Sums, answer, centre_of, silos_of
from fedcomposite.runtime import process

T = TypeVar("T")
Task = Generator[list[Request], list[Sums], T]
"""A piece of an analysis: it yields requests, receives the sums, and returns its result."""


@runtime_checkable
class Sites(Protocol):
    """The parties of an analysis; one call is one exchange with all of them."""

    names: list[str]
    ids: list[int]
    """The numbers of those with samples."""
    exchanges: int
    bytes_up: int
    bytes_down: int

    def ask(self, requests: Sequence[Request]) -> list[Sums]:
        """The sums of all sites' answers to each request."""

    def each(self, requests: Sequence[Request]) -> list[list[Sums]]:
        """The answers of each site, for what is reported by site."""


LARGEST = 1e75
"""Of a sample's numbers: sums of fourth powers are finite."""


def check_range(silos: Silos) -> None:
    """Refuse samples with which nothing can be computed: a fit to them would end at zero, as if it had converged."""
    for what, values in (("features", silos.features), ("targets", silos.targets)):
        if not isinstance(values, Tensor) or values.dtype != torch.float64:
            continue
        if max(abs(float(end)) for end in values.aminmax()) > LARGEST:
            row, *rest = torch.nonzero(values.abs() > LARGEST)[0].tolist()
            at = int(np.searchsorted(silos.offsets, row, side="right")) - 1
            place = f"row {row - silos.offsets[at]}" + (f", column {rest[0]}" if rest else "")
            raise DataError(
                f"{silos.names[at]}, {what}: {place} has {float(values[row, *rest]):.3g}, whose powers are infinite; "
                "mend it, or give the column in other units"
            )


class Local:
    """The silos of a problem with a linear model, each answering for itself."""

    def __init__(self, problem: Problem) -> None:
        check_range(problem.silos)
        self.silos = silos_of(problem)
        self.ids = list(problem.silos.ids)
        self.names = [*problem.silos.names, "(held by nobody)"][: len(self.silos)]
        self.exchanges = self.bytes_up = self.bytes_down = 0
        pooled = problem.smooth()
        assert isinstance(pooled, Linear)
        assert isinstance(pooled.X, Tensor)  # silos_of has refused others
        self.centre = centre_of(pooled.X, problem.bias)
        if self.centre is not None:
            shift = torch.cat([self.centre, self.centre.new_zeros(1)])
            self.silos = [replace(silo, about=silo.X - shift) for silo in self.silos]
        self._reach = max(max(s.X.numel(), (s.X.shape[1] * s.b[:1].numel()) ** 2) for s in self.silos)  # also a Hessian

    @property
    def threads(self) -> int | None:
        """Threads that fit the largest silo and the server's matrices; None leaves the setting alone."""
        return process.fitting_threads(self._reach, torch.device("cpu")) if process.on_main_thread() else None

    @property
    def moved(self) -> bool:
        """Whether silos have their features in other coordinates too, for centred requests."""
        return self.silos[0].about is not None

    @contextmanager
    def turned(self, basis: Tensor) -> Iterator[None]:
        """Meanwhile, answer centred requests in coordinates y where models are ``basis @ y``."""
        kept = self.silos, self.centre
        self.centre = None
        self.silos = [replace(s, about=(s.X if s.about is None else s.about) @ basis) for s in self.silos]
        try:
            yield
        finally:
            self.silos, self.centre = kept

    def each(self, requests: Sequence[Request]) -> list[list[Sums]]:
        """Every silo's answers, one after another."""
        with process.threads(self.threads):
            made = [[answer(silo, request) for request in requests] for silo in self.silos]
        self.exchanges += 1
        self.bytes_down += len(self.silos) * sum(r.nbytes for r in requests)
        self.bytes_up += sum(v.nbytes for one in made for sums in one for v in sums.values())
        return made

    def ask(self, requests: Sequence[Request]) -> list[Sums]:
        """The sums over silos, in their order."""
        made = self.each(requests)
        return [{k: torch.stack([one[i][k] for one in made]).sum(0) for k in made[0][i]} for i in range(len(requests))]


def centre_of_sites(sites: Sites) -> Tensor | None:
    """The centre about which silos at hand take their features; sites prepare theirs by a recipe."""
    return sites.centre if isinstance(sites, Local) else None


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

    with process.threads(sites.threads if isinstance(sites, Local) else None):
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
