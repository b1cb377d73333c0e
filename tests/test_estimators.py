"""Estimators: scikit-learn's own checks, and its solutions on pooled data."""

import inspect
import tomllib
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize
from skglm import WeightedLasso
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Lasso, PoissonRegressor, QuantileRegressor, Ridge
from sklearn.linear_model import LinearRegression as LeastSquares
from sklearn.linear_model import LogisticRegression as Logistic
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.estimator_checks import estimator_checks_generator

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.analysis.estimator import LinearModel, Options
from fedcomposite.analysis.estimators import ClassifierOptions
from fedcomposite.experiments.config import Config, ConfigError

ALL = [
    *(fc.LinearRegression(), fc.LogisticRegression(), fc.PoissonRegression(), fc.HuberRegression(), fc.LinearSVC()),
    *(fc.MultinomialRegression(tolerance=1e-10), fc.QuantileRegression(), fc.LinearSVC(loss="hinge")),
]
WHOLE = [fc.LinearRegression(), fc.LogisticRegression()]
QUICK = {  # all of scikit-learn's checks take minutes
    *("check_estimator_cloneable", "check_no_attributes_set_in_init", "check_parameters_default_constructible"),
    *("check_estimators_unfitted", "check_fit2d_1sample", "check_supervised_y_2d", "check_get_params_invariance"),
    *("check_classifiers_one_label", "check_estimators_pickle"),
}


def data(seed=0, n=150):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, 5))
    y = 2 * X[:, 0] - X[:, 1] + generator.standard_t(4, size=n) + 1
    return X, y, generator.integers(0, 3, n)


@pytest.mark.parametrize(
    ("model", "whole"),
    [*((m, False) for m in ALL), *(pytest.param(m, True, marks=pytest.mark.slow) for m in WHOLE)],
    ids=str,
)
def test_scikit_learns_checks(model, whole):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for estimator, check in estimator_checks_generator(model):
            name = getattr(check, "func", check).__name__
            if name != "check_array_api_input" and (whole or name in QUICK):
                check(estimator)


@pytest.mark.parametrize("h", [None, reg.ElasticNet(0.3, 0.1), reg.MCP(0.5, 4.0)], ids=str)
@pytest.mark.parametrize("factors", [None, [1.0, 0.5, 3.0, 1.0, 0.0]], ids=["alike", "factors"])
def test_the_problem_of_a_model_is_the_one_that_was_solved(h, factors):
    """With the strength that cross-validation chose: the model is stationary there, and the objective is its own."""
    X, y, sites = data()
    silos = fc.Silos.from_arrays([(X[sites == k], y[sites == k]) for k in range(3)])
    options = {"regularizer": h or "l1", "penalty_factor": factors, "count": 15, "folds": 3}
    model = fc.LinearRegression("cv", **options)
    with pytest.raises(NotFittedError):
        model.problem(silos)
    problem = model.fit(silos).problem(silos)
    assert problem.optimality(model.solution_) < 1e-6
    given = fc.LinearRegression(model.lam_, **options).fit(silos)
    np.testing.assert_allclose(given.solution_, model.solution_, atol=1e-6)
    assert given.problem(silos).objective(model.solution_) == pytest.approx(problem.objective(model.solution_))
    if h is None:  # by hand
        scale = np.ones(5) if factors is None else np.array(factors)
        rest = y - X @ model.coef_ - model.intercept_
        by_hand = np.mean(rest**2) / 2 + model.lam_ * float(np.abs(scale * model.coef_).sum())
        assert problem.objective(model.solution_) == pytest.approx(by_hand, rel=1e-9)
    if h is None and factors is None:
        pooled = Lasso(alpha=model.lam_, tol=1e-12).fit(X, y)
        np.testing.assert_allclose(fc.solve(problem).solution.numpy()[:-1], pooled.coef_, atol=1e-6)


