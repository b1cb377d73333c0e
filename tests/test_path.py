"""Paths and cross-validation over sites equal those of pooled data with the same folds."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import Lasso, enet_path
from sklearn.linear_model import LogisticRegression as Logistic
from sklearn.metrics import roc_auc_score

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.analysis import Driver, Request, Rows, answer, fold_of_samples
from fedcomposite.runtime.protocol import ALL, losses
from fedcomposite.runtime.transports import SiloTransport
from fedcomposite.runtime.transports import silo_answers as transport
from fedcomposite.runtime.transports.silo_answers import silos_of


def silos(loss="logistic", sizes=(60, 35, 45), features=6, seed=0):
    generator = np.random.default_rng(seed)
    truth = np.array([1.5, -1.0, 0.5, *np.zeros(features - 3)])
    arrays = []
    for m in sizes:
        X = generator.normal(size=(m, features)) * (1 + np.arange(features) % 3)
        z = X @ truth / 2 + 0.3
        y = z + generator.normal(size=m) if loss == "least_squares" else (generator.random(m) < 1 / (1 + np.exp(-z)))
        arrays.append((X, y.astype(float)))
    return fc.Silos.from_arrays(arrays)


def posed(loss="logistic", h=None, **options):
    h = reg.L1(1.0) if h is None else h
    return fc.Problem(silos(loss), loss=loss, regularizer=h, bias=True, **{"weights": "samples", **options})


def pooled(problem):
    return problem.silos.features.double().numpy(), problem.silos.targets.double().numpy()


def reference(X, y, lam, loss="logistic"):
    """The pooled solution: scikit-learn's, or that of a quasi-Newton method on positive and negative parts."""
    if loss == "least_squares":
        made = Lasso(alpha=lam, tol=1e-13, max_iter=100000).fit(X, y)
        return np.append(made.coef_, made.intercept_)
    p, s = X.shape[1], 2 * y - 1

    def objective(v):
        z = X @ (v[:p] - v[p:-1]) + v[-1]
        slope = -s / (1 + np.exp(s * z)) / len(y)
        g = X.T @ slope
        value = np.logaddexp(0, -s * z).mean() + lam * v[:-1].sum()
        return value, np.concatenate([g + lam, lam - g, [slope.sum()]])

    bounds = [(0, None)] * (2 * p) + [(None, None)]
    options = {"ftol": 0, "gtol": 1e-10, "maxiter": 10000, "maxfun": 100000}
    v = np.zeros(2 * p + 1)
    for _ in range(5):  # a line search that fails in rounding ends it early
        v = minimize(objective, v, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    return np.append(v[:p] - v[p:-1], v[-1])


def descended(X, y, lam, theta, b):
    """A stationary point of least squares with MCP from b on, by coordinate descent."""
    X, y, b = X - X.mean(0), y - y.mean(), b.copy()
    for _ in range(300):
        for j in range(len(b)):
            a = np.mean(X[:, j] ** 2)
            c = np.mean(X[:, j] * (y - X @ b)) + a * b[j]
            near = np.sign(c) * max(abs(c) - lam, 0) / (a - 1 / theta)
            b[j] = near if abs(c) <= a * theta * lam else c / a
    return b


@pytest.mark.parametrize("loss", ["logistic", "least_squares"])
def test_path_is_the_pooled_one(loss):
    problem = posed(loss)
    found = fc.path(problem, count=12, ratio=1e-3)
    X, y = pooled(problem)
    for k in range(12):
        expected = reference(X, y, found.lambdas[k], loss)
        np.testing.assert_allclose(found.solutions[k].numpy(), expected, atol=1e-6)
    assert found.converged.all()
    assert found.coefficients.shape == (12, 6)
    assert found.intercepts.shape == (12,)
    assert found.nonzeros[0] == 0 < found.nonzeros[1]
    assert (np.diff(found.deviance) > 0).all()
    assert found.deviance[0] == pytest.approx(0, abs=1e-9)


def test_lambda_max_is_the_largest_slope_of_the_null_model():
    problem = posed("least_squares")
    X, y = pooled(problem)
    top = np.abs((X - X.mean(0)).T @ (y - y.mean()) / len(y)).max()
    found = fc.path(problem, count=3)
    assert found.lambdas[0] == pytest.approx(top, rel=1e-10)
    _, coefficients, _ = enet_path(X - X.mean(0), y - y.mean(), l1_ratio=1.0, alphas=found.lambdas, tol=1e-12)
    np.testing.assert_allclose(found.coefficients, coefficients.T, atol=1e-6)


def test_lambda_max_with_features_that_are_not_regularized():
    mask = [False, True, True, True, True, False]
    problem = posed(h=reg.L1(0.5).on([*mask, False]))
    found = fc.path(problem, count=4, ratio=0.1)
    X, y = pooled(problem)
    free = Logistic(C=np.inf, tol=1e-12, max_iter=1000).fit(X[:, [0, 5]], y)
    residual = free.predict_proba(X[:, [0, 5]])[:, 1] - y
    assert found.lambdas[0] == pytest.approx(np.abs(X[:, 1:5].T @ residual / len(y)).max(), rel=1e-6)
    np.testing.assert_allclose(found.coefficients[0, [0, 5]], free.coef_[0], atol=1e-5)
    assert not found.coefficients[0, 1:5].any()
    assert found.coefficients[1, 1:5].any()


@pytest.mark.parametrize(
    "h", [reg.MCP(1.0, 3.0), reg.SCAD(1.0), reg.ElasticNet(0.5, 0.5), reg.GroupLasso(1.0, groups=[2, 2, 2])]
)
def test_path_of_other_regularizers_is_stationary(h):
    problem = posed("least_squares", h)
    found = fc.path(problem, count=8, ratio=0.02)
    assert found.nonzeros[0] == 0 < found.nonzeros[1]
    for lam, x in zip(found.lambdas, found.solutions, strict=True):
        factor = lam / (1.0 if not isinstance(h, reg.ElasticNet) else h.l1 + h.l2)
        own = {
            reg.MCP: lambda f: reg.MCP(f, 3.0),
            reg.SCAD: lambda f: reg.SCAD(f),
        }.get(type(h), h.scaled)(factor)
        at = fc.Problem(problem.silos, loss="least_squares", regularizer=own, bias=True, weights="samples")
        assert at.optimality(x) < 1e-6


def test_path_of_mcp_is_that_of_coordinate_descent():
    problem = posed("least_squares", reg.MCP(1.0, 8.0))
    X, y = pooled(problem)
    found = fc.path(problem, count=5, ratio=0.05)
    at = np.zeros(6)
    for lam, b in zip(found.lambdas, found.coefficients, strict=True):
        at = descended(X, y, lam, 8.0, at)
        np.testing.assert_allclose(b, at, atol=1e-6)


def test_a_wide_path_works_on_a_working_set():
    generator = np.random.default_rng(3)
    arrays = [(generator.normal(size=(20, 1200)), generator.normal(size=20)) for _ in range(3)]
    problem = fc.Problem(fc.Silos.from_arrays(arrays), loss="least_squares", regularizer=reg.L1(1.0), weights="samples")
    found = fc.path(problem, count=8, ratio=0.3)
    X, y = pooled(problem)
    _, expected, _ = enet_path(X, y, l1_ratio=1.0, alphas=found.lambdas, tol=1e-12, max_iter=100000)
    np.testing.assert_allclose(found.coefficients, expected.T, atol=1e-6)
    whole = 8 * 1200 * 1201 // 2 * 3
    assert found.bytes_up < found.exchanges * whole / 20


@pytest.mark.parametrize("score", ["deviance", "error", "auc"])
def test_cross_validation_is_the_pooled_one(score):
    problem = posed()
    cv = fc.cross_validate(problem, folds=4, seed=5, count=8, ratio=0.01, scoring=score)
    X, y = pooled(problem)
    fold = fold_of_samples(problem, 4, 5)
    table = np.empty((4, 8))
    for f in range(4):
        for k, lam in enumerate(cv.lambdas):
            x = reference(X[fold != f], y[fold != f], lam)
            np.testing.assert_allclose(cv.models[f, k].numpy(), x, atol=1e-6)
            z, b = X[fold == f] @ x[:-1] + x[-1], y[fold == f]
            table[f, k] = {
                "deviance": lambda z, b: 2 * np.mean(np.logaddexp(0, -(2 * b - 1) * z)),
                "error": lambda z, b: np.mean((z > 0) != b),
                "auc": lambda z, b: roc_auc_score(b, z),
            }[score](z, b)
    first = 1 if score == "error" else 0  # the null model is undecided
    np.testing.assert_allclose(cv.each[:, first:], table[:, first:], atol=1e-6 if score != "auc" else 5e-3)
    weights = np.bincount(fold)
    mean = np.average(table, axis=0, weights=weights)
    se = np.sqrt(np.average((table - mean) ** 2, axis=0, weights=weights) / 3)
    if score == "deviance":
        best = int(np.argmin(mean))
        assert cv.lambda_min == cv.lambdas[best]
        assert cv.lambda_1se == cv.lambdas[np.flatnonzero(mean <= mean[best] + se[best])[0]]
        np.testing.assert_allclose(cv.se, se, atol=1e-6)
    assert cv.lambda_1se >= cv.lambda_min


def test_folds_are_balanced_and_the_same_everywhere():
    problem = posed()
    fold, y = fold_of_samples(problem, 5, 1), pooled(problem)[1]
    for i in range(3):
        rows = slice(problem.silos.offsets[i], problem.silos.offsets[i + 1])
        counts = np.bincount(fold[rows], minlength=5)
        assert counts.max() - counts.min() <= 1
        ones = np.bincount(fold[rows][y[rows] == 1], minlength=5)
        assert ones.max() - ones.min() <= 1
    [silo] = silos_of(fc.Problem(silos(), loss="logistic"))[1:2]  # the second site by itself
    inside = silo.weights(Rows("fold", 2, 5, seed=1)).numpy() == 1
    np.testing.assert_array_equal(inside, fold[60:95] != 2)
    assert (fold_of_samples(problem, 5, 2) != fold).any()


def test_leaving_sites_out():
    problem = posed()
    cv = fc.cross_validate(problem, folds="sites", count=6, ratio=0.01)
    X, y = pooled(problem)
    out = np.arange(len(y)) < 60
    for k, lam in enumerate(cv.lambdas):
        x = reference(X[~out], y[~out], lam)
        np.testing.assert_allclose(cv.models[0, k].numpy(), x, atol=1e-6)
        z = X[out] @ x[:-1] + x[-1]
        assert cv.each[0, k] == pytest.approx(2 * np.mean(np.logaddexp(0, -(2 * y[out] - 1) * z)), abs=1e-6)


def test_all_folds_share_their_exchanges():
    problem = posed()
    alone, cv = fc.path(problem, count=10), fc.cross_validate(problem, folds=6, count=10)
    assert cv.exchanges < 2 * alone.exchanges

    assert alone.rounds.mean() < 4


def test_uniform_clients_count_alike():
    """With uniform weights the path solves the problem as it stands, fold by fold too."""
    problem = posed(weights="uniform")
    found = fc.path(problem, count=5, ratio=0.05)
    for lam, x in zip(found.lambdas, found.solutions, strict=True):
        at = fc.Problem(problem.silos, regularizer=reg.L1(lam), bias=True)
        assert at.optimality(x) < 1e-7
        np.testing.assert_allclose(fc.solve(at).solution.numpy(), x.numpy(), atol=1e-6)


def test_refit_and_criteria():
    problem = posed()
    cv = fc.cross_validate(problem, folds=3, count=10)
    x = cv.refit("1se")
    support = cv.solution("1se")[:-1].numpy() != 0
    X, y = pooled(problem)
    free = Logistic(C=np.inf, tol=1e-12, max_iter=1000).fit(X[:, support], y)
    np.testing.assert_allclose(x[:-1].numpy()[support], free.coef_[0], atol=1e-4)
    assert not x[:-1].numpy()[~support].any()
    k = 4
    z = X @ cv.path.coefficients[k] + cv.path.intercepts[k]
    likelihood = -np.logaddexp(0, -(2 * y - 1) * z).sum()
    used = cv.path.nonzeros[k] + 1
    assert cv.path.aic[k] == pytest.approx(-2 * likelihood + 2 * used)
    assert cv.path.bic[k] == pytest.approx(-2 * likelihood + np.log(len(y)) * used)
    assert cv.path.ebic[k] >= cv.path.bic[k]
    assert cv.index("bic") == int(np.argmin(cv.path.bic))


@pytest.mark.parametrize("loss", ["logistic", "least_squares"])
def test_criteria_and_the_grid_do_not_depend_on_the_scale_of_weights(loss):
    """Weights are relative: those of 1/200 each are no two hundred times fewer samples."""
    g = np.random.default_rng(0)
    X, w = g.normal(size=(200, 8)), g.random(200) + 0.5
    y = X[:, 0] - X[:, 1] + 0.3 * X[:, 2] + g.normal(size=200)
    y = y if loss == "least_squares" else (y > 0).astype(float)
    found = []
    for size in (1.0, 1 / 200, 1e4):
        halves = [slice(0, 120), slice(120, 200)]
        silos = fc.Silos.from_arrays([(X[s], y[s]) for s in halves], weights=[size * w[s] for s in halves])
        problem = fc.Problem(silos, loss=loss, regularizer=reg.L1(1.0), bias=True, weights="samples")
        found.append(fc.path(problem, count=15))
    assert found[0].samples == 200
    for other in found[1:]:
        np.testing.assert_allclose(other.lambdas, found[0].lambdas, rtol=1e-9)
        for name in ("aic", "bic", "ebic"):
            np.testing.assert_allclose(getattr(other, name), getattr(found[0], name), rtol=1e-6)
            assert np.argmin(getattr(other, name)) == np.argmin(getattr(found[0], name))
    plain = fc.Silos.from_arrays([(X[:120], y[:120]), (X[120:], y[120:])])
    ones = dataclasses.replace(plain, weights=torch.full((200,), 1 / 200, dtype=torch.float64))
    bics = [
        fc.path(fc.Problem(s, loss=loss, regularizer=reg.L1(1.0), bias=True, weights="samples"), count=15).bic
        for s in (plain, ones)
    ]
    np.testing.assert_allclose(bics[0], bics[1], rtol=1e-6)


def test_answers_add_up_over_sites():
    """What a site says depends on its own samples only, and the sums are those of the pooled samples."""
    problem = posed()
    one = fc.Problem(
        fc.Silos.from_arrays([pooled(problem)]), loss="logistic", regularizer=reg.L1(1.0), bias=True, weights="samples"
    )
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)
    for name, arrays, numbers in [
        ("newton", {"x": x, "working": torch.ones(7, dtype=torch.bool)}, {}),
        ("losses", {"models": torch.stack([x, -x])}, {"bins": 16}),
        ("information", {"x": x}, {}),
        ("scores", {"x": x, "edges": torch.linspace(-2, 2, 9, dtype=torch.float64)}, {}),
    ]:
        request = Request(name, arrays, numbers)
        many, single = SiloTransport(problem).ask([request])[0], SiloTransport(one).ask([request])[0]
        assert many.keys() == single.keys()
        for key in many:
            torch.testing.assert_close(many[key], single[key], rtol=1e-10, atol=1e-10)
        lone = answer(silos_of(problem)[1], request)
        assert {k: v.shape for k, v in lone.items()} == {k: v.shape for k, v in many.items()}


