"""How far a model is from the best one, from means over clients alone.

With the samples' weights o_j in f, the problem and its Fenchel dual are

    min_x  sum_j o_j phi(a_j'x, b_j) + h(x)      max_t  -sum_j o_j phi*(t_j, b_j) - h*(-sum_j o_j t_j a_j)

The derivatives t_j = phi'(a_j'y, b_j) at a model y are a dual point. Its sum in h* is the gradient g of f at y, and,
with equality in Fenchel and Young's inequality, sum_j o_j phi*(t_j, b_j) = y'g - f(y). Shrunk by a factor c until
h*(-c g) is finite, it is still one, and since phi* is convex

    sum_j o_j phi*(c t_j, b_j) <= c (y'g - f(y)) - (1 - c) sum_j o_j min phi(., b_j)

where the minima are zero for most losses. So f and its gradient at y, which every measurement of a model delivers, are
all it takes: no sample, and no exchange of another kind. y is x, with its intercept moved to where the derivative in
it vanishes, which takes a few measurements. The gap between the two values bounds F(x) - min F, whatever the solver
did; it is at most the exact gap at c t plus (1 - c) f(y).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from fedcomposite._validation import as_vector
from fedcomposite.problems import Evaluation, Linear, Loss, Problem
from fedcomposite.regularizers import L1, Blocks, Box, ElasticNet, GroupLasso, L2Squared, On, Regularizer, Zero
from fedcomposite.regularizers.wrapped import Wrapped
from fedcomposite.results import Result

Look = Callable[[Tensor], Evaluation]
"""Loss and gradient of f at a model."""
Looks = Generator[tuple[Tensor, bool], Evaluation, float | None]
"""A bound that is found by measuring models: it yields them, and whether with a larger width, and receives both."""

WIDER = 0.01
"""How much larger the width of the second measurement of a smooth loss is."""
_LOOKS, _FEW_LOOKS = 40, 12  # measurements that finding the intercept may take, of smooth losses and behind a barrier
_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, repr=False)
class Certificate(Result):
    """A number that bounds how far a model is from the best one, or measures it.

    A ``"duality gap"`` is a bound: the objective is at most ``value`` above its minimum. An ``"optimality measure"`` is
    the distance from -grad f to the subdifferential of h: zero exactly at stationary points, and no bound by itself.
    """

    kind: Literal["duality gap", "optimality measure"]
    value: float

    def __str__(self) -> str:
        if self.kind == "duality gap":
            return f"objective within {self.value:.1e} of the optimum (duality gap)"
        return f"optimality measure {self.value:.1e} (distance from -grad f to the subdifferential of h)"

    def to_frame(self) -> pd.DataFrame:
        """One row: what the number is, and the number."""
        return pd.DataFrame([{"kind": self.kind, "value": self.value}])

    def _line(self) -> str:
        return f"{self.kind} {self.value:.1e}"


def certify(problem: Problem, x: Any, look: Look | None = None, *, with_gap: bool = True) -> Certificate:
    """The duality gap at x, or the optimality measure where the gap is not known or not wanted.

    ``look`` measures models where the problem's data are elsewhere; the gap may need several of them.
    """
    x = as_vector(x)
    gap = duality_gap(problem, x, look) if with_gap else None
    if gap is not None:
        return Certificate("duality gap", gap)
    gradient = (look or problem.evaluate)(x).gradient
    return Certificate("optimality measure", float(problem.regularizer.optimality(x, gradient)))


def duality_gap(problem: Problem, x: Tensor, look: Look | None = None) -> float | None:
    """A bound on F(x) - min F, or None where a conjugate is not known."""
    looks, look = gap_by_looks(problem, x, here=look is None), look or problem.evaluate
    try:
        at, _ = next(looks)
        while True:
            at, _ = looks.send(look(at))
    except StopIteration as stop:
        found: float | None = stop.value
        return found


def gap_by_looks(
    problem: Problem, x: Tensor, *, value: float | None = None, width: float = 0.0, here: bool = False
) -> Looks:
    """A bound on F(x) - min F, or None where a conjugate is not known; it yields the models to measure.

    With ``value``, the objective at x, what is measured is a loss made smooth from below with some ``width``
    (:class:`fedcomposite.problems.smoothed.Smoothed`) in place of the problem's own, whose conjugates are then smaller:
    losses are also asked for with a width that is larger by a hundredth. The smooth loss is convex in its width, so
    that the difference bounds the part of the barrier.

    Where the derivative in the intercept does not vanish at any number, two neighbours with derivatives of different
    sign are mixed: a mean of dual points is one, and its conjugates are at most the mean of theirs.
    """
    lowest, h = _lowest(problem, here), problem.regularizer
    intercepts = problem.layout[-1].stop - problem.layout[-1].start if problem.bias else 0
    if lowest is None or intercepts > 1:
        return None
    seen = yield x, False
    mixed = [(1.0, _Point(x, float(seen.loss), seen.gradient))]
    if intercepts:
        mixed = yield from _balanced(mixed[0][1], width)
    conjugates, gradient = 0.0, torch.zeros_like(x)
    for share, at in mixed:
        slack = 0.0
        if value is not None:
            wider = yield at.x, True
            slack = max(0.0, at.loss - float(wider.loss)) / WIDER
        conjugates += share * (float(at.x @ at.gradient) - at.loss - slack)
        gradient += share * at.gradient
    value = float(seen.loss) + float(h.value(x)) if value is None else value
    slope = gradient.clone()
    slope[len(x) - intercepts :] = 0.0
    shrink, conjugate = _dual_of(h, slope)
    if not shrink > 0:
        return None
    below = -shrink * conjugates + (1 - shrink) * lowest - conjugate
    left = 4 * _EPS * max(1.0, abs(value))  # what rounding leaves
    if intercepts:
        off, room = abs(float(gradient[-1])), 10 * (1 + abs(float(x[-1])))
        if not width and off > 1e-10 * float(torch.linalg.vector_norm(gradient)) and off > 100 * _EPS:
            return None
        left += off * room
    return max(value - below, 0.0) + left


def dual_known(problem: Problem) -> bool:
    """Whether bounds can be asked for at all: the conjugate of h is known, and there is one intercept at most."""
    intercepts = problem.layout[-1].stop - problem.layout[-1].start if problem.bias else 0
    none = torch.zeros(problem.dimension, dtype=torch.float64)
    return intercepts <= 1 and _dual_of(problem.regularizer, none)[0] > 0


def _lowest(problem: Problem, here: bool) -> float | None:
    """The mean of the least values of the samples' losses; None where it is not known."""
    if not isinstance(problem.loss, Loss):
        return None
    if problem.loss.nonnegative:
        return 0.0
    smooth = problem.smooth() if here else None
    return smooth.lowest() if isinstance(smooth, Linear) else None


