"""One name for one thing: models in every form, arguments in one order, old names with a warning, results in a line."""

import inspect
import json
import warnings
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pandas as pd
import pytest
import torch

import fedcomposite as fc
from fedcomposite._validation import renamed
from fedcomposite.algorithms import FedMid
from fedcomposite.callbacks import BestModel
from fedcomposite.regularizers import L1
from fedcomposite.runtime.simulator import SimulateOptions


@pytest.fixture(scope="module")
def problem():
    silos = fc.data.load("synthetic", clients=4, features=5, samples=60)
    return fc.Problem(silos, loss="logistic", regularizer=L1(0.02), bias=True, weights="samples")


@pytest.fixture(scope="module")
def models(problem):
    """What has a model, and the model that it has."""
    run = fc.solve(problem)
    trained = fc.simulate(problem, FedMid(2, 0.1), rounds=5, callbacks=[BestModel("objective")])
    estimator = fc.LogisticRegression(0.02, regularizer="l1").fit(problem.silos)
    cv = fc.cross_validate(problem, folds=3, count=5)
    analysis = fc.analyse(problem, "path", count=5)
    return {
        "Run": (run, run.solution),
        "Best": (trained.best, trained.best.solution),
        "estimator": (estimator, torch.from_numpy(estimator.solution_)),
        "path": (cv.path, cv.path.solution("bic")),
        "cross-validation": (cv, cv.solution()),
        "Analysis": (analysis, analysis.x),
        "array": (run.solution.numpy(), run.solution),
    }


TAKING = {
    "confidence": fc.confidence,
    "bootstrap": lambda problem, x: fc.bootstrap(problem, x, draws=2),
    "refit": lambda problem, x: pd.DataFrame(fc.refit(problem, x)),
    "objective": lambda problem, x: pd.DataFrame([problem.objective(x)]),
    "stationarity": lambda problem, x: pd.DataFrame([problem.stationarity(x)]),
    "predict": lambda problem, x: pd.DataFrame(problem.predict(x, problem.silos.features[:3])),
    "layers": lambda problem, x: problem.layers(x),
    "scores": lambda problem, x: problem.scores(x),
    "certify": lambda problem, x: pd.DataFrame([fc.analysis.certify(problem, x)]),
    "x0": lambda problem, x: pd.DataFrame(fc.simulate(problem, FedMid(1, 0.1), rounds=1, x0=x).solution),
}


@pytest.mark.parametrize("name", TAKING)
def test_whatever_takes_a_model_takes_what_has_one(problem, models, name):
    for given, x in models.values():
        pd.testing.assert_frame_equal(TAKING[name](problem, given), TAKING[name](problem, x))


