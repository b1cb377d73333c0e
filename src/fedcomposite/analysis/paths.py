"""The path: a model for every strength of the regularizer, from the empty model on."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import annotated_types as at
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite._validation import Count, Inside, Positive, ZeroOrMore
from fedcomposite.analysis.newton import Fit, FitPlan, fit, moved, null, on_support, plan_of, strong_rule
from fedcomposite.analysis.strengths import check_modulus, largest_factor, regularized
from fedcomposite.privacy import StudyBudget
from fedcomposite.problems import Loss, Problem
from fedcomposite.problems.losses import Cox, LeastSquares
from fedcomposite.regularizers import Regularizer
from fedcomposite.regularizers.factors import strength, varied
from fedcomposite.results import Result, counted
from fedcomposite.runtime.driver import NEVER, Deadline, Driver, driving
from fedcomposite.runtime.fit import check_given
from fedcomposite.runtime.protocol import ALL, Task, losses, newton, share_of_events, totals

Floats = npt.NDArray[np.float64]
Several = Annotated[int, at.Ge(2)]

Share = Annotated[float, at.Ge(0), at.Le(1)]

_BINOMIAL = 0.5  # EBIC's gamma
_DOZEN = 12  # strengths that share a start: fewer cost more work than they save exchanges


@dataclass(frozen=True, repr=False)
class Path(Result):
    """Models for falling strengths; arrays have one row per strength."""

    problem: Problem
    lambdas: Floats
    """Strengths: lam of the regularizer (l1 + l2 of an elastic net)."""
    solutions: Tensor
    """The models, ``(k, d)``, as a problem has them."""
    rounds: npt.NDArray[np.int64]
    """Exchanges that each strength took."""
    losses: Floats
    null_loss: float
    """Of the model with intercept and features that are not regularized, all others zero."""
    saturated: float
    """Of a model that fits every sample; 0 for most losses."""
    samples: float
    """How many samples; what each counts is relative, so that criteria do not depend on the scale of weights."""
    exchanges: int
    """Exchanges in all, those for the first strength among them."""
    bytes_up: int
    bytes_down: int
    converged: npt.NDArray[np.bool_]
    gamma: float = 1.0
    """The share of the regularized coefficients in these; the rest is of those without the regularizer."""
    events: float | None = None
    """Of times to an event, how many samples had one, by their relative weights; None for other losses."""

    @property
    def coefficients(self) -> Floats:
        """Coefficients of the features, ``(k, p)``, or ``(k, p, C)`` with C outputs."""
        slot = self.problem.layout[0]
        return self.solutions[:, slot.start : slot.stop].view(-1, *slot.shape).numpy()

    @property
    def intercepts(self) -> Floats:
        """Intercepts, ``(k,)`` or ``(k, C)``; zero where the problem has none."""
        slot = self.problem.layout[-1]
        if not self.problem.bias:
            return np.zeros((len(self.lambdas), *self.coefficients.shape[2:]))
        found = self.solutions[:, slot.start : slot.stop].numpy()
        return found[:, 0] if found.shape[1] == 1 and self.coefficients.ndim == 2 else found

    @property
    def nonzeros(self) -> npt.NDArray[np.int64]:
        """Nonzero coefficients of each model, intercepts not counted."""
        return np.asarray((self.coefficients != 0).reshape(len(self.lambdas), -1).sum(1))

    @cached_property
    def deviance(self) -> Floats:
        """The share of the null model's deviance that each model explains."""
        return np.asarray(1 - (self.losses - self.saturated) / (self.null_loss - self.saturated))

    @property
    def _fits(self) -> Floats:
        """Minus twice the logarithm of the likelihood, up to a constant; the variance of a normal one is estimated."""
        if isinstance(self.problem.loss, LeastSquares):
            return np.asarray(self.samples * np.log(2 * self.losses))
        return np.asarray(2 * self.samples * self.losses)

    @property
    def _parameters(self) -> npt.NDArray[np.int64]:
        return self.nonzeros + (self.problem.dimension - int(np.prod(self.coefficients.shape[1:])))

    @property
    def aic(self) -> Floats:
        """Akaike's criterion; a nonzero coefficient counts as one parameter, as is right for l1, MCP and SCAD."""
        return self._fits + 2 * self._parameters

    @property
    def bic(self) -> Floats:
        """The Bayesian criterion; of times to an event by their number of events (Volinsky & Raftery 2000).

        Censored samples tell little: the information about a hazard grows with the events, not with the samples.
        """
        return self._fits + math.log(self.samples if self.events is None else self.events) * self._parameters

    @property
    def ebic(self) -> Floats:
        """The extended Bayesian criterion with gamma = 1/2 (Chen & Chen 2008): many features cost more."""
        p = int(np.prod(self.coefficients.shape[1:]))
        ways = np.array([math.lgamma(p + 1) - math.lgamma(k + 1) - math.lgamma(p - k + 1) for k in self.nonzeros])
        return self.bic + 2 * _BINOMIAL * ways

    def at(self, lam: float) -> Tensor:
        """The model whose strength is nearest to ``lam``, on the scale of logarithms."""
        return self.solutions[nearest(self.lambdas, lam)]

    def index(self, choice: str | float = "bic") -> int:
        """The place of a choice: ``"aic"``, ``"bic"``, ``"ebic"`` or a strength."""
        if not isinstance(choice, str):
            return nearest(self.lambdas, choice)
        if choice not in ("aic", "bic", "ebic"):
            raise ValueError(f"choice = {choice!r}, must be 'aic', 'bic' or 'ebic' for a path, or a number")
        return int(np.argmin(getattr(self, choice)))

    def solution(self, choice: str | float = "bic") -> Tensor:
        """The model of a choice."""
        return self.solutions[self.index(choice)]

    def table(self) -> pd.DataFrame:
        """One row per strength."""
        columns = {"lambda": self.lambdas, "nonzeros": self.nonzeros, "deviance": self.deviance, "rounds": self.rounds}
        return pd.DataFrame(columns | {"aic": self.aic, "bic": self.bic, "ebic": self.ebic})

    def to_frame(self) -> pd.DataFrame:
        return self.table()

    def _line(self) -> str:
        lambdas, nonzeros, open_ = self.lambdas, self.nonzeros, int((~self.converged).sum())
        said = f"{counted(len(lambdas), 'strength')} from {lambdas[0]:.4g} to {lambdas[-1]:.4g}: {nonzeros.min()} to "
        said += f"{nonzeros.max()} of {int(np.prod(self.coefficients.shape[1:]))} coefficients nonzero, "
        return said + counted(self.exchanges, "exchange") + (f"; {open_} did not converge" if open_ else "")


