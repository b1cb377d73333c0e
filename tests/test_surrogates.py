"""S-DANE, its acceleration and proxCSL against the papers' iterations with exact local solves, and their limits."""

import numpy as np
import pytest
import torch

import fedcomposite as fc
from fedcomposite.algorithms import SDANE, AccSDANE, ProxCSL
from fedcomposite.regularizers import L1, MCP
from fedcomposite.runtime.history import GrowthWarning

N, D, M = 6, 5, 30


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(3)
    truth = random.normal(size=D)
    pairs = []
    for _ in range(N):
        X = random.normal(0.3 * random.normal(size=D), random.uniform(0.6, 1.4, D), (M, D))
        pairs.append((X, X @ (truth + 0.5 * random.normal(size=D)) + random.normal(size=M)))
    return pairs


@pytest.fixture(scope="module")
def quadratics(data):
    """Hessians and linear parts."""
    return [X.T @ X / M for X, _ in data], [X.T @ y / M for X, y in data]


def problem_of(data, h=None):
    return fc.Problem(fc.Silos.from_arrays(data), loss="least_squares", regularizer=h)


def play(data, method, rounds, h=None, **settings):
    run = fc.simulate(
        problem_of(data, h), method, rounds=rounds, evaluate_every=rounds, keep_solutions=True, **settings
    )
    return run.solutions.numpy()


def argmin(H, b, g, centre, lam):
    """The minimiser of f_i + <g - grad f_i(centre), y> + (lam/2) ||y - centre||^2."""
    return centre - np.linalg.solve(H + lam * np.eye(D), g)


def mean(values):
    return np.mean(list(values), axis=0)


@pytest.mark.parametrize("mu", [0.0, 0.2])
def test_sdane_with_exact_argmins_is_dane(data, quadratics, mu):
    """The centre then is the model: what the local gradients say of the argmin is where it lies."""
    (H, b), lam = quadratics, 1.5
    x, out = np.zeros(D), []
    for _ in range(8):
        g = mean(Hi @ x - bi for Hi, bi in zip(H, b, strict=True))
        x = mean(argmin(Hi, bi, g, x, lam) for Hi, bi in zip(H, b, strict=True))
        out.append(x)
    found = play(data, SDANE(400, 0.3, 1 / lam, mu), 16)
    assert np.linalg.norm(out[-1]) > 0.1
    np.testing.assert_allclose(found[2::2], out, atol=1e-10)


def test_sdane_with_one_step_is_extragradient(data):
    """All clients step alike, and the centre moves by the gradient there."""
    problem, lam, step = problem_of(data), 2.0, 0.1
    v, out = torch.zeros(D, dtype=torch.float64), []
    for _ in range(10):
        x = v - step / (1 + step * lam) * problem.gradient(v)
        v = v - problem.gradient(x) / lam
        out.append(x.numpy())
    np.testing.assert_allclose(play(data, SDANE(1, step, 1 / lam), 20)[2::2], out, atol=1e-12)


@pytest.mark.parametrize("mu", [0.0, 0.2])
def test_accelerated_sdane_is_its_iteration(data, quadratics, mu):
    """With the argmins of the paper, solved exactly."""
    (H, b), lam = quadratics, 1.5
    x, v, A, B, out = np.zeros(D), np.zeros(D), 0.0, 1.0, []
    for _ in range(8):
        a = (B + np.sqrt(B * B + 4 * lam * A * B)) / (2 * lam)
        assert lam * a * a == pytest.approx((A + a) * B)
        y = (A * x + a * v) / (A + a)
        g = mean(Hi @ y - bi for Hi, bi in zip(H, b, strict=True))
        local = [argmin(Hi, bi, g, y, lam) for Hi, bi in zip(H, b, strict=True)]
        x, slope = mean(local), mean(Hi @ xi - bi for Hi, bi, xi in zip(H, b, local, strict=True))
        v = (B * v + a * mu * x - a * slope) / (B + a * mu)
        A, B = A + a, B + a * mu
        out.append(x)
    np.testing.assert_allclose(play(data, AccSDANE(400, 0.3, 1 / lam, mu), 16)[2::2], out, atol=1e-9)


