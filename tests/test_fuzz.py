"""The fuzz: no failure among its first cases, and its oracle against scikit-learn, closed forms, planted errors."""

from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from benchmarks import fuzz
from benchmarks.fuzz_draw import KINDS, LOSSES, TERMS, draw
from benchmarks.fuzz_oracle import Pooled, attained, minimised, wald
from benchmarks.fuzz_terms import Term
from sklearn.linear_model import Lasso, LogisticRegression, QuantileRegressor, Ridge
from sklearn.svm import SVC

from fedcomposite.problems import LOSSES as ALL_LOSSES
from fedcomposite.regularizers import REGISTRY

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)) * [1.0, 100.0, 1e-3, 1.0] + [0.0, 50.0, 0.0, 100.0]
TRUTH = np.array([1.0, -0.01, 500.0, 0.0])
Z = (X - X.mean(0)) @ TRUTH
NOISY = Z + RNG.normal(size=60)
LABELS = np.where(Z + RNG.logistic(size=60) > 0, 1.0, -1.0)


def pooled(loss, y, term, option=0.0, bias=True, X=X):
    return Pooled(loss, option, X, y, np.full(len(y), 1 / len(y)), np.zeros(len(y)), term, bias)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 100, 10))])
def test_no_case_fails(first):
    found = list(fuzz.verdicts(0, list(range(first, first + 10)), jobs=1))
    assert [f"{v.outcome}: {v.words} (case {v.number})" for v in found if v.failed] == []


@pytest.mark.parametrize(("seed", "number"), [(101, 797), (101, 1538)])
def test_where_all_but_nothing_is_left_of_a_loss_there_is_no_solution(seed, number):
    found = fuzz.run(seed, number)  # beside a plateau of SCAD, which does not hold coefficients, it looked like one
    assert found.outcome == "none", found.words


def test_every_loss_and_regularizer_is_drawn():
    assert set(ALL_LOSSES) - {"hinge_sum"} == {*LOSSES, "cox"}
    assert set(REGISTRY) == set(TERMS) - {"Blocks"}
    cases = [draw(5, k) for k in range(400)]
    assert {c.kind for c in cases} == set(KINDS)
    assert {c.loss for c in cases} == {*LOSSES, "cox"}
    assert {c.term.name for c in cases} == set(TERMS)


def test_a_case_is_its_seed_and_number():
    one, two, other = draw(3, 8), draw(3, 8), draw(4, 8)
    assert str(one) == str(two) != str(other)
    assert all((a[0] == b[0]).all() and (a[1] == b[1]).all() for a, b in zip(one.arrays, two.arrays, strict=True))


@pytest.mark.parametrize("number", range(0, 120, 3))
def test_the_formula_is_the_objective(number):
    case = draw(11, number)
    p = case.pooled()
    x = np.random.default_rng(number).normal(size=(p.d + p.bias) * p.classes) / (1 + abs(p.X).max())
    cut = p.d * p.classes
    x[:cut] = p.term.repaired(x[:cut])
    if case.term.name == "TopK":
        x[:cut][np.argsort(-abs(x[:cut]))[case.term["k"] :]] = 0.0
    assert case.problem().objective(x) == pytest.approx(p.value(x), rel=1e-9, abs=1e-12)
    assert float(case.term.build().value(torch.from_numpy(x[:cut]))) == pytest.approx(p.term.value(x[:cut]), rel=1e-9)


