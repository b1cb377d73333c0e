"""The coordinator's service and its sites over real sockets: who may do what, and what a bad network costs."""

import contextlib
import json
import os
import resource
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

pytest.importorskip("flwr", reason="the extra [flower] is not installed")

from bad_network import Proxy
from running_service import PATIENCE, Caller, Running, ask, joined, until, vectors
from typer.testing import CliRunner

from fedcomposite.cli.federation import federation_app
from fedcomposite.federation import demo, wire
from fedcomposite.federation.coordinator.delivery import Delivery, Settings
from fedcomposite.federation.engines import (
    admin_socket,
    certificate_lifetimes,
    connection,
    connection_limit,
    pki,
    service,
    signing,
    site_api,
)
from fedcomposite.federation.engines.admin_socket import AdminClient, AdminSocketError
from fedcomposite.federation.engines.flower import EngineError
from fedcomposite.federation.engines.grid import ServiceEngine
from fedcomposite.federation.engines.mailbox import Mailbox, RefusedRequestError, Ticket
from fedcomposite.federation.folders import FederationFolder, FolderError, SiteFolder
from fedcomposite.federation.orders import Introduction, Order

FILES = resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.fixture(scope="module")
def fed(tmp_path_factory):
    return FederationFolder.create(
        tmp_path_factory.mktemp("service") / "fed", "127.0.0.1", 0, ["north", "south", "west"]
    )


@pytest.fixture(scope="module")
def running(fed):
    # The environment in which administration was open to everybody.
    made = Running(fed, FORWARDED_ALLOW_IPS="*")
    assert "serving on" in made.said(), made.said()
    yield made
    made.stop()


@pytest.fixture
def north(running, fed):
    made = Caller(fed, "north")
    assert made.open()[0] == 200
    yield made
    made.client.close()


# -- who may do what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claims", [{}, {"x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1"}])
@pytest.mark.parametrize(
    "path",
    ["/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/v1/fleet/pull-messages",
     "/docs", "/openapi.json", "/put", "/reload", "/status", "/v1/sites/next"],
)  # fmt: skip
def test_administration_is_not_on_the_network(running, fed, path, claims):
    """Not from this machine either, and whatever the headers say about where a request comes from."""
    context = ssl.create_default_context(cafile=str(fed.authority))
    got = httpx.post(f"https://{fed.address}{path}", verify=context, headers=claims, content=b"{}", trust_env=False)
    assert got.status_code == 403


def test_the_owners_socket_is_for_the_owner(running, fed):
    path = admin_socket.place(fed.state)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    if os.getuid() == 0:  # another account of this machine
        code = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        assert "PermissionError" in done.stderr
    arguments = Path(f"/proc/{running.process.pid}/cmdline").read_text()
    assert arguments.count("\0") == 6  # python -m fedcomposite federation serve FOLDER: nothing secret
    os.chmod(path.parent, 0o755)
    try:
        with pytest.raises(FolderError.__base__, match="no other can enter"):
            AdminClient(fed.state)
    finally:
        os.chmod(path.parent, 0o700)


def test_a_service_that_is_open_does_not_serve(fed, monkeypatch, running):
    """The probe asks for what must be refused, and believes nothing else."""
    service.probe(fed)
    real = httpx.Client.post
    monkeypatch.setattr(
        httpx.Client, "post", lambda self, url, **k: httpx.Response(200) if "start-run" in url else real(self, url, **k)
    )
    with pytest.raises(EngineError, match="start-run was not refused"):
        service.probe(fed)


def test_requests_are_signed_as_a_whole(north, fed):
    """Method, path, body, number and session: with any of them changed a signature is worth nothing."""
    assert north.call("POST", "beat")[0] == 200
    headers = north.headers("POST", "beat")
    client = north.client
    assert client.post("/v1/sites/beat", headers=headers).status_code == 200
    assert client.post("/v1/sites/beat", headers=headers).json()["reason"] == "number"  # the same once more
    assert north.open()[0] == 200
    for path, body in [("/v1/sites/leave", b""), ("/v1/sites/beat", b"other")]:
        got = client.post(path, headers=north.headers("POST", "beat"), content=body)
        assert got.status_code == 403
    got = client.get("/v1/sites/beat", headers=north.headers("POST", "beat"))
    assert got.status_code == 403
    assert (
        client.post("/v1/sites/beat", headers=north.headers("POST", "beat") | {signing.SITE: "south"}).status_code
        == 403
    )
    assert (
        client.post("/v1/sites/beat", headers=north.headers("POST", "beat") | {signing.NUMBER: "99"}).status_code == 403
    )
    stale = north.headers("POST", "open")
    assert client.post("/v1/sites/open", headers=stale).status_code == 401  # a challenge opens one session
    assert north.call("POST", "beat")[0] == 200
    stranger = Caller(fed, "north", pki._key())
    assert stranger.open() == (403, {"reason": "unknown"})


