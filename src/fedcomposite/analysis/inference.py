"""How sure coefficients are: confidence intervals and p-values from the aggregated Hessian, and the bootstrap.

A regularized model is biased. With at least five samples per coordinate the bias is taken off altogether: Newton steps
on the loss alone lead from the regularized model to the maximum of the likelihood, and intervals are Wald's there,

    b = argmin f,     var b = M J M,     M = H(b)^-1,

with the Hessian H of f and the covariance J of its gradient: H times the variance of the residuals over the number of
samples where the model holds, or from the samples' own gradients (sandwich). All of them are sums over sites. Neither
depends on how strongly the model was regularized.

With fewer samples M comes from nodewise regressions on H, with no further exchange, and b = x - M g(x) takes the bias
off to first order (van de Geer, Bühlmann, Ritov & Dezeure 2014; Zhang & Zhang 2014; Javanmard & Montanari 2014). What
is left is of second order in x's distance from the truth: the Hessian of a strongly shrunk logistic model is not that
of the truth, its residuals are too large, and coefficients come out too small by a good part of their standard error.
So a second step follows, from x with its clearly nonzero coordinates moved to where the first step put them. These are
known to order 1/sqrt(n), so that the start is as near to the truth as the theory asks.

A maximum of the likelihood need not exist: where a category has no event, its coefficient grows without end. Newton
steps then go on by about one unit of the logarithm of the odds each, while they are worth less and less of a standard
error. That is how it is told; what grows is NaN, and a warning names it.
"""

from __future__ import annotations

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
import scipy.special
import torch
from torch import Tensor

from fedcomposite._validation import Inside, Natural, ZeroOrMore, as_vector
from fedcomposite.analysis.newton import Plan, fit
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import LeastSquares, Logistic, Poisson
from fedcomposite.runtime.driver import Driver, driver_of, driving
from fedcomposite.runtime.fit import check_given
from fedcomposite.runtime.protocol import ALL, Rows, information, newton

Floats = npt.NDArray[np.float64]

_SAMPLES_PER_COORDINATE = 5  # from which on the Hessian is inverted
_ITERATIONS = 2000  # of nodewise regressions
_RANK = 1e-11  # of a Hessian with unit diagonal: eigenvalues below are rounding
_PART = 1e-6  # of a combination of coefficients along a lost direction, from which on it is lost
_ALIKE = 1e-8  # share of a column's variance that is rounding
_STEPS = 40  # Newton steps at most
_CLOSE = 1e-6  # standard errors: a step so short is the last
_SHORTEST = 1e-6  # share of a step
_FLAT, _SLOW = 0.05, 3  # steps below so many standard errors that do not get half as long, and how many are too many
_VANISHED = 0.3  # share of its curvature that a direction keeps over these steps; e^-3 if it has no end
_SHARE = 0.1  # root of the share of a variance that lies along such directions


class SeparationWarning(UserWarning):
    """A coefficient has no finite estimate: some samples are told apart without error, or have no events."""


