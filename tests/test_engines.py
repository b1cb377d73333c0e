"""What carries orders: sockets of one account, signatures on both ways, relays that come and go; no engine needed."""

import functools
import io
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
import zipfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from fedcomposite._faults import UserError
from fedcomposite.cli.federation import federation_app
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.delivery import Delivery, Settings
from fedcomposite.federation.engines import pki, sealing, selection, sockets
from fedcomposite.federation.engines.answering import Answers, AnswerSocket
from fedcomposite.federation.engines.engine import EngineError
from fedcomposite.federation.engines.local_processes import LocalEngine, place, seen
from fedcomposite.federation.engines.nvflare_job_files import write_job
from fedcomposite.federation.engines.relayed_dispatch import RelayedDispatch
from fedcomposite.federation.engines.relaying import MISSES, Relay
from fedcomposite.federation.engines.sealing import RepeatedError, SealError, Session, StaleError
from fedcomposite.federation.engines.sockets import Channel
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.site.enrolment import open_site as open_folder
from fedcomposite.federation.site_folders import SiteFolder

PATIENCE = 120.0  # seconds after which a test gives up; none depends on how long something takes


def until(what):
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


class Echo:
    """A site that answers what it is asked with the same message."""

    def __init__(self, name):
        self.name, self.asked, self.noted = name, [], []

    def answer(self, content):
        self.asked.append(content)
        return content

    def note_refusal(self, what, reason):
        self.noted.append((what, reason))


@pytest.fixture
def fed(tmp_path):
    return FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, ["north", "south"], engine="local")


def answers_of(fed, name, site=None, log=lambda line: None):
    folder = SiteFolder(fed.path / "sites" / name)
    return Answers(site or Echo(name), folder.key, folder.coordinator, log)


@pytest.fixture
def open_site(fed):
    """Opens a site's socket where a local engine looks for it; all are closed in the end."""
    made = []

    def opened(name, site=None, path=None):
        made.append(AnswerSocket(answers_of(fed, name, site), path or place(fed, name)))
        return made[-1]

    yield opened
    for one in made:
        one.close()


def exchange(engine, contents):
    """One exchange of messages over an engine."""
    lines = []
    post = Delivery(engine, lambda: list(contents), Settings(), lines.append)
    return post.collect(contents, lambda site, content: content), lines


# -- seals ------------------------------------------------------------------------------------------------------------


def sealed_order(*given):
    return b"".join(sealing.seal_order(*given))


def sealed_report(*given):
    return b"".join(sealing.seal_report(*given))


def answered(answers, sealed):
    """The report of a site's process to an order, as it arrives."""
    made = answers.answer(sealed)
    return None if made is None else b"".join(made)


@pytest.fixture(scope="module")
def keys():
    return [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]


def test_an_order_is_for_one_site_and_one_session_once(keys):
    coordinator, other = keys
    session = Session("north")
    sealed = sealed_order(coordinator, "1", "north", session.name, b"payload")
    assert session.open_order(coordinator.public_key(), sealed) == ("1", b"payload")
    with pytest.raises(RepeatedError, match=r"^1$"):
        session.open_order(coordinator.public_key(), sealed)
    with pytest.raises(StaleError):
        Session("north").open_order(coordinator.public_key(), sealed)
    for wrong in (
        sealed_order(other, "2", "north", session.name, b"payload"),
        sealed_order(coordinator, "2", "south", session.name, b"payload"),
        sealed_report(coordinator, "2", "north", b"payload"),
    ):
        with pytest.raises(SealError, match="signed"):
            session.open_order(coordinator.public_key(), wrong)


def test_a_session_that_has_taken_many_orders_is_another(keys, monkeypatch):
    monkeypatch.setattr(sealing, "_KEPT", 2)
    session, name = Session("north"), ""
    for i in range(5):
        name = session.name
        sealed = sealed_order(keys[0], str(i), "north", name, b"")
        if i == 2:
            with pytest.raises(StaleError):
                session.open_order(keys[0].public_key(), sealed)
            assert session.name != name
            continue
        session.open_order(keys[0].public_key(), sealed)


