"""What a site's people decide and see: keys made at the site, approval, the audit log."""

import json
import re
import stat

import pandas as pd
import pytest
import torch
from local_federation import L1, LocalSites, alone, federate, method, opened, write
from secure_sites import make_keys, secure_sites
from typer.testing import CliRunner

from fedcomposite.algorithms import ProxNewton
from fedcomposite.analysis import Request
from fedcomposite.cli.federation import federation_app
from fedcomposite.data import Silos
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator import delivery
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.inquiry import Inquiry
from fedcomposite.federation.coordinator.plans import PLANS
from fedcomposite.federation.engines import pki
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.orders import Secure
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.approval import Approval, Approvals, Rule, digest
from fedcomposite.federation.site.audit import Audit, AuditError
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.enrolment import open_site
from fedcomposite.federation.site.site import Site
from fedcomposite.federation.site_folders import SiteFolder
from fedcomposite.runtime import Driver
from fedcomposite.testing import small_problem

TEXT = write(method("FedNMap"), L1, rounds=3)


@pytest.fixture(scope="module")
def silos():
    base = small_problem(method("FedNMap")).silos
    return Silos.from_arrays([base[i] for i in range(4)], names=["a", "b", "c", "d"])


@pytest.fixture(scope="module")
def key():
    return make_keys(["a"])["a"]


def command(*arguments, code=0):
    done = CliRunner().invoke(federation_app, list(map(str, arguments)))
    assert done.exit_code == code, done.output
    return done.output


def sites_of(silos, folder, approval, key, log=lambda line: None):
    return [
        Site(
            silos.names[i], alone(silos, i), StateStore(folder / str(i)), opened(), log,
            approvals=Approvals(folder / str(i), approval), audit=Audit(folder / str(i), key, "coordinator"),
        )
        for i in range(len(silos))
    ]  # fmt: skip


IMPATIENT = Settings(give_up=0.01)


# -- approval ---------------------------------------------------------------------------------------------------------


def test_an_unapproved_experiment_computes_nothing(silos, tmp_path, key, monkeypatch):
    sites = sites_of(silos, tmp_path, Approval(required=True), key)
    touched = []
    for name in ("introduce", "work"):
        monkeypatch.setattr(Site, name, lambda self, *_, what=name: touched.append(what))
    with pytest.raises(FederationError, match=r"a: refuses: experiment [0-9a-f]{16} waits for approval at the site"):
        federate(LocalSites(sites), TEXT, IMPATIENT)
    assert not touched
    assert not list(tmp_path.glob("*/ledger.json"))
    (entry,) = Approvals(tmp_path / "0", Approval()).all().values()
    assert entry["status"] == "pending"
    assert parse(entry["experiment"]) == parse(TEXT)


def test_approved_by_digest_it_runs_and_anything_else_waits(silos, tmp_path, key):
    sites = sites_of(silos, tmp_path, Approval(required=True), key)
    approvals = [Approvals(tmp_path / str(i), Approval()) for i in range(4)]
    name = digest(parse(TEXT))
    for i in range(4):  # one after another, as the sites' people come to it
        with pytest.raises(FederationError, match=f"{silos.names[i]}: refuses: experiment {name[:16]} waits"):
            federate(LocalSites(sites), TEXT, IMPATIENT)
        assert approvals[i].decide(name[:12], "approved") == name
    federate(LocalSites(sites), TEXT)
    for change in ({"rounds": 4}, {"batch_size": 4}, {"evaluate_every": 2}, {"stationarity_step": 0.2}):
        other = write(method("FedNMap"), L1, **{"rounds": 3, **change})
        assert digest(parse(other)) != name
        with pytest.raises(FederationError, match="waits for approval"):
            federate(LocalSites(sites), other, IMPATIENT)
    approvals[2].decide(name, "rejected")
    with pytest.raises(FederationError, match=f"c: refuses: experiment {name[:16]} was rejected"):
        federate(LocalSites(sites), TEXT)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_a_run_waits_for_approval_and_goes_on(silos, tmp_path, key, monkeypatch, secure):
    """The analyst sees where a yes is missing, nothing is computed before, and the wait is one line of each audit."""
    monkeypatch.setattr(delivery, "_APPROVAL", 0.01)
    _, expected = federate(LocalSites(secure_sites(silos, tmp_path / "free")), TEXT, Settings(secure=secure))
    sites, lines, computed = secure_sites(silos, tmp_path), [], []
    for site in sites:
        site._approvals = Approvals(site.store.folder, Approval(required=True))
        site._audit = Audit(site.store.folder, key, "coordinator")

    class People(LocalSites):
        """One site's people after another say yes, when the run has asked for a while."""

        def wait(self, orders, seconds):
            asked = [[*site._approvals.all().items()] for site in sites]
            undecided = [
                (site, e[0][0]) for site, e in zip(sites, asked, strict=True) if e[0][1]["status"] == "pending"
            ]
            if undecided:
                computed.extend(tmp_path.glob("site*/job"))
            if undecided and len(self.log) > 6 * (5 - len(undecided)):
                site, name = undecided[0]
                site._approvals.decide(name, "approved")
            super().wait(orders, seconds)

    _, run = federate(People(sites), TEXT, Settings(secure=secure, tell_every=0.05), log=lines)
    assert not computed
    for site in sites:
        assert any(line.startswith(f"waiting for approval at {site.name}: experiment ") for line in lines)
        assert f"approved at {site.name}" in lines
        told = [line for line in site._audit.verify() if "waits for approval" in line.get("refused", "")]
        assert len(told) == 1
    assert any(re.fullmatch(r"waiting for approval at . \(0 s\)(, .*)?", line) for line in lines)
    assert torch.equal(run.solution, expected.solution)


