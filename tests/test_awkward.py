"""Data that trip solvers: scales, constraints, no minimiser, a clock that runs out. What is said must be true."""

import time
import warnings
from contextlib import nullcontext
from dataclasses import replace

import cvxpy as cp
import numpy as np
import pytest
import torch
from benchmarks.fuzz import run as drawn
from sklearn.exceptions import ConvergenceWarning

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.algorithms.inner import EffortError, QuadraticModel, minimise
from fedcomposite.analysis import newton
from fedcomposite.analysis.newton import FitPlan, _Called
from fedcomposite.analysis.strengths import regularized
from fedcomposite.problems import Loss
from fedcomposite.problems.losses import Logistic, Multinomial

COUPLED = {
    "fused": (reg.FusedLasso(0.05), lambda x: 0.05 * cp.norm1(cp.diff(x))),
    "linf": (reg.LinfNorm(0.1), lambda x: 0.1 * cp.norm_inf(x)),
    "nuclear": (reg.NuclearNorm(0.1, (4, 2)), lambda x: 0.1 * cp.normNuc(cp.reshape(x, (4, 2), order="C"))),
    "group": (
        reg.GroupLasso(0.1, groups=2, weights="equal"),
        lambda x: 0.1 * sum(cp.norm2(x[i : i + 2]) for i in range(0, 8, 2)),
    ),
    "l1 ball": (reg.L1Ball(1.0), lambda x: [cp.norm1(x) <= 1]),
    "l2 ball": (reg.L2Ball(1.0), lambda x: [cp.norm2(x) <= 1]),
    "simplex": (reg.Simplex(1.0), lambda x: [x >= 0, cp.sum(x) == 1]),
    "affine": (reg.Affine([[1.0] * 8], [1.0]), lambda x: [cp.sum(x) == 1]),
}


@pytest.mark.parametrize("spread", [0, 2])
@pytest.mark.parametrize("name", COUPLED)
def test_coupled_terms_are_solved_whatever_the_scale_of_features(name, spread):
    """Columns of scales 0.01 to 100; zero is no start for a simplex or a plane."""
    h, term = COUPLED[name]
    rng = np.random.default_rng(len(name) + spread)
    X = rng.normal(size=(95, 8)) * 10 ** rng.uniform(-spread, spread, size=8)
    y = X @ (rng.normal(size=8) / np.abs(X).mean(0)) + rng.normal(size=95)
    silos = fc.Silos.from_arrays([(X[:30], y[:30]), (X[30:], y[30:])])
    problem = fc.Problem(silos, loss="least_squares", weights="samples", bias=True, regularizer=h)
    run = fc.solve(problem)
    assert run.status == "converged", run.message
    x, c = cp.Variable(8), cp.Variable()
    extra = term(x)
    loss = cp.sum_squares(X @ x + c - y) / (2 * len(y))
    made = cp.Problem(cp.Minimize(loss), extra) if isinstance(extra, list) else cp.Problem(cp.Minimize(loss + extra))
    made.solve(solver=cp.CLARABEL)
    assert problem.objective(run.solution) - made.value <= 1e-6 * max(1.0, made.value)