def test_nothing_of_a_seal_can_be_changed(keys):
    """Whichever byte of cover or payload is changed, nothing else comes out; other bytes are one kind of error."""
    site = keys[1]
    sealed = sealed_report(site, "1", "north", b"numbers")
    assert sealing.open_report(site.public_key(), "1", "north", sealed) == b"numbers"
    for i in range(len(sealed)):
        changed = sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :]
        try:
            got = sealing.open_report(site.public_key(), "1", "north", changed)
        except SealError:
            continue
        assert got == b"numbers"  # spare bits of the last letter of a signature
    for wrong in (b"", b"\xff\xff", sealed[:-1], sealed + b"x", b"\x00\x02{}", b"\x00\x04null"):
        with pytest.raises(SealError):
            sealing.open_report(site.public_key(), "1", "north", wrong)
    for order, name in (("2", "north"), ("1", "south")):
        with pytest.raises(SealError, match="not signed by"):
            sealing.open_report(site.public_key(), order, name, sealed)


def test_an_order_counts_only_with_the_coordinators_signature(fed):
    """A relay that makes, changes or repeats an order gets a refusal; the site is not asked."""
    site, lines = Echo("north"), []
    answers = answers_of(fed, "north", site, lines.append)
    key, public = pki.read_private(fed.order_key), pki.read_public(fed.public_key("north"))
    payload = wire.encode(wire.content(order="x"))
    good = sealed_order(key, "1", "north", answers.session.name, payload)
    rogue = pki.read_private(fed.path / "sites" / "south" / "site.key")
    forged = sealed_order(rogue, "2", "north", answers.session.name, payload)
    assert wire.decode(sealing.open_report(public, "1", "north", answered(answers, good))) == wire.content(order="x")
    for wrong, said in ((forged, "not signed by the coordinator"), (b"", "not signed")):
        refusal = wire.decode(sealing.open_report(public, "", "north", answered(answers, wrong)))
        assert said in wire.text(refusal, "refusal")
        assert said in lines[-1]
    assert len(site.asked) == 1
    torn = sealed_order(key, "3", "north", answers.session.name, b"torn")
    refusal = wire.decode(sealing.open_report(public, "3", "north", answered(answers, torn)))
    assert wire.text(refusal, "refusal") == "the order cannot be read"
    stale = sealed_order(key, "4", "north", "an older session", payload)
    assert answered(answers, stale) is None


def test_an_order_that_comes_again_is_carried_out_once(fed, monkeypatch):
    """Whoever lost a report on the way gets the same bytes; of long ones the site keeps the last alone."""
    site = Echo("north")
    answers, key = answers_of(fed, "north", site), pki.read_private(fed.order_key)
    payloads = {order: wire.encode(wire.content(order=order * 100)) for order in "123"}
    sealed = {o: sealed_order(key, o, "north", answers.session.name, p) for o, p in payloads.items()}
    first = {order: answered(answers, body) for order, body in sealed.items()}
    assert {order: answered(answers, body) for order, body in sealed.items()} == first
    monkeypatch.setattr("fedcomposite.federation.engines.answering._KEPT", len(first["1"]))
    again = sealed_order(key, "4", "north", answers.session.name, payloads["1"])
    last = answered(answers, again)
    assert [answered(answers, body) for body in (*sealed.values(), again)] == [None, None, None, last]
    assert len(site.asked) == 4
    assert not site.noted


def test_the_key_for_orders_is_rotated(fed):
    """Orders under the new key are refused until the site has its public part, and then taken without a restart."""
    answers = answers_of(fed, "south")
    public = pki.read_public(fed.public_key("south"))
    kept, before = (fed.path / "sites" / "south" / "coordinator.pub").read_bytes(), pki.read_private(fed.order_key)
    fed.rotate()
    fresh = (fed.path / "sites" / "south" / "coordinator.pub").read_bytes()
    (fed.path / "sites" / "south" / "coordinator.pub").write_bytes(kept)

    def asked(order):
        payload = wire.encode(wire.content(order="x"))
        key = pki.read_private(fed.order_key)
        return answered(answers, sealed_order(key, order, "south", answers.session.name, payload))

    assert "not signed" in wire.text(wire.decode(sealing.open_report(public, "", "south", asked("1"))), "refusal")
    (fed.path / "sites" / "south" / "coordinator.pub").write_bytes(fresh)
    assert wire.decode(sealing.open_report(public, "2", "south", asked("2"))) == wire.content(order="x")
    stolen = sealed_order(before, "3", "south", answers.session.name, wire.encode(wire.content(order="x")))
    assert "not signed" in wire.text(
        wire.decode(sealing.open_report(public, "", "south", answered(answers, stolen))), "refusal"
    )
    assert stat.S_IMODE(fed.order_key.stat().st_mode) == 0o600


