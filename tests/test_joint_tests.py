"""Joint tests, covariances and intervals of several classes: statsmodels on pooled samples."""

import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import torch

import fedcomposite as fc
from fedcomposite.analysis import Driver, UndeterminedWarning
from fedcomposite.runtime.transports import SiloTransport

FAMILIES = {
    "least_squares": sm.families.Gaussian(),
    "logistic": sm.families.Binomial(),
    "poisson": sm.families.Poisson(),
}
START = {"atol": 1e-8, "rtol": 1e-8}


def samples(loss, offset=True, seed=0):
    g = np.random.default_rng(seed)
    X = g.normal(size=(240, 5)) * [1, 20, 1, 3, 1] + [0, 400, 0, 1, 0]
    o = np.log(g.random(240) + 0.5) if offset else np.zeros(240)
    z = 0.5 * X[:, 0] + 0.02 * (X[:, 1] - 400) + o
    if loss == "least_squares":
        y = z + g.normal(size=240)
    elif loss == "multinomial":
        y = (np.column_stack([0 * z, z, -z]) + g.gumbel(size=(240, 3))).argmax(1)
    else:
        y = g.random(240) < 1 / (1 + np.exp(-z)) if loss == "logistic" else g.poisson(np.exp(0.5 * z))
    return X, np.asarray(y, float), o


def posed(X, y, o=None, loss="logistic", **options):
    cuts = [slice(0, 90), slice(90, 150), slice(150, 240)]
    extra = {} if o is None else {"margin_offsets": [o[c] for c in cuts]}
    silos = fc.Silos.from_arrays([(X[c], y[c]) for c in cuts], **extra)
    return fc.Problem(silos, loss=loss, bias=True, **{"weights": "samples", **options})


@pytest.mark.parametrize("loss", list(FAMILIES))
def test_joint_tests_and_covariances_are_those_of_statsmodels(loss):
    X, y, o = samples(loss)
    problem, A = posed(X, y, o, loss), np.column_stack([X, np.ones(240)])
    oracle = sm.GLM(y, A, family=FAMILIES[loss], offset=o).fit(tol=1e-15)
    groups = {"first": ["x0", "x1"], "last": ["x2", "x3", "x4"]}
    walds = fc.wald_test(problem, groups)
    for name, at in {"first": [0, 1], "last": [2, 3, 4]}.items():
        expected = oracle.wald_test(np.eye(6)[at], scalar=True, use_f=False)
        np.testing.assert_allclose(
            walds.loc[name, ["statistic", "p"]].astype(float), [expected.statistic, expected.pvalue], **START
        )
        assert walds.loc[name, "df"] == len(at)
    x = torch.zeros(6, dtype=torch.float64)
    np.testing.assert_allclose(fc.covariance(problem, x, jeffreys=0), oracle.cov_params(), rtol=1e-7, atol=1e-12)
    ratios = fc.likelihood_ratio_test(problem, groups)
    for name, kept in {"first": [2, 3, 4, 5], "last": [0, 1, 5]}.items():
        less = sm.GLM(y, A[:, kept], family=FAMILIES[loss], offset=o).fit(tol=1e-15)
        expected = 2 * (oracle.llf - less.llf)
        if loss == "least_squares":
            expected = 240 * np.log(less.deviance / oracle.deviance)
        np.testing.assert_allclose(ratios.loc[name, "statistic"], expected, **START)


