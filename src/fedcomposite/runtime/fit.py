"""Whether a method can do what is asked of it: said before any work starts, with methods that can."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fedcomposite._validation import as_vector, wrong_arguments
from fedcomposite.algorithms import REGISTRY, fields
from fedcomposite.algorithms.base import Algorithm, AnyAlgorithm
from fedcomposite.problems import Loss, Problem
from fedcomposite.regularizers import Ramped, Regularizer, Zero
from fedcomposite.runtime.cohorts import Cohorts
from fedcomposite.runtime.records import rehearse


class NonSmoothWarning(UserWarning):
    """A method that needs a smooth loss was given one with kinks."""


def check_given(function: Callable[..., Any], given: Mapping[str, Any], *lines: str) -> None:
    """Refuse arguments that are not what a function takes by its annotations, all of them in one error.

    What is no problem, method, type to compute in, device or model is told in words of its own; ``lines`` come after.
    """
    said = {name: _OWN_WORDS[name](given[name]) for name in given if name in _OWN_WORDS}
    faults = [line for line in said.values() if line]
    faults += wrong_arguments(function, {k: v for k, v in given.items() if k not in (*_OWN_WORDS, *_ELSEWHERE)})
    problem = given.get("problem")
    if isinstance(problem, Problem):
        models = [name for name in ("x0", "x") if given.get(name) is not None]
        faults += [line for name in models if (line := model_fault(name, given[name], problem.dimension))]
    if faults or lines:
        kind = TypeError if said.get("problem") or said.get("algorithm") else ValueError
        raise kind("\n".join([*faults, *lines]))


def _problem_fault(problem: object) -> str:
    if isinstance(problem, Problem):
        return ""
    return f"problem is a {type(problem).__name__}; make one: fc.Problem(silos, loss=..., regularizer=...)"


def _algorithm_fault(algorithm: object) -> str:
    if isinstance(algorithm, Algorithm):
        return ""
    shown = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", type(algorithm).__name__)
    return f"algorithm = {shown}, must be a method with its steps: fc.algorithms.FedAvg(5, 0.1)"


def _dtype_fault(dtype: object) -> str:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return ""
    return f"dtype = {dtype!r}, must be torch.float64 or torch.float32"


def device_fault(device: object) -> str:
    """What is wrong with a device, if anything: it is none, or it is not there."""
    try:
        made = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        return f"device = {device!r}, must be 'cpu', 'cuda' or 'cuda:1'"
    if made.type != "cuda":
        return ""
    if not torch.cuda.is_available():
        return f"device = '{made}', but this torch sees no GPU; use device = 'cpu'"
    count = torch.cuda.device_count()
    return f"device = '{made}', but there are {count} GPUs, from 'cuda:0' on" if (made.index or 0) >= count else ""


def autocast_fault(problem: Problem, device: object) -> str:
    """Why a problem's passes cannot run on a device as it asks for, if so."""
    if problem.options.precision == "full" or torch.device(device).type == "cuda":  # type: ignore[call-overload]
        return ""
    return "precision = 'bf16' is autocast on a GPU; leave it out, or use device = 'cuda'"


def precision_fault(dtype: torch.dtype, name: str) -> str:
    """Why a method that solves linear systems does not take a dtype, if so."""
    if dtype.itemsize > 2:
        return ""
    return f"dtype = {dtype}, but {name} solves linear systems, which takes torch.float64 or torch.float32"


def _callbacks_fault(callbacks: object) -> str:
    if isinstance(callbacks, Iterable) and not isinstance(callbacks, str):
        return ""
    return f"callbacks = {callbacks!r:.60}, must be a list: callbacks=[...]"


_OWN_WORDS: dict[str, Callable[[Any], str]] = {
    "problem": _problem_fault,
    "algorithm": _algorithm_fault,
    "dtype": _dtype_fault,
    "device": device_fault,
    "callbacks": _callbacks_fault,
}


_ELSEWHERE = ("x0", "x", "privacy", "aggregator")  # told below, and where they are used


def model_fault(name: str, x: object, dimension: int) -> str:
    """What is wrong with a model that was given, if anything."""
    try:
        point = as_vector(x, name)
    except ValueError as error:
        return str(error)
    if point.shape != (dimension,):
        return f"{name} has shape {tuple(point.shape)}, expected ({dimension},)"
    return "" if bool(torch.isfinite(point).all()) else f"{name} has NaN or infinite entries"


def check_fit(
    algorithm: AnyAlgorithm,
    problem: Problem,
    cohorts: Cohorts,
    *,
    clip_norm: float | None = None,
    dtype: torch.dtype = torch.float64,
    stacklevel: int = 2,
) -> None:
    """Refuse what the method cannot do, and name methods that can."""
    info, name, n = algorithm.info, algorithm.name, cohorts.clients
    if cohorts.size < n and not algorithm.partial:
        able = ", ".join(k for k, v in REGISTRY.items() if v.info.participation == "any")
        own = "partial_participation" in fields(type(algorithm))
        hint = f"; or set partial_participation=True, {name}'s own form for it" if own else ""
        raise ValueError(
            f"{name} needs every client in every round, but participation asks for {cohorts.size} of {n}; "
            f"methods that allow it: {able}{hint}"
        )
    if info.uniform_only and problem.weighting != "uniform":
        raise ValueError(f"{name} must weigh all clients alike, which only works with weights='uniform'")
    check_rules(algorithm, problem.regularizer)
    if clip_norm is not None and info.second_order:
        raise ValueError(f"{name} solves with gradients and Hessians as they are; leave clip_norm out")
    if info.second_order and (fault := precision_fault(dtype, name)):
        raise ValueError(fault)
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
    if info.second_order and not isinstance(problem.loss, Loss):
        raise TypeError(f"{name}: a network offers gradients only, no Hessians; use a first-order method, like FedNMap")
    if info.second_order and isinstance(problem.loss, Loss) and not problem.loss.twice:
        raise TypeError(f"{name}: {problem.loss} has no second derivative; use a first-order method, or fc.solve")


def check_steps(algorithm: AnyAlgorithm, h: Regularizer, cohorts: Cohorts, dimension: int = 1) -> None:
    """Refuse steps past 1/rho, for which h has no prox: the first round is tried at zero, by a client without data."""
    if not 0 < h.rho < math.inf:
        return  # any step will do
    rules, now = algorithm.at(0), h.during(0)
    server, client = rules.init(torch.zeros(dimension, dtype=torch.float64), now)
    for _ in range(rules.exchanges):
        reply, client = rehearse(rules, rules.broadcast(server), client, now, cohorts.size)
        server = rules.aggregate(server, rules.decode(reply), cohorts.size / cohorts.clients, now)
    rules.solution(server, now)


def check_rules(algorithm: AnyAlgorithm, h: Regularizer) -> None:
    """Refuse a regularizer that the method has no rule for, whatever the data."""
    info, name = algorithm.info, algorithm.name
    if info.regularizer == "none" and not isinstance(h, Zero):
        able = ", ".join(k for k, v in REGISTRY.items() if "convex" in v.info.regularizer)
        raise ValueError(f"{name} has no rule for a regularizer; leave it out, or use a composite method: {able}")
    if algorithm.one_regularizer and isinstance(h, Ramped):
        raise ValueError(f"{name} takes no strength that changes from round to round: {algorithm.one_regularizer}")
    if info.regularizer == "convex" and h.rho > 0:
        algorithm.at(0).init(torch.zeros(1), h.during(0))  # says why
