"""Grids, tuned values, runs side by side, tables, layer-wise regularizers."""

import statistics
import sys
import tomllib

import pandas as pd
import pytest
import torch

import fedcomposite as fc
from fedcomposite.cli import console
from fedcomposite.experiments import Config, ConfigError, RunFolder, Sweep, comparison
from fedcomposite.experiments.grids import settings, variants
from fedcomposite.experiments.tables import joined, latex

TEXT = """
name = "grid"
seeds = [0, 1]
[data]
name = "synthetic"
clients = 4
features = 6
samples = 20
[regularizer]
name = "L1"
lam = {grid = [0.01, 0.001]}
[[algorithms]]
name = "FedNMap"
local_steps = {grid = [1, 3]}
steps = "auto"
[[algorithms]]
name = "FedAvg"
local_steps = 2
step = 0.5
[run]
rounds = 3
"""


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr("fedcomposite.plots.draw_histories", lambda histories, path, *_, **__: path.write_bytes(b"x"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(TEXT)
    return path


def test_all_combinations_in_the_order_of_the_file():
    content = {"data": {"name": "a", "n": {"grid": [1, 2]}}, "regularizer": {"grid": [{"name": "L1"}, {"name": "MCP"}]}}
    points = [part.point for part in settings(content)]
    assert [(p["n"], p["regularizer"]["name"]) for p in points] == [(1, "L1"), (1, "MCP"), (2, "L1"), (2, "MCP")]
    made = variants({"algorithms": [{"name": "FedAvg", "step": {"grid": [0.1, 0.2]}, "local_steps": 1}]})
    assert [v.spec["label"] for v in made] == ["FedAvg (step=0.1)", "FedAvg (step=0.2)"]
    assert settings({"run": {"rounds": 1}})[0].point == {}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[0.01, 0.001]", "[]", "regularizer.lam: grid = [], must be a list of values"),
        ("{grid = [0.01, 0.001]}", "{grid = [0.01], x = 1}", "stands alone, but x is with it"),
        ("[0.01, 0.001]", "[0.01, 0.01]", "has a value twice"),
        ("samples = 20", "samples = {tune = [20, 30]}", "only the fields of a method can be tuned"),
        ("step = 0.5", "step = {tune = [0.5]}\n[trials]\nseed = 1", "seed = 1 is also reported"),
    ],
)
def test_wrong_grids_are_one_clear_line(file, old, new, said):
    file.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(ConfigError, match=r"\w") as error:
        Sweep.read(file)
    assert said in str(error.value)


def test_run_says_that_a_grid_is_for_compare(file, cli):
    assert "use `compare`" in cli("run", file, check=2).err


def test_a_sweep_is_checked_whole_before_anything_runs(file, tmp_path, cli):
    """The sixth of eight runs would be refused: none is begun, and each reason is told once."""
    text = TEXT.replace(
        'name = "L1"\nlam = {grid = [0.01, 0.001]}', 'grid = [{name = "L1", lam = 0.1}, {name = "SCAD", lam = 1.0}]'
    )
    text += "[[algorithms]]\nname = 'FedDA'\nlocal_steps = 2\nstep = 0.5\nserver_step = 1.0\n"
    text += "[[algorithms]]\nname = 'Zhang'\nlocal_steps = 2\nstep = 50.0\nserver_step = 9.0\n"
    file.write_text(text.replace("rounds = 3", "rounds = 3000"))
    done = cli("compare", file, "--out", tmp_path / "c", check=2)
    lines = done.err.splitlines()
    assert len(lines) == 2
    assert "regularizer=SCAD 1: FedDA" in lines[0]
    assert "regularizer=SCAD 1: Zhang" in lines[1]
    assert not (tmp_path / "c").exists()


def test_a_mistake_of_all_settings_is_told_once(file):
    text = TEXT.replace("[0.01, 0.001]", "[0.01, 0.001, -1.0]").replace("local_steps = 2", "local_stepss = 2")
    with pytest.raises(ConfigError) as caught:
        Sweep(tomllib.loads(text.replace("step = 0.5", "step = -0.5")), "grid").check()
    lines = str(caught.value).splitlines()
    assert len([line for line in lines if "local_stepss" in line]) == 1
    (only,) = (line for line in lines if "lam" in line and "local" not in line)
    assert only.endswith("(lam=-1)")


