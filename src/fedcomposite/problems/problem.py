"""The problem: silos, a loss or a model, and a regularizer."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite.data.silos import Silos
from fedcomposite.problems.base import Smooth
from fedcomposite.problems.linear import Linear
from fedcomposite.problems.losses import get_loss
from fedcomposite.regularizers import On, Regularizer, Zero

Weights = Literal["uniform", "samples"]


class Problem:
    """minimise over x  F(x) = sum_i w_i f_i(x) + h(x).

    Parameters
    ----------
    silos : Silos
        The clients' data.
    loss : str
        ``"logistic"`` or ``"least_squares"``.
    regularizer : Regularizer
        The term h; zero if left out.
    bias : bool
        Add an intercept as the last coordinate; h does not act on it.
    weights : {"uniform", "samples"}
        w_i = 1/n (the papers' objective), or proportional to the clients' sample counts (the pooled objective).

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=3, features=4, samples=10)
    >>> problem = fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.01))
    >>> round(problem.objective(torch.zeros(4)), 4)
    0.6931
    """

    def __init__(
        self,
        silos: Silos,
        *,
        loss: str = "logistic",
        regularizer: Regularizer | None = None,
        bias: bool = False,
        weights: Weights = "uniform",
    ) -> None:
        if weights not in ("uniform", "samples"):
            raise ValueError(f"weights = {weights!r}, must be 'uniform' or 'samples'")
        self.silos, self.loss, self.bias, self.weighting = silos, get_loss(loss), bias, weights
        self._placed: dict[tuple[torch.dtype, torch.device], Smooth] = {}
        self._smoothness: dict[str, float] = {}
        self.dimension = self.smooth().dimension
        h = regularizer or Zero()
        if bias and not isinstance(h, On | Zero):
            h = h.on([True] * (self.dimension - 1) + [False])
        self.regularizer: Regularizer = h

    def __repr__(self) -> str:
        return f"Problem({self.silos}, {type(self.loss).__name__}, {self.regularizer})"

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """The clients' weights w_i, which sum to 1."""
        n = len(self.silos)
        return self.silos.sizes / self.silos.sizes.sum() if self.weighting == "samples" else np.full(n, 1 / n)

    @property
    def coordinate_names(self) -> tuple[str, ...]:
        """A name per coordinate of x."""
        d = self.dimension - self.bias
        names = self.silos.feature_names or tuple(f"x{j}" for j in range(d))
        return (*names, "(intercept)") if self.bias else names

    def smooth(self, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu") -> Smooth:
        """The smooth part, placed on a device in a dtype (kept for the next call)."""
        place = dtype, torch.device(device)
        if place not in self._placed:
            self._placed[place] = Linear(
                self.silos, self.loss, bias=self.bias, weights=self.weights, dtype=dtype, device=place[1]
            )
        return self._placed[place]

    def _at(self, x: Any) -> tuple[Tensor, Smooth]:
        point = torch.as_tensor(x)
        if not point.is_floating_point():
            point = point.double()
        if point.shape != (self.dimension,):
            raise ValueError(f"x has shape {tuple(point.shape)}, expected ({self.dimension},)")
        return point, self.smooth(point.dtype, point.device)

    def objective(self, x: Any) -> float:
        """F(x)."""
        point, smooth = self._at(x)
        return float(smooth.evaluate(point).loss + self.regularizer.value(point))

    def gradient(self, x: Any) -> Tensor:
        """The gradient of the smooth part f at x."""
        point, smooth = self._at(x)
        return smooth.evaluate(point).gradient

    def stationarity(self, x: Any, step: float | None = None) -> float:
        """||x - P_step(x - step grad f(x))|| / step: zero exactly at stationary points.

        The default step is :meth:`default_step`.
        """
        point, smooth = self._at(x)
        step = self.default_step() if step is None else step
        return float(prox_gradient_norm(point, smooth.evaluate(point).gradient, self.regularizer, step))

    def optimality(self, x: Any) -> float:
        """Distance from -grad f(x) to the subdifferential of h at x."""
        point, smooth = self._at(x)
        return float(self.regularizer.optimality(point, smooth.evaluate(point).gradient))

    def smoothness(self, of: Literal["clients", "mean"] = "clients") -> float:
        """Smoothness constant L: the largest over the clients, or that of the mean loss (``of="mean"``)."""
        if of not in self._smoothness:
            self._smoothness[of] = self.smooth().smoothness(of)
        return self._smoothness[of]

    def default_step(self) -> float:
        """1/L of the mean loss, and at most half of 1/rho: the step at which stationarity is measured."""
        L, rho = self.smoothness("mean"), self.regularizer.rho
        step = 1 / L if L > 0 else 1.0
        return min(step, 0.5 / rho) if rho > 0 else step


def prox_gradient_norm(x: Tensor, gradient: Tensor, h: Regularizer, step: float) -> Tensor:
    """||G_step(x)||, the norm of the prox-gradient mapping."""
    moved: Tensor = torch.linalg.vector_norm(x - h.prox(x - step * gradient, step), dim=-1)
    return moved / step
