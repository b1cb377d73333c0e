"""Losses of linear models against automatic differentiation of naive formulas, and against other solvers."""

import math
from dataclasses import dataclass

import cvxpy as cp
import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression, PoissonRegressor

import fedcomposite as fc
from fedcomposite.algorithms import REGISTRY
from fedcomposite.problems import LOSSES, Batches, ClientGradients, Counter, Loss
from fedcomposite.problems.losses import Hinge, Huber, Multinomial, Quantile, get_loss
from fedcomposite.runtime import Simulator
from fedcomposite.testing import check_loss

OPTIONS = {"huber": {"delta": 0.7}, "quantile": {"tau": 0.3}}
KINDS = {"logistic": "sign", "hinge": "sign", "hinge_sum": "sign", "squared_hinge": "sign", "multinomial": "class",
         "poisson": "count"}  # fmt: skip
CLASSES = 4
SIZES = (9, 4, 13)

BY_SAMPLE = [name for name, loss in LOSSES.items() if loss.by_sample]  # tests/test_cox.py has the other


def naive(name, z, b):
    """phi of every sample, written out case by case; z is (m,) or (m, C), b raw targets."""
    if name == "multinomial":
        return torch.stack([-torch.log(zj.exp()[int(bj)] / zj.exp().sum()) for zj, bj in zip(z, b, strict=True)])
    out = []
    for zj, bj in zip(z, b, strict=True):
        r = zj - bj
        match name:
            case "logistic":
                out.append(torch.log(1 + torch.exp(-bj * zj)))
            case "least_squares":
                out.append(0.5 * r**2)
            case "hinge" | "hinge_sum":
                out.append(1 - bj * zj if bj * zj < 1 else 0 * zj)
            case "squared_hinge":
                out.append((1 - bj * zj) ** 2 if bj * zj < 1 else 0 * zj)
            case "absolute":
                out.append(r if r > 0 else -r)
            case "huber":
                out.append(0.5 * r**2 if abs(r) <= 0.7 else 0.7 * (abs(r) - 0.35))
            case "quantile":
                out.append(0.3 * (bj - zj) if bj > zj else 0.7 * (zj - bj))
            case "poisson":
                out.append(torch.exp(zj) - bj * zj)
    return torch.stack(out)


def make(name, bias=False, weights="uniform", sizes=SIZES, d=5, seed=0, **more):
    rng = np.random.default_rng(seed)
    kind = KINDS.get(name, "real")
    arrays = []
    for m in sizes:
        X = rng.normal(size=(m, d))
        y = {"sign": lambda m=m: rng.choice([-1.0, 1.0], m), "class": lambda m=m: rng.integers(0, CLASSES, m),
             "count": lambda m=m: rng.poisson(2.0, m), "real": lambda m=m: rng.normal(size=m)}[kind]()  # fmt: skip
        arrays.append((X, y))
    if kind == "class":  # every class occurs
        arrays[0][1][:CLASSES] = range(CLASSES)
    silos = fc.Silos.from_arrays(arrays)
    return fc.Problem(silos, loss=name, loss_options=OPTIONS.get(name), bias=bias, weights=weights, **more)


def reference(problem, name, i, x, rows=None):
    """f_i(x) by the naive formula, differentiable in x; ``rows`` picks a minibatch of the client's samples."""
    X, y = problem.silos[i]
    m = len(y)
    if rows is not None:
        X, y = X[rows], y[rows]
    if problem.bias:
        X = torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], 1)
    # Feature by feature, class by class; the intercepts come last.
    W = x.reshape(-1, CLASSES) if name == "multinomial" else x
    phi = naive(name, X @ W, y.double())
    return phi.mean() * m if name == "hinge_sum" else phi.mean()