def test_refusals():
    with pytest.raises(ValueError, match="no path can be made"):
        fc.path(posed(h=reg.L1(0.0)))
    with pytest.raises(ValueError, match="has no strength"):
        fc.path(posed(h=reg.Box(-1, 1)))
    with pytest.raises(ValueError, match="has kinks"):
        fc.path(posed("hinge"))
    with pytest.raises(ValueError, match="must be positive and falling"):
        fc.path(posed(), lambdas=[0.1, 0.2])
    with pytest.raises(ValueError, match="folds = 1"):
        fc.cross_validate(posed(), folds=1)
    with pytest.raises(ValueError, match="for two classes"):
        fc.cross_validate(posed("least_squares"), scoring="auc")


# -- threads ----------------------------------------------------------------------------------------------------------


def test_threads_of_an_analysis_fit_its_silos(two_threads, monkeypatch):
    """Products of 60 samples with 6 columns have nothing for a second thread, at a silo or in the server's step."""
    used = {"silo": set(), "server": set()}

    def watched(name, function):
        def call(*args, **kwargs):
            used[name].add(torch.get_num_threads())
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(transport, "answer_all", watched("silo", transport.answer_all))
    problem = posed()

    def task():
        used["server"].add(torch.get_num_threads())
        yield [losses(torch.zeros(1, problem.dimension, dtype=torch.float64), ALL)]
        used["server"].add(torch.get_num_threads())

    Driver(SiloTransport(problem)).run([task()])
    fc.path(problem)
    assert used == {"silo": {1}, "server": {1}}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("samples", "features"), [(1 << 13, 32), (8, 512)], ids=["many samples", "a large Hessian"])
def test_threads_of_an_analysis_are_kept_where_they_help(samples, features):
    X = torch.zeros(samples, features, dtype=torch.float64)
    problem = fc.Problem(fc.Silos.from_arrays([(X, torch.arange(samples).double() % 2)]), loss="logistic")
    before = torch.get_num_threads()
    with SiloTransport(problem).running():
        assert torch.get_num_threads() == before
