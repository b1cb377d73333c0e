"""Heart Disease, four hospitals, SCAD logistic regression: the federated solution is the pooled one.

The pooled solvers know nothing of the package: plain NumPy formulas under SciPy's L-BFGS-B, and skglm.
"""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize

import fedcomposite as fc
from fedcomposite.experiments import Config
from fedcomposite.experiments.runner import execute
from fedcomposite.experiments.store import RunFolder

LAM, KAPPA, A = 0.4, 0.1, 3.7  # of the shipped experiment
FEATURES = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")


@pytest.fixture(scope="module")
def hospitals():
    return fc.data.load("heart_disease")


def slope(t):
    """SCAD's derivative at t >= 0."""
    return KAPPA * np.where(t <= LAM, LAM, np.maximum(A * LAM - t, 0) / (A - 1))


def scad(t):
    flat = LAM**2 * (A + 1) / 2
    middle = (2 * A * LAM * t - t**2 - LAM**2) / (2 * (A - 1))
    return KAPPA * np.where(t <= LAM, LAM * t, np.where(t <= A * LAM, middle, flat))


class Pooled:
    """All rows in one place, with a weight each: sum_j w_j log(1 + exp(-y_j (a_j'x + b))) + SCAD(x)."""

    def __init__(self, silos, weighting):
        self.X, self.y = silos.features.numpy(), silos.targets.numpy()
        sizes = silos.sizes
        each = 1 / (len(sizes) * sizes) if weighting == "uniform" else np.full(len(sizes), 1 / sizes.sum())
        self.w = np.repeat(each, sizes)

    def smooth(self, x, b):
        margins = self.y * (self.X @ x + b)
        pull = -self.y * self.w / (1 + np.exp(margins))
        return self.w @ np.logaddexp(0, -margins), self.X.T @ pull, pull.sum()

    def objective(self, x, b):
        return self.smooth(x, b)[0] + scad(np.abs(x)).sum()

    def residual(self, x, b):
        """Largest violation of 0 in the subdifferential."""
        _, g, gb = self.smooth(x, b)
        at_zero = np.maximum(np.abs(g) - slope(0.0), 0)
        return max(abs(gb), np.where(x == 0, at_zero, np.abs(g + np.sign(x) * slope(np.abs(x)))).max())

    def solve(self, start):
        """A local minimum near ``start``: x = p - q with p, q >= 0, where h(p + q) is smooth."""

        def split(v):
            p, q, b = v[:10], v[10:20], v[20]
            value, g, gb = self.smooth(p - q, b)
            s = slope(p + q)
            return value + scad(p + q).sum(), np.concatenate([g + s, s - g, [gb]])

        v = np.concatenate([np.maximum(start, 0), np.maximum(-start, 0), [0.0]])
        bounds = [(0, None)] * 20 + [(None, None)]
        options = {"maxiter": 10_000, "maxfun": 100_000, "ftol": 1e-16, "gtol": 1e-10}
        v = minimize(split, v, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
        return v[:10] - v[10:20], v[20]


def federated(silos, weighting, method):
    problem = fc.Problem(
        silos, loss="logistic", bias=True, weights=weighting, regularizer=fc.regularizers.SCAD(LAM, A, kappa=KAPPA)
    )
    L = problem.smoothness()
    steps = {
        "FedNMap": fc.algorithms.FedNMap(local_steps=10, step=0.1 / L, gamma=1 / L),
        "Zhang": fc.algorithms.Zhang(local_steps=10, step=0.05 / L, server_step=2.0),
    }
    return fc.simulate(problem, steps[method], rounds=3000, tolerance=1e-9, evaluate_every=50)


@pytest.mark.parametrize(
    ("weighting", "method"), [("samples", "FedNMap"), ("uniform", "FedNMap"), ("samples", "Zhang")]
)
def test_federated_equals_pooled(hospitals, weighting, method):
    pooled = Pooled(hospitals, weighting)
    rng = np.random.default_rng(0)
    found = [pooled.solve(start) for start in [np.zeros(10), *rng.normal(scale=0.5, size=(8, 10))]]
    x, b = min(found, key=lambda solution: pooled.objective(*solution))
    assert pooled.residual(x, b) < 1e-6
    run = federated(hospitals, weighting, method)
    own, intercept = run.solution[:10].numpy(), float(run.solution[10])
    assert run.status == "converged"
    assert abs(pooled.objective(own, intercept) - pooled.objective(x, b)) < 1e-8
    assert run.history[-1].objective == pytest.approx(pooled.objective(own, intercept), rel=1e-12)
    assert pooled.residual(own, intercept) < 1e-7
    assert np.array_equal(own != 0, np.abs(x) > 1e-7)
    np.testing.assert_allclose(own, x, rtol=0, atol=1e-4)
    assert intercept == pytest.approx(b, abs=1e-4)


def test_shipped_experiment_and_its_table(hospitals, tmp_path):
    """`fedcomposite run heart`: the pooled minimum again, and a table with the names of the risk factors."""
    config = Config.read("heart")
    assert config.problem.weights == "samples"
    run = execute(config, RunFolder(tmp_path))
    pooled = Pooled(hospitals, "samples")
    x, b = pooled.solve(np.zeros(10))
    assert abs(run.history[-1].objective - pooled.objective(x, b)) < 1e-8
    table = pd.read_csv(tmp_path / "coefficients.csv")
    wanted = {name: value for name, value in zip(FEATURES, x, strict=True) if abs(value) > 1e-7} | {"(intercept)": b}
    assert len(wanted) == 7
    assert set(table["name"]) == set(wanted)
    for name, value in zip(table["name"], table["coefficient"], strict=True):
        assert value == pytest.approx(wanted[name], abs=1e-4)
    assert table["coefficient"].abs().is_monotonic_decreasing


@pytest.mark.slow
def test_federated_equals_skglm(hospitals):
    """skglm's SCAD has no kappa, and its coordinate steps 1/L_j = 4 must stay below a - 1: hence another a."""
    from skglm import GeneralizedLinearEstimator
    from skglm.datafits import Logistic
    from skglm.penalties import SCAD
    from skglm.solvers import AndersonCD

    solver = AndersonCD(tol=1e-11, fit_intercept=True, max_iter=200)
    model = GeneralizedLinearEstimator(Logistic(), SCAD(0.05, 20.0), solver)
    model.fit(hospitals.features.numpy(), hospitals.targets.numpy())
    pooled = torch.from_numpy(np.append(model.coef_.ravel(), model.intercept_))
    problem = fc.Problem(
        hospitals, loss="logistic", bias=True, weights="samples", regularizer=fc.regularizers.SCAD(0.05, 20.0)
    )
    L = problem.smoothness()
    run = fc.simulate(
        problem,
        fc.algorithms.FedNMap(local_steps=10, step=0.1 / L, gamma=1 / L),
        rounds=3000,
        tolerance=1e-9,
        evaluate_every=50,
    )
    assert abs(run.history[-1].objective - problem.objective(pooled)) < 1e-8
    assert torch.equal(run.solution != 0, pooled != 0)
    assert int((pooled == 0).sum()) == 5
    torch.testing.assert_close(run.solution, pooled, rtol=0, atol=1e-6)