def test_the_fits_of_an_analysis_share_what_is_taken_in_vain():
    """A hundred strengths that resist take little more than one that does, each of them at least a few calls."""
    plan = FitPlan()
    h = reg.FusedLasso(0.1)
    first, second = (_Called(h, 8, replace(plan, rounds=k)) for k in (5, 6))
    most = first.most
    first.lose(most // 2)
    assert (first.most, second.most) == (most, most - most // 2)
    first.lose(most)
    third = _Called(h, 8, plan)
    assert 0 < third.most <= most / 10
    third.calls = third.most
    with pytest.raises(EffortError):
        third.prox(torch.ones(8, dtype=torch.float64), 0.1)


def test_work_inside_a_step_ends_with_its_budget_and_with_the_time(monkeypatch):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(95, 8)) * 10 ** rng.uniform(-4, 4, size=8)
    problem = fc.Problem(fc.Silos.from_arrays([(X, X @ (rng.normal(size=8) / abs(X).mean(0)))]), loss="least_squares")
    problem.regularizer = reg.LinfNorm(0.1)
    assert fc.solve(problem).status == "converged"
    assert fc.solve(problem, seconds=1e-9).status == "not_converged"
    monkeypatch.setitem(newton._CALLS, True, 30)
    monkeypatch.setattr(newton, "_LEAST_CALLS", 1)
    calls = []
    monkeypatch.setattr(
        reg.LinfNorm, "formula", lambda h, v, step, way=reg.LinfNorm.formula: calls.append(1) or way(h, v, step)
    )
    run = fc.solve(problem)
    assert "given up" in run.message
    assert len(calls) < 50


@pytest.mark.parametrize("seed", range(3))
def test_equal_columns_of_opposite_signs_find_together(seed):
    """Where H has no curvature, h alone says where to go: x = (a, -b) for equal columns costs a + b for nothing."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(60, 4))
    H = torch.from_numpy(np.c_[A, A].T @ np.c_[A, A] / 60)
    x = torch.from_numpy(np.r_[np.ones(4), -np.ones(4)])
    h = reg.L1(1e-4)
    u, solved = minimise(QuadraticModel(x, H @ x, H, h, True), 1e-14)
    assert solved
    assert float(h.optimality(u, H @ x + H @ (u - x))) <= 1e-10
    assert bool((u[:4] * u[4:] >= 0).all())


class Smooth(Logistic):
    """A loss of someone's own, without a second derivative."""

    second = Loss.second


def test_a_loss_without_second_derivative_gets_a_first_order_method():
    silos = fc.data.load("synthetic", clients=3, features=4, samples=30)
    run = fc.solve(fc.Problem(silos, loss=Smooth(), regularizer=reg.L1(0.01)))
    assert run.status == "converged"
    assert "no second derivative" in run.message
    best = fc.solve(fc.Problem(silos, loss="logistic", regularizer=reg.L1(0.01))).solution
    torch.testing.assert_close(run.solution, best, rtol=0, atol=1e-5)


def separated(seed=0, m=60):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(m, 3)) + np.array([0, 1000, 0])
    return X, (X[:, 0] > 0).astype(int), rng.integers(0, 2, m)


def test_models_without_a_solution_say_so():
    X, y, sites = separated()
    kinds = [
        fc.LogisticRegression(lam=0),
        fc.LogisticRegression(regularizer=reg.MCP(0.02, 3.0)),
        fc.MultinomialRegression(lam=0),
    ]
    for model in kinds:
        with pytest.warns(ConvergenceWarning, match="grow without end"):
            model.fit(X, y, sites=sites)
        assert not model.converged_
    none = np.where(X[:, 2] > 0, 0, np.random.default_rng(1).poisson(2.0, len(X)))
    rare = np.c_[X, X[:, 2] > 0]
    for design, counts in ((X, np.zeros(len(X))), (rare, none)):
        with pytest.warns(ConvergenceWarning, match="counts are zero"):
            model = fc.PoissonRegression(lam=0).fit(design, counts, sites=sites)
        assert not model.converged_
    problem = fc.Problem(fc.Silos.from_arrays([(X, y)]), loss="logistic", bias=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fc.analyse(problem, "fit")
    assert not found.converged
    assert "the classes can be separated" in found.message


def test_numbers_whose_squares_are_zero_are_refused():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 2)), rng.normal(size=30)
    for made, where in ((([[1, 1e-200]] * X, y), "features, column 1"), ((X, 1e-200 * y), "targets")):
        with pytest.raises(fc.errors.DataError, match=f"{where}.*square is zero"):
            fc.LinearRegression(0.1, regularizer="l1").fit(*made)


def test_separated_classes_have_a_squared_hinge():
    """Its least value, zero, is reached: nothing grows."""
    X, y, sites = separated()
    model = fc.LinearSVC(lam=0).fit(X, y, sites=sites)
    assert model.converged_
    assert model.score(X, y) == 1.0
    run = fc.solve(fc.Problem(fc.Silos.from_arrays([(X, y)]), loss="squared_hinge", bias=True))
    assert run.status == "converged"
    assert run.history[-1].objective <= 1e-12


def test_columns_of_mean_1000_and_deviation_1e_4_are_fitted():
    rng = np.random.default_rng(0)
    Z = rng.normal(size=(200, 4))
    X, y = 1000 + 1e-4 * Z, Z @ [1.0, -2.0, 0.0, 0.5] + 0.1 * rng.normal(size=200)
    sites = rng.integers(0, 3, 200)
    plain = fc.LinearRegression(lam=0).fit(X, y, sites=sites)
    centred = fc.LinearRegression(lam=0).fit(1e4 * (X - 1000), y, sites=sites)
    np.testing.assert_allclose(plain.coef_ / 1e4, centred.coef_, atol=1e-6)
    np.testing.assert_allclose(plain.predict(X), centred.predict(1e4 * (X - 1000)), atol=1e-5)
    labels = (y > 0.3).astype(int)
    one = fc.LogisticRegression(regularizer=reg.L2Squared(1e-10)).fit(X, labels, sites=sites)
    two = fc.LogisticRegression(regularizer=reg.L2Squared(1e-2)).fit(1e4 * (X - 1000), labels, sites=sites)
    assert one.converged_
    np.testing.assert_allclose(one.coef_ / 1e4, two.coef_, atol=1e-4)
    run = fc.solve(one.problem(fc.Silos.from_arrays([(X, labels)])))
    np.testing.assert_allclose(run.solution[:-1].numpy() / 1e4, two.coef_[0], atol=1e-4)


