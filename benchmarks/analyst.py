"""Paths and cross-validation over sites beside pooled references on the same folds.

    python -m benchmarks.analyst                     # Heart Disease, ILEA schools, Wisconsin, A9A, w8a
    python -m benchmarks.analyst --only heart --lambdas 50 --folds 5

For every data set: exchanges and bytes of a path and of a cross-validation, seconds, and the largest differences from
the reference on the pooled samples, skglm for logistic regressions and scikit-learn's lasso for least squares, solved
at all strengths and folds; and whether the reference's own scores give the same lambda.min and lambda.1se.

Where columns depend on each other a minimiser need not be unique. It is if the columns whose slopes are as large as
lambda, and the ones of the intercept, are independent: there coefficients are compared. Margins and objectives are the
same for all minimisers, and are compared everywhere. ``KKT`` is the reference's own worst violation of optimality.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
from skglm import GeneralizedLinearEstimator
from skglm.datafits import Logistic
from skglm.penalties import L1
from skglm.solvers import ProxNewton
from sklearn.linear_model import Lasso

import fedcomposite as fc
from fedcomposite.analysis import fold_of_samples

Floats = npt.NDArray[np.float64]

SETS = {  # silos, loss, strengths, their least over the largest, folds
    "heart": (lambda: fc.data.load("heart_disease").standardize(), "logistic", 100, 1e-3, 10),
    "wisconsin": (lambda: fc.data.load("wisconsin").partition("iid", clients=5), "logistic", 50, 1e-3, 5),
    "ilea": (lambda: fc.data.load("ilea_schools"), "least_squares", 50, 1e-3, 5),
    "a9a": (lambda: fc.data.load("a9a").partition("iid", clients=10), "logistic", 15, 1e-2, 3),
    "w8a": (lambda: fc.data.load("w8a").partition("iid", clients=10), "logistic", 8, 1e-2, 3),
}
_EQUAL = 1e-5  # slopes within this share of lambda count as large as it


@dataclass
class Pooled:
    """Samples of which nothing is kept apart."""

    X: Floats
    y: Floats
    loss: str

    @property
    def solver_input(self) -> Any:
        """Columns that a coordinate descent reads in one piece, without their zeros where most are."""
        return scipy.sparse.csc_array(self.X) if np.mean(self.X != 0) < 0.3 else np.asfortranarray(self.X)

    def path(self, lambdas: Floats) -> Floats:
        """Models with their intercepts last, warm-started."""
        made, X = [], self.solver_input
        if self.loss == "logistic":
            solver = ProxNewton(tol=1e-6, fit_intercept=True, warm_start=True, max_iter=200, max_pn_iter=1000)
            model: Any = GeneralizedLinearEstimator(Logistic(), L1(1.0), solver)
        else:
            model = Lasso(warm_start=True, precompute=True, tol=1e-14, max_iter=20_000)
        for lam in lambdas:
            if self.loss == "logistic":
                model.penalty = L1(lam)
            else:
                model.set_params(alpha=lam)
            for tolerance in (1e-6, 1e-8, 1e-10) if self.loss == "logistic" else (1e-14,):
                (model.solver if self.loss == "logistic" else model).tol = tolerance
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model.fit(X, self.y)
                x = self.polished(np.append(np.ravel(model.coef_), np.ravel(model.intercept_)[0]), lam)
                if self.violation(x, lam) <= 1e-12:
                    break
            made.append(x)
        return np.array(made)

    def polished(self, x: Floats, lam: float) -> Floats:
        """The last digits: Newton steps on the support with its signs, for as long as they mend anything."""
        found = self.violation(x, lam)
        for _ in range(4):
            some, p = np.append(x[:-1] != 0, True), 1 / (1 + np.exp(-self.margins(x)))
            weight = p * (1 - p) if self.loss == "logistic" else np.ones_like(p)
            A = np.column_stack([self.X, np.ones(len(p))])[:, some]
            slope = (self.slopes(x) + lam * np.sign(np.append(x[:-1], 0.0)))[some]
            moved = x.copy()
            moved[some] -= np.linalg.lstsq(A.T @ (weight[:, None] * A) / len(p), slope, rcond=1e-12)[0]
            if (miss := self.violation(moved, lam)) >= found or (moved * x < 0)[:-1].any():
                break
            x, found = moved, miss
        return x

    def margins(self, x: Floats) -> Floats:
        """Of all samples."""
        return np.asarray(self.X @ x[:-1] + x[-1])

    def losses(self, z: Floats) -> Floats:
        """Of samples with these margins."""
        return np.logaddexp(0, -self.y * z) if self.loss == "logistic" else (z - self.y) ** 2 / 2

    def objective(self, x: Floats, lam: float) -> float:
        """The mean loss and the lasso."""
        return float(self.losses(self.margins(x)).mean() + lam * np.abs(x[:-1]).sum())

    def slopes(self, x: Floats) -> Floats:
        """The gradient of the mean loss."""
        z = self.margins(x)
        slope = -self.y / (1 + np.exp(self.y * z)) if self.loss == "logistic" else z - self.y
        return np.append(self.X.T @ slope, slope.sum()) / len(self.y)

    def violation(self, x: Floats, lam: float) -> float:
        """By how much x misses the optimality conditions."""
        g, w = self.slopes(x), x[:-1]
        miss = np.where(w != 0, np.abs(g[:-1] + lam * np.sign(w)), np.maximum(np.abs(g[:-1]) - lam, 0))
        return float(max(miss.max(), abs(g[-1])))

    def unique(self, x: Floats, lam: float) -> bool:
        """Whether there is one minimiser: the columns that may be nonzero in any one are independent."""
        may = np.abs(self.slopes(x)[:-1]) >= lam * (1 - _EQUAL)
        columns = np.column_stack([self.X[:, may], np.ones(len(self.y))])
        columns /= np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
        sizes = np.linalg.eigvalsh(columns.T @ columns)
        return bool(sizes[0] > 1e-9)


@dataclass
class Apart:
    """How far two sets of models are from each other, at worst."""

    kkt: float = 0.0
    coefficient: float = 0.0
    margin: float = 0.0
    objective: float = 0.0
    unique: list[bool] = field(default_factory=list)

    def see(self, data: Pooled, lam: float, theirs: Floats, ours: Floats) -> None:
        """Compare one pair."""
        self.kkt = max(self.kkt, data.violation(theirs, lam))
        self.margin = max(self.margin, float(np.abs(data.margins(theirs) - data.margins(ours)).max()))
        best = data.objective(theirs, lam)
        self.objective = max(self.objective, abs(data.objective(ours, lam) - best) / best)
        self.unique.append(data.unique(theirs, lam))
        if self.unique[-1]:
            self.coefficient = max(self.coefficient, float(np.abs(theirs - ours).max()))

    def __str__(self) -> str:
        return (f"coefficients {self.coefficient:.1e} ({sum(self.unique)} of {len(self.unique)} models are unique), "
                f"margins {self.margin:.1e}, objectives {self.objective:.1e}; KKT {self.kkt:.1e}")  # fmt: skip


def ours(name: str, count: int, ratio: float, folds: int) -> tuple[fc.Problem, Any]:
    """The path and the cross-validation over sites."""
    load, loss, *_ = SETS[name]
    silos = load()
    problem = fc.Problem(silos, loss=loss, regularizer=fc.regularizers.L1(1.0), bias=True, weights="samples")
    began = time.perf_counter()
    alone = fc.path(problem, count=count, ratio=ratio, tolerance=TOLERANCE)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    cv = fc.cross_validate(problem, folds=folds, count=count, ratio=ratio, tolerance=TOLERANCE)
    n, p = silos.features.shape
    print(
        f"{name}: {len(silos)} sites, {n} samples, {p} features\n"
        f"  path of {count} strengths down to {ratio:g}: {alone.exchanges} exchanges, "
        f"{alone.bytes_up / 1e6 / len(silos):.2f} MB up per site, {seconds:.1f} s, "
        f"converged {bool(alone.converged.all())}\n"
        f"  {folds} folds: {cv.exchanges} exchanges, {cv.bytes_up / 1e6 / len(silos):.2f} MB up per site, "
        f"{time.perf_counter() - began:.1f} s; lambda.min {cv.lambda_min:.5g}, lambda.1se {cv.lambda_1se:.5g}",
        flush=True,
    )
    return problem, cv


def chosen(each: Floats, weights: Floats) -> tuple[int, int]:
    """Places of lambda.min and lambda.1se by glmnet's rule, from the scores of folds."""
    mean = np.average(each, axis=0, weights=weights)
    se = np.sqrt(np.average((each - mean) ** 2, axis=0, weights=weights) / (len(each) - 1))
    best = int(np.argmin(mean))
    return best, int(np.flatnonzero(mean <= mean[best] + se[best])[0])


