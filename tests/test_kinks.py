"""Losses with kinks: smooth ones that approach them, and solve with a duality gap of the problem itself."""

import warnings

import cvxpy as cp
import numpy as np
import pytest
import torch
from benchmarks.fuzz_draw import draw

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.problems import LOSSES
from fedcomposite.problems.losses import Hinge, Quantile
from fedcomposite.problems.smoothed import KINKED, Smoothed

KINDS = [Hinge(), LOSSES["absolute"], Quantile(0.2)]


@pytest.mark.parametrize("loss", KINDS, ids=str)
@pytest.mark.parametrize("width", [1e-6, 0.01, 0.7, 5.0])
def test_smoothed_is_the_largest_line_behind_a_barrier(loss, width):
    """phi_w(z) = max over s of (l + (r - l) s)(z - b) + w (log s + log(1 - s)), by trying many s."""
    soft = Smoothed(loss, width)
    edge = torch.logspace(-12, -1, 40_000, dtype=torch.float64)
    s = torch.cat([edge, torch.linspace(0.1, 0.9, 80_001, dtype=torch.float64), 1 - edge])
    for b in (-1.0, 1.0) if loss.classifier else (-0.4, 2.0):
        target = torch.tensor(b).double()
        left, right = loss.derivative(target - 1, target), loss.derivative(target + 1, target)
        for place in (-3.0, -0.9, 0.3, 0.999, 1.0, 2.004, 6.0):
            z = torch.tensor(place).double()
            want = ((left + (right - left) * s) * (z - target) + width * (s.log() + torch.log1p(-s))).max()
            torch.testing.assert_close(soft.value(z, target), want, rtol=1e-6, atol=1e-6 * width)
            assert float(soft.value(z, target)) <= float(loss.value(z, target)) + 1e-12
            e = 1e-4 * width
            slope = (soft.value(z + e, target) - soft.value(z - e, target)) / (2 * e)
            torch.testing.assert_close(soft.derivative(z, target), slope, rtol=0, atol=1e-5)
            bend = (soft.derivative(z + e, target) - soft.derivative(z - e, target)) / (2 * e)
            torch.testing.assert_close(soft.second(z, target) * width, bend * width, rtol=0, atol=1e-5)


def test_every_loss_with_a_kink_is_known_or_refused():
    for name, loss in LOSSES.items():
        assert loss.smooth != isinstance(loss, KINKED), name
    with pytest.raises(ValueError, match="Smoothed is made for Hinge, Absolute, Quantile, not for Logistic"):
        Smoothed(LOSSES["logistic"], 1.0)


def pooled(problem, term):
    """The least objective by cvxpy."""
    X, y = (np.concatenate([np.asarray(problem.silos[i][k]) for i in range(len(problem.silos))]) for k in (0, 1))
    weight = np.repeat(problem.weights / problem.silos.sizes, problem.silos.sizes)
    x, c = cp.Variable(X.shape[1]), cp.Variable()
    z, signs = X @ x + c, np.where(y > 0, 1.0, -1.0)
    loss = {
        "Hinge": lambda: cp.pos(1 - cp.multiply(signs, z)),
        "Absolute": lambda: cp.abs(z - y),
        "Quantile": lambda: cp.maximum(0.8 * (y - z), -0.2 * (y - z)),
    }[type(problem.loss).__name__]()
    made = cp.Problem(cp.Minimize(weight @ loss + term(x)))
    return made.solve(solver=cp.CLARABEL)


@pytest.mark.parametrize("loss", ["hinge", "absolute", "quantile"])
@pytest.mark.parametrize("penalty", ["ridge", "l1"])
def test_solve_comes_within_a_certified_distance(loss, penalty):
    h, term = {
        "ridge": (reg.L2Squared(0.1), lambda x: 0.05 * cp.sum_squares(x)),
        "l1": (reg.L1(0.02), lambda x: 0.02 * cp.norm1(x)),
    }[penalty]
    options = {"tau": 0.8} if loss == "quantile" else None
    problem = fc.Problem(fc.data.load("heart_disease"), loss=loss, loss_options=options, regularizer=h, bias=True)
    seen = []
    run = fc.solve(problem, tolerance=1e-3, on_record=seen.append)
    assert run.status == "converged"
    assert run.certificate.kind == "duality gap"
    over = problem.objective(run.solution) - pooled(problem, term)
    assert -1e-7 <= over <= run.certificate.value + 1e-7 <= 1.1e-3
    assert "has kinks" in run.message
    assert run.history[0].objective == pytest.approx(problem.objective(torch.zeros(problem.dimension)))
    assert run.history[-1].objective == pytest.approx(problem.objective(run.solution))
    assert run.history[-1].round == run.rounds == seen[-1].round
    totals = [r.bytes_up for r in run.history]
    assert totals == sorted(totals)
    short = fc.solve(problem, tolerance=1e-3, rounds=3)
    assert short.status == "not_converged"
    assert short.rounds <= 4
    assert "a larger tolerance" in short.message