def test_several_classes_are_those_of_mnlogit():
    X, y, _ = samples("multinomial")
    problem = posed(X, y, loss="multinomial")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = sm.MNLogit(y, np.column_stack([X, np.ones(240)])).fit(method="newton", tol=1e-15, maxiter=100, disp=0)
        less = sm.MNLogit(y, np.column_stack([X[:, [0, 1]], np.ones(240)])).fit(
            method="newton", tol=1e-15, maxiter=100, disp=0
        )
    where = Driver(SiloTransport(problem))
    found = fc.confidence(problem, torch.zeros(18), driver=where)
    assert where.exchanges < 10
    assert list(found.index[:2]) == ["x0[1]", "x0[2]"]
    for name, expected in {"estimate": oracle.params, "se": oracle.bse, "p": oracle.pvalues}.items():
        np.testing.assert_allclose(found[name].to_numpy().reshape(6, 2), expected, rtol=1e-6, atol=1e-9)
    bounds = oracle.conf_int().transpose(1, 0, 2)
    np.testing.assert_allclose(found[["lower", "upper"]].to_numpy().reshape(6, 2, 2), bounds, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.odds_ratio, np.exp(found.estimate))
    ratio = fc.likelihood_ratio_test(problem, {"rest": ["x2", "x3", "x4"]}).loc["rest"]
    np.testing.assert_allclose(ratio["statistic"], 2 * (oracle.llf - less.llf), **START)
    wald = fc.wald_test(problem, ["x1"]).loc["x1"]
    expected = oracle.params[1] @ np.linalg.solve(oracle.cov_params()[np.ix_([1, 7], [1, 7])], oracle.params[1])
    np.testing.assert_allclose(wald["statistic"], expected, rtol=1e-6)
    assert (ratio["df"], wald["df"]) == (6, 2)


def test_robust_errors_of_several_classes_are_the_sandwich():
    X, y, _ = samples("multinomial")
    found = fc.confidence(posed(X, y, loss="multinomial"), torch.zeros(18), robust=True)
    A, B = np.column_stack([X, np.ones(240)]), found.estimate.to_numpy().reshape(6, 2)
    z = np.column_stack([np.zeros(240), A @ B])
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    scores = (((np.eye(3)[y.astype(int)] - p)[:, None, 1:]) * A[:, :, None]).reshape(240, 12)
    H = sum(np.kron(np.outer(a, a), np.diag(q) - np.outer(q, q)) for a, q in zip(A, p[:, 1:], strict=True))
    M = np.linalg.inv(H)
    np.testing.assert_allclose(found.se, np.sqrt((M @ scores.T @ scores @ M).diagonal()), rtol=1e-6)


def test_firths_penalty_of_classes_without_features_adds_a_half_to_every_count():
    y = np.repeat([0.0, 1.0, 2.0], [50, 7, 0])
    X = np.zeros((57, 1))

    silos = fc.Silos.from_arrays([(X[::2], y[::2]), (X[1::2], y[1::2])])
    problem = fc.Problem(silos, loss=fc.problems.losses.Multinomial((0, 1, 2)), bias=True, weights="samples")
    with pytest.warns(UndeterminedWarning):
        found = fc.confidence(problem, torch.zeros(6), jeffreys=1)
    expected = np.log(np.array([7.5, 0.5]) / 50.5)
    np.testing.assert_allclose(found.estimate[["(intercept)[1]", "(intercept)[2]"]], expected, rtol=1e-5)


def test_what_samples_do_not_determine_has_no_test_and_costs_no_degree_of_freedom():
    X, y, _ = samples("logistic")
    twice = np.column_stack([X, X[:, 2]])
    problem = posed(twice, y)
    with pytest.warns(UndeterminedWarning):
        assert np.isnan(fc.wald_test(problem, [["x2", "x5"]]).statistic.iloc[0])
    both, alone = fc.likelihood_ratio_test(problem, [["x2", "x5"]]), fc.likelihood_ratio_test(posed(X, y), ["x2"])
    np.testing.assert_allclose(both.to_numpy(float), alone.to_numpy(float), atol=1e-8)


