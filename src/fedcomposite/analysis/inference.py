"""How sure coefficients are: confidence intervals and p-values from the aggregated Hessian, and the bootstrap.

A regularized model is biased. With at least five samples per coordinate the bias is taken off altogether: Newton steps
on the loss alone lead from the regularized model to the maximum of the likelihood, and intervals are Wald's there,

    b = argmin f,     var b = M J M,     M = H(b)^-1,

with the Hessian H of f and the covariance J of its gradient: H times the variance of the residuals over the number of
samples where the model holds, or from the samples' own gradients (sandwich). All of them are sums over sites. Neither
depends on how strongly the model was regularized. Of times to an event, events are counted in place of samples.

With fewer samples M comes from nodewise regressions on H, with no further exchange, and b = x - M g(x) takes the bias
off to first order (van de Geer, Bühlmann, Ritov & Dezeure 2014; Zhang & Zhang 2014; Javanmard & Montanari 2014). What
is left is of second order in x's distance from the truth: the Hessian of a strongly shrunk logistic model is not that
of the truth, its residuals are too large, and coefficients come out too small by a good part of their standard error.
So a second step follows, from x with its clearly nonzero coordinates moved to where the first step put them. These are
known to order 1/sqrt(n), so that the start is as near to the truth as the theory asks.

With few samples for each coordinate the maximum of a logistic likelihood is too large by a good part of its standard
error. Jeffreys' prior, det(n H)^(1/2), takes that off (Firth 1993): b then minimises f - (a/2n) log det H, where a is
the power of the prior. The gradient of log det H is the sum over k of the second derivatives of the gradient of f along
s_k, the columns of a root of H^-1, so that sites are asked for gradients near b, and for nothing else.

With few events for each coordinate that of a Cox model is too large as well, and a prior takes hardly half of that off:
who dies leaves the risk sets, so that the curvature depends on the gradient. To first order the bias is

    (1/2) M grad [ tr(M J(b)) - tr(V H(b)) ],     V = M J M,     M, J and V those at the maximum,

(Cox & Snell 1968, with sums over samples in place of expectations as in Kosmidis & Lunardon 2024). It is taken off the
maximum. Sites are asked for what sandwich errors ask, at the ends of short steps along the columns of a root of M.

A maximum of the likelihood need not exist: where a category has no event, its coefficient grows without end. Newton
steps then go on by about one unit of the logarithm of the odds each, while they are worth less and less of a standard
error. That is how it is told; what grows is NaN, and a warning names it.

Features whose mean is far from zero are taken about it, as in fits, since a Hessian would forget their deviation; the
intercept is taken back at the end. In the same way a Hessian forgets what is left of a column beside all others, where
that is below 3e-6 of its deviation: it has the square, 1e-11, and tells that to four digits. Silos at hand then answer
in coordinates in which such directions are columns of their own, so that only rounding of the samples is lost.
Sites of a federation are asked nothing else: there, what hangs on such directions is not determined.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import annotated_types as at
import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy  # which loads what is used of it
import torch
from torch import Tensor

from fedcomposite._validation import Inside, Natural, ZeroOrMore, as_vector
from fedcomposite.analysis.common_baseline import CommonBaseline
from fedcomposite.analysis.imputed import Asker, combined_table, each_copy
from fedcomposite.analysis.newton import fit, moved, plan_of
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import Cox, LeastSquares, Logistic, Multinomial, Poisson
from fedcomposite.runtime.driver import Driver, driver_of, driving
from fedcomposite.runtime.fit import check_given
from fedcomposite.runtime.protocol import ALL, Rows, Sums, information, newton, share_of_events, totals
from fedcomposite.runtime.transports.silo_answers import SiloTransport

Floats = npt.NDArray[np.float64]

_SAMPLES_PER_COORDINATE = 5  # from which on the Hessian is inverted
_EVENTS_PER_COORDINATE = 2  # of a Cox model whose bias is taken off
_MANY_SAMPLES, _MOST_COORDINATES = (
    20,
    50,
)  # per coordinate: the bias of a logistic model is small; of what it is taken off
_HALF_OF_THE_BIAS = 0.5  # power of Jeffreys' prior
_MOST_OF_COX = 100  # coordinates of which two looks each are asked for
_ITERATIONS = 2000  # of nodewise regressions
_ROUNDING = 1e-15  # of the eigenvalues of a Hessian with unit diagonal, for each of them
_SURE = 1e-11  # an eigenvalue that is known to four digits
_PLAIN = 1e-9  # one that is known to six, from which on columns stay as they are where they need not
_PART = 1e-8  # of a combination of coefficients along a lost direction, from which on it is lost
_CONSTANT = 1e-13  # of the size of columns: a deviation that is rounding
_TURNS = 3  # changes of coordinates at most
_ALIKE = 1e-8  # share of a column's variance that is rounding
_STEPS, _MORE_STEPS = 40, 200  # Newton steps at most; a prior's curvature is not in them, so that they take longer
_APART = 2e-4  # length of second differences, in units of a root of the inverse of H
_CLOSE, _NEARLY = 1e-6, 1e-5  # standard errors: a step so short is the last, without a prior and with one
_SHORTEST = 1e-6  # share of a step
_FLAT, _SLOW = 0.05, 3  # steps below so many standard errors that do not get half as long, and how many are too many
_VANISHED = 0.3  # share of its curvature that a direction keeps over these steps; e^-3 if it has no end
_SHARE = 0.1  # root of the share of a variance that lies along such directions


LIKELIHOODS = (LeastSquares, Logistic, Multinomial, Poisson, Cox)
"""Losses that are likelihoods of models, so that intervals follow from their curvature."""
_RATIOS: dict[type, str] = {
    Logistic: "odds",
    Multinomial: "odds",
    Poisson: "rate",
    Cox: "hazard",
}  # what exponentials of coefficients are


class TooFewError(ValueError):
    """Fewer samples than the intervals of a model need."""


class SeparationWarning(UserWarning):
    """A coefficient has no finite estimate: some samples are told apart without error, or have no events."""


class UndeterminedWarning(UserWarning):
    """A coefficient has no estimate: its column is constant, or other columns give it."""


def confidence(
    problem: Problem,
    x: Any,
    *,
    level: Inside = 0.95,
    inverse: Literal["auto", "exact", "nodewise"] = "auto",
    robust: bool | None = None,
    jeffreys: ZeroOrMore | None = None,
    driver: Driver | None = None,
) -> pd.DataFrame:
    """Confidence intervals and p-values of all coefficients of a linear, logistic, multinomial, Poisson or Cox model.

    Parameters
    ----------
    problem : Problem
        With the loss ``"least_squares"``, ``"logistic"``, ``"multinomial"``, ``"poisson"`` or ``"cox"``.
    x : Tensor, array, Run or estimator
        Its regularized solution, or what has one: a run, a fitted estimator, a path or a cross-validation.
    level : float
        Of the intervals.
    inverse : {"auto", "exact", "nodewise"}
        ``"exact"``: the maximum of the likelihood, with the inverse of the Hessian there; ``"nodewise"``: two steps
        from x, with an approximate inverse. ``"auto"`` takes the first from five samples, of times to an event from
        two events, per coordinate on (with sums that are noised, or one baseline for all sites, from five).
    robust : bool, optional
        Variances from the samples' own gradients (sandwich) in place of the model's; left out, with ``"uniform"``
        weights of clients or weighted samples, where the model's do not apply. False takes the model's there as well,
        with weights relative to their mean: a weight of two is not two samples, as it is for R's ``coxph``.
    jeffreys : float, optional
        Power of Jeffreys' prior for the maximum of the likelihood, which is then nearer to zero: 1 takes the bias of a
        few samples off (Firth), 0.5 half of it, and 0 is the likelihood alone. Left out, it is 0.5 for a logistic model
        with fewer than 20 samples per coordinate and at most 50 of these, whose likelihood has a maximum, and 0
        otherwise: 95 % intervals of the likelihood alone are right in 90 % of cases at five samples for each of 20
        coordinates, with 0.5 in 94 % (``benchmarks.coverage``). If it is given, estimates are finite also where classes
        can be told apart. Some ten exchanges more, of two gradients per coordinate.
        Not for sandwich variances, which have no likelihood. Left out, a Cox model with fewer than 20 events per
        coordinate and at most 100 of these has the first order of its bias taken off, for two exchanges, of two
        answers as of ``robust`` per coordinate; 0 is the maximum as it is.
    driver : Driver, optional
        Who answers; two exchanges for a linear model and for nodewise regressions, about six for others, and one more
        for sandwich errors at the maximum.

    Returns
    -------
    DataFrame
        A row per coordinate (of several classes: for each but the first, against it): ``coefficient`` (regularized),
        ``estimate`` (bias removed), ``se``, ``lower``, ``upper``, ``z``, ``p``, for classes ``odds_ratio`` with
        ``odds_lower`` and ``odds_upper``, for counts ``rate_ratio``, ``rate_lower`` and ``rate_upper``, of a Cox model
        ``hazard_ratio``, ``hazard_lower`` and ``hazard_upper``, all of them on the scale of the model: per deviation
        of a column that was standardized. Where a recipe prepared the features also per unit of the column, a year or a
        mg/dL: ``unit_estimate``, ``unit_se``, ``unit_z``, ``unit_lower``, ``unit_upper``, ``unit_p``, and
        ``unit_odds_ratio``, ``unit_rate_ratio`` or ``unit_hazard_ratio`` with their bounds; the intercept is then that
        of columns at 0, with a p-value of its own. What the samples do not determine (constant columns with the
        intercept, columns that others give up to rounding; in a federation, to within 3e-6 of their deviation) is NaN,
        with an :class:`UndeterminedWarning`, and so is what grows without end, with a :class:`SeparationWarning`. Per
        unit, terms of splines and of products are NaN (:attr:`fedcomposite.data.FittedRecipe.joint`): a unit of one
        term is not a unit of the column. Of features with coefficients for each site (``per_site``) a site's row is
        about its whole coefficient, and the common one's about the mean of those over the sites.
    """
    check_given(confidence, locals())
    x, driver = as_vector(x).double(), driver_of(problem, driver)
    sandwich, jeffreys = needs_sandwich(problem, robust, driver), bias_power(jeffreys, driver)
    return estimated(problem, x, level, inverse, sandwich, jeffreys, driver)


def covariance(
    problem: Problem,
    x: Any,
    *,
    robust: bool | None = None,
    jeffreys: ZeroOrMore | None = None,
    driver: Driver | None = None,
) -> pd.DataFrame:
    """The covariance of the estimates of :func:`confidence`, whose rows are its rows and columns.

    Parameters
    ----------
    problem, x, robust, jeffreys, driver
        As for :func:`confidence`. What the samples do not determine is NaN.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=5, features=2, samples=40)
    >>> problem = fc.Problem(silos, bias=True, weights="samples")
    >>> fc.covariance(problem, fc.solve(problem)).shape
    (3, 3)
    """
    check_given(covariance, locals())
    x, driver = as_vector(x).double(), driver_of(problem, driver)
    sandwich, (names, rows, own) = needs_sandwich(problem, robust, driver), contrasts(problem)
    jeffreys = bias_power(jeffreys, driver)
    every = [found_of(problem, x, "auto", sandwich, jeffreys, one).combined(rows, own) for one in each_copy(driver)]
    made = np.mean([V for _, V, _ in every], axis=0)
    if len(every) > 1:  # Rubin's rules
        made = made + (1 + 1 / len(every)) * np.cov(np.stack([b for b, *_ in every]).T)
    return pd.DataFrame(made, index=names, columns=names)


def needs_sandwich(problem: Problem, robust: bool | None, driver: Driver) -> bool:
    """Whether variances come from the samples' own gradients; refuses a loss that is no likelihood."""
    if not isinstance(problem.loss, LIKELIHOODS):
        kinds = "'least_squares', 'logistic', 'multinomial', 'poisson' and 'cox'"
        raise ValueError(f"confidence intervals are for {kinds}; for {problem.loss} take bootstrap(...)")
    weighted = problem.weighting == "uniform" or problem.silos.weights is not None
    return driver.budgeted or (weighted if robust is None else robust)  # a sandwich has room for noise


