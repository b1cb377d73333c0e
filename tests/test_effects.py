"""Effect curves of splines and products: statsmodels on features by hand, copies of imputed tables, sites, pictures."""

import json

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import tomli_w
import torch
from analyst import PLAIN, inquiry
from gaps import at_sites
from local_federation import opened
from secure_sites import secure_tables

import fedcomposite as fc
from fedcomposite.federation.coordinator.delivery import Settings
from fedcomposite.federation.coordinator.inquiry import learn
from fedcomposite.runtime import Driver

KNOTS = [45.0, 55.0, 65.0, 75.0]
RECIPE = {"splines": {"age": KNOTS}, "interactions": [["dose", "sex"]], "one_hot": ["sex"], "min_count": 1}


def patients(n=900, seed=0):
    g = np.random.default_rng(seed)
    age, dose = g.normal(60, 10, n), g.normal(5, 2, n)
    sex = np.array(["f", "m"], object)[g.integers(2, size=n)]
    z = np.sin(age / 8) + (dose - 5) * (0.2 + 0.3 * (sex == "m"))
    y = (g.random(n) < 1 / (1 + np.exp(-z))).astype(float)
    return pd.DataFrame({"age": age, "dose": dose, "sex": sex, "y": y})


def harrell(x, t=KNOTS):
    """Restricted cubic splines as Harrell writes them."""

    def cube(a):
        return np.maximum(a, 0) ** 3

    k = len(t) - 1
    return np.column_stack([
        (cube(x - t[j]) - cube(x - t[k - 1]) * (t[k] - t[j]) / (t[k] - t[k - 1])
         + cube(x - t[k]) * (t[k - 1] - t[j]) / (t[k] - t[k - 1])) / (t[k] - t[0]) ** 2
        for j in range(k - 1)
    ])  # fmt: skip


def by_hand(age, dose, male):
    age, dose, male = np.broadcast_arrays(np.asarray(age, float), dose, male)
    return np.column_stack([age, harrell(age), dose, male, dose * male, np.ones(len(age))])


def problem_of(frames, loss="logistic", **recipe):
    silos = fc.Recipe(**{**RECIPE, **recipe}).prepare(frames, target="y")
    return fc.Problem(silos, loss=loss, bias=True, weights="samples")


