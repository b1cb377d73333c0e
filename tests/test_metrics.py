"""Metrics against independent computations in plain numpy, cvxpy and scipy."""

import cvxpy as cp
import numpy as np
import pytest
import torch

import fedcomposite as fc
from fedcomposite import metrics

SIZES = (12, 7, 20)
D = 5


def data(kind="sign", seed=0):
    rng = np.random.default_rng(seed)
    out = []
    for m in SIZES:
        X = rng.normal(size=(m, D))
        out.append((X, rng.choice([-1.0, 1.0], m) if kind == "sign" else rng.normal(size=m)))
    return out


def gradient(arrays, x):
    """Mean over clients of the logistic gradient, sample by sample."""
    total = np.zeros(D)
    for X, y in arrays:
        for a, b in zip(X, y, strict=True):
            total += -b * a / (1 + np.exp(b * (a @ x))) / len(y) / len(arrays)
    return total


def soft(v, t):
    return np.sign(v) * np.maximum(np.abs(v) - t, 0)


POINTS = np.random.default_rng(5).normal(size=(4, D))


@pytest.mark.parametrize("x", POINTS)
def test_prox_gradient_and_normal_map(x):
    arrays = data()
    problem = fc.Problem(fc.Silos.from_arrays(arrays), loss="logistic", regularizer=fc.regularizers.L1(0.1))
    s = 0.7
    G = (x - soft(x - s * gradient(arrays, x), s * 0.1)) / s
    np.testing.assert_allclose(metrics.prox_gradient(problem, x, s).numpy(), G, atol=1e-12)
    assert metrics.stationarity(problem, x, s) == pytest.approx(np.linalg.norm(G), rel=1e-12)
    assert metrics.stationarity(problem, x, s) == problem.stationarity(torch.tensor(x), s)
    assert metrics.stationarity(problem, x) == problem.stationarity(torch.tensor(x))
    p = soft(x, s * 0.1)
    F = gradient(arrays, p) + (x - p) / s
    np.testing.assert_allclose(metrics.normal_map(problem, x, s).numpy(), F, atol=1e-12)
    assert metrics.normal_map_norm(problem, x, s) == pytest.approx(np.linalg.norm(F), rel=1e-12)
    # The normal map bounds the prox-gradient mapping, equation (17) of the FedNMap paper with rho = 0.
    assert metrics.stationarity(problem, p, s) <= np.linalg.norm(F) * (1 + 1e-12)


def test_normal_map_bounds_stationarity_for_weakly_convex_h():
    h = fc.regularizers.MCP(0.3, 4.0)
    problem = fc.Problem(fc.Silos.from_arrays(data()), loss="logistic", regularizer=h)
    for z in POINTS:
        gamma = 2.0
        x = h.prox(torch.tensor(z), gamma)
        limit = metrics.normal_map_norm(problem, z, gamma) / (1 - gamma * h.rho)
        assert metrics.stationarity(problem, x, gamma) <= limit * (1 + 1e-12)


def test_normal_map_vanishes_at_the_solution():
    problem = fc.Problem(fc.Silos.from_arrays(data()), loss="logistic", regularizer=fc.regularizers.L1(0.05))
    x = torch.zeros(D, dtype=torch.float64)
    step = problem.default_step()
    for _ in range(4000):
        x = problem.regularizer.prox(x - step * problem.gradient(x), step)
    z = x - 0.3 * problem.gradient(x)
    assert metrics.normal_map_norm(problem, z, 0.3) < 1e-12
    assert metrics.stationarity(problem, x) < 1e-12


@pytest.mark.parametrize("radius", [0.3, 5.0])
def test_moreau_envelope_of_a_lasso_against_cvxpy(radius):
    arrays = data("real")
    problem = fc.Problem(fc.Silos.from_arrays(arrays), loss="least_squares", regularizer=fc.regularizers.L1(0.1))
    x = POINTS[0]
    u = cp.Variable(D)
    F = sum(cp.sum_squares(X @ u - y) / (2 * len(y)) for X, y in arrays) / len(arrays) + 0.1 * cp.norm1(u)
    solver = {"solver": cp.CLARABEL, "tol_gap_abs": 1e-13, "tol_gap_rel": 1e-13, "tol_feas": 1e-13}
    envelope = cp.Problem(cp.Minimize(F + cp.sum_squares(u - x) / (2 * radius))).solve(**solver)
    found = metrics.proximal_point(problem, x, radius)
    np.testing.assert_allclose(found.u.numpy(), u.value, atol=1e-6)
    assert found.envelope == pytest.approx(envelope, abs=1e-9)
    assert found.error <= 1e-9
    expected = np.linalg.norm(x - u.value) / radius
    assert metrics.moreau_gradient_norm(problem, x, radius) == pytest.approx(expected, abs=1e-5)


