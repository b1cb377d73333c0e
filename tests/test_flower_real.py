"""Flower's own SuperLink and SuperNodes as real processes: few exchanges, since each message is a process there."""

import json

import numpy as np
import pytest
import tomli_w
import torch

pytest.importorskip("flwr", reason="the extra [flower] is not installed")

from parties import SITES, Parties, model

import fedcomposite as fc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

METHODS = {
    "FedAvg": {"local_steps": 3, "step": 0.05},
    "Scaffold": {"local_steps": 3, "step": 0.05},
    "FedNMap": {"local_steps": 3, "step": 0.05, "gamma": 2.0},
}
LIMITS = "reproducible_parts = true\nforeign_reading = true\nparameter_share = 1.0\n"  # compared with files at hand
LONG = 1800.0  # an exchange takes some 15 s on a quiet machine


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    made = Parties(tmp_path_factory.mktemp("flower"), engine="flower")
    try:
        made.serve()
        for name in SITES:
            with (made.folder / "sites" / name / "site.toml").open("a") as file:
                file.write(LIMITS)
            made.join(name).wait_for("waiting for work")
        yield made
    finally:
        made.stop()


def test_three_methods_over_flower(parties):
    """The simulator's numbers, by Flower's public interface alone."""
    problem = fc.Problem(parties.silos)
    for name, fields in METHODS.items():
        run = {"rounds": 1, "stationarity_step": 1.0}
        config, out = parties.folder / f"{name}.toml", parties.folder / name
        config.write_text(tomli_w.dumps({"algorithm": {"name": name, **fields}, "run": run}))
        parties.run(f"run-{name}", config, "--out", out).ends(0, LONG)
        want = fc.simulate(problem, getattr(fc.algorithms, name)(**fields), **run, backend="loop")
        torch.testing.assert_close(model(out), want.solution, rtol=0, atol=1e-12)


def test_a_cross_validation_over_flower(parties):
    """The numbers of files at hand; squares need the fewest exchanges, 18."""
    folder, options = parties.folder, ["--folds", 2, "--count", 2, "--ratio", 0.5]
    content = {
        "data": {"files": [str(folder / f"{name}.csv") for name in SITES], "target": "label"},
        "problem": {"loss": "least_squares"},
        "regularizer": {"name": "L1", "lam": 0.1},
    }
    (folder / "cv.toml").write_text(tomli_w.dumps(content))
    asked = "cv", parties.fed.path, folder / "cv.toml", *options, "--out", folder / "there"
    parties.start("cv", *asked).ends(0, LONG)
    here = "cv", folder / "cv.toml", *options, "--out", folder / "here"
    parties.start("at-hand", *here, program=("fedcomposite",)).ends(0)
    found, want = (json.loads((folder / w / "analysis.json").read_text()) for w in ("there", "here"))
    for key in ("model", "lambda"):
        np.testing.assert_allclose(found[key], want[key], rtol=1e-10, atol=1e-10)
    for key in ("mean", "se"):
        np.testing.assert_allclose(found["cv"][key], want["cv"][key], rtol=1e-10)
    np.testing.assert_allclose(found["path"]["solutions"], want["path"]["solutions"], rtol=1e-10, atol=1e-10)
