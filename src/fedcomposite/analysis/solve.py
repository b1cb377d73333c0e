"""The answer to a problem: no method to choose, no steps, and a certificate at the end."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedcomposite import theory
from fedcomposite._validation import Count, Natural, Positive, Probability, ZeroOrMore, as_vector
from fedcomposite.algorithms import FedNMap
from fedcomposite.algorithms.base import Empty
from fedcomposite.analysis.newton import End, Fit, attained, feasible, fit_any, plan_of
from fedcomposite.analysis.scaling import rescale, worthwhile
from fedcomposite.analysis.settling import settle, without_end
from fedcomposite.choice import HESSIANS, Choice, Curvature, choose, newton_fits
from fedcomposite.problems import Loss, Problem
from fedcomposite.problems.losses import Cox
from fedcomposite.regularizers.wrapped import settled
from fedcomposite.runtime import DivergenceWarning, GrowthWarning, Interrupted, Record, Run, simulate
from fedcomposite.runtime.callbacks import Callback, View
from fedcomposite.runtime.certificate import Certificate, certify
from fedcomposite.runtime.counted import Counted
from fedcomposite.runtime.driver import Deadline, Driver, deadline
from fedcomposite.runtime.fit import check_given, precision_fault
from fedcomposite.runtime.records import make_record
from fedcomposite.runtime.transports.silo_answers import StackedSums, check_range

NEWTON_ROUNDS, KINK_ROUNDS, SETTLED_ROUNDS, FIRST_ORDER_ROUNDS = 100, 500, 1000, 5000
"""Rounds after which a solution counts as not found, unless a number is given."""

_TRIAL = 15  # rounds that judge a step
_FACTOR = 4.0  # between steps that are tried
_STALLED = {False: 20, True: 6}  # records without progress that end a first-order method: for good, or for Newton
_PROGRESS = 0.7  # what stationarity has to fall to in them


def solve(
    problem: Problem,
    *,
    tolerance: ZeroOrMore = 1e-8,
    rounds: Natural | None = None,
    seconds: Positive | None = None,
    participation: Probability = 1.0,
    local_steps: Count = 10,
    batch_size: Count | None = None,
    seed: Natural = 0,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    x0: Any = None,
    curvature: Curvature = "auto",
    on_record: Callable[[Record], None] | None = None,
) -> Run:
    """Find the solution of a problem, whatever method that takes.

    Linear models are solved by Newton steps (:class:`fedcomposite.algorithms.ProxNewton`), in about ten rounds. A loss
    with a kink (hinge, absolute, quantile) gets a barrier whose width falls, which takes about a hundred. Other
    problems, and rounds with some of the clients only, take a first-order method. Its steps are found by trying some on
    the objective, from the problem's constants on where these are known, and a run that diverges is done again with
    smaller ones.

    Parameters
    ----------
    problem : Problem
        What to solve.
    tolerance : float
        Relative, as in everything an analyst calls: of the optimality measure, in units of its size at the start, and
        of what is left to gain, in units of the objective. Newton steps look at both, a loss with kinks has the second
        alone, and a first-order method, whose measure is the stationarity at :meth:`Problem.default_step`, the first.
        (``simulate`` has no such unit: its tolerance is the stationarity itself.)
    rounds : int, optional
        Most rounds; if left out 100 for Newton steps, 500 where a loss has kinks, 1000 where Newton steps end what a
        first-order method began, and 5000 for others.
    seconds : float, optional
        Most time; the best model by then is the answer, and its status says whether it is the solution.
    participation : float
        Share of the clients that take part in a round.
    local_steps, batch_size
        Of a first-order method.
    seed, dtype, device, on_record
        As in :func:`fedcomposite.simulate`.
    curvature : str
        "never": no Hessian leaves a client. Linear models with a smooth loss then take gradients and a few
        Hessian-vector products (:class:`fedcomposite.algorithms.SketchNewton`), others a first-order method.
    x0 : Tensor or array, optional
        Where to begin; Newton steps begin at zero instead where the objective is lower there, and ``message`` says so.

    Returns
    -------
    Run
        With ``status`` "converged" or "not_converged", a ``message`` that says what was chosen and why, and a
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
    ends = deadline(seconds)
    if participation >= 1 and curvature == "auto" and newton_fits(problem, kinks=True):
        if fault := precision_fault(dtype, "ProxNewton"):
            raise ValueError(fault)
        most = (NEWTON_ROUNDS if problem.loss.smooth else KINK_ROUNDS) if rounds is None else rounds
        exact = dtype if problem.loss.smooth else torch.float64  # barriers are narrower than single precision
        run = _Newton(problem, exact, torch.device(device), on_record).solve(tolerance, most, ends, x0)
        return dataclasses.replace(run, solution=run.solution.to(dtype))
    if not problem.loss.smooth and not problem.regularizer.weakly_convex:
        raise ValueError(
            f"{problem.loss} has kinks and {problem.regularizer} is not weakly convex: no method here takes both; "
            "take a smooth loss (huber, squared_hinge), or a regularizer with a modulus (L1, MCP, SCAD)"
        )
    settings: dict[str, Any] = {
        "tolerance": tolerance,
        "participation": participation,
        "seed": seed,
        "dtype": dtype,
        "device": device,
        "x0": x0,
        "on_record": on_record,
        "mode": "eager",
        "batch_size": batch_size,
    }
    choosing = partial(choose, participation=participation, local_steps=local_steps, curvature=curvature)
    most = (SETTLED_ROUNDS if _settles(problem, choosing) else FIRST_ORDER_ROUNDS) if rounds is None else rounds
    return _first_order(problem, most, choosing, settings | {"evaluate_every": max(1, min(10, most))}, ends)


