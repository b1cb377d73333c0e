"""Sites that differ: a model of each site on its own, and what they have in common.

Estimates y_i with variances v_i are taken for draws about one number (fixed effect: weights 1/v_i), or about numbers
that are themselves drawn about a mean with the variance tau^2 (random effects: weights 1/(v_i + tau^2)).
"""

from __future__ import annotations

import math
import pathlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy  # which loads what is used of it
import torch
from torch import Tensor

from fedcomposite._validation import Inside, as_vector
from fedcomposite.analysis.inference import LIKELIHOODS, SeparationWarning, UndeterminedWarning, contrasts, estimated
from fedcomposite.analysis.next_site import further_site
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import Cox, Logistic, Multinomial, Poisson
from fedcomposite.results import Result, counted
from fedcomposite.runtime.driver import Driver, driving
from fedcomposite.runtime.fit import check_given
from fedcomposite.runtime.protocol import Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
Method = Literal["reml", "dl"]
Prediction = Literal["distribution", "t"]
_GRID = 400  # variances between sites among which the likeliest is looked for
_RATIOS: dict[type, str] = {
    Logistic: "odds ratio", Multinomial: "odds ratio", Poisson: "rate ratio", Cox: "hazard ratio",
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class SiteEffects(Result):
    """A model of each site on its own, and what they have in common."""

    sites: pd.DataFrame
    """A row per site and coefficient: ``site``, ``name``, ``estimate``, ``se``, ``lower``, ``upper``; NaN where a
    site's samples do not determine it."""
    combined: pd.DataFrame
    """A row per coefficient, with the columns of :func:`meta_analysis`."""
    notes: dict[str, str]
    """Of sites without some or all estimates: why."""
    ratio: str = ""
    """What the exponential of a coefficient is: ``"odds ratio"`` and so on."""

    def to_frame(self) -> pd.DataFrame:
        return self.combined

    def _line(self) -> str:
        most = self.combined["i2"].max()
        apart = "" if math.isnan(most) else f", I2 up to {most:.0f} %"
        return f"{counted(self.sites['site'].nunique(), 'site')}, {len(self.combined)} coefficients{apart}"

    def plot(self, names: Sequence[str] | None = None, path: str | pathlib.Path | None = None) -> Figure:
        """A forest plot of each coefficient, or of those that are named; a file if ``path`` is given."""
        from fedcomposite.plots.charts import draw_forests

        chosen = [n for n in self.combined.index if n not in ("(intercept)", "bias")] if names is None else list(names)
        if unknown := [n for n in chosen if n not in self.combined.index]:
            raise ValueError(f"{unknown[0]!r} is no coefficient; there are {', '.join(self.combined.index)}")
        return draw_forests(self.sites, self.combined.loc[chosen], path, ratio=self.ratio)


def meta_analysis(
    estimates: npt.ArrayLike,
    errors: npt.ArrayLike,
    *,
    method: Method = "reml",
    hartung_knapp: bool = True,
    prediction: Prediction = "distribution",
    level: Inside = 0.95,
) -> pd.DataFrame:
    """Estimates of several sites combined, as R's metafor does.

    Parameters
    ----------
    estimates, errors : array_like
        Estimates and their standard errors, ``(sites,)`` or ``(sites, coefficients)``; NaN where a site has none.
    method : {"reml", "dl"}
        How the variance between sites is estimated: by the restricted likelihood, or by moments (DerSimonian-Laird).
    hartung_knapp : bool
        Hartung and Knapp's standard error with quantiles of t, in place of normal ones, which are too narrow for a few
        sites.
    prediction : {"distribution", "t"}
        The interval for a further site: over all variances between sites that the estimates allow (Nagashima, Noma and
        Furukawa 2019), or at the estimated one with k - 2 degrees of freedom (Higgins, Thompson and Spiegelhalter
        2009), as metafor has it, which is too short for few sites that are much alike.
    level : float
        Of the intervals.

    Returns
    -------
    DataFrame
        A row per coefficient: ``sites``; ``fixed`` with ``fixed_se``, ``fixed_lower``, ``fixed_upper`` (one number for
        all sites); ``estimate`` with ``se``, ``lower``, ``upper``, ``p`` (the mean over sites that differ); ``tau2``,
        their variance; Cochran's ``q`` with ``q_p``, the p-value of no difference; ``i2``, the share of the variance
        that is between sites, in percent; ``predict_lower`` and ``predict_upper``, where the number of a further site
        lies (three sites or more).

    Examples
    --------
    >>> import fedcomposite as fc
    >>> fc.meta_analysis([0.1, 0.5, 0.4], [0.1, 0.1, 0.2])[["fixed", "estimate", "tau2"]].round(3)
       fixed  estimate   tau2
    0  0.311     0.324  0.039
    """
    check_given(meta_analysis, locals())
    y, se = (np.asarray(one, float) for one in (estimates, errors))
    if y.shape != se.shape or y.ndim not in (1, 2):
        raise ValueError(f"estimates {y.shape} and errors {se.shape}, must have one shape: sites, or sites by columns")
    if (se[np.isfinite(se)] <= 0).any():
        raise ValueError("errors, must be above zero")
    y, se = y.reshape(len(y), -1), se.reshape(len(se), -1)
    made = [_combined(a, b**2, method, hartung_knapp, prediction, level) for a, b in zip(y.T, se.T, strict=True)]
    return pd.DataFrame(made)


def _combined(
    y: Floats, v: Floats, method: Method, hartung_knapp: bool, prediction: Prediction, level: float
) -> dict[str, float]:
    known = np.isfinite(y) & np.isfinite(v)
    y, v = y[known], v[known]
    k = len(y)
    names = ("fixed", "fixed_se", "fixed_lower", "fixed_upper", "estimate", "se", "lower", "upper", "p", "tau2", "q",
             "q_p", "i2", "predict_lower", "predict_upper")  # fmt: skip
    found: dict[str, float] = {"sites": k, **dict.fromkeys(names, math.nan)}
    if k == 0:
        return found
    w = 1 / v
    fixed, fixed_se = float(w @ y / w.sum()), float(w.sum() ** -0.5)
    half = float(scipy.special.ndtri((1 + level) / 2))
    found |= {"fixed": fixed, "fixed_se": fixed_se}
    found |= {"fixed_lower": fixed - half * fixed_se, "fixed_upper": fixed + half * fixed_se}
    if k == 1:
        return found
    q, typical = float(w @ (y - fixed) ** 2), (k - 1) * w.sum() / (w.sum() ** 2 - w @ w)
    tau2 = max(0.0, (q - (k - 1)) / (w.sum() - w @ w / w.sum())) if method == "dl" else _restricted(y, v)
    w = 1 / (v + tau2)
    mean = float(w @ y / w.sum())
    se = float(w.sum() ** -0.5)
    freedom = math.inf
    if hartung_knapp:
        se, freedom = math.sqrt(float(w @ (y - mean) ** 2) / ((k - 1) * w.sum())), k - 1
    half = float(scipy.special.stdtrit(freedom, (1 + level) / 2))
    p = 2 * float(scipy.special.stdtr(freedom, -abs(mean) / se)) if se > 0 else math.nan
    found |= {"estimate": mean, "se": se, "lower": mean - half * se, "upper": mean + half * se, "p": p, "tau2": tau2}
    found |= {"q": q, "q_p": float(scipy.special.chdtrc(k - 1, q)), "i2": 100 * tau2 / (tau2 + typical)}
    if k > 2 and prediction == "t":
        half = float(scipy.special.stdtrit(k - 2, (1 + level) / 2)) * math.sqrt(tau2 + se**2)
        found |= {"predict_lower": mean - half, "predict_upper": mean + half}
    elif k > 2:
        low, high = further_site(y, v, level, hartung_knapp)
        found |= {"predict_lower": low, "predict_upper": high}
    return found


def _restricted(y: Floats, v: Floats) -> float:
    """The variance between sites at which the restricted likelihood is largest."""

    def slope(tau2: float) -> float:
        w = 1 / (v + tau2)
        mean = w @ y / w.sum()
        return float(w**2 @ (y - mean) ** 2 - w.sum() + w @ w / w.sum())

    def likelihood(tau2: float) -> float:
        w = 1 / (v + tau2)
        mean = w @ y / w.sum()
        return float(np.log(w).sum() - math.log(w.sum()) - w @ (y - mean) ** 2)

    most = float(((y - y.mean()) ** 2).sum()) + float(v.max())
    least = 1e-6 * float(v.min())
    grid = np.concatenate([[0.0], np.geomspace(least, max(most, 10 * least), _GRID)])
    best = int(np.argmax([likelihood(t) for t in grid]))
    low, high = float(grid[max(0, best - 1)]), float(grid[min(_GRID, best + 1)])
    if slope(low) <= 0:
        return low if best else 0.0
    return float(scipy.optimize.brentq(slope, low, high, xtol=1e-15, rtol=8.9e-16))


class _OneSite:
    """A driver that asks about the samples of one site."""

    def __init__(self, driver: Driver, number: int) -> None:
        self._driver, self.transport = driver, driver.transport
        self._rows = Rows("site", driver.ids[number], len(driver.names), held=True)

    @property
    def centre(self) -> Tensor | None:
        """What features are taken about."""
        return self._driver.centre

    @property
    def copies(self) -> int:
        """How many completed copies of the samples there are."""
        return self._driver.copies

    def ask(self, requests: Sequence[Any]) -> list[Any]:
        """The sums over this site's samples."""
        numbers = [one.rows.copy_number for one in requests]
        rows = [replace(self._rows, copy_number=k) for k in numbers]
        return self._driver.ask([replace(one, rows=each) for one, each in zip(requests, rows, strict=True)])


def by_site(
    problem: Problem,
    *,
    method: Method = "reml",
    hartung_knapp: bool = True,
    prediction: Prediction = "distribution",
    level: Inside = 0.95,
    driver: Driver | None = None,
    checkpoint: str | pathlib.Path | None = None,
    resume: bool = False,
    on_exchange: Callable[[Driver], None] | None = None,
) -> SiteEffects:
    """Fit a linear, logistic, Poisson or Cox model at each site on its own, and combine the estimates.

    Every model is the maximum of its site's likelihood, the regularizer of the problem left out. A site whose samples
    do not determine a coefficient has none of it, and a note says why. A recipe's ``site`` terms are in the intercepts,
    which are those of the sites. In a federation each site's sums are asked for
    alone, so that its policy has to allow answers by site: not in secure sums.

    Parameters
    ----------
    problem : Problem
        With the loss ``"least_squares"``, ``"logistic"``, ``"poisson"`` or ``"cox"``.
    method, hartung_knapp, prediction, level
        As in :func:`meta_analysis`.
    driver, checkpoint, resume, on_exchange
        As in :func:`fedcomposite.path`. About seven exchanges for each site.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=5, features=3, samples=60)
    >>> problem = fc.Problem(silos, bias=True, weights="samples")
    >>> found = fc.by_site(problem)
    >>> found.sites.groupby("site").size().tolist(), len(found.combined)
    ([4, 4, 4, 4, 4], 4)
    """
    check_given(by_site, locals())
    if not isinstance(problem.loss, LIKELIHOODS):
        kinds = "'least_squares', 'logistic', 'multinomial', 'poisson' and 'cox'"
        raise ValueError(f"{problem.loss}: models by site are of {kinds}")
    if problem.silos.recipe is not None and problem.silos.recipe.per_site is not None:
        raise ValueError("by_site: a site alone has its own coefficients as it is; prepare the silos without per_site")
    robust = problem.silos.weights is not None
    tables, notes = [], {}
    with driving(by_site, locals()) as driver:
        sites = [name for name in driver.names if name != "(held by nobody)"]
        names = contrasts(problem, sites[0])[0]
        for number, site in enumerate(sites):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                start = torch.zeros(problem.dimension, dtype=torch.float64)
                found = estimated(problem, start, level, "exact", robust, 0.0, _OneSite(driver, number), site)
            told = [one for one in said if issubclass(one.category, SeparationWarning | UndeterminedWarning)]
            if told:
                notes[site] = "; ".join(dict.fromkeys(str(one.message) for one in told))  # once for all copies
            columns = found[["estimate", "se", "lower", "upper"]].reset_index(names="name")
            tables.append(columns.assign(site=site)[["site", "name", "estimate", "se", "lower", "upper"]])
    table = pd.concat(tables, ignore_index=True)
    y, se = (table.pivot(index="site", columns="name", values=v).loc[sites, names] for v in ("estimate", "se"))
    options: dict[str, Any] = {"method": method, "hartung_knapp": hartung_knapp, "prediction": prediction}
    combined = meta_analysis(y.to_numpy(), se.to_numpy(), level=level, **options)
    combined.index = pd.Index(names, name="name")
    return SiteEffects(table, combined, notes, _RATIOS.get(type(problem.loss), ""))


def site_coefficients(problem: Problem, x: Any, *, unit: bool = False) -> pd.DataFrame:
    """The coefficients of every site in a model whose silos have ``per_site``: the common one and what the site adds.

    A row per feature; ``common``, which is that of a site that took no part, and a column per site. Of several classes
    a row per feature and class.

    Parameters
    ----------
    problem : Problem
        One of silos that a recipe with ``per_site`` prepared.
    x : array, Run or Analysis
        A model of it.
    unit : bool
        Whether they are per unit of the columns, rather than per standard deviation.
    """
    recipe = problem.silos.recipe
    if recipe is None or (step := recipe.per_site) is None:
        raise ValueError("site_coefficients: these silos have one coefficient per feature: the recipe has no per_site")
    weights = as_vector(x)[: problem.layout[0].stop].double().numpy().reshape(problem.layout[0].shape)
    weights = recipe.original(weights)[0] if unit else weights
    names = recipe.features[: len(recipe.features) - len(step.sites) * len(step.columns)]
    place = {name: j for j, name in enumerate(recipe.features)}
    table = np.repeat(weights[: len(names), None], 1 + len(step.sites), axis=1)
    for name in step.columns:
        table[place[name], 1:] += weights[[place[term] for term in step.terms(name)]]
    table = np.moveaxis(table, 1, -1).reshape(-1, table.shape[1])
    return pd.DataFrame(table, index=list(problem.coordinate_names[: len(table)]), columns=["common", *step.sites])
