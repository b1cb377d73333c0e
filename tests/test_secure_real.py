"""Secure sums between real processes: TLS, keys made at the sites, a site that is killed and comes back."""

import json
import os
import shutil

import pandas as pd
import pytest
import tomli_w
import torch

pytest.importorskip("nvflare", reason="the extra [federation] is not installed")

from parties import SITES, Parties, leave, model, records

import fedcomposite as fc
from fedcomposite.federation.engines import pki
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.site.enrolment import make_request
from fedcomposite.federation.site_folders import SiteFolder

pytestmark = pytest.mark.slow

CONFIG = {
    "algorithm": {"name": "Scaffold", "local_steps": 20, "step": 5e-3},
    "run": {"rounds": 4, "stationarity_step": 1.0, "batch_size": 20},
}


@pytest.fixture
def parties(tmp_path):
    """A federation whose coordinator has never had a site's private key."""

    class Enrolled(Parties):
        def __init__(self, folder):
            self.folder, self.others, self.server, self.sites, self.small = folder, [], None, {}, False
            self.silos = fc.data.load("synthetic", clients=3, features=20, samples=1500, seed=3)
            self.fed = FederationFolder.create(folder / "fed", "127.0.0.1", 0, SITES, keys=False)
            self.places = {name: folder / "hospital" / name for name in SITES}
            for name, place in self.places.items():
                self.fed.admit(*pki.read_request(make_request(place, name)))
            for i, (name, place) in enumerate(self.places.items()):
                shutil.copytree(self.fed.path / "sites" / name, place, dirs_exist_ok=True)
                X, y = self.silos[i]
                frame = pd.DataFrame(X.numpy(), columns=[f"f{j}" for j in range(20)]).assign(label=y.numpy())
                frame.to_csv(folder / f"{name}.csv", index=False)
                with (place / "site.toml").open("a") as file:
                    file.write('reproducible_batches = true\nexact_counts = true\nsecure = "required"\n')
            (folder / "config.toml").write_text(tomli_w.dumps(CONFIG))

    made = Enrolled(tmp_path)
    try:
        made.serve()
        for name, place in made.places.items():
            made.join(name, place)
        for site in made.sites.values():
            site.wait_for("waiting for work")
        yield made
    finally:
        made.stop()


def test_a_secure_federation_equals_the_simulator(parties, monkeypatch):
    """One run left alone, one whose site is killed in a round, and one without --secure, which the sites refuse."""
    problem = fc.Problem(parties.silos)
    spec = {k: v for k, v in CONFIG["algorithm"].items() if k != "name"}
    want = fc.simulate(problem, fc.algorithms.Scaffold(**spec), **CONFIG["run"], backend="loop")
    assert not list(parties.fed.path.rglob("site.key"))
    config, out = parties.folder / "config.toml", parties.folder / "whole"
    parties.run("run-whole", config, "--secure", "--out", out).ends(0)
    torch.testing.assert_close(model(out), want.solution, rtol=0, atol=1e-9)
    for a, b in zip(records(out), want.history, strict=True):
        assert a["objective"] == pytest.approx(b["objective"], abs=1e-9)
        assert a["train_accuracy"] == pytest.approx(b["train_accuracy"], abs=1e-12)
        assert (a["bytes_up"], a["gradient_evaluations"]) == (b["bytes_up"], b["gradient_evaluations"])

    disturbed = parties.folder / "disturbed"
    south = parties.join("south", parties.places["south"], held=("after", 2))
    south.wait_for("waiting for work")
    run = parties.run("run-disturbed", config, "--secure", "--out", disturbed)
    south.wait_for("held in round 2")
    south.kill()
    parties.join("south", parties.places["south"])
    said = run.ends(0)
    assert "asked again, with fresh masks" in said
    torch.testing.assert_close(model(disturbed), want.solution, rtol=0, atol=1e-9)

    refused = parties.run("run-plain", config, "--out", parties.folder / "plain").ends(1)
    assert "takes part in secure sums only" in " ".join(refused.split())
    leave(list(parties.sites.values()))
    for name, place in parties.places.items():
        folder = SiteFolder(place)
        lines = (folder.state / "audit.jsonl").read_text().splitlines()
        assert len(lines) == json.loads((folder.state / "audit.head").read_text())["lines"]
        parties.start(f"audit-{name}", "audit", place).ends(0)
        assert os.stat(folder.state / "audit.jsonl").st_mode & 0o077 == 0
