"""Paths and cross-validation over sites beside pooled references on the same folds.

    python -m benchmarks.analyst                     # Heart Disease, ILEA schools, Wisconsin, A9A, w8a
    python -m benchmarks.analyst --only heart --lambdas 50 --folds 5

For every data set: exchanges and bytes of a path and of a cross-validation, seconds, the largest difference of a
coefficient from the reference (skglm on the pooled samples, at every ``--stride``-th strength and fold), and whether
the reference's scores give the same lambda.min and lambda.1se. The reference is solved at *all* strengths and folds
with ``--stride 1``, which is needed for the last.
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np
from skglm import GeneralizedLinearEstimator
from skglm.datafits import Logistic, Quadratic
from skglm.penalties import L1
from skglm.solvers import AndersonCD, ProxNewton

import fedcomposite as fc
from fedcomposite.estimators import fold_of_samples

SETS = {  # silos, loss
    "heart": (lambda: fc.data.load("heart_disease").standardize(), "logistic"),
    "ilea": (lambda: fc.data.load("ilea_schools"), "least_squares"),
    "wisconsin": (lambda: fc.data.load("wisconsin").partition("iid", clients=5), "logistic"),
    "a9a": (lambda: fc.data.load("a9a").partition("iid", clients=10), "logistic"),
    "w8a": (lambda: fc.data.load("w8a").partition("iid", clients=10), "logistic"),
}


def reference(X: np.ndarray, y: np.ndarray, lambdas: np.ndarray, loss: str, which: list[int]) -> dict[int, np.ndarray]:
    """The pooled path, warm-started, at some strengths."""
    made = {}
    solver = ProxNewton if loss == "logistic" else AndersonCD
    datafit = Logistic() if loss == "logistic" else Quadratic()
    model = GeneralizedLinearEstimator(datafit, L1(1.0), solver(tol=1e-11, fit_intercept=True, warm_start=True))
    model.solver.max_iter = 200
    for k in which:
        model.penalty = L1(lambdas[k])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(X, y)
        made[k] = np.append(np.ravel(model.coef_), np.ravel(model.intercept_)[0])
    return made


def scores(X: np.ndarray, y: np.ndarray, models: dict[int, np.ndarray], loss: str) -> list[float]:
    z = [X @ x[:-1] + x[-1] for x in models.values()]
    if loss == "logistic":
        return [float(2 * np.logaddexp(0, -y * one).mean()) for one in z]
    return [float(np.mean((one - y) ** 2)) for one in z]


def compare(name: str, count: int, folds: int, stride: int) -> None:
    load, loss = SETS[name]
    silos = load()
    problem = fc.Problem(silos, loss=loss, regularizer=fc.regularizers.L1(1.0), bias=True, weights="samples")
    began = time.perf_counter()
    alone = fc.path(problem, count=count, ratio=1e-3)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    cv = fc.cross_validate(problem, folds=folds, count=count, ratio=1e-3)
    n, p = silos.features.shape
    print(
        f"{name}: {len(silos)} sites, {n} samples, {p} features\n"
        f"  path of {count}: {alone.exchanges} exchanges, {alone.bytes_up / 1e6 / len(silos):.2f} MB up per site, "
        f"{seconds:.1f} s, converged {bool(alone.converged.all())}\n"
        f"  {folds} folds: {cv.exchanges} exchanges, {cv.bytes_up / 1e6 / len(silos):.2f} MB up per site, "
        f"{time.perf_counter() - began:.1f} s; lambda.min {cv.lambda_min:.5g}, lambda.1se {cv.lambda_1se:.5g}",
        flush=True,
    )
    X, y = silos.features.double().numpy(), silos.targets.double().numpy()
    y = np.where(y > 0, 1.0, -1.0) if loss == "logistic" else y
    which = list(range(0, count, stride))
    whole = reference(X, y, cv.lambdas, loss, which)
    worst = max(np.abs(x - cv.path.solutions[k].numpy()).max() for k, x in whole.items())
    fold, table, apart = fold_of_samples(problem, folds), [], 0.0
    for f in range(folds if stride == 1 else 1):
        out = fold == f
        models = reference(X[~out], y[~out], cv.lambdas, loss, which)
        apart = max(apart, *(np.abs(x - cv.models[f, k].numpy()).max() for k, x in models.items()))
        table.append(scores(X[out], y[out], models, loss))
    print(f"  largest difference from skglm: path {worst:.1e}, folds {apart:.1e}")
    if stride == 1:
        each, weights = np.array(table), np.bincount(fold)
        mean = np.average(each, axis=0, weights=weights)
        se = np.sqrt(np.average((each - mean) ** 2, axis=0, weights=weights) / (folds - 1))
        best = int(np.argmin(mean))
        first = int(np.flatnonzero(mean <= mean[best] + se[best])[0])
        same = cv.index_min == best, cv.index_1se == first
        print(f"  same lambda.min: {same[0]}, same lambda.1se: {same[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--lambdas", type=int, default=100)
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument("--stride", type=int, default=1)
    options = parser.parse_args()
    for name in SETS:
        if name.startswith(options.only):
            compare(name, options.lambdas, options.folds, options.stride)


if __name__ == "__main__":
    main()