def bias_power(jeffreys: float | None, driver: Driver) -> float | None:
    """That of the prior; 0 where noise, or sums of one baseline for all sites, tell nothing about a bias."""
    return 0.0 if jeffreys is None and (driver.budgeted or isinstance(driver.transport, CommonBaseline)) else jeffreys


def outputs_of(problem: Problem) -> int:
    """Coefficients of each feature: of several classes one each."""
    shape = problem.layout[0].shape
    return int(shape[1]) if len(shape) > 1 else 1


def contrasts(problem: Problem, site: str | None = None) -> tuple[list[str], Tensor, Tensor]:
    """The coefficients that have estimates, as combinations of the coordinates: of several classes against the first.

    Of features that have coefficients for each site it is these, and their mean over the sites: what is common and what
    they differ by is told apart by the regularizer alone. Of the samples of one site the intercept is that of the
    ``site``, with its own term of a recipe, and there are no such terms. Their names, the combinations, and the
    coordinate that each is about.
    """
    outputs, d = outputs_of(problem), problem.dimension
    rows = torch.eye(d, dtype=torch.float64)
    if (recipe := problem.silos.recipe) is not None and (step := recipe.per_site) is not None:
        place = {name: j for j, name in enumerate(recipe.features)}
        for name in step.columns:
            own = torch.tensor([place[term] for term in step.terms(name)])
            for k in range(outputs):
                common = place[name] * outputs + k
                rows[common, own * outputs + k] = 1 / len(own)
                rows[own * outputs + k, common] = 1.0
    told = torch.ones(d, dtype=torch.bool)
    if recipe is not None and site is not None and problem.bias:
        for j, value in recipe.site_values(site).items():
            for k in range(outputs):
                rows[d - outputs + k, j * outputs + k] = value
            told[j * outputs : (j + 1) * outputs] = False
    if outputs > 1:
        first = torch.arange(d) // outputs * outputs
        rows = rows - rows[first]
        told &= torch.arange(d) != first
    own = torch.arange(d)[told]
    return [problem.coordinate_names[j] for j in own.tolist()], rows[own], own