def confidence(
    problem: Problem,
    x: Any,
    *,
    level: Inside = 0.95,
    inverse: Literal["auto", "exact", "nodewise"] = "auto",
    robust: bool | None = None,
    driver: Driver | None = None,
) -> pd.DataFrame:
    """Confidence intervals and p-values of all coefficients of a linear, logistic or Poisson model.

    Parameters
    ----------
    problem : Problem
        With the loss ``"least_squares"``, ``"logistic"`` or ``"poisson"``.
    x : Tensor or array
        Its regularized solution.
    level : float
        Of the intervals.
    inverse : {"auto", "exact", "nodewise"}
        ``"exact"``: the maximum of the likelihood, with the inverse of the Hessian there; ``"nodewise"``: two steps
        from x, with an approximate inverse. ``"auto"`` takes the first from five samples per coordinate on.
    robust : bool, optional
        Variances from the samples' own gradients (sandwich) in place of the model's; always with ``"uniform"``
        weights of clients or weighted samples, where the model's do not apply.
    driver : Driver, optional
        Who answers; two exchanges for a linear model and for nodewise regressions, about six for others, and one more
        for sandwich errors at the maximum.

    Returns
    -------
    DataFrame
        A row per coordinate: ``coefficient`` (regularized), ``estimate`` (bias removed), ``se``, ``lower``, ``upper``,
        ``z``, ``p``, for a logistic model ``odds_ratio`` with ``odds_lower`` and ``odds_upper``, for counts
        ``rate_ratio``, ``rate_lower`` and ``rate_upper``, all of them on the scale of the model: per standard deviation
        of a column that was standardized. Where a recipe prepared the features also per unit of the column, a year or a
        mg/dL: ``unit_estimate``, ``unit_lower``, ``unit_upper``, ``unit_p``, and ``unit_odds_ratio`` or
        ``unit_rate_ratio`` with their bounds; the intercept is then that of columns at 0, with a p-value of its own.
        What the samples do not determine (constant columns, columns that depend on others) is NaN, and so is what grows
        without end, with a :class:`SeparationWarning`. Per unit, terms of splines and of products are NaN
        (:attr:`fedcomposite.data.FittedRecipe.joint`): a unit of one term is not a unit of the column.
    """
    check_given(confidence, locals())
    loss, x = problem.loss, as_vector(x).double()
    if not isinstance(loss, LeastSquares | Logistic | Poisson):
        kinds = "'least_squares', 'logistic' and 'poisson'"
        raise ValueError(f"confidence intervals are for {kinds}; for {loss} take bootstrap(...)")
    driver = driver_of(problem, driver)
    weighted = problem.weighting == "uniform" or problem.silos.weights is not None
    robust = weighted if robust is None else robust
    look = _look(x, driver)
    exact = look.samples >= _SAMPLES_PER_COORDINATE * len(x) if inverse == "auto" else inverse == "exact"
    found = (_maximum if exact else _refined)(problem, look, robust, driver)
    if found.endless is not None:
        grown = found.endless.touches(torch.eye(len(x), dtype=x.dtype)).tolist()
        names = ", ".join(name for name, g in zip(problem.coordinate_names, grown, strict=True) if g)
        warnings.warn(
            f"no finite estimate of {names}: Newton steps reach no maximum of the likelihood, as where a category has "
            "no event or outcomes can be told apart; leave such features out, or read the regularized coefficients",
            SeparationWarning,
            stacklevel=2,
        )
    return _table(problem, x, found, level)


class _Look(NamedTuple):
    """What the sites say about a model: means over samples, and their number."""

    x: Tensor
    loss: float
    gradient: Tensor
    hessian: Tensor
    outer: Tensor | None  # covariance of the gradient, from the samples' own
    samples: float

    @property
    def rounding(self) -> float:
        """By how much losses may differ that are the same."""
        return 20 * torch.finfo(torch.float64).eps * max(1.0, abs(self.loss))


def _look(x: Tensor, driver: Driver, outer: bool = False) -> _Look:
    """Ask about a model, in one exchange."""
    d = len(x)
    if outer:
        [sums] = driver.ask([information(x)])
        H = sums["hessian"]
    else:
        [sums] = driver.ask([newton(x, torch.ones(d, dtype=torch.bool), ALL)])
        i, j = torch.triu_indices(d, d)
        H = x.new_empty(d, d)
        H[i, j] = H[j, i] = sums["hessian"]
    weight, _, count = sums["weight"].tolist()
    covariance = sums["outer"] / weight**2 if outer else None
    return _Look(x, float(sums["loss"]) / weight, sums["gradient"] / weight, H / weight, covariance, count)


class _Lost(NamedTuple):
    """Directions along which the samples do not tell models apart, and how a part along them is measured."""

    directions: Tensor  # (d, k)
    metric: Tensor  # (d, d): v' metric^-1 v = 1 for each of them
    tolerance: float

    def touches(self, rows: Tensor) -> Tensor:
        """Which linear combinations of coefficients have a part along one of them."""
        part = (rows @ self.directions).square().sum(1)
        return part > self.tolerance**2 * ((rows @ self.metric) * rows).sum(1)


class _Found(NamedTuple):
    """Estimates with their covariance, and what the samples do not determine."""

    estimate: Tensor
    covariance: Tensor
    lost: list[_Lost]
    absent: Tensor  # mask of columns that are zero everywhere
    endless: _Lost | None = None  # what grows without end