def test_nothing_is_regularized_unless_asked():
    """``LinearRegression()`` is least squares, ``LogisticRegression()`` the maximum of the likelihood."""
    X, y, sites = data()
    plain, pooled = fc.LinearRegression().fit(X, y, sites=sites), LeastSquares().fit(X, y)
    np.testing.assert_allclose(plain.coef_, pooled.coef_, atol=1e-9)
    assert plain.intercept_ == pytest.approx(pooled.intercept_)
    assert plain.lam_ == 0
    labels = (y > 1).astype(int)
    logistic = fc.LogisticRegression().fit(X, labels, sites=sites)
    likely = Logistic(C=np.inf, tol=1e-10, max_iter=1000).fit(X, labels)
    np.testing.assert_allclose(logistic.coef_, likely.coef_, atol=1e-5)
    for name in ("HuberRegression", "LinearSVC", "MultinomialRegression", "PoissonRegression", "QuantileRegression"):
        assert getattr(fc, name)().regularizer is None


def test_regularizers_by_name():
    X, y, sites = data()
    ridge = fc.LinearRegression(0.3, regularizer="l2").fit(X, y, sites=sites)
    np.testing.assert_allclose(ridge.coef_, Ridge(alpha=0.3 * len(y), tol=1e-12).fit(X, y).coef_, atol=1e-8)
    lasso = fc.LinearRegression(0.3, regularizer="l1").fit(X, y, sites=sites)
    np.testing.assert_allclose(lasso.coef_, Lasso(alpha=0.3, tol=1e-12).fit(X, y).coef_, atol=1e-8)
    with pytest.warns(DeprecationWarning, match="regularizer='l1'"):  # as in 0.2
        old = fc.LinearRegression(0.3).fit(X, y, sites=sites)
    np.testing.assert_array_equal(old.coef_, lasso.coef_)
    with pytest.raises(ValueError, match=r"'l1' has no strength: give lam=0.1, or lam='cv'"):
        fc.LinearRegression(regularizer="l1").fit(X, y)


def test_sites_change_nothing_but_the_exchange():
    X, y, sites = data()
    one = fc.LinearRegression(0.1, regularizer="l1").fit(X, y)
    many = fc.LinearRegression(0.1, regularizer="l1").fit(X, y, sites=sites)
    by_silos = fc.LinearRegression(0.1, regularizer="l1").fit(
        fc.Silos.from_arrays([(X[sites == k], y[sites == k]) for k in range(3)])
    )
    reference = Lasso(alpha=0.1, tol=1e-12).fit(X, y)
    for model in (one, many, by_silos):
        np.testing.assert_allclose(model.coef_, reference.coef_, atol=1e-8)
        assert model.intercept_ == pytest.approx(reference.intercept_)
        assert model.lam_ == 0.1
    assert 0 < many.n_iter_ < 10


def test_logistic_regression_with_names_and_texts():
    X, y, sites = data()
    labels = np.where(y > 1, "sick", "well")
    table = pd.DataFrame(X, columns=list("abcde"))
    model = fc.LogisticRegression(0.02, regularizer="l1", penalty_factor={"c": 0.0}).fit(table, labels, sites=sites)
    assert model.coef_[0, 2] != 0
    assert list(model.classes_) == ["sick", "well"]
    assert list(model.feature_names_in_) == list("abcde")
    np.testing.assert_allclose(model.predict_proba(table).sum(1), 1)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(table)), model.predict_proba(table))
    assert (model.predict(table) == labels).mean() > 0.7
    problem = fc.Problem(
        fc.Silos.from_arrays([(X, (labels == "well").astype(float))]),
        regularizer=reg.L1(0.02).on([True, True, False, True, True, False]),
        bias=True,
    )
    np.testing.assert_allclose(problem.optimality(model.solution_), 0, atol=1e-7)


def test_penalty_factor():
    X, y, sites = data()
    factors = np.array([1.0, 2.0, 0.0, 0.5, 1.0])
    model = fc.LinearRegression(0.1, regularizer="l1", penalty_factor=factors).fit(X, y, sites=sites)
    other = fc.LinearRegression(regularizer=reg.L1(0.1, weights=tuple(factors))).fit(X, y)
    np.testing.assert_allclose(model.coef_, other.coef_, atol=1e-9)
    assert model.lam_ == pytest.approx(0.1)
    chosen = fc.LinearRegression("cv", regularizer="l1", penalty_factor=factors, folds=3, count=10).fit(
        X, y, sites=sites
    )
    again = fc.LinearRegression(chosen.lam_, regularizer="l1", penalty_factor=factors).fit(X, y)
    np.testing.assert_allclose(chosen.coef_, again.coef_, atol=1e-6)


