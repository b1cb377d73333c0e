"""Silos at hand that answer requests for sums, each for itself, as a federation's sites do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcomposite.data import DataError, Silos
from fedcomposite.problems import Counter, Linear, Problem
from fedcomposite.runtime import process
from fedcomposite.runtime.protocol import Request, Sums, answer, centre_of, silos_of

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


class SiloTransport:
    """The silos of a problem with a linear model."""

    by_site = True

    def __init__(self, problem: Problem) -> None:
        check_range(problem.silos)
        self.counter = Counter()
        self.silos = silos_of(problem)
        self.ids = list(problem.silos.ids)
        self.names = [*problem.silos.names, "(held by nobody)"][: len(self.silos)]
        pooled = problem.smooth()
        assert isinstance(pooled, Linear)
        assert isinstance(pooled.X, Tensor)  # silos_of has refused others
        self.centre = centre_of(pooled.X, problem.bias)
        if self.centre is not None:
            shift = torch.cat([self.centre, self.centre.new_zeros(1)])
            self.silos = [replace(silo, about=silo.X - shift) for silo in self.silos]
        self._reach = max(max(s.X.numel(), (s.X.shape[1] * s.b[:1].numel()) ** 2) for s in self.silos)  # also a Hessian

    @contextmanager
    def running(self) -> Iterator[None]:
        """Threads that fit the largest silo and the server's matrices."""
        main = process.on_main_thread()
        with process.threads(process.fitting_threads(self._reach, torch.device("cpu")) if main else None):
            yield

    def recalled(self, requests: Sequence[Request]) -> None:
        """Silos do not count exchanges."""

    def ask(self, requests: Sequence[Request]) -> list[Any]:
        """The sums over silos, in their order; for a request by site the list of them."""
        with self.running():
            made = [[answer(silo, request) for silo in self.silos] for request in requests]
        self.counter.bytes_down += len(self.silos) * sum(r.nbytes for r in requests)
        self.counter.bytes_up += sum(v.nbytes for each in made for sums in each for v in sums.values())
        return [each if request.by_site else added(each) for request, each in zip(requests, made, strict=True)]


def added(each: Sequence[Sums]) -> Sums:
    """The sums of several parties' answers, in their order."""
    return {key: torch.stack([one[key] for one in each]).sum(0) for key in each[0]}
