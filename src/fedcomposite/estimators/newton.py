"""Newton steps as tasks: each yields what it asks of the sites, so that many of them share their exchanges.

The rules are those of :class:`fedcomposite.algorithms.ProxNewton`. What an exchange has delivered at a solution is
used once more: the first step for the next strength of a path comes from it, without another exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedcomposite.algorithms import ProxNewton
from fedcomposite.algorithms.proxnewton import Reply
from fedcomposite.estimators.sites import Task
from fedcomposite.estimators.strengths import only, regularized
from fedcomposite.problems import Problem
from fedcomposite.problems.requests import ALL, Rows, Sums, newton
from fedcomposite.regularizers import Regularizer, Zero
from fedcomposite.regularizers.wrapped import settled

_LEVELS = 7  # of rounding off: the last width is a millionth of the residuals
_TINY = 1e-200


class Seen(NamedTuple):
    """What is known at a model: the mean reply, and the working set that its Hessian is on."""

    reply: Reply
    working: Tensor
    total: float  # number of samples


@dataclass(frozen=True)
class Fit:
    """A model, and what the sites said about it."""

    x: Tensor
    seen: Seen
    rounds: int
    """Exchanges that it took."""
    converged: bool

    @property
    def loss(self) -> float:
        """The mean loss."""
        return float(self.seen.reply.loss)


@dataclass(frozen=True)
class Plan:
    """How a fit is done."""

    rows: Rows = ALL
    tolerance: float = 1e-8
    """Of the optimality measure, relative to ``scale``."""
    rounds: int = 100
    scale: float | None = None
    """A size of gradients; the largest entry of the first one if left out."""
    width: float = 0.0
    """Over which kinks of the loss are rounded off; 0 for smooth losses."""
    outputs: int = 1
    """Margins per sample."""


def fit(h: Regularizer, at: Tensor | Fit, plan: Plan, strong: tuple[int, ...] = ()) -> Task[Fit]:
    """The solution with h; ``at`` is where to begin, a :class:`Fit` on the same rows saves an exchange."""
    settled(h)
    method = ProxNewton(start=strong)
    known = at.seen if isinstance(at, Fit) else None
    state = method.init(at.x if isinstance(at, Fit) else at, h)[0]
    seen, asked, scale, done = known, 0, plan.scale, False
    free = ~_moved(h, len(state.x)) if plan.outputs > 1 else torch.zeros(0)
    if known is not None:
        fresh, state = state.working, state._replace(working=known.working)
        state = method.aggregate(state, known.reply, 1.0, h)
        grown = state.working & ~known.working
        state = state._replace(working=fresh | grown | (state.trial != 0))
    while True:
        if seen is not None:
            scale = float(state.gradient.abs().max()) if scale is None else scale
            done = float(h.optimality(state.x, state.gradient)) <= plan.tolerance * scale
        if done or asked == plan.rounds:
            break
        message = method.broadcast(state)
        sums = yield [newton(message.x, message.working, plan.rows, plan.width)]
        asked += 1
        reply, total = _mean(sums[0])
        if plan.outputs > 1:
            reply = _anchored(reply, message.working, free, plan.outputs)
        before, state = state, method.aggregate(state, reply, 1.0, h)
        if torch.equal(state.gradient, reply.gradient):
            seen = Seen(reply, message.working, total)
        if _stuck(before.working, state.working, state.x, state.trial, float(state.step)) and asked > 1:
            done = True  # as far as rounding allows
            break
    assert seen is not None
    return Fit(state.x, seen, asked, done)


def _stuck(before: Tensor, after: Tensor, x: Tensor, trial: Tensor, step: float) -> bool:
    """Whether no step is left, and no coordinate wants to enter."""
    return step == 0.0 and torch.equal(x, trial) and torch.equal(before, after)


def _mean(sums: Sums) -> tuple[Reply, float]:
    weight, _, total = sums["weight"].tolist()
    if not weight > 0:
        raise ValueError("no site has samples for this fit: take fewer folds, or larger parts")
    return Reply(*(sums[k] / weight for k in Reply._fields)), total


def _moved(h: Regularizer, dimension: int) -> Tensor:
    """Mask of the coordinates that h moves near zero."""
    step = min(1.0, 0.5 / h.rho) if h.rho > 0 else 1.0
    probe = torch.full((dimension,), 1e-3, dtype=torch.float64)
    return torch.as_tensor(h.prox(probe, step) != probe)


def _anchored(reply: Reply, working: Tensor, free: Tensor, outputs: int) -> Reply:
    """The reply with curvature where a multinomial loss has none: all classes' coefficients of a feature moving alike.

    Where h leaves a feature alone, its loss does not change along that direction, and nor does the solution: it stays
    where it began. Only the Hessian becomes regular.
    """
    at = working.nonzero().squeeze(1)
    i, j = torch.triu_indices(len(at), len(at))
    alike = (at[i] // outputs == at[j] // outputs) & free[at[i]] & free[at[j]]
    size = float(reply.hessian[i == j].mean()) if len(at) else 0.0
    return reply._replace(hessian=reply.hessian + size * alike.to(reply.hessian))


def null(h: Regularizer, dimension: int, plan: Plan) -> Task[Fit]:
    """The model without the coordinates that h acts on: intercepts, and features that are not regularized.

    The Hessian comes with it on the free coordinates only if there are many.
    """
    free = ~regularized(h, dimension)
    made = yield from fit(only(free) or Zero(), torch.zeros(dimension, dtype=torch.float64), plan)
    return made


def on_support(x: Tensor, h: Regularizer, plan: Plan) -> Task[Fit]:
    """The model without h on the coordinates that x and h leave: nothing is shrunk."""
    free = (x != 0) | ~regularized(h, len(x))
    made = yield from fit(only(free) or Zero(), x, plan)
    return made


def strong_rule(h: Regularizer, at: Fit) -> tuple[int, ...]:
    """Coordinates outside the support that would move under h, twice the next strength minus the last one."""
    x, g = at.x, at.seen.reply.gradient
    step = min(1.0, 0.5 / h.rho) if h.rho > 0 else 1.0
    moved = (x == 0) & (h.prox(x - step * g, step) != 0)
    return tuple(moved.nonzero().squeeze(1).tolist())


def sharpened(h: Regularizer, x: Tensor, plan: Plan, residuals: bool) -> Task[Fit]:
    """The solution for a loss with a kink, rounded off over a width that falls tenfold.

    ``residuals`` says that the kink is on the scale of the targets, so that the width is measured by the mean loss.
    """
    size = 1.0
    if residuals:
        [sums] = yield [newton(x, torch.zeros_like(x, dtype=torch.bool), plan.rows, 1e-300)]
        size = float(sums["loss"] / sums["weight"][0])
    made, asked, width = None, int(residuals), size
    for level in range(1, _LEVELS + 1):
        made = yield from fit(h, x if made is None else made.x, replace(plan, width=width))
        asked += made.rounds
        size = min(size, made.loss) if residuals else 1.0
        width = max(size, _TINY) * 10.0**-level
    assert made is not None
    return replace(made, rounds=asked)


def outputs_of(problem: Problem) -> int:
    """Margins per sample."""
    shape = problem.layout[0].shape
    return shape[1] if len(shape) == 2 else 1
