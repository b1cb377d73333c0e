"""The answer to a problem: no method to choose, no steps, and a certificate at the end."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fedcomposite import theory
from fedcomposite._validation import Count, Natural, Probability, ZeroOrMore
from fedcomposite.algorithms import FedNMap, ProxNewton
from fedcomposite.choice import HESSIANS, Choice, choose
from fedcomposite.estimators.kinks import smoothable, solve_kinked
from fedcomposite.estimators.scaling import rescale, worthwhile
from fedcomposite.estimators.sites import check_range
from fedcomposite.problems import Loss, Problem
from fedcomposite.regularizers.wrapped import settled
from fedcomposite.runtime import DivergenceWarning, GrowthWarning, Record, Run, simulate
from fedcomposite.runtime.callbacks import View
from fedcomposite.runtime.certificate import certify
from fedcomposite.runtime.fit import check_given

NEWTON_ROUNDS, FIRST_ORDER_ROUNDS = 100, 5000
"""Rounds after which a solution counts as not found, unless a number is given."""

_TRIAL = 15  # rounds that judge a step
_FACTOR = 4.0  # between steps that are tried


def solve(
    problem: Problem,
    *,
    tolerance: ZeroOrMore = 1e-8,
    rounds: Natural | None = None,
    participation: Probability = 1.0,
    local_steps: Count = 10,
    batch_size: Count | None = None,
    seed: Natural = 0,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    x0: Any = None,
    on_record: Callable[[Record], None] | None = None,
) -> Run:
    """Find the solution of a problem, whatever method that takes.

    Linear models with a smooth loss are solved by Newton steps (:class:`fedcomposite.algorithms.ProxNewton`), in about
    ten rounds. Other problems, and rounds with some of the clients only, take a first-order method. Its steps are found
    by trying some on the objective, from the problem's constants on where these are known, and a run that diverges is
    done again with smaller ones. A loss with kinks (hinge, absolute, quantile) is approached by smooth ones.

    Parameters
    ----------
    problem : Problem
        What to solve.
    tolerance : float
        The stationarity to reach: the norm of the prox-gradient mapping at :meth:`Problem.default_step`. Of a loss
        with kinks: how far the objective may be above its minimum.
    rounds : int, optional
        Most rounds; 100 for Newton steps, 300 where a loss has kinks and 5000 for others if left out.
    participation : float
        Share of the clients that take part in a round.
    local_steps, batch_size
        Of a first-order method.
    seed, dtype, device, x0, on_record
        As in :func:`fedcomposite.simulate`.

    Returns
    -------
    Run
        With ``status`` "converged" or "not converged", a ``message`` that says what was chosen and why, and a
        ``certificate``: the duality gap where conjugates are known, the optimality measure otherwise.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=5, features=6, samples=20)
    >>> run = fc.solve(fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.02)))
    >>> run.status, run.rounds < 10, run.certificate.kind, run.certificate.value < 1e-10
    ('converged', True, 'duality gap', True)
    """
    check_given(solve, locals())
    check_range(problem.silos)
    settled(problem.regularizer)
    settings: dict[str, Any] = {
        "tolerance": tolerance,
        "participation": participation,
        "seed": seed,
        "dtype": dtype,
        "device": device,
        "x0": x0,
    }
    if participation >= 1 and smoothable(problem) and _newton_takes(problem):
        run = solve_kinked(problem, rounds=rounds, on_record=on_record, mode="eager", **settings)
        return _explained(problem, run, tolerance)
    settings |= {"on_record": on_record, "mode": "eager"}
    choice = choose(problem, participation=participation, local_steps=local_steps, L=1.0)
    if isinstance(choice.algorithm, ProxNewton):
        steps = _Steps()
        run = _quietly(problem, choice, NEWTON_ROUNDS if rounds is None else rounds, settings | {"callbacks": [steps]})
        return _finish(problem, run, choice, tolerance, 0, steps.endless(problem))
    most = FIRST_ORDER_ROUNDS if rounds is None else rounds
    settings |= {"batch_size": batch_size, "evaluate_every": max(1, min(10, most))}
    return _first_order(problem, most, local_steps, settings)


def _first_order(problem: Problem, rounds: int, local_steps: int, settings: dict[str, Any]) -> Run:
    """Steps are tried, the run is done, and done again with smaller ones if it diverges.

    Where features differ in size and h allows it, all of that is in units in which they do not.
    """
    given, tolerance, share = problem, settings["tolerance"], settings["participation"]
    rescaling = rescale(problem, tolerance) if isinstance(problem.loss, Loss) and worthwhile(problem) else None
    if rescaling is not None:
        problem = rescaling.problem
        settings |= {"x0": rescaling.start(settings["x0"]), "tolerance": None, "callbacks": [rescaling]}
    smoothness, tried = _smoothness(problem, local_steps, settings)
    while True:
        choice = choose(problem, participation=share, local_steps=local_steps, L=smoothness)
        run = _quietly(problem, choice, rounds, settings)
        if run.status != "diverged" or smoothness is None or smoothness > 1e12:
            break
        smoothness, tried = smoothness * _FACTOR, tried + run.rounds
    if rescaling is not None:
        run, choice = rescaling.back(run), Choice(choice.algorithm, f"{choice.why}, in units of the features")
    return _finish(given, run, choice, tolerance, tried)


def _quietly(problem: Problem, choice: Choice, rounds: int, settings: dict[str, Any]) -> Run:
    """A run whose status will say what its warnings do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)
        warnings.simplefilter("ignore", GrowthWarning)
        return simulate(problem, choice.algorithm, rounds=rounds, **settings)