def test_classes_of_experiments_need_no_further_word(silos, tmp_path, key):
    fits = {"methods": ["fednmap"], "losses": ["logistic"], "max_rounds": 3, "max_evaluations": 5, "secure": False}
    federate(LocalSites(sites_of(silos, tmp_path / "yes", Approval(required=True, allow=[Rule(**fits)]), key)), TEXT)
    others = [
        {"methods": ["Scaffold"]}, {"losses": ["least_squares"]}, {"max_rounds": 2}, {"max_evaluations": 4},
        {"max_features": 7}, {"secure": True},
    ]  # fmt: skip
    for i, change in enumerate(others):
        approval = Approval(required=True, allow=[Rule(**{**fits, **change})])
        with pytest.raises(FederationError, match="waits for approval"):
            federate(LocalSites(sites_of(silos, tmp_path / str(i), approval, key)), TEXT, IMPATIENT)


def test_an_analysis_is_approved_apart_from_a_run_of_the_same_experiment(silos, tmp_path, key):
    """Neither the word for a run nor a class of runs covers what an analysis asks."""
    text = write(ProxNewton(), L1, rounds=3)
    runs = {"methods": ["ProxNewton"], "losses": ["logistic"], "max_rounds": 9, "max_evaluations": 9, "secure": False}
    asked = digest(parse(text), plan=PLANS["analysis"])
    assert asked != digest(parse(text))

    def ask(rule, place):
        grid = LocalSites(sites_of(silos, tmp_path / place, Approval(required=True, allow=[Rule(**rule)]), key))
        asking = Inquiry(grid, list(silos.names), grid.permitted, parse(text, recipe=True), "job", IMPATIENT)
        x = torch.zeros(asking.meet().dimension, dtype=torch.float64)
        return Driver(asking).each([Request("newton", {"x": x, "working": x.bool()})])

    with pytest.raises(FederationError, match=f"a: refuses: experiment {asked[:16]} waits for approval"):
        ask(runs, "runs")
    ask({**runs, "analyses": True}, "analyses")


def test_without_approval_nothing_waits(silos, tmp_path, key):
    federate(LocalSites(sites_of(silos, tmp_path, Approval(), key)), TEXT)
    assert not list(tmp_path.glob("*/approvals"))


# -- the audit log ----------------------------------------------------------------------------------------------------


def test_everything_that_leaves_is_in_the_log(silos, tmp_path, key):
    grid = LocalSites(sites_of(silos, tmp_path, Approval(), key))
    federate(grid, TEXT)
    for i, name in enumerate(silos.names):
        lines = Audit(tmp_path / str(i), key).verify()
        answers = [answer for site, _, answer in grid.log if site == name]
        assert [one["sent"]["sha256"] for one in lines] == [wire.digest(a) for a in answers]
        assert [one["sent"]["bytes"] for one in lines] == [wire.weight(a) for a in answers]
        whats = [one["what"] for one in lines]
        assert whats == ["introduction", *["round and evaluation"] * 3, "evaluation"]
        assert {one["asked by"] for one in lines} == {"coordinator"}
        assert stat.S_IMODE((tmp_path / str(i) / "audit.jsonl").stat().st_mode) == 0o600
    sites = grid.sites["a"]
    sites.answer(wire.content(refusal="nonsense"))
    last = Audit(tmp_path / "0", key).verify()[-1]
    assert last["what"] == "not an order"
    assert last["refused"] == "no order in the message"


def logged(folder, key, count=5):
    one = Audit(folder, key)
    for i in range(count):
        one.append({"what": f"thing {i}"})
    return folder / "audit.jsonl", folder / "audit.head"


def reseal(folder, key, lines):
    """What somebody without the site's key could write at best: a chain that fits, with signatures of another key."""
    other = make_keys(["x"])["x"]
    (folder / "audit.jsonl").unlink()
    (folder / "audit.head").unlink()
    forged = Audit(folder, other)
    for line in lines:
        forged.append({k: v for k, v in line.items() if k not in ("number", "time", "previous", "signature")})


