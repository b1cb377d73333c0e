"""Flower's own SuperLink and SuperNodes as real processes: few rounds, since each message is a process there."""

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


def test_three_methods_over_flower(tmp_path):
    """The simulator's numbers, by Flower's public interface alone."""
    parties = Parties(tmp_path, engine="flower")
    try:
        parties.serve()
        for name in SITES:
            parties.join(name).wait_for("waiting for work")
        problem = fc.Problem(parties.silos)
        for name, fields in METHODS.items():
            run = {"rounds": 1, "stationarity_step": 1.0}
            config, out = tmp_path / f"{name}.toml", tmp_path / name
            config.write_text(tomli_w.dumps({"algorithm": {"name": name, **fields}, "run": run}))
            parties.run(f"run-{name}", config, "--out", out).ends(0)
            want = fc.simulate(problem, getattr(fc.algorithms, name)(**fields), **run, backend="loop")
            torch.testing.assert_close(model(out), want.solution, rtol=0, atol=1e-12)
    finally:
        parties.stop()