# -- FLARE's jobs at a site -------------------------------------------------------------------------------------------


def packed(job, **changes):
    """A job's app as FLARE brings it to a site; files may be changed, added or left out (None)."""
    files = {p.relative_to(job / "app").as_posix(): p.read_bytes() for p in (job / "app").rglob("*") if p.is_file()}
    files |= {name: json.dumps(content).encode() for name, content in changes.items() if content is not None}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, content in files.items():
            if name not in changes or changes[name] is not None:
                file.writestr(name, content)
    return made.getvalue()


def test_a_site_lets_no_job_in_but_the_coordinators(fed, tmp_path):
    """Code, classes, settings, another signature, another site, an old key: refused, told and taken down."""
    site, lines = Echo("north"), []
    answers = answers_of(fed, "north", site, lines.append)
    listening = AnswerSocket(answers, tmp_path / "s" / "site.sock")
    key, old = pki.read_private(fed.order_key), fed.order_key.read_bytes()
    job = write_job(tmp_path / "job", "abc", ["north", "west"], key)
    client, word = "config/config_fed_client.json", "config/fedcomposite.json"
    ours = json.loads((job / "app" / client).read_text())
    said = json.loads((job / "app" / word).read_text())
    other = write_job(tmp_path / "other", "abc", ["south"], key)
    rogue = write_job(tmp_path / "rogue", "abc", ["north"], ec.generate_private_key(ec.SECP256R1()))
    evil = {"tasks": ["*"], "executor": {"path": "subprocess.Popen", "args": {"args": ["true"]}}}
    refused = [
        (packed(job, **{"custom/evil.py": ""}), "brings 'custom/evil.py'"),
        (packed(job, **{client: {**ours, "executors": [evil]}}), "its 'executors' are not this package's"),
        (packed(job, **{client: {**ours, "components": [evil]}}), "its 'components' are not"),
        (packed(job, **{client: {**ours, "task_data_filters": []}}), "its 'task_data_filters' are not"),
        (packed(job, **{word: None}), "not signed"),
        (packed(job, **{word: {**said, "sites": ["north"]}}), "not signed"),
        (packed(job, **{word: {**said, "job": "abd"}}), "not signed"),
        (packed(job, **{word: "x"}), "cannot be read"),
        (packed(job, **{word: {**said, "more": "x" * (1 << 20)}}), "too large"),
        (packed(other), "not signed"),
        (packed(rogue), "not signed"),
        (b"PK", "cannot be read"),
    ]
    try:
        ask = functools.partial(sockets.show_job, tmp_path / "s" / "site.sock", submitter="someone")
        assert ask(packed(job)) == ""
        assert not site.noted
        for app, reason in refused:
            assert reason in ask(app)
            assert site.noted[-1][0] == "a job of the engine, by someone"
            assert reason in site.noted[-1][1]
            assert "refused: a job of the engine, by someone: " in lines[-1]
        assert len(site.noted) == len(refused)
        fed.rotate()  # whoever has the old key gets no more; the new one counts without a restart
        assert "not signed" in ask(packed(job))
        fresh = write_job(tmp_path / "fresh", "abc", ["north"], pki.read_private(fed.order_key))
        assert ask(packed(fresh)) == ""
        assert fed.order_key.read_bytes() != old
        assert not site.asked
    finally:
        listening.close()


def test_what_is_refused_unread_is_in_the_audit_log_once_in_a_minute(fed, tmp_path):
    (tmp_path / "north.csv").write_text("x,y\n" + "1.5,0\n2.5,1\n" * 20)
    site = open_folder(SiteFolder(fed.path / "sites" / "north"), tmp_path / "north.csv", "y")
    answers = answers_of(fed, "north", site)
    for _ in range(3):
        answers.judge(b"", "someone")
        answered(answers, b"forged")
    noted = [(line["what"], line["refused"]) for line in site._audit.verify()]
    assert noted == [
        ("a job of the engine, by someone", "it cannot be read"),
        ("an order that is not the coordinator's", "not signed"),
    ]


# -- sockets ----------------------------------------------------------------------------------------------------------


