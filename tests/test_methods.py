"""The methods of the foundation against each other, against pooled solvers and against theory."""

import numpy as np
import pytest
import torch
from skglm import penalties
from skglm.datafits import Logistic
from skglm.solvers import ProxNewton

import fedcomposite as fc
from fedcomposite.algorithms import FedAvg, FedCanon, FedCanonII, FedNMap, ProximalGradient, Scaffold, Zhang
from fedcomposite.regularizers import L1, MCP, SCAD, Zero

TAU = 10


def models(problem, method, rounds=20, **settings):
    return fc.simulate(problem, method, rounds=rounds, keep_solutions=True, evaluate_every=rounds, **settings).solutions


@pytest.mark.parametrize("batch_size", [None, 7])
@pytest.mark.parametrize("server_step", [1.0, 1.7])
def test_smooth_case_is_scaffold(silos, batch_size, server_step):
    """With h = 0 four methods are SCAFFOLD (option II) in other words."""
    problem = fc.Problem(silos, loss="logistic", regularizer=Zero())
    step = 0.7
    round_step = server_step * step * TAU
    x0 = torch.linspace(-1, 1, 20, dtype=torch.float64)
    same = [
        Scaffold(TAU, step, server_step, option=2),
        Zhang(TAU, step, server_step),
        FedCanon(TAU, step, round_step),
        FedCanonII(TAU, step, round_step),
        FedNMap(TAU, step, server_step, gamma=0.3),
    ]
    first, *rest = (models(problem, m, batch_size=batch_size, x0=x0) for m in same)
    assert (first[-1] - first[0]).norm() > 0.1
    for other in rest:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-10)


@pytest.mark.parametrize("regularizer", [L1(0.003), MCP(0.01, 30.0), SCAD(0.01, kappa=0.05)], ids=repr)
def test_one_local_step_is_proximal_gradient(silos, regularizer):
    problem = fc.Problem(silos, loss="logistic", regularizer=regularizer)
    step = 4.0
    same = [
        ProximalGradient(step),
        Zhang(1, step / 2, 2.0),
        FedCanon(1, 0.5, step),
        FedCanonII(1, 0.5, step),
        FedNMap(1, step, 1.0, gamma=step),
    ]
    reference, *rest = (models(problem, m) for m in same)
    assert (reference[-1] - reference[0]).norm() > 0.1
    for other in rest:
        torch.testing.assert_close(other, reference, rtol=0, atol=1e-10)


def test_one_local_step_scaffold_is_gradient_descent(silos):
    problem = fc.Problem(silos, loss="logistic")
    reference = models(problem, ProximalGradient(1.4))
    for option in (1, 2):
        torch.testing.assert_close(models(problem, Scaffold(1, 0.7, 2.0, option)), reference, rtol=0, atol=1e-10)
    torch.testing.assert_close(models(problem, FedAvg(1, 0.7, 2.0)), reference, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore::fedcomposite.OneClassWarning")
def test_one_client_scaffold_is_fedavg(silos):
    one = next(silos[i] for i in range(len(silos)) if len(silos[i][1].unique()) == 2)
    problem = fc.Problem(fc.Silos.from_arrays([one]), loss="logistic")
    for batch_size in (None, 5):
        one, two = (models(problem, m, batch_size=batch_size) for m in (Scaffold(5, 1.0), FedAvg(5, 1.0)))
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10)


@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_is_exact_under_partial_participation(silos, option):
    """c stays the mean of all c_i, and the limit is the optimum of the smooth problem."""
    push = 5 * np.vstack([np.eye(20), -np.eye(20)])  # samples that pull every coordinate to zero: strong convexity
    parts = (silos[i] for i in range(8))
    arrays = [(np.vstack([X.numpy(), push]), np.append(y.numpy(), np.ones(40))) for X, y in parts]
    problem = fc.Problem(fc.Silos.from_arrays(arrays), loss="logistic")
    method = Scaffold(5, 0.5, option=option)
    run = fc.simulate(problem, method, rounds=2000, participation=0.5, evaluate_every=50, tolerance=1e-11)
    assert run.status == "converged"
    torch.testing.assert_close(run.server.c, run.clients.c.mean(0), rtol=0, atol=1e-12)