def test_a_body_is_not_read_before_its_sender_is_known(running, fed, north):
    """Gigabytes from strangers, or more than was announced, are not taken in."""
    before = running.memory()
    context = ssl.create_default_context(cafile=str(fed.authority))
    for length, headers in [
        (1 << 40, {}),
        (1 << 30, north.headers("PUT", "reply/0/0/1")),
    ]:
        text = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        raw = socket.create_connection(("127.0.0.1", fed.port))
        with context.wrap_socket(raw, server_hostname="127.0.0.1") as secure:
            secure.settimeout(PATIENCE)
            secure.sendall(
                f"PUT /v1/sites/reply/0/0/1 HTTP/1.1\r\nhost: x\r\n{text}content-length: {length}\r\n\r\n".encode()
            )
            sent = 0
            with contextlib.suppress(OSError):
                while sent < 64 << 20:
                    secure.sendall(bytes(1 << 20))
                    sent += 1 << 20
            answered = b""
            with contextlib.suppress(OSError):
                answered = secure.recv(100)
            assert sent < 64 << 20 or b" 403" in answered or b" 413" in answered
    assert running.memory() - before < 40e6


@pytest.mark.parametrize("secure", [False, True])
def test_silent_connections_do_not_stop_a_site(running, fed, secure):
    """Five hundred of them, before and after the handshake: the oldest give way, and who speaks is served."""
    context = ssl.create_default_context(cafile=str(fed.authority))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, FILES[1]), FILES[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, FILES)
        site = Caller(fed, "north")
        assert site.open()[0] == 200
        silent = []
        for _ in range(500):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", fed.port), timeout=PATIENCE))
            if secure:
                one = stack.enter_context(context.wrap_socket(one, server_hostname="127.0.0.1"))
            silent.append(one)
        assert site.call("POST", "beat")[0] == 200  # over the connection that it has
        assert Caller(fed, "south").open()[0] == 200  # over a new one
        for one in silent[:200]:  # they have been ended
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert one.recv(1) == b""
        files = len(list(Path(f"/proc/{running.process.pid}/fd").iterdir()))
        assert files < connection_limit.STRANGERS + 100


def test_the_door_counts_by_site_and_by_address(monkeypatch):
    """The address with most strangers gives way, and a site with too many connections loses its oldest."""
    monkeypatch.setattr(connection_limit, "STRANGERS", 3)
    monkeypatch.setattr(connection_limit, "PER_SITE", 2)
    ended, one = [], connection_limit.ConnectionLimit()

    def guest(address):
        made = connection_limit.Newcomer(address)
        made.end = lambda: ended.append(made)
        one.come(made)
        return made

    quiet, *loud = guest("a"), guest("b"), guest("b"), guest("b")
    assert ended == [loud[0]]
    one.know(loud[0], "north")  # too late
    for made in (quiet, *loud[1:]):
        one.know(made, "north")
    assert ended == [loud[0], quiet]
    one.leave(loud[1])
    one.know(guest("c"), "north")
    assert len(ended) == 2


def test_headers_without_end_are_cut(running, fed):
    """Slow ones after their time, long ones at once."""
    context = ssl.create_default_context(cafile=str(fed.authority))
    for start, answer in [
        (b"GET /health HTTP/1.1\r\n", b""),
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * 50_000, b" 400"),
    ]:
        raw = socket.create_connection(("127.0.0.1", fed.port))
        with context.wrap_socket(raw, server_hostname="127.0.0.1") as secure:
            secure.settimeout(PATIENCE)
            said = b""
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                secure.sendall(start)
                while part := secure.recv(100):
                    said += part
            assert answer in said


