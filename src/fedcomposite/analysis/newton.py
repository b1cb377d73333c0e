"""Newton fits as tasks: each yields what it asks of the sites, so that many of them share their exchanges.

The rules are those of :class:`fedcomposite.algorithms.ProxNewton`. What an exchange has delivered at a solution is
used once more: the first step for the next strength of a path comes from it, without another exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedcomposite.algorithms import ProxNewton
from fedcomposite.algorithms.inner import EffortError, minimise
from fedcomposite.algorithms.proxnewton import Reply, Server, at_rest
from fedcomposite.analysis.strengths import check_modulus, only, regularized
from fedcomposite.problems import Evaluation, Loss, Problem
from fedcomposite.regularizers import On, Regularizer, Zero
from fedcomposite.regularizers.base import Boxed, Step
from fedcomposite.regularizers.wrapped import Wrapped, settled
from fedcomposite.runtime.certificate import WIDER, Certificate, dual_known, gap_by_looks
from fedcomposite.runtime.driver import NEVER, Deadline
from fedcomposite.runtime.protocol import ALL, Request, Rows, Sums, Task, losses, newton

_FAR = (3.0, 5.0)  # times the last step: where a minimiser would be left behind
_AGAIN = 10  # exchanges between looks for one
_LONG, _LONGER = 20, 60  # exchanges after which a fit would be near one, from zero and from any other start
_NEAR = 1e-4  # of the size of gradients at x, for a gradient that says that x is near
_VANISHED = 1e-6  # of the largest objective: before rounding makes it zero, where it falls towards that for ever
_FAR_OUT = 1e6  # times x: where a domain that ends has ended
_INFINITE = 1e100  # a slope that holds a coordinate at zero
_FADED = 1e-9  # of the rounding of gradients, for one that no balance leaves
_CLEAR = 3.0  # times the rounding of F, for what steps promise: at a minimiser F would rise by as much there
_OVERFLOW = 1e-9  # of what numbers that overflow are sent as: a mean loss that has one in it
_RESISTED = 6  # steps whose own problem is given up before the fit is
_CALLS = {True: 4000, False: 18000}  # of the prox, after which a fit is given up: of an h that couples, and of others
_AT_ONCE = 16  # vectors whose proxes take as long together as one by itself
_LEAST_CALLS = 400  # that every fit may take, whatever its neighbours took in vain
_STAGE = 60  # most exchanges for one of them: where a barrier has no minimum, the loss itself may have one
_NARROWER = 0.1  # factor between widths of a loss with a kink
_DAMPED = 0.1  # damping up to which a step promises what is left
_CENTRED = 0.1  # of the width: how near a stage comes to its own minimum
_NARROWEST = 1e-15  # the last width, in units of the first
_LENGTHS = 10 ** torch.linspace(-3.5, 0.25, 16, dtype=torch.float64)  # of steps that are compared
_ENOUGH = 0.3  # of the gain of the best length that may be lost
_POLISH = 15  # exchanges that bring a stage to its minimum, where its dual point is best
_EARLY, _PROVED = 100.0, 1e-5  # from which gap on, in tolerances, bounds are looked for; what they have to show
_ROUGH = 1e-6  # precision of a stage's steps
_LITTLE = 1e-3  # of the largest objective: where so little is left, curvature is lost since the loss itself vanishes
_TOLD = 1e-6  # of the largest objective: what may be hidden behind rounding
_DENSE = 2000  # coordinates up to which that is looked at
_LEAST = 1e-6  # of the first objective: what a gap is relative to where all but nothing is left of it


class Seen(NamedTuple):
    """What is known at a model: the mean reply, and the working set that its Hessian is on."""

    reply: Reply
    working: Tensor
    total: float  # number of samples
    at: Tensor  # the model, in the coordinates of the plan's centre


End = Literal["converged", "rounds", "time", "endless", "resisting", "rounding", "overflow"]
"""Why a fit ended: a certificate, a limit, coefficients that grow without end since there is no minimiser, steps whose
own problem, at the server, was given up several times, rounding that hides what is left, or a loss that overflows."""


@dataclass(frozen=True)
class Fit:
    """A model, and what the sites said about it."""

    x: Tensor
    seen: Seen
    rounds: int
    """Exchanges that it took."""
    end: End
    grown: tuple[int, ...] = ()
    """The coordinates that grow without end, the fastest first."""
    certificate: Certificate | None = None
    """Of a loss with kinks, whose gradient says nothing."""
    left: float = math.inf
    """What the next step promises to gain; above the plan's ``gain`` only where rounding hides the rest."""

    @property
    def converged(self) -> bool:
        """Whether it is the solution."""
        return self.end == "converged"

    @property
    def loss(self) -> float:
        """The mean loss."""
        return float(self.seen.reply.loss)


