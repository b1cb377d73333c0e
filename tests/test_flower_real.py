"""Flower's own SuperLink and SuperNodes as real processes: few exchanges, since each message is a process there."""

import json

import numpy as np
import pytest
import tomli_w
import torch

pytest.importorskip("flwr", reason="the extra [flower] is not installed")

from parties import SITES, Parties, model

import fedcomposite as fc

pytestmark = pytest.mark.slow

METHODS = {
    "FedAvg": {"local_steps": 3, "step": 0.05},
    "Scaffold": {"local_steps": 3, "step": 0.05},
    "FedNMap": {"local_steps": 3, "step": 0.05, "gamma": 2.0},
}


def test_three_methods_and_a_cross_validation_over_flower(tmp_path):
    """The simulator's numbers, by Flower's public interface alone; and those of files at hand."""
    parties = Parties(tmp_path, engine="flower")
    try:
        parties.serve()
        for name in SITES:
            with (tmp_path / "sites" / name / "site.toml").open("a") as file:
                file.write("reproducible_parts = true\n")  # the folds of files at hand
            parties.join(name).wait_for("waiting for work")
        problem = fc.Problem(parties.silos)
        for name, fields in METHODS.items():
            run = {"rounds": 1, "stationarity_step": 1.0}
            config, out = tmp_path / f"{name}.toml", tmp_path / name
            config.write_text(tomli_w.dumps({"algorithm": {"name": name, **fields}, "run": run}))
            parties.run(f"run-{name}", config, "--out", out).ends(0)
            want = fc.simulate(problem, getattr(fc.algorithms, name)(**fields), **run, backend="loop")
            torch.testing.assert_close(model(out), want.solution, rtol=0, atol=1e-12)
        files = [str(tmp_path / f"{name}.csv") for name in SITES]
        config, options = tmp_path / "cv.toml", ["--folds", 2, "--count", 2, "--ratio", 0.5]
        data = {"files": files, "target": "label"}
        config.write_text(tomli_w.dumps({"data": data, "regularizer": {"name": "L1", "lam": 0.1}}))
        parties.start("cv", "cv", parties.fed.path, config, *options, "--out", tmp_path / "there").ends(0)
        program = {"program": ("fedcomposite",)}
        parties.start("at-hand", "cv", config, *options, "--out", tmp_path / "here", **program).ends(0)
        there, here = (json.loads((tmp_path / w / "analysis.json").read_text()) for w in ("there", "here"))
        for key in ("model", "lambda"):
            np.testing.assert_allclose(there[key], here[key], rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(there["cv"]["mean"], here["cv"]["mean"], rtol=1e-10)
    finally:
        parties.stop()
