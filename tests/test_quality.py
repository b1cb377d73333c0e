"""Quality from counts: scikit-learn's numbers where every sample is its own bin, within the stated error in bins."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression as Logistic
from sklearn.metrics import average_precision_score, brier_score_loss, confusion_matrix, roc_auc_score

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.analysis.curves import average_precision, smoothed
from fedcomposite.analysis.noised_scores import NoisedCells, pairs_off
from fedcomposite.analysis.quality import Quality
from fedcomposite.analysis.score_bins import Cells, shares_beyond
from fedcomposite.runtime.protocol import answer, scores, silos_of
from fedcomposite.runtime.tally_noise import factor


@pytest.fixture(scope="module")
def fitted():
    generator = np.random.default_rng(0)
    arrays = []
    for m in (300, 150, 220):
        X = generator.normal(size=(m, 4))
        arrays.append((X, (generator.random(m) < 1 / (1 + np.exp(-2 * X[:, 0] + X[:, 1] + 0.5))).astype(float)))
    silos = fc.Silos.from_arrays(arrays, names=["a", "b", "c"]).split(test=0.4, seed=1)
    problem = fc.Problem(silos, regularizer=reg.L1(0.01), bias=True, weights="samples")
    return problem, fc.solve(problem).solution


def held(problem, x, part="test", site=None):
    X, y = problem.silos.held_out[part]
    rows = slice(None) if site is None else problem.silos.held_by[part] == site
    z = problem.predict(x, X[rows]).numpy()
    return z, y[rows].numpy()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("site", [None, 1])
def test_measures(fitted, exact, site):
    problem, x = fitted
    report = fc.quality(problem, x, part="test", exact=exact)
    one = report.overall if site is None else report.by_site["b"]
    z, y = held(problem, x, site=site)
    p = 1 / (1 + np.exp(-z))
    assert one.samples == len(y)
    assert one.brier == pytest.approx(brier_score_loss(y, p))
    for found, error, expected in (
        (one.auroc, one.auroc_error, roc_auc_score(y, z)),
        (one.auprc, one.auprc_error, average_precision_score(y, z)),
    ):
        assert abs(found - expected) <= error + 1e-12
        assert error < (1e-12 if exact else 0.01)
    line = Logistic(C=np.inf, tol=1e-12, max_iter=1000).fit(z[:, None], y)
    assert one.calibration_slope == pytest.approx(line.coef_[0, 0], abs=1e-4 if exact else 5e-3)
    seen = one.confusion(0.3)
    tn, fp, fn, tp = confusion_matrix(y, p >= 0.3).ravel()
    assert (seen["true_positives"], seen["false_positives"]) == (tp, fp)
    assert (seen["true_negatives"], seen["false_negatives"]) == (tn, fn)
    assert seen["sensitivity"] == pytest.approx(tp / (tp + fn))
    curve = one.decision_curve([0.2, 0.5]).set_index("threshold")
    benefit = np.mean((p >= 0.2) & (y == 1)) - 0.25 * np.mean((p >= 0.2) & (y == 0))
    assert curve.loc[0.2, "model"] == pytest.approx(benefit)
    assert curve.loc[0.5, "everyone"] == pytest.approx(2 * y.mean() - 1)
    groups = one.calibration(5)
    assert groups.samples.sum() == len(y)
    assert (groups.predicted * groups.samples).sum() == pytest.approx(p.sum())


def test_intercept_of_calibration_and_ici(fitted):
    problem, x = fitted
    exact, binned = (fc.quality(problem, x, part="test", exact=e).overall for e in (True, False))
    z, y = held(problem, x)
    a = exact.calibration_intercept
    assert np.mean(1 / (1 + np.exp(-z - a))) == pytest.approx(y.mean(), abs=1e-9)
    assert binned.calibration_intercept == pytest.approx(a, abs=1e-3)
    assert binned.ici == pytest.approx(exact.ici, abs=1e-3)
    shifted = x.clone()
    shifted[-1] += 1.5
    assert fc.quality(problem, shifted, part="test").overall.ici > 0.1 > exact.ici


def test_the_smoother_reproduces_lines():
    p = np.linspace(0.05, 0.9, 30)
    n = np.full(30, 10.0)
    np.testing.assert_allclose(smoothed(p, n, n * (0.2 + 0.5 * p)), 0.2 + 0.5 * p, atol=1e-9)
    doubled = smoothed(np.repeat(p, 2), np.repeat(n, 2) / 2, np.repeat(n * p**2, 2) / 2)
    np.testing.assert_allclose(doubled[::2], smoothed(p, n, n * p**2), atol=1e-9)


def test_average_precision_is_bracketed():
    generator = np.random.default_rng(0)
    for _ in range(20):
        z, y = generator.normal(size=60), generator.random(60) < 0.3
        bins = np.digitize(z, np.linspace(-2, 2, 9))
        ones, zeros = (np.bincount(bins[y == v], minlength=10)[::-1].astype(float) for v in (True, False))
        assert average_precision(zeros, ones) == pytest.approx(average_precision_score(y, bins))
        counts = torch.zeros(2, 10, 5, dtype=torch.float64)
        counts[:, :, :2] = torch.from_numpy(np.stack([zeros, ones])[:, ::-1].copy()).unsqueeze(-1)
        for unit in (True, False):  # whether it is known that samples count one each
            cells = Cells.told([counts], torch.linspace(-2, 2, 9, dtype=torch.float64), unit)
            found, (low, high) = cells.auprc
            assert found == pytest.approx(average_precision_score(y, bins))
            assert low - 1e-12 <= average_precision_score(y, z) <= high + 1e-12


def test_cross_validated_quality_scores_each_sample_once(fitted):
    problem, _ = fitted
    cv = fc.cross_validate(problem, folds=3, count=4)
    report = fc.quality(problem, cv, choice="min", exact=True)
    fold = fc.analysis.fold_of_samples(problem, 3)
    X, y = problem.silos.features, problem.silos.targets.numpy()
    z = np.empty(len(y))
    for f in range(3):
        z[fold == f] = problem.predict(cv.models[f, cv.index_min], X[fold == f]).numpy()
    assert report.overall.auroc == pytest.approx(roc_auc_score(y, z))
    assert report.overall.samples == len(y)


def test_new_data_and_a_part_of_nobody(fitted):
    _, x = fitted
    generator = np.random.default_rng(9)
    X, y = generator.normal(size=(50, 4)), generator.integers(0, 2, 50).astype(float)
    fresh = fc.Problem(fc.Silos.from_arrays([(X, y)], names=["new"]), bias=True)
    report = fc.quality(fresh, x, exact=True)
    assert report.by_site["new"].auroc == pytest.approx(roc_auc_score(y, fresh.predict(x, torch.from_numpy(X)).numpy()))
    owned = fc.Problem(fc.Silos.from_arrays([(X, y)] * 2, test=(X[:30], y[:30])), bias=True, weights="samples")
    table = fc.quality(owned, x, part="test").table
    assert list(table.index) == ["(held by nobody)", "all"]
    assert fc.path(fc.Problem(owned.silos, regularizer=reg.L1(1.0), bias=True), count=3).converged.all()


def test_refusals(fitted):
    problem, x = fitted
    with pytest.raises(ValueError, match="no samples in the part 'validation'"):
        fc.quality(problem, x, part="validation")
    with pytest.raises(ValueError, match="threshold = 1"):
        fc.quality(problem, x).overall.confusion(1)
    with pytest.raises(ValueError, match="logistic models"):
        fc.quality(fc.Problem(problem.silos, loss="hinge", bias=True), x)
    with pytest.raises(ValueError, match="no samples in the part 'validation'"):
        fc.quality(fc.Problem(problem.silos, loss="least_squares", bias=True), x, part="validation")


def test_calibration_does_not_hang_on_the_width_of_bins():
    """From six bins as from every sample: what margins do within a bin is in its sums."""
    g = np.random.default_rng(0)
    for n, strength in ((120, 0.6), (400, 1.5)):
        X = g.normal(size=(n, 1))
        y = (g.random(n) < 1 / (1 + np.exp(-1.3 * strength * X[:, 0] - 0.3))).astype(float)
        problem = fc.Problem(fc.Silos.from_arrays([(X, y)]), loss="logistic", bias=True)
        x = torch.tensor([strength, 0.0], dtype=torch.float64)
        exact, fine = fc.quality(problem, x, exact=True).overall, fc.quality(problem, x).overall
        cuts = torch.quantile(torch.from_numpy(X[:, 0]) * strength, torch.arange(1, 6, dtype=torch.float64) / 6)
        coarse = Quality.told([answer(silos_of(problem)[0], scores(x, cuts, "train"))], cuts, True)
        for name in ("calibration_slope", "calibration_intercept"):
            low, high = coarse.bounds(name)
            assert low <= getattr(exact, name) <= high
            assert high - low < 0.4
        assert coarse.calibration_slope == pytest.approx(exact.calibration_slope, abs=0.03)
        assert coarse.calibration_intercept == pytest.approx(exact.calibration_intercept, abs=0.03)
        assert fine.calibration_slope == pytest.approx(exact.calibration_slope, abs=1e-4)


def test_a_constant_model_is_known_to_tell_nothing_apart(fitted):
    """All samples are ties, in a bin of their own: an AUROC of one half, for certain."""
    problem, x = fitted
    only = torch.zeros_like(x)
    only[-1] = 0.3
    one = fc.quality(problem, only).overall
    assert (one.auroc, one.auroc_error) == (0.5, 0.0)
    assert one.auprc_error == 0.0
    assert math.isnan(one.calibration_slope)  # a line through points above one another
    assert math.isfinite(one.calibration_intercept)
    assert "nan" not in str(one)


def test_cross_validated_auc_is_that_of_the_samples(fitted):
    """And not that of 1024 bins, in which the samples of a strong regularizer are crowded."""
    problem, _ = fitted
    cv = fc.cross_validate(problem, folds=3, count=5, scoring="auc")
    fold = fc.analysis.fold_of_samples(problem, 3)
    X, y = problem.silos.features, problem.silos.targets.numpy()
    each = [
        [roc_auc_score(y[fold == f], problem.predict(cv.models[f, k], X[fold == f]).numpy()) for k in range(5)]
        for f in range(3)
    ]
    np.testing.assert_allclose(cv.each, each, atol=1e-12)
    assert not cv.mean_error.any()
    assert "mean_error" in cv.scores


def test_files_at_hand_need_no_bins():
    """A model that has hardly begun: all margins lie in few bins."""
    hospitals = fc.data.load("heart_disease")
    problem = fc.Problem(hospitals.standardize(), bias=True, regularizer=fc.regularizers.L1(1.0), weights="samples")
    cv = fc.cross_validate(problem, folds="sites", count=3)
    told, exact = (fc.quality(problem, cv, choice=float(cv.lambdas[0]), exact=one) for one in (False, True))
    assert told.notes == exact.notes == {}
    pd.testing.assert_frame_equal(told.table, exact.table)


def test_what_is_too_wide_is_not_told():
    """Two bins tell little about ranks: the table says so, the property is still there."""
    g = np.random.default_rng(0)
    X = g.normal(size=(60, 1))
    y = (X[:, 0] + g.normal(size=60) > 0).astype(float)
    problem = fc.Problem(fc.Silos.from_arrays([(X, y)], names=["a"]), loss="logistic")
    x, edges = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    one = Quality.told([answer(silos_of(problem)[0], scores(x, edges, "train"))], edges, True)
    low, high = one.bounds("auroc")
    assert low <= roc_auc_score(y, X[:, 0]) <= high
    assert high - low > 0.1
    assert np.isnan(one.summary()["auroc"])
    assert one.summary()["auroc_error"] == pytest.approx(one.auroc_error)
    assert f"AUROC between {low:.2f} and {high:.2f}" in one.untold()
    assert np.isfinite(one.auroc)
    report = fc.analysis.Report(one, {"a": one})
    assert set(report.notes) == {"a", "all"}
    assert report.table["auroc"].isna().all()


def test_shares_beyond_a_margin_are_bounded_where_probabilities_are_1_to_rounding():
    g = np.random.default_rng(3)
    at = np.linspace(-45, 45, 200)
    for scale in (0.3, 3.0, 20.0):
        for _ in range(30):
            z = scale * g.normal(size=int(g.integers(1, 12))) + g.normal()
            p = 1 / (1 + np.exp(-z))
            low, high = shares_beyond(at, (-np.inf, np.inf), np.array([z.mean(), p.mean(), (z * p).mean()]), len(z))
            share = (z[:, None] >= at).mean(0)
            assert (low <= share + 1e-12).all()
            assert (share <= high + 1e-12).all()


@pytest.mark.parametrize("exact", [False, True])
def test_the_calibration_slope_with_an_offset_is_that_of_the_probabilities(exact):
    """Of the whole margin for classes; of a'x beside the offset for counts, 1 where the model was made."""
    g = np.random.default_rng(0)
    X, t = g.normal(size=(400, 2)), 1.5 * g.normal(size=400)
    z = X[:, 0] + 0.4 * t
    for loss, y in (("logistic", g.random(400) < 1 / (1 + np.exp(-z))), ("poisson", g.poisson(np.exp(z)))):
        silos = fc.Silos.from_arrays(
            [(X[k::2], y[k::2].astype(float)) for k in (0, 1)], margin_offsets=[t[::2], t[1::2]]
        )
        problem = fc.Problem(silos, loss=loss, bias=True, weights="samples")
        x = fc.solve(problem).solution
        overall = fc.quality(problem, x, exact=exact).overall
        if loss == "poisson":
            assert overall.calibration_slope == pytest.approx(1.0, abs=1e-8)
            continue
        margin = X @ x[:2].numpy() + float(x[2]) + t
        free = Logistic(C=np.inf, tol=1e-12, max_iter=1000).fit(margin[:, None], y)
        off = max(1e-6, overall.calibration_slope_error)
        assert overall.calibration_slope == pytest.approx(free.coef_[0, 0], abs=off)
        assert free.coef_[0, 0] < 0.9