def test_a_reason_that_many_runs_share_is_told_once(file, tmp_path, cli):
    text = TEXT.replace('name = "FedAvg"', 'name = "FedDA"').replace("step = 0.5", "step = {grid = [0.5, 0.25]}")
    file.write_text(text.replace('name = "L1"', 'name = "SCAD"'))
    lines = cli("compare", file, "--out", tmp_path / "c", check=2).err.splitlines()
    assert len(lines) == 2  # one for each SCAD
    assert "lam=0.01: FedDA (step=0.5) and 1 more: FedDA needs a convex h" in lines[0]


def test_missing_data_of_every_setting_are_told_at_once(file, tmp_path, cli, monkeypatch):
    monkeypatch.setenv("FEDCOMPOSITE_DATA", str(tmp_path))
    monkeypatch.setenv("FEDCOMPOSITE_CACHE", str(tmp_path / "cache"))

    def offline(*_):
        raise OSError("no network")

    monkeypatch.setattr(sys.modules["fedcomposite.data.fetch"], "_receive", offline)
    old = TEXT[TEXT.index("[data]") : TEXT.index("[regularizer]")]
    file.write_text(TEXT.replace(old, '[data]\ngrid = [{name = "a9a"}, {name = "w8a"}]\n'))
    err = cli("compare", file, "--out", tmp_path / "c", check=2).err
    assert err.count("a9a was not found") == 2  # one line for each value of lam
    assert err.count("w8a was not found") == 2
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_side_by_side_equals_one_after_another_and_continues(file, tmp_path):
    sweep = Sweep.read(file)
    alone = comparison.compare(sweep, tmp_path / "one")
    beside = comparison.compare(sweep, tmp_path / "two", jobs=2)
    columns = [c for c in alone.columns if "seconds" not in c]
    pd.testing.assert_frame_equal(alone[columns], beside[columns])
    assert len(alone) == 6
    assert list(alone["lam"]) == [0.01] * 3 + [0.001] * 3
    assert [v for v in alone["local_steps"] if v == v] == [1, 3, 1, 3]
    runs = sorted((tmp_path / "two").glob("**/summary.json"))
    assert len(runs) == 12
    before = {run: run.stat().st_mtime_ns for run in runs}
    runs[3].unlink()
    again = comparison.compare(sweep, tmp_path / "two")
    pd.testing.assert_frame_equal(alone[columns], again[columns])
    assert [run for run in runs if run.stat().st_mtime_ns != before[run]] == [runs[3]]


def test_values_are_chosen_on_one_seed_and_told_of_others(file, tmp_path):
    text = TEXT.replace("step = 0.5", "step = {tune = [1e-6, 0.5, 1e9]}").replace("{grid = [0.01, 0.001]}", "0.01")
    file.write_text(text + "[trials]\nseed = 7\n")
    table = comparison.compare(Sweep.read(file), tmp_path / "c")
    assert list(table["method"]) == ["FedNMap (local_steps=1)", "FedNMap (local_steps=3)", "FedAvg"]
    assert table["step"].iloc[-1] == 0.5
    finished = list((tmp_path / "c" / "tuning").glob("*/*/summary.json"))
    assert {p.parent.name for p in finished} == {"seed-7"}
    ends = {p.parent.parent.name: RunFolder(p.parent).history()[-1]["objective"] for p in finished}
    assert "step-0-5" in min(ends, key=ends.get)
    before = (tmp_path / "c" / "comparison.csv").read_text()
    comparison.compare(Sweep.read(tmp_path / "c" / "config.toml"), tmp_path / "c")
    assert (tmp_path / "c" / "comparison.csv").read_text() == before


