"""Quality of regressions from sums: the numbers of scikit-learn on pooled samples, here, at sites and in reports."""

import json

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import torch
from sklearn.linear_model import PoissonRegressor
from sklearn.metrics import d2_tweedie_score, mean_absolute_error, mean_squared_error, r2_score
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite.analysis.regression_quality import Errors
from fedcomposite.cli.main import app
from fedcomposite.runtime.protocol import RESIDUALS

LOSSES = ["least_squares", "huber", "quantile", "absolute", "poisson"]
X0 = torch.tensor([0.5, -0.3, 0.0, 0.4], dtype=torch.float64)


def silos_of(loss, weighted=False, seed=0):
    """Three sites; targets with a mean far from 0, or counts."""
    g = np.random.default_rng(seed)
    pairs, weights = [], []
    for m in (120, 60, 90):
        X = g.normal(size=(m, 3))
        z = X @ [0.7, -0.4, 0.1] + 0.5
        y = g.poisson(np.exp(z)).astype(float) if loss == "poisson" else 130 + 15 * z + g.normal(0, 8, m)
        pairs.append((X, y))
        weights.append(g.random(m) + 0.5)
    return fc.Silos.from_arrays(pairs, names=["a", "b", "c"], **({"weights": weights} if weighted else {}))


def model_of(loss):
    return X0 if loss == "poisson" else torch.tensor([9.0, -5.0, 1.0, 135.0], dtype=torch.float64)


def said(loss, X, x):
    z = X @ x[:-1].numpy() + float(x[-1])
    return np.exp(z) if loss == "poisson" else z


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_measures_are_those_of_scikit_learn(loss, weighted):
    silos, x = silos_of(loss, weighted), model_of(loss)
    report = fc.quality(fc.Problem(silos, loss=loss, bias=True), x)
    assert list(report.table.index) == ["a", "b", "c", "all"]
    for i, name in enumerate(["a", "b", "c", "all"]):
        rows = slice(None) if name == "all" else slice(*silos.offsets[i : i + 2])
        y, mean = silos.targets[rows].numpy(), said(loss, silos.features[rows].numpy(), x)
        w = silos.weights[rows].numpy() if weighted else np.ones(len(y))
        one = report.table.loc[name]
        assert one["samples"] == pytest.approx(w.sum())
        assert one["mean"] == pytest.approx(np.average(y, weights=w))
        assert one["predicted"] == pytest.approx(np.average(mean, weights=w))
        assert one["r2"] == pytest.approx(r2_score(y, mean, sample_weight=w), abs=1e-10)
        assert one["rmse"] == pytest.approx(mean_squared_error(y, mean, sample_weight=w) ** 0.5)
        assert one["mae"] == pytest.approx(mean_absolute_error(y, mean, sample_weight=w))
        if loss == "poisson":
            explained = d2_tweedie_score(y, mean, sample_weight=w, power=1)
            assert one["deviance_explained"] == pytest.approx(explained, abs=1e-10)
            assert one["calibration_intercept"] == pytest.approx(np.log(np.sum(w * y) / np.sum(w * mean)))
            line = PoissonRegressor(alpha=0, tol=1e-10, max_iter=1000).fit(np.log(mean)[:, None], y, sample_weight=w)
            assert one["calibration_slope"] == pytest.approx(line.coef_[0], abs=1e-4)
        elif "calibration_slope" in one:
            assert one["calibration_slope"] == pytest.approx(np.polyfit(mean, y, 1, w=np.sqrt(w))[0])
            assert one["calibration_intercept"] == pytest.approx(np.average(y - mean, weights=w))
        assert ("calibration_slope" in one) == (loss not in ("quantile", "absolute"))
        assert ("mean_loss" in one) == (loss in ("quantile", "absolute", "huber"))


def test_the_mean_loss_is_that_of_the_problem():
    for loss in ("huber", "quantile"):
        problem = fc.Problem(silos_of(loss), loss=loss, bias=True, weights="samples")
        x = model_of(loss)
        found = fc.quality(problem, x).overall.mean_loss
        assert found == pytest.approx(float(problem.objective(x)))