def test_accelerated_sdane_keeps_its_bound(data, quadratics):
    """f(x) - f* <= ||x0 - x*||^2 / (2 A) with lambda twice the difference of Hessians."""
    H, b = quadratics
    delta = max(np.linalg.norm(Hi - mean(H), 2) for Hi in H)
    lam, A = 2 * delta, 0.0
    best = np.linalg.solve(mean(H), mean(b))
    problem = problem_of(data)
    low, models = float(problem.objective(torch.from_numpy(best))), play(data, AccSDANE(300, 0.3, 1 / lam), 40)
    for x in models[2::2]:
        A += (1 + np.sqrt(1 + 4 * lam * A)) / (2 * lam)
        assert float(problem.objective(torch.from_numpy(x))) - low <= best @ best / (2 * A) + 1e-12


def test_proxcsl_is_its_iteration(data, quadratics):
    """The lead's problem with l1, solved by coordinate descent."""
    (H, b), alpha, h = quadratics, 1.0, L1(0.1)
    x, out = np.zeros(D), []
    for _ in range(6):
        g, Q = mean(Hi @ x - bi for Hi, bi in zip(H, b, strict=True)), H[0] + alpha * np.eye(D)
        u = x.copy()
        for _ in range(500):
            for j in range(D):
                z = u[j] - (g[j] + Q[j] @ (u - x)) / Q[j, j]
                u[j] = np.sign(z) * max(abs(z) - 0.1 / Q[j, j], 0.0)
        x = u
        out.append(x)
    found = play(data, ProxCSL(400, 0.3, alpha), 12, h)
    np.testing.assert_allclose(found[2::2], out, atol=1e-10)


def test_proxcsl_with_equal_clients_needs_one_step(data):
    """The surrogate is the problem itself then."""
    alike = [data[0]] * 4
    found = play(alike, ProxCSL(3000, 0.3, 0.0), 2, L1(0.1))[-1]
    problem = problem_of(alike, L1(0.1))
    assert float(problem.stationarity(torch.from_numpy(found))) < 1e-12


def test_proxcsl_without_damping_fails_where_the_lead_differs(data):
    """Its Hessian is a hundredth of the others'; damping by the difference mends it, to the common solution."""
    poor = [(0.1 * data[0][0], data[0][1]), *data[1:]]
    problem = problem_of(poor, L1(0.05))
    with pytest.warns(GrowthWarning):
        wild = play(poor, ProxCSL(200, 0.3, 1e-4), 8, L1(0.05))
    calm = play(poor, ProxCSL(50, 0.3, problem.smoothness()), 400, L1(0.05))
    assert np.linalg.norm(wild[-1]) > 1e3
    assert float(problem.stationarity(torch.from_numpy(calm[-1]))) < 1e-10


def test_proxcsl_takes_a_weakly_convex_h(data):
    h = MCP(0.3, 3.0)
    problem = problem_of(data, h)
    run = fc.simulate(
        problem, ProxCSL.auto(problem.smoothness(), h.rho), rounds=4000, evaluate_every=50, tolerance=1e-9
    )
    assert run.status == "converged"


def test_what_an_exchange_does_not_use_is_not_sent(data):
    """A gradient, then the local model and the gradient there, or the lead's step."""
    for method, numbers in ((SDANE(3, 0.1, 1.0), (D, 2 * D)), (ProxCSL(3, 0.1), (D, D + 1))):
        run = fc.simulate(problem_of(data), method, rounds=4)
        sent = np.diff([r["bytes_up"] for r in run.history]) / (8 * N)
        assert sent.tolist() == [*numbers, *numbers]
