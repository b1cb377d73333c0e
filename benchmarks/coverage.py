"""How often 95 % intervals hold the truth, and how many wrong features stability selection lets through.

    python -m benchmarks.coverage                          # everything; some ten minutes of one core
    python -m benchmarks.coverage --jobs 14 --sets 400     # rows side by side
    python -m benchmarks.coverage --sets 20 --only poisson
    python -m benchmarks.coverage --only "logistic, many" --seed 200   # data sets on which nothing was chosen

Every data set has four sites, features with correlations 0.5^|j - k|, some coefficients of 0.5 or -0.5 and the others
zero. Heterogeneous sites differ in size (2 : 1 : 1 : 1), and in the mean and the deviation of every feature. A
lasso is fitted over the sites, its strength chosen by ``fc.cross_validate`` (three folds), and intervals are those of
``fc.confidence`` at lambda.min and at lambda.1se. Coverage is the share of intervals that hold the truth, of
coefficients that are not zero and of those that are; beside it, that of Wald's intervals of an unregularized fit to the
pooled samples by statsmodels. There are 5, 10 and 50 samples per coordinate, the intercept among these. Data sets in
which the maximum of the likelihood does not exist are counted and left out of both.

"Few samples": five for each of 12 and of 20 coordinates of a logistic model, of which the maximum of the likelihood is
too large, with powers of Jeffreys' prior beside it (``confidence(jeffreys=)``). All data sets count, those in which the
likelihood alone has no maximum without its column.

"Many" features: fewer than five samples per coordinate, nodewise regressions, a lasso of strength sqrt(log p / n).
Stability selection allows one wrong feature in expectation: the mean over data sets has to be below that.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

import fedcomposite as fc

SITES, NONZERO = 4, 5
KINDS = "min", "1se", "statsmodels"
RATIOS = 5, 10, 50
FEATURES, USED = 11, 6  # with the intercept twelve coordinates
MORE = 19  # features, for a look at what their number does
LOSSES = {"linear": "least_squares", "logistic": "logistic", "poisson": "poisson"}
FEW = "logistic, few samples"
POWERS = 0.0, 0.5, 1.0  # of Jeffreys' prior
MANY = {  # loss, samples per site, features
    "linear, many features": ("least_squares", 50, 150),
    "logistic, many features": ("logistic", 100, 120),
}


def drawn(
    loss: str, sizes: list[int], features: int, seed: int, used: int = NONZERO, different: bool = False
) -> tuple[fc.Silos, np.ndarray]:
    generator = np.random.default_rng(seed)
    at = np.arange(features)
    root = np.linalg.cholesky(0.5 ** np.abs(at[:, None] - at[None, :]))
    truth = np.zeros(features)
    truth[generator.choice(features, used, replace=False)] = generator.choice([-0.5, 0.5], used)
    arrays = []
    for samples in sizes:
        X = generator.normal(size=(samples, features)) @ root.T
        if different:
            X = X * np.exp(0.4 * generator.normal(size=features)) + 0.7 * generator.normal(size=features)
        z = X @ truth
        if loss == "least_squares":
            y = z + generator.normal(size=samples)
        elif loss == "logistic":
            y = (generator.random(samples) < 1 / (1 + np.exp(-z))).astype(float)
        else:
            y = generator.poisson(np.exp(z)).astype(float)
        arrays.append((X, y))
    return fc.Silos.from_arrays(arrays), truth


def problem_of(loss: str, silos: fc.Silos, features: int) -> fc.Problem:
    n = len(silos.targets)
    size = 1.0 if loss == "least_squares" else 0.5
    lam = size * math.sqrt(math.log(features) / n)
    return fc.Problem(silos, loss=loss, regularizer=fc.regularizers.L1(lam), bias=True, weights="samples")


def held(table: Any, truth: np.ndarray) -> np.ndarray:
    """Which intervals hold the truth."""
    lower, upper = (table[k].to_numpy()[: len(truth)] for k in ("lower", "upper"))
    return (lower <= truth) & (truth <= upper)


def wald(loss: str, silos: fc.Silos, truth: np.ndarray) -> np.ndarray:
    """Statsmodels' own intervals, of pooled samples without a regularizer."""
    import pandas as pd
    import statsmodels.api as sm

    families = {"least_squares": "Gaussian", "logistic": "Binomial", "poisson": "Poisson"}
    family = getattr(sm.families, families[loss])()
    X = np.column_stack([silos.features.numpy(), np.ones(len(silos.targets))])
    found = sm.GLM(silos.targets.numpy(), X, family=family).fit()
    return held(pd.DataFrame(found.conf_int(), columns=["lower", "upper"]), truth)


def chosen(model: str, ratio: int, different: bool, sets: int, first: int, features: int = FEATURES) -> str:
    """A row of the table: coverage at both strengths that a cross-validation chooses, beside Wald's."""
    loss, n = LOSSES[model], ratio * (features + 1)
    small = n // 5 if different else n // SITES
    sizes = [n - (SITES - 1) * small, *[small] * (SITES - 1)]
    inside: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
    some, apart, began = [], 0, time.perf_counter()
    for seed in range(first, first + sets):
        silos, truth = drawn(loss, sizes, features, seed, USED, different)
        problem = fc.Problem(silos, loss=loss, regularizer=fc.regularizers.L1(1.0), bias=True, weights="samples")
        cv = fc.cross_validate(problem, folds=3, count=3, ratio=0.1, seed=seed, tolerance=1e-2)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            tables = {choice: fc.confidence(problem, cv.solution(choice)) for choice in ("min", "1se")}
        if said:  # no maximum of the likelihood
            apart += 1
            continue
        for choice, table in tables.items():
            inside[choice].append(held(table, truth))
        inside["statsmodels"].append(wald(loss, silos, truth))
        some.append(truth != 0)
    used = np.array(some)
    shares = [f"{100 * np.array(v)[at].mean():.1f} %" for v in inside.values() for at in (used, ~used)]
    sites = "heterogeneous" if different else "alike"
    return (
        f"| {model} | {features + 1} | {n} | {sites} | {' | '.join(shares)} |   "
        f"{len(some)} sets, {apart} without a maximum, {time.perf_counter() - began:.0f} s"
    )