def test_an_order_counts_only_with_the_coordinators_signature(running, fed):
    """What another site, or a broken service, puts into a box is refused before it is decoded."""
    with joined(fed, "south") as (site, lines, _):
        assert set(ask(fed, {"south": vectors(3)})) == {"south"}
        assert len(site.asked) == 1
        counter = AdminClient(fed.state)
        payload = wire.encode(vectors(5))
        good = pki.read_private(fed.order_key)
        rogue = pki.read_private(fed.path / "sites" / "north" / "site.key")
        for i, ticket in enumerate(
            [
                Ticket(id=f"{1:032x}", site="south", job="j", size=len(payload), digest=signing.digest(payload)).sealed(
                    rogue
                ),
                Ticket(id=f"{2:032x}", site="south", job="j", size=len(payload), digest=signing.digest(b"x")).sealed(
                    good
                ),
                Ticket(id=f"{3:032x}", site="south", job="j", size=len(payload), digest=signing.digest(payload)),
            ]
        ):
            (fed.spool / ticket.id).write_bytes(payload)
            counter.ask("put", tickets=[ticket.model_dump()])
            until(lambda i=i: sum("not signed by the coordinator" in line for line in lines) > i)
            said = until(lambda t=ticket: counter.ask("collect", job="j", orders=[t.id], seconds=1.0, drop=[])["done"])
            assert said == [ticket.id]
            refusal = wire.decode((fed.spool / f"{ticket.id}.reply").read_bytes())
            assert "not signed by the coordinator" in wire.text(refusal, "refusal")
        counter.ask("end", job="j")
        counter.close()
        assert len(site.asked) == 1


# -- keys ------------------------------------------------------------------------------------------------------------


def command(*arguments, code=0):
    done = CliRunner().invoke(federation_app, list(map(str, arguments)))
    assert done.exit_code == code, done.output
    return done.output


def test_revoke_reinstate_rekey_and_add(running, fed):
    """Each takes effect at once, without a restart; what was decided while the service was down counts as well."""
    west = Caller(fed, "west")
    assert west.open()[0] == 200
    with joined(fed, "west") as (_, lines, over):
        until(lambda: "waiting for work" in " ".join(lines))
        command("revoke", fed.path, "west")
        assert over.wait(PATIENCE)
        assert "no longer accepts west: it was revoked" in lines[-1]
    assert west.open() == (403, {"reason": "revoked"})
    command("reinstate", fed.path, "west")
    assert west.open()[0] == 200
    command("rekey", fed.path, "west")
    assert west.call("POST", "beat") == (403, {"reason": "unknown"})
    again = Caller(fed, "west")
    assert again.open()[0] == 200
    command("add-site", fed.path, "east")
    assert Caller(fed, "east").open()[0] == 200
    assert FederationFolder(fed.path).sites[-1] == "east"
    command("add-site", fed.path, "east", code=2)
    running.stop()
    command("revoke", fed.path, "east")
    again_running = Running(fed)
    running.process, running.began = again_running.process, again_running.began
    assert Caller(fed, "east").open() == (403, {"reason": "revoked"})
    assert again.open()[0] == 200


def test_the_key_for_orders_is_rotated(running, fed, tmp_path):
    """A site with the old one refuses and says what to do; with the new file it goes on, without a restart."""
    place = shutil.copytree(fed.path / "sites" / "south", tmp_path / "south")
    with joined(fed, "south", folder=place) as (site, lines, _):
        assert set(ask(fed, {"south": vectors(3)})) == {"south"}
        said = command("rotate", fed.path)
        assert all(f"carry to {name}" in said for name in fed.sites)
        refused = wire.text(ask(fed, {"south": vectors(3)})["south"], "refusal")
        assert "if the coordinator has a new key, put its coordinator.pub into the site's folder" in refused
        assert refused in lines[-1]
        shutil.copy(fed.path / "sites" / "south" / "coordinator.pub", place)
        assert wire.encode(ask(fed, {"south": vectors(4)})["south"]) == wire.encode(vectors(4))
        assert len(site.asked) == 2
    assert stat.S_IMODE(fed.order_key.stat().st_mode) == 0o600
    assert sorted(p.name for p in fed.order_key.parent.iterdir()) == ["orders.key", "server.key", "server.pem"]


