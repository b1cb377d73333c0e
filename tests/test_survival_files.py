"""Times to an event from files to a report: recipes, experiments, commands."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite.cli.main import app
from fedcomposite.data import DataError
from fedcomposite.experiments import Config, ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("survivors")
    fc.data.survivor_files(made, clients=3, samples=120)
    return made


def command(*words, code=0):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


def tables():
    rng, made = np.random.default_rng(0), {}
    for site in ("north", "south"):
        m = 40
        time = rng.integers(1, 30, m).astype(float)
        made[site] = pd.DataFrame(
            {"x": rng.normal(size=m), "z": rng.normal(size=m), "days": time, "came": time - rng.integers(1, 5, m)}
            | {"dead": rng.choice(["yes", "no"], m), "ward": rng.choice(["A", "B"], m)}
        )
    return made


def test_a_recipe_makes_targets_of_times():
    given = tables()
    recipe = fc.Recipe(time="days", entry="came", strata="ward", target={"yes": 1, "no": 0})
    silos = recipe.prepare(given, target="dead")
    assert silos.feature_names == ("x", "z")
    y = silos.targets.numpy()
    both = pd.concat(given.values(), ignore_index=True)
    np.testing.assert_array_equal(y[:, 0], both["days"])
    np.testing.assert_array_equal(y[:, 1], both["dead"] == "yes")
    np.testing.assert_array_equal(y[:, 2], both["came"])
    np.testing.assert_array_equal(y[:, 3], (both["ward"] == "B").astype(float))
    plain = fc.Recipe(time="days", strata="ward", target={"yes": 1, "no": 0}, drop=["came"]).prepare(
        given, target="dead"
    )
    again = fc.Problem(plain, loss="cox")
    assert bool(torch.isinf(again.smooth().b[:, 2]).all())
    gaps = {k: t.assign(days=t["days"].where(t.index > 1)) for k, t in given.items()}
    with pytest.raises(DataError, match="missing value\\(s\\) in the column 'days'"):
        recipe.prepare(gaps, target="dead")
    dropped = fc.Recipe(**{**recipe.model_dump(), "missing_target": "drop"}).prepare(gaps, target="dead")
    assert len(dropped.targets) == 76
    with pytest.raises(DataError, match="go with time"):
        fc.Recipe(entry="came")
    with pytest.raises(DataError, match="is no number"):
        fc.Recipe(time="ward", target={"yes": 1, "no": 0}).prepare(given, target="dead")


def test_plain_files_and_arrays_have_the_same_columns(tmp_path):
    given = {k: t.assign(dead=(t["dead"] == "yes") * 1, ward=(t["ward"] == "B") * 1) for k, t in tables().items()}
    for name, table in given.items():
        table.to_csv(tmp_path / f"{name}.csv", index=False)
        arrays = {k: table[k].to_numpy(float) for k in ("days", "dead", "came", "ward")}
        np.savez(tmp_path / f"{name}.npz", X=table[["x", "z"]].to_numpy(), **arrays)
    roles = {"target": "dead", "time": "days", "entry": "came", "strata": "ward"}
    made = [fc.Silos.from_files([tmp_path / f"{n}.{kind}" for n in given], **roles) for kind in ("csv", "npz")]
    assert torch.equal(made[0].targets, made[1].targets)
    assert made[0].targets.shape == (80, 4)
    content = {"data": {"files": [str(tmp_path / f"{n}.csv") for n in given], "event": "dead", "time": "days"}}
    content["data"]["drop"] = ["came", "ward"]
    found = Config.check({**content, "problem": {"loss": "cox"}, "run": {"rounds": 0}}).make_problem()
    assert found.silos.targets.shape == (80, 2)
    with pytest.raises(ConfigError, match="event is the target"):
        Config.check({"data": {**content["data"], "target": "dead"}, "run": {"rounds": 0}})
    with pytest.raises(DataError, match="go with time"):
        fc.Silos.from_files([tmp_path / "north.csv"], target="dead", entry="came")


def test_from_files_to_a_report(folder, tmp_path):
    run = tmp_path / "found"
    command("cv", folder / "experiment.toml", "--folds", 3, "--count", 8, "--ratio", 0.1, "--horizon", 60, "--out", run)
    told = json.loads((run / "analysis.json").read_text())
    assert {"curves", "baseline", "proportional", "intervals"} <= told.keys()
    assert told["quality"]["all"]["horizon"] == 60
    assert told["quality"]["all"]["c_index"] > 0.6
    command("report", run)
    page = (run / "report.html").read_text()
    assert "Survival curves" in page
    assert "HR per unit" in page
    assert "numbers at risk" in page
    survival = pd.read_csv(run / "report-survival.csv")
    assert (survival["at risk"] > 0).all()
    assert survival.groupby("site")["time"].max().nunique() > 1  # nobody is followed as long everywhere
    assert list(survival["site"].unique()) == ["hospital_1", "hospital_2", "hospital_3", "all"]
    assert "(all)" in set(pd.read_csv(run / "report-proportionality.csv")["name"])
    scored = tmp_path / "scored.csv"
    done = command("predict", run, folder / "hospital_2.csv", "--out", scored)
    assert "c_index" in done
    table = pd.read_csv(scored)
    assert table["prediction"].between(0, 1).all()
    rows = [r for r in told["baseline"] if r["site"] == "hospital_2" and r["time"] <= 60]
    wanted = 1 - np.exp(-rows[-1]["cumulative_hazard"] * np.exp(table["margin"]))
    np.testing.assert_allclose(table["prediction"], wanted, rtol=1e-9)
    blind = pd.read_csv(folder / "hospital_2.csv").drop(columns=["months", "died"])
    blind.to_csv(tmp_path / "blind.csv", index=False)
    assert "no target" in command("predict", run, tmp_path / "blind.csv", "--out", scored)


def test_messy_files_have_the_same_patients(tmp_path):
    """Days, centimetres, codes and German are what the plain files say, but for rounded days and gaps."""
    clean, messy = (
        fc.data.survivor_files(tmp_path / name, clients=4, samples=80, messy=name == "messy")
        for name in ("clean", "messy")
    )
    assert clean.keys() == messy.keys()
    made = []
    for name in ("clean", "messy"):
        text = (tmp_path / name / "experiment.toml").read_text()
        (tmp_path / name / "experiment.toml").write_text(text.replace("standardize = true", "standardize = false"))
        made.append(Config.read(tmp_path / name / "experiment.toml").make_problem().silos)
    ours, theirs = made
    assert ours.feature_names == theirs.feature_names
    assert torch.equal(ours.targets[:, 1], theirs.targets[:, 1])
    assert float((ours.targets[:, 0] - theirs.targets[:, 0]).abs().max()) < 0.5 * 12 / 365.25 + 1e-4
    same = torch.isclose(ours.features, theirs.features, rtol=0, atol=1e-9)
    assert float(same.double().mean()) > 0.98
    filled = {name for j, name in enumerate(ours.feature_names) if not bool(same[:, j].all())}
    assert filled == {"log(nodes + 1)", "size", "receptor=positive"}


def test_the_commands_options(folder, tmp_path):
    run = tmp_path / "fit"
    command("fit", folder / "experiment.toml", "--times", "60:20", "--out", run)
    told = json.loads((run / "analysis.json").read_text())
    assert sorted({row["time"] for row in told["curves"]}) == [20, 40, 60]
    for wrong in ("6,4", "x", "60:0"):
        done = CliRunner().invoke(app, ["fit", str(folder / "experiment.toml"), "--times", wrong])
        assert "must be rising numbers" in str(done.exception)
    command("data", "survivors", tmp_path / "new")
    assert "already there" in str(CliRunner().invoke(app, ["data", "survivors", str(tmp_path / "new")]).exception)
    described = command("data", "describe", folder / "experiment.toml")
    assert "months" in described


def test_an_analysis_is_written_and_read_again(tmp_path):
    problem = fc.Problem(fc.data.load("survival", clients=2, samples=80), loss="cox", loss_options={"ties": "efron"})
    found = fc.analyse(problem, "fit", horizon=40.0)
    found.save(tmp_path / "run")
    assert 'ties = "efron"' in (tmp_path / "run" / "config.toml").read_text()
    fc.write_report(tmp_path / "run")
    table = fc.data.frames("survival")
    assert set(table) == {f"hospital_{k}" for k in range(1, 5)}