def test_minima_are_those_of_scikit_learn():
    n = len(Z)
    logistic = LogisticRegression(C=1 / (0.01 * n), tol=1e-12, max_iter=10_000, solver="newton-cholesky")
    theirs = [
        ("least_squares", Term("L1", {"lam": 0.05}), Lasso(0.05, tol=1e-14, max_iter=100_000)),
        ("least_squares", Term("L2Squared", {"lam": 0.3}), Ridge(0.3 * n)),
        ("logistic", Term("L2Squared", {"lam": 0.01}), logistic),
        ("hinge", Term("L2Squared", {"lam": 0.1}), SVC(C=1 / (0.1 * n), kernel="linear", tol=1e-8)),
        ("quantile", Term("L1", {"lam": 0.02}), QuantileRegressor(quantile=0.3, alpha=0.02)),
    ]
    for loss, term, model in theirs:
        y = LABELS if loss in ("logistic", "hinge") else NOISY
        A = (X - X.mean(0)) / X.std(0) if loss == "hinge" else X  # libsvm does not get to the minimum on X itself
        model.fit(A, y)
        p = pooled(loss, y, term, option=0.3, X=A)
        x, status = minimised(p)
        other = p.value(np.concatenate([np.ravel(model.coef_), np.ravel(model.intercept_)]))
        assert status == "optimal", loss
        assert p.value(x) <= other + 1e-9 * max(1.0, abs(other)), loss
        assert p.value(x) == pytest.approx(other, rel=1e-6), loss


def test_whether_there_is_a_minimiser():
    apart = np.where(np.median(Z) < Z, 1.0, -1.0)
    assert attained(pooled("logistic", apart, Term("Zero"))) is False
    assert attained(pooled("logistic", LABELS, Term("Zero"))) is True
    assert attained(pooled("logistic", apart, Term("L1", {"lam": 0.1}))) is True
    assert attained(pooled("logistic", np.ones(60), Term("L1", {"lam": 0.1}))) is False  # the intercept grows
    assert attained(pooled("logistic", np.ones(60), Term("L1", {"lam": 0.1}), bias=False)) is True
    assert attained(pooled("poisson", np.zeros(60), Term("L2Squared", {"lam": 1.0}))) is False
    assert attained(pooled("poisson", np.zeros(60), Term("L2Squared", {"lam": 1.0}), bias=False)) is True
    assert attained(pooled("squared_hinge", apart, Term("Zero"))) is True
    three = replace(pooled("multinomial", np.digitize(Z, np.quantile(Z, [0.3, 0.6])) * 1.0, Term("Zero")), classes=3)
    assert attained(three) is False
    mixed = replace(three, y=np.random.default_rng(2).integers(0, 3, 60).astype(float))
    assert attained(mixed) is True
    times = np.column_stack([np.exp(-Z / Z.std()), np.ones(60), np.full(60, -np.inf), np.zeros(60), np.zeros(60)])
    assert attained(pooled("cox", times, Term("Zero"), bias=False)) is False  # who has the largest margin is next
    times[:, 0] = np.random.default_rng(2).exponential(size=60)
    assert attained(pooled("cox", times, Term("Zero"), bias=False)) is True


@pytest.mark.parametrize("name", ["MCP", "SCAD", "L0", "TopK", "Sparsity2to4"])
def test_a_nonconvex_answer_must_be_stationary(name):
    fields = {"MCP": {"lam": 0.1, "theta": 3.0}, "SCAD": {"lam": 0.1, "a": 3.7}, "L0": {"lam": 0.01}, "TopK": {"k": 2}}
    term = Term(name, fields.get(name, {"lam": 0.1}))
    A = RNG.normal(size=(60, 4))
    y = A @ [1.0, -1.0, 0.0, 0.0] + 0.01 * RNG.normal(size=60)
    p = pooled("least_squares", y, term, X=A)
    x = np.array([1.0, -1.0, 0.0, 0.0, 0.0])
    for _ in range(8):  # slopes, minimiser, slopes, ...
        x = minimised(fuzz.convexified(p, x))[0]
        x = np.where(abs(x) < 1e-7, 0.0, x)
    assert fuzz.judged(fuzz.Answer(x, True, p, p.value(x)))[0] == "ok"
    moved = x + 0.05 * np.eye(5)[0]
    assert fuzz.judged(fuzz.Answer(moved, True, p, p.value(moved)))[0] == "wrong"
    assert fuzz.judged(fuzz.Answer(moved, False, p, p.value(moved)))[0] == "open"