def test_folders_of_older_versions(tmp_path):
    """Without a key for orders: one line that says what to run, at both ends."""
    old = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, ["a", "b"])
    old.order_key.unlink()
    for name in old.sites:
        (old.path / "sites" / name / "coordinator.pub").unlink()
    key = (old.path / "sites" / "a" / "site.key").read_bytes()
    for arguments in (["serve", old.path], ["rekey", old.path, "a"], ["add-site", old.path, "c"]):
        said = " ".join(command(*arguments, code=2).split())
        assert f"make one with: fedcomposite federation rotate {old.path}" in said
    assert (old.path / "sites" / "a" / "site.key").read_bytes() == key
    with pytest.raises(FolderError, match=r"coordinator.pub: missing .* ask the coordinator"):
        SiteFolder(old.path / "sites" / "a")
    command("rotate", old.path)
    assert SiteFolder(old.path / "sites" / "a").coordinator.read_bytes() == pki.public_part(old.order_key)


def test_a_second_process_with_a_sites_key_is_noticed(running, fed, monkeypatch):
    """By the coordinator's status and in the log of the first one; neither is locked out for good."""
    monkeypatch.setattr(connection, "_ELSEWHERE", 0.5)
    thief = Caller(fed, "north")
    with joined(fed, "north") as (_, lines, _):
        until(lambda: "waiting for work" in " ".join(lines))
        assert thief.open()[0] == 200
        until(lambda: "the key was stolen" in " ".join(lines))
        shown = " ".join(command("status", fed.path).split())
        assert "north: a second process came with its key" in shown
        assert "rekey" in shown
        until(lambda: thief.call("POST", "beat")[0] == 401)  # the first one has come back