def nearest(lambdas: Floats, lam: float) -> int:
    """The place of the strength that is nearest, on the scale of logarithms."""
    if not (isinstance(lam, int | float | np.number) and 0 < lam < math.inf):
        raise ValueError(f"lam = {lam!r}, must be a number > 0")
    return int(np.argmin(np.abs(np.log(lambdas / lam))))


def path(
    problem: Problem,
    *,
    count: Several = 100,
    ratio: Inside | None = None,
    lambdas: Sequence[float] | None = None,
    gamma: Share = 1.0,
    tolerance: ZeroOrMore = 1e-8,
    rounds: Count = 100,
    segments: Count | None = None,
    seconds: Positive | None = None,
    privacy: StudyBudget | None = None,
    driver: Driver | None = None,
    checkpoint: str | pathlib.Path | None = None,
    resume: bool = False,
    on_exchange: Callable[[Driver], None] | None = None,
) -> Path:
    """Solve a problem for falling strengths of its regularizer, each from the last solution.

    The first strength is the least one at which all regularized coefficients are zero. It comes from one aggregated
    gradient, at the model with the intercept and the features that are not regularized.

    Parameters
    ----------
    problem : Problem
        A linear model with a smooth loss. The strength of its regularizer is what is varied: lam of ``L1(1.0)``, also
        on some coordinates; both numbers of an elastic net, in proportion; lam of MCP and SCAD, whose theta and a stay.
    count : int
        How many strengths, evenly spread on the scale of logarithms.
    ratio : float, optional
        The last over the first; 1e-4, or 1e-2 with fewer samples than features, if left out.
    lambdas : sequence of float, optional
        Falling strengths of your own.
    gamma : float
        Below 1 the relaxed lasso, as in glmnet: every model is so much of the regularized one, and for the rest the one
        without the regularizer on the coordinates that it kept. 0 is that one alone.
    tolerance : float
        Of the optimality measure, relative to the largest slope at the first strength.
    rounds : int
        Most exchanges for one strength.
    segments : int, optional
        Parts of the path that are followed side by side, each from the model without coefficients: about as many times
        fewer exchanges, with more numbers in each. For a convex h only, where models do not depend on their start. If
        left out, one for every dozen strengths of a convex h; one where ``seconds`` may end it, since only what is done
        from the first strength on is whole.
    seconds : float, optional
        Most time; the path then ends with the strengths that are done.
    privacy : StudyBudget, optional
        All sums have noise, within one budget: see :class:`fedcomposite.privacy.StudyBudget`. Models are then those of
        a quadratic at a private fit.
    driver : Driver, optional
        Through which the parties are asked; one on the problem's own silos if left out.
    checkpoint : path, optional
        A file for the answers of the silos, while the analysis lasts. ``resume=True`` goes on from it (or starts, if
        there is none) and gives bit-identical results, also after the process was killed.
    on_exchange : callable, optional
        Called after each exchange, with the driver: its ``exchanges``, ``tasks`` that are running, ``seconds``.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=5, features=6, samples=20)
    >>> found = fc.path(fc.Problem(silos, regularizer=fc.regularizers.L1(1.0), bias=True), count=20)
    >>> int(found.nonzeros[0]), found.coefficients.shape, bool(found.converged.all())
    (0, (20, 6), True)
    """
    check_path(path, locals())
    with driving(path, locals()) as driver:
        start = beginning(problem, tolerance, rounds, driver, driver.deadline(seconds))
        strengths = falling(problem, start, count, ratio, lambdas)
        parts = divided(problem.regularizer, strengths, segments, seconds)
        [fits] = followed(driver, problem.regularizer, parts, start, [start.plan])
        if gamma < 1:
            [refits] = relaxed(driver, problem.regularizer, [fits], [start.plan])
            fits = blended(driver, fits, refits, gamma, start.plan)
        return replace(collected(problem, strengths[: len(fits)], start, fits, driver), gamma=gamma)


