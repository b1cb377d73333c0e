"""The best model of a run, chosen by a recorded number, and a validation part to choose it by."""

import json

import numpy as np
import pytest
import safetensors.torch
import tomli_w
import torch
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite.algorithms import FedAvg, Scaffold
from fedcomposite.cli.main import app
from fedcomposite.runtime.callbacks import BestModel, EarlyStopping
from fedcomposite.testing import small_problem

SETTINGS = {"rounds": 12, "batch_size": 3, "evaluate_every": 2}


@pytest.fixture
def problem():
    silos = fc.data.load("synthetic", clients=4, features=5, samples=30).split(0.2, validation=0.2, stratify=True)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    return fc.Problem(silos, model=module, metrics=["log_loss"])


@pytest.mark.parametrize("metric", ["validation_accuracy", "validation_log_loss", "objective", "train_accuracy"])
def test_it_is_the_first_best_record_with_its_buffers(problem, metric, tmp_path):
    """By definition, from a run that keeps everything; resumed from any checkpoint it is the same to the bit."""
    method = Scaffold(2, 0.3)
    best = BestModel(metric)
    run = fc.simulate(problem, method, **SETTINGS, callbacks=[best])
    values = [r[metric] for r in run.history]
    at = int(np.argmax(values) if metric.endswith("accuracy") else np.argmin(values))
    assert (run.best.round, run.best.value, run.best.metric) == (2 * at, values[at], metric)
    there = fc.simulate(problem, method, **{**SETTINGS, "rounds": 2 * at})
    assert torch.equal(run.best.solution, there.solution)
    assert torch.equal(run.best.buffers, there.buffers)
    assert f"best {metric}" in run.message
    for rounds in (4, 8, 12):
        parts = fc.simulate(
            problem, method, **{**SETTINGS, "rounds": rounds}, callbacks=[best], checkpoint=tmp_path / "c", resume=True
        )
    assert parts.best[:3] == run.best[:3]
    assert torch.equal(parts.best.solution, run.best.solution)
    assert torch.equal(parts.best.buffers, run.best.buffers)
    with pytest.raises(ValueError, match="chosen by"):
        fc.simulate(problem, method, **SETTINGS, callbacks=[BestModel("loss")], checkpoint=tmp_path / "c", resume=True)


def test_it_works_beside_early_stopping_and_is_not_there_without_it(problem):
    watchers = [BestModel("validation_log_loss"), EarlyStopping("validation_log_loss", patience=2)]
    run = fc.simulate(problem, FedAvg(3, 2.0), **{**SETTINGS, "rounds": 60}, callbacks=watchers)
    assert run.status == "stopped"
    assert run.best.round == run.rounds - 4
    assert fc.simulate(problem, FedAvg(3, 0.1), **SETTINGS).best is None


def test_what_cannot_decide_is_refused():
    problem = small_problem(FedAvg(2, 0.1))
    with pytest.raises(ValueError, match="BestModel: no 'validation_accuracy' in the records"):
        fc.simulate(problem, FedAvg(2, 0.1), rounds=2, callbacks=[BestModel("validation_accuracy")])
    with pytest.raises(ValueError, match="one metric decides"):
        fc.simulate(problem, FedAvg(2, 0.1), rounds=2, callbacks=[BestModel("loss"), BestModel("objective")])
    private = fc.privacy.SampleLevel(clip=1.0, noise=1.0, rate=0.5)
    with pytest.raises(ValueError, match="leave tolerance, EarlyStopping and BestModel out"):
        fc.simulate(problem, FedAvg(2, 0.1), rounds=2, callbacks=[BestModel("loss")], privacy=private)


def test_a_run_folder_has_it_and_export_takes_it(tmp_path):
    content = {
        "data": {"name": "synthetic", "clients": 3, "features": 5, "samples": 30, "test": 0.2, "validation": 0.2},
        "algorithm": {"name": "FedAvg", "local_steps": 3, "step": 5.0},
        "callbacks": [{"name": "BestModel", "metric": "validation_accuracy"}],
        "run": {"rounds": 9, "batch_size": 3},
    }
    (tmp_path / "e.toml").write_text(tomli_w.dumps(content))
    runner = CliRunner()
    done = runner.invoke(app, ["run", str(tmp_path / "e.toml"), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["best"]
    records = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    values = [r["validation_accuracy"] for r in records]
    assert told == {"round": int(np.argmax(values)), "metric": "validation_accuracy", "value": max(values)}
    kept = safetensors.torch.load_file(tmp_path / "run" / "best.safetensors")["x"]
    last = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")["x"]
    assert not torch.equal(kept, last)
    out = tmp_path / "m.safetensors"
    args = ["export", str(tmp_path / "run"), "--format", "safetensors", "--out", str(out)]
    assert runner.invoke(app, [*args, "--best"]).exit_code == 0
    assert torch.equal(torch.cat([t.flatten() for t in safetensors.torch.load_file(out).values()]), kept)
    (tmp_path / "run" / "best.safetensors").unlink()
    assert "BestModel" in str(runner.invoke(app, [*args, "--best"]).exception)


def test_a_stratified_split_keeps_the_labels_shares():
    generator = np.random.default_rng(0)
    y = [generator.integers(0, 4, size) for size in (41, 97, 200)]
    silos = fc.Silos.from_arrays([(np.arange(len(v), dtype=float)[:, None], v) for v in y])
    parts = silos.split(0.2, seed=3, validation=0.1, stratify=True)
    for i, v in enumerate(y):
        seen = [parts[i][1], *(parts.held_out[p][1][parts.held_by[p] == i] for p in ("test", "validation"))]
        rows = [parts[i][0], *(parts.held_out[p][0][parts.held_by[p] == i] for p in ("test", "validation"))]
        assert sorted(torch.cat(rows).flatten().tolist()) == list(range(len(v)))  # everything once
        for part, share in zip(seen, (0.7, 0.2, 0.1), strict=True):
            counts = np.bincount(part.long().numpy(), minlength=4)
            assert np.abs(counts - share * np.bincount(v, minlength=4)).max() < 2
    again = silos.split(0.2, seed=3, validation=0.1, stratify=True)
    other = silos.split(0.2, seed=4, validation=0.1, stratify=True)
    assert torch.equal(parts.features, again.features)
    assert not torch.equal(parts.features, other.features)
