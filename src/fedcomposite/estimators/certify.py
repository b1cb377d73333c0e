"""How far a model is from the best one: the duality gap where conjugates are known.

With the samples' weights o_j in f, the problem and its Fenchel dual are

    min_x  sum_j o_j phi(a_j'x, b_j) + h(x)      max_t  -sum_j o_j phi*(t_j, b_j) - h*(-sum_j o_j t_j a_j)

The derivatives phi'(a_j'x, b_j) are a dual point, once they are made feasible: those of one sign are shrunk until they
sum to zero if there is an intercept, and then all of them until h* is finite. Zero lies in the domain of every phi*
here, so shrinking never leaves it. The gap between the two values bounds F(x) - min F, whatever the solver did.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedcomposite.problems import Linear, Problem
from fedcomposite.problems.loss import Loss
from fedcomposite.problems.losses import Huber, LeastSquares, Logistic, Multinomial, Poisson, SquaredHinge
from fedcomposite.regularizers import L1, Blocks, Box, ElasticNet, GroupLasso, L2Squared, On, Regularizer, Zero
from fedcomposite.runtime.certificate import Certificate


def certify(problem: Problem, x: Tensor) -> Certificate:
    """The duality gap at x, or the optimality measure where the gap is not known."""
    gap = duality_gap(problem, x)
    if gap is not None:
        return Certificate("duality gap", gap)
    return Certificate("optimality measure", problem.optimality(x))


def duality_gap(problem: Problem, x: Tensor) -> float | None:
    """A bound on F(x) - min F, or None where a conjugate is not known."""
    smooth = problem.smooth()
    if not isinstance(smooth, Linear) or not isinstance(smooth.loss, tuple(_CONJUGATES)):
        return None
    x = x.to(smooth.X)
    weights = smooth.sample_weights
    z = smooth.X @ (x if smooth.outputs == 1 else x.view(-1, smooth.outputs))
    dual = smooth.loss.derivative(z, smooth.b)
    inner = len(x) - smooth.bias_coordinates
    if smooth.bias_coordinates == 1:
        dual = _balanced(dual, weights)
    elif smooth.bias_coordinates:
        return None
    slope = (smooth.X.t() @ (dual * (weights if smooth.outputs == 1 else weights.unsqueeze(1)))).flatten()
    slope[inner:] = 0.0  # of an intercept; zero up to rounding
    shrink, conjugate = _dual_of(problem.regularizer, slope)
    if not shrink > 0:
        return None
    below = -float(weights @ _conjugate(smooth.loss, shrink * dual, smooth.b)) - conjugate
    value = problem.objective(x)
    return max(value - below, 4 * torch.finfo(torch.float64).eps * max(1.0, abs(value)))  # what rounding leaves


def _balanced(dual: Tensor, weights: Tensor) -> Tensor:
    """Shrink the entries of one sign so that the weighted sum is zero."""
    above, below = float(weights @ dual.clamp(min=0)), -float(weights @ dual.clamp(max=0))
    if above > below:
        return torch.where(dual > 0, dual * (below / above), dual)
    return torch.where(dual < 0, dual * (above / below if below > 0 else 0.0), dual)


def _xlogx(s: Tensor) -> Tensor:
    value: Tensor = torch.special.xlogy(s, s)
    return value


def _conjugate(loss: Loss, t: Tensor, b: Tensor) -> Tensor:
    """phi*(t, b) of each sample, for t in its domain."""
    value: Tensor = next(rule for kind, rule in _CONJUGATES.items() if isinstance(loss, kind))(t, b)
    return value


def _logistic(t: Tensor, b: Tensor) -> Tensor:
    s = (-b * t).clamp(0, 1)
    return _xlogx(s) + _xlogx(1 - s)


def _squared_hinge(t: Tensor, b: Tensor) -> Tensor:
    s = (-b * t).clamp(min=0)
    return s * s / 4 - s


def _poisson(t: Tensor, b: Tensor) -> Tensor:
    s = (t + b).clamp(min=0)
    return _xlogx(s) - s


_CONJUGATES = {
    Logistic: _logistic,
    Multinomial: lambda t, b: _xlogx((t + b).clamp(0, 1)).sum(-1),
    LeastSquares: lambda t, b: t * t / 2 + t * b,
    Huber: lambda t, b: t * t / 2 + t * b,
    SquaredHinge: _squared_hinge,
    Poisson: _poisson,
}


def _dual_of(h: Regularizer, v: Tensor) -> tuple[float, float]:
    """The largest c <= 1 for which h*(-c v) is finite, and its value there; c = 0 where it is not known."""
    match h:
        case Zero():
            return (1.0, 0.0) if not bool(v.any()) else (0.0, 0.0)
        case L1():
            return _within(v.abs(), h.interval(torch.zeros_like(v))[1]), 0.0
        case ElasticNet() if h.l2 > 0:
            return 1.0, float((v.abs() - h.l1).clamp(min=0).square().sum() / (2 * h.l2))
        case L2Squared() if h.lam > 0:
            return 1.0, float(v.square().sum() / (2 * h.lam))
        case GroupLasso():
            pairs = [(torch.linalg.vector_norm(part, dim=-1), h.lam * weight) for part, weight in h._parts(v)]
            bounds = [b.squeeze(-1) if isinstance(b, Tensor) else torch.full_like(n, b) for n, b in pairs]
            return min(_within(n, b) for (n, _), b in zip(pairs, bounds, strict=True)), 0.0
        case Box() if abs(h.low) < float("inf") and abs(h.high) < float("inf"):
            return 1.0, float(torch.maximum(-h.low * v, -h.high * v).sum())
        case On() | Blocks():
            return _on_parts(h, v)
    return 0.0, 0.0


def _within(size: Tensor, bound: Tensor) -> float:
    """The largest c <= 1 with c size <= bound; 0 where a bound is zero and the size is not."""
    over = size > bound
    return float((bound[over] / size[over]).min()) if bool(over.any()) else 1.0


def _on_parts(h: On | Blocks, v: Tensor) -> tuple[float, float]:
    """The sum of the conjugates of the terms; what no term acts on must be zero."""
    rest, found = v.clone(), []
    for part in (h,) if isinstance(h, On) else h._placed():
        taken = part._take(v)
        part._put(rest, torch.zeros_like(taken))
        found.append((part.h, taken))
    if bool(rest.any()):
        return 0.0, 0.0
    shrink = min(_dual_of(term, taken)[0] for term, taken in found)
    return shrink, sum(_dual_of(term, shrink * taken)[1] for term, taken in found)
