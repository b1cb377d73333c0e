"""Keeping a federation going: certificates that end, units, containers, logs."""

import ast
import configparser
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
import tomllib
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from typer.main import get_command
from typer.testing import CliRunner

from fedcomposite.cli.federation import federation_app
from fedcomposite.federation import logs, systemd
from fedcomposite.federation.engines import certificate_lifetimes, pki
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.site import audit
from fedcomposite.federation.site.audit import Audit, AuditError
from fedcomposite.federation.site_folders import SiteFolder
from fedcomposite.locks import FolderLock

ROOT = Path(__file__).parent.parent
SITES = ["north", "south", "west"]


def cli(*words):
    got = CliRunner().invoke(federation_app, list(map(str, words)))
    return got.exit_code, " ".join(got.output.split())


@pytest.fixture
def fed(tmp_path):
    return FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, SITES, engine="local")


# -- certificates -----------------------------------------------------------------------------------------------------


@pytest.fixture
def flare(tmp_path):
    pytest.importorskip("nvflare", reason="the extra [federation] is not installed")
    return FederationFolder.create(tmp_path / "flare", "127.0.0.1", 0, SITES[:2])


def ends(place):
    """When each certificate ends."""
    found = certificate_lifetimes.certificates(place)
    return {k: x509.load_pem_x509_certificate(v.read_bytes()).not_valid_after_utc for k, v in found.items()}


def test_what_ends_soon_is_said_in_time(flare, monkeypatch):
    place = SiteFolder(flare.path / "sites" / "north")
    assert certificate_lifetimes.warnings(flare) == certificate_lifetimes.warnings(place) == []
    assert 3649 < certificate_lifetimes.days(flare)["authority"] <= 3650  # not FLARE's 360 days
    monkeypatch.setattr(pki, "days_left", lambda path: 20.0)
    said = certificate_lifetimes.warnings(flare)
    assert [line.split(" expires")[0] for line in said] == [
        f"the certificate of the {name}" for name in ("server", "administrator", "authority")
    ]
    assert said[0].endswith(f"expires in 20 days: fedcomposite federation renew {flare.path}")
    assert certificate_lifetimes.warnings(place)[0].endswith("ask the coordinator for new ones")


@pytest.mark.parametrize(("left", "said"), [(-3.0, "has expired"), (0.4, "expires today"), (29.6, "in 30 days")])
def test_words_for_the_time_that_is_left(left, said):
    (line,) = certificate_lifetimes.lines({"server": left, "authority": 181.0})
    assert said in line


def test_renewal_gives_everybody_new_certificates_under_the_same_authority(flare):
    place = SiteFolder(flare.path / "sites" / "north")
    files = {**certificate_lifetimes.certificates(flare), "site": certificate_lifetimes.certificates(place)["site"]}
    before = {name: path.read_bytes() for name, path in files.items()}
    code, said = cli("renew", flare.path)
    assert code == 0, said
    after = {name: path.read_bytes() for name, path in files.items()}
    assert {name for name in files if before[name] == after[name]} == {"authority"}
    assert "carry to north, in place of its flare" in said
    authority = x509.load_pem_x509_certificate(after["authority"])
    for name in ("server", "administrator", "site"):
        x509.load_pem_x509_certificate(after[name]).verify_directly_issued_by(authority)
    assert all(end <= ends(flare)["authority"] + timedelta(seconds=1) for end in ends(flare).values())
    for key in flare.path.rglob("*.key"):
        assert key.stat().st_mode & 0o077 == 0, key


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
    fed = FederationFolder.create(tmp_path / "a fed of $HOME 100%", "127.0.0.1", 0, ["north"], engine="local")
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
    code, said = cli("serve", fed.path, "--service", "system")
    assert code == 0, said
    _, words = read_unit((fed.path / "fedcomposite-coordinator.service").read_text())
    assert words[4:] == ["serve", str(fed.path)]


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
    assert "federation" in asked
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


# -- what a job says of itself ----------------------------------------------------------------------------------------


@pytest.fixture
def analysed(fed):
    """A federation whose newest job is an analysis."""
    run = fed.runs / "heart-cv"
    run.mkdir(parents=True)
    (fed.state / "jobs").mkdir()
    job = {"name": "a", "out": str(run), "kind": "cv", "settings": {}, "data": None}
    (fed.state / "jobs" / "a.json").write_text(json.dumps(job))
    status = {"pid": os.getpid(), "state": "running", "kind": "cv", "missing": {"south": 7}, "exchanges": 41}
    (run / "status.json").write_text(json.dumps(status | {"fits": 11, "asked": "11 newton (fold)"}))
    return fed


def test_the_status_of_an_analysis(analysed):
    fed = analysed
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
