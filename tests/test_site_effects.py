"""Models of single sites and their combination, against statsmodels and metafor's published numbers."""

import json

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy import stats
from statsmodels.stats.meta_analysis import combine_effects

import fedcomposite as fc
from fedcomposite.analysis.next_site import sums_above
from fedcomposite.plots.charts import draw_forests

# Thirteen trials of a vaccine against tuberculosis (Colditz et al. 1994): cases and others, treated and not.
TRIALS = np.array(
    [
        [4, 119, 11, 128], [6, 300, 29, 274], [3, 228, 11, 209], [62, 13536, 248, 12619], [33, 5036, 47, 5761],
        [180, 1361, 372, 1079], [8, 2537, 10, 619], [505, 87886, 499, 87892], [29, 7470, 45, 7232],
        [17, 1699, 65, 1600], [186, 50448, 141, 27197], [5, 2493, 3, 2338], [27, 16886, 29, 17825],
    ],
    float,
)  # fmt: skip


@pytest.fixture
def trials():
    a, b, c, d = TRIALS.T
    return np.log(a / (a + b) / (c / (c + d))), np.sqrt(1 / a - 1 / (a + b) + 1 / c - 1 / (c + d))


def test_the_published_numbers_of_metafor(trials):
    """``rma(yi, vi)`` and ``rma(yi, vi, test = "knha")`` of metafor's documentation, to the digits that it prints."""
    row = fc.meta_analysis(*trials, hartung_knapp=False).iloc[0]
    told = {"estimate": -0.7145, "se": 0.1798, "lower": -1.0669, "upper": -0.3622, "tau2": 0.3132, "q": 152.2330}
    for name, value in told.items():
        assert abs(row[name] - value) <= 5e-5
    assert abs(row["i2"] - 92.22) <= 5e-3
    row = fc.meta_analysis(*trials).iloc[0]
    for name, value in {"estimate": -0.7145, "se": 0.1808, "lower": -1.1084, "upper": -0.3206, "p": 0.0019}.items():
        assert abs(row[name] - value) <= 5e-5


def test_moments_as_statsmodels_has_them(trials):
    y, se = trials
    row = fc.meta_analysis(y, se, method="dl", hartung_knapp=False).iloc[0]
    right = combine_effects(y, se**2, method_re="dl")
    assert abs(row["tau2"] - right.tau2) <= 1e-12
    for name, one in (("fixed", "fixed effect"), ("estimate", "random effect")):
        np.testing.assert_allclose(row[name], right.summary_frame().loc[one, "eff"], rtol=1e-12)
    np.testing.assert_allclose(row["fixed_se"], right.sd_eff_w_fe, rtol=1e-12)
    np.testing.assert_allclose(row["q"], right.q, rtol=1e-12)
    ours = fc.meta_analysis(y, se, method="dl").iloc[0]
    np.testing.assert_allclose(ours["se"], right.summary_frame().loc["random effect wls", "sd_eff"], rtol=1e-12)


def a_further_site(y, v, draws, g):
    """The same interval by random numbers: variances at which Q is what it was, means, normals and Student's t."""
    w = 1 / v
    A, k = np.diag(w) - np.outer(w, w) / w.sum(), len(y)
    q, grid = y @ A @ y, np.concatenate([[0.0], np.geomspace(1e-6, 1e4, 3000)])
    roots = np.sqrt(v + grid[:, None])
    weights = np.linalg.eigvalsh(roots[:, :, None] * A * roots[:, None, :])[:, 1:]
    z = g.chisquare(1, size=(draws, k - 1))
    low, high = np.zeros(draws, int), np.full(draws, 3000)
    while (high - low > 1).any():
        middle = (low + high) // 2
        over = (weights[middle] * z).sum(1) >= q
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    tau2 = np.where((weights[0] * z).sum(1) >= q, 0.0, grid[high])[:, None]
    w = 1 / (v + tau2)
    mean = w @ y / w.sum(1)
    error = np.sqrt((w * (y - mean[:, None]) ** 2).sum(1) / ((k - 1) * w.sum(1)))
    number = mean + np.sqrt(tau2[:, 0]) * g.normal(size=draws) - error * g.standard_t(k - 1, size=draws)
    return np.quantile(number, [0.025, 0.975])


