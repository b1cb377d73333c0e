"""A federation of real processes on loopback: TLS, keys, SIGKILL, refusals. Everything that is started is stopped."""

import contextlib
import json
import os
import re
import shutil
import signal
import time
import uuid
from pathlib import Path

import pytest
import tomli_w
import torch

import fedcomposite as fc

pytest.importorskip("nvflare", reason="the extra [federation] is not installed")

from bad_network import Proxy, WebProxy
from cryptography.hazmat.primitives.asymmetric import ec
from local_federation import write
from nvflare.fuel.flare_api.api_spec import InternalError
from parties import PATIENCE, SITES, Parties, Party, children, leave, model, records
from typer.testing import CliRunner

from fedcomposite.cli.federation import federation_app
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.coordinator.delivery import Settings
from fedcomposite.federation.engines import pki, selection
from fedcomposite.federation.engines.nvflare import administration
from fedcomposite.federation.engines.nvflare_job_files import write_job
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.audit import Audit
from fedcomposite.federation.site_folders import SiteFolder

pytestmark = pytest.mark.slow
SOCKETS = shutil.ignore_patterns("*.sock")


def experiment(name="FedNMap", rounds=5, local_steps=20, **fields):
    """A short run with minibatches."""
    spec = {"name": name, "local_steps": local_steps, "step": 0.05, **fields}
    content = {"algorithm": spec, "run": {"rounds": rounds, "stationarity_step": 1.0, "batch_size": 20}}
    if name == "FedNMap":
        content |= {"regularizer": {"name": "L1", "lam": 0.003}}
        spec["gamma"] = 2.0
    return content


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Parties(tmp_path_factory.mktemp("federation"))
    (made.folder / "config.toml").write_text(tomli_w.dumps(experiment()))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def parties(federation):
    """All of them alive, so that a test that fails spoils no other."""
    federation.revive()
    return federation


@pytest.fixture(scope="module")
def whole(federation):
    """The run that nothing disturbs."""
    federation.revive()
    out = federation.folder / "whole"
    federation.run("run-whole", federation.folder / "config.toml", "--out", out).ends(0)
    return out


def test_equals_the_simulator(parties, whole):
    content = experiment()
    problem = fc.Problem(parties.silos, regularizer=fc.regularizers.L1(0.003))
    spec = {k: v for k, v in content["algorithm"].items() if k != "name"}
    run = fc.simulate(problem, fc.algorithms.FedNMap(**spec), **content["run"], backend="loop")
    torch.testing.assert_close(model(whole), run.solution, rtol=0, atol=1e-12)
    for a, b in zip(records(whole), run.history, strict=True):
        assert a.keys() == b.keys()
        assert a["objective"] == pytest.approx(b["objective"], abs=1e-12)
        assert a["train_accuracy"] == b["train_accuracy"]
        assert (a["bytes_up"], a["gradient_evaluations"]) == (b["bytes_up"], b["gradient_evaluations"])


def test_every_method_equals_the_simulator(parties):
    """All of them over one job of FLARE, plainly and in secure sums."""
    lines = []
    with contextlib.closing(selection.open_engine(parties.fed, "every", lines.append)) as engine:
        for name in fc.algorithms.REGISTRY:
            algorithm = fc.algorithms.REGISTRY[name].auto(5.0, local_steps=3)
            strength = None if algorithm.info.regularizer == "none" else 0.1  # steps of Newton's method keep 1e-9
            problem = fc.Problem(parties.silos, regularizer=strength and fc.regularizers.L1(strength))
            want = fc.simulate(problem, algorithm, rounds=2, stationarity_step=0.1, backend="loop")
            text = write(algorithm, strength and {"name": "L1", "lam": strength}, rounds=2)
            for secure, most in ((False, 1e-12), (True, 1e-9)):
                settings = Settings(secure=secure, give_up=PATIENCE)
                job = f"{name.lower()}-{'secure' if secure else 'plain'}"
                given = engine, SITES, parties.fed.permitted, parse(text), job, settings
                one = Coordinator(*given, log=lines.append)
                one.prepare()
                torch.testing.assert_close(one.run().solution, want.solution, rtol=0, atol=most, msg=job)
    assert not [line for line in lines if "refused" in line]


