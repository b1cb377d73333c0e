"""Keeping a federation going: certificates that end, units, containers, metrics, the live page, logs, proxies."""

import ast
import asyncio
import configparser
import contextlib
import html.parser
import json
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from browser import DESKTOP, PHONE

pytest.importorskip("flwr", reason="the extra [flower] is not installed")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from running_service import Running, ask, joined, until, vectors
from typer.main import get_command
from typer.testing import CliRunner

from fedcomposite.cli.federation import federation_app
from fedcomposite.experiments.locks import FolderLock
from fedcomposite.federation import logs, systemd
from fedcomposite.federation.coordinator import monitor, monitor_page
from fedcomposite.federation.engines import certificate_lifetimes, connection, pki, service
from fedcomposite.federation.engines.mailbox import Mailbox
from fedcomposite.federation.folders import FederationFolder, SiteFolder
from fedcomposite.federation.site import audit
from fedcomposite.federation.site.audit import Audit, AuditError

ROOT = Path(__file__).parent.parent
SITES = ["north", "south", "west"]


def cli(*words):
    got = CliRunner().invoke(federation_app, list(map(str, words)))
    return got.exit_code, " ".join(got.output.split())


@pytest.fixture
def fed(tmp_path):
    return FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, SITES)


# -- certificates -----------------------------------------------------------------------------------------------------


def shortened(monkeypatch, fed, **days):
    """The federation with certificates that end soon."""
    for name, value in days.items():
        monkeypatch.setattr(pki, name, value)
    if "DAYS_AUTHORITY" in days:
        pki.extend_authority(fed.path / "ca")
    certificate_lifetimes.renew(fed)
    monkeypatch.undo()


def test_what_ends_soon_is_said_in_time(fed, monkeypatch):
    place = SiteFolder(fed.path / "sites" / "north")
    assert certificate_lifetimes.warnings(fed) == certificate_lifetimes.warnings(place) == []
    shortened(monkeypatch, fed, DAYS_SERVER=10)
    (line,) = certificate_lifetimes.warnings(fed)
    assert "service expires in 10 days" in line
    assert f"renew {fed.path}" in line
    shortened(monkeypatch, fed, DAYS_AUTHORITY=100)
    assert any("authority expires in 100 days" in w and "--authority" in w for w in certificate_lifetimes.warnings(fed))
    place.authority.write_bytes(fed.authority.read_bytes())
    (line,) = certificate_lifetimes.warnings(place)
    assert "ask the coordinator for a new ca.crt" in line
    code, said = cli("join", place.path, "--data", "nowhere.csv", "--target", "num")
    assert code == 2
    assert "ask the coordinator for a new ca.crt" in said


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own use of pathspec
def test_a_service_renews_its_certificate_in_time(fed, monkeypatch):
    running = service.Service(fed)
    said = []
    running.keep_certificate(said.append)
    assert said == []
    shortened(monkeypatch, fed, DAYS_AUTHORITY=100, DAYS_SERVER=10)
    running.keep_certificate(said.append)
    assert "a new one is in use" in said[0]
    assert "authority expires in 100 days" in said[1]
    assert 90 < certificate_lifetimes.days(fed)["service"] <= 100


def test_a_renewal_that_was_cut_short_is_made_again(fed):
    """A crash between the two files leaves a key that does not belong to the certificate."""
    assert not certificate_lifetimes.keep(fed)
    pki.make_server_certificate(fed.path / "ca", fed.path / "server" / "next", fed.host)
    os.replace(fed.path / "server" / "next" / "server.key", fed.path / "server" / "server.key")
    assert certificate_lifetimes.keep(fed)
    assert trusted(fed, fed.authority) == "127.0.0.1"
    assert not certificate_lifetimes.keep(fed)


@pytest.mark.parametrize(("left", "said"), [(-3.0, "has expired"), (0.4, "expires today"), (29.6, "in 30 days")])
def test_words_for_the_time_that_is_left(left, said):
    (line,) = certificate_lifetimes._lines({"service": left}, Path("/fed"))
    assert said in line