def test_quality_and_export_take_what_has_a_model(problem, models, tmp_path):
    for kind, (given, x) in models.items():
        if kind != "cross-validation":  # of which every sample is scored by the model of its fold
            pd.testing.assert_frame_equal(fc.quality(problem, given).table, fc.quality(problem, x).table)
        files = [fc.export(problem, one, tmp_path / f"{kind}.csv", format="csv").path for one in (given, x)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_network_brings_its_running_statistics():
    silos = fc.data.load("synthetic", clients=3, features=4, samples=20)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    problem = fc.Problem(silos, model=module, loss="cross_entropy")
    run = fc.simulate(problem, fc.algorithms.FedAvg(3, 0.1), rounds=3, batch_size=8)
    assert problem.objective(run) == problem.objective(run.solution, buffers=run.buffers)
    assert problem.objective(run) != problem.objective(run.solution)


def test_what_has_no_model_yet(problem):
    with pytest.raises(ValueError, match=r"must be a vector of numbers.*fit it first"):
        fc.confidence(problem, fc.LogisticRegression())


def test_choices_of_a_path(problem):
    path = fc.path(problem, count=6)
    for choice in ("aic", "bic", "ebic"):
        assert path.index(choice) == int(np.argmin(getattr(path, choice)))
        assert torch.equal(path.solution(choice), path.solutions[path.index(choice)])
    assert torch.equal(path.solution(path.lambdas[3]), path.solutions[3])
    with pytest.raises(ValueError, match="choice = 'min', must be 'aic', 'bic' or 'ebic' for a path"):
        path.solution("min")


def test_the_order_of_the_last_version_warns(problem, tmp_path):
    run = fc.solve(problem)
    made = fc.export(problem, run, tmp_path / "a.csv", format="csv").path.read_bytes()
    with pytest.warns(DeprecationWarning, match=r"export\(problem, run, path\)"):
        fc.export(run, problem, tmp_path / "b.csv", format="csv")
    with pytest.warns(DeprecationWarning, match="run is now x"):
        fc.export(run=run, problem=problem, path=tmp_path / "c.csv", format="csv")
    assert (tmp_path / "b.csv").read_bytes() == (tmp_path / "c.csv").read_bytes() == made


def test_results_are_a_line_and_a_table(problem, tmp_path):
    run = fc.simulate(problem, FedMid(2, 0.1), rounds=3, callbacks=[BestModel("objective")])
    network = torch.nn.Sequential(torch.nn.Linear(5, 40), torch.nn.ReLU(), torch.nn.Linear(40, 2))
    exported = fc.export(problem, run, tmp_path / "x.csv", format="csv")
    seen = problem.evaluate(run)
    constants, certificate = fc.theory.constants(problem, solution=run), fc.solve(problem).certificate
    for one in (exported, seen, run.best, constants, certificate, fc.prune(network, torch.randn(4, 5))):
        assert isinstance(one.to_frame(), pd.DataFrame)
        assert len(repr(one)) < 250
        assert "\n" not in repr(one)
        assert "<table" in one._repr_html_()
    assert seen.to_frame()["loss"].item() == float(seen.loss)
    assert run.best.to_frame()["value"].item() == run.best.value
    assert constants.to_frame().loc["L", "value"] == constants.L
    assert f"L = {constants.L:.4g}, " in repr(constants)
    assert certificate.to_frame()["value"].item() == certificate.value


def test_status_words_are_identifiers(problem):
    assert fc.solve(problem, rounds=1, tolerance=1e-14).status == "not_converged"
    for word in fc.runtime.history.Status.__args__:
        assert word.isidentifier()


@pytest.mark.slow
def test_one_default_of_a_choice(problem):
    """The strongest regularizer within a standard error, as in glmnet, wherever a cross-validation is asked."""
    cv = fc.cross_validate(problem, folds=3, count=8)
    assert cv.index_1se < cv.index_min
    assert cv.index() == cv.index_1se
    assert torch.equal(cv.solution(), cv.solution("1se"))
    assert fc.analyse(problem, folds=3, count=8).lam == cv.lambda_1se
    model = fc.LogisticRegression("cv", regularizer="l1", folds=3, count=8).fit(problem.silos)
    assert model.lam_ == pytest.approx(cv.lambda_1se)
    by_default, said = fc.quality(problem, cv), fc.quality(problem, cv, choice="1se")
    pd.testing.assert_frame_equal(by_default.table, said.table)


def test_one_word_each(problem):
    with pytest.warns(DeprecationWarning, match="score is now scoring"):
        old = fc.cross_validate(problem, folds=3, count=3, score="auc")
    assert old.scoring == fc.cross_validate(problem, folds=3, count=3, scoring="auc").scoring == "auc"
    with pytest.warns(DeprecationWarning, match="score is now scoring"):
        assert old.score == "auc"
    with pytest.warns(DeprecationWarning, match="score is now scoring"):
        fc.analyse(problem, "cv", folds=3, count=3, score="error")
    with pytest.warns(DeprecationWarning, match="is now") as told:
        model = fc.LinearRegression(max_rounds=7, weights="uniform")
    assert {Path(one.filename) for one in told} == {Path(__file__)}  # the caller's line, which Python then shows
    assert model.get_params() == fc.LinearRegression(rounds=7, pooled=False).get_params()
    uneven = problem.silos.subset([np.arange(20), np.arange(20, 90)], ["small", "large"])
    for pooled, weights in ((True, "samples"), (False, "uniform")):
        fitted = fc.LogisticRegression(0.02, regularizer="l1", pooled=pooled).fit(uneven)
        assert fitted.problem(uneven).weighting == weights
        assert fitted.problem(uneven).optimality(fitted) < 1e-6


@pytest.mark.filterwarnings("default:--score is now:FutureWarning")
def test_one_word_on_the_command_line(cli, tmp_path):
    experiment = tmp_path / "experiment.toml"
    experiment.write_text('data = {name = "wisconsin"}\npartition = {name = "iid", clients = 2}\n'
                          'problem = {bias = true}\nregularizer = {name = "L1", lam = 0.1}\n')  # fmt: skip
    asked = ["cv", experiment, "--folds", "2", "--count", "3"]
    cli(*asked, "--scoring", "auc", "--out", tmp_path / "new", check=0)
    old = cli(*asked, "--score", "auc", "--out", tmp_path / "old", check=0)
    assert "--score is now --scoring" in old.err
    scores = [json.loads((tmp_path / name / "analysis.json").read_text())["cv"] for name in ("new", "old")]
    assert scores[0] == scores[1]
    assert scores[0]["score"] == "auc"


def test_renamed_arguments():
    @renamed(old="new", text=("new", int))
    def plain(a, *, new=0):
        return a, new

    assert plain(1, new=2) == (1, 2)
    with pytest.warns(DeprecationWarning, match="old is now new"):
        assert plain(1, old=2) == (1, 2)
    with pytest.warns(DeprecationWarning, match="text is now new"):
        assert plain(1, text="3") == (1, 3)
    with pytest.raises(TypeError, match="old is now new; give new alone"):
        plain(1, old=2, new=3)


def test_the_settings_of_a_run_are_typed_as_they_are():
    taken = inspect.signature(fc.simulate).parameters
    own = {"problem", "algorithm", "rounds", "x0", "tolerance"}  # which a function that passes settings on has itself
    assert set(taken) - own == set(SimulateOptions.__annotations__)
    hints, typed = get_type_hints(fc.simulate), get_type_hints(SimulateOptions)
    assert all(hints[name] == typed[name] for name in typed)


def test_errors_are_in_one_place():
    for name in fc.errors.__all__:
        kind = getattr(fc.errors, name)
        assert kind.__name__ == name
        assert kind.__doc__
        if name in fc.__all__:
            assert getattr(fc, name) is kind
        if name.endswith("Error") and name != "FailedError":
            assert issubclass(kind, fc.errors.UserError | fc.errors.FailedError)
        if name.endswith("Warning"):
            assert issubclass(kind, Warning)
    public = {n for n in fc.__all__ if n.endswith(("Error", "Warning", "Interrupted"))}
    assert public <= set(fc.errors.__all__)
    assert set(dir(fc.errors)) >= set(fc.errors.__all__)
    with pytest.raises(AttributeError, match="NoError"):
        _ = fc.errors.NoError


def test_merged_errors_have_one_name():
    with pytest.warns(DeprecationWarning, match=r"now fedcomposite\.CheckpointError"):
        assert fc.UnnamedError is fc.CheckpointError
    with pytest.warns(DeprecationWarning, match="now ExportError"):
        assert fc.exporting.PruneError is fc.ExportError
    missing = fc.errors.MissingPackageError
    assert fc.callbacks.MissingPackageError is fc.privacy.MissingPackageError is missing
    assert issubclass(missing, ImportError | ValueError)


def test_fields_of_methods_had_other_names():
    """inner_steps, inner_step and eta of the last version, in Python and in an experiment."""
    new = fc.algorithms.FedDR(prox_step=1.0, alpha=1.0, local_steps=3, step=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert fc.algorithms.FedDR(eta=1.0, alpha=1.0, inner_steps=3, inner_step=0.1) == new
    assert [str(one.message).split(";")[0] for one in said] == [
        "inner_steps is now local_steps",
        "inner_step is now step",
        "eta is now prox_step",
    ]
    with pytest.raises(TypeError, match="give step alone"):
        fc.algorithms.FedProx(prox_step=1.0, step=0.1, inner_step=0.1, local_steps=2)
    old = {"name": "feddr", "eta": 1.0, "alpha": 1.0, "inner_steps": 3, "inner_step": 0.1}
    with pytest.warns(DeprecationWarning, match="feddr: eta is now prox_step"):
        assert fc.algorithms.build(**fc.algorithms.current(old)) == new