def test_a_constraint_is_a_regularizer_of_an_estimator():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 4))
    y = X @ [1.0, -1.0, 0.5, 0.0] + 0.1 * rng.normal(size=60)
    model = fc.LinearRegression(regularizer=reg.NonNegative()).fit(X, y)
    assert model.lam_ == 0.0
    assert model.converged_
    assert (model.coef_ >= 0).all()


def test_what_a_user_waits_for_has_a_bound():
    silos = fc.data.load("synthetic", clients=10, features=60, samples=200)
    problem = fc.Problem(silos, loss="logistic", regularizer=reg.L1(1.0), bias=True, weights="samples")
    part = fc.path(problem, count=200, seconds=0.05)
    assert 1 <= len(part.lambdas) == len(part.solutions) < 200
    cv = fc.cross_validate(problem, folds=3, count=200, seconds=0.1)
    assert len(cv.mean) == len(cv.lambdas) == len(cv.path.lambdas) < 200
    long = fc.Problem(silos, loss="logistic", regularizer=reg.L1(1e-4), bias=True)
    began = time.monotonic()
    run = fc.solve(long, participation=0.5, rounds=10**6, tolerance=0.0, seconds=0.3)
    assert run.status == "not_converged"
    assert "time was up" in run.message
    assert time.monotonic() - began < 30  # no timing: a million rounds would take an hour
    quick = fc.solve(fc.Problem(silos, loss="hinge", regularizer=reg.L1(1e-4), bias=True), seconds=1e-3)
    assert quick.status == "not_converged"
    assert "allow more seconds" in quick.message
    model = fc.LinearSVC(loss="hinge", seconds=1e-3)
    with pytest.warns(ConvergenceWarning, match="more seconds"):
        model.fit(silos)
    assert not model.converged_


def test_solve_and_the_estimator_give_the_same_answer():
    rng = np.random.default_rng(0)
    X, sites = rng.normal(size=(300, 6)), rng.integers(0, 4, 300)
    y = (X[:, 0] + rng.normal(size=300) > 0).astype(int)
    model = fc.LogisticRegression(0.02, regularizer="l1").fit(X, y, sites=sites)
    silos = fc.Silos.from_arrays([(X[sites == k], y[sites == k]) for k in range(4)])
    run = fc.solve(model.problem(silos))
    np.testing.assert_allclose(run.solution.numpy(), model.solution_, atol=1e-12)


@pytest.mark.parametrize("number", [177, 250, 833, 1382, 1540], ids=str)
def test_where_there_is_no_minimiser_nothing_converges(number):
    """Free directions that h alone shows, warm starts far out, losses of 1e-15, and a method of first order."""
    verdict = drawn(1, number)
    assert verdict.outcome == "none", verdict.words


def test_a_model_so_far_out_that_steps_are_swallowed_is_no_solution():
    """SCAD, flat beyond 1e-6, and features of 1e-4: rho keeps steps so short that rounding leaves nothing of them."""
    verdict = drawn(22, 484)
    assert verdict.outcome == "open", verdict.words


@pytest.mark.parametrize("number", [836, 1268], ids=str)
def test_columns_that_cannot_be_centred_hide_what_is_left(number):
    """Mean 1000, deviation 1e-4 and no intercept: gradients are rounded to more than what is left to gain."""
    verdict = drawn(1, number)
    assert verdict.outcome == "open", verdict.words


@pytest.mark.parametrize("far", [1e3, 1e16, 1e100, 1e300])
def test_an_equation_may_put_a_coefficient_as_far_out_as_it_likes(far):
    """A column of zeros, whose coefficient an affine constraint sets."""
    y = np.array([1.0] * 9 + [0.0])
    model = fc.LinearSVC(loss="squared_hinge", regularizer=reg.Affine([[1.0]], [far]))
    with nullcontext() if far <= 1e16 else pytest.warns(ConvergenceWarning, match="rounding hides"):
        model.fit(np.zeros((10, 1)), y)
    assert model.coef_[0, 0] == far
    assert not model.converged_ or model.intercept_[0] == pytest.approx(0.8, rel=1e-9)