def test_planted_errors_are_found():
    p = pooled("quantile", NOISY, Term("L1", {"lam": 0.05}), option=0.3)
    x, _ = minimised(p)
    best, zero = p.value(x), np.zeros(5)
    assert fuzz.judged(fuzz.Answer(x, True, p, best))[0] == "ok"
    assert fuzz.judged(fuzz.Answer(zero, True, p, p.value(zero)))[0] == "wrong"
    assert fuzz.judged(fuzz.Answer(zero, False, p, p.value(zero), bound=1e-3))[0] == "bound"
    assert fuzz.judged(fuzz.Answer(x, True, p, best + 1))[0] == "wrong"  # an objective that is not the formula's
    ball = replace(p, term=Term("L1Ball", {"radius": 1.0}))
    assert fuzz.judged(fuzz.Answer(zero + 1, True, ball, np.inf))[0] == "wrong"
    assert fuzz.judged(fuzz.Answer(zero, False, p, p.value(zero), denied=True))[0] == "denied"
    none = pooled("logistic", np.where(Z > 0, 1.0, -1.0), Term("Zero"))
    assert fuzz.judged(fuzz.Answer(zero, True, none, none.value(zero)))[0] == "endless"
    assert fuzz.judged(fuzz.Answer(zero, False, none, none.value(zero)))[0] == "none"