@pytest.mark.parametrize(("when", "missed"), [("before", True), ("after", False)])
def test_a_site_is_killed_in_the_middle_of_a_round(parties, whole, when, missed):
    """It is missed by name, or back before that; it goes on from its files, and the result is the same to the bit."""
    out = parties.folder / f"killed-site-{when}"
    site = parties.join("south", held=(when, 2))
    run = parties.run(f"run-killed-site-{when}", parties.folder / "config.toml", "--out", out)
    site.wait_for("held in round 2")
    site.kill()
    if missed:
        run.wait_for("south did not answer")
    parties.join("south")
    run.ends(0)
    assert torch.equal(model(out), model(whole))
    assert records(out) == records(whole)


def test_the_server_and_then_everybody_is_killed(parties, whole):
    """A run outlives its server; one whose analyst is killed as well goes on from its checkpoint: the same bits."""
    out = parties.folder / "killed-server"
    west = parties.join("west", held=("after", 2))
    run = parties.run("run-killed-server", parties.folder / "config.toml", "--out", out)
    west.wait_for("held in round 2")
    parties.server.kill()
    run.wait_for("FLARE does not answer")
    parties.release("west")
    parties.serve()
    run.wait_for("FLARE's server is back")
    run.ends(0)
    assert torch.equal(model(out), model(whole))
    assert records(out) == records(whole)
    again = parties.folder / "killed-all"
    west = parties.join("west", held=("before", 4))
    run = parties.run("run-killed-all", parties.folder / "config.toml", "--out", again)
    west.wait_for("held in round 4")
    for party in (run, parties.server, *parties.sites.values()):
        party.kill()
    parties.serve()
    for name in SITES:
        parties.join(name)
    run = parties.run("run-resume", "--resume", again)
    assert "going on after round 3" in run.ends(0)
    assert torch.equal(model(again), model(whole))
    assert records(again) == records(whole)


def test_a_job_process_is_killed(parties, whole):
    """FLARE's own processes below the server and below a site: the run has FLARE start others."""
    for role in ("server", "site"):
        out = parties.folder / f"killed-job-{role}"
        west = parties.join("west", held=("before", 2))
        run = parties.run(f"run-killed-job-{role}", parties.folder / "config.toml", "--out", out)
        west.wait_for("held in round 2")
        party = parties.server if role == "server" else parties.sites["south"]
        jobs = [pid for pid in children(party.process.pid) if is_job(pid)]
        assert jobs
        for pid in jobs:
            os.kill(pid, signal.SIGKILL)
        parties.release("west")
        run.ends(0)
        assert torch.equal(model(out), model(whole))
        assert records(out) == records(whole)