def _ignore(x: Tensor, rounds: int) -> None:
    """For nobody who watches."""


@dataclass
class Effort:
    """Evaluations of the prox that the fits of an analysis took in vain, which are taken off what each of them may."""

    vain: int = 0


@dataclass(frozen=True)
class FitPlan:
    """How a fit is done."""

    rows: Rows = ALL
    tolerance: float = 1e-8
    """Of the optimality measure, relative to ``scale``, and of what is left to gain, relative to the objective."""
    rounds: int = 100
    scale: float | None = None
    """A size of gradients; the largest entry of the first one if left out."""
    width: float = 0.0
    """Of the barrier that makes a loss with a kink smooth; 0 for smooth losses."""
    gain: float | None = None
    """The gain that may be left, in place of both tolerances: a stage on the way needs no more."""
    floor: float = 100.0
    """How many times the rounding of gradients counts as nothing."""
    centre: Tensor | None = None
    """What features are taken about, so that the intercept is another one; see :func:`centre_of`."""
    attained: bool = False
    """Whether F has a minimiser whatever the samples are; see :func:`attained`."""
    deadline: Deadline = NEVER
    """When a fit ends where it is."""
    effort: Effort = field(default_factory=Effort, compare=False)
    """Shared by the fits of an analysis, whose plans are copies of one."""
    watch: Callable[[Tensor, int], None] = field(default=_ignore, compare=False)
    """Receives the model before the first exchange and after each, and how many there were."""


def slopes(h: Regularizer, x: Tensor) -> Tensor | None:
    """The slope of h at the size of each coordinate of x; None where its subdifferential is not a box."""
    match h:
        case Wrapped():
            return slopes(h.h, x)
        case On():
            inside = slopes(h.h, h._take(x))
            return None if inside is None else h._put(torch.zeros_like(x), inside)
        case Boxed():
            low, high = h.interval(x)
            return torch.maximum(low.abs(), high.abs()).clamp(max=_INFINITE)
    return None


def attained(problem: Problem) -> bool:
    """Whether a sample's loss has a least value, so that F falls for ever along no direction."""
    return not isinstance(problem.loss, Loss) or problem.loss.attained


def plan_of(problem: Problem, centre: Tensor | None, **settings: Any) -> FitPlan:
    """The plan of a fit of a problem, with features about a centre."""
    return FitPlan(centre=centre, attained=attained(problem), **settings)


def moved(x: Tensor, centre: Tensor | None, sign: int) -> Tensor:
    """A model with its intercepts for features about a centre (sign 1), or back for features as they are (-1)."""
    if centre is None:
        return x
    outputs = len(x) // (len(centre) + 1)
    made = x.clone()
    made[-outputs:] += sign * (centre @ x[:-outputs].view(-1, outputs))
    return made


def fit(h: Regularizer, at: Tensor | Fit, plan: FitPlan, strong: tuple[int, ...] = ()) -> Task[Fit]:
    """The solution with h; ``at`` is where to begin, a :class:`Fit` on the same rows saves an exchange."""
    inside = replace(plan, watch=lambda x, k: plan.watch(moved(x, plan.centre, -1), k))
    made = yield from _fit(h, at if isinstance(at, Fit) else moved(at, plan.centre, 1), inside, strong)
    return replace(made, x=moved(made.x, plan.centre, -1))