@pytest.mark.parametrize(("loss", "oracle"), [("logistic", sm.Logit), ("poisson", sm.Poisson)])
def test_curves_and_bands_are_those_of_statsmodels_on_features_by_hand(loss, oracle):
    frame = patients()
    found = fc.effect_curves(problem_of(at_sites(frame), loss), jeffreys=0, reference={"dose": 4.0}).table
    fit = oracle(frame.y, by_hand(frame.age, frame.dose, frame.sex == "m")).fit(disp=0, tol=1e-14, maxiter=200)
    for (name, given), curve in found.groupby(["column", "given"]):
        male = float(given == "sex = m")
        at, base = curve.value.to_numpy(), np.array([curve.reference.iloc[0]])
        if name == "age":
            rows = by_hand(at, 5.0, 0.0) - by_hand(base, 5.0, 0.0)
        else:
            rows = by_hand(60.0, at, male) - by_hand(60.0, base, male)
        se = np.sqrt(((rows @ fit.cov_params().to_numpy()) * rows).sum(1))
        np.testing.assert_allclose(curve.estimate, rows @ fit.params.to_numpy(), rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(curve.se, se, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(curve.upper, curve.estimate + 1.959964 * se, rtol=1e-5, atol=1e-7)
        ratio = "odds_ratio" if loss == "logistic" else "rate_ratio"
        np.testing.assert_allclose(curve[ratio], np.exp(curve.estimate))
    assert set(found.given) == {"", "sex = f", "sex = m"}
    assert found[found.column == "age"].value.iloc[[0, -1]].tolist() == [45.0, 75.0]
    assert set(found[found.column == "age"].reference) == {65.0}
    assert set(found[found.column == "dose"].reference) == {4.0}


def test_logarithms_and_products_of_numbers():
    frame = patients()
    recipe = {"splines": {}, "interactions": [("log(dose + 9)", "age")], "log": {"dose": 9.0}}
    problem = problem_of(at_sites(frame), **recipe)
    found = fc.effect_curves(problem, jeffreys=0, columns={"dose": [2.0, 8.0]}, reference={"dose": 2.0}).table
    X = np.column_stack([frame.age, np.log(frame.dose + 9), frame.sex == "m", np.log(frame.dose + 9) * frame.age,
                         np.ones(len(frame))]).astype(float)  # fmt: skip
    fit = sm.GLM(frame.y, X, family=sm.families.Binomial()).fit(tol=1e-13)
    for sds, (_, curve) in zip((-1, 0, 1), found.groupby("given", sort=False), strict=True):
        age, by = frame.age.mean() + sds * frame.age.std(ddof=0), np.log(17) - np.log(11)
        expected = by * (fit.params.iloc[1] + age * fit.params.iloc[3])
        np.testing.assert_allclose(curve.estimate.iloc[1], expected, rtol=1e-6)


def test_copies_are_combined_by_rubins_rules():
    frame = patients()
    g = np.random.default_rng(1)
    frame.loc[g.random(len(frame)) < 0.3, "age"] = np.nan
    problem = problem_of(at_sites(frame), impute="chained", copies=3, iterations=1)
    found = fc.effect_curves(problem, columns={"age": [50.0, 65.0, 70.0]}, jeffreys=0).table
    each = []
    for X in problem.silos.copies:
        one = sm.Logit(problem.silos.targets.numpy(), np.column_stack([X.numpy(), np.ones(len(X))])).fit(disp=0)
        scale = problem.silos.recipe._scale()
        raw = by_hand([50.0, 65.0, 70.0], 5.0, 0.0)[:, :-1]
        raw = np.column_stack([raw[:, :4], raw[:, 4:]])
        order = [problem.silos.recipe.features.index(n) for n in
                 ("age", "age spline 1", "age spline 2", "dose", "sex=m", "dose:sex=m")]  # fmt: skip
        rows = np.zeros((3, 7))
        rows[:, order] = (raw - raw[1]) / scale[1][order]
        each.append((rows @ one.params, np.sqrt(((rows @ one.cov_params()) * rows).sum(1))))
    q, se = (np.stack(one) for one in zip(*each, strict=True))
    expected = fc.combine_imputations(q[:, [0, 2]], se[:, [0, 2]], df=len(frame) - 7)
    np.testing.assert_allclose(found.estimate.iloc[[0, 2]], expected.estimate, rtol=1e-5)
    np.testing.assert_allclose(found.se.iloc[[0, 2]], expected.se, rtol=1e-5)


@pytest.mark.parametrize("secure", [False, True])
def test_sites_have_the_curves_of_files_at_hand(tmp_path, secure):
    frames = at_sites(patients())
    files = {name: tmp_path / f"{name}.csv" for name in frames}
    for name, frame in frames.items():
        frame.to_csv(files[name], index=False)
    text = PLAIN + tomli_w.dumps({"recipe": RECIPE})
    sites = secure_tables(files, tmp_path, opened(min_count=5))
    asking, _ = inquiry(sites, text, settings=Settings(secure=secure))
    driver = Driver(asking)
    asking.recipe = learn(driver, asking.config, "y")
    mine = fc.effect_curves(asking.meet(driver), driver=driver).table
    expected = fc.effect_curves(problem_of(frames)).table
    close = 1e-5 if secure else 1e-8
    np.testing.assert_allclose(mine[["estimate", "se"]], expected[["estimate", "se"]], rtol=close, atol=close)


def test_analyses_and_reports_have_them(tmp_path):
    problem = problem_of(at_sites(patients()))
    found = fc.analyse(problem, "fit")
    assert set(found.effects.table.column) == {"age", "dose"}
    found.effects.plot(tmp_path / "effects.svg")
    assert (tmp_path / "effects.svg").stat().st_size > 1000
    found.save(tmp_path / "run")
    assert len(json.loads((tmp_path / "run" / "analysis.json").read_text())["effects"]) == len(found.effects.table)
    fc.write_report(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "What columns do" in page
    assert "compare predictions at two values" not in page


def test_what_is_no_column_of_numbers_is_refused():
    problem = problem_of(at_sites(patients()))
    for name in ("sex", "nothing"):
        with pytest.raises(ValueError, match="no column of numbers"):
            fc.effect_curves(problem, columns=[name])
    bare = fc.Problem(fc.data.load("synthetic", clients=3, features=2, samples=30), bias=True)
    with pytest.raises(ValueError, match="recipe"):
        fc.effect_curves(bare, torch.zeros(3))