def path(
    problem: Problem,
    factors: Sequence[float],
    *,
    tolerance: ZeroOrMore = 1e-7,
    rounds: Count = NEWTON_ROUNDS,
    on_run: Callable[[float, Run], None] | None = None,
) -> list[Run]:
    """Solve a problem with its regularizer multiplied by each factor, largest first, each from the last solution.

    The working set of a factor starts from the support and from the coordinates that the strong rule (Tibshirani et al.
    2012) lets through: those that would violate optimality at the last solution with twice the new factor minus the
    last one. Violators that it misses enter later, so the rule costs no accuracy.

    Parameters
    ----------
    problem : Problem
        A linear model with a smooth loss; ``factors`` multiply its regularizer.
    factors : sequence of float
        Positive, falling.
    tolerance, rounds
        As in :func:`solve`, for each factor.
    on_run : callable, optional
        Receives each factor and its run.
    """
    check_given(path, locals())
    if any(not f > 0 for f in factors) or any(b >= a for a, b in pairwise(factors)):
        raise ValueError(f"factors = {list(factors)}, must be positive and falling")
    done: list[Run] = []
    start: tuple[int, ...] = ()
    for k, factor in enumerate(factors):
        one = copy.copy(problem)  # the data are shared
        one.regularizer = problem.regularizer.scaled(factor)
        x0 = done[-1].solution if done else None
        run = simulate(one, ProxNewton(start=start), rounds=rounds, tolerance=tolerance, x0=x0)
        done.append(_finish(one, run, Choice(ProxNewton(), "the model is linear"), tolerance, 0))
        if on_run is not None:
            on_run(factor, run)
        if k + 1 < len(factors):
            start = _strong(problem, done[-1], max(2 * factors[k + 1] - factor, 0.0))
    return done


def _strong(problem: Problem, run: Run, factor: float) -> tuple[int, ...]:
    """The coordinates outside the support that violate optimality at this factor."""
    if factor <= 0:
        return ()
    h, x, g = problem.regularizer.scaled(factor), run.solution, run.server.gradient  # type: ignore[attr-defined]
    step = min(1.0, 0.5 / h.rho) if h.rho > 0 else 1.0
    moved: Tensor = (x == 0) & (h.prox(x - step * g, step) != 0)
    return tuple(moved.nonzero().squeeze(1).tolist())


def _smoothness(problem: Problem, local_steps: int, settings: dict[str, Any]) -> tuple[float | None, int]:
    """A constant for the steps of a first-order method, found by trying some, and the rounds that this took.

    Where L is known it is at most made so much smaller that single local steps stay below 1/L: twice, and
    ``local_steps`` times where only some clients take part, since a round's steps are shared out then.
    """
    share, least, factor = settings["participation"], 0.0, _FACTOR
    if isinstance(problem.loss, Loss):
        if not problem.loss.smooth:
            return None, 0
        if not isinstance(choose(problem, participation=share, local_steps=local_steps, L=1.0).algorithm, FedNMap):
            return None, 0
        known = theory.constants(problem, participation=share)
        if known.L is None:
            L = known.need("scale")[0]
        else:
            L, factor = known.L * known.amplification, 2.0
            least = L / (2 if share >= 1 else local_steps)
    else:
        L = 1.0
    tried: dict[float, float] = {}

    def objective(L: float) -> float:
        if L not in tried:
            made = choose(problem, participation=share, local_steps=local_steps, L=L)
            plan = {"evaluate_every": _TRIAL, "progress": False, "on_record": None, "callbacks": ()}
            run = _quietly(problem, made, _TRIAL, settings | plan)
            lower = run.status != "diverged" and run.history[-1].objective < run.history[0].objective
            tried[L] = run.history[-1].objective if lower else math.inf
        return tried[L]

    while math.isinf(objective(L)) and L < 1e12:
        L *= factor
    while L / factor >= least and objective(L / factor) < objective(L):
        L /= factor
    return L, _TRIAL * len(tried)