def is_job(pid):
    """Whether a process is one that FLARE started for a job."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"worker_process" in words or b"runner_process" in words
    return False


def test_a_bad_network_changes_no_bit(parties, whole):
    """Delays of 100 ms and 3 % resets at one site, a slow uplink at another, and a cable cut for 30 s at the third."""
    with contextlib.ExitStack() as stack:
        troubles = {"north": {"delay": 0.1, "resets": 0.03}, "south": {"rate": 100_000}, "west": {}}
        proxies = {name: Proxy(parties.fed.port, **trouble) for name, trouble in troubles.items()}
        for name, proxy in proxies.items():
            stack.callback(proxy.close)
            far = shutil.copytree(parties.folder / "sites" / name, parties.folder / "far" / name, ignore=SOCKETS)
            kit = far / "flare" / "startup" / "fed_client.json"
            kit.write_text(kit.read_text().replace(f":{parties.fed.port}", f":{proxy.port}"))
            parties.join(name, far, held=("before", 3) if name == "west" else None)
        out = parties.folder / "bad-network"
        run = parties.run("run-bad-network", parties.folder / "config.toml", "--out", out)
        parties.sites["west"].wait_for("held in round 3")
        proxies["west"].cut, began = True, time.monotonic()
        parties.release("west")  # what it says now is lost
        time.sleep(max(0.0, began + 30.0 - time.monotonic()))  # the time that the cable is cut, not one to wait for
        proxies["west"].cut = False
        run.ends(0)
        leave(list(parties.sites.values()))
    assert torch.equal(model(out), model(whole))
    assert records(out) == records(whole)
    assert proxies["west"].lost > 0
    assert proxies["north"].broken > 0


def test_sites_behind_a_hospitals_proxy(parties, whole):
    """The usual variable names an HTTPS proxy; all that a site says to the server goes through it, by CONNECT."""
    proxy = WebProxy()
    try:
        parties.join("west", https_proxy=f"http://127.0.0.1:{proxy.port}")
        parties.sites["west"].wait_for("waiting for work")
        out = parties.folder / "proxy"
        parties.run("run-proxy", parties.folder / "config.toml", "--out", out).ends(0)
        parties.sites["west"].leave()
    finally:
        proxy.close()
    assert torch.equal(model(out), model(whole))
    assert records(out) == records(whole)
    assert set(proxy.asked) == {f"127.0.0.1:{parties.fed.port}"}
    assert proxy.passed > 10_000


def test_skip_goes_on_without_a_site_that_leaves(parties):
    """Ctrl-C at a site is clean; the run goes on with the others and says so."""
    config = parties.folder / "skip.toml"
    config.write_text(tomli_w.dumps(experiment("FedAvg", rounds=4)))
    out = parties.folder / "skip"
    west = parties.join("west", held=("before", 2))
    run = parties.run("run-skip", config, "--out", out, "--policy", "skip", "--patience", "2")
    west.wait_for("held in round 2")
    west.process.send_signal(signal.SIGINT)
    assert "west has left" in west.ends(0)
    assert "going on without west" in run.ends(0)
    assert [r.get("sites", 3) for r in records(out)] == [3, 2, 2, 2, 2]


def status(parties):
    return CliRunner().invoke(federation_app, ["status", str(parties.fed.path)]).output


def test_two_jobs_at_once(parties, whole):
    """Two analysts' runs share the sites, each of which answers one order after another: the same bits."""
    outs = [parties.folder / f"at-once-{i}" for i in range(2)]
    runs = [parties.run(f"run-{out.name}", parties.folder / "config.toml", "--out", out) for out in outs]
    for run, out in zip(runs, outs, strict=True):
        run.ends(0)
        assert torch.equal(model(out), model(whole))
        assert records(out) == records(whole)


def test_a_run_that_is_stopped_or_killed_can_be_resumed(parties, whole):
    """Ctrl-C at the analyst, then SIGKILL: nothing hangs, the folder is good so far, and the result the same."""
    out = parties.folder / "stopped"
    west = parties.join("west", held=("after", 2))
    run = parties.run("run-stopped", parties.folder / "config.toml", "--out", out)
    west.wait_for("held in round 2")
    shown = status(parties)
    assert all(f"{name}" in shown for name in SITES)
    assert shown.count("online") >= 3
    # Neither the run nor a site can be there twice; both go on undisturbed.
    second, twin = parties.run("run-twice", "--resume", out), parties.start("twin", *parties.site("west"))
    assert "in use by process" in " ".join(second.ends(2).split())
    assert "in use by process" in " ".join(twin.ends(2).split())
    run.process.send_signal(signal.SIGINT)
    said = run.ends(1)
    assert "interrupted after round 1" in said
    assert f"--resume {out}" in said
    assert json.loads((out / "summary.json").read_text())["status"] == "interrupted"
    west = parties.join("west", held=("before", 4))
    run = parties.run("run-stopped-on", "--resume", out)
    west.wait_for("held in round 4")
    run.kill()
    assert "gone (go on with --resume), round 2/5" in " ".join(status(parties).split())  # round 3 was not measured yet
    parties.join("west")
    parties.run("run-killed-on", "--resume", out).ends(0)
    assert torch.equal(model(out), model(whole))
    assert records(out) == records(whole)