def test_a_socket_is_for_its_owner(tmp_path, monkeypatch):
    folder = tmp_path / "sockets"
    with sockets.listen(sockets.place(folder, "a")) as listening:
        assert stat.S_IMODE(sockets.place(folder, "a").stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        one, other = Channel.to(sockets.place(folder, "a")), Channel(listening.accept()[0])
        one.send({"n": 1}, bytes(3000))
        assert other.receive() == ({"n": 1}, bytes(3000))
        one.close()
        with pytest.raises(ConnectionError):
            other.receive()
        other.close()
        Channel.to(sockets.place(folder, "a")).close()
        stranger = listening.accept()[0]
        with monkeypatch.context() as patch:
            patch.setattr(sockets, "is_mine", lambda connection: False)
            with pytest.raises(ConnectionError, match="another account"):
                Channel(stranger)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(UserError, match="must be a folder of this account"):
            Channel.to(sockets.place(folder, "a"))
        monkeypatch.undo()
        folder.chmod(0o755)
        with pytest.raises(UserError, match="chmod 700"):
            Channel.to(sockets.place(folder, "a"))


def test_a_long_path_has_its_socket_elsewhere(tmp_path):
    deep = tmp_path / ("x" * 90) / ("y" * 90)
    path = sockets.place(deep, "a")
    assert len(str(path)) < 100
    assert path == sockets.place(deep, "a") != sockets.place(deep, "b")
    with sockets.listen(path):
        Channel.to(path).close()
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("frame", [b"\xff" * 12, b"\x00\x00\x00\x03" + bytes(8) + b"{,}", b"\x00\x00"])
def test_what_is_no_frame_ends_the_connection(frame):
    one, other = socket.socketpair(socket.AF_UNIX)
    with one:
        one.sendall(frame)
        one.shutdown(socket.SHUT_WR)
        channel = Channel(other)
        with pytest.raises(ConnectionError):
            channel.receive()
        channel.close()


def test_a_relay_needs_neither_torch_nor_numpy():
    """Engines start processes for jobs; what they load of the package is small."""
    code = (
        "import sys, fedcomposite.federation.engines.relaying, fedcomposite.federation.engines.watched; "
        "print([n for n in ('torch', 'numpy', 'pandas', 'pydantic', 'cryptography') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- sites on this machine --------------------------------------------------------------------------------------------


def test_sites_on_this_machine(fed, open_site):
    """Orders go to the sites' sockets, and each is answered once; large ones as well."""
    sites = {name: Echo(name) for name in fed.sites}
    for name, site in sites.items():
        open_site(name, site)
    engine = LocalEngine(fed, "job")
    try:
        contents = {name: {"order": name, "vectors": os.urandom(3_000_000)} for name in fed.sites}
        got, lines = exchange(engine, contents)
    finally:
        engine.close()
    assert got == contents
    assert lines == []
    assert all(len(site.asked) == 1 for site in sites.values())
    assert seen(fed) == {"north": "", "south": ""}


def test_a_site_that_is_started_anew_gets_its_order_again(fed, open_site):
    """The order was signed for a session that is over; it is signed again, without a word to the analyst but one."""
    first = open_site("north")
    open_site("south")
    engine = LocalEngine(fed, "job")
    try:
        until(lambda: set(engine.present()) == {"north", "south"})
        first.close()
        second = Echo("north")
        open_site("north", second)
        got, lines = exchange(engine, {"north": wire.content(order="x")})
    finally:
        engine.close()
    assert got == {"north": wire.content(order="x")}
    assert len(second.asked) == 1
    assert all("north" in line for line in lines)


def test_a_site_with_another_key_is_not_believed(fed, open_site):
    """It has the socket, the name and the coordinator's word; its signature is not the registered one."""
    other = fed.path.parent / "other"
    shutil.copytree(fed.path / "sites" / "north", other)
    (other / "site.key").unlink()
    pki.make_site_key(other / "site.key")
    folder = SiteFolder(other)
    counter = AnswerSocket(
        Answers(Echo("north"), folder.key, folder.coordinator, lambda line: None), place(fed, "north")
    )
    engine, lines = LocalEngine(fed, "job"), []
    post = Delivery(engine, fed.permitted, Settings("skip", patience=0.3, min_sites=1), lines.append)
    try:
        until(engine.present)
        with pytest.raises(Exception, match="fewer than min_sites"):
            post.collect({"north": wire.content(order="x")}, lambda site, content: content)
    finally:
        engine.close()
        counter.close()
    assert lines[0] == "north did not answer: its answer is not signed by north for this order"


# -- relays -----------------------------------------------------------------------------------------------------------


class Job:
    """An engine's job in a thread: a relay between a run's socket and sites' sockets, some of which may be away."""

    def __init__(self, path, ways, name="job-1"):
        self.ways, self.over = dict(ways), threading.Event()
        self.relay = Relay(path, sorted(ways), self.ask, name)
        self.thread = threading.Thread(target=self.relay.run, args=(self.over.is_set, 0.05), daemon=True)
        self.thread.start()

    def ask(self, site, order):
        made = sockets.ask_site(self.ways[site], *([] if order is None else [order]))
        return made.session, made.report

    def end(self):
        self.over.set()
        self.thread.join(PATIENCE)


def test_a_relay_carries_orders_and_the_run_outlives_its_jobs(fed, open_site):
    """A job ends in the middle, another one comes, a site is started anew: each order is answered in the end."""
    sites = {name: Echo(name) for name in fed.sites}
    counters = {name: open_site(name, site) for name, site in sites.items()}
    ways = {name: place(fed, name) for name in fed.sites}
    engine = RelayedDispatch(fed, sockets.place(fed.state / "relays", "job"))
    try:
        first = Job(sockets.place(fed.state / "relays", "job"), ways)
        contents = {name: wire.content(order=name) for name in fed.sites}
        assert exchange(engine, contents)[0] == contents
        assert engine.relayed() == {"job-1": {"north", "south"}}
        first.end()
        until(lambda: not engine.present())
        second = Job(sockets.place(fed.state / "relays", "job"), ways, "job-2")
        assert exchange(engine, contents)[0] == contents
        counters["north"].close()
        until(lambda: set(engine.present()) == {"south"})
        open_site("north", Echo("north"))
        assert exchange(engine, contents)[0] == contents
        third = Job(sockets.place(fed.state / "relays", "job"), {"north": ways["north"]}, "job-3")
        assert exchange(engine, contents)[0] == contents
    finally:
        engine.close()
    for job in (second, third):
        job.thread.join(PATIENCE)
        assert not job.thread.is_alive()  # the run is over, so is the relay


def test_an_order_in_flight_is_lost_with_its_job_and_sent_again(fed, open_site):
    """The site is busy when the job is lost; its answer to the second order is the one that counts."""
    hold = threading.Event()

    class Slow(Echo):
        def answer(self, content):
            hold.wait(PATIENCE)
            return super().answer(content)

    site = Slow("north")
    open_site("north", site)
    path = sockets.place(fed.state / "relays", "job")
    engine = RelayedDispatch(fed, path)
    try:
        first = Job(path, {"north": place(fed, "north")})
        until(engine.present)
        lines, got = [], {}
        post = Delivery(engine, fed.permitted, Settings(), lines.append)
        asking = threading.Thread(
            target=lambda: got.update(post.collect({"north": wire.content(order="x")}, lambda s, content: content))
        )
        asking.start()
        until(lambda: engine._sent)
        first.over.set()
        until(lambda: "north did not answer: the engine's job has ended" in lines)
        Job(path, {"north": place(fed, "north")}, "job-2")
        hold.set()
        asking.join(PATIENCE)
    finally:
        engine.close()
    assert got == {"north": wire.content(order="x")}


def test_what_a_network_loses_without_a_word_is_given_again(fed, open_site, monkeypatch):
    """Neither the order nor its report arrives at first; the site carries it out once."""
    monkeypatch.setattr("fedcomposite.federation.engines.relaying._PATIENCE", 0.05)
    site = Echo("north")
    open_site("north", site)
    path, lost = sockets.place(fed.state / "relays", "job"), ["order", "report"]

    class Bad(Job):
        def ask(self, site, order):
            what = lost.pop(0) if order is not None and lost else ""
            made = None if what == "order" else super().ask(site, order)
            if what:
                threading.Event().wait()
            return made

    engine = RelayedDispatch(fed, path)
    try:
        Bad(path, {"north": place(fed, "north")})
        contents = {"north": wire.content(order="x")}
        assert exchange(engine, contents) == (contents, [])
    finally:
        engine.close()
    assert site.asked == [wire.content(order="x")]
    assert not lost


def test_a_site_behind_a_slow_line_is_not_lost(fed, open_site, monkeypatch):
    """Looks wait behind a large order and time out; one that fails at once means that nobody is there."""
    module = "fedcomposite.federation.engines.relaying."
    monkeypatch.setattr(f"{module}_QUICK", 0.01)
    open_site("north", Echo("north"))
    path, looks, wait = sockets.place(fed.state / "relays", "job"), [], [0.02]
    carried, gone = threading.Event(), threading.Event()

    class Slow(Job):
        def ask(self, site, order):
            if order is not None:
                carried.set()
                until(lambda: len(looks) > MISSES + 1 or gone.is_set())
            elif carried.is_set():
                looks.append(site)
                time.sleep(wait[0])
                return None
            return super().ask(site, order)

    engine = RelayedDispatch(fed, path)
    try:
        Slow(path, {"north": place(fed, "north")})
        contents = {"north": wire.content(order="x" * 4_000_000)}  # at most 20 s on the slowest line
        assert exchange(engine, contents) == (contents, [])
        looks.clear()
        wait[0] = 0.0
        gone.set()
        until(lambda: not engine.present())
    finally:
        engine.close()


def test_a_relay_of_a_run_that_is_gone_ends(fed):
    with pytest.raises(OSError, match=r"."):
        Relay(sockets.place(fed.state / "relays", "gone"), [], lambda site, order: None)


def test_a_relay_that_lies_costs_nothing_but_time(fed, open_site):
    """It says that sites are there, brings reports of its own, and answers orders that were never given."""
    path = sockets.place(fed.state / "relays", "job")
    engine = RelayedDispatch(fed, path)
    channel = Channel.to(path)
    try:
        channel.send({"what": "relay", "name": "evil"})
        channel.send({"what": "came", "site": "north", "session": "made up"})
        channel.send({"what": "report", "order": "never given"}, b"x")
        until(engine.present)
        (order,) = engine.push({"north": b"payload"}).values()
        head, body = channel.receive()
        assert head == {"site": "north", "order": order}
        assert b"payload" in body
        own = sealed_report(ec.generate_private_key(ec.SECP256R1()), order, "north", b"numbers")
        channel.send({"what": "report", "order": order}, own)
        (reply,) = until(lambda: engine.pull([order]))
        assert reply.report is None
        assert reply.lost == "its answer is not signed by north for this order"
    finally:
        channel.close()
        engine.close()


# -- programs ---------------------------------------------------------------------------------------------------------


def test_a_program_ends_with_its_parent(tmp_path):
    """However the parent ends: nobody is left who speaks in its name."""
    code = (
        "import os, signal, sys, time; from pathlib import Path; "
        "from fedcomposite.federation.engines.processes import EngineProcess; "
        "says = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'; "
        "one = EngineProcess([sys.executable, '-c', says], "
        f"Path({str(tmp_path / 'log')!r}), {{}}); one.start(); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        log = tmp_path / "log"
        child = int(until(lambda: log.exists() and log.read_text().strip()))
        parent.kill()
    until(lambda: not Path(f"/proc/{child}").exists() or b"Z" in Path(f"/proc/{child}/stat").read_bytes())


# -- folders and commands ---------------------------------------------------------------------------------------------


def command(*words, code=0):
    done = CliRunner().invoke(federation_app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def test_revoke_reinstate_rekey_and_add(fed):
    command("revoke", fed.path, "north")
    assert FederationFolder(fed.path).permitted() == ["south"]
    command("reinstate", fed.path, "north")
    old = fed.public_key("north").read_bytes()
    assert "in place of its site.key" in command("rekey", fed.path, "north")
    assert fed.public_key("north").read_bytes() != old
    command("add-site", fed.path, "west")
    made = FederationFolder(fed.path)
    assert made.permitted() == ["north", "south", "west"]
    assert set(SiteFolder(made.path / "sites" / "west").peers) == {"north", "south"}
    assert [row["status"] for row in json.loads(command("status", fed.path, "--json"))["sites"]] == ["offline"] * 3


def test_a_device_that_is_not_there_is_refused(fed, tmp_path):
    """Never silently another one; the one that is there is used."""
    (tmp_path / "north.csv").write_text("x,y\n" + "1.5,0\n2.5,1\n" * 20)
    site = fed.path / "sites" / "north" / "site.toml"
    text = site.read_text()
    site.write_text(text.replace('# device = "cuda"', 'device = "cuda:99"', 1))
    said = command("join", site.parent, "--data", tmp_path / "north.csv", "--target", "y", code=2)
    assert "[site] device = 'cuda:99' cannot be used here: " in said
    site.write_text(text.replace('# device = "cuda"', 'device = "cpu"', 1))
    assert open_folder(SiteFolder(site.parent), tmp_path / "north.csv", "y").device == "cpu"


def test_without_a_server(tmp_path, fed):
    assert "nothing is served" in command("serve", fed.path, code=1)
    flower = FederationFolder.create(tmp_path / "flower", "127.0.0.1", 0, ["a"], engine="flower")
    assert "is `fedcomposite federation serve` running?" in command("status", flower.path, code=1)
    with socket.create_server(("127.0.0.1", flower.port)), pytest.raises(EngineError, match="another program has it"):
        selection.serve(flower, lambda: None, lambda line: None)


ASKED = """
import sys
import time
from pathlib import Path
from fedcomposite.federation.engines.engine import EngineError
from fedcomposite.federation.engines.nvflare import NvflareEngine, administration
from fedcomposite.federation.folders import FederationFolder
fed = FederationFolder(Path(sys.argv[1]))
try:
    with administration(fed, 1.0):
        pass
except EngineError as error:
    print(error)
engine = NvflareEngine(fed, "job", print)
while not engine._lost:
    time.sleep(0.1)
engine.close()
"""


def test_a_program_that_has_asked_a_flare_that_is_gone_ends(tmp_path):
    """Sessions that never began are ended: they would look for the server for ever, and keep the program with them."""
    pytest.importorskip("nvflare", reason="the extra [federation] is not installed")
    made = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, ["a"])
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(made.path)], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert re.search(r"does not answer .*\n.*asking again", done.stdout), done.stdout


def test_a_kit_takes_flares_unsafe_defaults_back(tmp_path):
    """No code, no shell, no logs, no other classes, no other place for jobs; and each site is given its own kit."""
    pytest.importorskip("nvflare", reason="the extra [federation] is not installed")
    made = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, ["a", "b"])
    for kit in (made.path / "flare" / "server", made.path / "sites" / "a" / "flare"):
        rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
        assert {role["byoc"] for role in rights.values()} == {"none"}
        assert {role["shell_commands"] for role in rights.values()} == {"none"}
        assert {role["download_job"] for role in rights.values()} == {"none"}
        settings = json.loads((kit / "local" / "resources.json").read_text())
        assert settings["class_list_enforcement_mode"] == "enforce"
        assert settings["class_allow_list"] == ["fedcomposite.federation.engines.nvflare_job."]
        assert not {"site_log_streamer", "log_receiver"} & {one["id"] for one in settings["components"]}
        assert "/tmp/nvflare" not in json.dumps(settings)
    assert settings["allow_log_streaming"] is False
    assert made.add_site("c").joinpath("flare", "startup", "client.crt").is_file()
    assert not list((made.path / "flare" / "federation").glob("prod_*"))  # no second copy of anybody's key


def test_flares_server_names_no_folder_of_the_kit_as_a_job(monkeypatch):
    """It could have FLARE's client delete the folder of a job that is called "startup"."""
    pytest.importorskip("nvflare", reason="the extra [federation] is not installed")
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import RequestHeader
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

    from fedcomposite.federation.engines.nvflare_job import JobGate

    deleted = []
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", [*ClientRequestProcessors.request_processors])
    every = {type(one).__name__: one for one in ClientRequestProcessors.request_processors}
    delete = every["DeleteRunNumberProcessor"]
    monkeypatch.setattr(delete, "process", lambda req, app: deleted.append(req.get_header(RequestHeader.JOB_ID)))
    JobGate()
    (topic,) = delete.get_topics()
    (kept,) = [one for one in ClientRequestProcessors.request_processors if topic in one.get_topics()]
    for name in ("startup", "local", "../state", str(uuid.uuid4())):
        request = Message(topic, "")
        request.set_header(RequestHeader.JOB_ID, name)
        kept.process(request, None)
    assert deleted == [name]


def test_flare_writes_no_large_message_into_a_log():
    """It formats what has arrived, all of it, for a line that nobody asked for."""
    pytest.importorskip("nvflare", reason="the extra [federation] is not installed")
    from nvflare.fuel.utils.buffer_list import ConsumableBufferList

    import fedcomposite.federation.engines.nvflare_job  # noqa: F401 (what a job's processes load)

    assert f"{ConsumableBufferList([b'x' * 1000, b'y'])}" == "2 pieces"