def _fit(h: Regularizer, at: Tensor | Fit, plan: FitPlan, strong: tuple[int, ...] = ()) -> Task[Fit]:
    """The same in coordinates of the plan's centre."""
    settled(h)
    h = h if isinstance(h, _Called) else _Called(h, len(at.x if isinstance(at, Fit) else at), plan)
    method = ProxNewton(start=strong) if plan.gain is None else ProxNewton(start=strong, precision=_ROUGH)
    known = at.seen if isinstance(at, Fit) else None
    state = method.init(feasible(at.seen.at if isinstance(at, Fit) else at, h.h), h)[0]
    seen, asked, scale, again, resisted = known, 0, plan.scale, 0, 0
    if known is not None:
        fresh, state = state.working, state._replace(working=known.working)
        state = method.aggregate(state, known.reply, 1.0, h)
        grown = state.working & ~known.working
        state = state._replace(working=fresh | grown | (state.trial != 0))
    largest = 0.0
    patience = _LONGER if bool(state.x.any()) else _LONG
    plan.watch(state.x, 0)
    while True:
        if seen is not None:
            scale = float(state.gradient.abs().max()) if scale is None else scale
            largest = max(largest, abs(float(state.value)))
            stationary, done = at_rest(state, h, plan.tolerance, scale, plan.floor)
            hides = False
            if plan.gain is not None:
                left, hidden = -float(state.decrease), float(state.slack) if float(state.step) == 0 else 0.0
                whole = float(state.solved) == 1.0 and float(state.damping) <= _DAMPED
                done = whole and left <= max(plan.gain, hidden)
            elif stationary and (done or asked >= again) and _promising(state, h, done or asked >= patience, largest):
                growing = yield from _growing(state, seen, h, plan, largest)
                asked, again = asked + 1, asked + 1 + _AGAIN
                plan.watch(state.x, asked)
                if growing and not plan.attained:
                    return Fit(state.x, seen, asked, "endless", growing)
                hides = bool(growing)
            if done:
                end, growing, looks = yield from _judged(state, seen, h, plan, largest)
                end = "rounding" if hides and end == "converged" else end
                return Fit(state.x, seen, asked + looks, end, growing, left=-float(state.decrease))
        if (late := plan.deadline.passed and seen is not None) or asked >= plan.rounds:
            assert seen is not None
            return Fit(state.x, seen, asked, "time" if late else "rounds")
        message, along = method.broadcast(state), _line(state, plan)
        sums = yield [_asked(message.x, message.working, plan, plan.width), *along]
        asked += 1
        reply, total = _mean(sums[0])
        if along and (better := _better(state, reply, along[0], sums[1], h)) is not None:
            state = better
            plan.watch(state.x, asked)
            continue
        before, rested = h.calls, float(state.step) == 0
        state = method.aggregate(state, reply, 1.0, h)
        if torch.equal(state.gradient, reply.gradient):
            seen = Seen(reply, message.working, total, state.x)
        plan.watch(state.x, asked)
        if float(state.solved) == 0 and h.calls > before:
            resisted += float(state.step) == 1 or (rested and float(state.step) == 0)
            h.lose(h.calls - before)
        if (resisted >= _RESISTED or h.calls >= h.most) and seen is not None:
            return Fit(state.x, seen, asked, "resisting")


def _judged(
    state: Server, seen: Seen, h: _Called, plan: FitPlan, largest: float
) -> Task[tuple[End, tuple[int, ...], int]]:
    """What a fit that is at rest has come to, the coordinates that grow without end, and the exchanges that it took."""
    looks, far = 0, False
    if (faded := plan.gain is None and _faded(state, h)) or _spent(state, h, plan, largest):
        growing, looks = (yield from _level(state, h.h, plan, not faded)), 1
        if growing and not plan.attained:
            return "endless", growing, looks
        far = bool(growing)
    if _overflows(seen):
        return "overflow", (), looks
    hidden = far or (plan.width == 0 and _hidden(seen, h) > _TOLD * largest)
    return "rounding" if hidden else "converged", (), looks


