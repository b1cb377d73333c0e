"""Results: one line when they are printed, their main table when it is asked for."""

import numpy as np
import pandas as pd
import pytest
import torch

import fedcomposite as fc
from fedcomposite.analysis import Analysis, CrossValidation, Errors, Path, Quality, Report, Scored, Stability
from fedcomposite.exporting import sparse_layers
from fedcomposite.regularizers import L1, MCP, ElasticNet
from fedcomposite.regularizers.factors import strength


def problem(loss="logistic"):
    random = np.random.default_rng(0)
    X = random.normal(size=(400, 30))
    y = (X[:, 0] - X[:, 1] + random.logistic(size=400) > 0).astype(float)
    silos = fc.Silos.from_arrays([(X[k::4], y[k::4]) for k in range(4)])
    return fc.Problem(silos, loss=loss, regularizer=L1(1.0), bias=True, weights="samples")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """One of each, for classes and for numbers."""
    one, other = problem(), problem("least_squares")
    path = fc.path(one, count=5, ratio=0.1)
    cv = fc.cross_validate(one, folds=3, count=5, ratio=0.1)
    report, errors = fc.quality(one, path.solutions[-1]), fc.quality(other, path.solutions[-1])
    made = [path, cv, fc.analyse(one, "cv", folds=3, count=5, ratio=0.1), report, report.overall, errors.overall]
    made += [fc.stability(one, draws=4, errors=5.0, count=5), errors, fc.solve(one)]
    place = tmp_path_factory.mktemp("scored")
    made[2].save(place / "run")
    X, y = one.silos.features.numpy(), one.silos.targets.numpy()
    columns = dict(zip(one.coordinate_names, X.T, strict=False))
    pd.DataFrame(columns | {"target": y}).to_csv(place / "new.csv", index=False)
    return [*made, fc.predict(place / "run", place / "new.csv")]


KINDS = [Path, CrossValidation, Analysis, Report, Quality, Errors, Stability, Report, fc.Run, Scored]


@pytest.mark.parametrize("place", range(len(KINDS)), ids=lambda i: KINDS[i].__name__)
def test_results_are_printed_in_a_line_and_shown_as_a_table(found, place):
    one, kind = found[place], KINDS[place]
    assert type(one) is kind
    assert repr(one).startswith(f"{kind.__name__}(")
    assert "\n" not in repr(one)
    assert len(repr(one)) < 250
    assert "tensor" not in repr(one)
    assert "array" not in repr(one)
    assert str(one) == repr(one)
    frame = one.to_frame()
    assert isinstance(frame, pd.DataFrame)
    assert len(frame)
    html = one._repr_html_()
    assert "<table" in html
    assert all(str(column) in html for column in frame.columns[:3])


def test_the_main_tables_are_those_of_the_old_names(found):
    path, cv, analysis, report, quality, errors, stable, _, run, scored = found
    pd.testing.assert_frame_equal(run.to_frame(), run.frame)
    assert list(run.to_frame()["round"]) == list(range(run.rounds + 1))
    assert scored.to_frame() is scored.table
    for one, table in ((path, path.table()), (cv, cv.scores), (report, report.table), (stable, stable.table)):
        pd.testing.assert_frame_equal(one.to_frame(), table)
    for one in (quality, errors):
        assert one.to_frame().iloc[0].to_dict() == pytest.approx(one.summary(), nan_ok=True)
    frame = analysis.to_frame()
    assert list(frame.index) == list(analysis.problem.coordinate_names)
    np.testing.assert_array_equal(frame["coefficient"], analysis.x)
    pd.testing.assert_frame_equal(frame, analysis.intervals)