def estimated(
    problem: Problem,
    x: Tensor,
    level: float,
    inverse: str,
    robust: bool,
    jeffreys: float | None,
    driver: Asker,
    site: str | None = None,
) -> pd.DataFrame:
    """The table of :func:`confidence`, of the samples that ``driver`` asks about: those of one ``site``, or of all."""
    every = [found_of(problem, x, inverse, robust, jeffreys, one, site) for one in each_copy(driver)]
    tables = [_table(problem, x, found, level, site) for found in every]
    if len(tables) == 1:
        return tables[0]
    return combined_table(tables, max(every[0].samples - problem.dimension, 1.0), level)


def found_of(
    problem: Problem,
    x: Tensor,
    inverse: str,
    robust: bool,
    jeffreys: float | None,
    driver: Asker,
    site: str | None = None,
) -> Estimates:
    """Estimates and their covariance, of the samples that ``driver`` asks about: those of one ``site``, or of all."""
    loss = problem.loss
    if jeffreys and (robust or inverse == "nodewise"):
        what = "weights and sandwich variances" if robust else "nodewise regressions"
        raise ValueError(
            f"jeffreys={jeffreys:g}: {what} have no likelihood that a prior could go with; take jeffreys=0"
        )
    look = _look(moved(x, driver.centre, 1), driver)
    number, d = _number(problem, look, driver), len(x)
    few = number < _MANY_SAMPLES * d
    unbiased = isinstance(loss, Cox) and jeffreys is None and few and d <= _MOST_OF_COX
    least = _EVENTS_PER_COORDINATE if unbiased else _SAMPLES_PER_COORDINATE
    exact = inverse == "exact" or (inverse == "auto" and number >= least * d)
    if outputs_of(problem) > 1:
        if inverse == "nodewise" or not (exact or jeffreys):
            raise TooFewError(
                f"{look.samples:g} samples for {d} coefficients: intervals of several classes need "
                f"{_SAMPLES_PER_COORDINATE} for each, or inverse='exact'"
            )
        exact = True
    if exact or jeffreys:
        prior = 0.0 if isinstance(loss, LeastSquares) else jeffreys or 0.0
        found = _maximum(problem, look, robust, prior, driver, unbiased)
        half = jeffreys is None and few and isinstance(loss, Logistic) and not robust and d <= _MOST_COORDINATES
        if half and found.endless is None:
            found = _maximum(problem, look, robust, _HALF_OF_THE_BIAS, driver)
    if not (exact or jeffreys) or (
        inverse == "auto" and number < _SAMPLES_PER_COORDINATE * d and found.endless is not None
    ):
        found = _refined(problem, look, robust, driver)
    _warn(problem, found, site)
    return found


