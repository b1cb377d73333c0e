"""SketchNewton: the answer of proximal Newton and of pooled solvers, from gradients and a few products."""

import numpy as np
import pytest
import torch

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.algorithms import ProxNewton, SketchNewton
from fedcomposite.algorithms.sketchnewton import _started, _updated

SORTED = "sorted"


def silos_of(how, clients=6, features=30, samples=80, seed=0):
    random = np.random.default_rng(seed)
    X = random.normal(size=(clients * samples, features)) @ np.diag(random.uniform(0.3, 3, features))
    X[:, 1] = X[:, 0] + 0.1 * X[:, 1]
    y = np.where(X[:, :6].sum(1) + 2 * random.logistic(size=len(X)) > 0, 1.0, 0.0)
    order = np.argsort(y, kind="stable") if how == SORTED else random.permutation(len(y))
    return fc.Silos.from_arrays([(X[part], y[part]) for part in np.array_split(order, clients)])


def problem_of(how="iid", h=None, loss="logistic"):
    return fc.Problem(silos_of(how), loss=loss, regularizer=h or reg.L1(0.02), bias=True)


def play(problem, method=None, rounds=60, tolerance=1e-10, **settings):
    return fc.simulate(problem, method or SketchNewton(), rounds=rounds, tolerance=tolerance, **settings)


def test_the_update_is_the_least_change_that_knows_the_products():
    """Against the least change in the norm that any matrix W with W Y = V weighs, by linear algebra of its own."""
    random = np.random.default_rng(1)
    A, H = (M @ M.T + np.eye(7) for M in random.normal(size=(2, 7, 7)))
    V = random.normal(size=(7, 3))
    Y = H @ V
    made = _updated(*(torch.from_numpy(t) for t in (A, V, Y))).numpy()
    np.testing.assert_allclose(made @ V, Y, atol=1e-9)
    # Its inverse is BFGS's in the form of Gower, Goldfarb and Richtarik: (I - P) A^-1 (I - P)' + V (V'Y)^-1 V'.
    inside = V @ np.linalg.inv(V.T @ Y)
    P = np.eye(7) - inside @ Y.T
    np.testing.assert_allclose(np.linalg.inv(made), P @ np.linalg.inv(A) @ P.T + inside @ V.T, atol=1e-9)


def test_the_first_metric_is_exact_for_a_hessian_of_low_rank():
    """Nyström's approximation with as many directions as the rank has nothing left for the diagonal."""
    random = np.random.default_rng(2)
    Z = torch.from_numpy(random.normal(size=(9, 3)))
    H, V = Z @ Z.T, torch.from_numpy(random.normal(size=(9, 3)))
    made = _started(V, H @ V, H.diagonal())
    assert float((made - H - torch.diag(1e-3 * H.diagonal())).abs().max()) < 1e-8


def test_one_exchange_after_another_it_learns_a_quadratic_for_good():
    """Least squares without h: once all directions are known a step is Newton's and the next model the solution."""
    problem = problem_of(h=reg.L2Squared(0.1), loss="least_squares")
    run = play(problem, rounds=25, tolerance=1e-12)
    X = problem.silos.features.double().numpy()
    A = np.c_[X, np.ones(len(X))]
    ridge = np.diag([0.1] * 30 + [0.0])
    exact = np.linalg.solve(A.T @ A / len(A) + ridge, A.T @ problem.silos.targets.double().numpy() / len(A))
    assert run.status == "converged"
    np.testing.assert_allclose(run.solution.numpy(), exact, atol=1e-10)