@pytest.mark.slow
def test_penalty_factor_by_hand():
    """A factor is a column divided by it: scikit-learn's lasso of rescaled columns, and skglm's weights."""
    X, y, sites = data()
    table, factors = pd.DataFrame(X, columns=list("abcde")), np.array([1.0, 3.0, 1.0, 0.5, 1.0])
    model = fc.LinearRegression(0.1, regularizer="l1", penalty_factor={"b": 3.0, -2: 0.5}).fit(table, y, sites=sites)
    pooled = Lasso(alpha=0.1, tol=1e-13, max_iter=100_000).fit(X / factors, y)
    np.testing.assert_allclose(model.coef_, pooled.coef_ / factors, atol=1e-8)
    weighed = WeightedLasso(0.1, weights=factors, tol=1e-12).fit(X, y)
    np.testing.assert_allclose(model.coef_, weighed.coef_, atol=1e-6)
    silos = fc.Silos.from_arrays([(X, y)], feature_names=list("abcde"))
    terms = {"loss": "least_squares", "bias": True, "penalty_factor": {"b": 3.0, "d": 0.5}}
    problem = fc.Problem(silos, regularizer=reg.L1(0.1), **terms)
    np.testing.assert_allclose(fc.solve(problem, tolerance=1e-11).solution[:5], model.coef_, atol=1e-8)
    alike = fc.Problem(
        fc.Silos.from_arrays([(X / factors, y)]), regularizer=reg.L1(1.0), loss="least_squares", bias=True
    )
    for h in (reg.L1(1.0), reg.ElasticNet(1.0, 1e-12)):  # the strengths of a path are those of h, whatever the factors
        path = fc.path(fc.Problem(silos, regularizer=h, **terms), count=5)
        np.testing.assert_allclose(path.lambdas, fc.path(alike, count=5).lambdas, rtol=1e-9)
    ridge = fc.LinearRegression(0.3, regularizer="l2", penalty_factor=factors).fit(X, y, sites=sites)
    reference = Ridge(alpha=0.3 * len(y), tol=1e-12).fit(X / np.sqrt(factors), y).coef_ / np.sqrt(factors)
    np.testing.assert_allclose(ridge.coef_, reference, atol=1e-7)


def test_a_column_stands_for_all_features_made_of_it():
    table = pd.DataFrame({"age": [40.0, 50, 60, 70] * 5, "kind": ["a", "b", "c", "a"] * 5, "sick": [0, 1, 1, 0] * 5})
    silos = fc.Recipe(one_hot=["kind"]).prepare({"north": table, "south": table}, target="sick")
    problem = fc.Problem(silos, regularizer=reg.L1(0.1), bias=True, penalty_factor={"kind": 0.0})
    assert problem.regularizer.acts_on(problem.dimension).tolist() == [n == "age" for n in problem.coordinate_names]


def test_penalty_factor_in_an_experiment():
    content = {"data": {"name": "heart_disease"}, "regularizer": {"name": "L1", "lam": 0.1}}
    names = Config.check({**content, "run": {"rounds": 1}}).make_silos().feature_names
    section = {"penalty_factor": {names[0]: 0, names[3]: 2.0}}
    config = Config.check({**content, "run": {"rounds": 1}, "problem": section})
    h = Config.check(tomllib.loads(config.text)).make_problem().regularizer
    assert not h.acts_on(len(names))[0]
    assert h.value(torch.eye(len(names), dtype=torch.float64))[[0, 1, 3]].tolist() == pytest.approx([0, 0.1, 0.2])
    wrong = {**content, "run": {"rounds": 1}, "problem": {"penalty_factor": {"agee": 0.0}}}
    with pytest.raises(ConfigError, match=r"\[problem\] penalty_factor: there is no feature 'agee'"):
        Config.check(wrong).make_problem()


