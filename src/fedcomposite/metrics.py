"""Measures of a model: how good, how stationary, how far, how sparse, and how much clients drift.

``x`` is anything that becomes a float64 vector of the problem's dimension. Metrics that a problem measures in every
record (``Problem(..., metrics=["auc"])``) are those of :data:`METRICS`, or your own :class:`Metric`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcomposite._validation import as_vector
from fedcomposite.problems import Batches, ClientGradients, Counter, Loss, Problem
from fedcomposite.problems.metrics import (
    AUC,
    F1,
    MAE,
    METRICS,
    R2,
    Accuracy,
    BalancedAccuracy,
    Brier,
    Calibration,
    LogLoss,
    Metric,
    exact_auc,
    margin,
    per_client,
    predicted,
    probabilities,
)

__all__ = [
    "AUC",
    "F1",
    "MAE",
    "METRICS",
    "R2",
    "Accuracy",
    "BalancedAccuracy",
    "Brier",
    "Calibration",
    "LogLoss",
    "Metric",
    "ProximalPoint",
    "SupportRecovery",
    "client_drift",
    "distance",
    "exact_auc",
    "hoyer",
    "margin",
    "moreau_gradient_norm",
    "normal_map",
    "normal_map_norm",
    "per_client",
    "predicted",
    "probabilities",
    "prox_gradient",
    "proximal_point",
    "sparsity",
    "stationarity",
    "support",
]


def _vector(x: Any) -> Tensor:
    return as_vector(x).detach().to("cpu", torch.float64)


def _like(other: Any, x: Any) -> Tensor:
    """A vector that must have the shape of x."""
    point, shape = _vector(other), tuple(_vector(x).shape)
    if point.shape != shape:
        raise ValueError(f"shapes {shape} and {tuple(point.shape)} differ: compare vectors of the same shape")
    return point


def prox_gradient(problem: Problem, x: Any, step: float | None = None, *, buffers: Tensor | None = None) -> Tensor:
    """G_s(x) = (x - P_s(x - s grad f(x))) / s; the gradient when h = 0. The default s is the problem's."""
    point, s = _vector(x), problem.default_step() if step is None else step
    return (point - problem.regularizer.prox(point - s * problem.gradient(point, buffers=buffers), s)) / s


def stationarity(problem: Problem, x: Any, step: float | None = None, *, buffers: Tensor | None = None) -> float:
    """||G_s(x)||: zero exactly at stationary points of f + h."""
    return problem.stationarity(_vector(x), step, buffers=buffers)


def normal_map(problem: Problem, z: Any, gamma: float) -> Tensor:
    """F^gamma(z) = grad f(P_gamma(z)) + (z - P_gamma(z)) / gamma: zero when P_gamma(z) is stationary and z fits it.

    Its norm bounds stationarity: ||G_gamma(P_gamma(z))|| <= ||F^gamma(z)|| / (1 - gamma rho).
    """
    point = _vector(z)
    x = problem.regularizer.prox(point, gamma)
    return problem.gradient(x) + (point - x) / gamma


def normal_map_norm(problem: Problem, z: Any, gamma: float) -> float:
    """||F^gamma(z)||."""
    return float(normal_map(problem, z, gamma).norm())


class ProximalPoint(NamedTuple):
    """The prox of the whole objective F at a point, and how it was found."""

    u: Tensor
    """argmin_u F(u) + ||u - x||^2 / (2 r)."""
    envelope: float
    """The minimum: the Moreau envelope F_r(x)."""
    error: float
    """Bound on the distance of ``u`` from the minimiser (an estimate for losses with kinks)."""


def proximal_point(
    problem: Problem, x: Any, radius: float, tolerance: float = 1e-9, most: int = 20_000
) -> ProximalPoint:
    """argmin_u F(u) + ||u - x||^2 / (2 r), by a solver that sees all the data.

    Needs r rho < 1, which makes the problem (1/r - rho)-strongly convex for convex losses. Smooth losses take
    accelerated proximal gradient steps (with restarts) until ``u`` is within ``tolerance``; losses with kinks take
    ``most`` proximal subgradient steps with weighted averaging, whose error falls like 1 / sqrt(steps).

    Raises
    ------
    RuntimeError
        When a smooth problem is not solved to ``tolerance`` in ``most`` steps.
    """
    center, h = _vector(x), problem.regularizer
    modulus = 1 / radius - h.rho if isinstance(radius, int | float) and radius > 0 else 0.0
    if modulus <= 0:
        raise ValueError(
            f"radius = {radius!r}, must be positive and below 1/rho = {1 / h.rho if h.rho else math.inf:g}"
        )
    if isinstance(problem.loss, Loss) and not math.isfinite(problem.loss.curvature):
        u, error = _subgradient(problem, center, radius, modulus, most)
    else:
        u, error = _accelerated(problem, center, radius, modulus, tolerance, most)
    return ProximalPoint(u, problem.objective(u) + float((u - center).square().sum()) / (2 * radius), error)