def _number(problem: Problem, look: _Look, driver: Asker) -> float:
    """How many samples there are; of times to an event, how many events: who is censored tells little."""
    if not isinstance(problem.loss, Cox):
        return look.samples
    return look.samples * share_of_events(driver.ask([totals(look.x, problem.loss.cause)])[0])


def _warn(problem: Problem, found: Estimates, site: str | None) -> None:
    """Say which coefficients have no estimate, and why."""
    names, rows, own = contrasts(problem, site)
    _, lost, grown = found.rows(rows, own)

    def named(mask: Tensor) -> str:
        return ", ".join(name for name, m in zip(names, mask.tolist(), strict=True) if m)

    if bool(grown.any()):
        warnings.warn(
            f"no finite estimate of {named(grown)}: Newton steps reach no maximum of the likelihood, as where a "
            f"category has no event or outcomes can be told apart; take jeffreys=1 (Firth's penalty), leave such "
            "features out, or read the regularized coefficients",
            SeparationWarning,
            stacklevel=3,
        )
    if bool((lost & ~grown).any()):
        who = "constant among those at risk at events" if isinstance(problem.loss, Cox) else "constant"
        warnings.warn(
            f"no estimate of {named(lost & ~grown)}: columns are {who}, or others give them, so that the samples do "
            "not tell their coefficients apart; leave out what is redundant",
            UndeterminedWarning,
            stacklevel=3,
        )


class _Look(NamedTuple):
    """What the sites say about a model: means over samples, and their number; in coordinates about a centre."""

    x: Tensor
    loss: float
    gradient: Tensor
    hessian: Tensor
    outer: Tensor | None  # covariance of the gradient, from the samples' own
    samples: float
    centre: Tensor  # of every coordinate, zero for most

    @property
    def rounding(self) -> float:
        """By how much losses may differ that are the same."""
        return 20 * torch.finfo(torch.float64).eps * max(1.0, abs(self.loss))


def _look(x: Tensor, driver: Asker, outer: bool = False) -> _Look:
    """Ask about a model, in one exchange."""
    return _looks([x], driver, outer)[0]


def _looks(models: Sequence[Tensor], driver: Asker, outer: bool = False) -> list[_Look]:
    """Ask about some models, in one exchange."""
    centred = isinstance(driver.transport, SiloTransport) and driver.transport.moved
    if outer:
        asked = [information(x, centred=centred) for x in models]
    else:
        asked = [newton(x, torch.ones(len(x), dtype=torch.bool), ALL, centred=centred) for x in models]
    return [_looked(x, sums, driver.centre) for x, sums in zip(models, driver.ask(asked), strict=True)]