def test_old_names_warn():
    X, y, _ = data()
    for old, new in (
        ({"penalty_factors": [1, 2, 1, 1, 1]}, {"penalty_factor": [1, 2, 1, 1, 1]}),
        ({"unpenalised": [1]}, {"penalty_factor": {1: 0.0}}),
    ):
        for kind in (fc.LinearRegression, fc.HuberRegression):
            with pytest.warns(DeprecationWarning, match="is now penalty_factor"):
                one = kind(0.1, regularizer="l1", **old)
            assert one.get_params() == kind(0.1, regularizer="l1", **new).get_params()
            np.testing.assert_array_equal(one.fit(X, y).coef_, kind(0.1, regularizer="l1", **new).fit(X, y).coef_)
    with pytest.raises(TypeError, match="penalty_factors is now penalty_factor"):
        fc.LinearRegression(penalty_factors=[1], penalty_factor=[1])


def test_class_weight_as_in_scikit_learn():
    X, y, sites = data()
    labels = np.where(y > 2.5, "sick", "well")
    weight = np.random.default_rng(3).uniform(0.5, 2, len(y))
    for given, counted in (("balanced", None), ({"sick": 3.0}, None), ({"sick": 3.0, "well": 0.5}, weight)):
        model = fc.LogisticRegression(regularizer=reg.L2Squared(0.1), class_weight=given)
        model.fit(X, labels, sites=sites, sample_weight=counted)
        by_class = {"sick": 1.0, "well": 1.0} | given if isinstance(given, dict) else given
        each = (np.ones(len(y)) if counted is None else counted) * compute_sample_weight(by_class, labels)
        pooled = Logistic(C=1 / (0.1 * each.sum()), class_weight=given, tol=1e-12, max_iter=10_000)
        pooled.fit(X, labels, sample_weight=counted)
        np.testing.assert_allclose(model.coef_, pooled.coef_, atol=1e-5)
        np.testing.assert_allclose(model.intercept_, pooled.intercept_, atol=1e-5)
    silos = fc.Silos.from_arrays([(X[sites == k], (labels == "well")[sites == k].astype(int)) for k in range(3)])
    terms = {"bias": True, "weights": "samples", "regularizer": reg.L2Squared(0.1)}
    one = fc.solve(fc.Problem(silos, class_weight={0: 3.0}, **terms), tolerance=1e-11).solution.numpy()
    fitted = fc.LogisticRegression(regularizer=reg.L2Squared(0.1), class_weight={0: 3.0}).fit(silos)
    np.testing.assert_allclose(one, fitted.solution_, atol=1e-8)
    assert fitted.problem(silos).optimality(fitted.solution_) < 1e-7
    assert "class_weight" in clone(fc.LinearSVC(class_weight="balanced")).get_params()
    assert "class_weight" not in fc.LinearRegression().get_params()
    for wrong in ("even", {"ill": 2.0}, 3):
        with pytest.raises(ValueError, match=r"class_weight = .* 'balanced' or have numbers > 0 by class .sick, well"):
            fc.LogisticRegression(class_weight=wrong).fit(X, labels)
    for wrong in ("even", {5: 2.0}, {0: -1.0}, {0: "a"}):
        with pytest.raises(ValueError, match=r"class_weight = .* 'balanced' or have numbers > 0 by label \(0, 1\)"):
            fc.Problem(silos, class_weight=wrong)
    with pytest.raises(ValueError, match="not classes"):
        fc.Problem(fc.Silos.from_arrays([(X, y)]), loss="least_squares", class_weight="balanced")


def test_the_options_are_typed_as_they_are():
    for kind, options in ((LinearModel, Options), (fc.LogisticRegression, ClassifierOptions)):
        taken = set(inspect.signature(kind.__init__).parameters) - {"self", "lam"}
        assert taken == {*Options.__annotations__, *options.__annotations__}


@pytest.mark.parametrize("h", [reg.MCP(0.1, 3.0), reg.SCAD(0.1), reg.ElasticNet(0.1, 0.1), reg.L2Squared(0.2)])
def test_any_regularizer(h):
    X, y, sites = data()
    model = fc.HuberRegression(regularizer=h, delta=1.5).fit(X, y, sites=sites)
    silos = fc.Silos.from_arrays([(X, y)])
    problem = fc.Problem(silos, loss="huber", loss_options={"delta": 1.5}, regularizer=h, bias=True)
    assert problem.optimality(model.solution_) < 1e-7
    assert clone(model).get_params()["regularizer"] == h


