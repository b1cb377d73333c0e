"""The end of a fit whose h is not weakly convex (L0, TopK, Sparsity2to4), after a first-order method.

How short the steps of a first-order method are says little of what is left where features are far from zero or differ
in size. With the slopes s_j that h has at x in place of h, the problem

    minimise over u    f(u) + sum_j s_j |u_j|        (s_j infinite where h does not let x_j leave zero)

is convex, and x is stationary where it is its minimiser. So Newton steps on it are a certificate, and where they lead
on, that is a direction along which F falls.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedcomposite.analysis.newton import End, FitPlan, attained, fit, plan_of, slopes
from fedcomposite.problems import Problem
from fedcomposite.regularizers import L1, Regularizer
from fedcomposite.runtime.driver import Deadline, Driver
from fedcomposite.runtime.transports.silo_answers import StackedSums

_FITS = 30  # with slopes of their own
_MOST = 300  # exchanges of all of them: Newton steps that are many lead nowhere
_SHORTER = 12  # halves of a move


class Settled(NamedTuple):
    """A model, why the search for a better one ended, the exchanges that it took, and coordinates without end."""

    x: Tensor
    end: End
    rounds: int
    grown: tuple[int, ...] = ()


def convexified(h: Regularizer, x: Tensor) -> L1 | None:
    """The convex term that has the slopes of h at x; None where these are not known."""
    slope = slopes(h, x)
    return None if slope is None else L1(1.0, tuple(slope.tolist()))


def without_end(problem: Problem, x: Tensor, parties: StackedSums, plan: FitPlan) -> tuple[tuple[int, ...], int]:
    """The coordinates along which F falls for ever beyond a stationary x, if there are any; and the exchanges it took.

    Far out along them nothing is left to gain, so that steps from x say nothing. A convex problem with the slopes of h
    at x falls along the same directions, and steps from zero see how it goes on to fall.
    """
    h: Regularizer | None = problem.regularizer
    if h is not None and h.rho > 0:
        h = convexified(h, x)
    if h is None or attained(problem):
        return (), 0
    quiet = replace(plan, rounds=_MOST, watch=lambda x, rounds: None)
    [made] = Driver(parties).run([fit(h, torch.zeros_like(x), quiet)])
    return made.grown if made.end == "endless" else (), made.rounds


def settle(
    problem: Problem, x: Tensor, parties: StackedSums, tolerance: float, rounds: int, deadline: Deadline
) -> Settled | None:
    """A stationary point that Newton steps reach from x, F falling all the way; None where they do not go with h.

    ``tolerance`` is of what is left to gain, relative to the objective.
    """
    value, asked, rounds = problem.objective(x), 0, min(rounds, _MOST)
    for _ in range(_FITS):
        if not math.isfinite(value) or (convex := convexified(problem.regularizer, x)) is None:
            return None
        left = max(rounds - asked, 1)
        plan = plan_of(problem, parties.centre, tolerance=tolerance, rounds=left, deadline=deadline)
        [made] = Driver(parties).run([fit(convex, x, plan)])
        asked += made.rounds
        before, after = (float(problem.evaluate(u).loss + convex.value(u)) for u in (x, made.x))
        small = before - after <= tolerance * abs(value)
        x, value, falls = _lower(problem, x, made.x, value)
        if small and made.converged:
            grown, more = without_end(problem, x, parties, plan)
            return Settled(x, "endless" if grown else "converged", asked + more, grown)
        if small or not made.converged:
            return Settled(x, made.end, asked, made.grown)
        if not falls or asked >= rounds:
            break
    return Settled(x, "rounds", asked)


def _lower(problem: Problem, x: Tensor, goal: Tensor, value: float) -> tuple[Tensor, float, bool]:
    """The first point on the way back from the goal at which F is lower than at x, its value, and if there is one."""
    for k in range(_SHORTER):
        tried = goal + (1 - 0.5**k) * (x - goal)
        if (now := problem.objective(tried)) < value:
            return tried, now, True
    return x, value, False