def autograd(f, x):
    x = x.clone().requires_grad_()
    value = f(x)
    (gradient,) = torch.autograd.grad(value, x)
    return float(value.detach()), gradient


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("name", BY_SAMPLE)
def test_objective_and_gradient_match_autograd(name, weights, bias):
    problem = make(name, bias, weights)
    w = np.asarray(SIZES) / sum(SIZES) if weights == "samples" else np.full(3, 1 / 3)
    x = 0.6 * torch.randn(problem.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    value, gradient = autograd(lambda u: sum(w[i] * reference(problem, name, i, u) for i in range(3)), x)
    assert problem.objective(x) == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(problem.gradient(x), gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sizes", [SIZES, (6, 6, 6), (4, 60, 5)], ids=["unequal", "equal", "blocks"])
@pytest.mark.parametrize("name", BY_SAMPLE)
def test_stacked_and_single_client_gradients(name, sizes):
    problem = make(name, bias=True, sizes=sizes)
    smooth, n = problem.smooth(), len(sizes)
    x = 0.5 * torch.randn(n, problem.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    everyone = np.arange(n, dtype=np.uint64)
    stacked = smooth.full(everyone)(x)
    for i in range(n):
        _, expected = autograd(lambda u, i=i: reference(problem, name, i, u), x[i])
        torch.testing.assert_close(stacked[i], expected, rtol=1e-10, atol=1e-12)
        alone = ClientGradients(smooth, everyone[i : i + 1], 0, Batches(), Counter(), stacked=False)
        torch.testing.assert_close(alone.full(x[i]), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_minibatch_gradients(name):
    problem = make(name, bias=True)
    smooth, batches = problem.smooth(), Batches(seed=3, size=4)
    everyone = np.arange(3, dtype=np.uint64)
    x = 0.5 * torch.randn(3, problem.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    got = ClientGradients(smooth, everyone, 5, batches, Counter())(x, 2)
    rows = batches.draw(everyone, np.asarray(SIZES, np.uint64), 5, range(2, 3))[0].astype(np.int64)
    for i in range(3):
        _, expected = autograd(lambda u, i=i: reference(problem, name, i, u, rows[i]), x[i])
        torch.testing.assert_close(got[i], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_smoothness_constants(name):
    problem = make(name, bias=True)
    grams = []
    for i in range(3):
        X = np.c_[problem.silos[i][0].numpy(), np.ones(SIZES[i])]
        grams.append(X.T @ X / (1 if name == "hinge_sum" else SIZES[i]))
    largest = max(np.linalg.eigvalsh(G)[-1] for G in grams)
    mean = np.linalg.eigvalsh(sum(grams) / 3)[-1]
    smooth = problem.smooth()
    assert smooth.scale() == pytest.approx(largest, rel=1e-6)
    assert smooth.scale("mean") == pytest.approx(mean, rel=1e-6)
    curvature = {"logistic": 0.25, "least_squares": 1, "squared_hinge": 2, "huber": 1, "multinomial": 0.5}.get(name)
    if curvature is None:
        for of in ("clients", "mean"):
            with pytest.raises(ValueError, match="no smoothness constant"):
                problem.smoothness(of)
        assert problem.default_step() == pytest.approx(1 / mean, rel=1e-6)
    else:
        assert problem.smoothness() == pytest.approx(curvature * largest, rel=1e-6)
        assert problem.default_step() == pytest.approx(1 / (curvature * mean), rel=1e-6)


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_bounds_on_derivatives_hold_and_are_tight(name):
    loss = get_loss(name, OPTIONS.get(name))
    z = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    if name == "multinomial":
        loss = Multinomial((0, 1))
        z = torch.stack([z, -z], 1)
        b = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand_as(z)
        slopes = loss.derivative(z, b).norm(dim=1)
        bends = loss.derivative(z, b).diff(dim=0).norm(dim=1) / z.diff(dim=0).norm(dim=1)
    else:
        b = torch.ones_like(z)
        slopes, bends = loss.derivative(z, b).abs(), loss.derivative(z, b).diff().abs() / z.diff()
    for largest, limit in ((slopes.max(), loss.slope), (bends.max(), loss.curvature)):
        assert float(largest) <= limit * (1 + 1e-9)
        if np.isfinite(limit):
            assert float(largest) >= 0.99 * limit


@pytest.mark.parametrize("name", ["absolute", "hinge", "hinge_sum", "huber", "logistic", "multinomial", "quantile"])
def test_lipschitz_and_variance_bounds(name):
    problem = make(name, bias=True)
    smooth = problem.smooth()
    G, G1, moment = smooth.lipschitz(), smooth.lipschitz("samples"), smooth.second_moment()
    generator = torch.Generator().manual_seed(6)
    for scale in (0.1, 1.0, 30.0):
        x = scale * torch.randn(problem.dimension, dtype=torch.float64, generator=generator)
        for i in range(3):
            single = torch.stack([autograd(lambda u, i=i, j=j: reference(problem, name, i, u, [j]), x)[1]
                                  for j in range(SIZES[i])])  # fmt: skip
            assert float(single.mean(0).norm()) <= G * (1 + 1e-12)
            assert float(single.norm(dim=1).max()) <= G1 * (1 + 1e-12)
            assert float(single.square().sum(1).mean()) <= moment * (1 + 1e-12)


def test_lipschitz_is_infinite_without_bounded_slopes():
    for name in ("least_squares", "squared_hinge", "poisson"):
        assert make(name).smooth().lipschitz() == np.inf


def solve(problem, rounds=3000, step=None):
    method = fc.algorithms.ProximalGradient(step=step or problem.default_step())
    return advance(Simulator(problem, method, batches=Batches()), rounds)


def advance(simulator, rounds):
    for _ in range(rounds):
        simulator.step()
    return simulator.solution


def test_hinge_against_cvxpy():
    for name in ("hinge", "hinge_sum"):
        problem = make(name, bias=True, sizes=(20, 12, 30), d=3, regularizer=fc.regularizers.L1(0.1))
        w, c = cp.Variable(3), cp.Variable()
        terms = []
        for i in range(3):
            X, y = (t.numpy() for t in problem.silos[i])
            hinge = cp.sum(cp.pos(1 - cp.multiply(y, X @ w + c)))
            terms.append(hinge if name == "hinge_sum" else hinge / len(y))
        best = cp.Problem(cp.Minimize(sum(terms) / 3 + 0.1 * cp.norm1(w))).solve()
        found = np.append(w.value, c.value)
        assert problem.objective(found) == pytest.approx(best, rel=1e-6)
        # No other point is better, and a subgradient at the optimum cannot point to one.
        rng = np.random.default_rng(0)
        for _ in range(50):
            x = found + rng.normal(size=4) * rng.choice([1e-3, 0.1, 1])
            assert problem.objective(x) >= best - 1e-8
            g = problem.gradient(x).numpy() + problem.regularizer.subgradient(torch.tensor(x)).numpy()
            assert best >= problem.objective(x) + g @ (found - x) - 1e-8


@pytest.mark.skipif("FedMLS" not in REGISTRY, reason="FedMLS is not registered")
def test_fedmls_trains_a_support_vector_machine():
    problem = make("hinge_sum", bias=True, sizes=(20, 12, 30), d=3)
    w, c = cp.Variable(3), cp.Variable()
    silos = [tuple(t.numpy() for t in problem.silos[i]) for i in range(3)]
    terms = [cp.sum(cp.pos(1 - cp.multiply(y, X @ w + c))) for X, y in silos]
    best = cp.Problem(cp.Minimize(sum(terms) / 3)).solve()
    run = fc.simulate(problem, REGISTRY["FedMLS"](lambda0=1.0), rounds=60)
    gaps = [record["objective"] - best for record in run.history]
    assert min(gaps) >= -1e-8
    assert gaps[-1] < 0.02 * gaps[0]
    assert 0.5 < run.history[-1]["train_accuracy"] <= 1


def test_quantile_and_absolute_against_cvxpy():
    for name, tau in (("quantile", 0.3), ("absolute", None)):
        problem = make(name, sizes=(15, 15), d=3)
        w = cp.Variable(3)
        terms = []
        for i in range(2):
            X, y = (t.numpy() for t in problem.silos[i])
            r = y - X @ w
            loss = cp.sum(cp.abs(r)) if tau is None else cp.sum(cp.maximum(tau * r, (tau - 1) * r))
            terms.append(loss / len(y))
        best = cp.Problem(cp.Minimize(sum(terms) / 2)).solve()
        assert problem.objective(w.value) == pytest.approx(best, rel=1e-6)


def test_huber_against_cvxpy():
    problem = make("huber", sizes=(20, 14), d=4, regularizer=fc.regularizers.L1(0.05))
    w = cp.Variable(4)
    # cvxpy's huber is r^2 up to delta: twice ours.
    terms = [
        cp.sum(cp.huber(X.numpy() @ w - y.numpy(), 0.7)) / (2 * len(y))
        for X, y in map(problem.silos.__getitem__, (0, 1))
    ]
    best = cp.Problem(cp.Minimize(sum(terms) / 2 + 0.05 * cp.norm1(w))).solve()
    assert problem.objective(solve(problem)) == pytest.approx(best, abs=1e-7)


def test_poisson_against_sklearn():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(80, 3)) / 2
    y = rng.poisson(np.exp(X @ [0.5, -0.4, 0.2] + 0.3))
    silos = fc.Silos.from_arrays([(X[:30], y[:30]), (X[30:], y[30:])])
    h = fc.regularizers.ElasticNet(0.0, 0.1)
    problem = fc.Problem(silos, loss="poisson", regularizer=h, bias=True, weights="samples")
    model = PoissonRegressor(alpha=0.1, tol=1e-12, max_iter=10000).fit(X, y)
    np.testing.assert_allclose(solve(problem, step=0.1).numpy(), [*model.coef_, model.intercept_], atol=1e-7)


def test_multinomial_against_sklearn():
    rng = np.random.default_rng(2)
    X, y = rng.normal(size=(90, 4)), rng.integers(0, 3, 90)
    y[X[:, 0] > 0.5], y[X[:, 1] > 0.8] = 0, 2
    silos = fc.Silos.from_arrays([(X[:40], 10 * y[:40] - 7), (X[40:], 10 * y[40:] - 7)])
    h = fc.regularizers.ElasticNet(0.0, 0.05)
    problem = fc.Problem(silos, loss="multinomial", regularizer=h, bias=True, weights="samples")
    model = LogisticRegression(C=1 / (90 * 0.05), tol=1e-12, max_iter=10000).fit(X, y)
    x = solve(problem)
    np.testing.assert_allclose(x[:12].reshape(4, 3).T.numpy(), model.coef_, atol=1e-6)
    intercepts = x[12:].numpy()  # determined up to a common constant
    np.testing.assert_allclose(intercepts - intercepts.mean(), model.intercept_ - model.intercept_.mean(), atol=1e-6)
    accuracy = problem.smooth().evaluate(x).metrics["train_accuracy"]
    assert float(accuracy) == pytest.approx(model.score(X, y), abs=1e-12)


def test_squared_hinge_against_scipy():
    problem = make("squared_hinge", sizes=(25, 10), d=3)

    def objective(w):
        return sum(
            np.mean(np.maximum(0, 1 - y.numpy() * (X.numpy() @ w)) ** 2) / 2
            for X, y in map(problem.silos.__getitem__, (0, 1))
        )

    best = minimize(objective, np.zeros(3), method="BFGS", options={"gtol": 1e-9})
    assert problem.objective(solve(problem)) == pytest.approx(best.fun, abs=1e-9)


def test_multinomial_layout_names_and_unregularized_intercepts():
    problem = make("multinomial", bias=True, d=2, regularizer=fc.regularizers.L1(0.1))
    assert problem.coordinate_names == (
        "x0[0]", "x0[1]", "x0[2]", "x0[3]", "x1[0]", "x1[1]", "x1[2]", "x1[3]",
        "(intercept)[0]", "(intercept)[1]", "(intercept)[2]", "(intercept)[3]",
    )  # fmt: skip
    assert problem.smooth().bias_coordinates == 4
    assert float(problem.regularizer.value(torch.ones(12))) == pytest.approx(0.8)
    single = make("hinge", bias=True, d=2, regularizer=fc.regularizers.L1(0.1))
    assert single.coordinate_names == ("x0", "x1", "(intercept)")
    assert single.smooth().bias_coordinates == 1
    assert make("hinge", d=2).smooth().bias_coordinates == 0


def test_accuracy():
    X = np.asarray([[1.0], [2.0], [-1.0], [0.0]])
    hinge = fc.Problem(fc.Silos.from_arrays([(X, [1, -1, -1, 1])], test=(X, [1, 1, -1, -1])), loss="hinge")
    metrics = hinge.smooth().evaluate(torch.tensor([1.0], dtype=torch.float64)).metrics
    assert (float(metrics["train_accuracy"]), float(metrics["test_accuracy"])) == (0.75, 0.75)
    many = fc.Problem(fc.Silos.from_arrays([(X, [5, 7, 7, 5])], test=(X, [7, 7, 7, 7])), loss="multinomial")
    metrics = many.smooth().evaluate(torch.tensor([0.0, 1.0], dtype=torch.float64)).metrics
    assert (float(metrics["train_accuracy"]), float(metrics["test_accuracy"])) == (0.5, 0.5)


@pytest.mark.parametrize("name", ["hinge_sum", "multinomial", "huber"])
def test_backends_agree(name):
    h = fc.regularizers.L1(0.01)
    problem = make(name, bias=True, regularizer=h)
    method = fc.algorithms.FedNMap(local_steps=3, step=0.01, gamma=0.03)
    with pytest.warns(fc.NonSmoothWarning) if name == "hinge_sum" else np.errstate():
        both = [Simulator(problem, method, batches=Batches(0, 3), backend=b) for b in ("stacked", "loop")]
    runs = [advance(simulator, 5) for simulator in both]
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)


def test_single_precision_is_kept():
    for name in BY_SAMPLE:
        problem = make(name, bias=True)
        smooth = problem.smooth(torch.float32)
        x = torch.zeros(3, problem.dimension, dtype=torch.float32)
        assert smooth.full(np.arange(3, dtype=np.uint64))(x).dtype == torch.float32
        assert smooth.minibatch(x, torch.zeros(3, 2, dtype=torch.long)).dtype == torch.float32
        assert smooth.evaluate(x[0]).loss.dtype == torch.float32


def silo(targets):
    return fc.Silos.from_arrays([(np.ones((len(targets), 2)), np.asarray(targets))])


@pytest.mark.parametrize(
    ("name", "targets", "words"),
    [
        ("hinge", [0, 1, 2], "the hinge loss needs labels in {-1, \\+1} or {0, 1}, found 3 kinds: 0, 1, 2"),
        ("hinge_sum", [-1, 0, 1], "needs labels"),
        ("squared_hinge", [3, 4], "the squared hinge loss needs labels"),
        ("logistic", [0.5, 1], "the logistic loss needs labels"),
        ("poisson", [3, -2], "needs counts >= 0, found -2"),
        ("multinomial", [0.5, 1.0], "numbered by integers; found: 0.5, 1"),
        ("multinomial", [3, 3], "two or more classes"),
    ],
)
def test_label_errors(name, targets, words):
    with pytest.raises(fc.DataError, match=words):
        fc.Problem(silo(targets), loss=name)


def test_zero_one_labels_are_read_as_signs():
    for name in ("hinge", "squared_hinge", "logistic"):
        x = torch.tensor([0.3, -0.1])
        signs, bits = (fc.Problem(silo(t), loss=name) for t in ([1, -1, 1], [1, 0, 1]))
        assert signs.objective(x) == bits.objective(x)


def test_named_classes_serve_a_site_that_lacks_some():
    labels = (2, 5, 9)
    alone = fc.Problem(silo([5, 5, 2]), loss="multinomial", loss_options={"labels": labels})
    both = fc.Problem(silo([5, 5, 2, 9]), loss=Multinomial())
    assert alone.dimension == both.dimension == 6
    x = torch.tensor([0.1, -0.2, 0.3, 0.4, 0.0, -0.1], dtype=torch.float64)
    z = np.asarray([0.1 + 0.4, -0.2, 0.3 - 0.1])
    expected = np.log(np.exp(z).sum()) - np.mean([z[1], z[1], z[0]])
    assert alone.objective(x) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(fc.DataError, match="met the label 4, but its classes are 2, 5, 9"):
        fc.Problem(silo([5, 4]), loss=Multinomial(labels))


def test_options():
    assert get_loss("quantile", {"tau": 0.9}) == Quantile(0.9)
    assert get_loss("hinge_sum") == Hinge("sum")
    assert get_loss(Huber(2)) == Huber(2.0)
    one = fc.Problem(silo([3.0, 1.0]), loss="huber", loss_options={"delta": 0.5})
    two = fc.Problem(silo([3.0, 1.0]), loss=Huber(0.5))
    assert one.loss == two.loss
    assert one.objective([0.0, 0.0]) == two.objective([0.0, 0.0]) == pytest.approx((0.5 * 2.75 + 0.5 * 0.75) / 2)
    for arguments, words in [
        (("huber", {"dleta": 1}), "no option 'dleta'; did you mean 'delta'"),
        (("logistic", {"delta": 1}), "it has none"),
        (("huber", {"delta": 0}), "delta = 0, must be a number > 0"),
        (("quantile", {"tau": 1}), "tau = 1, must be a number > 0 and < 1"),
        (("hubber",), "unknown loss 'hubber'; did you mean 'huber'"),
        ((Huber(), {"delta": 1.0}), "has its options already"),
        (("multinomial", {"labels": [1, 1]}), "two different integers"),
    ]:
        with pytest.raises(ValueError, match=words):
            get_loss(*arguments)


def test_kinks_give_a_subgradient():
    z = torch.zeros(1, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    assert float(get_loss("hinge").derivative(one, one)) == 0
    assert float(get_loss("absolute").derivative(z, z)) == 0
    assert float(get_loss("quantile", {"tau": 0.2}).derivative(z, z)) == 0


# -- losses of one's own ----------------------------------------------------------------------------------------------


def log_cosh(z, b):
    """Of the residual."""
    return torch.nn.functional.softplus(-2 * (z - b)) + z - b - math.log(2)


@dataclass(frozen=True)
class LogCosh(Loss):
    """The same, with its bounds and derivatives written out."""

    curvature = 1.0
    slope = 1.0

    def value(self, z, b):
        return log_cosh(z, b)

    def derivative(self, z, b):
        return torch.tanh(z - b)


@dataclass(frozen=True)
class LogCoshTwice(LogCosh):
    def second(self, z, b):
        return 1 - torch.tanh(z - b).square()


def test_a_function_or_a_loss_without_second_derivative_is_solved_by_first_order_methods():
    silos = fc.data.load("synthetic", clients=4, features=6, samples=30, seed=1)
    h = fc.regularizers.L1(0.01)
    problems = [fc.Problem(silos, loss=one, regularizer=h, bias=True) for one in (log_cosh, LogCosh(), LogCoshTwice())]
    best = fc.solve(problems[2])
    assert "ProxNewton" in best.message
    for problem in problems[:2]:
        check_loss(problem.loss, silos.targets)
        x = torch.linspace(-1, 1, problem.dimension).double()
        torch.testing.assert_close(problem.gradient(x), problems[2].gradient(x))
        for curvature in ("auto", "never"):
            run = fc.solve(problem, curvature=curvature)
            assert run.status == "converged"
            assert "no second derivative" in run.message
            torch.testing.assert_close(run.solution, best.solution, rtol=0, atol=1e-6)
        for ask in (fc.path, fc.cross_validate, fc.stability, fc.analyse):
            with pytest.raises(ValueError, match="no second derivative, and a path takes Newton steps; write a Loss"):
                ask(problem)
        with pytest.raises(TypeError, match=r"ProxNewton: .* has no second derivative"):
            fc.simulate(problem, fc.algorithms.ProxNewton(), rounds=1)
        assert fc.simulate(problem, fc.algorithms.FedNMap(2, 0.5, gamma=0.5), rounds=2, batch_size=4).rounds == 2
    assert "log_cosh" in fc.solve(problems[0]).message
    assert fc.path(problems[2], count=5).lambdas.size == 5


@dataclass(frozen=True)
class Boundless(Loss):
    def value(self, z, b):
        return (z - b) ** 2

    def derivative(self, z, b):
        return 2 * (z - b)


@dataclass(frozen=True)
class Flat(Loss):
    curvature = 0.0
    slope = 0.0

    def value(self, z, b):
        return 0 * z


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (Boundless, "Boundless is a class: make one of it, loss=Boundless()"),
        (lambda: Boundless(), "the loss Boundless lacks curvature, a bound on its second derivative"),
        (lambda: Flat(), "derivative"),
        (lambda: lambda z, b: (z - b).square().mean(), r"gives \(\) for margins \(2,\), must be a value for each"),
        (lambda: lambda z, b: 0.0, "gives float for margins"),
        (lambda: torch.nn.MSELoss, "MSELoss is a class"),
        (lambda: 3, "must be a name, a Loss, or a function of margins and targets"),
    ],
)
def test_what_a_loss_lacks_is_told_by_its_name(loss, says):
    silos = fc.data.load("synthetic", clients=2, features=3, samples=10)
    with pytest.raises((ValueError, TypeError), match=says):
        fc.Problem(silos, loss=loss if loss is Boundless else loss())