# -- Newton steps -----------------------------------------------------------------------------------------------------


class _Newton:
    """A fit by Newton steps, and its history."""

    def __init__(
        self, problem: Problem, dtype: torch.dtype, device: torch.device, on_record: Callable[[Record], None] | None
    ) -> None:
        self.problem, self.on_record = problem, on_record
        self.parties = StackedSums(problem, dtype, device)
        self.smooth, self.counter = self.parties.smooth, self.parties.counter
        self.history: list[Record] = []
        self.x, self.left = self.smooth.start(), False
        self.began, self.step = time.perf_counter(), problem.default_step()

    def solve(self, tolerance: float, rounds: int, deadline: Deadline, x0: Any) -> Run:
        """The run of a fit."""
        start = self._start(x0)
        settings = {"tolerance": tolerance, "rounds": rounds, "deadline": deadline, "watch": self._record}
        plan = plan_of(self.problem, self.parties.centre, **settings)
        counted = copy.copy(self.problem)
        counted.regularizer = Counted(self.problem.regularizer, self.counter)
        if not rounds:
            self._record(start, 0)
            return self._run(None, tolerance)
        try:
            [made] = Driver(self.parties).run([fit_any(counted, start, plan)])
            if made.converged and bool(start.any()):  # what begins far out may have nothing left to gain
                grown, _ = without_end(self.problem, made.x, self.parties, plan)
                made = dataclasses.replace(made, end="endless", grown=grown) if grown else made
        except KeyboardInterrupt:
            if not self.history:
                raise
            run = dataclasses.replace(self._run(None, tolerance), status="interrupted", message="interrupted")
            raise Interrupted(run) from None
        return self._run(made, tolerance)

    def _start(self, x0: Any) -> Tensor:
        """Where steps begin: the model that was given, unless the objective is lower without one.

        Far out there is no curvature, or far too much, so that steps get nowhere, or seem to have no end.
        """
        if x0 is None:
            return self.x
        given, own = (feasible(x, self.problem.regularizer) for x in (as_vector(x0).to(self.x), self.x))
        self.left = not self._objective(given) <= self._objective(own)
        return own if self.left else given

    def _objective(self, x: Tensor) -> float:
        return float(self.smooth.evaluate(x).loss + self.problem.regularizer.value(x))

    def _record(self, x: Tensor, rounds: int) -> None:
        self.x = x
        seen, now = self.smooth.evaluate(x), time.perf_counter() - self.began
        h, counter = self.problem.regularizer, self.counter
        made = make_record(x, seen, h, round=rounds, step=self.step, counter=counter, seconds=now)
        if self.history and self.history[-1]["round"] == rounds:
            self.history.pop()
        self.history.append(made)
        if self.on_record is not None:
            self.on_record(made)

    def _run(self, made: Fit | None, tolerance: float) -> Run:
        problem, x, end = self.problem, self.x.double().cpu(), "rounds" if made is None else made.end
        certificate = None if made is None else made.certificate
        if certificate is None or certificate.kind != "duality gap":
            certificate = certify(problem, x) if problem.loss.smooth else certificate
        elif not problem.loss.smooth:  # of the fit about the means of features: x, for features as they are, is rounded
            certificate = Certificate(certificate.kind, certificate.value + self.smooth.rounding(self.x))
        why = "the model is linear, its loss smooth, and every client takes part"
        if not problem.loss.smooth:
            why = f"the model is linear; {problem.loss} has kinks, which a barrier takes away"
        rounds = self.history[-1]["round"]
        message = f"ProxNewton, since {why}: "
        message += "began at zero, where the objective is lower than at x0; " if self.left else ""
        if end == "converged":
            message += f"{rounds} rounds, {certificate}"
        else:
            message += explained(problem, end, rounds, () if made is None else made.grown)
            message += f"; {certificate}" if certificate is not None else ""
        status: Any = "converged" if end == "converged" else "not_converged"
        return Run(self.x, self.history, status, message, rounds, Empty(), (), certificate=certificate)