def trusted(fed, authority):
    """Whether the service's certificate is good under an authority's file, by a handshake in memory."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(authority))
    server.load_cert_chain(fed.path / "server" / "server.pem", fed.path / "server" / "server.key")
    ends = [ssl.MemoryBIO() for _ in range(2)]
    one, other = (
        client.wrap_bio(ends[0], ends[1], server_hostname="127.0.0.1"),
        server.wrap_bio(ends[1], ends[0], server_side=True),
    )
    for _ in range(4):
        for end in (one, other):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return one.getpeercert()["subject"][0][0][1]


def test_renewal_is_good_under_the_old_and_the_new_authority(fed, tmp_path):
    """Sites get the new ca.crt one after another; until then the old one still vouches for the service."""
    old = tmp_path / "old.crt"
    shutil.copy(fed.authority, old)
    before = (fed.path / "server" / "server.key").read_bytes()
    code, said = cli("renew", fed.path, "--authority", "--days", 90)
    assert code == 0, said
    assert "the service does not run" in said
    assert "90 days" in said
    assert (fed.path / "server" / "server.key").read_bytes() != before
    assert os.stat(fed.path / "server" / "server.key").st_mode & 0o077 == 0
    for name in SITES:
        assert (fed.path / "sites" / name / "ca.crt").read_bytes() == fed.authority.read_bytes() != old.read_bytes()
        assert f"carry to {name}" in said
    assert trusted(fed, old) == trusted(fed, fed.authority) == "127.0.0.1"
    other = FederationFolder.create(tmp_path / "other", "127.0.0.1", 0, ["a"])
    with pytest.raises(ssl.SSLCertVerificationError):
        trusted(fed, other.authority)


def test_nothing_outlives_who_vouches_for_it(fed, monkeypatch):
    shortened(monkeypatch, fed, DAYS_AUTHORITY=50)
    certificate_lifetimes.renew(fed)
    ends = [
        x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
        for path in certificate_lifetimes.certificates(fed).values()
        for p in certificate_lifetimes.certificates(fed).values()
    ]
    assert ends[0] <= ends[1] < datetime.now(UTC) + timedelta(days=51)


# -- units of systemd -------------------------------------------------------------------------------------------------


def read_unit(text):
    """A unit as systemd reads it: settings by section, words of the command."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read_string(text)
    words = [w.replace("%%", "%").replace("$$", "$") for w in shlex.split(parser["Service"]["ExecStart"])]
    return parser, words