def test_kinks_with_an_h_without_conjugate_end_by_what_smoothing_took_away():
    problem = fc.Problem(fc.data.load("heart_disease"), loss="hinge", regularizer=reg.MCP(0.05, 20.0), bias=True)
    run = fc.solve(problem, tolerance=0.02)
    assert run.status == "converged"
    assert run.certificate.kind == "optimality measure"


def _awkward(seed):
    """Columns with large means, of different scale, twice the same; targets of any size."""
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(30, 120)), int(rng.integers(1, 8))
    X = rng.normal(size=(n, d))
    made = {
        0: X,
        1: X + 100,
        2: X * 10.0 ** rng.uniform(-3, 3, size=d),
        3: 1000 + 1e-4 * X,
        4: np.c_[X, X],
    }[seed % 5]
    score = X @ rng.normal(size=d) + rng.normal(size=n)
    return made, score, int(rng.integers(2, 4)), 10.0 ** rng.uniform(-3, -1), rng


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["hinge", "quantile"])
def test_estimators_with_kinks_are_the_pooled_ones_or_say_that_they_are_not(kind, seed):
    X, score, sites, lam, rng = _awkward(seed)
    h = (reg.L2Squared(lam), reg.L1(lam))[seed % 2]
    if kind == "hinge":
        y, model = (score > 0).astype(int), fc.LinearSVC(loss="hinge", regularizer=h)
        signs = np.diag(np.where(y > 0, 1.0, -1.0))
        pinball = lambda z, top: top(0.0, 1 - signs @ z)  # noqa: E731
    else:
        tau = float(rng.uniform(0.1, 0.9))
        y, model = 10.0 ** rng.uniform(-2, 2) * score + 50, fc.QuantileRegression(quantile=tau, regularizer=h)
        pinball = lambda z, top: top(tau * (y - z), (tau - 1) * (y - z))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, y, sites=rng.integers(0, sites, len(y)))
    center, scale = X.mean(0), X.std(0)
    u, c = cp.Variable(X.shape[1]), cp.Variable()
    x = cp.multiply(1 / scale, u)
    term = lam / 2 * cp.sum_squares(x) if isinstance(h, reg.L2Squared) else lam * cp.norm1(x)
    made = cp.Problem(cp.Minimize(cp.sum(pinball((X - center) / scale @ u + c, cp.maximum)) / len(y) + term))
    made.solve(solver=cp.CLARABEL)
    best = made.value
    value = pinball(X @ model.coef_.ravel() + model.intercept_, np.maximum).mean()
    value += float(h.value(torch.from_numpy(model.coef_.ravel().copy())))
    assert model.converged_, value - best
    assert value - best <= 1e-6 * max(best, 1e-3)


def test_the_support_vector_machine_of_features_far_from_zero():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 3)) + 100
    y = X[:, 0] - X[:, 1] + 0.5 * rng.normal(size=80) > 0
    model = fc.LinearSVC(loss="hinge", regularizer=reg.L2Squared(0.01)).fit(X, y.astype(int))
    assert model.converged_
    np.testing.assert_allclose(model.coef_.ravel(), [2.001, -1.384, 0.107], atol=2e-3)


@pytest.mark.parametrize("number", [369, 1356])
def test_a_fit_with_kinks_that_nothing_shows_says_so_and_returns_its_best_model(number):
    """Columns of sizes 1e-4 to 1e4 that depend on each other, or of mean 1000 without an intercept; no conjugate.

    How near it comes to the minimum hangs on a machine's rounding; that it ends near the best of its way does not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fc.solve(draw(1, number).problem())
    assert found.status == "not_converged"
    objectives = [record.objective for record in found.history]
    assert objectives[-1] <= min(objectives) + 0.02 * objectives[0]
    assert objectives[-1] < 0.7 * objectives[0]


@pytest.mark.filterwarnings("ignore::fedcomposite.problems.problem.OneClassWarning")
@pytest.mark.parametrize("h", [reg.NonNegative(), reg.NuclearNorm(0.4, (1, 1))], ids=str)
def test_a_loss_of_zero_is_the_least_one(h):
    """With one class a barrier has no minimum, but the hinge has: zero, which no bound has to show."""
    X = np.random.default_rng(0).normal(size=(12, 1))
    problem = fc.Problem(fc.Silos.from_arrays([(X, np.ones(12))]), loss="hinge", regularizer=h, bias=True)
    run = fc.solve(problem)
    assert run.status == "converged", run.message
    assert problem.objective(run.solution) == 0
    assert run.certificate.kind == "duality gap"
    assert run.certificate.value == 0