def explained(problem: Problem, end: End, rounds: int, grown: Sequence[int] = ()) -> str:
    """Why a fit is not the solution, and what to do."""
    if end == "endless":
        which = ", ".join(problem.coordinate_names[i] for i in grown)
        cause = "the classes can be separated" if problem.loss.classifier else "counts are zero wherever it matters"
        firth = "" if attained(problem) else ", or take Firth's penalty, confidence(problem, x, jeffreys=1)"
        cause = "whoever has the event can be told from all at risk" if isinstance(problem.loss, Cox) else cause
        return f"there is no solution, {cause} and the coefficients of {which} grow without end: regularize more{firth}"
    if end == "resisting":
        return (
            f"not converged: the server's part of {rounds} rounds was given up several times; bring features to one "
            f"scale (standardize), or take another regularizer than {problem.regularizer}"
        )
    if end == "rounding":
        return f"not converged: after {rounds} rounds rounding hides what is left; bring features to one scale"
    if end == "overflow":
        return "not converged: the loss overflows at every model that was tried; bring features to one scale"
    limit = "its time" if end == "time" else f"{rounds} rounds"
    hint = "allow more rounds" if end == "rounds" else "allow more seconds"
    return f"not converged within {limit}: {hint}, or a larger tolerance"


def _size(problem: Problem, x0: Any) -> float:
    """The stationarity at the start, or at the usual one where that is larger: a start may be the solution."""
    usual = problem.smooth().start()
    sizes = [problem.stationarity(x) for x in ([usual] if x0 is None else [usual, as_vector(x0).to(usual)])]
    return max([size for size in sizes if math.isfinite(size)], default=1.0)


# -- first-order methods ----------------------------------------------------------------------------------------------