class _Called(Wrapped):
    """h, with the calls of its prox counted: the server's work has a bound, and ends with the plan's time."""

    def __init__(self, h: Regularizer, dimension: int, plan: FitPlan) -> None:
        super().__init__(h)
        self._parts, self._where = h.coupling(dimension), h.acts_on(dimension)
        self._effort, self._deadline = plan.effort, plan.deadline
        self._limit = _CALLS[torch.unique(self._parts).numel() < dimension]
        self.calls = self._vain = 0
        self._asked: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def most(self) -> int:
        """How many calls this fit may take; what others took in vain is taken off."""
        return max(self._limit - self._effort.vain + self._vain, _LEAST_CALLS)

    def lose(self, calls: int) -> None:
        """Count some calls as taken in vain."""
        self._vain += calls
        self._effort.vain += calls

    def coupling(self, dimension: int) -> Tensor:
        return self._parts

    def acts_on(self, dimension: int) -> Tensor:
        return self._where

    def among(self, coordinates: Tensor, dimension: int) -> Regularizer | None:
        found = self.h.among(coordinates, dimension)
        return None if found is None else _CalledPart(found, self)

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """That of h; kept, since a step and the test whether it was the last one ask the same."""
        if not (self._asked is not None and self._asked[0] is x and self._asked[1] is gradient):
            self._asked = x, gradient, self.h.optimality(x, gradient)
        return self._asked[2]

    def count(self, v: Tensor) -> None:
        """Count a call, or refuse it."""
        if self.calls >= self.most or self._deadline.passed:
            raise EffortError
        self.calls += 1 + v[..., 0].numel() // _AT_ONCE

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        self.count(v)
        return self.h.prox(v, step, out)


class _CalledPart(Wrapped):
    """A term on some coordinates, whose calls are those of the whole."""

    def __init__(self, h: Regularizer, whole: _Called) -> None:
        super().__init__(h)
        self._called = whole

    def among(self, coordinates: Tensor, dimension: int) -> Regularizer | None:
        found = self.h.among(coordinates, dimension)
        return None if found is None else _CalledPart(found, self._called)

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        self._called.count(v)
        return self.h.prox(v, step, out)


def _asked(x: Tensor, working: Tensor, plan: FitPlan, width: float = 0.0) -> Request:
    return newton(x, working, plan.rows, width, plan.centre is not None)


def feasible(x: Tensor, h: Regularizer) -> Tensor:
    """A start in the domain of h: a constraint may leave out zero."""
    if bool(torch.isfinite(h.value(x))):
        return x
    return h.prox(x, min(1.0, 0.5 / h.rho) if h.rho > 0 else 1.0)


def _line(state: Server, plan: FitPlan) -> list[Request]:
    """Losses along the step, where a barrier makes parabolas poor guides to its length."""
    t = float(state.step)
    if plan.width == 0 or t == 0 or plan.gain is None:
        return []
    move = (state.trial - state.x) / t
    models = state.x + _LENGTHS.unsqueeze(1) * move
    return [losses(models, plan.rows, width=plan.width, centred=plan.centre is not None)]


def _better(state: Server, reply: Reply, line: Request, seen: Sums, h: Regularizer) -> Server | None:
    """The state with a length of the step that gains much more than the one under test, if there is one."""
    values = seen["deviance"] / seen["weight"][0] / 2 + torch.stack([h.value(x) for x in line.arrays["models"]])
    best = int(values.nan_to_num(math.inf).argmin())
    now, lowest = float(reply.loss + h.value(state.trial)), float(values[best])
    if not lowest < float(state.value) or now - lowest <= _ENOUGH * (float(state.value) - lowest):
        return None
    step = _LENGTHS[best].view(1)
    return state._replace(trial=line.arrays["models"][best], step=step)


def _promising(state: Server, h: Regularizer, late: bool, largest: float) -> bool:
    """Whether steps still promise much though it is late, next to nothing is left, or the gradient says x is near."""
    if -float(state.decrease) <= _CLEAR * float(state.slack):
        return False
    size = float(state.noise) / torch.finfo(state.x.dtype).eps  # of gradients here
    late = late or abs(float(state.value)) <= _VANISHED * largest
    return late or float(h.optimality(state.x, state.gradient)) <= _NEAR * size


