"""The command line, as a user meets it: real processes, real folders, right and wrong."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors import safe_open

from fedcomposite.cli.data import whereabouts
from fedcomposite.experiments import Config, ConfigError, RunFolder, execute
from fedcomposite.experiments.toml import shipped

# These steps are practical ones; that the command says so is tested once, in a process of its own.
pytestmark = pytest.mark.filterwarnings("ignore:.*leaves its proven range")

CONFIG = """
name = "small"
[data]
name = "synthetic"
clients = 6
features = 8
samples = 30
[regularizer]
name = "l1"
lam = 0.003
[algorithm]
name = "Scaffold"
local_steps = 4
step = 0.5
[run]
rounds = 40
batch_size = 5
participation = 0.5
checkpoint_every = 7
"""


def command(*arguments, check=None, **kwargs):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "fedcomposite", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        **kwargs,
    )
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def history(folder):
    return [{**json.loads(line), "seconds": 0} for line in (folder / "history.jsonl").read_text().splitlines()]


def solution(folder):
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return file.get_tensor("x")


def test_run_leaves_a_whole_folder(config, tmp_path, cli):
    done = command("run", config, "--out", tmp_path / "r", check=0)
    folder = tmp_path / "r"
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "config.toml", "history.jsonl", "model.safetensors", "summary.json", "plot.png", "checkpoint.safetensors",
        "coefficients.csv",
    }  # fmt: skip
    assert "all 40 rounds done" in done.stdout
    assert "warning: Scaffold leaves its proven range: " in done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["last"]["round"] == 40
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(history(folder)) == 41
    table = pd.read_csv(folder / "coefficients.csv")
    assert np.count_nonzero(solution(folder)) == len(table)
    again = Config.read(folder / "config.toml")  # the resolved config runs again, to the same numbers
    assert again.algorithm == {"name": "Scaffold", "local_steps": 4, "step": 0.5, "server_step": 1.0, "option": 2}
    cli("run", folder / "config.toml", "--out", tmp_path / "s", check=0)
    assert history(tmp_path / "s") == history(folder)


def test_overrides(config, tmp_path, cli):
    cli("run", config, "--out", tmp_path / "r", "--set", "algorithm.step=0.25", "--set", "run.rounds=3", check=0)
    resolved = Config.read(tmp_path / "r" / "config.toml")
    assert resolved.algorithm["step"] == 0.25
    assert resolved.run.rounds == 3


def test_a_folder_is_never_overwritten_by_accident(config, tmp_path, cli):
    cli("run", config, "--out", tmp_path / "r", "--set", "run.rounds=1", check=0)
    done = cli("run", config, "--out", tmp_path / "r", check=2)
    assert "already holds files" in done.err
    cli("run", config, "--out", tmp_path / "r", "--overwrite", "--set", "run.rounds=2", check=0)
    assert len(history(tmp_path / "r")) == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("ten years of work")
    done = cli("run", config, "--out", tmp_path / "mine", "--overwrite", check=2)
    assert "not a run folder" in done.err
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "ten years of work"


MORTAL = """
import os, signal, sys
from pathlib import Path
from fedcomposite.experiments import Config, RunFolder, execute

source, folder, last, changes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
real = os.replace

def replace(scratch, target):
    global changes
    if Path(target).name == "checkpoint.safetensors":
        changes -= 1
        if changes == 0:  # the new one is written, the old one still in its place
            os.kill(os.getpid(), signal.SIGKILL)
    real(scratch, target)

def watch(record):
    if record["round"] >= last:
        os.kill(os.getpid(), signal.SIGKILL)

