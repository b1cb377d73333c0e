"""Intervals, bootstrap and stability selection: formulas for pooled data, and laws."""

from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import statsmodels.api as sm
import torch
from sklearn.linear_model import LogisticRegression as Logistic

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.analysis import Driver, Rows, SeparationWarning, UndeterminedWarning, adjusted
from fedcomposite.analysis.inference import nodewise
from fedcomposite.runtime.transports import SiloTransport


def posed(loss="least_squares", lam=0.05, weights="samples", features=6):
    generator = np.random.default_rng(0)
    arrays = []
    for m in (80, 50, 70):
        X = generator.normal(size=(m, features)) + 0.3
        z = X[:, 0] - 0.7 * X[:, 1] + 0.2
        y = z + generator.normal(size=m) if loss == "least_squares" else generator.random(m) < 1 / (1 + np.exp(-z))
        arrays.append((X, y.astype(float)))
    h = reg.L1(lam)
    problem = fc.Problem(fc.Silos.from_arrays(arrays), loss=loss, regularizer=h, bias=True, weights=weights)
    return problem, fc.solve(problem).solution


def design(problem):
    X = problem.silos.features.double().numpy()
    return np.column_stack([X, np.ones(len(X))]), problem.silos.targets.double().numpy()


def test_linear_intervals_are_those_of_least_squares():
    problem, x = posed()
    table = fc.confidence(problem, x)
    A, y = design(problem)
    b, *_ = np.linalg.lstsq(A, y, rcond=None)
    variance = ((y - A @ b) ** 2).sum() / (len(y) - 7)
    se = np.sqrt(variance * np.linalg.inv(A.T @ A).diagonal())
    np.testing.assert_allclose(table.estimate, b, atol=1e-10)
    np.testing.assert_allclose(table.se, se, rtol=1e-10)
    np.testing.assert_allclose(table.upper - b, 1.959964 * se, rtol=1e-6)
    np.testing.assert_allclose(table.p, 2 * scipy.stats.norm.sf(np.abs(b / se)), rtol=1e-8)
    assert list(table.index) == [*(f"x{j}" for j in range(6)), "(intercept)"]


FAMILIES = {
    "least_squares": sm.families.Gaussian(),
    "logistic": sm.families.Binomial(),
    "poisson": sm.families.Poisson(),
}


def rows_of(loss, offset=True, seed=3):
    """Columns of very different scale at three sites, with an offset: features, targets, offsets, where sites begin."""
    g = np.random.default_rng(seed)
    scale = np.logspace(0, 4, 6)
    X = (g.normal(size=(200, 6)) + 0.3) * scale
    o = np.log(g.random(200) + 0.5) if offset else np.zeros(200)
    z = X @ (np.array([0.8, -0.6, 0, 0, 0, 0.3]) / scale) + o
    if loss == "least_squares":
        y = z + g.normal(size=200)
    else:
        y = g.random(200) < 1 / (1 + np.exp(-z)) if loss == "logistic" else g.poisson(np.exp(0.5 * z))
    return X, np.asarray(y, float), o