# -- a bad network ---------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(running, fed):
    made = []

    def make(**options):
        made.append(Proxy(fed.port, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_resets_change_nothing(running, fed, proxy):
    """One piece in twenty resets its connection, on both ways; every message arrives, once, and whole."""
    bad = proxy(resets=0.05)
    with joined(fed, "south", bad.port) as (site, _, _):
        for i in range(3):
            content = vectors(200_000, seed=i)  # 1.6 MB: several pieces each way
            assert wire.encode(ask(fed, {"south": content})["south"]) == wire.encode(content)
    assert bad.broken > 0
    assert len(site.asked) == 3


def test_a_slow_uplink_delivers(running, fed, proxy):
    """Pieces fit the link: only silence is failure, not the time that a vector takes."""
    bad = proxy(rate=400_000)
    with joined(fed, "south", bad.port, silence=3.0) as (site, lines, _):
        content = vectors(400_000)  # 3.2 MB: eight seconds, more than the silence that counts as failure
        assert wire.encode(ask(fed, {"south": content})["south"]) == wire.encode(content)
    assert len(site.asked) == 1
    assert not any("no connection" in line for line in lines)


def test_a_cut_cable_is_noticed_on_both_sides(running, fed, proxy):
    """The site says so and comes back by itself; the order that was lost meanwhile is delivered."""
    bad = proxy()
    with joined(fed, "south", bad.port, silence=3.0) as (_, lines, _):
        until(lambda: "waiting for work" in " ".join(lines))
        bad.cut = True
        until(lambda: "no connection to" in " ".join(lines))
        got = {}
        asking = threading.Thread(target=lambda: got.update(ask(fed, {"south": vectors(7)})))
        asking.start()
        bad.cut = False
        asking.join(PATIENCE)
        assert wire.encode(got["south"]) == wire.encode(vectors(7))
        assert "connected again" in " ".join(lines)


def test_an_error_of_the_service_is_not_the_end_of_a_site(running, fed, monkeypatch):
    """Status 500, and a session that the service has forgotten: the site says the reason and comes back."""
    real, failing = httpx.Client.request, threading.Event()

    def request(self, method, url, **options):
        got = real(self, method, url, **options)
        if failing.is_set() and url == "/v1/sites/next":
            return httpx.Response(500, request=got.request)
        return got

    monkeypatch.setattr(httpx.Client, "request", request)
    with joined(fed, "south") as (_, lines, over):
        until(lambda: "waiting for work" in " ".join(lines))
        failing.set()
        ask_later = threading.Thread(target=lambda: ask(fed, {"south": vectors(2)}))
        ask_later.start()
        until(lambda: "answers with an error (500)" in " ".join(lines))
        failing.clear()
        ask_later.join(PATIENCE)
        assert not over.is_set()
        # The service is replaced by one that remembers nothing.
        running.stop()
        until(lambda: "cannot be reached" in " ".join(lines) or "no connection" in " ".join(lines))
        fresh = Running(fed)
        running.process, running.began = fresh.process, fresh.began
        assert wire.encode(ask(fed, {"south": vectors(4)})["south"]) == wire.encode(vectors(4))
        assert not over.is_set()


def test_a_wrong_clock_at_a_site_does_not_matter(running, fed, monkeypatch):
    real = time.time
    with joined(fed, "south") as (_, lines, over):
        for shift in (7.0, -400.0, 1e6):
            monkeypatch.setattr(time, "time", lambda shift=shift: real() + shift)
            Caller(fed, "south").open()  # so that the site has to open a new session as well
            monkeypatch.setattr(connection, "_ELSEWHERE", 0.1)
            assert wire.encode(ask(fed, {"south": vectors(3)})["south"]) == wire.encode(vectors(3))
        assert not over.is_set(), lines


def test_fifty_sites(running, fed):
    names = [f"site{i}" for i in range(50)]
    for name in names:
        fed.add_site(name)
    counter = AdminClient(fed.state)
    counter.ask("reload")
    counter.close()
    with contextlib.ExitStack() as stack:
        sites = {name: stack.enter_context(joined(fed, name))[0] for name in names}
        for i in range(3):
            content = {name: vectors(11 + i, seed=j) for j, name in enumerate(names)}
            got = ask(fed, content, job=f"job{i}")
            assert {k: wire.encode(v) for k, v in got.items()} == {k: wire.encode(v) for k, v in content.items()}
        assert all(len(site.asked) == 3 for site in sites.values())


def test_a_reply_that_is_begun_and_never_ended_costs_the_patience(running, fed):
    """The others are not held up by more than that, and the site is named, though it is there all the time."""
    idler, whole = Caller(fed, "north"), wire.encode(vectors(50_000))
    assert idler.open()[0] == 200
    begun = []

    def dawdle():
        said = b""
        while not said:
            said = idler.client.post("/v1/sites/next", headers=idler.headers("POST", "next")).content
        order = json.loads(said.partition(b"\n")[0])["id"]
        begun.append(idler.call("PUT", f"reply/{order}/0/{len(whole)}", whole[:1000])[0])

    dawdling = threading.Thread(target=dawdle)
    lines, grid = [], ServiceEngine(fed, "job")
    try:
        with joined(fed, "south"):
            until(lambda: set(grid.present()) >= {"north", "south"})
            dawdling.start()
            post = Delivery(grid, fed.permitted, Settings(policy="skip", patience=1.0), lines.append)
            got = post.collect({name: vectors(5) for name in ("north", "south")}, lambda site, content: content)
            assert set(got) == {"south"}
            dawdling.join(PATIENCE)
            assert begun == [200]
    finally:
        grid.close()
    assert any(line.startswith("going on without north") for line in lines)


@pytest.mark.slow
def test_a_site_behind_flowers_own_supernode(tmp_path):
    """`serve --stock` and `join --stock`: an order comes to the installed package over Flower's protocol, and back."""
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, ["a"])
    place, X = fed.path / "sites" / "a", torch.randn(60, 3, dtype=torch.float64)
    rows = [",".join(map(str, [*x.tolist(), int(x[0] > 0)])) for x in X]
    (tmp_path / "a.csv").write_text("\n".join(["u,v,w,sick", *rows]))
    text = (place / "site.toml").read_text()
    added = f'[data]\nfile = "{tmp_path / "a.csv"}"\ntarget = "sick"\n'
    (place / "site.toml").write_text(text.replace("[data]\n", added, 1))
    experiment = '[algorithm]\nname = "FedAvg"\nlocal_steps = 1\nstep = 0.1\n[run]\nrounds = 1\n'
    served = Running(fed, "--stock")
    try:
        with demo.party(tmp_path / "a.log", "join", str(place), "--stock"):
            order = Order(job="job", site="a", config=experiment)
            got = ask(fed, {"a": wire.content(order=order.model_dump_json())})["a"]
    finally:
        served.stop()
    met = Introduction.read(wire.text(got, "introduction"))
    assert (met.site, met.samples, met.names, met.labels) == ("a", 60, ["u", "v", "w"], [0.0, 1.0])
    assert "only for a coordinator you trust" in (tmp_path / "a.log").read_text()


# -- the service itself ----------------------------------------------------------------------------------------------


def test_a_taken_port_is_said(running, fed, tmp_path):
    other = FederationFolder.create(tmp_path / "fed", "127.0.0.1", fed.port, ["a"])
    second = Running(other)
    assert second.process.wait(PATIENCE) == 1
    assert f"cannot listen on 127.0.0.1 port {fed.port}" in " ".join(second.said().split())


def test_two_services_of_one_folder_are_refused(running, fed):
    second = Running(fed)
    assert second.process.wait(PATIENCE) == 2
    assert "in use by process" in " ".join(second.said().split())


def test_without_a_service(tmp_path):
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, ["a"])
    with pytest.raises(AdminSocketError, match="does not run"):
        AdminClient(fed.state)
    service.bind("::1", 0).close()
    assert FederationFolder.create(tmp_path / "six", "2001:db8::7", 1, ["a"]).bind == "::"
    assert FederationFolder.create(tmp_path / "four", "192.0.2.7", 1, ["a"]).bind == "0.0.0.0"


