"""Tests of several coefficients at once: Wald's, and the likelihood ratio of nested models.

With b the maximum of the likelihood and V its covariance, Wald's statistic of R b = 0 is b'R'(R V R')^-1 R b. The
likelihood ratio is twice what the logarithm of the likelihood loses where the coefficients are zero; of a linear model,
whose variance is estimated too, n log(RSS without / RSS with). Both are chi-squared with as many degrees of freedom as
the samples determine of the coefficients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy  # which loads what is used of it
import torch

from fedcomposite.analysis.imputed import each_copy, joint_statistic
from fedcomposite.analysis.inference import LIKELIHOODS, contrasts, found_of, needs_sandwich, outputs_of, rank_of
from fedcomposite.analysis.newton import fit, plan_of
from fedcomposite.analysis.solve import explained
from fedcomposite.analysis.strengths import only
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import LeastSquares
from fedcomposite.regularizers import Zero
from fedcomposite.regularizers.factors import places_of
from fedcomposite.runtime.driver import Driver, driver_of
from fedcomposite.runtime.fit import check_given
from fedcomposite.runtime.protocol import ALL, newton

Term = str | int
"""A feature, by its name or number, or a column."""
Terms = Sequence[Term | Sequence[Term]] | Mapping[str, Sequence[Term]]
"""Features or columns, each tested by itself; or groups of them, which may have names."""

_TOLERANCE = 1e-12
_TERM = (str, int, np.integer)


def wald_test(
    problem: Problem, terms: Terms | None = None, *, robust: bool | None = None, driver: Driver | None = None
) -> pd.DataFrame:
    """Test whether groups of coefficients are all zero, at the maximum of the likelihood.

    Parameters
    ----------
    problem : Problem
        A model with a likelihood; its regularizer is left out.
    terms : list or mapping, optional
        What is tested: features, or columns, which stand for all features that a recipe made of them (levels, terms of
        a spline, sites), by names or features by their numbers; a list of them is one test, and a mapping gives it a
        name. Every column if left out.
    robust : bool, optional
        As for :func:`fedcomposite.confidence`.
    driver : Driver, optional
        Who answers.

    Returns
    -------
    DataFrame
        A row per test: ``statistic``, ``df``, ``p``. Where gaps were imputed by draws, Li, Raghunathan and Rubin's
        statistic times ``df``, with a p-value of F.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=5, features=3, samples=40)
    >>> problem = fc.Problem(silos, bias=True, weights="samples")
    >>> fc.wald_test(problem, {"first two": ["x0", "x1"]}).df.tolist()
    [2]
    """
    check_given(wald_test, locals())
    driver, groups = driver_of(problem, driver), _groups(problem, terms)
    start = torch.zeros(problem.dimension, dtype=torch.float64)
    sandwich, (_, rows, own) = needs_sandwich(problem, robust, driver), contrasts(problem)
    every = [found_of(problem, start, "exact", sandwich, 0.0, one).combined(rows, own) for one in each_copy(driver)]
    known = np.all([one for *_, one in every], axis=0)
    made = {}
    for name, places in groups.items():
        at = [k for k, j in enumerate(own.tolist()) if j in places]
        if not known[at].all():
            made[name] = {"statistic": np.nan, "df": int(known[at].sum()), "p": np.nan}
            continue
        size = np.sqrt(every[0][1].diagonal()[at])
        b = torch.from_numpy(np.stack([q[at] / size for q, *_ in every]))
        V = torch.from_numpy(np.stack([one[np.ix_(at, at)] / size / size[:, None] for _, one, _ in every]))
        if len(every) > 1:
            statistic, rest = joint_statistic(b, V)
            p = float(scipy.special.fdtrc(len(at), rest, statistic))
            made[name] = {"statistic": len(at) * statistic, "df": len(at), "p": p}
        else:
            made[name] = _tested(float(b[0] @ torch.linalg.solve(V[0], b[0])), len(at))
    return pd.DataFrame.from_dict(made, orient="index")


def likelihood_ratio_test(
    problem: Problem, terms: Terms | None = None, *, driver: Driver | None = None
) -> pd.DataFrame:
    """Test whether groups of coefficients are all zero, by the models with and without them.

    Parameters
    ----------
    problem : Problem
        A model with a likelihood, of samples that count alike; its regularizer is left out.
    terms, driver
        As for :func:`wald_test`. All models are fitted in the same exchanges.

    Returns
    -------
    DataFrame
        A row per test: ``statistic``, ``df``, ``p``.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=5, features=3, samples=40)
    >>> problem = fc.Problem(silos, bias=True, weights="samples")
    >>> fc.likelihood_ratio_test(problem, [["x0", "x1"]]).df.tolist()
    [2]
    """
    check_given(likelihood_ratio_test, locals())
    driver, groups = driver_of(problem, driver), _groups(problem, terms)
    if driver.copies > 1:
        raise ValueError("the copies of imputed tables have a likelihood each: take wald_test, which combines them")
    if needs_sandwich(problem, None, driver):
        raise ValueError(
            "samples or sites that are weighted, and sums with noise, have no likelihood to compare: take wald_test"
        )
    d, plan = problem.dimension, plan_of(problem, driver.centre, tolerance=_TOLERANCE)
    kept = {name: ~torch.isin(torch.arange(d), torch.tensor(sorted(places))) for name, places in groups.items()}
    start = torch.zeros(d, dtype=torch.float64)
    fits = driver.run([fit(Zero(), start, plan), *(fit(only(free) or Zero(), start, plan) for free in kept.values())])
    for made in fits:
        if made.end == "endless":
            raise ValueError(
                f"{explained(problem, made.end, made.rounds, made.grown)}, or leave out what grows: there is no "
                "largest likelihood to compare"
            )
    whole, *others = fits
    where = whole.x if plan.centre is None else whole.seen.at
    [sums] = driver.ask([newton(where, torch.ones(d, dtype=torch.bool), ALL, centred=plan.centre is not None)])
    i, j = torch.triu_indices(d, d)
    H = start.new_empty(d, d)
    H[i, j] = H[j, i] = sums["hessian"]
    found = {}
    for (name, free), made in zip(kept.items(), others, strict=True):
        n, losses = whole.seen.total, (made.loss, whole.loss)
        linear = isinstance(problem.loss, LeastSquares)
        statistic = n * float(np.log(losses[0] / losses[1])) if linear else 2 * n * (losses[0] - losses[1])
        found[name] = _tested(max(statistic, 0.0), rank_of(H) - rank_of(H[free][:, free]))
    return pd.DataFrame.from_dict(found, orient="index")


def _tested(statistic: float, df: int) -> dict[str, Any]:
    return {"statistic": statistic, "df": df, "p": float(scipy.special.chdtrc(df, statistic)) if df else np.nan}


def _groups(problem: Problem, terms: Terms | None) -> dict[str, set[int]]:
    """The coordinates of each test."""
    if not isinstance(problem.loss, LIKELIHOODS):
        raise ValueError(f"{problem.loss} is no likelihood, so that there is no such test")
    recipe, each = problem.silos.recipe, outputs_of(problem)
    features = problem.dimension // each - problem.bias
    names = [name.rpartition("[")[0] if each > 1 else name for name in problem.coordinate_names[::each]][:features]
    sources = {} if recipe is None else recipe.sources
    if terms is None:
        terms = list(dict.fromkeys(sources.get(name, name) for name in names))
    given = terms.items() if isinstance(terms, Mapping) else [("", one) for one in _listed(terms, "terms")]
    groups = [(name, [one] if isinstance(one, _TERM) else _listed(one, name or "a test")) for name, one in given]
    found = {}
    for name, group in groups:
        places = [places_of(one, names, features, sources, "terms") for one in group]
        told = (one if isinstance(one, str) else names[at[0]] for one, at in zip(group, places, strict=True))
        found[name or ", ".join(told)] = {each * j + k for at in places for j in at for k in range(each)}
    return found


def _listed(given: object, what: str) -> list[Any]:
    """What is to be a list of terms."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(
            f"{what} = {given!r:.60}, must be a list of features or columns, such as ['age', 'sex'] or [0, 1]; "
            "a list in it is one test: [['age', 'sex']]"
        )
    return list(given)
