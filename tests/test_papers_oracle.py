"""One claim of each paper, computed again from its text alone (oracle_papers.py, oracle_fedmls.py)."""

import numpy as np
import pytest
import torch
from oracle_fedmls import fedmls
from oracle_papers import fedcanon, fednmap, fedprox, zhang

import fedcomposite as fc
from fedcomposite.algorithms import FedCanon, FedNMap, FedProx, Zhang
from fedcomposite.papers import fedmls_fig1
from fedcomposite.regularizers import L1

N, D, M, LAM, TAU = 6, 8, 30, 0.1, 5


def soft(v, s, lam=LAM):
    return np.sign(v) * np.maximum(np.abs(v) - s * lam, 0)


@pytest.fixture(scope="module")
def quadratics():
    """Least squares of six clients that disagree: (X, y), and f_i(x) = x'A_i x / 2 - b_i'x up to a constant."""
    rng = np.random.default_rng(3)
    data = []
    for _ in range(N):
        X = rng.normal(0.5 * rng.normal(size=D), 1, (M, D))
        data.append((X, X @ (np.arange(D) % 3 + rng.normal(size=D)) + rng.normal(size=M)))
    A = [X.T @ X / M for X, _ in data]
    b = [X.T @ y / M for X, y in data]
    return data, A, b


@pytest.fixture(scope="module")
def whole(quadratics):
    """H, the mean of the b_i, L of the worst client, and the solution of f + lam ||x||_1 by proximal gradient steps."""
    _, A, b = quadratics
    H, mean = sum(A) / N, sum(b) / N
    x, s = np.zeros(D), 1 / np.linalg.eigvalsh(H).max()
    for _ in range(200_000):
        new = soft(x - s * (H @ x - mean), s)
        if np.array_equal(new, x):
            break
        x = new
    return H, mean, max(np.linalg.eigvalsh(a).max() for a in A), x


def gradients(quadratics):
    return [lambda x, a=a, b=b: a @ x - b for a, b in zip(quadratics[1], quadratics[2], strict=True)]


def problem(quadratics, h=True):
    silos = fc.Silos.from_arrays(quadratics[0])
    return fc.Problem(silos, loss="least_squares", regularizer=L1(LAM) if h else None)


def mapping(x, whole, s):
    """||x - P_s(x - s grad f(x))|| / s."""
    H, mean, _, _ = whole
    return np.linalg.norm(x - soft(x - s * (H @ x - mean), s)) / s


def test_fedcanons_residual_goes_with_beta(quadratics, whole):
    """FedCanon's Remark 4 gives beta no influence; what it leaves is (beta/2) (tau - 1) ||[H grad f]_support||."""
    H, mean, L, best = whole
    alpha, ratios, levels = 1 / L, [], []
    slope = (H @ (H @ best - mean))[best != 0]
    for share in (0.1, 0.01, 0.001):
        beta = share / L / TAU
        models, c = fedcanon(gradients(quadratics), soft, best, 1500, TAU, beta, alpha)
        levels.append(mapping(models[-1], whole, alpha))
        ratios.append(levels[-1] / (beta / 2 * (TAU - 1) * np.linalg.norm(slope)))
        np.testing.assert_allclose(c.sum(0), 0, atol=1e-10)
        run = fc.simulate(
            problem(quadratics), FedCanon(TAU, beta, alpha), rounds=40, x0=torch.from_numpy(best), keep_solutions=True
        )
        np.testing.assert_allclose(run.solutions[1:], models[:40], rtol=0, atol=1e-12)
    assert 0.5 < np.count_nonzero(best) / D < 1  # the support is not everything
    assert levels[0] / levels[2] == pytest.approx(100, rel=0.1)
    assert abs(ratios[2] - 1) < 2e-3 < abs(ratios[0] - 1) < 0.2


def test_zhang_is_exact_with_n_tau_plus_one_proxes_a_round(quadratics, whole):
    """FedCanon's Table III gives Zhang's method 2 N K + 1 proxes of h a round; its own Algorithm 1 has N K + 1."""
    _, _, L, best = whole
    calls = []

    def counted(v, s):
        calls.append(s)
        return soft(v, s)

    eta, eta_g = 0.5 / L / TAU, 1.5
    models = zhang(gradients(quadratics), counted, np.zeros(D), 30, TAU, eta, eta_g)
    assert len(calls) == 1 + 30 * (N * TAU + 1)
    del calls[:]
    fewer = zhang(gradients(quadratics), counted, np.zeros(D), 30, TAU, eta, eta_g, last_prox=False)
    np.testing.assert_array_equal(fewer, models)
    assert len(calls) == 1 + 30 * (N * (TAU - 1) + 1)
    run = fc.simulate(problem(quadratics), Zhang(TAU, eta, eta_g), rounds=30, keep_solutions=True)
    np.testing.assert_allclose(run.solutions[1:], models, rtol=0, atol=1e-12)
    assert run.history[-1]["prox_evaluations"] / 30 <= N * TAU + 1
    ends = zhang(gradients(quadratics), soft, np.zeros(D), 1000, TAU, eta, eta_g)[-1]
    assert np.linalg.norm(ends - best) < 1e-10  # as printed, rounding adds up from round to round: no less