@pytest.mark.parametrize("loss", ["least_squares", "poisson"])
def test_a_calibration_curve(loss):
    silos, x = silos_of(loss), model_of(loss)
    problem = fc.Problem(silos, loss=loss, bias=True)
    exact, binned = (fc.quality(problem, x, exact=e).overall for e in (True, False))
    mean = said(loss, silos.features.numpy(), x)
    order = np.argsort(mean)
    groups = np.array_split(order, 9)
    curve = exact.calibration(9)
    np.testing.assert_allclose(curve["predicted"], [mean[g].mean() for g in groups], rtol=1e-10)
    np.testing.assert_allclose(curve["observed"], [silos.targets.numpy()[g].mean() for g in groups], rtol=1e-10)
    rough = binned.calibration(9)
    np.testing.assert_allclose(rough["predicted"], curve["predicted"], rtol=0.01)
    assert exact.calibration_slope == pytest.approx(binned.calibration_slope, abs=1e-4)


def test_one_rate_for_all_has_the_exposures():
    """Deviance explained against the best rate times exposure; without exposures that is scikit-learn's."""
    g = np.random.default_rng(4)
    X, time = g.normal(size=(200, 3)), g.random(200) * 3 + 0.2
    y = g.poisson(time * np.exp(X @ X0[:3].numpy() + 0.2)).astype(float)
    silos = fc.Silos.from_arrays([(X, y)], margin_offsets=[np.log(time)])
    found = fc.quality(fc.Problem(silos, loss="poisson", bias=True), X0).overall

    def deviance(mean):
        return 2 * np.sum(np.where(y > 0, y * np.log(np.maximum(y, 1) / mean), 0) - y + mean)

    best = scipy.optimize.minimize_scalar(lambda c: deviance(np.exp(c) * time), bounds=(-5, 5), method="bounded")
    mean = time * said("poisson", X, X0)
    assert found.deviance == pytest.approx(deviance(mean) / 200)
    assert found.deviance_explained == pytest.approx(1 - deviance(mean) / best.fun, abs=1e-8)


def test_what_is_not_defined_is_nan():
    one = fc.quality(fc.Problem(fc.Silos.from_arrays([(np.eye(3), np.zeros(3))]), loss="poisson", bias=True), X0)
    assert np.isnan([one.overall.r2, one.overall.deviance_explained, one.overall.calibration_slope]).all()
    flat = fc.quality(fc.Problem(silos_of("huber"), loss="huber", bias=True), torch.zeros(4, dtype=torch.float64))
    assert np.isnan(flat.overall.calibration_slope)
    constant = fc.Silos.from_arrays([(np.eye(3), np.full(3, 0.1))])
    assert np.isnan(fc.quality(fc.Problem(constant, bias=True, loss="least_squares"), X0).overall.r2)
    alone = fc.Silos.from_arrays([(np.ones((1, 3)), [2.0])])
    assert np.isnan(fc.quality(fc.Problem(alone, bias=True, loss="least_squares"), X0, exact=True).overall.r2)


def test_absolute_errors_that_a_site_keeps_are_unknown():
    sums, counts = torch.ones(len(RESIDUALS), dtype=torch.float64), torch.zeros(1, 1, 5, dtype=torch.float64)
    sums[RESIDUALS.index("kept")] = 0
    kept = sums.clone()
    kept[RESIDUALS.index("absolute")], kept[RESIDUALS.index("kept")] = 0, 1
    loss = fc.Problem(silos_of("huber"), loss="huber").loss
    each = [Errors.told([{"sums": one, "counts": counts}], loss) for one in (sums, kept)]
    assert [np.isnan(one.mae) for one in (*each, Errors.all(each))] == [False, True, True]


def command(*arguments, code=0):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == code, done.output + str(done.exception)
    return done.output