class _Point(NamedTuple):
    """A model, and what was measured of it."""

    x: Tensor
    loss: float
    gradient: Tensor


_Mixed = list[tuple[float, _Point]]
"""Points and their shares."""


def _balanced(at: _Point, width: float) -> Generator[tuple[Tensor, bool], Evaluation, _Mixed]:
    """The model with its last coordinate where the derivative in it vanishes, or two whose mixture has none.

    That derivative rises with the coordinate: secant steps, kept within the bracket that is known by then. Behind a
    barrier it rises all but at once: small steps to the other side, growing tenfold, and the mixture is as good.
    """
    ends: dict[bool, _Point] = {}
    now, before, reach = at, None, 1e-3 * width
    for _ in range(_FEW_LOOKS if width else _LOOKS):
        slope, place = float(now.gradient[-1]), float(now.x[-1])
        if abs(slope) <= _EPS / 8:
            return [(1.0, now)]
        if (side := slope > 0) not in ends or abs(slope) <= abs(float(ends[side].gradient[-1])):
            ends[side] = now
        following = _secant(place, slope, before)
        if len(ends) == 2:
            low, high = (float(ends[k].x[-1]) for k in (False, True))
            if not low < following < high:
                following = (low + high) / 2
            if width or following in (low, high):  # neighbours among the numbers there are
                break
        elif width:
            following, reach = place - math.copysign(reach, slope), 10 * reach
        elif (following - place) * slope >= 0:
            following = place - 10 * slope
        before = place, slope
        moved = now.x.clone()
        moved[-1] = following
        seen = yield moved, False
        now = _Point(moved, float(seen.loss), seen.gradient)
    if len(ends) < 2:
        return [(1.0, min(ends.values(), key=lambda p: abs(float(p.gradient[-1]))))]
    under, over = -float(ends[False].gradient[-1]), float(ends[True].gradient[-1])
    return [(over / (under + over), ends[False]), (under / (under + over), ends[True])]


def _secant(place: float, slope: float, before: tuple[float, float] | None) -> float:
    """Where the derivative vanishes if it is linear."""
    if before is None:
        return place - 4 * slope
    if slope == before[1] or place == before[0]:
        return place - 2 * (place - before[0] or slope)
    return place - slope * (place - before[0]) / (slope - before[1])


def _dual_of(h: Regularizer, v: Tensor) -> tuple[float, float]:
    """The largest c <= 1 for which h*(-c v) is finite, and its value there; c = 0 where it is not known."""
    match h:
        case Wrapped():
            return _dual_of(h.h, v)
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