def check_path(function: Callable[..., Any], given: Mapping[str, Any], *lines: str) -> None:
    """Refuse settings of a path that are wrong, all at once; ``lines`` are about others."""
    lambdas = given.get("lambdas")
    try:
        own = np.asarray([1.0] if lambdas is None else lambdas, float)
    except (TypeError, ValueError):
        own = np.zeros(0)
    if own.ndim != 1 or not len(own) or not ((own > 0) & (own < np.inf)).all() or not (np.diff(own) < 0).all():
        lines = (*lines, f"lambdas = {lambdas!r:.60}, must be positive and falling")
    check_given(function, given, *lines)


@dataclass(frozen=True)
class Start:
    """The null model of all samples, and how the fits are done."""

    null: Fit
    top: float
    plan: FitPlan
    features: int
    """How many coordinates are features'."""

    @property
    def without_features(self) -> Tensor:
        """Where models of some samples begin.

        A coefficient that these do not determine, such as the intercept of a site that is held out, stays where it
        begins: it must know nothing of the others.
        """
        return torch.cat([torch.zeros_like(self.null.x[: self.features]), self.null.x[self.features :]])


def beginning(problem: Problem, tolerance: float, rounds: int, driver: Driver, deadline: Deadline = NEVER) -> Start:
    """Fit the null model, and find the first strength."""
    if not (isinstance(problem.loss, Loss) and problem.loss.smooth):
        raise ValueError(f"{problem.loss} has kinks, and a path takes Newton steps; take a smooth loss")
    if not problem.loss.twice:
        raise ValueError(
            f"{problem.loss} has no second derivative, and a path takes Newton steps; write a Loss with `second`, or "
            "take fc.solve for each strength"
        )
    h, d = problem.regularizer, problem.dimension
    check_modulus(h)
    lam = strength(h)
    if not lam > 0:
        raise ValueError(f"{h} has strength 0, of which no path can be made: take for example L1(1.0)")
    plan = plan_of(problem, driver.centre, tolerance=1e-12, rounds=rounds)
    [empty] = driver.run([null(h, d, plan)])
    gradient = empty.seen.reply.gradient
    acted_on = regularized(h, d)
    top = lam * largest_factor(h, empty.x, gradient, acted_on)
    scale = float(gradient[acted_on].abs().max())
    return Start(
        empty,
        top,
        replace(plan, tolerance=tolerance, scale=scale, deadline=deadline),
        int(np.prod(problem.layout[0].shape)),
    )


def falling(problem: Problem, start: Start, count: int, ratio: float | None, lambdas: Sequence[float] | None) -> Floats:
    """The strengths of a path."""
    if lambdas is not None:
        return np.asarray(lambdas, float)
    if ratio is None:
        ratio = 1e-4 if start.null.seen.total > problem.dimension else 1e-2
    found: Floats = start.top * np.geomspace(1.0, ratio, count)
    found[0] = start.top
    return found


