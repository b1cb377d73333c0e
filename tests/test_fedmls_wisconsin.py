"""FedMLS on the problem of its paper: the sum of hinge losses on the Wisconsin data, k-means over ten clients."""

import cvxpy as cp
import numpy as np
import pytest
import torch
from oracle_fedmls import fedmls

import fedcomposite as fc
from fedcomposite.algorithms import FedMLS


@pytest.fixture(scope="module")
def problem():
    silos = fc.data.load("wisconsin").partition("kmeans", clients=10, seed=0)
    return fc.Problem(silos, loss="hinge_sum", bias=True)


@pytest.fixture(scope="module")
def arrays(problem):
    silos = problem.silos
    return [(np.column_stack([X.numpy(), np.ones(len(X))]), y.numpy()) for X, y in (silos[i] for i in range(10))]


def test_equals_an_independent_implementation(problem, arrays):
    def subgradient(X, y):
        return lambda u: -((y * (X @ u) < 1) * y) @ X

    run = fc.simulate(problem, FedMLS(lambda0=1.0), rounds=60, keep_solutions=True, evaluate_every=60)
    expected, _ = fedmls([subgradient(X, y) for X, y in arrays], np.zeros(10), 60, lambda k: 1.0 / k, lambda k: k)
    np.testing.assert_allclose(run.solutions[1:], expected, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_gap_falls_at_least_like_one_over_k(problem, arrays):
    """The best lambda0 of {0.1, 1, 10}: slope of log gap against log k between rounds 20 and 200."""
    w = cp.Variable(10)
    losses = [cp.sum(cp.pos(1 - cp.multiply(y, X @ w))) for X, y in arrays]
    best = cp.Problem(cp.Minimize(sum(losses) / 10)).solve(solver=cp.CLARABEL)
    assert best <= problem.objective(w.value) + 1e-6
    fits = {}
    for lambda0 in (0.1, 1.0, 10.0):
        history = fc.simulate(problem, FedMLS(lambda0=lambda0), rounds=200, evaluate_every=5).history
        rounds = np.asarray([r.round for r in history])
        gaps = np.asarray([r.objective for r in history]) - best
        assert (gaps > -1e-6).all()
        late = rounds >= 20
        fits[lambda0] = gaps[-1], np.polyfit(np.log(rounds[late]), np.log(gaps[late]), 1)[0]
    final, slope = min(fits.values())
    print(f"final gap {final:.3g}, slope {slope:.2f}; all: {fits}")
    assert slope <= -1


@pytest.mark.parametrize("radius", [0.5, 1.0])
def test_iterates_stay_in_the_ball(problem, radius):
    run = fc.simulate(problem, FedMLS(lambda0=1.0, radius=radius), rounds=40, keep_solutions=True, evaluate_every=40)
    free = fc.simulate(problem, FedMLS(lambda0=1.0), rounds=40, keep_solutions=True, evaluate_every=40)
    assert torch.linalg.vector_norm(run.solutions, dim=1).max() <= radius * (1 + 1e-12)
    assert torch.linalg.vector_norm(free.solutions, dim=1).max() > radius