def _accelerated(
    problem: Problem, x: Tensor, radius: float, modulus: float, tolerance: float, most: int
) -> tuple[Tensor, float]:
    """FISTA on f + ||. - x||^2 / (2r) and h, restarted whenever momentum points uphill."""
    h = problem.regularizer
    s = 1 / (problem.smoothness("mean") + 1 / radius)
    u, y, t = x, x, 1.0
    for _ in range(most):
        new = h.prox(y - s * (problem.gradient(y) + (y - x) / radius), s)
        # (y - new)/s, corrected for the change of gradient, is a subgradient at new: at most twice as long.
        error = 2 * float((y - new).norm()) / (s * modulus)
        if error <= tolerance:
            return new, error
        uphill = float(((y - new) * (new - u)).sum()) > 0
        following = 1.0 if uphill else (1 + math.sqrt(1 + 4 * t * t)) / 2
        y = new if uphill else new + (t - 1) / following * (new - u)
        u, t = new, following
    raise RuntimeError(f"the prox of F was not found to {tolerance:g} in {most} steps (error at most {error:.2e})")


def _subgradient(problem: Problem, x: Tensor, radius: float, modulus: float, most: int) -> tuple[Tensor, float]:
    """Proximal subgradient steps 2 / (modulus (t + 1)), the models weighted by t."""
    h, u, mean, largest = problem.regularizer, x, torch.zeros_like(x), 0.0
    for t in range(1, most + 1):
        mean = mean + 2 / (t + 1) * (u - mean)
        g = problem.gradient(u) + (u - x) / radius
        largest = max(largest, float(g.norm()))
        s = min(2 / (modulus * (t + 1)), 0.5 / h.rho if h.rho else math.inf)
        u = h.prox(u - s * g, s)
    return mean, 2 * largest / (modulus * math.sqrt(most + 1))


def moreau_gradient_norm(problem: Problem, x: Any, radius: float, tolerance: float = 1e-9, most: int = 20_000) -> float:
    """||grad F_r(x)|| = ||x - prox_{r F}(x)|| / r, F_r the Moreau envelope of the whole objective F = f + h.

    It is small where x is near a nearly stationary point, also for losses with kinks; the non-smooth theorems on
    FedProx and FedMSPP bound it. See :func:`proximal_point` for the arguments.
    """
    u = proximal_point(problem, x, radius, tolerance, most).u
    return float((_vector(x) - u).norm()) / radius


def distance(x: Any, optimum: Any) -> float:
    """||x - x*||, of two vectors of the same shape."""
    return float((_vector(x) - _like(optimum, x)).norm())


def client_drift(
    problem: Problem, x: Any, *, local_steps: int, step: float, batch_size: int | None = None, seed: int = 0
) -> float:
    """mean_i ||x_i - mean_j x_j|| after ``local_steps`` gradient steps of every client from x.

    Zero for identical clients and for one step of a common gradient; grows with the clients' differences. A
    diagnostic for local methods: how far apart would plain local training end?
    """
    smooth, n = problem.smooth(), len(problem.silos)
    grad = ClientGradients(
        smooth, np.arange(n, dtype=np.uint64), 0, Batches(seed, batch_size), Counter(), expect=local_steps
    )
    models = _vector(x).expand(n, -1)
    for k in range(local_steps):
        models = models - step * grad(models, k)
    return float((models - models.mean(0)).norm(dim=1).mean())


def sparsity(x: Any, tolerance: float = 0.0) -> float:
    """The share of entries with |x_j| <= tolerance; exact zeros by default."""
    return float((_vector(x).abs() <= tolerance).double().mean())


def hoyer(x: Any) -> float:
    """(sqrt(d) - ||x||_1 / ||x||_2) / (sqrt(d) - 1): 0 for entries of equal size, 1 for a single nonzero.

    Hoyer's measure does not change with the scale of x. A vector of zeros has measure 1, one of length 1 too.
    """
    point = _vector(x).flatten()
    norm, root = float(point.norm()), math.sqrt(len(point))
    if norm == 0 or len(point) == 1:
        return 1.0
    return (root - float(point.abs().sum()) / norm) / (root - 1)


class SupportRecovery(NamedTuple):
    """How well the nonzeros of a model match those of a reference."""

    precision: float
    """The share of the model's nonzeros that the reference has too; 1 if it has none."""
    recall: float
    """The share of the reference's nonzeros that were found; 1 if it has none."""

    @property
    def f1(self) -> float:
        """The harmonic mean of the two."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


def support(x: Any, reference: Any, tolerance: float = 0.0) -> SupportRecovery:
    """Precision and recall of the entries above ``tolerance``.

    >>> support([1.0, 0.0, 2.0, 0.0], [3.0, 1.0, 0.0, 0.0])
    SupportRecovery(precision=0.5, recall=0.5)
    """
    mine, true = (v.abs() > tolerance for v in (_vector(x), _like(reference, x)))
    both = int((mine & true).sum())
    return SupportRecovery(*(both / count if (count := int(s.sum())) else 1.0 for s in (mine, true)))


def __getattr__(name: str) -> Any:
    if name != "Support":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("metrics.Support is now metrics.SupportRecovery", DeprecationWarning, stacklevel=2)
    return SupportRecovery