def _growing(state: Server, seen: Seen, h: _Called, plan: FitPlan, largest: float) -> Task[tuple[int, ...]]:
    """The coordinates that grow without end, if any do: F goes on to fall far beyond the next step.

    Far is where the step would end if H were a third, or a fifth: three or five times as far along it where h does not
    matter, and otherwise where h lets it go. Near a minimiser F would rise there, by more than what the step gains, or
    stay what it is (squared hinge). Where classes can be separated, or where there are no counts, steps stay as long as
    they are while gradient and gain fall by 1/e with each.
    """
    if float(state.step) == 0:
        return ()
    model = ProxNewton()._model(seen.at, seen.reply, seen.working, 0.0, h)
    if model.blind and float(state.value) > _LITTLE * largest:  # steps are short of what they could be
        return ()
    goal, far = 1e-6 * float(h.optimality(seen.at, seen.reply.gradient)), []
    for times in _FAR:
        far.append(seen.at.clone())
        far[-1][seen.working] = minimise(replace(model, H=model.H / times), goal)[0]
    sums = yield [_asked(x, torch.zeros_like(state.working), plan, plan.width) for x in far]
    values = [float(_mean(one)[0].loss + h.value(x)) for x, one in zip(far, sums, strict=True)]
    gain = -float(state.decrease)
    if not (float(state.value) - values[0] > 0.5 * gain and values[0] - values[1] > 1e-3 * gain):
        return ()
    way = far[0] - seen.at
    size, ends = way.abs(), (way - _unbounded(seen.at, way, h.h)).abs()
    if 2 * float(ends.max()) > float(size.max()):  # where a domain ends there is a minimiser
        return ()
    return tuple(i for i in size.argsort(descending=True)[:3].tolist() if float(size[i]) > 0.5 * float(size.max()))


def _faded(state: Server, h: Regularizer) -> bool:
    """Whether x is so far out that the slope of every sample has faded.

    At a minimum slopes of samples balance one another, and of that rounding leaves about ``noise``: much less is left
    only where each of them is next to nothing (or all of them nothing at all, beyond the margins of a squared hinge).
    """
    return bool(state.x.any()) and 0 < float(h.optimality(state.x, state.gradient)) < _FADED * float(state.noise)


def _spent(state: Server, h: Regularizer, plan: FitPlan, largest: float) -> bool:
    """Whether next to nothing is left of a loss that has no least value: there is a minimiser only if h has a say."""
    if plan.attained or plan.gain is not None or not bool(state.x.any()):
        return False
    return 0 <= float(state.value - h.value(state.x)) <= _VANISHED * largest


def _level(state: Server, h: Regularizer, plan: FitPlan, half: bool) -> Task[tuple[int, ...]]:
    """The largest coordinates, if F is no higher three times as far out where h is level, or half its loss gone."""
    way = _unheld(state.x, h)
    x = feasible(state.x + 2 * way, h)
    [sums] = yield [_asked(x, torch.zeros_like(state.working), plan, plan.width)]
    loss, own = float(_mean(sums)[0].loss), float(h.value(x))
    before = float(state.value - h.value(state.x))
    if loss + own > float(state.value + state.slack) or (half and loss > 0.5 * before):
        return ()
    return tuple(way.abs().argsort(descending=True)[:3].tolist())


def _unheld(x: Tensor, h: Regularizer) -> Tensor:
    """The part of x along which h neither rises nor ends: without what it holds, and within its domain far out."""
    slope = slopes(h, x)
    return _unbounded(x, x if slope is None else torch.where(slope == 0, x, 0.0), h)


def _unbounded(x: Tensor, way: Tensor, h: Regularizer) -> Tensor:
    """The part of a direction that the domain of h has no end along."""
    return (feasible(x + _FAR_OUT * way, h) - x) / _FAR_OUT


def _overflows(seen: Seen) -> bool:
    """Whether the loss of some sites is larger than numbers are: nothing is known then of what steps gain."""
    loss = seen.reply.loss
    return bool(float(loss) >= _OVERFLOW * torch.finfo(loss.dtype).max ** 0.5)


def _hidden(seen: Seen, h: Regularizer) -> float:
    """What F may still fall by behind the rounding of gradients, h aside.

    In units of a unit diagonal of H, every entry of a gradient is rounded by eps times the size of margins, and a
    direction with the eigenvalue v hides half the square of that over v: much where columns of mean 1000 and deviation
    1e-4 have no intercept beside them, so that they cannot be centred, and nothing that matters for others. Where such
    a direction still has a slope, nobody knows how much that is. Steps with h leave ten times as much behind.
    """
    model = ProxNewton()._model(seen.at, seen.reply, seen.working, 0.0, h)
    if model.blind:
        return math.inf
    diagonal, eps = model.H.diagonal(), torch.finfo(model.H.dtype).eps
    reach = math.sqrt(2 * abs(float(seen.reply.loss))) + float(model.x.abs() @ diagonal.sqrt())
    if eps * reach * reach <= _TOLD * abs(float(seen.reply.loss)) or not 0 < len(diagonal) <= _DENSE:
        return 0.0
    root = diagonal.clamp(min=torch.finfo(model.H.dtype).tiny).rsqrt()
    values = torch.linalg.eigvalsh(model.H * root * root.unsqueeze(1))
    least = 4 * len(values) * eps * float(values[-1])
    direct = model.free is not None and bool(model.free.all())
    known = (values > least) & direct
    slope = values.new_tensor(eps * reach).where(known, model.blur)  # steps leave out what H has lost, up to the blur
    return float((slope.square() / (2 * values.clamp(min=least))).sum())


