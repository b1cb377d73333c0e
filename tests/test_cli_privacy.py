"""Privacy and robust means from the command line and in experiments."""

import json

import pytest

from fedcomposite.cli import main
from fedcomposite.experiments import Config, ConfigError
from fedcomposite.privacy import noise_for

BASE = """
[data]
name = "synthetic"
clients = 5
features = 4
samples = 20
[algorithm]
name = "FedAvg"
local_steps = 2
step = 0.05
[run]
rounds = 4
"""


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["fedcomposite", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0), " ".join(capsys.readouterr())


def test_the_noise_that_an_epsilon_needs(monkeypatch, capsys):
    code, text = call(monkeypatch, capsys, "privacy", "--epsilon", "2", "--delta", "1e-5", "--rounds", "100")
    assert code == 0
    assert f"noise = {noise_for(epsilon=2, delta=1e-5, queries=100):.2f}" in text
    code, text = call(monkeypatch, capsys, "privacy", "--noise", "20", "--rounds", "100", "--samples", "50")
    assert "epsilon = 1.993" in text
    assert "deviation 0.4 per coordinate" in text
    assert call(monkeypatch, capsys, "privacy", "--rounds", "5")[0] == 2
    assert call(monkeypatch, capsys, "privacy", "--rounds", "5", "--epsilon", "-1")[0] == 2


def test_an_experiment_with_both(monkeypatch, capsys, tmp_path):
    file = tmp_path / "e.toml"
    robust = BASE.replace("rounds = 4", 'rounds = 4\naggregator = { name = "trimmedmean", trim = 1 }')
    file.write_text(robust + "[privacy]\nclip = 1.0\nnoise = 2.0\nrate = 0.5\n")
    code, text = call(monkeypatch, capsys, "run", str(file), "--out", str(tmp_path / "run"))
    assert code == 0, text
    assert "epsilon" in text
    last = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert last["last"]["epsilon"] > 0
    assert {"privacy", "aggregator"} <= last["identity"].keys()
    again = Config.read(tmp_path / "run" / "config.toml")
    assert again.make_privacy().rate == 0.5
    assert again.make_aggregator().trim == 1
    assert call(monkeypatch, capsys, "solve", str(file))[0] == 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("[privacy]\nclip = 1.0\n", "SampleLevel needs noise"),
        ("[privacy]\nclip = 1.0\nnoise = 1.0\nlevel = 'room'\n", "level = 'room'"),
        ("[privacy]\nclip = 1.0\nnoise = 1.0\nepsilon = 3\n", "has no field 'epsilon'"),
        ("aggregator = { name = 'TrimedMean' }\n", "did you mean 'TrimmedMean'"),
    ],
)
def test_mistakes_are_named(more, words, tmp_path):
    file = tmp_path / "e.toml"
    file.write_text(BASE + more)
    with pytest.raises(ConfigError, match=words):
        Config.read(file)