os.replace = replace
execute(Config.read(source), RunFolder(folder), watch=watch)
"""


@pytest.mark.slow
def test_sigkill_then_resume_is_bit_identical(config, tmp_path, cli):
    """Killed after a record, then while it replaces its checkpoint; compare with a run that was left alone."""
    text = CONFIG.replace("rounds = 40", "rounds = 300\nevaluate_every = 3")
    config.write_text(text)
    cli("run", config, "--out", tmp_path / "whole", check=0)
    folder = tmp_path / "killed"
    chance = random.Random(5)
    for source, last, changes in ((config, chance.randrange(30, 120), 0), (folder / "config.toml", 1000, 7)):
        arguments = [sys.executable, "-c", MORTAL, str(source), str(folder), str(last), str(changes)]
        assert subprocess.run(arguments, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
        assert not (folder / "summary.json").exists()
        assert history(folder) == history(tmp_path / "whole")[: len(history(folder))]
    assert len(list(folder.glob(".checkpoint.safetensors.*.tmp"))) == 1
    cli("run", "--resume", folder, check=0)
    assert history(folder) == history(tmp_path / "whole")
    assert np.array_equal(solution(folder), solution(tmp_path / "whole"))
    assert {p.name for p in folder.iterdir()} == {
        p.name for p in (tmp_path / "whole").iterdir()
    }  # nothing is left over


def test_ctrl_c_leaves_a_usable_folder(config, tmp_path, cli):
    folder = tmp_path / "r"
    settings = ["--set", "run.rounds=1000000", "--set", "run.evaluate_every=50"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedcomposite", "run", str(config), "--out", str(folder), *settings],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint.safetensors").exists():
        assert process.poll() is None, process.communicate()
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate())
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "--resume" in stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["rounds"] > 0
    assert (folder / "plot.png").exists()
    assert solution(folder).shape == (8,)
    done = cli("run", "--resume", folder, "--set", f"run.rounds={summary['rounds'] + 5}", check=0)
    assert "rounds done" in done.out


def test_compare_table_seeds_plot_and_resume(config, tmp_path, cli):
    text = (
        CONFIG.replace("[algorithm]", "[[algorithms]]")
        + "\n[[algorithms]]\nname = 'FedAvg'\nlocal_steps = 4\nstep = 0.5\n"
    )
    config.write_text(text.replace('name = "small"', 'name = "small"\nseeds = [0, 1, 2]'))
    folder = tmp_path / "c"
    done = cli("compare", config, "--out", folder, check=0)
    assert "Scaffold" in done.out
    assert "±" in done.out
    table = pd.read_csv(folder / "comparison.csv")
    assert list(table["method"]) == ["Scaffold", "FedAvg"]
    assert (table["objective ±"] > 0).all()
    assert (folder / "plot.png").stat().st_size > 10_000
    finals = [history(folder / "FedAvg" / f"seed-{s}")[-1]["objective"] for s in range(3)]
    assert len(set(finals)) == 3
    assert table["objective"][1] == pytest.approx(np.mean(finals))
    before = (folder / "FedAvg" / "seed-0" / "history.jsonl").read_text()
    (folder / "Scaffold" / "seed-1" / "summary.json").unlink()
    cli("compare", "--resume", folder, check=0)
    assert (folder / "FedAvg" / "seed-0" / "history.jsonl").read_text() == before
    pd.testing.assert_frame_equal(
        pd.read_csv(folder / "comparison.csv").drop(columns="seconds"), table.drop(columns="seconds")
    )
    cli("plot", folder, "--out", tmp_path / "p.png", check=0)
    cli("plot", folder / "FedAvg" / "seed-0", folder / "Scaffold" / "seed-1", "--out", tmp_path / "q.png", check=0)
    assert (tmp_path / "p.png").exists()
    assert (tmp_path / "q.png").exists()


def test_steps_auto(config, tmp_path, cli):
    config.write_text(CONFIG.replace("step = 0.5", 'steps = "auto"'))
    cli("run", config, "--out", tmp_path / "r", "--set", "run.rounds=2", check=0)
    assert Config.read(tmp_path / "r" / "config.toml").algorithm["step"] > 0


def test_divergence_is_exit_code_1_with_history(config, tmp_path, cli):
    text = CONFIG.replace('name = "synthetic"\nclients = 6\nfeatures = 8\nsamples = 30', 'name = "diabetes"')
    text = text.replace(
        "[regularizer]", '[partition]\nname = "iid"\nclients = 6\n[problem]\nloss = "least_squares"\n[regularizer]'
    )
    config.write_text(text)
    done = cli(
        "run", config, "--out", tmp_path / "r", "--set", "algorithm.step=100.0", "--set", "run.rounds=500", check=1
    )
    assert "step is probably too large" in done.err
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "diverged"
    assert history(tmp_path / "r")


WRONG = {
    "unknown algorithm": (("Scaffold", "Scafold"), r"unknown algorithm 'Scafold'; did you mean 'Scaffold'?"),
    "misspelt field": (("step = 0.5", "stepp = 0.5"), r"Scaffold has no field 'stepp'; did you mean 'step'?"),
    "negative step": (("step = 0.5", "step = -0.5"), r"Scaffold: step = -0.5, must be a number > 0"),
    "step as text": (("step = 0.5", 'step = "big"'), r"Scaffold: step = 'big', must be a number > 0"),
    "missing field": (("local_steps = 4\n", ""), r"Scaffold needs local_steps (an integer >= 1)"),
    "unknown section field": (
        ("rounds = 40", "rounds = 40\nround = 1"), r"[run] round is not a known field; did you mean",
    ),
    "negative rounds": (("rounds = 40", "rounds = -40"), r"[run] rounds = -40"),
    "wrong type": (("rounds = 40", 'rounds = "many"'), r"[run] rounds = 'many'"),
    "participation above one": (("participation = 0.5", "participation = 1.5"), r"[run] participation = 1.5"),
    "unknown regularizer": (('"l1"', '"l7"'), r"[regularizer] unknown regularizer 'l7'"),
    "negative lam": (("lam = 0.003", "lam = -1"), r"[regularizer] L1: lam = -1"),
    "unknown data": (('"synthetic"', '"synthetik"'), r"[data] unknown data set 'synthetik'; did you mean 'synthetic'?"),
    "unknown data option": (("clients = 6", "client = 6"), r"has no option 'client'; did you mean 'clients'?"),
    "unknown section": (("[run]", "[running]\nx = 1\n[run]"), r"running is not a known field; did you mean 'run'?"),
    "broken TOML": (("[run]", "[run"), r"not valid TOML"),
    "unknown loss": (
        ("[regularizer]", '[problem]\nloss = "logistik"\n[regularizer]'), r"unknown loss 'logistik'; did you",
    ),
    "partial not supported": (('"Scaffold"', '"Zhang"'), r"Zhang needs every client in every round"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_configs_are_one_clear_line(config, tmp_path, name, cli):
    (old, new), message = WRONG[name]
    assert old in CONFIG
    config.write_text(CONFIG.replace(old, new))
    stderr = cli("run", config, "--out", tmp_path / "r", check=2).err
    assert message in stderr
    assert len(stderr.strip().splitlines()) == 1


FILES = {
    "NaN in data": ("a,b,y\n1,2,1\n,3,-1\n", r"column 'a' has 1 missing value(s), the first in data row 1"),
    "infinite": ("a,b,y\n1,inf,1\n2,3,-1\n", r"NaN or infinite, the first in row 0, column 1"),
    "empty silo": ("a,b,y\n", r"empty silo"),
    "no header at all": ("", r"not a readable CSV"),
    "mismatched widths": ("a,b,c,y\n1,2,3,1\n1,2,3,-1\n", r"columns differ from the first file's: c"),
    "no target": ("a,b,z\n1,2,1\n", r"no column 'y'"),
    "text": ("a,b,y\nx,2,1\ny,2,-1\n", r"column 'a' is not numeric"),
    "labels of three kinds": ("a,b,y\n1,2,1\n1,3,-1\n1,3,2\n", r"found 3 kinds: -1, 1, 2"),
}


@pytest.mark.parametrize("name", FILES)
def test_wrong_data_is_one_clear_line(tmp_path, name, cli):
    content, message = FILES[name]
    (tmp_path / "good.csv").write_text("a,b,y\n1,2,1\n2,3,-1\n")
    (tmp_path / "bad.csv").write_text(content)
    config = tmp_path / "c.toml"
    config.write_text(
        '[data]\nfiles = ["good.csv", "bad.csv"]\ntarget = "y"\n[algorithm]\nname = "FedAvg"\nlocal_steps = 1\n'
        "step = 0.1\n"
        "[run]\nrounds = 1\n"
    )
    stderr = cli("run", config, "--out", tmp_path / "r", check=2).err
    assert message in stderr
    assert len(stderr.strip().splitlines()) == 1


def test_csv_silos_run_with_names(tmp_path, cli):
    rng = np.random.default_rng(0)
    for site in ("north", "south"):
        frame = pd.DataFrame(rng.normal(size=(30, 3)), columns=["age", "dose", "noise"])
        frame["sick"] = (frame["dose"] > 0).astype(int)
        frame.to_csv(tmp_path / f"{site}.csv", index=False)
    (tmp_path / "c.toml").write_text(
        '[data]\nfiles = ["north.csv", "south.csv"]\ntarget = "sick"\n[problem]\nbias = true\n'
        '[regularizer]\nname = "L1"\n'
        'lam = 0.05\n[algorithm]\nname = "FedNMap"\nsteps = "auto"\n[run]\nrounds = 300\ntolerance = 1e-9\n'
    )
    done = cli("run", tmp_path / "c.toml", "--out", tmp_path / "r", check=0)
    assert "dose" in done.out
    table = pd.read_csv(tmp_path / "r" / "coefficients.csv").set_index("name")["coefficient"]
    assert table.index[0] == "dose"
    assert "(intercept)" in table


def test_usage_errors(tmp_path, config, cli):
    for arguments in (["run"], ["run", "nowhere.toml"], ["list", "spoons"], ["frobnicate"], ["plot", tmp_path],
                      ["run", "--resume", tmp_path], ["run", config, "--set", "no"], ["compare", "demos"]):  # fmt: skip
        cli(*arguments, check=2)
    assert "did you mean 'demo'" in cli("compare", "demos", check=2).err


def test_identical_runs_leave_identical_models(config, tmp_path, monkeypatch):
    monkeypatch.setattr("fedcomposite.plots.draw_histories", lambda *_, **__: None)
    folder = RunFolder(tmp_path / "r")
    experiment = Config.read(config, ["run.rounds=2"])
    problem = experiment.make_problem()
    result = execute(experiment, folder, problem)
    files = set()
    for _ in range(12):
        folder.finish(result, problem, "Scaffold")
        files.add((folder.path / "model.safetensors").read_bytes())
    assert len(files) == 1
    with safe_open(folder.path / "model.safetensors", framework="np") as file:
        assert len(json.loads(file.metadata()["coordinates"])) == 8
        assert np.array_equal(file.get_tensor("x"), result.solution.numpy())


@pytest.mark.parametrize(("engine", "package"), [("nvflare", "nvflare"), ("flower", "flwr")])
def test_a_federation_says_what_its_engine_needs(cli, monkeypatch, tmp_path, engine, package):
    """The command itself is always there, with sites on one machine; an engine that is not installed says how it is."""
    assert "A real federation, over NVIDIA FLARE or Flower." in " ".join(cli("--help", check=0).out.split())
    for name in [package, "yaml", *(n for n in sys.modules if n.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    said = cli("federation", "init", tmp_path / "fed", "--sites", "a,b", "--engine", engine, check=1).err
    extra = {"nvflare": "federation", "flower": "flower"}[engine]
    assert f"pip install 'fedcomposite[{extra}]'" in " ".join(said.split())
    cli("federation", "init", tmp_path / "here", "--sites", "a,b", "--engine", "local", check=0)


def test_listed_texts_are_whole_sentences_and_regularizers_show_their_fields(cli):
    shown = cli("list", "regularizers", check=0).out
    for words in ("lam, a = 3.7", "l1, l2"):
        assert words in shown
    for what in ("regularizers", "datasets", "partitions", "losses", "models"):
        rows = [line.strip("│ ").split("│") for line in cli("list", what, check=0).out.splitlines() if "│" in line]
        for cells in rows[1:]:
            said = cells[1].strip()
            assert said
            assert said[-1] not in ",;:"
            assert said.rpartition(" ")[2] not in ("a", "the", "of", "and", "with", "to", "is", "as", "in", "by")
            assert said.count("(") == said.count(")")


def test_lists_and_version(cli):
    assert "FedNMap" in cli("list", "algorithms", check=0).out
    assert "demo" in cli("list", "experiments", check=0).out
    assert "dirichlet" in cli("list", "partitions", check=0).out
    assert "MCP" in cli("list", "regularizers", check=0).out
    assert "breast_cancer" in cli("list", "datasets", check=0).out
    assert "logistic" in cli("list", "losses", check=0).out
    assert cli("--version", check=0).out.strip() == "0.2.0"


def test_describe_prints_and_draws(tmp_path, cli):
    done = cli("data", "describe", "demo", "--plot", tmp_path / "d.png", check=0)
    assert "label skew" in done.out
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", shipped())
def test_shipped_experiments_run_for_two_rounds(name, tmp_path, cli):
    config = Config.read(name)
    if "to download" in whereabouts(config.data["name"]):
        pytest.skip(f"{name} needs {config.data['name']}: set FEDCOMPOSITE_DATA, or fetch it once")
    verb = "compare" if config.algorithms else "run"
    few = ["--set", "model.evaluation_samples=100"] if config.model is not None else []
    cli(verb, name, "--out", tmp_path / "r", "--set", "run.rounds=2", *few, check=0)


def test_config_check_is_usable_from_python():
    with pytest.raises(ConfigError, match="config: run is missing"):
        Config.check({"data": {"name": "synthetic"}})
    with pytest.raises(ConfigError, match="is not a known field"):  # a section and a field without a name
        Config.check({"data": {"name": "synthetic"}, "run": {"rounds": 1}, "": {"": False}})


def test_readme_is_about_this_version():
    readme = Path(__file__).parent.parent / "README.md"
    assert "make demo" in readme.read_text()


def test_overwriting_a_comparison_with_unusable_data_keeps_the_old_one(tmp_path, cli):
    (tmp_path / "a.csv").write_text("x,y\n1,1\n2,-1\n")
    text = '[data]\nfiles = ["a.csv"]\ntarget = "y"\n[[algorithms]]\nname = "FedAvg"\nlocal_steps = 1\nstep = 0.1\n'
    (tmp_path / "c.toml").write_text(text + "[run]\nrounds = 2\n")
    cli("compare", tmp_path / "c.toml", "--out", tmp_path / "old", check=0)
    (tmp_path / "a.csv").write_text("x,y\n1,1\n,-1\n")
    cli("compare", tmp_path / "c.toml", "--out", tmp_path / "old", "--overwrite", check=2)
    assert (tmp_path / "old" / "comparison.csv").exists()
    assert len(history(tmp_path / "old" / "FedAvg" / "seed-0")) == 3
