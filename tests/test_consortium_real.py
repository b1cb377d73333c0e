"""A consortium that runs FLARE already: kits of ``nvflare provision``, its own server, clients and administrator."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import tomli_w
import torch

pytest.importorskip("nvflare", reason="the extra [federation] is not installed")

import yaml
from parties import PATIENCE, Party, leave, model

import fedcomposite as fc
from fedcomposite.federation.engines.nvflare import administration
from fedcomposite.federation.folders import FederationFolder, free_port

pytestmark = pytest.mark.slow

SITES = ["north", "south"]
ADMIN = "lead@hub.example"
METHOD = {"local_steps": 3, "step": 0.05}
ALLOWED = "fedcomposite.federation.engines.nvflare_job."
BUILDERS = {
    "workspace.WorkspaceBuilder": {},
    "static_file.StaticFileBuilder": {"config_folder": "config", "scheme": "grpc"},
    "cert.CertBuilder": {},
    "signature.SignatureBuilder": {},
}


def provision(folder, port):
    """What the consortium made long ago, with FLARE's own command; its kits by their owners."""
    server = {"name": "hub.example", "type": "server", "org": "hub", "fed_learn_port": port, "admin_port": port}
    server |= {"default_host": "127.0.0.1", "host_names": ["127.0.0.1"]}
    clients = [{"name": name, "type": "client", "org": "hospitals"} for name in SITES]
    lead = {"name": ADMIN, "type": "admin", "org": "hub", "role": "project_admin"}
    builders = [{"path": f"nvflare.lighter.impl.{name}", "args": args} for name, args in BUILDERS.items()]
    content = {"api_version": 3, "name": "consortium", "description": "", "participants": [server, *clients, lead]}
    (folder / "project.yml").write_text(yaml.safe_dump({**content, "builders": builders}))
    command = [Path(sys.executable).parent / "nvflare", "provision", "-p", "project.yml", "-w", "kits"]
    subprocess.run(list(map(str, command)), cwd=folder, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    (place,) = (folder / "kits" / "consortium").glob("prod_*")
    return {path.name: path for path in place.iterdir()}


def allow(kit, gated=False):
    """What a consortium adds to a kit: classes that jobs may name, and who judges jobs before they are deployed."""
    content = json.loads((kit / "local" / "resources.json.default").read_text())
    content["class_allow_list"].append(ALLOWED)
    if gated:
        content["components"].append({"id": "app_deployer", "path": f"{ALLOWED}JobGate", "args": {}})
    (kit / "local" / "resources.json").write_text(json.dumps(content))


@contextlib.contextmanager
def started(kit, log, **variables):
    """A party of the consortium's, by the script in its kit."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("ab") as file:
        made = subprocess.Popen(
            ["bash", str(kit / "startup" / "sub_start.sh")], env={**os.environ, "PATH": path, **variables},
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(made.pid, signal.SIGKILL)
        made.wait()


def said(log, text):
    end = time.monotonic() + PATIENCE
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < end, log.read_text(errors="replace")[-2000:]
        time.sleep(0.2)


def test_a_run_over_a_consortiums_own_flare(tmp_path):
    """As docs/federation.md says: the package, two variables, a class allow list, and ``join --beside``."""
    port, parties = free_port(), []
    kits = provision(tmp_path, port)
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", port, SITES)
    shutil.rmtree(fed.path / "flare" / "admin")
    shutil.copytree(kits[ADMIN], fed.path / "flare" / "admin")
    silos = fc.data.load("synthetic", clients=2, features=5, samples=200, seed=3)
    config = tmp_path / "experiment.toml"
    run = {"rounds": 2, "stationarity_step": 1.0}
    config.write_text(tomli_w.dumps({"algorithm": {"name": "Scaffold", **METHOD}, "run": run}))
    with contextlib.ExitStack() as stack:
        for name in ("hub.example", *SITES):
            allow(kits[name], gated=name == "south")
        log = tmp_path / "hub.log"
        stack.enter_context(started(kits["hub.example"], log, FEDCOMPOSITE_FEDERATION=str(fed.path)))
        stack.callback(lambda: leave(parties))
        for i, name in enumerate(SITES):
            X, y = silos[i]
            data, place = tmp_path / f"{name}.csv", fed.path / "sites" / name
            pd.DataFrame(X.numpy()).add_prefix("f").assign(label=y.numpy()).to_csv(data, index=False)
            shutil.rmtree(place / "flare")  # the consortium's own kit is elsewhere
            with (place / "site.toml").open("a") as file:
                file.write("min_parties = 2\n")
            options = ["--beside", "--data", data, "--target", "label"]
            parties.append(Party(tmp_path / f"{name}.log", "join", place, *options))
            client = tmp_path / f"{name}.flare.log"
            stack.enter_context(started(kits[name], client, FEDCOMPOSITE_SITE=str(place)))
        for party, name in zip(parties, SITES, strict=True):
            party.wait_for("waiting for work")
            said(tmp_path / f"{name}.flare.log", "Successfully registered client")
        parties.append(Party(tmp_path / "run.log", "run", fed.path, config, "--out", tmp_path / "run"))
        parties[-1].ends(0)
        with administration(fed) as session:  # who runs FLARE reads what its client may, but for a gate of ours
            assert "class_allow_list" in str(session.do_command("cat north local/resources.json"))
            assert "class_allow_list" not in str(session.do_command("cat south local/resources.json"))
    want = fc.simulate(fc.Problem(silos), fc.algorithms.Scaffold(**METHOD), **run, backend="loop")
    torch.testing.assert_close(model(tmp_path / "run"), want.solution, rtol=0, atol=1e-12)
