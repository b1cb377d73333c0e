"""Silos at hand that answer requests for sums: each for itself, as a federation's sites do, or all at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcomposite.data import DataError, Silos
from fedcomposite.problems import Counter, Linear, Problem
from fedcomposite.problems.losses import Cox
from fedcomposite.problems.risk_sets import EVENT
from fedcomposite.problems.smoothed import Smoothed
from fedcomposite.runtime import process
from fedcomposite.runtime.protocol import Request, Silo, Sums, answer_all, centre_of, of_copy, silos_of

LARGEST, SMALLEST = 1e75, 1e-150
"""Of a sample's numbers: sums of fourth powers are finite, and squares are not zero."""


def check_range(silos: Silos) -> None:
    """Refuse samples with which nothing can be computed: a fit to them would end at zero, as if it had converged."""
    for what, values in (("features", silos.features), ("targets", silos.targets)):
        if not isinstance(values, Tensor) or values.dtype != torch.float64:
            continue
        largest = torch.maximum(values.amax(0), -values.amin(0)).view(-1)  # of each column
        if float(largest.max()) > LARGEST:
            row, *rest = torch.nonzero(values.abs() > LARGEST)[0].tolist()
            at = int(np.searchsorted(silos.offsets, row, side="right")) - 1
            place = f"row {row - silos.offsets[at]}" + (f", column {rest[0]}" if rest else "")
            raise DataError(
                f"{silos.names[at]}, {what}: {place} has {float(values[row, *rest]):.3g}, whose powers are infinite; "
                "mend it, or give the column in other units"
            )
        small = torch.nonzero((largest > 0) & (largest < SMALLEST)).view(-1).tolist()
        if small and (values.ndim == 1 or what == "features"):  # times to an event are compared alone
            place = f", column {small[0]}" if values.ndim > 1 else ""
            raise DataError(
                f"{what}{place}: no value is beyond {float(largest[small[0]]):.3g}, whose square is zero; give the "
                "column in other units"
            )


def check_events(smooth: Linear) -> None:
    """Refuse times without an event: every model is as good as any other."""
    if isinstance(smooth.loss, Cox) and not bool((smooth.b[:, EVENT] > 0).any()):
        raise DataError(
            f"none of the {len(smooth.b)} samples has the event, so that there is nothing to learn: events are 1 in "
            "the second column of the targets, or what the loss's option `cause` names"
        )