def _mean(sums: Sums) -> tuple[Reply, float]:
    weight, _, total = sums["weight"].tolist()
    if not weight > 0:
        raise ValueError("no site has samples for this fit: take fewer folds, or larger parts")
    return Reply(*(sums[k] / weight for k in Reply._fields)), total


def null(h: Regularizer, dimension: int, plan: FitPlan) -> Task[Fit]:
    """The model without the coordinates that h acts on: intercepts, and features that are not regularized.

    The Hessian comes with it on the free coordinates only if there are many.
    """
    free = ~regularized(h, dimension)
    made = yield from fit(only(free) or Zero(), torch.zeros(dimension, dtype=torch.float64), plan)
    return made


def on_support(x: Tensor, h: Regularizer, plan: FitPlan) -> Task[Fit]:
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


# -- losses with kinks ------------------------------------------------------------------------------------------------


def fit_any(problem: Problem, start: Tensor, plan: FitPlan) -> Task[Fit]:
    """The solution of a problem with a linear model, whether its loss is smooth or has a kink."""
    check_modulus(problem.regularizer)
    if problem.loss.smooth:
        made = yield from fit(problem.regularizer, start, plan)
    else:
        inside = replace(plan, watch=lambda x, k: plan.watch(moved(x, plan.centre, -1), k))
        made = yield from _fit_kinked(problem, moved(start, plan.centre, 1), inside)
        made = replace(made, x=moved(made.x, plan.centre, -1))
    return made


def _fit_kinked(problem: Problem, start: Tensor, plan: FitPlan) -> Task[Fit]:
    """The solution for a loss with a kink: Newton steps with a barrier whose width falls, as in interior-point methods.

    A stage's gap, if it were exact, would be at most twice its width. The fit ends when that is below the tolerance
    times the objective, and when dual points have shown that the objective is within ``_PROVED`` of its least one:
    bounds by narrower barriers are lost in rounding. Where a conjugate is not known, the least value of a stage has to
    show it: barriers lie below the loss. That is no proof, but it does not hang on how features are scaled.
    """
    h, none = _Called(problem.regularizer, len(start), plan), torch.zeros_like(start, dtype=torch.bool)
    x, asked, below, shown, best = feasible(start, h.h), 1, -math.inf, -math.inf, None
    known = dual_known(problem)
    plan.watch(x, 0)
    [sums] = yield [_asked(x, none, plan)]
    first = float(sums["loss"] / sums["weight"][0])
    width = widest = 1.0 if problem.loss.classifier else first or 1.0
    while True:
        before = asked
        stage = replace(
            plan,
            width=width,
            gain=_CENTRED * width,
            rounds=min(max(plan.rounds - asked, 1), _STAGE),
            watch=lambda at, k, before=before: plan.watch(at, before + k) if k else None,  # type: ignore[misc]
        )
        made = yield from _fit(h, x, stage)
        exact = yield [_asked(made.x, none, plan, w) for w in (0.0, width, (1 + WIDER) * width)]
        x, asked, end = made.x, asked + made.rounds + 1, made.end
        values = [float(one["loss"] / one["weight"][0]) for one in exact]
        value = values[0] + float(h.value(x))
        best = min((value, asked, made), best or (math.inf, 0, made))
        if h.rho == 0 and not bool(h.optimality(x, torch.zeros_like(x)).any()):
            below = max(below, float(h.value(x)))  # the least value of h, and no loss is below zero
        scale = max(abs(value), _LEAST * first, 1e-300)
        gap = values[0] - values[1] + (values[2] - values[1]) / WIDER + _CENTRED * width
        goal, near = max(plan.tolerance, _PROVED) * scale, made.converged and gap <= plan.tolerance * scale
        if made.converged and known and gap <= _EARLY * plan.tolerance * scale and value - below > goal:
            found, looks = yield from _bound(problem, made, stage)
            known, below, asked = found is not None, below if found is None else max(below, found), asked + looks
        if made.converged and not known and gap <= goal < value - max(below, shown):
            shown, looks = yield from _least(h, made, stage)
            asked += looks
        shown = shown if shown <= value + goal else -math.inf  # refuted: the stage was not at its least value
        if value - max(below, shown) <= (goal if near else plan.tolerance * scale):
            plan.watch(x, asked)
            return replace(made, rounds=asked, end="converged", certificate=_certificate(h, made, value - below))
        if made.converged:
            slope = (_mean(exact[2])[0].gradient - _mean(exact[1])[0].gradient) / WIDER
            x = _ahead(made, h, (_NARROWER - 1) * slope)
        hidden = near and not known and made.left > _CENTRED * width
        width *= _NARROWER
        if late := plan.deadline.passed:
            end = "time"
        if late or hidden or end in ("endless", "resisting") or asked >= plan.rounds or width < _NARROWEST * widest:
            value, _, made = best
            plan.watch(made.x, asked)
            end = "rounding" if hidden and not late else "rounds" if end == "converged" else end
            return replace(made, rounds=asked, end=end, certificate=_certificate(h, made, value - below))