def _first_order(
    problem: Problem, rounds: int, choosing: partial[Choice], settings: dict[str, Any], deadline: Deadline
) -> Run:
    """Steps are tried, the run is done, and done again with smaller ones if it diverges.

    Where features differ in size and h allows it, all of that is in units in which they do not.
    """
    given, relative = problem, settings["tolerance"]
    tolerance = relative * _size(problem, settings["x0"])
    newton = _settles(problem, choosing)
    patience = _Patience(deadline, _STALLED[newton])
    settings |= {"callbacks": [patience], "tolerance": tolerance}
    kept = min(NEWTON_ROUNDS, rounds // 10) if newton else 0
    rounds -= kept
    rescaling = rescale(problem, tolerance) if isinstance(problem.loss, Loss) and worthwhile(problem) else None
    if rescaling is not None:
        problem = rescaling.problem
        settings |= {"x0": rescaling.start(settings["x0"]), "tolerance": None, "callbacks": [patience, rescaling]}
    smoothness, tried = _smoothness(problem, choosing, settings, deadline)
    while True:
        choice = choosing(problem, L=smoothness)
        every = {"evaluate_every": 1} if choice.algorithm.info.second_order else {}
        run = _quietly(problem, choice, rounds, settings | every)
        rounds -= run.rounds
        if run.status != "diverged" or smoothness is None or smoothness > 1e12 or patience.late or rounds <= 0:
            break
        smoothness, tried = smoothness * _FACTOR, tried + run.rounds
    if rescaling is not None:
        run, choice = rescaling.back(run), Choice(choice.algorithm, f"{choice.why}, in units of the features")
    if newton and run.status != "diverged" and rounds + kept > 0:
        run = _settled(given, run, (relative, tolerance), rounds + kept, deadline)
        choice = Choice(choice.algorithm, f"{choice.why}, and Newton steps at its end")
        if settings["on_record"] is not None:
            settings["on_record"](run.history[-1])
    return _finish(given, run, choice, tolerance, tried)


def _settles(problem: Problem, choosing: partial[Choice]) -> bool:
    """Whether Newton steps finish what a first-order method began; see :mod:`fedcomposite.analysis.settling`."""
    loss, h = problem.loss, problem.regularizer
    linear = isinstance(loss, Loss) and loss.smooth and loss.twice
    able = choosing.keywords["participation"] >= 1 and choosing.keywords["curvature"] == "auto"
    return linear and able and not h.weakly_convex and problem.dimension <= HESSIANS


def _settled(problem: Problem, run: Run, tolerances: tuple[float, float], rounds: int, deadline: Deadline) -> Run:
    """The run with Newton steps at its end: converged if these are, and if a step of the prox moves nothing either."""
    parties, began = StackedSums(problem, torch.float64, torch.device("cpu")), time.perf_counter()
    made = settle(problem, run.solution.double().cpu(), parties, tolerances[0], rounds, deadline)
    if made is None:
        return run
    counter, last, asked = parties.counter, run.history[-1], run.rounds + made.rounds
    counter.bytes_up, counter.bytes_down = counter.bytes_up + last["bytes_up"], counter.bytes_down + last["bytes_down"]
    counter.proxes, counter.gradients = last["prox_evaluations"], counter.gradients + last["gradient_evaluations"]
    seconds = last["seconds"] + time.perf_counter() - began
    seen, step = problem.evaluate(made.x), problem.default_step()
    record = make_record(made.x, seen, problem.regularizer, round=asked, step=step, counter=counter, seconds=seconds)
    done = made.end == "converged"
    status: Any = "converged" if done and record["stationarity"] <= tolerances[1] else "not_converged"
    return dataclasses.replace(
        run,
        solution=made.x.to(run.solution),
        history=[*run.history, record],
        status=status,
        message="" if done else explained(problem, made.end, asked, made.grown),
        rounds=asked,
    )


def _quietly(problem: Problem, choice: Choice, rounds: int, settings: dict[str, Any]) -> Run:
    """A run whose status will say what its warnings do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)
        warnings.simplefilter("ignore", GrowthWarning)
        return simulate(problem, choice.algorithm, rounds=rounds, **settings)


def _smoothness(
    problem: Problem, choosing: partial[Choice], settings: dict[str, Any], deadline: Deadline
) -> tuple[float | None, int]:
    """A constant for the steps of a first-order method, found by trying some, and the rounds that this took.

    Where L is known it is at most made so much smaller that single local steps stay below 1/L: twice, and
    ``local_steps`` times where only some clients take part, since a round's steps are shared out then.
    """
    share, local_steps = (choosing.keywords[name] for name in ("participation", "local_steps"))
    least, factor = 0.0, _FACTOR
    if isinstance(problem.loss, Loss):
        if not problem.loss.smooth:
            return None, 0
        if not isinstance(choosing(problem, L=1.0).algorithm, FedNMap):
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
            made = choosing(problem, L=L)
            plan = {"evaluate_every": _TRIAL, "progress": False, "on_record": None, "callbacks": ()}
            run = _quietly(problem, made, _TRIAL, settings | plan)
            lower = run.status != "diverged" and run.history[-1].objective < run.history[0].objective
            tried[L] = run.history[-1].objective if lower else math.inf
        return tried[L]

    while math.isinf(objective(L)) and L < 1e12 and not deadline.passed:
        L *= factor
    while not deadline.passed and L / factor >= least and objective(L / factor) < objective(L):
        L /= factor
    return L, _TRIAL * len(tried)


def _finish(problem: Problem, run: Run, choice: Choice, tolerance: float, tried: int) -> Run:
    """The run with its certificate, and a status that says whether it can be relied upon."""
    name = type(choice.algorithm).__name__
    message = f"{name}, since {choice.why}"
    message += f"; {tried} rounds of trying steps came first" if tried else ""
    certificate = certify(problem, run.solution.double().cpu())
    last = run.history[-1]
    if run.status == "converged" and _falls_on(problem, run.solution.double().cpu()):
        message += ": there is no solution, the objective goes on to fall where coefficients grow: regularize more"
        return dataclasses.replace(run, status="not_converged", message=message, certificate=certificate)
    if run.status == "converged":
        message += f": {run.rounds} rounds, {certificate}"
        return dataclasses.replace(run, message=message, certificate=certificate)
    if run.status == "not_converged" and run.message:  # Newton steps at the end have said why
        return dataclasses.replace(run, message=f"{message}: {run.message}", certificate=certificate)
    stopped = f" ({run.message})" if run.status == "stopped" else ""
    reason = f"not converged after {run.rounds} rounds{stopped}, "
    reason += f"stationarity {last['stationarity']:.1e} above {tolerance:.1e}"
    if not problem.loss.smooth:
        reason += "; a loss with kinks makes slow progress: allow a larger tolerance, or take a smooth loss"
    status: Any = "diverged" if run.status == "diverged" else "not_converged"
    return dataclasses.replace(run, status=status, message=f"{message}: {reason}", certificate=certificate)


def _falls_on(problem: Problem, x: Tensor) -> bool:
    """Whether a loss that has no least value by itself falls from x to 2 x, and h does not rise: x is no minimiser."""
    if attained(problem) or not bool(x.any()):
        return False
    now, then = (float(problem.evaluate(k * x).loss) for k in (1, 2))
    held = float(problem.regularizer.value(2 * x)) > float(problem.regularizer.value(x))
    return not held and (then < now - 1e-3 * abs(now) or then == now == 0)


class _Patience(Callback):
    """Ends a run at its deadline, or when stationarity has not improved for long."""

    def __init__(self, deadline: Deadline, most: int) -> None:
        self._deadline, self._most = deadline, most
        self._best, self._since = math.inf, 0

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return self._deadline.passed

    def begin(self, view: View) -> None:
        self._best, self._since = math.inf, 0

    def __call__(self, view: View) -> None:
        """Look at the newest record."""
        now = view.record["stationarity"]
        self._since = 0 if now < _PROGRESS * self._best else self._since + 1
        self._best = min(self._best, now)
        if self.late:
            view.stop("its time was up")
        elif self._since >= self._most:
            view.stop(f"no progress in {self._most} records")