def test_an_expired_certificate_is_renewed_and_called_expired(tmp_path, monkeypatch):
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, ["a"])
    assert not certificate_lifetimes.keep(fed)
    monkeypatch.setattr(pki, "DAYS_SERVER", 0)
    for name in ("server.key", "server.pem"):
        (fed.path / "server" / name).unlink()
    pki.make_server_certificate(fed.path / "ca", fed.path / "server", "127.0.0.1")
    monkeypatch.undo()
    assert certificate_lifetimes.keep(fed)
    assert pki.days_left(fed.path / "server" / "server.pem") > 700
    said = connection._explain("[SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired", "h:1", fed.authority)
    assert "has expired" in said
    assert "impostor" not in said
    early = connection._explain("[SSL: CERTIFICATE_VERIFY_FAILED] certificate is not yet valid", "h:1", fed.authority)
    assert "set the clock" in early


def test_pieces_of_a_reply(tmp_path):
    """Twice is once, a gap is answered with what is here, too much is refused, and the end drops older orders."""
    exchange = Mailbox(tmp_path / "spool")
    key = pki._key()
    exchange.register({"a": (key.public_key(), 5), "b": (key.public_key(), 6)}, [])
    a, b = exchange.parties["a"], exchange.parties["b"]
    old, new = (
        Ticket(id=f"{i:032x}", site="a", job="j", size=3, digest=signing.digest(b"abc")).sealed(key) for i in (1, 2)
    )
    for ticket in (old, new):
        (exchange.spool / ticket.id).write_bytes(b"abc")
    exchange.put([old, new])
    with pytest.raises(RefusedRequestError, match="over"):
        exchange.add_piece(b, new.id, 0, b"x", 2)
    with pytest.raises(RefusedRequestError, match="too large"):
        exchange.add_piece(a, new.id, 0, b"x", 1 << 40)
    exchange.add_piece(a, new.id, 0, b"xy", 4)
    with pytest.raises(RefusedRequestError) as refused:
        exchange.add_piece(a, new.id, 3, b"z", 4)
    assert refused.value.more == {"have": 2}
    exchange.add_piece(a, new.id, 0, b"xy", 4)
    exchange.add_piece(a, new.id, 2, b"zw", 4)
    exchange.add_piece(a, new.id, 2, b"zw", 4)  # its answer was lost
    assert (exchange.spool / f"{new.id}.reply").read_bytes() == b"xyzw"
    assert exchange.unknown([old.id, new.id]) == [old.id]
    exchange.end("j")
    assert list(exchange.spool.iterdir()) == []


def test_numbers_are_used_once():
    once = signing.Once(window=4)
    assert [once.take(n) for n in (1, 2, 2, 4, 3, 3, 9, 5, 6, 6)] == [
        True, True, False, True, True, False, True, False, True, False,
    ]  # fmt: skip
    made = signing.Challenges()
    one = made.make()
    assert made.use(one)
    assert not made.use(one)
    assert not made.use(signing.Challenges().make())
    assert not made.use("1.2.3")
    assert site_api.INLINE < site_api.PIECE
    assert json.dumps(one)