def test_moreau_gradient_is_the_gradient_of_the_envelope():
    problem = fc.Problem(fc.Silos.from_arrays(data()), loss="logistic", regularizer=fc.regularizers.MCP(0.2, 3.0))
    x, radius, step = POINTS[1], 1.5, 1e-4

    def envelope(v):
        return metrics.proximal_point(problem, v, radius, tolerance=1e-12).envelope

    numeric = [(envelope(x + step * e) - envelope(x - step * e)) / (2 * step) for e in np.eye(D)]
    assert metrics.moreau_gradient_norm(problem, x, radius) == pytest.approx(np.linalg.norm(numeric), abs=1e-6)


def test_moreau_envelope_of_a_hinge_loss_against_cvxpy():
    arrays = data()
    problem = fc.Problem(fc.Silos.from_arrays(arrays), loss="hinge", regularizer=fc.regularizers.L1(0.05))
    x, radius = POINTS[2], 0.5
    u = cp.Variable(D)
    F = sum(cp.sum(cp.pos(1 - cp.multiply(y, X @ u))) / len(y) for X, y in arrays) / len(arrays) + 0.05 * cp.norm1(u)
    best = cp.Problem(cp.Minimize(F + cp.sum_squares(u - x) / (2 * radius))).solve()
    found = metrics.proximal_point(problem, x, radius, most=4000)
    assert best - 1e-6 <= found.envelope <= best + 1e-3
    assert np.linalg.norm(found.u.numpy() - u.value) <= found.error
    assert np.linalg.norm(found.u.numpy() - u.value) <= 0.01


def test_moreau_errors():
    problem = fc.Problem(fc.Silos.from_arrays(data()), loss="logistic", regularizer=fc.regularizers.MCP(0.2, 3.0))
    with pytest.raises(ValueError, match="below 1/rho = 3"):
        metrics.proximal_point(problem, POINTS[0], 3.5)
    with pytest.raises(RuntimeError, match="not found to 1e-09 in 3 steps"):
        metrics.proximal_point(problem, POINTS[0], 1.0, most=3)


def test_client_drift():
    arrays = data("real")
    problem = fc.Problem(fc.Silos.from_arrays(arrays), loss="least_squares")
    x, step = POINTS[3], 0.05
    ends = []
    for X, y in arrays:
        v = x.copy()
        for _ in range(6):
            v = v - step * X.T @ (X @ v - y) / len(y)
        ends.append(v)
    expected = np.mean([np.linalg.norm(v - np.mean(ends, 0)) for v in ends])
    assert metrics.client_drift(problem, x, local_steps=6, step=step) == pytest.approx(expected, rel=1e-12)
    same = fc.Problem(fc.Silos.from_arrays([arrays[0]] * 3), loss="least_squares")
    assert metrics.client_drift(same, x, local_steps=6, step=step) < 1e-14
    # Minibatches differ between clients and seeds.
    noisy = [metrics.client_drift(same, x, local_steps=6, step=step, batch_size=2, seed=s) for s in (0, 0, 1)]
    assert noisy[0] == noisy[1] > 1e-3
    assert noisy[0] != noisy[2]


def test_distance():
    assert metrics.distance([1.0, 2.0, 3.0], torch.tensor([1.0, 0.0, 3.0])) == 2.0


def test_sparsity():
    assert metrics.sparsity([0.0, 1e-9, -2.0, 0.0]) == 0.5
    assert metrics.sparsity([0.0, 1e-9, -2.0, 0.0], tolerance=1e-6) == 0.75


def test_hoyer():
    assert metrics.hoyer([0.0, 0.0, -3.0, 0.0]) == pytest.approx(1.0)
    assert metrics.hoyer([1.0, -1.0, 1.0, 1.0]) == pytest.approx(0.0)
    x = POINTS[0]
    expected = (np.sqrt(D) - np.abs(x).sum() / np.sqrt((x**2).sum())) / (np.sqrt(D) - 1)
    assert metrics.hoyer(x) == pytest.approx(expected, rel=1e-12)
    assert metrics.hoyer(7 * x) == pytest.approx(expected, rel=1e-12)
    assert metrics.hoyer([0.0, 0.0]) == 1.0


def test_support():
    x, truth = np.asarray([1.0, 0, 2, 0, 5, 1e-8]), np.asarray([3.0, 1, 0, 0, 1, 0])
    found = metrics.support(x, truth, tolerance=1e-6)
    assert found == (2 / 3, 2 / 3)
    assert found.f1 == pytest.approx(2 / 3)
    assert metrics.support(np.zeros(6), truth) == (1.0, 0.0)
    assert metrics.support(truth, np.zeros(6)) == (0.0, 1.0)
    assert metrics.support(np.zeros(6), np.zeros(6)).f1 == 1.0
    assert metrics.support([1.0, 0.0], [0.0, 1.0]).f1 == 0.0