def at_sites(X, y, o=None, w=None, loss="logistic", lam=1.0, **options):
    m = len(y)
    cuts = [slice(0, 2 * m // 5), slice(2 * m // 5, 2 * m // 3), slice(2 * m // 3, m)]
    extra = {k: [v[c] for c in cuts] for k, v in {"margin_offsets": o, "weights": w}.items() if v is not None}
    silos = fc.Silos.from_arrays([(X[c], y[c]) for c in cuts], **extra)
    return fc.Problem(silos, loss=loss, bias=True, regularizer=reg.L1(lam), **{"weights": "samples", **options})


@pytest.mark.parametrize("loss", list(FAMILIES))
@pytest.mark.parametrize("lam", [1e-3, 0.1, None])
def test_intervals_are_those_of_statsmodels_however_strong_the_regularizer(loss, lam):
    """Estimate, error, p-value and interval of an unregularized fit to pooled samples; also the sandwich (HC0)."""
    X, y, o = rows_of(loss)
    problem = at_sites(X, y, o, loss=loss, lam=lam or 1.0)
    x = torch.zeros(7, dtype=torch.float64) if lam is None else fc.solve(problem).solution
    model = sm.GLM(y, np.column_stack([X, np.ones(200)]), family=FAMILIES[loss], offset=o)
    for robust, kind in ((False, "nonrobust"), (True, "HC0")):
        where = Driver(SiloTransport(problem))
        table, oracle = fc.confidence(problem, x, robust=robust, driver=where), model.fit(cov_type=kind, tol=1e-14)
        assert where.exchanges <= (8 if loss != "least_squares" else 3)
        np.testing.assert_allclose(table.estimate, oracle.params, rtol=1e-6)
        np.testing.assert_allclose(table.se, oracle.bse, rtol=1e-6)
        np.testing.assert_allclose(table.p, oracle.pvalues, rtol=1e-6)
        np.testing.assert_allclose(table[["lower", "upper"]], oracle.conf_int(), rtol=1e-6)
        if loss != "least_squares":
            names = [f"{'odds' if loss == 'logistic' else 'rate'}_{end}" for end in ("ratio", "lower", "upper")]
            np.testing.assert_allclose(table[names], np.exp(table[["estimate", "lower", "upper"]]))
        assert table.coefficient.tolist() == x.tolist()


@pytest.mark.parametrize("loss", ["least_squares", "logistic", "poisson"])
def test_weighted_samples_have_the_sandwich_at_the_estimate_whatever_the_scale_of_weights(loss):
    X, y, o = rows_of(loss)
    w = np.random.default_rng(1).random(200) + 0.2
    A = np.column_stack([X, np.ones(200)])
    oracle = sm.GLM(y, A, family=FAMILIES[loss], offset=o, freq_weights=w).fit(tol=1e-14)
    scores = A * (w * (y - oracle.mu))[:, None]
    second = {"least_squares": 1.0, "logistic": oracle.mu * (1 - oracle.mu), "poisson": oracle.mu}[loss]
    M = np.linalg.inv((A * (w * second)[:, None]).T @ A)
    for size in (1.0, 1e-6):
        table = fc.confidence(at_sites(X, y, o, size * w, loss=loss), torch.zeros(7, dtype=torch.float64))
        np.testing.assert_allclose(table.estimate, oracle.params, rtol=1e-6)
        np.testing.assert_allclose(table.se, np.sqrt((M @ scores.T @ scores @ M).diagonal()), rtol=1e-6)


@pytest.mark.parametrize("loss", ["logistic", "poisson"])
@pytest.mark.parametrize("lam", [1e-6, 0.02, None])
def test_what_grows_without_end_is_told_and_the_rest_is_that_of_the_other_samples(loss, lam):
    """A category without events: its coefficient is infinite, and its samples say nothing about the others."""
    X, y, _ = rows_of(loss, offset=False, seed=5)
    X = X / X.std(0)
    X[:, 1] = np.random.default_rng(0).random(200) < 0.15
    without = X[:, 1] == 0
    y[~without] = 0.0
    problem = at_sites(X, y, loss=loss, lam=lam or 1.0)
    where = Driver(SiloTransport(problem))
    x = torch.zeros(7, dtype=torch.float64) if lam is None else fc.path(problem, lambdas=[1.0, lam]).solutions[-1]
    with pytest.warns(SeparationWarning, match=r"no finite estimate of x1:"):
        table = fc.confidence(problem, x, driver=where)
    assert where.exchanges < 20
    assert table[["estimate", "se", "lower", "upper", "p"]].isna().all(axis=1).tolist() == [0, 1, 0, 0, 0, 0, 0]
    A = np.column_stack([X[:, [0, 2, 3, 4, 5]], np.ones(200)])[without]
    oracle = sm.GLM(y[without], A, family=FAMILIES[loss]).fit(tol=1e-14)
    rest = table.drop("x1")
    np.testing.assert_allclose(rest.se, oracle.bse, rtol=1e-3)
    np.testing.assert_allclose(rest.estimate, oracle.params, atol=1e-3 * oracle.bse.min())


def test_classes_that_can_be_told_apart_have_no_intervals():
    X, _, _ = rows_of("logistic")
    problem = at_sites(X, (X[:, 0] > 0.3).astype(float))
    with pytest.warns(SeparationWarning, match="x0"):
        table = fc.confidence(problem, torch.zeros(7, dtype=torch.float64))
    assert table["se"].isna().all()


def test_columns_that_depend_on_each_other_have_no_nodewise_intervals_whichever_minimiser_is_given():
    g = np.random.default_rng(0)
    X = g.normal(size=(60, 100))
    X[:, 7] = -2 * X[:, 3]
    y = X[:, 3] - X[:, 5] + g.normal(size=60)
    for loss, b in (("least_squares", y), ("logistic", (y > 0).astype(float)), ("poisson", np.floor(np.exp(y / 2)))):
        problem = at_sites(X, b, loss=loss, lam=0.1)
        x = fc.path(problem, lambdas=[1.0, 0.1]).solutions[-1]
        tables = []
        for share in (0.0, 0.4, 1.0):  # of the same margin
            one, whole = x.clone(), float(x[3] - 2 * x[7])
            one[3], one[7] = (1 - share) * whole, -share * whole / 2
            with pytest.warns(UndeterminedWarning, match=r"no estimate of x3, x7:"):
                tables.append(fc.confidence(problem, one).drop(columns="coefficient"))
        assert tables[0]["se"].isna().to_numpy().nonzero()[0].tolist() == [3, 7]
        for other in tables[1:]:
            pd.testing.assert_frame_equal(other, tables[0], rtol=1e-8)


@pytest.mark.parametrize("loss", ["least_squares", "logistic"])
def test_nodewise_sandwich_errors_do_not_grow_with_the_regularizer(loss):
    """Gradients are those at the refined point: a model that is shrunk twice as much has no larger residuals."""
    g = np.random.default_rng(0)
    X = g.normal(size=(200, 60))
    z = X[:, :3] @ [2.0, -2.0, 2.0]
    y = z + g.normal(size=200) if loss == "least_squares" else (z + g.logistic(size=200) > 0).astype(float)
    sizes = []
    for lam in (0.05, 0.2) if loss == "logistic" else (0.1, 0.6):
        problem = at_sites(X, y, loss=loss, lam=lam)
        table = fc.confidence(problem, fc.path(problem, lambdas=[5.0, lam]).solutions[-1], robust=True)
        sizes.append(float(table.se[3:60].median()))
    assert sizes[1] < 1.1 * sizes[0]


def test_a_second_step_takes_off_what_the_first_leaves_of_a_shrunk_logistic_model():
    """Against the maximum likelihood, and against both steps written out."""
    problem, x = posed("logistic", lam=0.1)
    table = fc.confidence(problem, x, inverse="nodewise")
    A, y = design(problem)
    free = Logistic(C=np.inf, tol=1e-12, max_iter=1000).fit(A[:, :-1], y).coef_[0]

    def step(x):
        p = 1 / (1 + np.exp(-A @ x))
        H = (A * (p * (1 - p))[:, None]).T @ A / len(y)
        M = nodewise(torch.from_numpy(H), len(y), True).numpy()
        return x - M @ A.T @ (p - y) / len(y), np.sqrt((M @ H @ M.T).diagonal() / len(y))

    first, se = step(x.numpy())
    clear = (x.numpy() != 0) & (np.abs(first / se) > np.sqrt(2 * np.log(7)))
    assert clear[:6].tolist() == [True, True, False, False, False, False]
    clear[-1] = True
    second, se = step(np.where(clear, first, x.numpy()))
    np.testing.assert_allclose(table.estimate, second, rtol=1e-10)
    np.testing.assert_allclose(table.se, se, rtol=1e-10)
    assert (np.abs(second - np.append(free, 0))[:2] < 0.5 * np.abs(first - np.append(free, 0))[:2]).all()
    assert table.coefficient.tolist() == x.tolist()


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_robust_variances_are_the_sandwich(weights):
    """At the maximum of the likelihood, in which sites count by their samples or alike."""
    problem, x = posed("logistic", weights=weights)
    table = fc.confidence(problem, x, robust=True)
    A, y = design(problem)
    sizes = problem.silos.sizes
    o = np.full(len(y), 1 / len(y)) if weights == "samples" else np.repeat(1 / (3 * sizes), sizes)
    b = np.zeros(7)
    for _ in range(30):
        p = 1 / (1 + np.exp(-A @ b))
        M = np.linalg.inv((A * (o * p * (1 - p))[:, None]).T @ A)
        scores = A * (o * (p - y))[:, None]
        b = b - M @ scores.sum(0)
    np.testing.assert_allclose(table.se, np.sqrt((M @ scores.T @ scores @ M).diagonal()), rtol=1e-8)
    np.testing.assert_allclose(table.estimate, b, atol=1e-10)


def test_nodewise_regressions_invert():
    generator = np.random.default_rng(0)
    X = torch.from_numpy(generator.normal(size=(500, 8)) * np.arange(1, 9))
    H = X.T @ X / 500
    M = nodewise(H, 500)
    exact = torch.linalg.inv(H)
    scale = exact.diagonal().sqrt()
    assert float(((M - exact) / scale / scale.unsqueeze(1)).abs().max()) < 0.15
    assert float((nodewise(H, 500, factor=0.0) - exact).abs().max()) < 1e-6
    C = (M @ H - torch.eye(8)) * H.diagonal().sqrt().unsqueeze(1) / H.diagonal().sqrt()
    tau = 1 / (M.diagonal() * H.diagonal())
    bound = np.sqrt(2 * np.log(8) / 500) / tau  # the optimality condition of the regressions
    assert bool((C.abs() <= bound.unsqueeze(1) + 1e-6).all())


def test_bootstrap_weights_and_intervals():
    counts = Rows("bootstrap", 3, seed=1).counts(5, np.zeros(20000, np.int64))
    for k in range(4):
        assert np.mean(counts == k) == pytest.approx(np.exp(-1) / [1, 1, 2, 6][k], abs=0.01)
    problem, x = posed(lam=1e-4)
    table, wald = fc.bootstrap(problem, x, draws=25, seed=2), fc.confidence(problem, x)
    np.testing.assert_allclose(table.se, wald.se, rtol=0.6)
    assert ((table.lower < x.numpy()) & (x.numpy() < table.upper)).all()


@pytest.mark.parametrize("over", ["samples", "sites"])
def test_stability(over):
    generator = np.random.default_rng(1)
    arrays = []
    for _ in range(4):
        X = generator.normal(size=(60, 20))
        arrays.append((X, X[:, 3] - X[:, 7] + generator.normal(size=60)))
    silos = fc.Silos.from_arrays(arrays)
    problem = fc.Problem(silos, loss="least_squares", regularizer=reg.L1(1.0), bias=True, weights="samples")
    found = fc.stability(problem, draws=6, over=over, errors=0.5, threshold=0.8, count=10, ratio=0.2)
    assert set(found.selected) == {"x3", "x7"}
    assert found.candidates == 20
    assert found.bound == pytest.approx(found.q**2 / (0.6 * 20))
    assert found.bound <= 0.5
    assert found.share.sum() <= found.q + 1e-9
    assert list(found.table.index[:2]) in (["x3", "x7"], ["x7", "x3"])


def test_halves_of_sites_are_of_those_that_are_there():
    """Silos of a subset keep their numbers, of which halves of the first few would hold none."""
    silos = fc.data.load("synthetic", clients=9, features=3, samples=60).subset([4, 5, 6, 7, 8])
    problem = fc.Problem(silos, loss="least_squares", regularizer=reg.L1(1.0), bias=True)
    alike = fc.Silos.from_arrays([(X.numpy(), y.numpy()) for X, y in map(silos.__getitem__, range(5))])
    again = fc.Problem(alike, loss="least_squares", regularizer=reg.L1(1.0), bias=True)
    np.testing.assert_array_equal(*(fc.stability(p, over="sites", draws=4, count=5).share for p in (problem, again)))


def test_halves_come_in_pairs():
    strata = np.repeat([0, 1], [30, 21])
    one, other = (Rows("half", 4, held=held, seed=3).counts(2, strata) for held in (False, True))
    np.testing.assert_array_equal(one + other, 1)
    assert abs(one[:30].sum() - 15) <= 1
    assert abs(one.sum() - 25.5) <= 0.5
    inside = [Rows("sites", 2, 6, seed=3).counts(i, strata)[0] for i in range(6)]
    assert sum(inside) == 3


def test_holms_adjustment():
    np.testing.assert_allclose(adjusted([0.01, 0.04, 0.03, 0.5]), [0.04, 0.09, 0.09, 0.5])


def test_refusals():
    problem, x = posed()
    with pytest.raises(ValueError, match="level = 2"):
        fc.confidence(problem, x, level=2)
    with pytest.raises(ValueError, match="bootstrap"):
        fc.confidence(fc.Problem(problem.silos, loss="huber", bias=True), x)
    with pytest.raises(ValueError, match="must be even"):
        fc.stability(problem, draws=3)
    with pytest.raises(ValueError, match="four or more"):
        fc.stability(problem, over="sites")


def test_intervals_per_unit_are_those_of_columns_as_they_are():
    """Odds ratios of a year and of a man, whatever the recipe standardized; the intercept has its own interval."""
    g = np.random.default_rng(0)
    frames = {}
    for name in ("north", "south"):
        frame = pd.DataFrame({"age": g.normal(60, 9, 150), "male": g.integers(0, 2, 150).astype(float)})
        margin = (frame["age"] - 60) / 9 + frame["male"]
        frames[name] = frame.assign(sick=(g.random(150) < 1 / (1 + np.exp(-margin))).astype(int))
    silos = fc.Recipe().prepare(frames, target="sick")
    problem = fc.Problem(silos, loss="logistic", bias=True, weights="samples", regularizer=fc.regularizers.L1(1e-9))
    table = fc.analyse(problem, "fit").intervals
    pooled = pd.concat(frames.values())
    A, y = np.column_stack([pooled[["age", "male"]], np.ones(300)]), pooled["sick"].to_numpy()
    b = np.zeros(3)
    for _ in range(30):
        p = 1 / (1 + np.exp(-A @ b))
        H = (A * (p * (1 - p))[:, None]).T @ A
        b = b - np.linalg.solve(H, A.T @ (p - y))
    se = np.sqrt(np.linalg.inv(H).diagonal())
    np.testing.assert_allclose(table.unit_estimate, b, atol=1e-6)
    np.testing.assert_allclose(table.unit_odds_upper, np.exp(b + 1.959964 * se), rtol=1e-5)
    np.testing.assert_allclose(table.odds_ratio["male"] ** (1 / pooled["male"].std(ddof=0)), np.exp(b[1]), rtol=1e-6)


def test_the_intercept_per_unit_has_its_own_p():
    """It is that of columns at 0, another number than that of the model: p and interval say the same."""
    g = np.random.default_rng(0)
    frame = pd.DataFrame({"age": g.normal(60, 9, 300), "visits": g.poisson(2.0, 300).astype(float)})
    frame["events"] = g.poisson(np.exp(0.4 * (frame["age"] - 60) / 9 - 0.1 * frame["visits"] + 2.6))
    silos = fc.Recipe().prepare({"north": frame[:140], "south": frame[140:]}, target="events")
    problem = fc.Problem(silos, loss="poisson", bias=True, weights="samples", regularizer=reg.L1(0.1))
    table = fc.analyse(problem, "fit").intervals
    A = sm.add_constant(frame[["age", "visits"]])
    oracle = sm.GLM(frame["events"], A, family=sm.families.Poisson()).fit(tol=1e-14)
    named = oracle.pvalues.rename({"const": "(intercept)"})
    np.testing.assert_allclose(table["unit_p"], named[table.index], rtol=1e-6, atol=1e-100)
    ends = oracle.conf_int().rename({"const": "(intercept)"}).loc[table.index]
    np.testing.assert_allclose(table[["unit_rate_lower", "unit_rate_upper"]], np.exp(ends), rtol=1e-6)
    assert ((table["unit_p"] < 0.05) == ((table["unit_rate_lower"] > 1) | (table["unit_rate_upper"] < 1))).all()
    assert table["p"]["(intercept)"] < 1e-6 < 0.01 < table["unit_p"]["(intercept)"]


def test_terms_of_splines_and_products_have_no_ratio_per_unit(tmp_path):
    """A year of age is no unit of its linear term; reports name such terms and say what to look at."""
    g = np.random.default_rng(0)
    columns = {"age": g.normal(60, 9, 400), "bmi": g.normal(26, 4, 400), "male": g.integers(0, 2, 400).astype(float)}
    frame = pd.DataFrame({**columns, "crp": g.normal(3, 1, 400)})
    frame["sick"] = (g.random(400) < 1 / (1 + np.exp(-(frame["age"] - 60) / 9))).astype(int)
    recipe = fc.Recipe(splines={"age": 4}, interactions=[("bmi", "male")])
    silos = recipe.prepare({"north": frame[:200], "south": frame[200:]}, target="sick")
    problem = fc.Problem(silos, loss="logistic", bias=True, weights="samples", regularizer=reg.L1(0.01))
    found = fc.analyse(problem, "fit")
    alone = ["crp", "(intercept)"]
    assert set(silos.recipe.joint) == set(found.intervals.index) - set(alone)
    assert silos.recipe.joint["age"] == ["age", "age spline 1", "age spline 2"]
    assert silos.recipe.joint["male"] == ["bmi", "male", "bmi:male"]
    unit = found.intervals[[c for c in found.intervals if c.startswith("unit_")]]
    assert unit.loc[alone].notna().all(axis=None)
    assert unit.drop(alone).isna().all(axis=None)
    assert found.intervals["odds_ratio"].notna().all()
    found.save(tmp_path / "run")
    fc.write_report(tmp_path / "run")
    text = (tmp_path / "run" / "report.md").read_text()
    assert "No ratio per unit for age, age spline 1, age spline 2, bmi, male, bmi:male:" in text
    table = pd.read_csv(tmp_path / "run" / "report-coefficients.csv").set_index("name")
    assert table.loc[alone, ["OR per unit", "OR from", "OR to", "p per unit"]].notna().all(axis=None)
    assert table.drop(alone)["OR per unit"].isna().all()
    np.testing.assert_allclose(table["p per unit"]["(intercept)"], found.intervals["unit_p"]["(intercept)"], rtol=1e-9)


def test_columns_of_any_scale_have_intervals():
    """A column of billions beside an intercept: units of columns do not decide what is determined."""
    problem, _ = posed(lam=1.0)
    X, y = design(problem)
    wide = X[:, :6] * np.array([1e9, 1, 1, 1, 1, 1e-9])
    scaled = fc.confidence(at_sites(wide, y, loss="least_squares"), torch.zeros(7, dtype=torch.float64))
    plain = fc.confidence(problem, torch.zeros(7, dtype=torch.float64))
    np.testing.assert_allclose(scaled["z"], plain["z"], rtol=1e-6)


def test_what_samples_do_not_determine_has_no_interval():
    """A column twice, and a constant: no short interval, and no p-value of 0."""
    g = np.random.default_rng(0)
    X = g.normal(size=(300, 3))
    X = np.column_stack([X, X[:, 0], np.zeros(300)])
    y = (X[:, 0] > g.normal(size=300)).astype(float)
    silos = fc.Silos.from_arrays([(X[:150], y[:150]), (X[150:], y[150:])])
    for loss in ("logistic", "least_squares"):
        problem = fc.Problem(silos, loss=loss, bias=True, weights="samples", regularizer=fc.regularizers.L1(0.01))
        with pytest.warns(UndeterminedWarning, match=r"no estimate of x0, x3, x4:") as said:
            table = fc.confidence(problem, torch.zeros(6, dtype=torch.float64))
        assert len(said) == 1
        assert table[["estimate", "se", "lower", "p"]].isna().all(axis=1).tolist() == [1, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("loss", list(FAMILIES))
@pytest.mark.parametrize("robust", [False, True])
def test_columns_far_from_zero_beside_their_deviation_have_the_intervals_of_centred_ones(loss, robust):
    """Deviations of 1e-7 and 1e-9 of the mean: the Hessian of columns as they are has forgotten them."""
    X, y, _ = rows_of(loss, offset=False)
    Z = (X - X.mean(0)) / X.std(0)
    size, mean = np.array([1e-4, 1.0, 1e-6, 1.0, 50.0, 1e-2]), np.array([1e3, 0.0, -1e3, 5.0, 100.0, 1e3])
    X = Z * size + mean
    A = np.column_stack([X - mean, np.ones(200)])  # exact, unlike Z * size
    oracle = sm.GLM(y, A, family=FAMILIES[loss]).fit(cov_type="HC0" if robust else "nonrobust", tol=1e-14)
    table = fc.confidence(at_sites(X, y, loss=loss), torch.zeros(7, dtype=torch.float64), robust=robust)
    rest = slice(0, 6)
    np.testing.assert_allclose(table.estimate[rest], oracle.params[rest], rtol=1e-6)
    np.testing.assert_allclose(table.se[rest], oracle.bse[rest], rtol=1e-6)
    np.testing.assert_allclose(table.p[rest], oracle.pvalues[rest], rtol=1e-5)
    back = np.append(-mean, 1.0)  # the intercept of columns as they are
    assert table.estimate.iloc[-1] == pytest.approx(back @ oracle.params, rel=1e-6)
    assert table.se.iloc[-1] == pytest.approx(np.sqrt(back @ oracle.cov_params() @ back), rel=1e-6)


def test_equal_columns_far_from_zero_without_an_intercept_have_no_interval():
    """What rounding left of their difference beside a third column, 1e-13 of it, was taken for a column of its own."""
    g = np.random.default_rng(3)
    for trial in range(20):
        X = 1000 + g.normal(size=(42, 2))
        y = g.normal(size=42)
        silos = fc.Silos.from_arrays([(X[:20, [0, 1, 1]], y[:20]), (X[20:, [0, 1, 1]], y[20:])])
        problem = fc.Problem(silos, loss="least_squares", weights="samples")
        with pytest.warns(UndeterminedWarning, match="no estimate of x1, x2"):
            table = fc.confidence(problem, torch.zeros(3, dtype=torch.float64))
        oracle = sm.OLS(y, X).fit()
        assert table.se.isna().tolist() == [False, True, True], trial
        np.testing.assert_allclose(
            table.loc[table.index[0], ["estimate", "se"]].astype(float), [oracle.params[0], oracle.bse[0]], rtol=1e-7
        )


@pytest.mark.parametrize("loss", ["least_squares", "logistic", "poisson"])
@pytest.mark.parametrize("robust", [False, True])
def test_columns_that_all_but_depend_on_each_other_have_intervals_to_eight_digits(loss, robust):
    """A sum of columns but for 1e-5 of it: a Hessian has the square of that, and tells it to five digits."""
    g = np.random.default_rng(8)
    X, rest = g.normal(size=(400, 2)), g.normal(size=400)
    z = X[:, 0] - 0.5 * X[:, 1]
    y = {"least_squares": z + g.normal(size=400), "logistic": (z + g.logistic(size=400) > 0) * 1.0}.get(loss)
    y = g.poisson(np.exp(z)).astype(float) if y is None else y
    far = X.sum(1) + 1e-5 * rest
    family = {"least_squares": sm.families.Gaussian(), "logistic": sm.families.Binomial()}
    oracle = sm.GLM(
        y, np.column_stack([X, (far - X.sum(1)) / 1e-5, np.ones(400)]), family.get(loss, sm.families.Poisson())
    )
    oracle = oracle.fit(cov_type="HC0" if robust else "nonrobust", tol=1e-15, maxiter=200)
    back = np.array([[1, 0, -1e5, 0], [0, 1, -1e5, 0], [0, 0, 1e5, 0], [0, 0, 0, 1]])
    problem = at_sites(np.column_stack([X, far]), np.where(y > 0, 1, -1) if loss == "logistic" else y, loss=loss)
    table = fc.confidence(problem, torch.zeros(4, dtype=torch.float64), robust=robust)
    np.testing.assert_allclose(table.se, np.sqrt(np.diag(back @ oracle.cov_params() @ back.T)), rtol=1e-8)


@pytest.mark.parametrize("robust", [False, True])
def test_a_direction_that_gets_too_short_on_the_way_is_told_apart_as_well(robust):
    """A sum of columns but for 3e-5 where the rates are small, so that its curvature fades on the way."""
    g = np.random.default_rng(4)
    X = g.normal(size=(300, 2))
    z = 2.5 * X[:, 0] + 0.3 * X[:, 1]
    third = X.sum(1) + 3e-5 * np.where(z < -2, g.normal(size=300), 0)
    rest = (third - X.sum(1)) / 3e-5
    y = g.poisson(np.exp(z)).astype(float)
    oracle = sm.GLM(y, np.column_stack([X, rest, np.ones(300)]), family=sm.families.Poisson())
    oracle = oracle.fit(cov_type="HC0" if robust else "nonrobust", tol=1e-14)
    back = np.array([[1, 0, -1 / 3e-5, 0], [0, 1, -1 / 3e-5, 0], [0, 0, 1 / 3e-5, 0], [0, 0, 0, 1]])
    problem = at_sites(np.column_stack([X, third]), y, loss="poisson")
    table = fc.confidence(problem, torch.zeros(4, dtype=torch.float64), robust=robust)
    np.testing.assert_allclose(table.estimate, back @ oracle.params, rtol=1e-6)
    np.testing.assert_allclose(table.se, np.sqrt(np.diag(back @ oracle.cov_params() @ back.T)), rtol=1e-6)


@pytest.mark.parametrize("inverse", ["exact", "nodewise"])
@pytest.mark.parametrize(("constant", "lost"), [(0.0, "x1"), (0.1, r"x1, \(intercept\)"), (1e6, r"x1, \(intercept\)")])
def test_a_constant_column_takes_nothing_from_the_others(inverse, constant, lost):
    X, y, _ = rows_of("logistic", offset=False)
    X = X / X.std(0) + [0, 0, 1e5, 0, 0, 0]
    rest = np.delete(X, 1, axis=1)
    X[:, 1] = constant
    with pytest.warns(UndeterminedWarning, match=rf"no estimate of {lost}:") as said:
        table = fc.confidence(at_sites(X, y), torch.zeros(7, dtype=torch.float64), inverse=inverse)
    assert len(said) == 1
    kept = fc.confidence(at_sites(rest, y), torch.zeros(6, dtype=torch.float64), inverse=inverse)
    # regressions of six columns are a little less regularized than those of seven
    near = {"rtol": 1e-7} if inverse == "exact" else {"rtol": 0.1, "atol": 0.02}
    at = [0, 2, 3, 4, 5] + ([6] if constant == 0 else [])
    np.testing.assert_allclose(table.se.iloc[at], kept.se.iloc[: len(at)], **near)
    assert table.se.isna().sum() == 7 - len(at)


def test_a_column_that_varies_only_where_samples_have_no_weight_is_not_determined():
    X, y, _ = rows_of("least_squares", offset=False)
    w = np.ones(200)
    X[:, 1], w[::10] = 1.0, 0.0
    X[::10, 1] = 0.0
    problem = at_sites(X, y, w=w, loss="least_squares")
    with pytest.warns(UndeterminedWarning, match=r"no estimate of x1, \(intercept\):"):
        table = fc.confidence(problem, torch.zeros(7, dtype=torch.float64))
    kept = np.delete(X, 1, axis=1)[w > 0]
    oracle = sm.OLS(y[w > 0], sm.add_constant(kept)).fit(cov_type="HC0")
    np.testing.assert_allclose(table.se.iloc[[0, 2, 3, 4, 5]], oracle.bse[1:], rtol=1e-6)


@pytest.mark.parametrize("loss", list(FAMILIES))
@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("another", [False, True])
def test_a_column_that_others_give_but_for_a_billionth_has_the_interval_of_what_is_left(loss, robust, another):
    """x1 = x0 + e, as if e were given: a Hessian has forgotten it. A third column that is a sum of two is lost."""
    X, y, _ = rows_of(loss, offset=False)
    X = np.round(2**8 * X / X.std(0)) / 2**8  # so that sums are exact
    e = np.round(2**8 * np.random.default_rng(1).normal(size=200)) / 2**8
    A = np.column_stack([X[:, 0], e, X[:, 2:], np.ones(200)])
    X[:, 1] = X[:, 0] + 2.0**-30 * e
    if another:
        X[:, 3] = X[:, 0] - X[:, 2]
        A = np.delete(A, 3, axis=1)
    problem, zero = at_sites(X, y, loss=loss), torch.zeros(7, dtype=torch.float64)
    with pytest.warns(UndeterminedWarning, match="no estimate of x0, x2, x3:") if another else nullcontext():
        table = fc.confidence(problem, zero, robust=robust)
    oracle = sm.GLM(y, A, family=FAMILIES[loss]).fit(cov_type="HC0" if robust else "nonrobust", tol=1e-14)
    kept = table.drop(index=["x0", "x2", "x3"])
    at = [1, 3, 4, 5] if another else [1, 4, 5, 6]
    unit = np.array([2.0**30, 1, 1, 1])
    size = np.maximum(abs(oracle.params[at]), oracle.bse[at]) * unit  # an estimate near zero is as sure as its error
    np.testing.assert_allclose((kept.estimate - oracle.params[at] * unit) / size, 0, atol=1e-6)
    np.testing.assert_allclose(kept.se, oracle.bse[at] * unit, rtol=1e-6)


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("cells", [(3, 7, 9, 1), (3, 7, 9, 0)], ids=str)
def test_a_power_of_jeffreys_prior_adds_half_of_it_to_every_cell_of_a_table(cells, power):
    """Two groups of which each has a rate of its own: the maximum is known, and finite with an empty cell."""
    X, y = np.repeat([[0.0], [0.0], [1.0], [1.0]], cells, axis=0), np.repeat([1, 0, 1, 0], cells)
    silos = fc.Silos.from_arrays([(X[::2], y[::2]), (X[1::2], y[1::2])])
    problem = fc.Problem(silos, loss="logistic", regularizer=reg.L1(0.01), bias=True, weights="samples")
    table = fc.confidence(problem, fc.solve(problem).solution, jeffreys=power)
    a, b, c, d = (count + power / 2 for count in cells)
    assert (abs(table.estimate - [np.log(c * b / (a * d)), np.log(a / b)]) <= 3e-5 * table.se).all()
    rates = {0: a / (a + b), 1: c / (c + d)}
    group = [n * rates[k] * (1 - rates[k]) for k, n in enumerate((cells[0] + cells[1], cells[2] + cells[3]))]
    np.testing.assert_allclose(table.se, [np.sqrt(1 / group[0] + 1 / group[1]), np.sqrt(1 / group[0])], rtol=1e-4)


def test_jeffreys_prior_does_not_hang_on_units_nor_on_the_regularizer_and_leaves_linear_models_alone():
    rng = np.random.default_rng(3)
    X = rng.normal(size=(60, 5))
    y = X[:, 0] + rng.logistic(size=60) > 0
    units = np.array([1.0, 1e3, 1e-3, 1.0, 1.0])
    found = []
    for A, lam in [(X, 0.01), (X / units + [0, 0, 0, 500, 0], 0.1)]:
        silos = fc.Silos.from_arrays([(A[:20], y[:20]), (A[20:], y[20:])])
        problem = fc.Problem(silos, loss="logistic", regularizer=reg.L1(lam), bias=True, weights="samples")
        found.append(fc.confidence(problem, fc.solve(problem), jeffreys=1.0))
    for column in ("estimate", "se"):
        assert (abs(found[1][column] / [*units, 1] - found[0][column])[:5] <= 1e-4 * found[0].se[:5]).all()
    plain = fc.confidence(problem, fc.solve(problem))
    assert (abs(found[1].estimate[:5]) < abs(plain.estimate[:5])).all()
    linear = fc.Problem(silos, loss="least_squares", regularizer=reg.L1(0.1), bias=True, weights="samples")
    x = fc.solve(linear)
    np.testing.assert_array_equal(fc.confidence(linear, x, jeffreys=1.0), fc.confidence(linear, x))


def scores_with_prior(A, y, b, power):
    """Firth's equations, which are zero at the maximum, in standard errors; and the errors there. From the formula."""
    p = 1 / (1 + np.exp(-A @ b))
    inverse = np.linalg.inv(A.T @ (A * (p * (1 - p))[:, None]))
    leverage = p * (1 - p) * ((A @ inverse) * A).sum(1)
    root = np.linalg.cholesky(inverse)
    return root.T @ A.T @ (y - p + power * leverage * (0.5 - p)), np.sqrt(np.diag(inverse))


@pytest.mark.parametrize(("features", "samples", "power"), [(11, 60, 0.5), (19, 200, 0.5), (5, 120, 0.0)])
def test_with_few_samples_half_of_a_logistic_models_bias_is_taken_off(features, samples, power):
    rng = np.random.default_rng(samples)
    X = rng.normal(size=(samples, features)) * 10.0 ** rng.integers(-2, 3, features) + 3
    y = ((X[:, 0] - 3) / X[:, 0].std() + rng.logistic(size=samples) > 0).astype(float)
    silos = fc.Silos.from_arrays([(X[::3], y[::3]), (X[1::3], y[1::3]), (X[2::3], y[2::3])])
    problem = fc.Problem(silos, loss="logistic", regularizer=reg.L1(0.01), bias=True, weights="samples")
    table = fc.confidence(problem, fc.solve(problem))
    A = np.column_stack([X, np.ones(samples)])
    score, se = scores_with_prior(A, y, table.estimate.to_numpy(), power)
    assert abs(score).max() <= 1e-4
    np.testing.assert_allclose(table.se, se, rtol=1e-4)


def test_classes_that_are_told_apart_are_told_also_where_samples_are_few():
    X = np.linspace(-1, 1, 30)[:, None]
    silos = fc.Silos.from_arrays([(X[::2], X[::2, 0] > 0), (X[1::2], X[1::2, 0] > 0)])
    problem = fc.Problem(silos, loss="logistic", regularizer=reg.L1(0.01), bias=True, weights="samples")
    with pytest.warns(SeparationWarning):
        assert np.isnan(fc.confidence(problem, fc.solve(problem)).se["x0"])


@pytest.mark.parametrize("given", [{"robust": True}, {"inverse": "nodewise"}], ids=str)
def test_jeffreys_prior_goes_with_a_likelihood_alone(given):
    silos = fc.data.load("synthetic", clients=3, features=3, samples=20)
    problem = fc.Problem(silos, loss="logistic", regularizer=reg.L1(0.01), bias=True, weights="samples")
    with pytest.raises(ValueError, match="jeffreys=0"):
        fc.confidence(problem, fc.solve(problem), jeffreys=0.5, **given)