def test_a_column_stands_for_its_levels():
    recipe = fc.Recipe(one_hot=["cp"], impute="mean", drop=["slope", "ca", "thal", "chol"], standardize=True)
    frames = fc.data.frames("heart_disease")
    problem = fc.Problem(
        recipe.model_copy(update={"target": {"0": 0, "1": 1, "2": 1, "3": 1, "4": 1}}).prepare(frames, target="num"),
        bias=True,
        weights="samples",
    )
    found = fc.wald_test(problem, ["cp", "age"])
    assert found.df.tolist() == [3, 1]
    assert len(fc.likelihood_ratio_test(problem)) == len(set(problem.silos.recipe.sources.values()))
    one = fc.confidence(problem, torch.zeros(problem.dimension), jeffreys=0).loc["age"]
    np.testing.assert_allclose(found.loc["age", "statistic"], one["z"] ** 2, rtol=1e-8)


def test_a_column_stands_for_the_terms_of_its_spline_too():
    """The first of them is called as the column is."""
    g = np.random.default_rng(3)
    frames = {site: pd.DataFrame({"age": g.uniform(30, 80, 150), "dose": g.normal(size=150)}) for site in "ab"}
    for frame in frames.values():
        frame["y"] = (np.abs(frame["age"] - 55) + 6 * g.logistic(size=150) > 13).astype(float)
    silos = fc.Recipe(splines={"age": 4}).prepare(frames, target="y")
    problem = fc.Problem(silos, bias=True, weights="samples", regularizer=fc.regularizers.L1(0.5))
    X, y = (np.concatenate([np.asarray(one[k]) for one in silos]) for k in (0, 1))
    A = np.column_stack([X, np.ones(300)])
    oracle, less = (sm.GLM(y > 0, B, family=sm.families.Binomial()).fit(tol=1e-15) for B in (A, A[:, 3:]))
    wald = oracle.wald_test(np.eye(5)[:3], scalar=True).statistic
    for test, right in ((fc.wald_test, wald), (fc.likelihood_ratio_test, 2 * (oracle.llf - less.llf))):
        assert test(problem).df.tolist() == [3, 1]
        assert test(problem).loc["age", "statistic"] == pytest.approx(right, rel=1e-8)
    for factors in ({"age": 0, "age spline 1": 2}, {"age spline 1": 2, "age": 0}):  # a feature's own has the last word
        free = fc.Problem(silos, bias=True, regularizer=fc.regularizers.L1(0.5), penalty_factor=factors)
        assert free.regularizer == fc.regularizers.L1(0.5, (2.0, 1.0)).on([False, True, False, True, False])


def test_what_has_no_likelihood_is_refused():
    X, y, _ = samples("logistic")
    with pytest.raises(ValueError, match="wald_test"):
        fc.likelihood_ratio_test(posed(X, y, weights="uniform"))
    with pytest.raises(ValueError, match="no feature 'x9'"):
        fc.wald_test(posed(X, y), ["x9"])
    with pytest.raises(ValueError, match="likelihood"):
        fc.wald_test(posed(X, y, loss="huber"), ["x1"])
    for ask in (fc.wald_test, fc.likelihood_ratio_test):
        for wrong in (1, "x1", [0.5], {"both": 1.5}):
            with pytest.raises(ValueError, match=r"must be a list of features or columns, such as \['age', 'sex'\] or"):
                ask(posed(X, y), wrong)
        with pytest.raises(ValueError, match="terms: 99 is none of the numbers of features"):
            ask(posed(X, y), [99])
    apart = X.copy()
    apart[:, 0] = 2 * y - 1
    with pytest.raises(ValueError, match=r"x0.*jeffreys=1"):
        fc.likelihood_ratio_test(posed(apart, y), ["x1"])


def test_features_go_by_number_too():
    X, y, _ = samples("logistic")
    problem = posed(X, y)
    last = problem.silos.features.shape[1] - 1
    for ask in (fc.wald_test, fc.likelihood_ratio_test):
        pd.testing.assert_frame_equal(ask(problem, [0, 1]), ask(problem, ["x0", "x1"]))
        pd.testing.assert_frame_equal(ask(problem, [[0, np.int64(1)]]), ask(problem, [["x0", "x1"]]))
        pd.testing.assert_frame_equal(ask(problem, {"ends": [0, -1]}), ask(problem, {"ends": ["x0", f"x{last}"]}))