class SiloTransport:
    """The silos of a problem with a linear model."""

    by_site, noised = True, False

    def __init__(self, problem: Problem) -> None:
        check_range(problem.silos)
        self.counter = Counter()
        self.silos = silos_of(problem)
        self.ids = list(problem.silos.ids)
        self.names = [*problem.silos.names, "(held by nobody)"][: len(self.silos)]
        pooled = problem.smooth()
        assert isinstance(pooled, Linear)
        assert isinstance(pooled.X, Tensor)  # silos_of has refused others
        check_events(pooled)
        self.centre = centre_of(pooled.X, problem.bias)
        self._copies = [silos_of(of_copy(problem, k)) for k in range(1, len(problem.silos.copies))]
        if self.centre is not None:
            shift = torch.cat([self.centre, self.centre.new_zeros(1)])
            self._every(lambda silo: replace(silo, about=silo.X - shift))
        self._reach = max(max(s.X.numel(), (s.X.shape[1] * s.b[:1].numel()) ** 2) for s in self.silos)  # also a Hessian

    @property
    def copies(self) -> int:
        """How many completed copies of the samples there are."""
        return 1 + len(self._copies)

    def _every(self, change: Callable[[Silo], Silo]) -> None:
        """Change the silos of all copies."""
        self.silos, *self._copies = [[change(silo) for silo in one] for one in (self.silos, *self._copies)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Threads that fit the largest silo and the server's matrices."""
        main = process.on_main_thread()
        with process.threads(process.fitting_threads(self._reach, torch.device("cpu")) if main else None):
            yield

    def recalled(self, requests: Sequence[Request]) -> None:
        """Silos do not count exchanges."""

    @property
    def moved(self) -> bool:
        """Whether silos have their features in other coordinates too, for centred requests."""
        return self.silos[0].about is not None

    @contextmanager
    def turned(self, basis: Tensor) -> Iterator[None]:
        """Meanwhile, answer centred requests in coordinates y where models are ``basis @ y``."""
        kept = self.silos, self._copies, self.centre
        self.centre = None
        self._every(lambda s: replace(s, about=next(X for X in (s.about, s.level, s.X) if X is not None) @ basis))
        try:
            yield
        finally:
            self.silos, self._copies, self.centre = kept

    def ask(self, requests: Sequence[Request]) -> list[Any]:
        """The sums over silos, in their order; for a request by site the list of them."""
        with self.running():
            made: list[list[Sums]] = [[] for _ in requests]
            for number, silos in enumerate([self.silos, *self._copies]):
                own = [k for k, one in enumerate(requests) if max(one.rows.copy_number - 1, 0) == number]
                for silo in silos:
                    for k, sums in zip(own, answer_all(silo, [requests[k] for k in own]), strict=True):
                        made[k].append(sums)
        self.counter.bytes_down += len(self.silos) * sum(r.nbytes for r in requests)
        self.counter.bytes_up += sum(v.nbytes for each in made for sums in each for v in sums.values())
        return [each if request.by_site else added(each) for request, each in zip(requests, made, strict=True)]


def added(each: Sequence[Sums]) -> Sums:
    """The sums of several parties' answers, in their order."""
    return {key: torch.stack([one[key] for one in each]).sum(0) for key in each[0]}


class StackedSums:
    """A problem's clients as one party, which tells means over them as sums of weight 1; sparse samples are welcome."""

    by_site = False

    def __init__(self, problem: Problem, dtype: torch.dtype, device: torch.device) -> None:
        smooth = problem.smooth(dtype, device)
        assert isinstance(smooth, Linear)
        check_events(smooth)
        self.smooth, self.counter = smooth, Counter()
        self.centre = centre_of(smooth.X, problem.bias) if isinstance(smooth.X, Tensor) else None
        self._centred = smooth if self.centre is None else _about(smooth, self.centre)
        self._clients = np.arange(len(problem.silos), dtype=np.uint64)
        self._weights = torch.from_numpy(problem.weights).to(device, dtype)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Threads that fit the samples."""
        elements = self.smooth.X.shape[0] * self.smooth.X.shape[1]
        with process.threads(process.fitting_threads(elements, self.smooth.device)):
            yield

    def ask(self, requests: Sequence[Request]) -> list[Sums]:
        """Losses of models, or loss, gradient and a piece of the Hessian."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Sums:
        width, centred = (request.numbers.get(name, 0.0) for name in ("width", "centred"))
        smooth, n = self._centred if centred else self.smooth, len(self._clients)
        if width > 0:
            smooth = copy.copy(smooth)
            smooth.loss = Smoothed(smooth.loss, width)
        self.counter.bytes_down += n * request.nbytes
        if request.name == "losses":
            models = request.arrays["models"]
            values = [smooth.losses(self._clients, x.expand(n, -1)).squeeze(1) @ self._weights for x in models]
            made = {"deviance": 2 * torch.stack(values)}
        else:
            x = request.arrays["x"].expand(n, -1)
            at = request.arrays["working"].nonzero().squeeze(1)
            i, j = torch.triu_indices(len(at), len(at), device=x.device)
            parts = {"loss": smooth.losses(self._clients, x), "gradient": smooth.full(self._clients)(x)}
            parts["hessian"] = smooth.hessians(self._clients, x, at)[:, i, j] if len(at) else x[:, :0]
            big = torch.finfo(x.dtype).max ** 0.5
            made = {k: self._weights @ torch.nan_to_num(v, big, big, -big).clamp(-big, big) for k, v in parts.items()}
            self.counter.gradients += n * (1 + len(at))
        self.counter.bytes_up += n * sum(v.nbytes for v in made.values())
        return {"weight": torch.tensor([1.0, 1.0, float(self.smooth.sizes.sum())], dtype=torch.float64), **made}


def _about(smooth: Linear, centre: Tensor) -> Linear:
    """The same functions with features taken about a centre."""
    assert isinstance(smooth.X, Tensor)
    made = copy.copy(smooth)
    made.X = smooth.X - torch.cat([centre, centre.new_zeros(1)])
    made._padded = (b"", [])
    return made