@pytest.mark.parametrize("sizes", [(8, 115), (60, 60), (300, 40)])
def test_bounds_of_areas_know_the_noise_of_counts(sizes):
    """Few of a class leave most bins empty: the spread over draws of the noise is what bounds are made from."""
    draw = np.random.default_rng(3)
    edges = np.linspace(-3, 3, 56)
    margins = [np.sort(draw.normal(shift, 1.0, n)) for shift, n in zip((-0.5, 0.5), sizes, strict=True)]
    counts = np.stack([np.bincount(np.searchsorted(edges, z), minlength=57) for z in margins]).astype(float)
    totals = np.column_stack([sizes, np.ones((2, 2))])
    truth = (margins[1][:, None] > margins[0]).mean()
    found = []
    for _ in range(400):
        raw = counts + 2.5 * (factor(57) @ draw.normal(size=(56, 2))).T
        cells = NoisedCells.of(edges, raw, totals, 2.5**2, True)
        value, (low, high) = cells.auroc
        found.append((value, low <= truth <= high, (high - low) / 2))
    values, inside, half = np.array(found).T
    assert inside.all()
    assert 2.0 < half.mean() / values.std() < 9.0 or sizes[0] == 8  # wide, but not for nothing


@pytest.mark.parametrize("beyond", [0.1, 0.01])
@pytest.mark.parametrize("sizes", [(8, 115), (40, 40), (3000, 200), (0, 6)])
@pytest.mark.parametrize("less", [1.0, 0.3])  # in class 1, of which some sites tell nothing
def test_the_proved_bound_of_pairs_holds_as_often_as_it_says(sizes, beyond, less):
    """Draws of the noise, at probabilities that draws can show, also where there is next to nothing to count."""
    draw, root = np.random.default_rng(7), factor(57)
    counts = np.stack([draw.multinomial(n, draw.dirichlet(np.full(57, 0.3))) for n in sizes]).astype(float)
    order = np.tri(57, k=-1)
    wrong = np.zeros(2)
    for _ in range(1500):
        zeros, ones = counts + 4.0 * np.array([[1.0], [less]]) * (root @ draw.normal(size=(56, 2))).T
        off = ones @ order @ zeros - counts[1] @ order @ counts[0]
        wrong += np.array([off, -off]) > pairs_off(order, zeros, ones, 16.0, beyond)
    assert (wrong <= 1500 * beyond + 3 * np.sqrt(1500 * beyond)).all()
    assert pairs_off(order, zeros, ones, 0.0) == 0.0