@pytest.mark.parametrize("form", ["user", "system"])
def test_a_site_as_a_service(form, tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://me:50%25@proxy:3128")
    fed = FederationFolder.create(tmp_path / "a fed of $HOME 100%", "127.0.0.1", 0, ["north"])
    place = fed.path / "sites" / "north"
    code, said = cli("join", place, "--data", "my data.csv", "--target", "num", "--service", form, "--log", "l/x.log")
    assert code == 0, said
    path = place / "fedcomposite-north.service"
    assert os.stat(path).st_mode & 0o077 == 0
    unit, words = read_unit(path.read_text())
    assert words[1:] == [
        "-m", "fedcomposite", "federation", "join", str(place), "--data", str(Path("my data.csv").absolute()),
        "--target", "num", "--log", str(Path("l/x.log").absolute()), "--log-mb", "5",
    ]  # fmt: skip
    accepts(words[4:])
    section = unit["Service"]
    assert section["NoNewPrivileges"] == "yes"
    assert section["Restart"] == "on-failure"
    assert section["RestartPreventExitStatus"] == "2"
    assert "HTTPS_PROXY=http://me:50%%25@proxy:3128" in path.read_text()
    if form == "system":
        assert section["User"] == "fedcomposite"
        assert section["ProtectSystem"] == "strict"
        assert section["CapabilityBoundingSet"] == ""
        written = [w.replace("%%", "%") for w in shlex.split(section["ReadWritePaths"])]
        assert written == [str(place), str(Path("l").absolute())]
        assert "/etc/systemd/system/" in said
    else:
        assert "systemctl --user" in said


def test_a_coordinator_as_a_service(fed):
    code, said = cli("serve", fed.path, "--monitor", 9464, "--service", "system")
    assert code == 0, said
    _, words = read_unit((fed.path / "fedcomposite-coordinator.service").read_text())
    assert words[4:] == ["serve", str(fed.path), "--monitor", "9464"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("form", ["user", "system"])
def test_systemd_understands_the_unit(form, tmp_path):
    text = systemd.unit(form, "a site", tmp_path, ["join", str(tmp_path)], tmp_path / "x.log", user="root")
    path = tmp_path / "fedcomposite-test.service"
    path.write_text(text)
    got = subprocess.run(
        ["systemd-analyze", "verify", *(["--user"] if form == "user" else []), "--man=no", str(path)],
        capture_output=True, text=True, check=False, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    assert "fedcomposite-test" not in got.stderr, got.stderr


# -- containers -------------------------------------------------------------------------------------------------------


def accepts(words):
    """The words are a command of ``fedcomposite federation``, with options that it has."""
    command = get_command(federation_app)
    name, found, rest = command.resolve_command(command.make_context("federation", list(words), resilient_parsing=True),
                                                list(words))  # fmt: skip
    found.make_context(name, list(rest)).close()
    return name


def instructions(text):
    joined_lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M))
    return [line.split(None, 1) for line in joined_lines.splitlines() if line.strip()]


def test_the_container_recipe(tmp_path):
    """Sources exist, nothing runs as root, and the commands are this package's."""
    stages, now = {}, None
    for word, rest in instructions((ROOT / "Containerfile").read_text()):
        if word == "FROM":
            source, _, name = rest.partition(" AS ")
            now = stages[name] = list(stages.get(source, []))
            assert source in stages or re.fullmatch(r"docker\.io/library/python:3\.\d+-slim", source)
        now.append((word, rest))
    for word, rest in stages["build"]:
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / s).exists() for s in sources), sources
    ignored = (ROOT / ".containerignore").read_text().split()
    assert not {"src", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"} & set(ignored)
    asked = re.search(r"'\.\[(.*?)\]'", dict(stages["build"])["RUN"]).group(1).split(",")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(asked) <= extras.keys()
    assert "flower" in asked
    for name, first in (("coordinator", "serve"), ("site", "join")):
        last = dict(stages[name])
        user = last["USER"].split(":")
        assert all(int(part) > 0 for part in user)
        assert not [w for w, r in stages[name] if w == "ADD" or (w == "USER" and r.startswith(("0", "root")))]
        assert json.loads(last["ENTRYPOINT"]) == ["fedcomposite", "federation"]
        assert accepts(json.loads(last["CMD"])) == first
        assert last["WORKDIR"] == last["VOLUME"] == json.loads(last["CMD"])[1]
    ast.parse(json.loads(dict(stages["coordinator"])["HEALTHCHECK"].removeprefix("CMD "))[2])
    assert not (set(ignored) & {"Containerfile"})


def test_commands_in_the_recipes_comments_exist():
    text = (ROOT / "Containerfile").read_text()
    assert "--read-only" in text
    words = re.search(r"fedcomposite-site \\\n#\s+(join .*)\n", text).group(1)
    assert accepts(shlex.split(words)) == "join"


# -- the page, health and metrics -------------------------------------------------------------------------------------

EVIL = "<img src=x onerror=alert(1)>\"'\n\\" + 60 * "x"


@pytest.fixture
def watched(fed):
    """A federation whose newest job has text of others in it."""
    run = fed.runs / "heart"
    run.mkdir(parents=True)
    (fed.state / "jobs").mkdir()
    (fed.state / "jobs" / "a.json").write_text(
        json.dumps({"name": "a", "out": str(run), "settings": {"secure": True}, "data": None})
    )
    status = {
        "pid": os.getpid(),
        "state": "running",
        "round": 2,
        "rounds": 9,
        "missing": {"south": 35},
        "message": EVIL,
    }
    (run / "status.json").write_text(json.dumps({**status, "message": EVIL}))
    record = {"objective": 0.5, "bytes_up": 3e6, "bytes_down": 4e6, "epsilon": 1.25, "nonzeros": 3, "stationarity": 0.1}
    lines = [json.dumps({"round": r, **record, "objective": 1 / (1 + r)}) for r in range(3)]
    (run / "history.jsonl").write_text("\n".join(lines) + "\n" + '{"round": 3, "obj')
    exchange = Mailbox(fed.spool)
    exchange.register({n: (pki.read_public(fed.public_key(n)), i) for i, n in enumerate(SITES[:2])}, ["west"])
    return fed, exchange


def parse_metrics(text):
    """Prometheus's text format, strictly: every sample has a HELP and a TYPE before it."""
    found, typed = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert kind in ("gauge", "counter")
            typed.add(name)
        elif not line.startswith("# HELP "):
            name, labels, value = re.fullmatch(r'([a-z_]+)(\{[a-z]+="(?:[^"\\\n]|\\[\\n"])*"\})? (\S+)', line).groups()
            assert name in typed
            found[name + (labels or "")] = float(value)
    assert text.endswith("\n")
    return found


def test_metrics_are_prometheus_text(watched):
    found = parse_metrics(monitor.metrics(monitor.snapshot(*watched)))
    assert found["fedcomposite_up"] == 1
    assert [found[f'fedcomposite_site_online{{site="{s}"}}'] for s in SITES] == [0, 0, 0]
    assert found["fedcomposite_round"] == 2
    assert found["fedcomposite_rounds"] == 9
    assert found["fedcomposite_objective"] == pytest.approx(1 / 3)
    assert found["fedcomposite_epsilon"] == 1.25
    assert found['fedcomposite_missing_seconds{site="south"}'] == 35
    assert found['fedcomposite_sent_bytes{way="up"}'] == 3e6
    assert found['fedcomposite_job_state{state="running"}'] == 1
    assert found['fedcomposite_certificate_days{of="service"}'] > 800
    odd = {"sites": [{"site": EVIL, "state": "online", "silent": None}], "certificates": {},
           "job": {"state": EVIL, "last": {"objective": float("inf")}}}  # fmt: skip
    assert parse_metrics(monitor.metrics(odd))["fedcomposite_objective"] == float("inf")


def test_without_prometheus_client_the_monitor_says_how_it_is_installed(watched, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [(b"host", b"localhost:1")]}
    asyncio.run(monitor.Monitor(*watched)(scope, None, send))
    assert sent[0]["status"] == 501
    assert b"fedcomposite[flower]" in sent[1]["body"]


def test_a_snapshot_of_what_is_there(watched):
    fed, exchange = watched
    seen = monitor.snapshot(fed, exchange)
    assert [s["state"] for s in seen["sites"]] == ["offline", "offline", "revoked"]
    assert seen["job"]["curve"] == [[0, 1.0], [1, 0.5], [2, pytest.approx(1 / 3)]]
    status = fed.runs / "heart" / "status.json"
    status.write_text(status.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194304'))
    assert monitor.snapshot(fed, exchange)["job"]["state"] == "gone"
    status.write_text("{")
    assert monitor.snapshot(fed, exchange)["job"] == {}
    assert parse_metrics(monitor.metrics(monitor.snapshot(fed, exchange)))["fedcomposite_up"] == 1


@pytest.fixture
def analysed(watched):
    """The newest job is an analysis."""
    fed, exchange = watched
    run = fed.runs / "heart-cv"
    run.mkdir()
    job = {"name": "b", "out": str(run), "kind": "cv", "settings": {}}
    (fed.state / "jobs" / "b.json").write_text(json.dumps(job))
    os.utime(fed.state / "jobs" / "a.json", (1, 1))
    status = {"pid": os.getpid(), "state": "running", "kind": "cv", "missing": {"south": 7}, "exchanges": 41}
    (run / "status.json").write_text(json.dumps(status | {"fits": 11, "asked": "11 newton (fold)"}))
    return fed, exchange


def test_a_snapshot_of_an_analysis(analysed):
    seen = monitor.snapshot(*analysed)
    job = seen["job"]
    assert (job["kind"], job["state"], job["exchanges"], job["fits"]) == ("cv", "running", 41, 11)
    found = parse_metrics(monitor.metrics(seen))
    assert found["fedcomposite_exchanges"] == 41
    assert found['fedcomposite_missing_seconds{site="south"}'] == 7
    assert "fedcomposite_round" not in found


def test_the_status_of_an_analysis(analysed, monkeypatch):
    fed, _ = analysed
    monkeypatch.setattr("fedcomposite.cli.federation.require_service", lambda federation: {"sites": []})
    run = fed.runs / "heart-cv"
    with FolderLock(run):
        other = threading.Thread(target=lambda: said.append(cli("status", fed.path)))
        said = []
        other.start()
        other.join()
    assert "heart-cv: running, cv, 41 exchanges, waiting for south (7 s)" in said[0][1]
    code, text = cli("status", fed.path, "--json")
    job = json.loads(text)["job"]
    assert code == 0
    assert (job["kind"], job["exchanges"], job["state"]) == ("cv", 41, "gone (go on with --resume)")


class _Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.ids = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [v for k, v in attrs if k == "id"]


def test_the_page_is_whole_and_asks_nobody_else():
    tags = _Tags()
    tags.feed(monitor_page.PAGE)
    assert not [a for _, attrs in tags.tags for a in attrs if a in ("src", "href") or a.startswith("on")]
    for name in set(re.findall(r'(?:at|say|rows)\("(\w+)"', monitor_page._SCRIPT)):
        assert name in tags.ids
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|https?://", monitor_page._SCRIPT)
    assert "default-src 'none'" in monitor_page.POLICY
    for block in (monitor_page._SCRIPT, monitor_page._STYLE):
        assert monitor_page._hash(block) in monitor_page.POLICY
        assert f">{block}</" in monitor_page.PAGE


NODE = """
const elements = {};
function made(tag) {
  return {tag, children: [], attributes: {}, className: "", textContent: "",
    appendChild(c) { this.children.push(c); }, replaceChildren() { this.children = []; },
    setAttribute(k, v) { this.attributes[k] = v; }};
}
globalThis.document = {createElement: made, getElementById: id => elements[id] ??= made(id)};
globalThis.setTimeout = () => {};
globalThis.fetch = async () => ({json: async () => JSON.parse(process.env.SEEN)});
(0, eval)(process.env.SCRIPT);
setImmediate(() => setImmediate(() => process.stdout.write(JSON.stringify(elements))));
"""


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_the_pages_script_shows_text_as_text(watched):
    """The script in a JavaScript engine, with elements that only remember what was done to them."""
    seen = monitor._plain(monitor.snapshot(*watched))
    seen["sites"][0] |= {"site": EVIL, "state": EVIL}
    environment = {**os.environ, "SEEN": json.dumps(seen), "SCRIPT": monitor_page._SCRIPT}
    got = subprocess.run(["node", "-e", NODE], capture_output=True, text=True, check=True, env=environment)
    shown = json.loads(got.stdout)
    first = shown["sites"]["children"][0]["children"]
    assert [c["textContent"] for c in first[:2]] == [EVIL, EVIL]
    assert first[1]["className"] == ""
    cells = {row["children"][0]["textContent"]: row["children"][1]["textContent"] for row in shown["job"]["children"]}
    assert cells["round"] == "2 of 9"
    assert cells["waiting for"] == "south"
    assert cells["message"] == EVIL
    assert cells["sent by the sites"] == "3.00 MB"
    assert cells["privacy budget used (epsilon)"] == "1.25"
    assert len(shown["line"]["attributes"]["points"].split()) == 3
    assert shown["when"]["textContent"].startswith("as of ")


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_the_pages_script_shows_an_analysis(analysed):
    seen = monitor._plain(monitor.snapshot(*analysed))
    environment = {**os.environ, "SEEN": json.dumps(seen), "SCRIPT": monitor_page._SCRIPT}
    got = subprocess.run(["node", "-e", NODE], capture_output=True, text=True, check=True, env=environment)
    rows = json.loads(got.stdout)["job"]["children"]
    cells = {row["children"][0]["textContent"]: row["children"][1]["textContent"] for row in rows}
    assert (cells["kind"], cells["exchanges"], cells["asked"]) == ("cv", "41", "11 newton (fold)")
    assert cells["waiting for"] == "south"
    assert "round" not in cells


@pytest.fixture
def live(watched):
    """A real service with its page."""
    fed, _ = watched
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = Running(fed, "--monitor", str(port), "--log", str(fed.path / "serve-own.log"))
    assert "serving on" in running.said(), running.said()
    yield fed, f"http://127.0.0.1:{port}", running
    running.stop()


def test_the_service_is_watched_from_its_own_machine_only(live, monkeypatch):
    fed, url, _ = live
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert parse_metrics(httpx.get(f"{url}/metrics").text)["fedcomposite_round"] == 2
    got = httpx.get(url)
    assert got.text == monitor_page.PAGE
    assert got.headers["content-security-policy"] == monitor_page.POLICY
    for bad in (
        httpx.get(f"{url}/status.json", headers={"host": "evil.example"}),
        httpx.get(f"{url}/status.json", headers={"host": "evil.example:80"}),
        httpx.post(f"{url}/status.json"),
    ):
        assert bad.status_code == 403
        assert "heart" not in bad.text
    assert httpx.get(f"{url}/fed").status_code == 404
    with joined(fed, "north"):
        online = until(lambda: [s for s in httpx.get(f"{url}/status.json").json()["sites"] if s["state"] == "online"])
        assert [s["site"] for s in online] == ["north"]
        outside = ssl.create_default_context(cafile=str(fed.authority))
        for path in ("/metrics", "/status.json"):
            assert httpx.get(f"https://{fed.address}{path}", verify=outside, trust_env=False).status_code == 403
    before = ssl.get_server_certificate(("127.0.0.1", fed.port))
    code, said = cli("renew", fed.path)  # a running service uses it at once
    assert (code, "the service uses it" in said) == (0, True), said
    assert ssl.get_server_certificate(("127.0.0.1", fed.port)) != before
    pki.extend_authority(fed.path / "ca")
    monkeypatch.setattr(certificate_lifetimes, "WARN", {"service": 1e4, "authority": 1e4})
    code, said = cli("status", fed.path)
    assert (code, said.count("the certificate of the")) == (0, 2), said
    with joined(fed, "north"):
        assert "x" in str(ask(fed, {"north": vectors(3)}))
    assert "serving on" in (fed.path / "serve-own.log").read_text()


def test_the_page_in_a_browser(live, browser):
    """Live numbers, text of others as text, no other address, within the policy, on every screen."""
    _, url, _ = live
    for size, dark in ((DESKTOP, False), (PHONE, True)):
        browser.open(url, size, dark=dark)
        said = browser.until("return /as of/.test(document.body.innerText) && document.body.innerText")
        assert "2 of 9" in said
        assert "missing for 35 s" in said
        assert "1.00000 after round 0, 0.333333 after round 2" in said
        assert EVIL in browser.run("return [...document.querySelectorAll('td')].map(e => e.textContent)")
        assert browser.run("return document.images.length") == 0
        seen = browser.seen()
        assert (seen["cut"], seen["wide"], browser.faint()) == ([], 0, [])
        assert len(browser.one("#line").get_attribute("points").split()) == 3
        assert browser.console() == []
        assert {r.removeprefix(url) for r in browser.requests()} == {"/", "/status.json"}


# -- logs -------------------------------------------------------------------------------------------------------------


def test_a_log_does_not_grow_without_end(tmp_path):
    with contextlib.closing(logs.Rotating(tmp_path / "deep" / "site.log", megabytes=0.001, keep=3)) as write:
        for i in range(200):
            write(f"line {i}\nwith {'x' * 50}")
    files = sorted((tmp_path / "deep").iterdir())
    assert [f.name for f in files] == ["site.log", "site.log.1", "site.log.2", "site.log.3"]
    assert all(f.stat().st_size <= 1000 and f.stat().st_mode & 0o077 == 0 for f in files)
    lines = [line for f in reversed(files) for line in f.read_text().splitlines()]
    assert lines[-1].endswith(f"line 199 with {'x' * 50}")
    assert [int(re.search(r"line (\d+)", line).group(1)) for line in lines] == list(range(200 - len(lines), 200))


@pytest.fixture
def parted(tmp_path, monkeypatch):
    """A log of 25 lines in several files, by two processes in turn."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(audit, "PART", 2000)
    key = ec.generate_private_key(ec.SECP256R1())
    writers = [Audit(tmp_path, key), Audit(tmp_path, key)]
    for i in range(25):
        writers[i % 2].append({"what": f"line {i}"})
    return tmp_path, key


def test_the_audit_log_is_chained_across_files(parted):
    folder, key = parted
    files = sorted(folder.glob("audit-*.jsonl"))
    assert len(files) > 2
    assert [line["what"] for line in Audit(folder, key).verify()] == [f"line {i}" for i in range(25)]
    assert [line["number"] for line in Audit(folder, key).verify()] == list(range(1, 26))
    assert all(f.stat().st_mode & 0o077 == 0 for f in [*files, folder / "audit.jsonl"])


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_part_of_the_audit_log_that_is_gone_is_found(parted, which):
    folder, key = parted
    sorted(folder.glob("audit-*.jsonl"))[which].unlink()
    with pytest.raises(AuditError, match="lines were removed"):
        Audit(folder, key).verify()


def test_a_part_of_the_audit_log_that_was_changed_is_found(parted):
    folder, key = parted
    part = sorted(folder.glob("audit-*.jsonl"))[1]
    part.write_text(part.read_text().replace("line", "lime", 1))
    with pytest.raises(AuditError, match=f"{part.name}, line"):
        Audit(folder, key).append({"what": "more"})


# -- proxies ----------------------------------------------------------------------------------------------------------


class ConnectProxy:
    """A small proxy that knows CONNECT and nothing else; it takes down whom it connected to, and what passed."""

    def __init__(self, impostor=None):
        self.asked, self.passed, self._impostor = [], bytearray(), impostor
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._server.accept()
                self._sockets.append(one)
                threading.Thread(target=self._serve, args=(one,), daemon=True).start()

    def _serve(self, one):
        with contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += one.recv(4096)
            method, target, _ = head.split(b" ", 2)
            self.asked.append(head.decode())
            if method != b"CONNECT":
                one.sendall(b"HTTP/1.1 405 no\r\n\r\n")
                return
            if self._impostor is not None:  # as proxies do that want to read along
                one.sendall(b"HTTP/1.1 200 ok\r\n\r\n")
                self._impostor.wrap_socket(one, server_side=True).close()
                return
            host, _, port = target.decode().rpartition(":")
            other = socket.create_connection((host, int(port)))
            self._sockets.append(other)
            one.sendall(b"HTTP/1.1 200 ok\r\n\r\n")
            threading.Thread(target=self._pump, args=(other, one), daemon=True).start()
            self._pump(one, other)

    def _pump(self, source, sink):
        with contextlib.suppress(OSError):
            while block := source.recv(65536):
                self.passed += block
                sink.sendall(block)

    def close(self):
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def test_a_site_behind_a_proxy(live, monkeypatch):
    """Orders and replies go through CONNECT, encrypted end to end; without the proxy there is no way."""
    fed, _, _ = live
    proxy = ConnectProxy()
    try:
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@{proxy.address}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        place = SiteFolder(fed.path / "sites" / "south")
        assert connection.reach(place.address, place.authority) == ""
        with joined(fed, "south"):
            got = ask(fed, {"south": vectors(50)})
        assert str(got["south"]) == str(vectors(50))
        assert all(line.startswith(f"CONNECT {fed.address} ") for line in proxy.asked)
        assert len(proxy.asked) >= 2
        assert "Proxy-Authorization: Basic" in proxy.asked[0]
        assert b"south" not in bytes(proxy.passed)  # the site's name is in every request
    finally:
        proxy.close()
    assert connection.reach(place.address, place.authority)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert connection.reach(place.address, place.authority) == ""


def test_a_proxy_that_reads_along_is_an_impostor(fed, tmp_path, monkeypatch):
    other = FederationFolder.create(tmp_path / "other", "127.0.0.1", 0, ["a"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(other.path / "server" / "server.pem", other.path / "server" / "server.key")
    proxy = ConnectProxy(context)
    monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy.address}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    try:
        with pytest.raises(connection.RefusedError, match="may be an impostor"):
            connection.reach(fed.address, fed.authority)
    finally:
        proxy.close()


@pytest.mark.parametrize(
    ("address", "environment", "proxy"),
    [
        ("fed.example.org:9443", {}, None),
        ("fed.example.org:9443", {"HTTPS_PROXY": "proxy:3128"}, "http://proxy:3128"),
        ("fed.example.org:9443", {"https_proxy": "http://proxy:3128"}, "http://proxy:3128"),
        ("fed.example.org:9443", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".example.org"}, None),
        ("[2001:db8::7]:9443", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "2001:db8::7"}, None),
        ("fed.example.org:9443", {"HTTP_PROXY": "http://proxy:3128"}, None),
    ],
)
def test_which_proxy_is_used(address, environment, proxy, monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert connection.proxy_for(address) == proxy


def test_a_proxy_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "socks9://proxy")
    with pytest.raises(connection.RefusedError, match="HTTPS_PROXY is not of the form"):
        connection.proxy_for("fed.example.org:9443")