def fill(file):
    """Write until there is no room."""
    with contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_the_coordinators_disk_is_full(parties, whole):
    """The run ends with a line, the server lives, nothing is damaged, and with room again the run goes on."""
    if not parties.small:
        pytest.skip("needs the right to mount a small disk")
    out, ballast = parties.disk / "full", parties.disk / "ballast"
    west = parties.join("west", held=("before", 3))
    run = parties.run("run-full", parties.folder / "config.toml", "--out", out)
    west.wait_for("held in round 3")
    try:
        with ballast.open("wb", buffering=0) as file:
            fill(file)
            parties.release("west")
            while run.alive:  # orders that are done make room, which nobody else may have
                fill(file)
        said = run.ends(1)
        assert f"no space is left on the coordinator's disk ({out}); make room; go on with" in said
        assert "Traceback" not in said
        assert parties.server.alive
    finally:
        ballast.unlink()
    assert "going on after round 2" in parties.run("run-full-on", "--resume", out).ends(0)
    assert torch.equal(model(out), model(whole))
    assert records(out) == records(whole)


def test_strangers_and_impostors_are_refused(parties):
    """Another key in a good kit, and a kit of another authority: the run takes nothing from either."""
    config = parties.folder / "few.toml"
    config.write_text(tomli_w.dumps(experiment("FedAvg", rounds=1)))
    stranger = shutil.copytree(parties.folder / "sites" / "north", parties.folder / "stranger", ignore=SOCKETS)
    shutil.rmtree(stranger / "state", ignore_errors=True)
    (stranger / "site.key").unlink()
    pki.make_site_key(stranger / "site.key")
    parties.join("north", stranger).wait_for("waiting for work")
    run = parties.run("run-stranger", config, "--out", parties.folder / "strange")
    run.wait_for("north did not answer: its answer is not signed by north for this order")
    other = FederationFolder.create(parties.folder / "other", "127.0.0.1", parties.fed.port, SITES)
    parties.join("north", other.path / "sites" / "north").wait_for("cannot be reached")
    run.wait_for("waiting for north")
    parties.join("north")
    run.ends(0)


def test_a_revoked_site_is_out(parties):
    """FLARE's server takes it no more; a run that needs it stops by its name, others begin without it."""
    done = CliRunner().invoke(federation_app, ["revoke", str(parties.fed.path), "south"])
    assert "south is revoked" in done.output
    until(lambda: "south" not in selection.seen(parties.fed))
    assert re.search(r"south\W+revoked", status(parties))
    config = parties.folder / "after.toml"
    config.write_text(tomli_w.dumps(experiment("FedAvg", rounds=2)))
    run = parties.run("run-revoked", config, "--out", parties.folder / "revoked")
    assert "south: is not registered or was revoked" in run.ends(1)
    for name, options in [("after-skip", ["--policy", "skip"]), ("after-named", ["--sites", "north,west"])]:
        out = parties.folder / name
        parties.run(f"run-{name}", config, "--out", out, *options).ends(0)
        assert records(out)[-1]["round"] == 2
    assert torch.equal(model(parties.folder / "after-skip"), model(parties.folder / "after-named"))


ROGUE = """\
import os
import sys
NAMED = os.path.join(os.path.dirname(__file__), "named")
if any("server_train" in word for word in sys.orig_argv):
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import RequestHeader
    from nvflare.private.fed.server.shell_cmd import _FileCmdExecutor
    said = Message.set_header
    Message.set_header = lambda self, key, value: said(self, key, "false" if key == "require_authz" else value)
    begun = Message.__init__
    def ask_for_another_thing(self, topic, body):
        asked = topic == "resource_manager.report_resources" and os.path.exists(NAMED)
        begun(self, "train.delete_run" if asked else topic, body)
        if asked:
            self.set_header(RequestHeader.JOB_ID, open(NAMED).read())
    Message.__init__ = ask_for_another_thing
    _FileCmdExecutor.validate_shell_command = lambda self, args, parsed: ""
"""