def test_intervals_for_a_further_site_are_those_of_random_numbers(trials):
    g = np.random.default_rng(0)
    y, v = np.array([0.1, 0.5, 0.4, -0.2, 0.3]), np.array([0.01, 0.01, 0.04, 0.09, 0.02])
    alike = np.array([0.31, 0.29, 0.3, 0.33, 0.28, 0.3])
    cases = [(y[:3], v[:3]), (y, v), (alike, np.full(6, 0.05)), (trials[0], trials[1] ** 2)]
    for estimates, variances in cases:
        row = fc.meta_analysis(estimates, np.sqrt(variances)).iloc[0]
        ends = a_further_site(estimates, variances, 400_000, g)
        apart = np.abs(ends - row[["predict_lower", "predict_upper"]].to_numpy(float))
        assert (apart <= 0.01 * np.diff(ends)).all()


def test_sums_of_squares_have_their_distribution():
    for terms in (2, 3, 9):
        for x in (0.01, 1.0, 5.0, 40.0):
            found = sums_above(x, np.full((1, terms), 2.0))[0]
            assert abs(found - stats.chi2.sf(x / 2, terms)) <= 2e-4
    z = np.random.default_rng(0).chisquare(1, size=(400_000, 4))
    weights = np.array([0.2, 1.0, 5.0, 30.0])
    for x in (1.0, 10.0, 100.0):
        assert abs(sums_above(x, weights[None])[0] - (z @ weights >= x).mean()) <= 3e-3


def test_the_interval_at_one_variance_is_that_of_higgins(trials):
    row = fc.meta_analysis(*trials, hartung_knapp=False, prediction="t").iloc[0]
    half = stats.t.ppf(0.975, 11) * np.sqrt(row["tau2"] + row["se"] ** 2)
    np.testing.assert_allclose(row[["predict_lower", "predict_upper"]], [row.estimate - half, row.estimate + half])


def test_the_restricted_likelihood_is_largest_there():
    rng = np.random.default_rng(1)
    for k in (2, 3, 8):
        for spread in (0.0, 0.3, 2.0):
            se = rng.uniform(0.1, 1.0, k)
            y = rng.normal(0, np.sqrt(spread**2 + se**2))
            found = fc.meta_analysis(y, se)["tau2"][0]

            def restricted(tau2, y=y, se=se):
                w = 1 / (se**2 + tau2)
                return np.log(w).sum() - np.log(w.sum()) - w @ (y - w @ y / w.sum()) ** 2

            others = np.concatenate([[0.0], np.geomspace(1e-8, 100, 2000)])
            assert restricted(found) >= max(restricted(t) for t in others) - 1e-12


def test_what_is_missing_or_alone_is_left_out():
    table = fc.meta_analysis([[1.0, np.nan], [2.0, 0.5], [1.5, np.nan]], [[0.1, np.nan], [0.2, 0.1], [0.2, np.nan]])
    assert table["sites"].tolist() == [3, 1]
    assert table["fixed"][1] == 0.5
    assert table[["estimate", "tau2", "predict_lower"]].iloc[1].isna().all()
    with pytest.raises(ValueError, match="above zero"):
        fc.meta_analysis([1.0, 2.0], [0.1, 0.0])
    with pytest.raises(ValueError, match="one shape"):
        fc.meta_analysis([1.0, 2.0], [0.1])


def hospitals(loss, separated=False):
    rng = np.random.default_rng(5)
    arrays = []
    for shift, m in ((0.0, 80), (0.5, 120), (-0.5, 60), (1.0, 100)):
        X = rng.normal(size=(m, 3)) * [1.0, 5.0, 0.2] + [0, 40, 0]
        z = (0.5 + shift) * X[:, 0] + 0.1 * (X[:, 1] - 40)
        y = {"logistic": rng.random(m) < 1 / (1 + np.exp(-z)), "poisson": rng.poisson(np.exp(z / 2))}.get(
            loss, z + rng.normal(size=m)
        )
        arrays.append((X, np.asarray(y, float)))
    if separated:
        X = arrays[0][0]
        arrays[0] = X, (X[:, 0] > 0).astype(float)
    return arrays


