"""Whether a method can do what is asked of it: said before any work starts, with methods that can."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from fedcomposite.algorithms import REGISTRY, fields
from fedcomposite.algorithms.base import Algorithm, AnyAlgorithm
from fedcomposite.problems import Problem
from fedcomposite.regularizers import Ramped, Regularizer, Zero
from fedcomposite.runtime.cohorts import Cohorts


class NonSmoothWarning(UserWarning):
    """A method that needs a smooth loss was given one with kinks."""


def check_given(problem: object, algorithm: object, dtype: object, device: object, **numbers: object) -> None:
    """Refuse what is no problem, no method, no device, no type to compute in or no number, by its name."""
    if not isinstance(problem, Problem):
        raise TypeError(
            f"problem is a {type(problem).__name__}; make one: fc.Problem(silos, loss=..., regularizer=...)"
        )
    if not isinstance(algorithm, Algorithm):
        shown = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", type(algorithm).__name__)
        raise TypeError(f"algorithm = {shown}, must be a method with its steps: fc.algorithms.FedAvg(5, 0.1)")
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise ValueError(f"dtype = {dtype!r}, must be torch.float64 or torch.float32")
    try:
        torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise ValueError(f"device = {device!r}, must be 'cpu', 'cuda' or 'cuda:1'") from None
    for name, value in numbers.items():
        if not (value is None or isinstance(value, int | float | np.number)):
            raise ValueError(f"{name} = {value!r}, must be a number")


def check_fit(
    algorithm: AnyAlgorithm,
    problem: Problem,
    cohorts: Cohorts,
    *,
    clip_norm: float | None = None,
    stacklevel: int = 2,
) -> None:
    """Refuse what the method cannot do, and name methods that can."""
    info, name, n = algorithm.info, type(algorithm).__name__, cohorts.clients
    if cohorts.size < n and not algorithm.partial:
        able = ", ".join(k for k, v in REGISTRY.items() if v.info.participation == "any")
        own = "partial_participation" in fields(type(algorithm))
        hint = f"; or set partial_participation=True, {name}'s own form for it" if own else ""
        raise ValueError(
            f"{name} needs every client in every round, but participation asks for {cohorts.size} of {n}; "
            f"methods that allow it: {able}{hint}"
        )
    if info.uniform_only and problem.weighting != "uniform":
        raise ValueError(f"{name} averages masked replies, which only works with weights='uniform'")
    check_rules(algorithm, problem.regularizer)
    if clip_norm is not None and info.second_order:
        raise ValueError(f"{name} solves with gradients and Hessians as they are; leave clip_norm out")
    if cohorts.replace and len(algorithm.at(0).init(torch.zeros(problem.dimension), problem.regularizer.during(0))[1]):
        raise ValueError(
            f"{name} keeps state at its clients, so a client must not be drawn twice in a round; use replace=False"
        )
    if not problem.loss.smooth and not info.nonsmooth_loss:
        able = ", ".join(k for k, v in REGISTRY.items() if v.info.nonsmooth_loss) or "none yet"
        warnings.warn(
            f"{name} is made for smooth losses and {problem.loss} has kinks: expect slow or no convergence; "
            f"methods made for it: {able}",
            NonSmoothWarning,
            stacklevel=stacklevel + 1,
        )


def check_rules(algorithm: AnyAlgorithm, h: Regularizer) -> None:
    """Refuse a regularizer that the method has no rule for, whatever the data."""
    info, name = algorithm.info, type(algorithm).__name__
    if info.regularizer == "none" and not isinstance(h, Zero):
        able = ", ".join(k for k, v in REGISTRY.items() if "convex" in v.info.regularizer)
        raise ValueError(f"{name} has no rule for a regularizer; leave it out, or use a composite method: {able}")
    if algorithm.one_regularizer and isinstance(h, Ramped):
        raise ValueError(f"{name} takes no strength that changes from round to round: {algorithm.one_regularizer}")
    if info.regularizer == "convex" and h.rho > 0:
        algorithm.at(0).init(torch.zeros(1), h.during(0))  # says why