def _looked(x: Tensor, sums: Sums, about: Tensor | None) -> _Look:
    """What the sites said about a model.

    A column whose deviation from its centre is rounding is constant, and taken for zero there.
    """
    d, outer = len(x), sums.get("outer")
    H = sums["hessian"]
    if outer is None:  # a triangle
        i, j = torch.triu_indices(d, d)
        H = x.new_empty(d, d)
        H[i, j] = H[j, i] = sums["hessian"]
    weight, _, count = sums["weight"].tolist()
    outputs = 1 if about is None else d // (len(about) + 1)
    centre = torch.zeros_like(x)
    if about is not None:
        centre = torch.cat([about, about.new_zeros(1)]).repeat_interleave(outputs)
    ones = H.diagonal()[-outputs:].repeat(d // outputs)
    there = (centre == 0) | (H.diagonal() > ones * (_CONSTANT * centre).square())
    H, gradient = H / weight * there * there.unsqueeze(1), sums["gradient"] / weight * there
    covariance = None if outer is None else outer / weight**2 * there * there.unsqueeze(1)
    return _Look(x, float(sums["loss"]) / weight, gradient, H, covariance, count, centre)


class _Lost(NamedTuple):
    """Directions along which the samples do not tell models apart, and what a part along them is compared with."""

    directions: Tensor  # (d, k)
    base: Tensor  # (d, m)

    def touches(self, rows: Tensor) -> Tensor:
        """Which linear combinations of coefficients have a part along one of them."""
        return (rows @ self.directions).square().sum(1) > (rows @ self.base).square().sum(1)


class Estimates(NamedTuple):
    """Estimates with their covariance, and what the samples do not determine."""

    estimate: Tensor
    covariance: Tensor
    lost: list[_Lost]
    turned: _Turned
    endless: _Lost | None = None  # what grows without end
    samples: float = math.inf

    def rows(self, rows: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Linear combinations of coefficients as those of the estimate; which are undetermined, which have no end.

        If each is about a coordinate of its ``own``, a column of zeros is not missed in those of others.
        """
        absent, centre, basis, gone, outputs = self.turned
        back = torch.eye(len(centre), dtype=centre.dtype)
        for k in range(outputs):  # the intercepts of columns as they are
            back[k - outputs, k::outputs] -= centre[k::outputs]
        R = rows @ back
        unknown = (R[:, absent if own is None else absent & (centre != 0)] != 0).any(1)
        if own is not None:
            unknown |= absent[own]
        R[:, absent] = 0.0
        for lost in gone:
            unknown |= lost.touches(R)
        R = R @ basis
        for lost in self.lost:
            unknown |= lost.touches(R)
        return R, unknown, torch.zeros_like(unknown) if self.endless is None else self.endless.touches(R)

    def combined(self, rows: Tensor, own: Tensor | None = None) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        """Linear combinations of coefficients, their covariance, and which are known; NaN where they are not."""
        R, lost, endless = self.rows(rows, own)
        known = ~(lost | endless).numpy()
        center, covariance = (R @ self.estimate).numpy(), (R @ self.covariance @ R.T).numpy()
        center[~known] = covariance[~known] = covariance[:, ~known] = math.nan
        return center, covariance, known


class _Turned(NamedTuple):
    """Coordinates in which no direction is too short for a Hessian, beside those of columns about their centre."""

    absent: Tensor  # mask of columns that are constant, at zero if the centre is
    centre: Tensor  # what columns are taken about
    basis: Tensor  # (d, k), coefficients are this times coordinates
    gone: list[_Lost]  # directions along which columns are all but zero
    outputs: int = 1


def _as_they_are(look: _Look, outputs: int = 1) -> _Turned:
    """The coordinates of columns about their centre."""
    return _Turned(look.hessian.diagonal() == 0, look.centre, torch.eye(len(look.x), dtype=look.x.dtype), [], outputs)


def _turns(driver: Asker, outputs: int) -> bool:
    """Whether who answers can do so in other coordinates."""
    return isinstance(driver.transport, SiloTransport) and outputs == 1


def _turned(look: _Look, driver: Asker, until: contextlib.ExitStack, outputs: int) -> tuple[_Look, _Turned]:
    """The same look in coordinates in which short directions are columns of their own, which the Hessian then tells.

    Directions along which columns are no longer than their rounding are left out.
    """
    made, H = _as_they_are(look, outputs), look.hessian
    size = H.diagonal() + H[-1, -1] * look.centre.square()  # of columns as they are, in units of the Hessian
    for _ in range(_TURNS if _turns(driver, outputs) else 0):
        V, values, scale = _spectrum(look.hessian)
        rounded = (_ROUNDING * V).square().T @ size  # of what is left of a column, in units of it
        sure = values > rounded.clamp(min=_PLAIN)
        if bool(sure.all()):
            break
        length = torch.where(sure, values, 1.0).sqrt()
        blur = 10 * _ROUNDING * float((size / look.hessian.diagonal())[scale > 0].max()) ** 0.5
        base = made.basis @ (V[:, sure] * (blur / values[sure]).clamp(min=_PART))
        y, turn = length * (V.T @ (scale**2 * look.x)), V / length
        until.enter_context(driver.transport.turned(turn))
        clean = _cleaned(_look(y, driver).hessian, sure)
        y, turn = torch.linalg.solve(clean, y), turn @ clean
        until.enter_context(driver.transport.turned(clean))
        look = _look(y, driver)
        size = (turn.square() * size.unsqueeze(1)).sum(0)
        there = look.hessian.diagonal() > _CONSTANT**2 * size
        gone = _Lost(made.basis @ turn[:, ~there], base)
        made = made._replace(basis=made.basis @ turn[:, there], gone=[*made.gone, gone])
        until.enter_context(driver.transport.turned(torch.eye(len(y), dtype=y.dtype)[:, there]))
        part = look.hessian[there][:, there]
        look = look._replace(x=y[there], gradient=look.gradient[there], hessian=part, centre=look.centre[there])
        size = size[there]
    return look, made


def _cleaned(H: Tensor, sure: Tensor) -> Tensor:
    """Coordinates in which short columns have no part along the sure ones: what rounding has left in eigenvectors."""
    made = torch.eye(len(H), dtype=H.dtype)
    part = torch.linalg.lstsq(H[sure][:, sure], H[sure][:, ~sure]).solution
    made[sure.unsqueeze(1) & ~sure] = -part.flatten()
    return made


def _spectrum(H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvectors V and values of H with unit diagonals, V in its own coordinates; and the roots of its diagonal.

    Columns of zeros are left out.
    """
    there = (H.diagonal() > 0).nonzero().squeeze(1)
    scale = H.diagonal().sqrt()
    values, vectors = torch.linalg.eigh(H[there][:, there] / scale[there] / scale[there].unsqueeze(1))
    V = H.new_zeros(len(H), len(there))
    V[there] = vectors / scale[there].unsqueeze(1)
    return V, values, scale


def _inverse(H: Tensor) -> tuple[Tensor, list[_Lost]]:
    """A root S of the inverse of H, M = S S', on what H determines; and what it does not.

    All are found with unit diagonals, so that units of columns do not matter. Columns of zeros are left out. Lost is
    what has a part along a direction whose eigenvalue is rounding, beyond the rounding of the direction itself; and
    what has most of its variance along directions whose eigenvalues are hardly known.
    """
    V, values, _ = _spectrum(H)
    kept = values > 10 * len(values) * _ROUNDING
    null, V, values = V[:, ~kept], V[:, kept], values[kept]
    S = V / values.sqrt()
    return S, [_Lost(null, V * (10 * _ROUNDING / values).clamp(min=_PART)), _Lost(math.sqrt(_SURE) * V / values, S)]


def _maximum(
    problem: Problem, look: _Look, robust: bool, prior: float, driver: Asker, unbiased: bool = False
) -> Estimates:
    """The maximum of the likelihood, or of its product with a power of Jeffreys' prior; or less its bias.

    Samples have other weights at the maximum than where the steps began. A direction that has become too short for the
    Hessian on the way is a column of its own in steps that go on from there.
    """
    for _ in range(_TURNS):
        found = _found_from(problem, look, robust, prior, driver, unbiased)
        basis = found.turned.basis
        short = any(bool(one.touches(basis).any()) for one in found.lost)
        if not short or found.endless is not None or not _turns(driver, outputs_of(problem)):
            break
        look = _look(basis @ found.estimate, driver)
    return found


def _found_from(problem: Problem, look: _Look, robust: bool, prior: float, driver: Asker, unbiased: bool) -> Estimates:
    """The same, in the coordinates that the Hessian where steps begin asks for."""
    with contextlib.ExitStack() as until:
        look, turned = _turned(look, driver, until, outputs_of(problem))
        look = _with_prior(look, prior, driver, outputs_of(problem))
        found = _climbed(problem, look, robust, prior, driver)._replace(turned=turned)
        if unbiased and found.endless is None:
            found = found._replace(estimate=found.estimate - _bias(found.estimate, driver))
        return found


def _bias(x: Tensor, driver: Asker) -> Tensor:
    """The first order of the bias of a maximum x; two exchanges."""
    look = _look(x, driver, outer=True)
    S, J = _inverse(look.hessian)[0], look.outer
    assert J is not None
    M = S @ S.T
    V = M @ J @ M
    ends = _looks([x + e * s for s in S.T for e in (-_APART, _APART)], driver, outer=True)
    sums = [(M * one.outer).sum() - (V * one.hessian).sum() for one in ends if one.outer is not None]
    traces = torch.stack(sums)
    made: Tensor = S @ (traces[1::2] - traces[::2]) / (4 * _APART)
    return made


def _with_prior(look: _Look, prior: float, driver: Asker, outputs: int) -> _Look:
    """The same of f - (a/2n) log det H; one more exchange, with second differences of gradients."""
    if prior == 0:
        return look
    S = _inverse(look.hessian)[0]
    none = torch.zeros(len(look.x), dtype=torch.bool)
    centred = isinstance(driver.transport, SiloTransport) and driver.transport.moved
    near = [newton(look.x + e * s, none, ALL, centred=centred) for s in S.T for e in (-_APART, _APART)]
    third = sum(sums["gradient"] / sums["weight"][0] - look.gradient for sums in driver.ask(near)) / _APART**2
    rest = torch.arange(len(look.x)) % outputs >= min(outputs - 1, 1)  # of several classes all but the first
    _, values, scale = _spectrum(look.hessian[rest][:, rest])
    volume = float(values[-S.shape[1] :].log().sum() + 2 * scale[scale > 0].log().sum())
    power = prior / (2 * look.samples)
    there = look.hessian.diagonal() > 0
    return look._replace(loss=look.loss - power * volume, gradient=look.gradient - power * there * third)


def _climbed(problem: Problem, look: _Look, robust: bool, prior: float, driver: Asker) -> Estimates:
    """The maximum, by Newton steps that are cut where the loss would not fall."""
    before, slow, steep, close = math.inf, 0, look.hessian, False
    S, null = _inverse(look.hessian)
    for _ in range(_STEPS if prior == 0 else _MORE_STEPS):
        gain = float((S.T @ look.gradient).square().sum())
        spread = _dispersion(problem, look, S.shape[1])
        size = math.sqrt(look.samples * gain / spread) if spread > 0 else 0.0  # of the next step, in standard errors
        close = size <= (_CLOSE if prior == 0 else _NEARLY) or (size > before / 2 and gain <= look.rounding)
        slow = slow + 1 if size > before / 2 and before < _FLAT and prior == 0 else 0
        if close or slow == _SLOW:
            break
        steep = steep if slow else look.hessian
        last, (look, whole) = look, _downhill(problem, look, -S @ (S.T @ look.gradient), gain, driver, prior)
        if look is last:
            break
        before = size if whole else math.inf
        S, null = _inverse(look.hessian)
    endless = None
    if not close:  # of steps that led nowhere no direction is known: all of them are lost
        S, endless = _receding(_inverse(steep)[0], look.hessian if slow == _SLOW else torch.zeros_like(look.hessian))
    estimate = look.x - S @ (S.T @ look.gradient)
    spread = _dispersion(problem, look, S.shape[1])
    if robust:
        look = _look(estimate, driver, outer=True)
        S = _root(look.hessian, S)
    M = S @ S.T
    J = look.outer if look.outer is not None else look.hessian * spread / look.samples
    return Estimates(estimate, M @ J @ M, null, _as_they_are(look), endless, look.samples)


def rank_of(H: Tensor) -> int:
    """How many directions a Hessian determines."""
    return int(_inverse(H)[0].shape[1])


def _root(H: Tensor, S: Tensor) -> Tensor:
    """A root of the inverse of H on the range of S."""
    values, vectors = torch.linalg.eigh(S.T @ H @ S)
    made: Tensor = S @ (vectors / values.sqrt())
    return made


def _receding(S: Tensor, H: Tensor) -> tuple[Tensor, _Lost]:
    """The directions along which the curvature has vanished since it had the inverse S S'; a root on the others."""
    values, vectors = torch.linalg.eigh(S.T @ H @ S)
    stays = values > _VANISHED
    lost = _Lost(S @ vectors[:, ~stays], _SHARE * S)
    return S @ (vectors[:, stays] / values[stays].sqrt()), lost


def _downhill(
    problem: Problem, look: _Look, move: Tensor, gain: float, driver: Asker, prior: float = 0.0
) -> tuple[_Look, bool]:
    """The model after a step, and whether it was a whole one; the same model if none lowers the loss.

    Each try is an exchange.
    """
    t = 1.0
    while t > _SHORTEST:
        tried = _with_prior(_look(look.x + t * move, driver), prior, driver, outputs_of(problem))
        rise = tried.loss - look.loss
        if rise <= look.rounding - 1e-4 * t * gain:
            return tried, t == 1.0
        t = min(max(t * t * gain / (2 * (rise + t * gain)), t / 10), t / 2)  # where a parabola has its minimum
    return look, False


def _refined(problem: Problem, look: _Look, robust: bool, driver: Asker) -> Estimates:
    """Two steps with nodewise regressions; the second from x with its clearly nonzero coordinates moved."""
    x, bias = look.x, problem.bias
    M = nodewise(look.hessian, look.samples, bias)
    lost = [_dependent(look.hessian, M)]
    if look.samples > len(x):
        lost += _inverse(look.hessian)[1]
    estimate = x - M @ look.gradient
    J = look.hessian * _dispersion(problem, look, _rank(look)) / look.samples
    clear = (x != 0) & (estimate.abs() > math.sqrt(2 * math.log(max(len(x), 2))) * (M @ J @ M.T).diagonal().sqrt())
    if bias:
        clear[-1] = True
    for one in lost:
        clear &= ~one.touches(torch.eye(len(x), dtype=x.dtype))
    look, _ = _downhill(problem, look, torch.where(clear, estimate - x, 0.0), 0.0, driver)
    if robust:
        look = _look(look.x, driver, outer=True)
    M = nodewise(look.hessian, look.samples, bias)
    J = look.hessian * _dispersion(problem, look, _rank(look)) / look.samples if look.outer is None else look.outer
    return Estimates(look.x - M @ look.gradient, M @ J @ M.T, lost, _as_they_are(look), samples=look.samples)


def _rank(look: _Look) -> int:
    """How many coordinates the model uses, those that depend on others not counted."""
    used = (look.x != 0).nonzero().squeeze(1)
    return rank_of(look.hessian[used][:, used])


def _dispersion(problem: Problem, look: _Look, rank: int) -> float:
    """The variance of the residuals of a linear model, NaN if there are too few; 1 for the others."""
    if not isinstance(problem.loss, LeastSquares):
        return 1.0
    return 2 * look.loss * look.samples / (look.samples - rank) if look.samples > rank else math.nan


def _dependent(H: Tensor, M: Tensor) -> _Lost:
    """Coordinates that are a combination of those that their nodewise regression takes, such as a column twice.

    With fewer samples than coordinates every one is a combination of all others, so that these are no measure.
    """
    scale = torch.where(H.diagonal() > 0, H.diagonal(), 1.0).sqrt()
    C = H / scale / scale.unsqueeze(1)
    lost = torch.zeros(len(H), dtype=torch.bool)
    for j in (H.diagonal() > 0).nonzero().squeeze(1).tolist():
        near = (M[j] != 0) | (C[j].abs() > 1 - 100 * _ALIKE)
        near[j] = False
        at = near.nonzero().squeeze(1)
        lost[j] = float((_inverse(C[at][:, at])[0].T @ C[at, j]).square().sum()) > 1 - _ALIKE
    return _Lost(torch.eye(len(H), dtype=H.dtype)[:, lost] / scale.unsqueeze(1), _PART * (1 / scale).diag())


def nodewise(H: Tensor, samples: float, free_last: bool = False, factor: float = 1.0) -> Tensor:
    """An approximate inverse of a Hessian: a lasso of each coordinate on the others, from H alone.

    Row j is (1, -gamma_j) / tau_j^2 with gamma_j = argmin gamma'H gamma/2 - H_j'gamma + lambda |gamma|_1 on coordinates
    of unit scale, lambda = sqrt(2 log d / samples), as in van de Geer et al. (2014), section 2.1.1. The intercept, if
    it is the last coordinate, is not regularized in the others' regressions. Columns of zeros are left out.
    """
    d, there = len(H), H.diagonal() > 0
    scale = torch.where(there, H.diagonal(), 1.0).sqrt()
    C = H / scale / scale.unsqueeze(1)
    lam = torch.full((d, 1), factor * math.sqrt(2 * math.log(max(d, 2)) / samples), dtype=H.dtype)
    if free_last:
        lam[-1] = 0.0
    step = 1 / max(float(torch.linalg.eigvalsh(C)[-1]), 1e-300)  # none may be left
    eye = torch.eye(d, dtype=torch.bool)
    G = torch.zeros_like(C)  # columns are gamma_j
    Y, momentum = G, 1.0
    for _ in range(_ITERATIONS):
        moved = torch.nn.functional.relu((V := Y - step * (C @ Y - C)).abs() - step * lam) * V.sign()
        moved = moved.masked_fill(eye, 0.0)
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        if float((moved - G).abs().max()) < 1e-9:
            G = moved
            break
        restart = float(((Y - moved) * (moved - G)).sum()) > 0
        Y = moved if restart else moved + (momentum - 1) / following * (moved - G)
        G, momentum = moved, 1.0 if restart else following
    tau = (C.diagonal() - (C * G).sum(0)).clamp(min=1e-12)  # C_jj - C_j'gamma_j
    rows = (there.diag().to(H.dtype) - G.T) / tau.unsqueeze(1)
    return rows / scale / scale.unsqueeze(1)


def _table(problem: Problem, x: Tensor, found: Estimates, level: float, site: str | None) -> pd.DataFrame:
    names, rows, at = contrasts(problem, site)
    columns = {"coefficient": (rows @ x).numpy()} | intervals(problem, rows, found, level, at)
    if (units := _units(problem)) is not None:
        own = intervals(problem, rows @ units, found, level, at)
        assert problem.silos.recipe is not None
        features, joint = [*problem.silos.feature_names, ""], problem.silos.recipe.joint
        shared = [features[j // outputs_of(problem)] in joint for j in at.tolist()]
        for values in own.values():
            values[shared] = math.nan
        columns |= {f"unit_{k}": v for k, v in own.items()}
    return pd.DataFrame(columns, index=names)


def intervals(
    problem: Problem, rows: Tensor, found: Estimates, level: float, own: Tensor | None = None
) -> dict[str, Floats]:
    """Estimates, intervals and p-values of linear combinations of the coefficients, which may have their ``own``."""
    half = float(scipy.special.ndtri((1 + level) / 2))
    R, lost, endless = found.rows(rows, own)
    center, variance = (R @ found.estimate).numpy(), ((R @ found.covariance) * R).sum(1).clamp(min=0).numpy()
    center[(lost | endless).numpy()] = math.nan
    se = np.where(np.isnan(center), math.nan, np.sqrt(variance))
    columns = {"estimate": np.where(np.isnan(se), math.nan, center), "se": se}
    columns |= {"lower": center - half * se, "upper": center + half * se, "z": center / np.where(se > 0, se, math.nan)}
    columns["p"] = 2 * scipy.special.ndtr(-np.abs(columns["z"]))
    kind = _RATIOS.get(type(problem.loss))
    if kind is not None:
        ends = {"ratio": "estimate", "lower": "lower", "upper": "upper"}
        with np.errstate(over="ignore"):  # a bound of which hardly anything is known
            columns |= {f"{kind}_{name}": np.exp(columns[of]) for name, of in ends.items()}
    return columns


def _units(problem: Problem) -> Tensor | None:
    """The linear map from coefficients to those per unit of a column, where a recipe knows it."""
    recipe = problem.silos.recipe
    if recipe is None:
        return None
    d = problem.dimension // outputs_of(problem) - problem.bias
    made, shift = recipe.original(np.eye(d), np.zeros(d))
    if problem.bias:
        made = np.block([[made, np.zeros((d, 1))], [shift, np.ones((1, 1))]])
    return torch.from_numpy(np.kron(made, np.eye(outputs_of(problem))))


def bootstrap(
    problem: Problem,
    x: Any,
    *,
    draws: Annotated[int, at.Ge(2)] = 200,
    level: Inside = 0.95,
    seed: Natural = 0,
    tolerance: ZeroOrMore = 1e-6,
    driver: Driver | None = None,
    checkpoint: str | pathlib.Path | None = None,
    resume: bool = False,
    on_exchange: Callable[[Driver], None] | None = None,
) -> pd.DataFrame:
    """Percentile intervals from fits on weighted samples, all of them in the same exchanges.

    Every site draws Poisson(1) weights for its samples, the bootstrap of data whose size is not known beforehand.
    Intervals are those of the regularized coefficients; ``selected`` is how often a coefficient was not zero.

    Parameters
    ----------
    problem : Problem
        A linear model with a smooth loss.
    x : Tensor, array, Run or estimator
        Its solution, or what has one, where the fits begin.
    draws : int
        How many.
    level : float
        Of the intervals.
    seed : int
        Of the weights.
    tolerance : float
        Of the optimality measure.
    driver, checkpoint, resume, on_exchange
        As in :func:`fedcomposite.path`.
    """
    check_given(bootstrap, locals())
    x = as_vector(x).double()
    with driving(bootstrap, locals()) as driver:
        plan = plan_of(problem, driver.centre, tolerance=tolerance)
        plans = [replace(plan, rows=Rows("bootstrap", k, draws, seed=seed)) for k in range(draws)]
        fits = driver.run([fit(problem.regularizer, x, one) for one in plans])
    models = torch.stack([one.x for one in fits]).numpy()
    lower, upper = np.quantile(models, [(1 - level) / 2, (1 + level) / 2], axis=0)
    columns = {"coefficient": x.numpy(), "se": models.std(0, ddof=1), "lower": lower, "upper": upper}
    return pd.DataFrame(columns | {"selected": (models != 0).mean(0)}, index=list(problem.coordinate_names))


def adjusted(p: Sequence[float]) -> Floats:
    """P-values adjusted for their number, by Holm's method."""
    values = np.asarray(p, float)
    order = np.argsort(values)
    steps = np.maximum.accumulate(values[order] * (len(values) - np.arange(len(values))))
    made = np.empty_like(values)
    made[order] = np.minimum(steps, 1.0)
    return made