TAMPERING = {
    "changed": lambda lines: [*lines[:2], lines[2].replace(b"thing 2", b"thing 7"), *lines[3:]],
    "one letter": lambda lines: [lines[0].replace(b"thing", b"thinG"), *lines[1:]],
    "removed": lambda lines: lines[:2] + lines[3:],
    "first removed": lambda lines: lines[1:],
    "last removed": lambda lines: lines[:-1],
    "all removed": lambda lines: [],
    "swapped": lambda lines: [lines[1], lines[0], *lines[2:]],
    "repeated": lambda lines: [*lines, lines[-1]],
    "put in": lambda lines: [*lines[:2], lines[1], *lines[2:]],
    "cut": lambda lines: [*lines[:-1], lines[-1][:40]],
    "not JSON": lambda lines: [*lines[:-1], b"hello\n"],
    "added": lambda lines: [*lines, lines[-1].replace(b'"number": 5', b'"number": 6')],
}


@pytest.mark.parametrize("how", TAMPERING)
def test_a_log_that_was_tampered_with_is_found(how, tmp_path, key):
    log, _ = logged(tmp_path, key)
    log.write_bytes(b"".join(TAMPERING[how](log.read_bytes().splitlines(keepends=True))))
    with pytest.raises(AuditError, match=r"changed|removed|not complete|cannot be read|follow"):
        Audit(tmp_path, key).verify()
    with pytest.raises(AuditError):
        Audit(tmp_path, key).append({"what": "more"})


def test_a_head_that_was_changed_removed_or_taken_back_is_found(tmp_path, key):
    log, head = logged(tmp_path, key)
    old = head.read_bytes()
    before = log.read_bytes()
    logged(tmp_path, key, 3)
    assert len(Audit(tmp_path, key).verify()) == 8
    now = head.read_bytes()
    head.write_bytes(old)  # an older head with the whole log
    with pytest.raises(AuditError, match="the head was replaced"):
        Audit(tmp_path, key).verify()
    head.write_bytes(now.replace(b'"lines": 8', b'"lines": 5'))
    with pytest.raises(AuditError, match="changed, or not written by this site"):
        Audit(tmp_path, key).verify()
    head.unlink()
    with pytest.raises(AuditError, match="is missing"):
        Audit(tmp_path, key).verify()
    head.write_bytes(now)
    log.write_bytes(before)  # the log's end removed, the head as it is
    with pytest.raises(AuditError, match=r"has 5 lines, audit\.head says 8; its end was removed"):
        Audit(tmp_path, key).verify()


def test_a_chain_by_another_key_is_found(tmp_path, key):
    logged(tmp_path, key)
    reseal(tmp_path, key, Audit(tmp_path, key).verify()[:3])
    with pytest.raises(AuditError, match="not written by this site"):
        Audit(tmp_path, key).verify()


def test_a_crash_between_line_and_head_is_no_tampering(tmp_path, key):
    _, head = logged(tmp_path, key)
    old = head.read_bytes()
    logged(tmp_path, key, 1)
    head.write_bytes(old)
    assert len(Audit(tmp_path, key).verify()) == 6
    logged(tmp_path, key, 1)
    assert [one["number"] for one in Audit(tmp_path, key).verify()] == list(range(1, 8))


def test_two_processes_write_one_log(tmp_path, key):
    one, other = Audit(tmp_path, key), Audit(tmp_path, key)
    for i in range(3):
        one.append({"what": f"one {i}"})
        other.append({"what": f"other {i}"})
    assert len(one.verify()) == 6


def test_a_site_whose_log_was_changed_answers_nothing(silos, tmp_path, key):
    federate(LocalSites(sites_of(silos, tmp_path, Approval(), key)), TEXT)
    log = tmp_path / "0" / "audit.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[1:]))
    with pytest.raises(FederationError, match="a: refuses: its audit log cannot be continued"):
        federate(LocalSites(sites_of(silos, tmp_path, Approval(), key)), TEXT, job="another")


# -- keys made at the site --------------------------------------------------------------------------------------------