def _newton_takes(problem: Problem) -> bool:
    """Whether Newton steps would be taken if the loss were smooth."""
    h, d = problem.regularizer, problem.dimension
    return h.weakly_convex and (d <= HESSIANS or bool(h.coupling(d).any()))


def _explained(problem: Problem, run: Run, tolerance: float) -> Run:
    """The run of a problem with kinks, in words."""
    message = f"ProxNewton on smooth losses, since {problem.loss} has kinks: "
    if run.status == "converged":
        return dataclasses.replace(run, message=f"{message}{run.rounds} rounds, {run.certificate}")
    message += f"not converged after {run.rounds} rounds, {run.certificate}, above {tolerance:.1e}"
    message += "; a loss with kinks makes slow progress: allow a larger tolerance, or take a smooth loss"
    return dataclasses.replace(run, message=message)


class _Steps:
    """The last two models of a run by Newton steps: whether these became small, or went on and on.

    Where h is flat (MCP, SCAD) and some features separate classes, there is no minimiser: the gradient falls by 1/e
    with every round, and their coefficients grow by as much, until the gradient is below any tolerance.
    """

    def __init__(self) -> None:
        self._last: list[Tensor] = []

    def __call__(self, view: View) -> None:
        self._last = [*self._last[-1:], view.solution.double().cpu()]

    def endless(self, problem: Problem) -> list[str]:
        """The largest of the coefficients that still grow, if the objective is no larger far along the last step."""
        if len(self._last) < 2:
            return []
        move, x = (self._last[1] - self._last[0]), self._last[1]
        longest = float(move.abs().max())
        if longest < 1e-2 * float(1 + x.abs().max()):
            return []
        value = problem.objective(x)
        if problem.objective(x + 10 * move) > value + 1e-9 * abs(value):
            return []
        order = move.abs().argsort(descending=True).tolist()
        return [problem.coordinate_names[i] for i in order[:3] if move[i].abs() > longest / 2]


def _finish(
    problem: Problem, run: Run, choice: Choice, tolerance: float, tried: int, endless: Sequence[str] = ()
) -> Run:
    """The run with its certificate, and a status that says whether it can be relied upon."""
    name = type(choice.algorithm).__name__
    message = f"{name}, since {choice.why}"
    message += f"; {tried} rounds of trying steps came first" if tried else ""
    x = run.solution.double().cpu()
    certificate = certify(problem, x)
    last = run.history[-1]
    if run.status == "converged" and (endless or _separated(last, tolerance)):
        which = f"the coefficients of {', '.join(endless)}" if endless else "the coefficients"
        reason = f"the classes can be separated and {which} grow without end: regularize more"
        return dataclasses.replace(run, status="not converged", message=f"{message}: {reason}", certificate=certificate)
    if run.status == "converged":
        message += f": {run.rounds} rounds, {certificate}"
        return dataclasses.replace(run, message=message, certificate=certificate)
    reason = f"not converged after {run.rounds} rounds, stationarity {last['stationarity']:.1e} above {tolerance:.1e}"
    if not problem.loss.smooth:
        reason += "; a loss with kinks makes slow progress: allow a larger tolerance, or take a smooth loss"
    status: Any = "diverged" if run.status == "diverged" else "not converged"
    return dataclasses.replace(run, status=status, message=f"{message}: {reason}", certificate=certificate)


def _separated(last: Record, tolerance: float) -> bool:
    """Whether a classifier's loss is as small as its gradient with every sample right: then there is no minimiser."""
    return last.get("train_accuracy") == 1.0 and last["loss"] <= 100 * max(tolerance, last["stationarity"])