def compare(name: str, count: int, ratio: float, folds: int) -> bool:
    """Print how far our models and the reference's are apart; whether both chose the same strengths."""
    problem, cv = ours(name, count, ratio, folds)
    began, silos, loss = time.perf_counter(), problem.silos, SETS[name][1]
    X, y = silos.features.double().numpy(), silos.targets.double().numpy()
    y = np.where(y > 0, 1.0, -1.0) if loss == "logistic" else y
    fold, table, on_all, on_folds = fold_of_samples(problem, folds), [], Apart(), Apart()
    data = Pooled(X, y, loss)
    for lam, theirs, mine in zip(cv.lambdas, data.path(cv.lambdas), cv.path.solutions.numpy(), strict=True):
        on_all.see(data, float(lam), theirs, mine)
    for f in range(folds):
        rest, held = Pooled(X[fold != f], y[fold != f], loss), Pooled(X[fold == f], y[fold == f], loss)
        models = rest.path(cv.lambdas)
        for lam, theirs, mine in zip(cv.lambdas, models, cv.models[f].numpy(), strict=True):
            on_folds.see(rest, float(lam), theirs, mine)
        table.append([2 * float(held.losses(held.margins(x)).mean()) for x in models])
    places = chosen(np.array(table), np.bincount(fold).astype(float))
    same = cv.index_min == places[0], cv.index_1se == places[1]
    print(
        f"  differences, path: {on_all}\n  differences, folds: {on_folds}\n  same lambda.min: {same[0]}, "
        f"same lambda.1se: {same[1]}; the reference took {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return all(same)


TOLERANCE = 1e-10  # of our fits, relative to the largest slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--lambdas", type=int)
    parser.add_argument("--folds", type=int)
    options = parser.parse_args()
    right = []
    for name, (_, _, count, ratio, folds) in SETS.items():
        if name.startswith(options.only):
            right.append(compare(name, options.lambdas or count, ratio, options.folds or folds))
    raise SystemExit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