def test_keys_are_made_at_the_site(tmp_path):
    """init makes no site's key; enrol does, at the site; admit takes the request, and the folder goes back."""
    fed = tmp_path / "fed"
    assert "enrol FOLDER --name a" in command("init", fed, "--sites", "a,b", "--port", 0, "--engine", "local")
    assert not list(fed.rglob("site.key"))
    assert FederationFolder(fed).permitted() == []
    for name in ("a", "b", "late"):
        command("enrol", tmp_path / name, "--name", name)
        said = command("admit", fed, tmp_path / name / f"{name}.csr")
        shown = pki.fingerprint(pki.read_private(tmp_path / name / "site.key").public_key())
        assert shown in said.replace("\n", " ")
    made = FederationFolder(fed)
    assert made.sites == made.permitted() == ["a", "b", "late"]
    assert not list(fed.rglob("site.key"))
    assert stat.S_IMODE((tmp_path / "a" / "site.key").stat().st_mode) == 0o600
    for path in sorted((fed / "sites" / "a").rglob("*")):
        if path.is_file():
            there = tmp_path / "a" / path.relative_to(fed / "sites" / "a")
            there.parent.mkdir(exist_ok=True)
            there.write_bytes(path.read_bytes())
    place = SiteFolder(tmp_path / "a")
    assert list(place.peers) == ["b", "late"]
    assert pki.read_public(place.peers["b"]) == pki.read_private(tmp_path / "b" / "site.key").public_key()
    said = command("peers", tmp_path / "a").replace("\n", " ")
    assert pki.fingerprint(pki.read_public(place.peers["late"])) in said
    # A second key under the same name is somebody else, unless the coordinator says so.
    command("enrol", tmp_path / "eve", "--name", "a")
    assert "another key already" in command("admit", fed, tmp_path / "eve" / "a.csr", code=2)
    command("admit", fed, tmp_path / "eve" / "a.csr", "--replace")


def test_requests_that_prove_nothing_are_refused(tmp_path):
    fed = tmp_path / "fed"
    command("init", fed, "--sites", "a", "--port", 0, "--engine", "local")
    command("enrol", tmp_path / "a", "--name", "a")
    request = tmp_path / "a" / "a.csr"
    text = request.read_text()
    middle = len(text) // 2
    request.write_text(text[:middle] + ("A" if text[middle] != "A" else "B") + text[middle + 1 :])
    assert "request" in command("admit", fed, request, code=2)
    request.write_text("no request")
    assert "not a readable request" in command("admit", fed, request, code=2)
    assert "small letters" in command("enrol", tmp_path / "b", "--name", "Not a name", code=2)
    assert FederationFolder(fed).permitted() == []


def test_the_commands_of_a_sites_people(silos, tmp_path):
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 9443, list(silos.names), engine="local")
    sites = []
    for i, name in enumerate(silos.names):
        place = fed.path / "sites" / name
        X, y = silos[i]
        pd.DataFrame(X.numpy()).assign(y=[-y[0].item(), *y[1:].tolist()]).to_csv(tmp_path / f"{name}.csv", index=False)
        text = (place / "site.toml").read_text()
        limits = "min_samples = 1\nmin_class = 1\nmin_evaluation = 1\nparameter_share = 2.0\nmax_margin = 1e9\n"
        text = text.replace("[limits] ", f"[limits]\n{limits}#").replace("# required = true", "required = true #")
        (place / "site.toml").write_text(text)
        sites.append(open_site(SiteFolder(place), tmp_path / f"{name}.csv", "y"))
    text = write(method("FedNMap"), L1, rounds=2)
    first = fed.path / "sites" / "a"
    assert "nothing was asked for" in command("pending", first)
    hasty = Settings(secure=True, give_up=0.01)
    with pytest.raises(FederationError, match="waits for approval"):
        federate(LocalSites(sites), text, hasty)
    sums = Secure(phase="keys", epoch="0" * 32, parties=list(silos.names))
    name = digest(parse(text), sums)
    others = [None, sums.model_copy(update={"recover": True}), sums.model_copy(update={"parties": ["a", "b", "c"]})]
    assert len({name, *(digest(parse(text), one) for one in others)}) == 4
    assert name[:16] in command("pending", first)
    assert "secure sum of a, b, c, d" in command("pending", first, name[:16]).replace("\n", " ")
    assert "no experiment begins" in command("approve", first, "123456", code=2)
    command("reject", first, name)
    with pytest.raises(FederationError, match="was rejected"):
        federate(LocalSites(sites), text, Settings(secure=True))
    for site in silos.names:
        place = fed.path / "sites" / site
        with pytest.raises(FederationError, match=r"rejected|waits"):
            federate(LocalSites(sites), text, hasty)
        command("approve", place, name)
    federate(LocalSites(sites), text, Settings(secure=True))
    with pytest.raises(FederationError, match="waits for approval"):  # the same with fewer sites is another experiment
        federate(LocalSites(sites[:3]), text, hasty, job="another")
    shown = command("audit", first, "--lines", 0)
    assert "secure sum" in shown
    assert "lines, each as it was written" in shown
    assert json.loads(command("audit", first, "--lines", 1, "--json").splitlines()[0])["number"] > 5
    log = first / "state" / "audit.jsonl"
    log.write_bytes(log.read_bytes().replace(b"approved", b"rejected", 1))
    assert "was changed, or not written by this site" in command("audit", first, code=2).replace("\n", " ")