def test_multinomial_regression():
    X, y, sites = data()
    labels = np.digitize(y, [0, 2])
    model = fc.MultinomialRegression(regularizer=reg.L2Squared(0.1)).fit(X, labels, sites=sites)
    reference = Logistic(C=1 / (0.1 * len(y)), tol=1e-10, max_iter=1000).fit(X, labels)
    np.testing.assert_allclose(model.coef_, reference.coef_, atol=1e-5)
    np.testing.assert_allclose(model.predict_proba(X), reference.predict_proba(X), atol=1e-5)


def test_poisson_regression():
    X, _, sites = data()
    y = np.random.default_rng(1).poisson(np.exp(0.4 * X[:, 0] + 1))
    model = fc.PoissonRegression(regularizer=reg.L2Squared(0.3)).fit(X, y, sites=sites)
    reference = PoissonRegressor(alpha=0.3, tol=1e-12, max_iter=1000).fit(X, y)
    np.testing.assert_allclose(model.coef_, reference.coef_, atol=1e-6)
    assert model.score(X, y) == pytest.approx(reference.score(X, y))


def test_quantile_regression():
    X, y, sites = data()
    model = fc.QuantileRegression(0.02, regularizer="l1", quantile=0.3).fit(X, y, sites=sites)
    reference = QuantileRegressor(alpha=0.02, quantile=0.3).fit(X, y)
    np.testing.assert_allclose(model.coef_, reference.coef_, atol=1e-4)
    assert model.intercept_ == pytest.approx(reference.intercept_, abs=1e-4)


@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
def test_support_vectors(loss):
    X, y, sites = data()
    labels = np.sign(y - 1)
    model = fc.LinearSVC(regularizer=reg.L2Squared(0.05), loss=loss).fit(X, labels, sites=sites)

    def objective(v):
        gap = np.maximum(0, 1 - labels * (X @ v[:-1] + v[-1]))
        return np.mean(gap if loss == "hinge" else gap**2) + 0.025 * v[:-1] @ v[:-1]

    best = minimize(objective, model.solution_, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-14})
    assert objective(model.solution_) <= best.fun + 1e-6


def test_the_strength_chosen_by_cross_validation():
    X, y, sites = data()
    labels = y > 1
    model = fc.LogisticRegression("cv", regularizer="l1", folds=4, count=12, choice="1se").fit(X, labels, sites=sites)
    assert model.lam_ == model.lambda_1se_ >= model.lambda_min_
    assert model.cv_scores_["lambda"].shape == (12,)
    fixed = fc.LogisticRegression(model.lam_, regularizer="l1").fit(X, labels)
    np.testing.assert_allclose(model.coef_, fixed.coef_, atol=1e-6)
    piped = make_pipeline(StandardScaler(), fc.LogisticRegression(0.01, regularizer="l1")).fit(X, labels)
    assert piped.score(X, labels) > 0.7


def test_refusals():
    X, y, sites = data()
    with pytest.raises(ValueError, match="sites has shape"):
        fc.LinearRegression().fit(X, y, sites=sites[:-1])
    with pytest.raises(ValueError, match="lam = -1"):
        fc.LinearRegression(-1).fit(X, y)
    with pytest.raises(ValueError, match="no feature 'q'"):
        fc.LinearRegression(penalty_factor={"q": 0.0}).fit(X, y)
    h = reg.GroupLasso(0.1, groups=[3, 2])
    with pytest.raises(ValueError, match="couples them"):
        fc.LinearRegression(regularizer=h, penalty_factor=[1, 1, 1, 2, 2]).fit(X, y)
    with pytest.raises(ValueError, match="MultinomialRegression"):
        fc.LogisticRegression().fit(X, np.digitize(y, [0, 1]))
    for given in (None, "cv"):
        with pytest.raises(ValueError, match=r"^TopK\(k=2\).* is not weakly convex.*fc.solve"):
            fc.LinearRegression(given, regularizer=reg.TopK(2)).fit(X, y)