FAMILIES = {"logistic": sm.families.Binomial(), "poisson": sm.families.Poisson(), "least_squares": None}


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("loss", list(FAMILIES))
def test_every_site_has_the_model_of_its_own_samples(loss, weights):
    arrays = hospitals(loss)
    problem = fc.Problem(fc.Silos.from_arrays(arrays), loss=loss, bias=True, weights=weights)
    found = fc.by_site(problem)
    for (X, y), (_, own) in zip(arrays, found.sites.groupby("site", sort=False), strict=True):
        A = np.column_stack([X, np.ones(len(y))])
        right = sm.OLS(y, A).fit() if loss == "least_squares" else sm.GLM(y, A, family=FAMILIES[loss]).fit(tol=1e-13)
        np.testing.assert_allclose(own["estimate"], right.params, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(own["se"], right.bse, rtol=1e-6)
    assert found.combined.index.tolist() == list(problem.coordinate_names)
    assert not found.notes


def test_sites_of_a_subset_are_asked_by_the_numbers_that_they_keep():
    silos = fc.Silos.from_arrays(hospitals("logistic"), names=["a", "b", "c", "d"])
    whole, part = (
        fc.by_site(fc.Problem(one, loss="logistic", bias=True)).sites.set_index(["site", "name"])["estimate"]
        for one in (silos, silos.subset(["d", "b"]))
    )
    for site in ("d", "b"):
        np.testing.assert_allclose(part[site], whole[site], rtol=1e-6, atol=1e-8)


def test_a_site_whose_classes_can_be_told_apart_has_no_estimates():
    silos = fc.Silos.from_arrays(hospitals("logistic", separated=True), names=["a", "b", "c", "d"])
    found = fc.by_site(fc.Problem(silos, loss="logistic", bias=True, weights="samples"))
    assert list(found.notes) == ["a"]
    assert found.sites.set_index(["site", "name"])["estimate"].isna()["a", "x0"]
    assert found.combined["sites"]["x0"] == 3


def test_forests_are_drawn(tmp_path):
    silos = fc.Silos.from_arrays(hospitals("logistic", separated=True), names=["a", "b", "c", "d"])
    found = fc.by_site(fc.Problem(silos, loss="logistic", bias=True, weights="samples"))
    assert len(found.plot(path=tmp_path / "forests.png").axes) == 3
    assert (tmp_path / "forests.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no coefficient"):
        found.plot(["x9"])


@pytest.mark.parametrize(
    ("low", "high", "right"),
    [
        (0.3, 25, "0.5 1 2 5 10 20"),
        (0.7, 1.9, "1 1.5 2"),
        (0.9, 4, "1 2 3 4"),
        (0.996, 1.004, "0.9975 1 1.0025"),
    ],
)
def test_ratios_have_round_ticks_and_one_among_them(low, high, right):
    ends = [(1.0, low, high), (1.0, 1.0, 1.0)]
    rows = [{"site": s, "name": "x", "estimate": np.log(m), "se": 1.0, "lower": np.log(a), "upper": np.log(b)}
            for s, (m, a, b) in zip("ab", ends, strict=True)]  # fmt: skip
    row = {
        "estimate": 0.0,
        "lower": 0.0,
        "upper": 0.0,
        "tau2": 0.0,
        "i2": 0.0,
        "predict_lower": 0.0,
        "predict_upper": 0,
    }
    place = draw_forests(pd.DataFrame(rows), pd.DataFrame(row, index=["x"]), ratio="odds ratio").axes[0]
    assert " ".join(one.get_text() for one in place.get_xticklabels()) == right


def test_the_command_the_file_and_the_report(tmp_path, cli):
    told = json.loads(cli("fit", "heart-recipe", "--by-site", "--out", tmp_path / "run", "--json", check=0).out)
    kept = json.loads((tmp_path / "run" / "analysis.json").read_text())["by_site"]
    assert {row["name"] for row in told["by_site"]} == {row["name"] for row in kept["combined"]}
    fc.write_report(tmp_path / "run")
    assert "Coefficients by site" in (tmp_path / "run" / "report.html").read_text()
    assert (tmp_path / "run" / "report-sites.csv").read_text().startswith("name,sites,estimate")