def _certificate(h: Regularizer, at: Fit, gap: float) -> Certificate:
    """The gap if one is known, and the optimality measure behind the barrier otherwise."""
    if gap < math.inf:
        return Certificate("duality gap", max(gap, 0.0))
    return Certificate("optimality measure", float(h.optimality(at.x, at.seen.reply.gradient)))


def _bound(problem: Problem, at: Fit, stage: FitPlan) -> Task[tuple[float | None, int]]:
    """A number that the problem's objective is nowhere below, by a stage's dual point, and the exchanges that it took.

    The stage is brought to its minimum first: its gradient hangs on positions that its objective no longer tells.
    """
    h = problem.regularizer
    best = yield from _fit(h, at, replace(stage, gain=None, rounds=_POLISH, tolerance=0.0, floor=0.3))
    none = torch.zeros_like(at.x, dtype=torch.bool)
    [sums] = yield [_asked(best.x, none, stage)]
    value, asked = float(sums["loss"] / sums["weight"][0]) + float(h.value(best.x)), best.rounds + 1
    looks = gap_by_looks(problem, best.x, value=value, width=stage.width)
    try:
        y, wider = next(looks)
        while True:
            [sums] = yield [_asked(y, none, stage, (1 + WIDER) * stage.width if wider else stage.width)]
            reply, _ = _mean(sums)
            asked += 1
            y, wider = looks.send(Evaluation(reply.loss[0], reply.gradient))
    except StopIteration as stop:
        return None if stop.value is None else value - stop.value, asked


def _least(h: Regularizer, at: Fit, stage: FitPlan) -> Task[tuple[float, int]]:
    """The least value of a stage near a model, minus infinity where rounding hides it, and the exchanges it took.

    A loss behind a barrier is self-concordant in units of its width times what a sample counts: where a step promises
    less than a part of that, twice its promise bounds what is left.
    """
    gain = _CENTRED * stage.width / at.seen.total
    best = yield from _fit(h, at, replace(stage, gain=gain, rounds=_POLISH))
    if not best.converged or best.left > gain:
        return -math.inf, best.rounds
    return best.loss + float(h.value(best.x)) - 2 * best.left - _hidden(best.seen, h), best.rounds


def _ahead(at: Fit, h: Regularizer, change: Tensor) -> Tensor:
    """Where the minimiser moves to when the gradient changes, to first order: the tangent of the central path."""
    method, seen = ProxNewton(), at.seen
    reply = seen.reply._replace(gradient=seen.reply.gradient + change)
    found = at.x.clone()
    residual = float(h.optimality(at.x, reply.gradient))
    found[seen.working], _ = minimise(method._model(at.x, reply, seen.working, 0.0, h), _ROUGH * residual)
    return found