def test_lines_have_the_numbers(found):
    path, cv, analysis, report, quality, errors, stable, _, run, scored = found
    assert f"converged after {run.rounds} rounds" in repr(run)
    assert "400 samples" in repr(scored)
    assert "without outcomes" in repr(scored)
    known = Scored(scored.table, pd.DataFrame([{"samples": 400, "auroc": 0.83751}]), "north")
    assert repr(known) == "Scored(400 samples in the style of north: auroc 0.8375)"
    assert f"5 strengths from {path.lambdas[0]:.4g} to {path.lambdas[-1]:.4g}" in repr(path)
    assert f"0 to {path.nonzeros.max()} of 30 coefficients" in repr(path)
    assert f"lambda_min = {cv.lambda_min:.4g}, lambda_1se = {cv.lambda_1se:.4g}" in repr(cv)
    assert "3 folds" in repr(cv)
    assert analysis.message in repr(analysis)
    assert repr(quality) in repr(report)
    assert "4 sites" in repr(report)
    assert f"400 samples, {quality.positives:g} positive: AUROC {quality.auroc:.3f}" in repr(quality)
    assert f"R2 {errors.r2:.4g}, RMSE {errors.rmse:.4g}" in repr(errors)
    assert f"{len(stable.selected)} of 30 coordinates" in repr(stable)


def test_a_learned_recipe_and_converted_layers_are_results():
    recipe = fc.Recipe(drop=["slope", "ca", "thal"], impute={"default": "mean"}, one_hot=["cp"], standardize=["age"])
    learned = recipe.fit({"cleveland": fc.data.frames("heart_disease")["cleveland"]}, target="num")
    layers = torch.nn.Sequential(torch.nn.Linear(100, 20), torch.nn.Linear(20, 2))
    with torch.no_grad():
        layers[0].weight[:, 3:] = 0
    converted = sparse_layers(layers)
    for one, line in (
        (learned, f"FittedRecipe({len(learned.features)} features of 'num' at 1 site)"),
        (converted, "Converted(1 of 2 linear layers sparse)"),
    ):
        assert repr(one) == line
        assert "<table" in one._repr_html_()
    table = learned.to_frame()
    assert list(table.index) == learned.features
    assert table.loc["age", "sd"] > 1 == table.loc["chol", "sd"]
    assert set(table.filter(like="cp", axis=0)["source"]) == {"cp"}
    assert converted.to_frame()[["layer", "sparse"]].to_numpy().tolist() == [["0", True], ["1", False]]


def test_constants_are_measured_at_any_model(found):
    one, run = problem(), found[8]
    expected = fc.theory.constants(one, solution=run.solution, x0=torch.zeros(31))
    assert expected.gap > 0
    assert fc.theory.constants(one, solution=run, x0=torch.zeros(31)) == expected
    assert fc.theory.constants(one, solution=fc.LogisticRegression(1.0, regularizer="l1").fit(one.silos)).gap > 0


def test_an_analysis_without_intervals_has_a_table_of_its_model():
    one = fc.analyse(problem("huber"), "path", count=4, ratio=0.1)
    assert one.intervals is None
    assert list(one.to_frame().columns) == ["coefficient"]
    assert list(one.to_frame().index) == list(one.problem.coordinate_names)


def test_what_cannot_be_measured_is_printed_all_the_same(found):
    """A site whose samples are of one class has no AUROC; folds may have no score."""
    X = np.random.default_rng(0).normal(size=(20, 3))
    silos = fc.Silos.from_arrays([(X[:10], np.ones(10)), (X[10:], np.arange(10) % 2)])
    one = fc.Problem(silos, bias=True, weights="samples")
    alone = fc.quality(one, np.array([1.0, 0.0, 0.0, 0.0])).by_site
    assert len(alone) == 2
    assert [repr(site).count("no AUROC") for site in alone.values()] == [1, 0]
    cv = found[1]
    empty = CrossValidation(**{**vars(cv), "mean": np.full_like(cv.mean, np.nan)})
    assert "lambda_min" not in repr(empty)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["path", "cv", "fit"])
@pytest.mark.parametrize("h", [L1(1.0), MCP(0.5, 3.0), ElasticNet(0.2, 0.1)], ids=str)
def test_the_problem_of_an_analysis_is_the_one_that_its_model_solves(kind, h):
    """With the strength that was chosen; what was given stays as it is."""
    given = problem()
    given.regularizer = given._restricted(h)
    before = str(given.regularizer)
    made = fc.analyse(given, kind, **({} if kind == "fit" else {"count": 6, "ratio": 0.05}))
    assert str(given.regularizer) == before
    assert strength(made.problem.regularizer) == pytest.approx(made.lam)
    assert made.problem.optimality(made.x) < 1e-6
    if kind != "fit":
        assert given.optimality(made.x) > 1e-3
        assert made.problem is not given