def along(h: Regularizer, lambdas: Floats, start: Start, plan: FitPlan) -> Task[list[Fit]]:
    """The models of a path on some rows, one after another."""
    own, fits = strength(h), list[Fit]()
    at: Tensor | Fit = start.null if plan.rows == start.plan.rows else start.without_features
    last = start.top
    for lam in lambdas.tolist():
        if isinstance(at, Fit) and at.end == "endless":  # where h does not hold coefficients, a weaker one does not
            fits.append(replace(at, rounds=0))
            continue
        strong: tuple[int, ...] = ()
        if isinstance(at, Fit) and 2 * lam > last:
            strong = strong_rule(varied(h, (2 * lam - last) / own), at)
        at = yield from fit(varied(h, lam / own), at, plan, strong)
        if at.end == "time" and fits:
            break  # the strengths that are done are whole
        fits.append(at)
        last = lam
    return fits


def divided(h: Regularizer, lambdas: Floats, segments: int | None, seconds: float | None) -> list[Floats]:
    """The strengths in parts that are followed side by side."""
    if segments is None:
        segments = max(1, len(lambdas) // _DOZEN) if h.rho == 0 and seconds is None else 1
    if segments > 1 and h.rho > 0:
        raise ValueError(f"segments = {segments}: {h} is not convex, so that models depend on their start; take 1")
    return [part for part in np.array_split(lambdas, segments) if len(part)]


def followed(
    driver: Driver, h: Regularizer, parts: Sequence[Floats], start: Start, plans: Sequence[FitPlan]
) -> list[list[Fit]]:
    """The models of a path under each of several plans, all in the exchanges that the slowest part takes."""
    found = iter(driver.run([along(h, part, start, plan) for plan in plans for part in parts]))
    made = list[list[Fit]]()
    for _ in plans:
        whole, complete = list[Fit](), True
        for part, fits in [(part, next(found)) for part in parts]:
            whole += fits if complete else []
            complete &= len(fits) == len(part)
        made.append(whole)
    return made


def relaxed(driver: Driver, h: Regularizer, each: Sequence[Sequence[Fit]], plans: Sequence[FitPlan]) -> list[list[Fit]]:
    """The models without the regularizer on what each model of some paths kept, all in the same exchanges."""
    tasks = [on_support(one.x, h, plan) for fits, plan in zip(each, plans, strict=True) for one in fits]
    found = iter(driver.run(tasks))
    return [[next(found) for _ in fits] for fits in each]


def blended(driver: Driver, fits: Sequence[Fit], refits: Sequence[Fit], gamma: float, plan: FitPlan) -> list[Fit]:
    """Models between the regularized ones (gamma 1) and those without (0), with their losses."""
    models = [gamma * one.x + (1 - gamma) * free.x for one, free in zip(fits, refits, strict=True)]
    none = torch.zeros(len(models[0]), dtype=torch.bool)
    centred = plan.centre is not None
    asked = [newton(moved(x, plan.centre, 1), none, plan.rows, centred=centred) for x in models]
    made = []
    for x, one, free, sums in zip(models, fits, refits, driver.ask(asked), strict=True):
        reply = one.seen.reply._replace(loss=sums["loss"] / sums["weight"][0])
        end = one.end if one.converged and free.converged else free.end if one.converged else one.end
        made.append(replace(one, x=x, seen=one.seen._replace(reply=reply), rounds=one.rounds + free.rounds, end=end))
    return made


def collected(problem: Problem, lambdas: Floats, start: Start, fits: list[Fit], driver: Driver) -> Path:
    """The fits as a path."""
    saturated, events = _references(problem, start.null, driver)
    return Path(
        problem,
        lambdas,
        torch.stack([one.x for one in fits]),
        np.array([one.rounds for one in fits]),
        np.array([one.loss for one in fits]),
        start.null.loss,
        saturated,
        start.null.seen.total,
        driver.exchanges,
        driver.bytes_up,
        driver.bytes_down,
        np.array([one.converged for one in fits]),
        events=events,
    )


def _references(problem: Problem, null: Fit, driver: Driver) -> tuple[float, float | None]:
    """The loss of a model that fits every sample, what the null model's deviance leaves of its loss; and the events."""
    loss = problem.loss
    if not isinstance(loss, Loss) or loss.nonnegative:
        return 0.0, None
    asked = [losses(null.x.unsqueeze(0), ALL)]
    if isinstance(loss, Cox):
        asked.append(totals(null.x, loss.cause))
    sums, *counts = driver.ask(asked)
    saturated = null.loss - float(sums["deviance"][0] / sums["weight"][0]) / 2
    if not counts:
        return saturated, None
    return saturated, null.seen.total * share_of_events(counts[0])
