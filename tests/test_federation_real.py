"""A federation of real processes on loopback: TLS, keys, SIGKILL, refusals. Everything that is started is stopped."""

import contextlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pandas as pd
import pytest
import tomli_w
import torch
from safetensors.torch import load_file

import fedcomposite as fc

pytest.importorskip("flwr", reason="the extra [flower] is not installed")

from bad_network import Proxy

from fedcomposite.federation import pki
from fedcomposite.federation.folder import FederationFolder, free_port

pytestmark = pytest.mark.slow

SITES = ["north", "south", "west"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def children(pid):
    """The processes below one, from the system's own table."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found += [int(path.parent.name), *children(int(path.parent.name))]
    return found


class Party:
    """One command of the federation as a process, its words in a file."""

    def __init__(self, log, *arguments):
        self.log = log
        command = [sys.executable, "-m", "fedcomposite", "federation", *map(str, arguments)]
        with log.open("ab") as file:
            self.began = file.tell()
            self.process = subprocess.Popen(
                command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    def said(self):
        return self.log.read_bytes()[self.began :].decode()

    def wait_for(self, text, timeout=60.0):
        end = time.monotonic() + timeout
        while text not in self.said():
            assert time.monotonic() < end, f"{self.log.stem} did not say {text!r}:\n{self.said()}"
            assert self.process.poll() is None, f"{self.log.stem} ended:\n{self.said()}"
            time.sleep(0.05)

    def ends(self, code, timeout=60.0):
        assert self.process.wait(timeout) == code, self.said()
        return self.said()

    def kill(self):
        """SIGKILL, together with what the party started."""
        for pid in [self.process.pid, *children(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def leave(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        self.kill()


class Parties:
    """A coordinator and three sites."""

    def __init__(self, folder):
        self.folder, self.parties = folder, []
        self.silos = fc.data.load("synthetic", clients=3, features=20, samples=1500, seed=3)
        self.fed = FederationFolder.create(folder / "fed", "127.0.0.1", 0, SITES)
        for i, name in enumerate(SITES):
            X, y = self.silos[i]
            frame = pd.DataFrame(X.numpy(), columns=[f"f{j}" for j in range(20)]).assign(label=y.numpy())
            frame.to_csv(folder / f"{name}.csv", index=False)
            with (self.fed.path / "sites" / name / "site.toml").open("a") as file:
                file.write("reproducible_batches = true\n")  # two runs are compared bit for bit

    def start(self, name, *arguments):
        party = Party(self.folder / f"{name}.log", *arguments)
        self.parties.append(party)
        return party

    def serve(self):
        return self.start("serve", "serve", self.fed.path)

    def join(self, name, place=None, *extra):
        place = place or self.fed.path / "sites" / name
        data = self.folder / f"{name}.csv"
        return self.start(place.name, "join", place, "--data", data, "--target", "label", *extra)

    def run(self, out, *arguments):
        return self.start(out, "run", self.fed.path, *arguments)

    def stop(self):
        for party in self.parties[::-1]:
            party.leave()


def slow(name="FedNMap", rounds=5, local_steps=2000, **fields):
    """Rounds of a second or so: long enough to die in the middle of one."""
    spec = {"name": name, "local_steps": local_steps, "step": 5e-4, **fields}
    content = {"algorithm": spec, "run": {"rounds": rounds, "stationarity_step": 1.0, "batch_size": 20}}
    if name == "FedNMap":
        content |= {"regularizer": {"name": "L1", "lam": 0.003}}
        spec["gamma"] = 2.0
    return content


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    made = Parties(tmp_path_factory.mktemp("federation"))
    (made.folder / "slow.toml").write_text(tomli_w.dumps(slow()))
    try:
        made.server = made.serve()
        made.sites = {name: made.join(name) for name in SITES}
        stranger = shutil.copytree(made.fed.path / "sites" / "north", made.folder / "stranger")
        (stranger / "site.key").unlink()
        pki.make_site_key(stranger / "site.key")
        made.server.wait_for("serving on")
        made.stranger = made.join("north", stranger)
        for site in made.sites.values():
            site.wait_for("waiting for work")
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def whole(parties):
    """The run that nothing disturbs."""
    out = parties.folder / "whole"
    parties.run("run-whole", parties.folder / "slow.toml", "--out", out).ends(0, 120)
    return out


def model(out):
    return load_file(out / "model.safetensors")["x"]


def records(out):
    lines = (out / "history.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0} for line in lines]


def test_equals_the_simulator(parties, whole):
    content = slow()
    problem = fc.Problem(parties.silos, regularizer=fc.regularizers.L1(0.003))
    spec = {k: v for k, v in content["algorithm"].items() if k != "name"}
    run = fc.simulate(problem, fc.algorithms.FedNMap(**spec), **content["run"], backend="loop")
    torch.testing.assert_close(model(whole), run.solution, rtol=0, atol=1e-12)
    for a, b in zip(records(whole), run.history, strict=True):
        assert a.keys() == b.keys()
        assert a["objective"] == pytest.approx(b["objective"], abs=1e-12)
        assert a["train_accuracy"] == b["train_accuracy"]
        assert (a["bytes_up"], a["gradient_evaluations"]) == (b["bytes_up"], b["gradient_evaluations"])


def test_a_site_is_killed_in_the_middle_of_a_round(parties, whole):
    """It is missed by name, comes back from its files, and the result is the same to the bit."""
    out = parties.folder / "killed-site"
    run = parties.run("run-killed-site", parties.folder / "slow.toml", "--out", out)
    site = parties.sites["south"]
    began = site.said().count("round 2 in")
    end = time.monotonic() + 60
    while site.said().count("round 2 in") == began:
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.6)
    site.kill()
    parties.sites["south"] = parties.join("south")
    said = run.ends(0, 120)
    assert any(line in said for line in ("south did not answer", "south has connected anew"))
    assert torch.equal(model(out), model(whole))
    assert records(out) == records(whole)


def test_the_server_and_then_everybody_is_killed(parties, whole):
    """The run fails with a hint; --resume goes on from the checkpoint; twice; the same to the bit."""
    out = parties.folder / "killed-server"
    run = parties.run("run-killed-server", parties.folder / "slow.toml", "--out", out)
    run.wait_for("round 1/5")
    time.sleep(0.5)
    parties.server.kill()
    assert "--resume" in run.ends(1, 60)
    parties.server = parties.serve()
    parties.server.wait_for("serving on")
    run = parties.run("run-resume-1", "--resume", out)
    run.wait_for("going on after round")
    run.wait_for("round 3/5")
    time.sleep(0.5)
    for party in (parties.server, *parties.sites.values()):
        party.kill()
    assert "--resume" in run.ends(1, 60)
    parties.server = parties.serve()
    parties.sites = {name: parties.join(name) for name in SITES}
    parties.server.wait_for("serving on")
    parties.run("run-resume-2", "--resume", out).ends(0, 120)
    assert torch.equal(model(out), model(whole))
    assert records(out) == records(whole)


def test_a_bad_network_changes_no_bit(parties, whole):
    """Delays and resets at one site, a slow uplink at another, and a cable that is cut and mended at the third."""
    proxies = {"north": Proxy(parties.fed.port, delay=0.05, resets=0.03),
               "south": Proxy(parties.fed.port, rate=20_000), "west": Proxy(parties.fed.port)}  # fmt: skip
    try:
        for name, proxy in proxies.items():
            parties.sites[name].leave()
            far = shutil.copytree(parties.fed.path / "sites" / name, parties.folder / "far" / name)
            text = (far / "site.toml").read_text()
            (far / "site.toml").write_text(text.replace(f":{parties.fed.port}", f":{proxy.port}"))
            parties.sites[name] = parties.join(name, far)
        out = parties.folder / "bad-network"
        run = parties.run("run-bad-network", parties.folder / "slow.toml", "--out", out)
        run.wait_for("round 1/5", 180)
        proxies["west"].cut = True
        run.wait_for("west did not answer", 180)
        proxies["west"].cut = False
        run.ends(0, 300)
        assert torch.equal(model(out), model(whole))
        assert records(out) == records(whole)
        assert proxies["north"].broken > 0
    finally:
        for name in proxies:
            parties.sites[name].leave()
            proxies[name].close()
            parties.sites[name] = parties.join(name)


def test_skip_goes_on_without_a_site_that_leaves(parties):
    """Ctrl-C at a site is clean; the run goes on with the others and says so."""
    config = parties.folder / "skip.toml"
    config.write_text(tomli_w.dumps(slow("FedAvg", rounds=4, local_steps=500)))
    out = parties.folder / "skip"
    run = parties.run("run-skip", config, "--out", out, "--policy", "skip", "--patience", "2")
    run.wait_for("round 1/4")
    west = parties.sites["west"]
    west.process.send_signal(signal.SIGINT)
    assert "west has left" in west.ends(0, 20)
    assert "going on without west" in run.ends(0, 90)
    assert [r.get("sites", 3) for r in records(out)][-1] == 2
    parties.sites["west"] = parties.join("west")


def test_ctrl_c_at_the_analyst_leaves_a_run_to_resume(parties):
    parties.sites["west"].wait_for("waiting for work")
    config = parties.folder / "long.toml"
    config.write_text(tomli_w.dumps(slow(rounds=300)))
    out = parties.folder / "stopped"
    run = parties.run("run-stopped", config, "--out", out)
    run.wait_for("round 0/300")
    shown = subprocess.run(
        [sys.executable, "-m", "fedcomposite", "federation", "status", str(parties.fed.path)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert all(f"{name}" in shown for name in SITES)
    assert shown.count("online") >= 3
    # Neither the run nor a site can be there twice; both go on undisturbed.
    second, twin = parties.run("run-twice", "--resume", out), parties.join("west")
    assert "in use by process" in " ".join(second.ends(2, 120).split())
    assert "in use by process" in " ".join(twin.ends(2, 120).split())
    run.process.send_signal(signal.SIGINT)
    said = run.ends(1, 60)
    assert "interrupted after round" in said
    assert f"--resume {out}" in said
    assert json.loads((out / "summary.json").read_text())["status"] == "interrupted"


def test_strangers_and_impostors_are_refused(parties):
    """An unknown key, a wrong authority, a service without TLS, and plain HTTP to ours: one line each."""
    assert "does not accept north: its key is not registered" in parties.stranger.ends(1, 60)
    other = FederationFolder.create(parties.folder / "other", "127.0.0.1", parties.fed.port, SITES)
    said = parties.join("north", other.path / "sites" / "north").ends(1, 30)
    assert "is not vouched for by ca.crt" in said
    port = free_port()
    plain = http.server.ThreadingHTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=plain.serve_forever, daemon=True).start()
    try:
        naive = shutil.copytree(parties.fed.path / "sites" / "south", parties.folder / "naive")
        text = (naive / "site.toml").read_text()
        (naive / "site.toml").write_text(text.replace(f":{parties.fed.port}", f":{port}"))
        assert "does not speak TLS; nothing was sent to it" in parties.join("south", naive).ends(1, 30)
    finally:
        plain.shutdown()
        plain.server_close()
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{parties.fed.port}/health")


def test_a_revoked_site_is_out(parties):
    """Its process ends with one line, it cannot come back, and a run that needs it stops by its name."""
    done = subprocess.run(
        [sys.executable, "-m", "fedcomposite", "federation", "revoke", str(parties.fed.path), "south"],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "south is revoked" in done.stdout
    assert "no longer accepts south: it was revoked" in parties.sites["south"].ends(1, 30)
    run = parties.run("run-revoked", parties.folder / "slow.toml", "--out", parties.folder / "revoked")
    assert "south: is not registered or was revoked" in run.ends(1, 60)


def test_runs_go_on_after_a_revocation(parties):
    """With "skip", or with the sites that it names, a run does without the revoked one from the start."""
    config = parties.folder / "after.toml"
    config.write_text(tomli_w.dumps(slow("FedAvg", rounds=2, local_steps=20)))
    for name, options in [("after-skip", ["--policy", "skip"]), ("after-named", ["--sites", "north,west"])]:
        out = parties.folder / name
        parties.run(f"run-{name}", config, "--out", out, *options).ends(0, 120)
        assert records(out)[-1]["round"] == 2
    assert torch.equal(model(parties.folder / "after-skip"), model(parties.folder / "after-named"))


def test_the_demo_in_one_command(tmp_path):
    """TLS, keys, four hospitals, a coefficient table, and the simulator's result."""
    party = Party(tmp_path / "demo.log", "demo", tmp_path / "demo", "--rounds", "8")
    try:
        said = party.ends(0, 150)
    finally:
        party.leave()
    assert "nonzero coefficients" in said
    assert "thalach" in said
    assert "largest difference from `fedcomposite run`" in said