def _inverse(H: Tensor) -> tuple[Tensor, _Lost]:
    """A root S of the inverse of H, M = S S', on what H determines; and what it does not.

    Both are found with unit diagonals, so that units of columns do not matter. Columns of zeros are left out of both.
    """
    there = (H.diagonal() > 0).nonzero().squeeze(1)
    scale = H.diagonal()[there].sqrt()
    values, vectors = torch.linalg.eigh(H[there][:, there] / scale / scale.unsqueeze(1))
    kept, padded = values > _RANK, H.new_zeros(len(H), len(there))
    padded[there] = vectors / scale.unsqueeze(1)
    metric = torch.zeros_like(H)
    metric[there, there] = 1 / scale**2
    return padded[:, kept] / values[kept].sqrt(), _Lost(padded[:, ~kept], metric, _PART)


def _maximum(problem: Problem, look: _Look, robust: bool, driver: Driver) -> _Found:
    """The maximum of the likelihood, by Newton steps that are cut where the loss would not fall."""
    before, slow, steep, close = math.inf, 0, look.hessian, False
    S, null = _inverse(look.hessian)
    for _ in range(_STEPS):
        gain = float((S.T @ look.gradient).square().sum())
        spread = _dispersion(problem, look, S.shape[1])
        size = math.sqrt(look.samples * gain / spread) if spread > 0 else 0.0  # of the next step, in standard errors
        close = size <= _CLOSE or (size > before / 2 and gain <= look.rounding)
        slow = slow + 1 if size > before / 2 and before < _FLAT else 0
        if close or slow == _SLOW:
            break
        steep = steep if slow else look.hessian
        last, (look, whole) = look, _downhill(look, -S @ (S.T @ look.gradient), gain, driver)
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
    return _Found(estimate, M @ J @ M, [null], look.hessian.diagonal() == 0, endless)


def _root(H: Tensor, S: Tensor) -> Tensor:
    """A root of the inverse of H on the range of S."""
    values, vectors = torch.linalg.eigh(S.T @ H @ S)
    made: Tensor = S @ (vectors / values.sqrt())
    return made


def _receding(S: Tensor, H: Tensor) -> tuple[Tensor, _Lost]:
    """The directions along which the curvature has vanished since it had the inverse S S'; a root on the others."""
    values, vectors = torch.linalg.eigh(S.T @ H @ S)
    stays = values > _VANISHED
    lost = _Lost(S @ vectors[:, ~stays], S @ S.T, _SHARE)
    return S @ (vectors[:, stays] / values[stays].sqrt()), lost


def _downhill(look: _Look, move: Tensor, gain: float, driver: Driver) -> tuple[_Look, bool]:
    """The model after a step, and whether it was a whole one; the same model if none lowers the loss.

    Each try is an exchange.
    """
    t = 1.0
    while t > _SHORTEST:
        tried = _look(look.x + t * move, driver)
        rise = tried.loss - look.loss
        if rise <= look.rounding - 1e-4 * t * gain:
            return tried, t == 1.0
        t = min(max(t * t * gain / (2 * (rise + t * gain)), t / 10), t / 2)  # where a parabola has its minimum
    return look, False


def _refined(problem: Problem, look: _Look, robust: bool, driver: Driver) -> _Found:
    """Two steps with nodewise regressions; the second from x with its clearly nonzero coordinates moved."""
    x, bias = look.x, problem.bias
    M = nodewise(look.hessian, look.samples, bias)
    lost = [_dependent(look.hessian, M)]
    if look.samples > len(x):
        lost.append(_inverse(look.hessian)[1])
    estimate = x - M @ look.gradient
    J = look.hessian * _dispersion(problem, look, _rank(look)) / look.samples
    clear = (x != 0) & (estimate.abs() > math.sqrt(2 * math.log(max(len(x), 2))) * (M @ J @ M.T).diagonal().sqrt())
    if bias:
        clear[-1] = True
    for one in lost:
        clear &= ~one.touches(torch.eye(len(x), dtype=x.dtype))
    look, _ = _downhill(look, torch.where(clear, estimate - x, 0.0), 0.0, driver)
    if robust:
        look = _look(look.x, driver, outer=True)
    M = nodewise(look.hessian, look.samples, bias)
    J = look.hessian * _dispersion(problem, look, _rank(look)) / look.samples if look.outer is None else look.outer
    return _Found(look.x - M @ look.gradient, M @ J @ M.T, lost, look.hessian.diagonal() == 0)