@pytest.mark.slow  # processes that load mlflow, with a database that is not there yet
@pytest.mark.filterwarnings("ignore")  # of mlflow's own use of its database
def test_trackers_keep_trials_apart_and_know_seeds_and_labels(file, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="the extra [mlflow] is not installed")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    text = TEXT.replace("step = 0.5", "step = {tune = [0.1, 0.5, 0.7]}").replace("{grid = [0.01, 0.001]}", "0.01")
    file.write_text(f'{text}[trials]\nseed = 7\n[[callbacks]]\nname = "MLflow"\nexperiment = "h"\nuri = "{uri}"\n')
    table = comparison.compare(Sweep.read(file), tmp_path / "c", jobs=2)
    client = mlflow.MlflowClient(tracking_uri=uri)

    def told(experiment):
        runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
        return [run.data.params for run in runs]

    finals, trials = told("h"), told("h, tuning")
    assert {p["label"] for p in finals} == set(table["method"])
    assert {p["seed"] for p in trials} == {"7"}
    assert "7" not in {p["seed"] for p in finals}
    assert len(trials) >= 3
    assert all(float(p["step"]) > 0 for p in trials)


def test_results_come_before_what_the_labels_say(file, tmp_path, cli, monkeypatch):
    """In a narrow terminal the values of grids, which stand in the labels, make room."""
    monkeypatch.setattr(console, "_WIDTH", None)
    monkeypatch.setattr(console.out, "_width", 60)
    shown = cli("compare", file, "--out", tmp_path / "c", check=0).out
    head = next(line for line in shown.splitlines() if "method " in line)
    assert "stationarity" in head
    assert "local_steps" not in head
    assert "no room for lam" in shown


def test_spread_is_the_standard_deviation_of_every_column(file, tmp_path):
    file.write_text(TEXT.replace("{grid = [0.01, 0.001]}", "0.01").replace("seeds = [0, 1]", "seeds = [0, 1, 2]"))
    out = tmp_path / "c"
    table = comparison.compare(Sweep.read(file), out)
    row = table.set_index("method").loc["FedAvg"]
    last = [pd.read_json(out / "FedAvg" / f"seed-{s}" / "history.jsonl", lines=True).iloc[-1] for s in range(3)]
    for column in ("objective", "nonzeros"):
        values = [float(r[column]) for r in last]
        assert row[column] == pytest.approx(statistics.mean(values))
        assert row[f"{column} ±"] == pytest.approx(statistics.stdev(values))
    shown = joined(table)
    assert "±" in shown.set_index("method").loc["FedAvg", "objective"]
    text = (out / "comparison.tex").read_text()
    assert "standard deviation over seeds" in text
    assert text.count("\\\\") == 1 + len(table)
    assert "local\\_steps" in latex(table)


def test_layers_have_regularizers_of_their_own():
    base = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "clients": 3},
        "model": {"name": "mlp"},
        "run": {"rounds": 0},
    }
    terms = [
        {"name": "L1", "lam": 0.1, "on": "1.weight"},
        {"name": "GroupLasso", "lam": 0.2, "groups": "rows", "on": ["3.weight"]},
    ]
    config = Config.check({**base, "regularizer": terms})
    problem = config.make_problem()
    names = [slot[0] for slot in problem.layout]
    first, second = (next(s for s in problem.layout if s[0].endswith(e)) for e in ("1.weight", "3.weight"))
    assert len(names) > 2
    x = torch.randn(problem.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    W = x[second[1] : second[2]].reshape(second[3])
    rows = fc.regularizers.GroupLasso(0.2, "rows").for_shape(W.shape).value(W.flatten())
    expected = 0.1 * x[first[1] : first[2]].abs().sum() + rows
    assert float(problem.regularizer.value(x)) == pytest.approx(float(expected))
    assert Config.check(tomllib.loads(config.text)).regularizer == terms
    with pytest.raises(ConfigError, match=r"\[\[regularizer\]\] .* acts on all coordinates"):
        Config.check({**base, "regularizer": [terms[0], {"name": "L1", "lam": 0.1}]})
    with pytest.raises(ConfigError, match=r"\[\[regularizer\]\] 2:"):
        Config.check({**base, "regularizer": [terms[0], {"name": "L7"}]})
