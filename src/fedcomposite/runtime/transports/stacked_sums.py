"""The sums of all silos at once, on any device: what a fit of a whole problem asks, as one stacked computation."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fedcomposite.problems import Counter, Linear, Problem
from fedcomposite.problems.smoothed import Smoothed
from fedcomposite.runtime import process
from fedcomposite.runtime.protocol import Request, Sums, centre_of


class StackedSums:
    """A problem's clients as one party, which tells means over them as sums of weight 1; sparse samples are welcome."""

    by_site = False

    def __init__(self, problem: Problem, dtype: torch.dtype, device: torch.device) -> None:
        smooth = problem.smooth(dtype, device)
        assert isinstance(smooth, Linear)
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