def test_intervals_of_least_squares_by_the_closed_form():
    A = np.hstack([X, np.ones((60, 1))])
    b, rss, *_ = np.linalg.lstsq(A, NOISY, rcond=None)
    found = wald(pooled("least_squares", NOISY, Term("Zero")), robust=False)
    se = np.sqrt(np.linalg.inv(A.T @ A).diagonal() * rss[0] / (60 - 5))
    np.testing.assert_allclose(found.estimate, b, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(found.se, se, rtol=1e-6)
    twice = wald(pooled("least_squares", NOISY, Term("Zero"), X=np.hstack([X, X[:, :1]])), robust=False)
    assert np.isnan(twice.se).tolist() == [True, False, False, False, True, False]


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_partial_likelihoods_are_those_of_statsmodels(ties):
    """Estimates and errors with ties and strata, by maximum and by cvxpy; the slopes by differences."""
    rng = np.random.default_rng(4)
    event, stratum, site = rng.random(60) < 0.7, rng.integers(0, 2, 60), rng.integers(0, 2, 60)
    time = np.ceil(rng.exponential(size=60) * np.exp(-0.5 * Z / Z.std()) * 10)
    y = np.column_stack([time, event, np.full(60, -np.inf), stratum, site])
    p = pooled("cox", y, Term("Zero"), option=float(ties == "efron"), bias=False)
    theirs = sm.PHReg(time, (X - X.mean(0)) / X.std(0), status=event * 1, strata=2 * stratum + site, ties=ties).fit()
    found = wald(p, robust=False)
    np.testing.assert_allclose(found.estimate * X.std(0), theirs.params, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.se * X.std(0), theirs.bse, rtol=1e-5)
    assert p.value(minimised(p)[0]) == pytest.approx(p.value(found.estimate), rel=1e-9)
    assert p.value(found.estimate) == pytest.approx(-theirs.llf / 60, rel=1e-9)
    z, e = rng.normal(size=60), 1e-5 * rng.normal(size=60)
    rise = p.likelihood.value(z + e) - p.likelihood.value(z - e)
    assert rise == pytest.approx(2 * p.likelihood.slopes(z) @ e, rel=1e-7)
    np.testing.assert_allclose(p.likelihood.scores(X, z).sum(0), p.likelihood.slopes(z) @ X, rtol=1e-9, atol=1e-12)


def test_the_reference_counts_samples_with_weight_alone_and_sees_directions_that_a_hessian_has_lost():
    """A column that varies only without weight has no interval; one that others give to within 1e-8 has its own."""
    p = pooled("least_squares", NOISY, Term("Zero"), X=np.hstack([X, np.ones((60, 1))]))
    p.X[0, 4], p.o[0] = 0.0, 0.0
    assert np.isnan(wald(p, robust=True).se).tolist() == [False] * 4 + [True, True]
    e = RNG.normal(size=60)
    near = wald(pooled("least_squares", NOISY, Term("Zero"), X=np.column_stack([X, X[:, 0] + 1e-8 * e])), robust=False)
    plain = wald(pooled("least_squares", NOISY, Term("Zero"), X=np.column_stack([X, e])), robust=False)
    np.testing.assert_allclose(near.se[[1, 2, 3, 5]], plain.se[[1, 2, 3, 5]], rtol=1e-5)
    np.testing.assert_allclose(near.se[4], 1e8 * plain.se[4], rtol=1e-5)


def test_the_reference_of_classes_that_one_sample_of_next_to_no_weight_keeps_apart():
    """A table of two groups, whose log odds have a closed form; a column that is constant takes no digits away."""
    o = np.array([0.25, 0.25, 0.5, 1e-26])
    p = Pooled(
        "logistic",
        0.0,
        np.array([[0, 3], [0, 3], [1, 3], [1, 3.0]]),
        np.array([1, -1, 1, -1.0]),
        o,
        np.zeros(4),
        Term("Zero"),
        True,
    )
    found = wald(p, robust=False)
    assert found.estimate[0] == pytest.approx(np.log(0.5 / 1e-26), rel=1e-12)
    assert found.se[0] == pytest.approx(np.sqrt((1 / o).sum() / 4), rel=1e-9)
    assert np.isnan(found.se[1:]).all()


@pytest.mark.parametrize("number", [55, 925])
def test_intervals_of_dependent_columns(number):
    """One constant but for samples without weight, and one that others give to within 1e-9, which has an interval."""
    assert fuzz.run(1, number).outcome == "ok"


ONCE = [
    (4, 36),
    (5, 7),
    (5, 607),
    (8, 176),
    (8, 847),
    (8, 1786),
    (8, 1370),
    (21, 379),
    (21, 1434),
    (22, 131),
    (22, 460),
    (22, 484),
    (22, 1418),
    (22, 1698),
    (23, 132),
    (23, 293),
    pytest.param(23, 434, marks=pytest.mark.slow),
    (23, 758),
    (23, 895),
    (23, 1105),
    (31, 1200),
    (101, 315),
    (102, 761),
    (103, 14),
    (103, 1027),
    (4203, 437),
]


@pytest.mark.parametrize(("seed", "number"), ONCE)
def test_cases_that_failed_once(seed, number):
    """Slopes that steps with h leave behind; Cox models of columns without differences, of small ones, of few events;
    and one so far out that every slope has faded.

    Where nobody at risk differs, rounding leaves a variance below zero. Where counts fall for ever on the support of
    L0, a first-order method goes so far that no gain is left. A constraint may ask for 1e300, a direction get too
    short for a Hessian on the way to a maximum, and a sample have a coefficient to itself, without an error.
    """
    found = fuzz.run(seed, number)
    assert not found.failed, found.words


def test_the_command_counts_and_tells_by_its_status(capsys, monkeypatch):
    made = {0: ("ok", 0.0), 1: ("wrong", 0.5), 2: ("open", 1e-9)}
    monkeypatch.setattr(fuzz, "run", lambda seed, k: fuzz.Verdict(k, "solve", made[k][0], 0.1, made[k][1], "words"))
    assert fuzz.main(["--seed", "7", "--cases", "3"]) == 1
    out = capsys.readouterr().out
    assert "--seed 7 --case 1" in out
    assert "--case 0" not in out
    assert "33.3 %" in out
    assert fuzz.main(["--case", "0"]) == 0
