"""ProxNewton: the answers of cvxpy, scikit-learn and FedNMap in few rounds, with every kind of h and loss."""

import warnings
from itertools import pairwise

import cvxpy as cp
import numpy as np
import pytest
import torch
from sklearn.linear_model import ElasticNet, LogisticRegression, PoissonRegressor

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.algorithms import FedNMap, ProxNewton, inner
from fedcomposite.algorithms.inner import QuadraticModel, _jacobian, minimise
from fedcomposite.regularizers.wrapped import restricted
from fedcomposite.runtime import Simulator
from fedcomposite.runtime.counted import Counted


@pytest.fixture(scope="module")
def hospitals():
    return fc.data.load("heart_disease")


def newton(problem, rounds=12, tolerance=1e-9, **fields):
    run = fc.simulate(problem, ProxNewton(**fields), rounds=rounds, tolerance=tolerance)
    assert run.status == "converged", run
    values = [r.objective for r in run.history]
    assert all(b <= a + 1e-12 * max(1, abs(a)) for a, b in pairwise(values))
    return run


def weighed(problem):
    """Pooled samples with a column of ones, targets, and each sample's weight in f."""
    X, y = (np.concatenate([np.asarray(problem.silos[i][k]) for i in range(len(problem.silos))]) for k in (0, 1))
    weight = np.repeat(problem.weights / problem.silos.sizes, problem.silos.sizes)
    return (np.c_[X, np.ones(len(X))] if problem.bias else X), y, weight