def few(features: int, different: bool, sets: int, first: int) -> str:
    """Coverage with five samples per coordinate, for powers of Jeffreys' prior."""
    n, began = RATIOS[0] * (features + 1), time.perf_counter()
    small = n // 5 if different else n // SITES
    sizes = [n - (SITES - 1) * small, *[small] * (SITES - 1)]
    inside: dict[float, list[tuple[np.ndarray, np.ndarray]]] = {power: [] for power in POWERS}
    for seed in range(first, first + sets):
        silos, truth = drawn("logistic", sizes, features, seed, USED, different)
        problem = problem_of("logistic", silos, features)
        x = fc.solve(problem, tolerance=1e-3).solution
        for power, found in inside.items():
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                table = fc.confidence(problem, x, jeffreys=power)
            if not said:
                found.append((held(table, truth), truth != 0))
    shares = []
    for pairs in inside.values():
        holds, some = (np.array(one) for one in zip(*pairs, strict=True))
        shares += [f"{100 * holds[at].mean():.1f} %" for at in (some, ~some)]
    return (
        f"| {features + 1} | {n} | {'heterogeneous' if different else 'alike'} | {' | '.join(shares)} |   "
        f"{', '.join(str(len(v)) for v in inside.values())} sets, {time.perf_counter() - began:.0f} s"
    )


def nodewise(kind: str, sets: int, first: int) -> str:
    loss, samples, features = MANY[kind]
    inside, lengths, truths = [], [], []
    began = time.perf_counter()
    for seed in range(first, first + sets):
        silos, truth = drawn(loss, [samples] * SITES, features, seed)
        problem = problem_of(loss, silos, features)
        model = fc.LogisticRegression if loss == "logistic" else fc.LinearRegression
        x = torch.from_numpy(model(regularizer=problem.regularizer.h, tolerance=1e-6).fit(silos).solution_)
        table = fc.confidence(problem, x).iloc[:features]
        inside.append(held(table, truth))
        lengths.append((table.upper - table.lower).to_numpy())
        truths.append(truth != 0)
    holds, some = np.array(inside), np.array(truths)
    shares = holds.mean(), holds[some].mean(), holds[~some].mean()
    return (
        f"{kind:25s} n {SITES * samples:4d} p {features:4d}   coverage {100 * shares[0]:.1f} %, of nonzero "
        f"{100 * shares[1]:.1f} %, of zero {100 * shares[2]:.1f} %; mean length {np.mean(lengths):.3f}   "
        f"{sets} sets, {time.perf_counter() - began:.0f} s"
    )


def selection(sets: int, first: int) -> str:
    wrong, right = [], []
    began = time.perf_counter()
    bound = math.nan
    for seed in range(first, first + sets):
        silos, truth = drawn("least_squares", [50] * SITES, 60, 1000 + seed)
        problem = problem_of("least_squares", silos, 60)
        found = fc.stability(problem, draws=30, errors=1.0, threshold=0.75, seed=seed, count=15, ratio=0.1)
        bound = found.bound
        chosen = found.share >= found.threshold
        wrong.append(int((chosen & (truth == 0)).sum()))
        right.append(int((chosen & (truth != 0)).sum()))
    return (
        f"stability selection       n  200 p   60  {np.mean(wrong):.3f} wrong features on average (bound {bound:.2f}), "
        f"right ones {np.mean(right):.2f} of {NONZERO}   {sets} sets, {time.perf_counter() - began:.0f} s"
    )


def said(line: str) -> str:
    """A heading."""
    return line


def lines(only: str, sets: int, first: int) -> list[Callable[[], str]]:
    """What makes the lines of the tables, in their order."""
    made: list[Callable[[], str]] = []
    models = [name for name in LOSSES if name.startswith(only)]
    if models:
        columns = ("model", "coordinates", "samples", "sites", *(f"{k}: nonzero | zero" for k in KINDS))
        made.append(partial(said, f"| {' | '.join(columns)} |"))
    for model in models:
        made += [partial(chosen, model, ratio, d, sets, first) for ratio in RATIOS for d in (False, True)]
    if "logistic" in models:
        made += [partial(chosen, "logistic", RATIOS[0], d, sets, first, MORE) for d in (False, True)]
    if FEW.startswith(only):
        columns = ("coordinates", "samples", "sites", *(f"power {p:g}: nonzero | zero" for p in POWERS))
        made.append(partial(said, f"| {' | '.join(columns)} |"))
        made += [partial(few, features, d, sets, first) for features in (FEATURES, MORE) for d in (False, True)]
    made += [partial(nodewise, kind, sets, first) for kind in MANY if kind.startswith(only)]
    return [*made, partial(selection, sets, first)] if "stability".startswith(only) else made


def line(make: Callable[[], str]) -> str:
    """One of them, on one core."""
    torch.set_num_threads(1)
    return make()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=120, help="data sets of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the first data set; the others follow it")
    parser.add_argument("--only", default="", help="those whose name begins so")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    wanted = lines(options.only, options.sets, options.seed)
    if options.jobs == 1:
        for make in wanted:
            print(line(make), flush=True)
        return
    with ProcessPoolExecutor(options.jobs) as pool:
        for text in pool.map(line, wanted):
            print(text, flush=True)


if __name__ == "__main__":
    main()