@pytest.fixture
def rogue_server(parties):
    """A server of its administrator's own making, which lets everything through: what is refused, the sites refuse.

    It does not tell FLARE's clients to look whether somebody may ask for what they are asked, and takes any path.
    """
    local = parties.fed.path / "flare" / "server" / "local"
    kept = {path: path.read_bytes() for path in (local / "authorization.json", local / "resources.json")}
    rights = json.loads((local / "authorization.json").read_text())
    rights["permissions"]["project_admin"] = "any"
    (local / "authorization.json").write_text(json.dumps(rights))
    settings = json.loads((local / "resources.json").read_text())
    settings["class_allow_list"] = ["*"]
    (local / "resources.json").write_text(json.dumps(settings))
    code = parties.folder / "rogue"
    code.mkdir(exist_ok=True)
    (code / "sitecustomize.py").write_text(ROGUE)
    parties.serve(PYTHONPATH=os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])]))
    until(lambda: set(selection.seen(parties.fed)) == set(SITES))
    yield parties
    for path, content in kept.items():
        path.write_bytes(content)
    parties.server.kill()


def test_a_rogue_server_reads_nothing_at_a_site(rogue_server):
    """Files and folders of the site's account, by FLARE's own commands: its client does not know them."""
    parties = rogue_server
    place = parties.folder / "sites" / "north"
    (parties.fed.path / "flare" / "server" / "here.txt").write_text("of the server itself")
    with administration(parties.fed) as session:

        def said(line):
            return str(session.do_command(line))

        assert "of the server itself" in said("cat server here.txt")  # so these commands do work
        for line in (f"cat north {place}/site.key", f"head north {parties.folder}/north.csv", f"ls north -a {place}",
                     f"grep north BEGIN {place}/site.key", f"tail north {place}/state/audit.jsonl", "pwd north",
                     "sys_info client north", "report_env client north"):  # fmt: skip
            got = said(line)
            assert "invalid_request" in got or "error" in got.lower(), got
            for secret in ("BEGIN", "label", "site.toml", "signature", str(place)):
                assert secret not in got.replace(line, "")
        session.api.do_command("restart client north")
    assert parties.sites["north"].alive


def test_a_rogue_server_deletes_nothing_of_a_kit(rogue_server):
    """FLARE's client deletes a job's folder when the server says so, and takes its kit's folders for those of jobs."""
    parties, named = rogue_server, rogue_server.folder / "rogue" / "named"
    kit, job = parties.folder / "sites" / "north" / "flare", str(uuid.uuid4())
    (kit / job).mkdir()
    with administration(parties.fed) as session:
        for folder in ("startup", "local", job):
            named.write_text(folder)
            session.do_command("report_resources client north")
    named.unlink()
    assert (kit / "startup" / "client.key").is_file()
    assert (kit / "local" / "resources.json").is_file()
    assert not (kit / job).exists()  # so this is how it deletes


def test_what_an_administrators_kit_is_good_for(parties, whole):
    """With a valid kit and the server as it is: no files, logs, shells or results, no end of a client; jobs can end."""
    out = parties.folder / "ended"
    west = parties.join("west", held=("before", 2))
    run = parties.run("run-ended", parties.folder / "config.toml", "--out", out)
    west.wait_for("held in round 2")
    with administration(parties.fed) as session:
        jobs = [one["job_id"] for one in session.list_jobs() if str(one["status"]).startswith("RUNNING")]
        for line in ("cat server local/resources.json", "cat north local/resources.json", "ls north", "pwd server",
                     "grep north x log.txt", "head server log.txt", "tail north log.txt", f"download_job {jobs[0]}",
                     f"clone_job {jobs[0]}", "sys_info client north", "configure_site_log client north DEBUG",
                     ):  # fmt: skip
            said = str(session.do_command(line))
            assert "is not authorized for" in said or "invalid_request" in said, said
            assert "class_allow_list" not in said
        session.do_command("restart client north")
        ended = 0
        for one in jobs:
            with contextlib.suppress(InternalError):  # an earlier run's, which ended by itself since it was listed
                session.abort_job(one)
                ended += 1
            session.do_command(f"delete_job {one}")
        assert ended
    parties.release("west")
    run.ends(0)
    assert parties.sites["north"].alive
    assert torch.equal(model(out), model(whole))
    assert records(out) == records(whole)