def pooled(problem, term):
    """The minimiser by cvxpy; ``term`` is h as an expression of the regularized coefficients."""
    X, y, weight = weighed(problem)
    x = cp.Variable(X.shape[1])
    z = X @ x
    signs = np.where(y > 0, 1.0, -1.0)
    loss = {
        "Logistic": lambda: cp.logistic(cp.multiply(-signs, z)),
        "LeastSquares": lambda: cp.square(z - y) / 2,
        "Huber": lambda: cp.huber(z - y, 1.0) / 2,
        "SquaredHinge": lambda: cp.square(cp.pos(1 - cp.multiply(signs, z))),
    }[type(problem.loss).__name__]()
    inner = x[:-1] if problem.bias else x
    made = cp.Problem(cp.Minimize(weight @ loss + term(inner)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it stopped short of its tolerance; the objectives will tell
        made.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    return torch.from_numpy(x.value)


def groups_of_two(x):
    return 0.02 * np.sqrt(2) * sum(cp.norm(x[j : j + 2]) for j in range(0, 10, 2))


CONVEX = {
    "l1": (reg.L1(0.02), lambda x: 0.02 * cp.norm1(x)),
    "adaptive l1": (reg.L1(0.02, tuple(range(1, 11))), lambda x: 0.02 * (np.arange(1, 11) @ cp.abs(x))),
    "elastic net": (reg.ElasticNet(0.02, 0.05), lambda x: 0.02 * cp.norm1(x) + 0.025 * cp.sum_squares(x)),
    "group lasso": (reg.GroupLasso(0.02, groups=2), groups_of_two),
    "box": (reg.Box(-0.2, 0.3), lambda x: cp.sum(cp.pos(x - 0.3) + cp.pos(-0.2 - x)) * 10),
    "non-negative": (reg.NonNegative(), lambda x: 10 * cp.sum(cp.pos(-x))),
    "linf": (reg.LinfNorm(0.1), lambda x: 0.1 * cp.norm_inf(x)),
    "fused": (reg.FusedLasso(0.02), lambda x: 0.02 * cp.norm1(cp.diff(x))),
    "l1 ball": (reg.L1Ball(0.5), lambda x: 10 * cp.pos(cp.norm1(x) - 0.5)),
}


@pytest.mark.parametrize("name", CONVEX)
def test_equals_cvxpy_for_every_kind_of_regularizer(hospitals, name):
    h, term = CONVEX[name]
    problem = fc.Problem(hospitals, loss="logistic", regularizer=h, bias=True)
    run, want = newton(problem), pooled(problem, term)
    torch.testing.assert_close(run.solution, want, rtol=0, atol=1e-5)
    best = problem.objective(run.solution)
    if not isinstance(h, reg.Indicator):
        rel = 1e-9 if name == "elastic net" else 1e-10  # Clarabel stalls there
        assert best == pytest.approx(problem.objective(want), rel=rel)
        assert torch.equal(run.solution != 0, want.abs() > 1e-6)
    assert problem.optimality(run.solution) <= 1e-7


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("loss", ["least_squares", "huber", "squared_hinge"])
def test_equals_cvxpy_for_every_loss(hospitals, loss, weights):
    problem = fc.Problem(hospitals, loss=loss, regularizer=reg.L1(0.02), bias=True, weights=weights)
    run, want = newton(problem), pooled(problem, lambda x: 0.02 * cp.norm1(x))
    assert problem.objective(run.solution) == pytest.approx(problem.objective(want), rel=1e-10)
    assert torch.equal(run.solution != 0, want.abs() > 1e-6)


def test_equals_scikit_learn(hospitals):
    for loss, made in {
        "least_squares": ElasticNet(0.03, l1_ratio=1 / 3, tol=1e-14, max_iter=100000),
        "logistic": LogisticRegression(C=50.0, tol=1e-12, max_iter=10000),
        "poisson": PoissonRegressor(alpha=0.02, tol=1e-12, solver="newton-cholesky"),
    }.items():
        h = reg.ElasticNet(0.01, 0.02) if loss == "least_squares" else reg.L2Squared(0.02)
        silos = hospitals
        if loss == "poisson":
            silos = fc.Silos.from_arrays(
                [(silos[i][0], np.round(np.asarray(silos[i][0][:, 0]) ** 2)) for i in range(4)]
            )
        problem = fc.Problem(silos, loss=loss, regularizer=h, bias=True, weights="samples")
        X, y, _ = weighed(problem)
        if loss == "logistic":
            made.C = 1 / (0.02 * len(X))
        theirs = made.fit(X[:, :-1], y)
        want = torch.from_numpy(np.r_[theirs.coef_.ravel(), np.ravel(theirs.intercept_)])
        run = newton(problem)
        assert problem.objective(run.solution) == pytest.approx(problem.objective(want), rel=1e-10)


@pytest.mark.parametrize("h", [reg.SCAD(1.0, kappa=0.02), reg.MCP(0.02, 3.0), reg.MCP(0.3, 3.0, kappa=0.5)], ids=str)
def test_weakly_convex_is_stationary_and_no_worse_than_fednmap(hospitals, h):
    problem = fc.Problem(hospitals, loss="logistic", regularizer=h, bias=True)
    run = newton(problem)
    assert problem.optimality(run.solution) <= 1e-9
    method = FedNMap.auto(problem.smoothness(), h.rho, local_steps=1)
    other = fc.simulate(problem, method, rounds=1500, tolerance=1e-7, evaluate_every=50)
    assert problem.objective(run.solution) <= other.history[-1].objective + 1e-10


def multinomial(h, clients=3):
    silos = fc.data.load("digits").partition("dirichlet", clients=clients, alpha=0.5)
    few = [(silos[i][0][:60, 10:30], np.asarray(silos[i][1][:60]) % 3) for i in range(clients)]
    return fc.Problem(fc.Silos.from_arrays(few), loss="multinomial", regularizer=h, bias=True)


@pytest.mark.parametrize("everything", [1, 1000])
@pytest.mark.parametrize("name", ["l1", "rows", "nuclear"])
def test_multinomial_equals_cvxpy(name, everything):
    h, term = {
        "l1": (reg.L1(0.02), lambda W: 0.02 * cp.sum(cp.abs(W))),
        "rows": (reg.GroupLasso(0.02, groups="rows", weights="equal"), lambda W: 0.02 * cp.sum(cp.norm(W, 2, axis=1))),
        "nuclear": (reg.NuclearNorm(0.05), lambda W: 0.05 * cp.normNuc(W)),
    }[name]
    problem = multinomial(h)
    run = newton(problem, rounds=15, everything=everything, grow=10)
    X, y, weight = weighed(problem)
    W = cp.Variable((X.shape[1], 3))
    z = X @ W
    loss = cp.log_sum_exp(z, axis=1) - cp.sum(cp.multiply(z, np.eye(3)[y.astype(int)]), axis=1)
    made = cp.Problem(cp.Minimize(weight @ loss + term(W[:-1])))
    solver = cp.SCS if name == "nuclear" else cp.CLARABEL
    made.solve(solver=solver, **({"eps": 1e-7} if name == "nuclear" else {}))
    want = torch.from_numpy(W.value).flatten()
    assert problem.objective(run.solution) == pytest.approx(
        problem.objective(want), rel=1e-5 if name == "nuclear" else 1e-8
    )
    assert problem.objective(run.solution) <= problem.objective(want) + 1e-10
    assert problem.optimality(run.solution) <= 1e-8


def wide(p=600, n=4, m=30, seed=0):
    rng = np.random.default_rng(seed)
    truth = np.zeros(p)
    truth[:8] = rng.normal(size=8) * 2
    arrays = []
    for _ in range(n):
        X = rng.normal(size=(m, p))
        arrays.append((X, np.sign(X @ truth + 0.3 * rng.normal(size=m))))
    return fc.Silos.from_arrays(arrays)


@pytest.mark.slow
@pytest.mark.parametrize(
    "h", [reg.L1(0.08), reg.GroupLasso(0.05, groups=3), reg.MCP(0.08, 20.0)], ids=["l1", "group", "mcp"]
)
def test_working_set_finds_the_same_answer(h):
    problem = fc.Problem(wide(), loss="logistic", regularizer=h, bias=True)
    whole, some = newton(problem, everything=1000), newton(problem, rounds=20, everything=50, grow=20)
    last = int(some.server.working.sum())
    assert last < 300
    assert some.server.working[-1]  # the intercept
    parts = problem.regularizer.coupling(601)
    for label in parts[some.server.working].unique():
        assert bool(some.server.working[parts == label].all())
    if not h.rho:
        torch.testing.assert_close(some.solution, whole.solution, rtol=0, atol=1e-9)
        assert torch.equal(some.solution != 0, whole.solution != 0)
    assert some.history[-1].bytes_up < whole.history[-1].bytes_up / 2
    assert problem.optimality(some.solution) <= 1e-8


def test_start_puts_coordinates_into_the_first_working_set():
    problem = fc.Problem(wide(), loss="logistic", regularizer=reg.L1(0.08), bias=True)
    run = newton(problem, everything=50)
    warm = ProxNewton(everything=50, start=tuple(run.server.working.nonzero().squeeze(1).tolist()))
    again = fc.simulate(problem, warm, rounds=12, tolerance=1e-9)
    assert again.rounds < run.rounds
    torch.testing.assert_close(again.solution, run.solution, rtol=0, atol=1e-9)


def test_line_search_survives_overflow():
    """Poisson from zero with large features: a full Newton step overflows exp, and the loop names no failing client."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 4)) * [1, 30, 1, 1e-2]
    y = rng.poisson(np.exp(np.clip(0.5 * X[:, 0] + 0.1 * X[:, 1] + 1, None, 8)))
    y[0] = 5000
    silos = fc.Silos.from_arrays([(X[:30], y[:30]), (X[30:], y[30:])])
    problem = fc.Problem(silos, loss="poisson", regularizer=reg.L2Squared(1e-3), bias=True)
    one = newton(problem, rounds=40, tolerance=1e-6)
    two = fc.simulate(problem, ProxNewton(), rounds=40, tolerance=1e-6, backend="loop")
    torch.testing.assert_close(one.solution, two.solution, rtol=1e-9, atol=1e-12)
    far = fc.simulate(problem, ProxNewton(), rounds=60, tolerance=1e-6, x0=torch.tensor([0.0, 0.3, 0, 0, 0]))
    torch.testing.assert_close(far.solution, one.solution, rtol=1e-6, atol=1e-8)


ILL = {
    "duplicate columns": lambda X: np.c_[X, X],
    "constant columns": lambda X: np.c_[X, np.ones(len(X)), np.zeros(len(X))],
    "more features than samples": lambda X: np.random.default_rng(1).normal(size=(len(X), 90)),
    "badly scaled": lambda X: X * [1e-4, 1, 1e4, 1],
}


@pytest.mark.slow
@pytest.mark.parametrize("h", [reg.Zero(), reg.L1(0.01), reg.GroupLasso(0.01, groups=2), reg.MCP(0.05, 3.0)], ids=str)
@pytest.mark.parametrize("name", ILL)
def test_ill_posed_data_end_in_finite_numbers(name, h):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 4))
    y = np.sign(X[:, 0] + rng.normal(size=60))
    A = ILL[name](X)
    order = np.argsort(y)  # a silo with one class only
    silos = fc.Silos.from_arrays([(A[order[:20]], y[order[:20]]), (A[order[20:]], y[order[20:]])])
    for loss in ("logistic", "least_squares", "huber"):
        problem = fc.Problem(silos, loss=loss, regularizer=h, bias=True)
        run = fc.simulate(problem, ProxNewton(), rounds=40, tolerance=1e-8)
        assert torch.isfinite(run.solution).all()
        assert all(np.isfinite(r.objective) for r in run.history)
        if not (name == "badly scaled" and isinstance(h, reg.GroupLasso)):
            assert run.status == "converged", (loss, run)


def test_one_exchange_carries_what_is_promised(hospitals):
    """Down: x and a mask of W. Up: one loss, one gradient, one triangle; nothing is kept at the clients."""
    problem = fc.Problem(hospitals, loss="logistic", regularizer=reg.L1(0.005), bias=True)
    run = fc.simulate(problem, ProxNewton(), rounds=1)
    d = problem.dimension
    assert run.history[-1].bytes_down == 4 * (8 * d + d)
    assert run.history[-1].bytes_up == 4 * 8 * (1 + d + d * (d + 1) // 2)
    assert not run.clients


def test_refusals():
    silos = fc.data.load("synthetic", clients=4, features=8, samples=20, seed=1)
    method = ProxNewton()
    with pytest.raises(ValueError, match="ProxNewton needs every client in every round"):
        fc.simulate(fc.Problem(silos, regularizer=reg.L1(0.01)), method, rounds=1, participation=0.5)
    with pytest.raises(ValueError, match="has no finite rho"):
        fc.simulate(fc.Problem(silos, regularizer=reg.L0(0.01)), method, rounds=1)
    with pytest.raises(ValueError, match="couples all 5000 coordinates"):
        method.init(torch.zeros(5000), reg.FusedLasso(0.1))
    with (
        pytest.warns(fc.NonSmoothWarning),
        pytest.raises(TypeError, match=r"Hinge.*has no second derivative.*first-order"),
    ):
        fc.simulate(fc.Problem(silos, loss="hinge"), method, rounds=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_does_not_make_it_wander(hospitals, dtype):
    problem = fc.Problem(hospitals, loss="logistic", regularizer=reg.L1(0.005), bias=True)
    run = fc.simulate(problem, ProxNewton(), rounds=30, dtype=dtype)
    assert run.history[-1].stationarity <= (1e-14 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_inner_solver_on_hard_quadratics(seed):
    """Condition numbers of 1e6 that no scaling of coordinates improves."""
    g = torch.Generator().manual_seed(seed)
    k = 12
    Q, _ = torch.linalg.qr(torch.randn(k, k, generator=g, dtype=torch.float64))
    H = Q @ torch.diag(torch.logspace(-4, 2, k, dtype=torch.float64)) @ Q.T
    x, b = torch.randn(k, generator=g).double(), torch.randn(k, generator=g).double()
    h = reg.L1(0.3)
    u, solved = minimise(QuadraticModel(x, b, H, h, True), 1e-12)
    assert solved
    assert float(h.optimality(u, b + H @ (u - x))) <= 1e-9


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_the_last_gradient_steps_are_followed_by_newton_steps(seed, monkeypatch):
    """Correlated features: 500 gradient steps find the pieces late, and no augmented Lagrangian is needed."""
    monkeypatch.setattr(inner, "_resisting", lambda model, start, tolerance: pytest.fail("the model resists"))
    g, k, h = torch.Generator().manual_seed(seed), 60, reg.L1(0.01)
    X, common, y = (torch.randn(4 * k, n, generator=g, dtype=torch.float64) for n in (k, 1, 1))
    X = X * torch.arange(1, k + 1).double() ** -0.6 + 2 * common
    H, b = X.T @ X / (4 * k), -3 * (X.T @ y).squeeze(1) / (4 * k)
    u, solved = minimise(QuadraticModel(torch.zeros(k).double(), b, H, h, True), 1e-12)
    assert solved
    assert float(h.optimality(u, b + H @ u)) <= 1e-11


def test_a_counted_term_has_a_form_of_its_own_on_some_coordinates():
    counter = fc.problems.Counter()
    part = restricted(Counted(reg.L1(0.1).on(range(5)), counter), torch.zeros(6), torch.arange(1, 4))
    assert isinstance(part, Counted)
    assert part.h == reg.L1(0.1)
    part.prox(torch.ones(2, 3), 1.0)
    assert counter.proxes == 2


@pytest.mark.parametrize(
    "h",
    [
        reg.GroupLasso(0.3, groups=(2, 3, 1, 4)),
        reg.ClusteredLasso(0.1, groups=5, l1=0.05),
        reg.SparseGroupLasso(0.1, 0.2, groups="columns", shape=(5, 2)),
        reg.L1(0.3).on(range(3)) + reg.GroupLasso(0.2, groups=3).on(range(3, 9)),
        reg.FusedLasso(0.2, 0.1),
    ],
    ids=str,
)
def test_the_jacobian_of_a_prox_by_parts_is_that_of_differences(h):
    v = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows, parts = [], h.coupling(10)

    def prox(u, step):
        rows.append(len(u))
        return h.prox(u, step)

    model = QuadraticModel(v, v, torch.eye(10).double(), h, False, parts=parts)
    made = _jacobian(prox, v, torch.tensor([0.7], dtype=torch.float64), model.places)
    move = 1e-6 * torch.eye(10, dtype=torch.float64)
    torch.testing.assert_close(made, (h.prox(v + move, 0.7) - h.prox(v - move, 0.7)).T / 2e-6, rtol=0, atol=1e-8)
    assert rows == [
        int(torch.unique(parts, return_counts=True)[1].max())
    ]  # one for each coordinate of the largest part


def test_working_sets_of_changing_size_cross_the_loop_backend():
    problem = fc.Problem(wide(200), loss="logistic", regularizer=reg.L1(0.08), bias=True)
    method = ProxNewton(everything=1, grow=4)
    one, two = (fc.simulate(problem, method, rounds=8, backend=b, keep_solutions=True) for b in ("stacked", "loop"))
    torch.testing.assert_close(one.solutions, two.solutions, rtol=0, atol=1e-12)
    sim = Simulator(problem, method, batches=fc.problems.Batches())
    sizes = []
    for _ in range(6):
        sizes.append(int(sim.server.working.sum()))
        sim.step()
    assert sizes[0] == 1  # the intercept
    assert all(a <= b <= max(2 * a, a + 4) for a, b in pairwise(sizes))
    assert sizes[-1] > sizes[0]