@pytest.mark.parametrize("kind", ["fit", "cv"])
@pytest.mark.parametrize("loss", ["least_squares", "huber", "poisson"])
def test_reports_and_predictions_have_them(loss, kind, tmp_path):
    silos = silos_of(loss)
    files = []
    for i, name in enumerate(silos.names):
        X, y = silos[i]
        files.append(tmp_path / f"{name}.csv")
        pd.DataFrame(X.numpy(), columns=list("uvw")).assign(y=y.numpy()).to_csv(files[-1], index=False)
    (tmp_path / "e.toml").write_text(
        f'[data]\nfiles = {json.dumps([str(f) for f in files])}\ntarget = "y"\ntest = 0.2\n[recipe]\n'
        f'[problem]\nloss = "{loss}"\nbias = true\nweights = "samples"\n[regularizer]\nname = "L1"\nlam = 0.01\n'
    )
    options = ["--folds", 3, "--count", 5, "--ratio", 0.01] if kind == "cv" else []
    shown = command(kind, tmp_path / "e.toml", *options, "--out", tmp_path / "run")
    assert "r2" in shown
    assert "rmse" in shown
    found = json.loads((tmp_path / "run" / "analysis.json").read_text())
    assert found["quality_on"] == ("held-out folds" if kind == "cv" else "training samples")
    assert found["quality"]["all"]["samples"] == 216
    assert found["test"]["all"]["samples"] == 54
    command("report", tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    words = ["R2", "RMSE", "MAE", "calibration slope", "predicted mean", "Calibration on the test part", "216, mean "]
    words += ["Measured on held-out folds" if kind == "cv" else "Apparent performance"]
    words += ["deviance explained"] if loss == "poisson" else []
    for word in words:
        assert word in page
    table = pd.read_csv(tmp_path / "run" / "report-quality.csv").set_index("site")
    assert table.loc["all", "R2"] == pytest.approx(found["quality"]["all"]["r2"])
    made = fc.predict(tmp_path / "run", files[0])
    y, mean = silos[0][1].numpy(), made.table["prediction"]
    measured = made.measures.iloc[0]
    assert measured["r2"] == pytest.approx(r2_score(y, mean))
    assert measured["rmse"] == pytest.approx(mean_squared_error(y, mean) ** 0.5)
    assert measured["mae"] == pytest.approx(mean_absolute_error(y, mean))
    if loss == "poisson":
        assert measured["deviance_explained"] == pytest.approx(d2_tweedie_score(y, mean, power=1))


def test_folds_held_out_are_scored_by_the_others_models():
    silos = silos_of("least_squares")
    problem = fc.Problem(silos, loss="least_squares", bias=True, weights="samples", regularizer=fc.regularizers.L1(1.0))
    cv = fc.cross_validate(problem, folds=3, count=5)
    report = fc.quality(problem, cv, choice="min")
    assert report.overall.samples == 270
    assert report.overall.rmse**2 == pytest.approx(float(cv.mean[cv.index("min")]))  # of equal folds


def test_the_calibration_slope_of_counts_keeps_offsets():
    """1 by construction for a fit on its own samples; else that of a regression beside the offset."""
    silos = counts_with_offsets()
    problem = fc.Problem(silos, loss="poisson", bias=True, weights="samples")
    fitted = fc.solve(problem, tolerance=1e-12).solution
    report = fc.quality(problem, fitted)
    assert report.overall.calibration_slope == pytest.approx(1.0, abs=1e-6)
    other = torch.tensor([0.3, -0.9, 0.2], dtype=torch.float64)
    for name, one in fc.quality(problem, other).rows.items():
        rows = slice(None) if name == "all" else slice(*silos.offsets[(i := silos.names.index(name)) : i + 2])
        z = (silos.features[rows] @ other[:-1] + other[-1]).numpy()
        y, t, w = (v[rows].numpy() for v in (silos.targets, silos.margin_offsets, silos.weights))

        def deviance(b, z=z, y=y, t=t, w=w):
            at = b[0] + b[1] * z + t
            return float(w @ (np.exp(at) - y * at)) / w.sum()

        best = scipy.optimize.minimize(deviance, [0.0, 1.0], method="BFGS", options={"gtol": 1e-9})
        assert one.calibration_slope == pytest.approx(best.x[1], abs=1e-5), name


def counts_with_offsets():
    generator = np.random.default_rng(5)
    pairs, offsets, weights = [], [], []
    for size in (60, 40):
        X, t = generator.normal(size=(size, 2)), generator.normal(size=size)
        pairs.append((X, generator.poisson(np.exp(X @ [0.5, -0.4] + 0.2 + t)).astype(float)))
        offsets.append(t)
        weights.append(generator.random(size) + 0.5)
    return fc.Silos.from_arrays(pairs, margin_offsets=offsets, weights=weights)