def test_a_loss_that_overflows_at_every_model_is_no_solution():
    """Features of 1e4 on a simplex: rates of e^3000 at its middle, and no slope by which to leave it."""
    g = np.random.default_rng(0)
    X, y = 1e4 * g.normal(size=(60, 3)), g.poisson(5.0, 60).astype(float)
    model = fc.PoissonRegression(regularizer=reg.Simplex(1.0), fit_intercept=False)
    with pytest.warns(ConvergenceWarning, match="the loss overflows"):
        model.fit(X, y)
    assert not model.converged_
    problem = fc.Problem(fc.Silos.from_arrays([(X, y)]), loss="poisson", regularizer=reg.Simplex(1.0), bias=False)
    run = fc.solve(problem)
    assert run.status == "not_converged"
    assert "the loss overflows" in run.message


def test_the_loss_of_several_classes_keeps_its_digits_near_zero():
    z = torch.tensor([[40.0, 0.0, -5.0], [900.0, 0.0, 0.0], [0.0, 900.0, 0.0]], dtype=torch.float64)
    b = torch.tensor([[1.0, 0.0, 0.0]] * 3, dtype=torch.float64)
    found, slope = Multinomial((0, 1, 2)).value(z, b), Multinomial((0, 1, 2)).derivative(z, b)
    right = np.exp(-40) + np.exp(-45)
    assert float(found[0]) == pytest.approx(right, rel=1e-12)
    assert float(slope[0, 0]) == pytest.approx(-right, rel=1e-12)
    assert found[1:].tolist() == [0.0, 900.0]
    np.testing.assert_allclose(slope.sum(1), 0, atol=1e-16)


def test_a_proximal_point_of_a_very_concave_h_keeps_below_its_limit():
    """1/rho of 1e-7 and features of size 1e4: a step that rounds to 1/rho was refused."""
    assert not drawn(1, 1912).failed


@pytest.mark.parametrize(("number", "outcome"), [(938, "ok"), (1152, "ok"), (1456, "ok"), (1862, "open")], ids=str)
def test_what_two_thousand_cases_found(number, outcome):
    """A column of zeros that others hold, MCP flat beyond 1e-10, TopK far from zero, directions that no Hessian has."""
    verdict = drawn(0, number)
    assert not verdict.failed, verdict.words
    assert outcome in (verdict.outcome, "open"), verdict.words


@pytest.mark.parametrize("h", [reg.TopK(2), reg.L0(1e-3), reg.Sparsity2to4(1e-3)], ids=str)
def test_a_term_that_jumps_ends_at_the_least_squares_of_its_support(h):
    """Features of mean 1000 and deviation 1, which a first-order method does not get to the end of."""
    rng = np.random.default_rng(0)
    X = 1000 + rng.normal(size=(80, 4))
    y = X @ [1.0, -2.0, 0.0, 0.0] + 0.1 * rng.normal(size=80)
    silos = fc.Silos.from_arrays([(X[:30], y[:30]), (X[30:], y[30:])])
    problem = fc.Problem(silos, loss="least_squares", regularizer=h, bias=True, weights="samples")
    run = fc.solve(problem)
    x = run.solution.numpy()
    assert run.status == "converged", run.message
    assert "Newton" in run.message
    assert [record["round"] for record in run.history] == sorted({record["round"] for record in run.history})
    A = (X - X.mean(0))[:, x[:4] != 0]
    if not isinstance(h, reg.Sparsity2to4):
        right = np.linalg.lstsq(A, y - y.mean(), rcond=None)[0]
        np.testing.assert_allclose(x[:4][x[:4] != 0], right, rtol=1e-8)
    assert problem.optimality(x) <= 1e-5


def test_a_term_that_jumps_has_no_solution_where_its_support_separates():
    X = np.linspace(-1, 1, 20)[:, None]
    problem = fc.Problem(fc.Silos.from_arrays([(X, X[:, 0] > 0)]), loss="logistic", regularizer=reg.TopK(1))
    run = fc.solve(problem)
    assert run.status == "not_converged"
    assert "grow without end" in run.message


def test_every_coordinate_of_a_concave_term_is_regularized_however_soon_it_is_flat():
    assert regularized(reg.MCP(0.003, 4e-8), 5).all()
    assert regularized(reg.SCAD(1e-9, 2.1), 5).all()
    assert not regularized(reg.Box(-1e-4, 1e-4), 5).any()