def test_bounds_of_average_precision_hold_where_noise_leaves_nothing_of_its_slope():
    """No count below an edge is off by 3.5 deviations of its noise, and scores look as if they told nothing."""
    true = (
        "0 0 1 1 1 1 3 3 4 5 5 8 11 13 14 14 15 15 17 21 21 21 22 25 25 27 27 30 31 31 32 32 33 33 33 34 34 36 36 36 37"
        " 37 37 38 39 39 40 40 40 40 40 40 40 40 40 40 40 40",
        "0 " * 34 + "1 " * 14 + "2 2 2 2 3 3 4 4 8 8",
    )
    told = (
        "5 10 8 8 6 5 5 4 2 9 8 6 12 14 16 17 15 15 15 22 27 27 25 26 28 26 31 34 33 35 31 32 36 34 32 36 34 36"
        " 34 42 38 36 36 30 34 33 38 42 41 37 37 35 38 37 36 32 31 40",
        "3 -1 4 2 2 3 2 6 8 4 7 8 1 1 8 9 1 6 4 5 3 0 -3 -3 -3 1 -2 -4 2 -1 -1 0 -1 0 7 -1 1 0 2 -3 4 5 3 5 10 10"
        " 10 9 13 7 5 6 3 4 8 6 13 8",
    )
    exact, raw = (np.diff([[int(v) for v in one.split()] for one in below], prepend=0.0) for below in (true, told))
    deviations = 4.0 * np.sqrt(np.square(factor(58).cumsum(0)).sum(1)[:-1])
    assert (np.abs((raw - exact).cumsum(1)[:, :-1]) < 3.5 * deviations).all()
    for unit in (True, False):
        cells = NoisedCells.of(np.linspace(-3, 3, 57), raw, np.array([[40.0, 1, 1], [8, 1, 1]]), 16.0, unit)
        value, (low, high) = cells.auprc
        assert low <= value <= high
        assert low <= average_precision(*exact[:, ::-1]) <= high


def test_bounds_of_average_precision_are_not_wide_for_nothing():
    """Those of 1000 of each class, at a deviation of 2.5: within 0.06, of which the bins alone are 0.013."""
    draw = np.random.default_rng(3)
    edges = np.linspace(-3, 3, 56)
    margins = [draw.normal(shift, 1.0, 1000) for shift in (-0.5, 0.5)]
    counts = np.stack([np.bincount(np.searchsorted(edges, z), minlength=57) for z in margins]).astype(float)
    truth = average_precision_score(np.repeat([0, 1], 1000), np.concatenate(margins))
    totals = np.column_stack([[1000.0, 1000.0], np.ones((2, 2))])
    for _ in range(10):
        raw = counts + 2.5 * (factor(57) @ draw.normal(size=(56, 2))).T
        _, (low, high) = NoisedCells.of(edges, raw, totals, 2.5**2, True).auprc
        assert low <= truth <= high
        assert high - low < 0.12