def _rank(look: _Look) -> int:
    """How many coordinates the model uses, those that depend on others not counted."""
    used = (look.x != 0).nonzero().squeeze(1)
    return int(_inverse(look.hessian[used][:, used])[0].shape[1])


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
        near = (M[j] != 0) | (C[j].abs() > 1 - _PART)
        near[j] = False
        at = near.nonzero().squeeze(1)
        lost[j] = float((_inverse(C[at][:, at])[0].T @ C[at, j]).square().sum()) > 1 - _ALIKE
    return _Lost(torch.eye(len(H), dtype=H.dtype)[:, lost] / scale.unsqueeze(1), (1 / scale**2).diag(), _PART)


def nodewise(H: Tensor, samples: float, free_last: bool = False, factor: float = 1.0) -> Tensor:
    """An approximate inverse of a Hessian: a lasso of each coordinate on the others, from H alone.

    Row j is (1, -gamma_j) / tau_j^2 with gamma_j = argmin gamma'H gamma/2 - H_j'gamma + lambda |gamma|_1 on coordinates
    of unit scale, lambda = sqrt(2 log d / samples), as in van de Geer et al. (2014), section 2.1.1. The intercept, if
    it is the last coordinate, is not regularized in the others' regressions.
    """
    d = len(H)
    scale = H.diagonal().clamp(min=torch.finfo(H.dtype).tiny).sqrt()
    C = H / scale / scale.unsqueeze(1)
    lam = torch.full((d, 1), factor * math.sqrt(2 * math.log(max(d, 2)) / samples), dtype=H.dtype)
    if free_last:
        lam[-1] = 0.0
    step = 1 / float(torch.linalg.eigvalsh(C)[-1])
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
    rows = (torch.eye(d, dtype=H.dtype) - G.T) / tau.unsqueeze(1)
    return rows / scale / scale.unsqueeze(1)


def _table(problem: Problem, x: Tensor, found: _Found, level: float) -> pd.DataFrame:
    columns = {"coefficient": x.numpy()} | _intervals(problem, np.eye(len(x)), found, level)
    if (units := _units(problem)) is not None:
        own = _intervals(problem, units, found, level)
        joint = [problem.coordinate_names.index(name) for name in problem.silos.recipe.joint]  # type: ignore[union-attr]
        for values in own.values():
            values[joint] = math.nan
        columns |= {f"unit_{k}": v for k, v in own.items() if k not in ("se", "z")}
    return pd.DataFrame(columns, index=list(problem.coordinate_names))


def _intervals(problem: Problem, rows: Floats, found: _Found, level: float) -> dict[str, Floats]:
    """Estimates, intervals and p-values of linear combinations of the coefficients; row j is about coordinate j."""
    half = float(scipy.special.ndtri((1 + level) / 2))
    R = torch.from_numpy(rows.copy())
    R[:, found.absent] = 0.0
    unknown = found.absent.clone()
    for lost in (*found.lost, *([] if found.endless is None else [found.endless])):
        unknown |= lost.touches(R)
    center, variance = (R @ found.estimate).numpy(), ((R @ found.covariance) * R).sum(1).clamp(min=0).numpy()
    center[unknown.numpy()] = math.nan
    se = np.where(np.isnan(center), math.nan, np.sqrt(variance))
    columns = {"estimate": np.where(np.isnan(se), math.nan, center), "se": se}
    columns |= {"lower": center - half * se, "upper": center + half * se, "z": center / np.where(se > 0, se, math.nan)}
    columns["p"] = 2 * scipy.special.ndtr(-np.abs(columns["z"]))
    kind = "odds" if isinstance(problem.loss, Logistic) else "rate" if isinstance(problem.loss, Poisson) else None
    if kind is not None:
        ends = {"ratio": "estimate", "lower": "lower", "upper": "upper"}
        with np.errstate(over="ignore"):  # a bound of which hardly anything is known
            columns |= {f"{kind}_{name}": np.exp(columns[of]) for name, of in ends.items()}
    return columns


def _units(problem: Problem) -> Floats | None:
    """The linear map from coefficients to those per unit of a column, where a recipe knows it."""
    recipe = problem.silos.recipe
    if recipe is None:
        return None
    d = problem.dimension - problem.bias
    per_unit, shift = recipe.original(np.eye(d), np.zeros(d))
    if not problem.bias:
        return per_unit
    return np.block([[per_unit, np.zeros((d, 1))], [shift, np.ones((1, 1))]])


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
    x : Tensor or array
        Its solution, where the fits begin.
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
        plan = Plan(tolerance=tolerance, centre=driver.centre)
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
