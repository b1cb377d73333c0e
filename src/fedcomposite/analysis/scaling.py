"""Diagonal scaling: a linear model in units in which every feature has mean square about 1, for first-order methods."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from fedcomposite.data.sparse import SparseRows, tensors_only
from fedcomposite.problems import Loss, Problem
from fedcomposite.regularizers.stretched import Stretched
from fedcomposite.runtime import Run
from fedcomposite.runtime.callbacks import Callback, View

_APART = 2.0  # root mean squares of features that differ by more are brought together


class Rescaling(Callback):
    """A linear problem after the change of variables x = D u, where D makes the mean square of every feature about 1.

    F is the same function; only distances and steps are others. The one thing that is aggregated for it is the mean of
    the squares of each feature. Make one with :func:`rescale`.
    """

    def __init__(self, problem: Problem, factors: Tensor, tolerance: float | None) -> None:
        self.original, self.factors, self.tolerance = problem, factors, tolerance
        outputs = problem.layout[0].shape[1] if len(problem.layout[0].shape) == 2 else 1
        columns = factors[: problem.layout[0].stop : outputs]
        silos = problem.silos
        dense = {name: (tensors_only(X, "rescale"), y) for name, (X, y) in silos.held_out.items()}
        held: dict[str, Any] = {name: (X * columns.to(X), y) for name, (X, y) in dense.items()}
        features = tensors_only(silos.features, "rescale").double() * columns
        stretched = dataclasses.replace(silos, features=features, **held)
        self.problem = Problem(stretched, loss=problem.loss, bias=problem.bias, weights=problem.weighting)
        self.problem.measures = problem.measures
        self.problem.regularizer = Stretched(problem.regularizer, factors)
        self._seen: list[float] = []

    def start(self, x0: Any) -> Any:
        """The starting model in the new units."""
        return None if x0 is None else torch.as_tensor(x0, dtype=torch.float64).cpu() / self.factors

    def begin(self, view: View) -> None:
        self._seen.clear()

    def __call__(self, view: View) -> None:
        """Measure the model in its own units, and stop when it is stationary there."""
        self._seen.append(self.original.stationarity(view.solution.double().cpu() * self.factors))
        if self.tolerance is not None and self._seen[-1] <= self.tolerance:
            view.stop("stationary in the units of the problem")

    def back(self, run: Run) -> Run:
        """The run with its solution and stationarity in the problem's own units."""
        history = [copy.copy(record) for record in run.history]
        step = self.original.default_step()
        for record, value in zip(history[len(history) - len(self._seen) :], self._seen, strict=True):
            record |= {"stationarity": value, "stationarity_step": step}
        reached = run.status == "stopped" and self.tolerance is not None and self._seen[-1] <= self.tolerance
        x = (run.solution * self.factors.to(run.solution)).to(run.solution)
        return dataclasses.replace(run, solution=x, history=history, status="converged" if reached else run.status)


def rescale(problem: Problem, tolerance: float | None = None) -> Rescaling:
    """A linear problem in units in which features have mean squares of about 1; an h that couples them is refused."""
    if not isinstance(problem.loss, Loss):
        raise ValueError("rescale: a network has no features to scale one by one")
    X, sizes = tensors_only(problem.silos.features, "rescale").double(), torch.from_numpy(problem.silos.sizes)
    weight = torch.repeat_interleave(torch.from_numpy(problem.weights) / sizes, sizes)
    squares = weight @ X.square()
    columns = torch.where(squares > 0, squares.clamp(min=1e-300).rsqrt(), 1.0)
    columns = torch.exp2(columns.log2().round())  # powers of two do not round: bounds and zeros stay what they are
    outputs = problem.layout[0].shape[1] if len(problem.layout[0].shape) == 2 else 1
    ones = torch.ones(problem.dimension - outputs * len(columns), dtype=torch.float64)
    return Rescaling(problem, torch.cat([columns.repeat_interleave(outputs), ones]), tolerance)


def worthwhile(problem: Problem) -> bool:
    """Whether features differ in size, can be scaled one by one, and h allows it."""
    features = problem.silos.features
    if not isinstance(problem.loss, Loss) or isinstance(features, SparseRows):
        return False
    d = problem.dimension
    if torch.unique(problem.regularizer.coupling(d)).numel() != d:
        return False
    squares = tensors_only(features, "rescale").double().square().mean(0)
    some = squares[squares > 0]
    return len(some) > 0 and float(some.max() / some.min()) > _APART**2