@pytest.mark.parametrize(
    ("h", "loss"),
    [
        (reg.L1(0.02), "logistic"),
        (reg.SCAD(1.0, kappa=0.02), "logistic"),
        (reg.GroupLasso(0.02, groups=2), "logistic"),
        (reg.FusedLasso(0.02), "logistic"),
        (reg.ElasticNet(0.01, 0.1), "squared_hinge"),
        (reg.L1(0.02), "poisson"),
    ],
    ids=str,
)
def test_the_answer_is_that_of_proximal_newton(h, loss):
    problem = problem_of(SORTED, h, loss)
    ours, theirs = play(problem), play(problem, ProxNewton())
    assert ours.status == theirs.status == "converged"
    assert float((ours.solution - theirs.solution).abs().max()) < 1e-9 * max(1.0, float(theirs.solution.abs().max()))


def test_how_samples_are_spread_over_sites_changes_nothing():
    """All of it is a function of means: the same rounds and bytes for sites alike and for sites sorted by label."""
    runs = [play(problem_of(how)) for how in ("iid", SORTED)]
    assert runs[0].rounds == runs[1].rounds
    assert runs[0].history[-1]["bytes_up"] == runs[1].history[-1]["bytes_up"]
    assert float((runs[0].solution - runs[1].solution).abs().max()) < 1e-9


def test_no_client_sends_a_hessian():
    """Fewer directions than coordinates in every exchange, and bytes far below half of a square."""
    problem = problem_of()
    d, run = problem.dimension, play(problem)
    sent = np.diff([record["bytes_up"] for record in run.history]) / len(problem.silos)
    assert sent[0] == 8 + 4 * d + 4 * d + 4 * 5 * d  # loss, gradient, diagonal, five products
    assert sent[1:].max() <= 8 + 8 * d + 4 * (100 + d / 2)
    newton = play(problem, ProxNewton())
    assert run.history[-1]["bytes_up"] < newton.history[-1]["bytes_up"]


def test_a_client_refuses_to_send_its_hessian_as_products():
    """A server that follows no protocol may ask for the products with all unit vectors."""
    problem, method = problem_of(), SketchNewton()
    d = problem.dimension
    grad = fc.problems.ClientGradients(problem.smooth(), np.arange(1), 0, fc.problems.Batches(), fc.problems.Counter())
    asked = method.broadcast(method.init(torch.zeros(d), problem.regularizer)[0])
    asked = asked._replace(directions=torch.eye(d, dtype=torch.float32).flatten())
    with pytest.raises(ValueError, match="more than 8 directions"):
        method.local_round(type(asked)(*(t[None] for t in asked)), None, grad, problem.regularizer)


def test_solve_without_curvature():
    problem = problem_of()
    run, usual = fc.solve(problem, curvature="never"), fc.solve(problem)
    assert run.status == "converged"
    assert "SketchNewton, since the model is linear, its loss smooth, and no Hessian may leave a client" in run.message
    assert run.certificate.kind == "duality gap"
    assert abs(problem.objective(run.solution) - problem.objective(usual.solution)) < 1e-9
    kinked = fc.Problem(silos_of("iid"), loss="hinge", regularizer=reg.L2Squared(0.1))
    assert "FedMLS" in fc.solve(kinked, curvature="never", rounds=5).message
    with pytest.raises(ValueError, match="curvature"):
        fc.solve(problem, curvature="sometimes")


def test_columns_that_say_nothing_and_features_of_other_sizes():
    random = np.random.default_rng(5)
    X = random.normal(size=(300, 8)) * 10.0 ** np.array([-2, 1, 0, 2, -1, 0, 1, 0])
    X[:, 5] = 0.0
    y = (X @ np.array([30, 0.1, 0, 0.02, 3, 0, 0, 1]) + random.logistic(size=300) > 0).astype(float)
    silos = fc.Silos.from_arrays([(X[k::3], y[k::3]) for k in range(3)])
    problem = fc.Problem(silos, loss="logistic", regularizer=reg.L1(0.01), bias=True)
    run, exact = fc.solve(problem, curvature="never"), fc.solve(problem)
    assert run.status == "converged"
    assert abs(problem.objective(run.solution) - problem.objective(exact.solution)) < 1e-9
