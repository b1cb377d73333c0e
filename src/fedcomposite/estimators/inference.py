"""How sure coefficients are: confidence intervals and p-values from the aggregated Hessian, and the bootstrap.

A regularized model is biased. One Newton step on the loss alone takes the bias off to first order,

    b = x - M g(x),     M ~ H(x)^-1,     var b = M J M,

with the gradient g of f, its Hessian H and the covariance J of g, all at x and all of them sums over sites (van de
Geer, Bühlmann, Ritov & Dezeure 2014; Zhang & Zhang 2014; Javanmard & Montanari 2014). With many more samples than
coordinates M is the inverse. Otherwise it comes from nodewise regressions on H alone, with no further exchange.

What is left is of second order in x's distance from the truth, and a logistic model's Hessian changes over that
distance: with few samples per coordinate, where x is shrunk much, one step leaves coefficients too small by a good part
of their standard error. So a second step follows there, from x with its clearly nonzero coordinates moved to where the
first step put them. These are known to order 1/sqrt(n), so that the start is as near to the truth as the theory asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import annotated_types as at
import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy.special
import torch
from torch import Tensor

from fedcomposite._validation import Inside, Natural, ZeroOrMore, as_vector
from fedcomposite.estimators.newton import Plan, fit
from fedcomposite.estimators.sites import Local, Sites, together
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import LeastSquares, Logistic
from fedcomposite.problems.requests import Rows, Sums, information
from fedcomposite.runtime.fit import check_given

Floats = npt.NDArray[np.float64]

_SAMPLES_PER_COORDINATE = 5  # from which on the Hessian is inverted
_ITERATIONS = 2000


def confidence(
    problem: Problem,
    x: Any,
    *,
    level: Inside = 0.95,
    inverse: Literal["auto", "exact", "nodewise"] = "auto",
    robust: bool | None = None,
    sites: Sites | None = None,
) -> pd.DataFrame:
    """Confidence intervals and p-values of all coefficients of a linear or logistic model.

    Parameters
    ----------
    problem : Problem
        With the loss ``"least_squares"`` or ``"logistic"``.
    x : Tensor or array
        Its regularized solution.
    level : float
        Of the intervals.
    inverse : {"auto", "exact", "nodewise"}
        How M is found; the inverse from five samples per coordinate on.
    robust : bool, optional
        Variances from the samples' own gradients (sandwich) in place of the model's; always with ``"uniform"``
        weights of clients or weighted samples, where the model's do not apply.
    sites : Sites, optional
        Who answers; one exchange, two for a logistic model with nodewise regressions.

    Returns
    -------
    DataFrame
        A row per coordinate: ``coefficient`` (regularized), ``estimate`` (bias removed), ``se``, ``lower``, ``upper``,
        ``z``, ``p``, and for a logistic model ``odds_ratio`` with ``odds_lower`` and ``odds_upper``, all of them on the
        scale of the model: per standard deviation of a column that was standardized. Where a recipe prepared the
        features also per unit of the column, a year or a mg/dL: ``unit_estimate``, ``unit_lower``, ``unit_upper``,
        ``unit_odds_ratio``, ``unit_odds_lower``, ``unit_odds_upper``. What the samples do not determine (constant
        columns, columns that depend on others) is NaN.
    """
    check_given(confidence, locals())
    loss, x = problem.loss, as_vector(x).double()
    if not isinstance(loss, LeastSquares | Logistic):
        raise ValueError(f"confidence intervals are for 'least_squares' and 'logistic'; for {loss} take bootstrap(...)")
    where = Local(problem) if sites is None else sites
    weighted = problem.weighting == "uniform" or problem.silos.weights is not None
    robust = weighted if robust is None else robust
    estimate, covariance, inverted = _step(problem, x, inverse, robust, where)
    if not inverted and isinstance(loss, Logistic):
        se = covariance.diagonal().clamp(min=0).sqrt()
        clear = (x != 0) & (estimate.abs() > math.sqrt(2 * math.log(max(len(x), 2))) * se)
        if problem.bias:
            clear[-1] = True
        estimate, covariance, _ = _step(problem, torch.where(clear, estimate, x), inverse, robust, where)
    return _table(problem, x, estimate, covariance, level)


def _step(problem: Problem, x: Tensor, inverse: str, robust: bool, sites: Sites) -> tuple[Tensor, Tensor, bool]:
    """One Newton step on the loss alone, its covariance, and whether the Hessian was inverted; one exchange.

    The variance of what the samples do not determine is NaN.
    """
    [sums] = sites.ask([information(x)])
    weight, _, count = sums["weight"].tolist()
    H = sums["hessian"] / weight
    exact = count >= _SAMPLES_PER_COORDINATE * len(x) if inverse == "auto" else inverse == "exact"
    M = torch.linalg.pinv(H, hermitian=True) if exact else nodewise(H, count, problem.bias)
    estimate = x - M @ (sums["gradient"] / weight)
    if robust:
        J = sums["outer"] / weight**2
    else:
        J = H * _dispersion(problem, sums, estimate - x, int((x != 0).sum())) / count
    covariance = M @ J @ M.T
    if exact:
        covariance.diagonal()[(M @ H).diagonal() < 1 - 1e-6] = math.nan
    return estimate, covariance, exact


def _dispersion(problem: Problem, sums: Sums, move: Tensor, used: int) -> float:
    """The variance of the residuals, 1 for a logistic model."""
    if isinstance(problem.loss, Logistic):
        return 1.0
    weight, _, count = map(float, sums["weight"])
    squares = 2 * float(sums["loss"]) / weight
    if count >= _SAMPLES_PER_COORDINATE * len(move):  # of the model without bias: it is least squares' own
        change = 2 * float(sums["gradient"] @ move + move @ sums["hessian"] @ move / 2) / weight
        return (squares + change) * count / (count - len(move))
    return squares * count / max(count - used, 1)


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


def _table(problem: Problem, x: Tensor, estimate: Tensor, covariance: Tensor, level: float) -> pd.DataFrame:
    half = float(scipy.special.ndtri((1 + level) / 2))
    odds = isinstance(problem.loss, Logistic)
    center, se = estimate.numpy(), np.sqrt(covariance.diagonal().clamp(min=0).numpy())
    known = ~np.isnan(se)
    columns = {"coefficient": x.numpy(), "estimate": np.where(known, center, math.nan), "se": se}
    columns |= {"lower": center - half * se, "upper": center + half * se, "z": center / np.where(se > 0, se, math.nan)}
    columns["p"] = 2 * scipy.special.ndtr(-np.abs(columns["z"]))
    columns |= _odds(columns) if odds else {}
    if (units := _units(problem)) is not None:
        V = np.where(known, np.where(known[:, None], covariance.numpy(), 0.0), 0.0)
        error = np.where(known, np.sqrt((units @ V @ units.T).diagonal()), math.nan)
        per = np.where(known, units @ np.where(known, center, 0.0), math.nan)
        own = {"estimate": per, "lower": per - half * error, "upper": per + half * error}
        columns |= {f"unit_{k}": v for k, v in {**own, **(_odds(own) if odds else {})}.items()}
    return pd.DataFrame(columns, index=list(problem.coordinate_names))


def _odds(columns: Mapping[str, Floats]) -> dict[str, Floats]:
    names = {"odds_ratio": "estimate", "odds_lower": "lower", "odds_upper": "upper"}
    return {name: np.exp(columns[of]) for name, of in names.items()}


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
    sites: Sites | None = None,
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
    sites : Sites, optional
        Who answers.
    """
    check_given(bootstrap, locals())
    x = as_vector(x).double()
    plan = Plan(tolerance=tolerance)
    plans = [replace(plan, rows=Rows("bootstrap", k, draws, seed=seed)) for k in range(draws)]
    fits = together([fit(problem.regularizer, x, one) for one in plans], Local(problem) if sites is None else sites)
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