@pytest.mark.parametrize("batch", [1, 20])
def test_noise_leaves_zhang_in_a_neighbourhood_that_batches_shrink(batch, quadratics, whole):
    """Zhang's Figure 3: started at x* - eta~ grad f(x*), its squared error is that of one over the batch."""
    H, mean, L, best = whole
    eta = 0.05 / L / TAU
    levels = {}
    for size in (batch, 4 * batch):
        rng = np.random.default_rng(size)
        noisy = [
            lambda x, g=g, scale=size**-0.5, rng=rng: g(x) + scale * rng.normal(size=D) for g in gradients(quadratics)
        ]
        start = best - eta * TAU * (H @ best - mean)
        models = zhang(noisy, soft, start, 2000, TAU, eta, 1.0)
        levels[size] = np.mean(((models[500:] - best) ** 2).sum(1))
    assert levels[batch] / levels[4 * batch] == pytest.approx(4, rel=0.25)


def test_fednmap_stops_at_zeros_of_the_normal_map_and_falls_linearly(quadratics, whole):
    """FedNMap: grad f(P(z)) + (z - P(z)) / gamma vanishes in the end, linearly under the PL condition."""
    H, mean, L, best = whole
    gamma = 2 / L
    value = lambda x: x @ H @ x / 2 - mean @ x + LAM * np.abs(x).sum()  # noqa: E731
    for tau in (1, 5, 20):
        eta = 0.5 / L / tau
        z = fednmap(gradients(quadratics), soft, np.zeros(D), 1000, tau, eta, 1.0, gamma)
        x = soft(z[-1], gamma)
        assert np.linalg.norm(H @ x - mean + (z[-1] - x) / gamma) < 1e-11
        assert np.linalg.norm(x - best) < 1e-11
        gaps = np.array([value(soft(v, gamma)) - value(best) for v in z[:200]])
        falling = gaps > 1e-11
        assert falling.sum() > 30
        fit = np.polyfit(np.flatnonzero(falling), np.log(gaps[falling]), 1)
        assert fit[0] < -1e-3
        assert np.corrcoef(np.flatnonzero(falling), np.log(gaps[falling]))[0, 1] < -0.97
        run = fc.simulate(
            problem(quadratics), FedNMap(tau, eta, server_step=1.0, gamma=gamma), rounds=30, keep_solutions=True
        )
        np.testing.assert_allclose(run.solutions[1:], [soft(v, gamma) for v in z[:30]], rtol=0, atol=1e-11)


@pytest.mark.parametrize("seed", [0, 1])
def test_fedmls_gap_falls_at_least_like_one_over_k(seed, real_data):
    """FedMLS, Figure 1: lambda_k = 1 / k and T_k = k on the authors' problem, with full subgradients; (F - F*) / F*."""
    parts, lowest = fedmls_fig1.clients(seed)

    def subgradient(rows):
        return lambda u: -((rows @ u < 1) * 1.0) @ rows

    models, _ = fedmls([subgradient(rows) for rows in parts], np.zeros(10), 120, lambda k: 1.0 / k, lambda k: k)
    gaps = np.maximum(1 - models @ np.concatenate(parts).T, 0).sum(1) / lowest - 1
    assert gaps.min() > 0
    late = np.arange(12, 121)
    assert np.polyfit(np.log(late), np.log(gaps[late - 1]), 1)[0] < -1
    loop = fedmls_fig1.follow("FedMLS", parts, 1.0, range(1, 121), seed, share=1.0)
    np.testing.assert_allclose(loop, models, rtol=0, atol=1e-9)


def test_fedproxs_squared_gradient_falls_with_the_horizon_as_theorem_1_says(quadratics, whole):
    """Yuan & Li, Theorem 1 with all clients: eta = T^(-1/3) / (3L) for a fixed T, mean squared gradient O(T^(-2/3))."""
    H, mean, L, _ = whole
    _, A, b = quadratics
    horizons, levels = np.array([64, 256, 1024, 4096]), []
    for T in horizons:
        models = fedprox(A, b, np.zeros(D), int(T), T ** (-1 / 3) / (3 * L))
        before = np.concatenate([np.zeros((1, D)), models[:-1]])
        levels.append(np.mean(((before @ H - mean) ** 2).sum(1)))
    assert np.polyfit(np.log(horizons), np.log(levels), 1)[0] == pytest.approx(-2 / 3, abs=0.05)
    eta = 1 / (6 * L)
    run = fc.simulate(
        problem(quadratics, h=False), FedProx(eta, 1 / (L + 1 / eta), tolerance=1e-13), rounds=20, keep_solutions=True
    )
    np.testing.assert_allclose(run.solutions[1:], fedprox(A, b, np.zeros(D), 20, eta), rtol=0, atol=1e-11)
