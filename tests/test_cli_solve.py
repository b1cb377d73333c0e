"""``fedcomposite solve`` and ``[algorithm] name = "auto"``."""

import json

import pytest
import typer
from typer.testing import CliRunner

from fedcomposite.cli.solving import solve_command
from fedcomposite.experiments import Config
from fedcomposite.experiments.config import ConfigError

TEXT = """
[data]
name = "synthetic"
clients = 5
features = 6
samples = 20
[regularizer]
name = "L1"
lam = 0.02
[run]
rounds = 20
"""


@pytest.fixture
def invoke(tmp_path):
    app = typer.Typer()
    app.command()(solve_command)
    path = tmp_path / "problem.toml"
    path.write_text(TEXT)
    return lambda *options: CliRunner().invoke(app, [str(path), *options])


def test_the_answer_its_certificate_and_a_folder(invoke, tmp_path):
    done = invoke("--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    for part in ("ProxNewton, since the model is linear", "(duality gap)", "objective 0.", "written:"):
        assert part in done.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"] == "converged"
    assert "duality gap" in summary["message"]
    again = Config.read(tmp_path / "out" / "config.toml")
    assert type(again.make_algorithm(again.specs[0], again.make_problem())).__name__ == "ProxNewton"


def test_what_is_not_solved_says_so_in_the_exit_code(invoke):
    done = invoke("--rounds", "1")
    assert done.exit_code == 3
    assert done.output.startswith("NOT CONVERGED")


def test_auto_in_a_configuration():
    config = Config.check({"data": {"name": "synthetic"}, "algorithm": {"name": "auto"}, "run": {"rounds": 5}})
    assert config.labels == ["auto"]
    partial = config.model_copy(update={"run": config.run.model_copy(update={"participation": 0.5})})
    for made, name in ((config, "ProxNewton"), (partial, "FedNMap")):
        assert type(made.make_algorithm(made.specs[0], made.make_problem())).__name__ == name
    with pytest.raises(ConfigError, match="name = 'auto' chooses 'step' itself"):
        Config.check({"data": {"name": "synthetic"}, "algorithm": {"name": "auto", "step": 0.1}, "run": {"rounds": 5}})