def test_corrections_sum_to_zero(lasso):
    """The corrections c_i of the next round: mean zero whatever the minibatches."""
    for method in (Zhang(TAU, 1.0), FedNMap(TAU, 1.0, gamma=10.0)):
        run = fc.simulate(lasso, method, rounds=12, batch_size=5)
        center = run.server.x_bar if isinstance(method, Zhang) else run.server.z
        torch.testing.assert_close(run.clients.own.mean(0), center, rtol=0, atol=1e-12)
    run = fc.simulate(lasso, FedCanon(TAU, 1.0, 10.0), rounds=12, batch_size=5)
    torch.testing.assert_close(run.clients.pending.mean(0), -run.server.delta, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::fedcomposite.OneClassWarning")
def test_zhang_stops_at_the_solution_and_the_ablation_does_not():
    """Section A.2 of the paper: one client, full gradients, started from x* - eta~ grad f(x*)."""
    silos = fc.data.load("synthetic", clients=1, features=10, samples=60, seed=5)
    problem = fc.Problem(silos, loss="logistic", regularizer=L1(0.01))
    optimum = fc.simulate(problem, ProximalGradient(4.0), rounds=20_000, tolerance=1e-14, evaluate_every=50).solution
    for growing in (True, False):
        method = Zhang(5, 0.8, growing_prox=growing)
        x0 = optimum - method.round_step * problem.gradient(optimum)
        moved = (models(problem, method, x0=x0) - optimum).norm(dim=1).max()
        assert (moved < 1e-11) == growing


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [Zhang(TAU, 4.0, 2.0), FedNMap(TAU, 4.0, 2.0, gamma=25.0)], ids=lambda m: type(m).__name__
)
def test_exact_methods_reach_the_pooled_solution(lasso, method):
    run = fc.simulate(lasso, method, rounds=1500, evaluate_every=10)
    assert run.history[-1].stationarity <= 1e-10 * run.history[0].stationarity
    X, y = lasso.silos.features.numpy(), lasso.silos.targets.numpy()  # equal silos: the pooled objective is the same
    solver = ProxNewton(fit_intercept=False, tol=1e-12, max_iter=200)
    pooled = solver.solve(np.asfortranarray(X), y, Logistic(), penalties.L1(0.003))[0]
    assert abs(lasso.objective(run.solution) - lasso.objective(pooled)) < 1e-9
    assert np.array_equal(run.solution.numpy() != 0, np.abs(pooled) > 1e-9)
    assert 0 < (run.solution != 0).sum() < 20
    np.testing.assert_allclose(run.solution, pooled, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("regularizer", [MCP(0.01, 30.0), SCAD(1.0, kappa=0.005)], ids=repr)
@pytest.mark.parametrize("kind", [Zhang, FedNMap])
def test_weakly_convex_regularizers(silos, regularizer, kind):
    problem = fc.Problem(silos, loss="logistic", regularizer=regularizer)
    extra = {"gamma": 15.0} if kind is FedNMap else {}
    run = fc.simulate(problem, kind(TAU, 2.0, 1.0, **extra), rounds=4000, evaluate_every=20, tolerance=1e-9)
    assert run.status == "converged"
    assert problem.optimality(run.solution) < 1e-8
    assert 0 < (run.solution != 0).sum() < 20


@pytest.fixture(scope="module")
def best(lasso):
    return fc.simulate(lasso, Zhang(10, 4.0, 2.0), rounds=1500, evaluate_every=1500).solution.numpy()


@pytest.mark.slow
@pytest.mark.parametrize(("tau", "step"), [(10, 0.05), (10, 0.01), (4, 0.1)])
def test_fedcanon_stops_at_its_predicted_residual(lasso, best, tau, step):
    """||G|| = (beta/2) (tau - 1) ||[H grad f]_support||, evaluated with the Hessian of the pooled logistic loss."""
    run = fc.simulate(lasso, FedCanon(tau, step, 24.0), rounds=2500, evaluate_every=2500)
    X, b = lasso.silos.features.numpy(), lasso.silos.targets.numpy()
    p = 1 / (1 + np.exp(-X @ best))
    gradient = X.T @ (p - (b > 0)) / len(b)
    hessian = (X * (p * (1 - p))[:, None]).T @ X / len(b)
    predicted = step / 2 * (tau - 1) * np.linalg.norm((hessian @ gradient)[best != 0])
    assert run.history[-1].stationarity == pytest.approx(predicted, rel=0.05)


def test_fedavg_drifts_and_keeps_no_zeros(lasso):
    run = fc.simulate(lasso, FedAvg(TAU, 1.0), rounds=600, evaluate_every=600)
    assert run.history[-1].stationarity > 1e-3
    assert run.history[-1].nonzeros == 20


def test_vectors_and_proxes_per_round(lasso):
    """Bytes and prox counts of the first round, in vectors per client and proxes in the whole system."""
    n, vector = 30, 20 * 8
    expected = {
        FedAvg(TAU, 1.0): (1, 1, 0),
        Scaffold(TAU, 1.0): (2, 2, 0),
        Zhang(TAU, 1.0): (1, 1, n * TAU + 1),
        FedCanon(TAU, 1.0, 10.0): (1, 2, 1),
        FedCanonII(TAU, 1.0, 10.0): (1, 1, n + 1),
        FedNMap(TAU, 1.0, gamma=10.0): (1, 1, n * TAU),
        ProximalGradient(1.0): (1, 1, 1),
    }
    for method, (up, down, proxes) in expected.items():
        record = fc.simulate(lasso, method, rounds=1).history[-1]
        assert (record.bytes_up, record.bytes_down) == (n * up * vector, n * down * vector)
        assert record.prox_evaluations == proxes
        assert record.gradient_evaluations == n * (1 if isinstance(method, ProximalGradient) else TAU)