def test_jobs_that_are_not_the_coordinators_are_refused_at_the_sites(rogue_server):
    """FLARE's administrator, with a server of his own making, has no site run anything: each says so in its audit log.

    Code, classes and settings that a job brings; jobs without the coordinator's word, or with that of a key which was
    taken back. A run that has the new key goes on.
    """
    parties, evil = rogue_server, rogue_server.folder / "EVIL"
    old = pki.read_private(parties.fed.order_key)
    attacks = {
        "code": (with_code, old, "it brings 'custom/evil.py'"),
        "class": (with_class, old, "its 'executors' are not this package's"),
        "settings": (with_component, old, "its 'components' are not this package's"),
        "stranger": (unchanged, ec.generate_private_key(ec.SECP256R1()), "'foreign-stranger' is not signed by the"),
        "revoked": (unchanged, old, "'foreign-revoked' is not signed by the coordinator"),
    }
    for name, (change, key, reason) in attacks.items():
        before = {site: len(audited(parties, site)) for site in SITES}
        if name == "revoked":
            parties.fed.rotate()
            for site in SITES:
                (parties.folder / "sites" / site / "coordinator.pub").write_bytes(
                    pki.public_part(parties.fed.order_key)
                )
        job = write_job(parties.folder / "foreign" / name, f"foreign-{name}", SITES, key)
        change(job, evil)
        with administration(parties.fed) as session:
            number = session.submit_job(str(job))
            until(lambda n=number, s=session: str(s.get_job_meta(n)["status"]).startswith(("FINISHED", "FAILED")))
            assert "COMPLETED" not in str(session.get_job_meta(number)["status"])
        for site in SITES:
            lines = audited(parties, site)[before[site] :]
            noted = [line for line in lines if line["what"].startswith("a job of the engine, by coordinator@")]
            assert noted, (name, site, lines)
            assert noted[-1]["refused"].startswith(reason)
    assert not evil.exists()
    config = parties.folder / "new-key.toml"
    config.write_text(tomli_w.dumps(experiment("FedAvg", rounds=1)))
    parties.run("run-new-key", config, "--out", parties.folder / "new-key").ends(0)


def audited(parties, site):
    """What a site's audit log holds."""
    place = SiteFolder(parties.folder / "sites" / site)
    return Audit(place.state, pki.read_private(place.key)).verify()


def unchanged(job, evil):
    pass


def with_code(job, evil):
    (job / "app" / "custom").mkdir()
    (job / "app" / "custom" / "evil.py").write_text(f"open({str(evil)!r}, 'w').write('x')\n")


def with_class(job, evil):
    path = job / "app" / "config" / "config_fed_client.json"
    content = json.loads(path.read_text())
    content["executors"][0]["executor"] = {"path": "nvflare.app_common.np.np_trainer.NPTrainer", "args": {}}
    path.write_text(json.dumps(content))


def with_component(job, evil):
    path = job / "app" / "config" / "config_fed_client.json"
    content = json.loads(path.read_text())
    content["components"] = [{"id": "x", "path": "subprocess.Popen", "args": {"args": ["touch", str(evil)]}}]
    path.write_text(json.dumps(content))


def until(what):
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.parametrize("engine", ["nvflare", "local"])
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_the_demo_in_one_command(tmp_path, secure, engine):
    """TLS, keys, four hospitals, a coefficient table, and the simulator's result, up to the rounding of masked sums."""
    options = ["--secure"] if secure else []
    party = Party(tmp_path / "demo.log", "demo", tmp_path / "demo", "--rounds", "8", "--engine", engine, *options)
    try:
        said = party.ends(0)
    finally:
        party.leave()
    assert "nonzero coefficients" in said
    assert "thalach" in said
    (difference,) = re.findall(r"largest difference from `fedcomposite run`.*: (\S+)", said)
    assert float(difference) < (1e-9 if secure else 1e-12)
    limits = [path.read_text() for path in (tmp_path / "demo" / "fed" / "sites").glob("*/site.toml")]
    assert ['\nsecure = "required"\n' in text for text in limits] == 4 * [secure]
