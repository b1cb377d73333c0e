"""The command line of a federation: ``init | serve | join | run | status | revoke | demo``.

Exit codes: 0 done, 1 failed or stopped, 2 wrong usage, data or configuration.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedcomposite.experiments.config import locate
from fedcomposite.experiments.store import RunFolder
from fedcomposite.federation import bundle, engine
from fedcomposite.federation import demo as demonstration
from fedcomposite.federation.apps import FEDERATION, SITE
from fedcomposite.federation.enrol import open_site
from fedcomposite.federation.folder import FederationFolder, FolderError, SiteFolder, free_port
from fedcomposite.federation.jobs import Job
from fedcomposite.federation.post import FederationError, Settings
from fedcomposite.federation.shape import parse, write
from fedcomposite.federation.supernode import Connection, RefusedError, reach

federation_app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="A real federation, over Flower."
)
_WIDTH = None if sys.stdout.isatty() else 120
out, err = Console(width=_WIDTH), Console(stderr=True, width=_WIDTH)

Federation = Annotated[Path, typer.Argument(metavar="FEDERATION", help="The coordinator's folder.")]


def _say(line: str) -> None:
    out.print(f"{datetime.now():%H:%M:%S} {line}", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """One clear line for what went wrong, and an exit code."""
    try:
        yield
    except (FederationError, engine.EngineError, RefusedError) as error:
        err.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except (ValueError, TypeError) as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print("stopped", style="red")
        raise typer.Exit(1) from None


def _interruptible() -> None:
    """Make a polite kill the same as Ctrl-C."""

    def on_signal(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_signal)


@federation_app.command()
def init(
    folder: Federation,
    sites: Annotated[str, typer.Option(help="The sites' names, separated by commas; their order is the clients'.")],
    host: Annotated[str, typer.Option(help="Address or name under which sites reach the coordinator.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The service's port; 0 takes a free one.")] = 9443,
) -> None:
    """Make a federation: authority, server certificate, and one enrolment folder per site."""
    with _one_line():
        made = FederationFolder.create(folder, host, port, [s.strip() for s in sites.split(",")])
        out.print(f"written: {escape(str(folder))} for {made.host}:{made.port}")
        for site in made.sites:
            out.print(f"  carry to {site}: {escape(str(folder / 'sites' / site))}", highlight=False)
        out.print(f"next: fedcomposite federation serve {escape(str(folder))}")


@federation_app.command()
def serve(folder: Federation) -> None:
    """Coordinator: run the service (TLS, site keys, database on disk) until Ctrl-C."""
    with _one_line():
        federation = FederationFolder(folder)
        engine.check_version()
        _interruptible()
        with _service(federation):
            shown = ", ".join(federation.nodes())
            _say(f"serving on {federation.bind}:{federation.port} for {shown}; Ctrl-C stops")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)
            _say("stopping")


@contextlib.contextmanager
def _service(federation: FederationFolder) -> Iterator[None]:
    """The running service, its sites registered."""
    federation.state.mkdir(mode=0o700, exist_ok=True)
    federation.write_client_config()
    if not federation.database.exists():
        federation.forget_nodes()
    server = federation.path / "server"
    command = [
        sys.executable, "-m", "fedcomposite.federation.superlink",
        "--host", federation.bind, "--port", str(federation.port),
        "--ssl-ca-certfile", str(federation.authority),
        "--ssl-certfile", str(server / "server.pem"), "--ssl-keyfile", str(server / "server.key"),
        "--enable-supernode-auth", "--database", str(federation.database),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    environment = engine.environment(federation.home, {FEDERATION: str(federation.path)})
    with (federation.state / "superlink.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_for_service(federation, process)
        wanted = [s for s in federation.sites if s not in federation.nodes() and s not in federation.revoked()]
        with ThreadPoolExecutor(2) as pool:
            for site, node in zip(wanted, pool.map(lambda s: _register(federation, s), wanted), strict=True):
                federation.set_node(site, node)
        yield
    finally:
        _stop(process)


def _register(federation: FederationFolder, site: str) -> int:
    key = str(federation.path / "keys" / f"{site}.pub")
    return int(engine.flwr(federation.home, "supernode", "register", key, "federation", "--name", site)["node-id"])


def _wait_for_service(federation: FederationFolder, process: subprocess.Popen[bytes], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while True:
        if process.poll() is not None:
            raise engine.EngineError(f"the service did not start; see {federation.state / 'superlink.log'}")
        with contextlib.suppress(RefusedError):
            if not reach(federation.address, federation.authority, 2.0):
                return
        if time.monotonic() > end:
            raise engine.EngineError(f"the service does not answer; see {federation.state / 'superlink.log'}")
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """End a process that was started here in a session of its own, and what it started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@federation_app.command()
def join(
    folder: Annotated[Path, typer.Argument(metavar="SITE", help="The site's enrolment folder.")],
    data: Annotated[Path | None, typer.Option(help="The site's data: .csv, .parquet or .npz.")] = None,
    target: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="Use Flower's own SuperNode: slower, and it runs code that bundles bring.")
    ] = False,
) -> None:
    """Site: check the data, print a summary of it, connect and wait for work until Ctrl-C."""
    with _one_line():
        _interruptible()
        place = SiteFolder(folder)
        site = open_site(place, data, target, _say)
        _print(site.silos.summary(), f"{place.name}: {site.silos.features[0].numel()} features; this stays here")
        told = ""
        while reason := reach(place.address, place.authority):
            if reason != told:
                _say(f"{reason}; trying until it is there")
                told = reason
            time.sleep(1.0)
        if stock:
            _join_stock(place, data, target)
            return
        try:
            Connection(site, place.address, place.authority, place.key, _say).serve()
        except KeyboardInterrupt:
            _say(f"{place.name} has left")


def _join_stock(place: SiteFolder, data: Path | None, target: str | None) -> None:
    if data is not None or target is not None:
        raise FolderError(f"--stock starts processes of its own: give file and target in {place.path / 'site.toml'}")
    _say("Flower's own SuperNode runs whatever code a bundle brings: only for a coordinator you trust")
    command = [
        str(Path(sys.executable).parent / "flower-supernode"), "--superlink", place.address,
        "--root-certificates", str(place.authority), "--auth-supernode-private-key", str(place.key),
        "--host", "127.0.0.1", "--port", str(free_port()),
    ]  # fmt: skip
    environment = engine.environment(place.state / "flwr", {SITE: str(place.path)})
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        process.wait()
    except KeyboardInterrupt:
        _say(f"{place.name} has left")
    finally:
        _stop(process)


@federation_app.command()
def run(
    folder: Federation,
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="A TOML file; its [data] is not used.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with this run folder, from its checkpoint.")
    ] = None,
    destination: Annotated[Path | None, typer.Option("--out", help="Folder to write.")] = None,
    policy: Annotated[Literal["wait", "skip"], typer.Option(help="What to do about missing sites.")] = "wait",
    round_timeout: Annotated[float, typer.Option(help="Seconds after which an order is sent again.")] = 600.0,
    patience: Annotated[float, typer.Option(help="Seconds that 'skip' waits for a site.")] = 30.0,
    give_up: Annotated[float, typer.Option(help="Seconds that 'wait' waits for a site.")] = 86400.0,
    min_sites: Annotated[int, typer.Option(help="Fewest sites with which 'skip' goes on.")] = 1,
) -> None:
    """Analyst, on the coordinator's machine: run an experiment across the sites and leave a run folder."""
    with _one_line():
        _interruptible()
        settings = Settings(policy, round_timeout, patience, give_up, min_sites)
        federation = FederationFolder(folder)
        place = _begin(federation, config, resume, destination, settings)
        _conduct(federation, place)


def _begin(
    federation: FederationFolder, config: str | None, resume: Path | None, destination: Path | None, settings: Settings
) -> RunFolder:
    """Write, or take up, the job's files."""
    if (config is None) == (resume is None):
        raise FolderError("give a CONFIG, or --resume RUN to go on with an earlier run")
    if resume is not None:
        place = RunFolder(resume.absolute())
        name_file = place.path / "job"
        if not name_file.is_file():
            raise FolderError(f"--resume {resume}: no job there, so this is not a run of a federation")
        _require_service(federation)
        job = Job.model_validate_json(federation.job(name_file.read_text().strip()).read_text(encoding="utf-8"))
        job = job.model_copy(update={"out": str(place.path), "settings": asdict(settings)})
    else:
        source = locate(str(config))
        text = source.read_text(encoding="utf-8")
        experiment = parse(text, source.name)
        _require_service(federation)
        chosen = destination or federation.runs / f"{experiment.name}-{datetime.now():%Y%m%d-%H%M%S}"
        place = RunFolder(chosen.absolute())
        place.create()
        place.config.write_text(write(experiment), encoding="utf-8")
        written = tomllib.loads(text)
        job = Job(
            name=uuid.uuid4().hex[:16],
            out=str(place.path),
            settings=asdict(settings),
            data=written.get("data"),
            partition=written.get("partition"),
        )
        (place.path / "job").write_text(job.name + "\n", encoding="utf-8")
    for old in ("stop", "status.json"):
        (place.path / old).unlink(missing_ok=True)
    federation.job(job.name).parent.mkdir(parents=True, exist_ok=True)
    federation.job(job.name).write_text(job.model_dump_json(), encoding="utf-8")
    return place


def _require_service(federation: FederationFolder) -> None:
    if reason := reach(federation.address, federation.authority):
        raise FederationError(f"{reason}; is `fedcomposite federation serve` running?")


def _conduct(federation: FederationFolder, place: RunFolder) -> None:
    """Submit the job, follow it and print its result."""
    job = (place.path / "job").read_text().strip()
    label = bundle.write(federation.state / "bundle")
    said = len(_lines(place))
    engine.flwr(federation.home, "run", str(label), "federation", "--run-config", f'job="{job}"')
    hint = f"go on with: fedcomposite federation run {federation.path} --resume {place.path}"
    try:
        status = _follow(place, said)
    except KeyboardInterrupt:
        (place.path / "stop").touch()
        _say("stopping; Ctrl-C again leaves at once")
        status = _follow(place, len(_lines(place)), quiet=True)
    if status["state"] != "finished":
        raise FederationError(f"{status.get('message', 'the server is gone')}; {hint}")
    summary, last = place.summary(), place.history()[-1]
    out.print(
        f"{summary['message']}: objective {last['objective']:.8g}, stationarity {last['stationarity']:.2e}, "
        f"{last['nonzeros']} nonzero, {(last['bytes_up'] + last['bytes_down']) / 1e6:.3g} MB sent, "
        f"{last['seconds']:.1f} s"
    )
    if (place.path / "coefficients.csv").is_file():  # a linear model
        found = pd.read_csv(place.path / "coefficients.csv")
        many = f"largest of {len(found)} nonzero coefficients" if len(found) > 15 else "nonzero coefficients"
        _print(found.head(15), many)
    out.print(f"written: {escape(str(place.path))}")
    if summary["status"] == "interrupted":
        raise FederationError(f"{summary['message']}; {hint}")
    if summary["status"] == "diverged":
        raise FederationError(summary["message"])


def _lines(place: RunFolder) -> list[str]:
    log = place.path / "federation.log"
    return log.read_text(encoding="utf-8").splitlines() if log.is_file() else []


def _follow(place: RunFolder, seen: int, quiet: bool = False, starting: float = 90.0) -> dict[str, Any]:
    """Print a job's events, after the first ``seen``, and its records until it ends; its last status."""
    began, shown = time.monotonic(), -1
    while True:
        status = _status(place)
        lines = _lines(place)
        for line in lines[seen:]:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        seen = len(lines)
        rounds = status.get("rounds", 0)
        if not quiet and status.get("round", -1) > shown and rounds and (place.path / "history.jsonl").is_file():
            shown = _show_record(place, shown, rounds)
        if status.get("state") in ("finished", "failed"):
            return status
        if status and not _alive(status["pid"]):
            time.sleep(1.0)  # its last words may still be on their way to the disk
            status = _status(place)
            return status if status.get("state") in ("finished", "failed") else {**status, "state": "gone"}
        if not status and time.monotonic() - began > starting:
            raise FederationError(f"the job did not start within {starting:g} s; see superlink.log")
        time.sleep(0.2)


def _show_record(place: RunFolder, shown: int, rounds: int) -> int:
    """Print the newest record if it is due; a line per tenth of the run."""
    with contextlib.suppress(ValueError):
        last = place.history()[-1]
        if last["round"] == 0 or last["round"] - max(shown, 0) >= max(1, rounds // 10) or last["round"] == rounds:
            seen = f"F {last['objective']:.6g}  ‖G‖ {last['stationarity']:.1e}  nnz {last['nonzeros']}"
            out.print(f"round {last['round']}/{rounds}  {seen}  {last['seconds']:.1f} s", highlight=False)
            return int(last["round"])
    return shown


def _status(place: RunFolder) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((place.path / "status.json").read_text(encoding="utf-8"))
        return found
    return {}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@federation_app.command()
def status(folder: Federation) -> None:
    """Show the sites (online, last seen) and what the newest job is doing."""
    with _one_line():
        federation = FederationFolder(folder)
        _require_service(federation)
        listed = engine.flwr(federation.home, "supernode", "list", "federation")["nodes"]
        by_node = {int(n["node-id"]): n for n in listed}
        rows = []
        for site in federation.sites:
            node = by_node.get(federation.nodes().get(site, -1), {})
            state = "revoked" if site in federation.revoked() else node.get("status", "not registered")
            since, left = node.get("online-at", ""), node.get("offline-at", "")
            rows.append({"site": site, "status": state, "last came": since, "last left": left})
        _print(pd.DataFrame(rows), f"service at {federation.address}")
        jobs = sorted((federation.state / "jobs").glob("*.json"), key=lambda p: p.stat().st_mtime)
        if not jobs:
            out.print("no job yet")
            return
        place = RunFolder(Job.model_validate_json(jobs[-1].read_text(encoding="utf-8")).out)
        now = _status(place)
        if now.get("state") in ("preparing", "running") and not _alive(now["pid"]):
            now["state"] = "gone (go on with --resume)"
        missing = ", ".join(f"{k} ({v} s)" for k, v in now.get("missing", {}).items())
        line = f"{place.path.name}: {now.get('state', 'unknown')}, round {now.get('round', 0)}/{now.get('rounds', '?')}"
        out.print(line + (f", waiting for {missing}" if missing else ""), highlight=False)


@federation_app.command()
def revoke(folder: Federation, site: Annotated[str, typer.Argument(metavar="SITE", help="Its name.")]) -> None:
    """Take a site's permission away: its key is no longer accepted, and runs go on or stop by their policy."""
    with _one_line():
        federation = FederationFolder(folder)
        node = federation.revoke(site)
        if node is not None and not reach(federation.address, federation.authority):
            engine.flwr(federation.home, "supernode", "unregister", str(node), "federation")
        out.print(f"{site} is revoked")


@federation_app.command()
def demo(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Where to work (default: federation-demo-TIME).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 30,
) -> None:
    """Everything on this machine: four hospitals, TLS and keys, one sparse model, compared with the simulator."""
    with _one_line(), contextlib.ExitStack() as stack:
        _interruptible()
        engine.check_version()
        place = folder or Path(f"federation-demo-{datetime.now():%Y%m%d-%H%M%S}")
        if place.exists() and any(place.iterdir()):
            raise FolderError(f"{place}: already holds files")
        began = time.monotonic()
        sites = demonstration.write_hospitals(place / "data")
        config = place / "config.toml"
        config.write_text(demonstration.CONFIG.format(rounds=rounds), encoding="utf-8")
        federation = FederationFolder.create(place / "fed", "127.0.0.1", 0, sites)
        _say(f"{place}: keys and certificates made; starting the service and {len(sites)} sites")
        parties = [("serve", "serving", ["serve", str(federation.path)])]
        for site in sites:
            data = str(place / "data" / f"{site}.csv")
            command = ["join", str(federation.path / "sites" / site), "--data", data, "--target", "num"]
            parties.append((site, "waiting for work", command))
        started = [
            (place / f"{name}.log", sign, stack.enter_context(demonstration.party(place / f"{name}.log", *command)))
            for name, sign, command in parties
        ]
        for log, sign, process in started:
            demonstration.wait_for(log, sign, process)
        _say("all sites are connected")
        run_folder = _begin(federation, str(config), None, place / "run", Settings())
        _conduct(federation, run_folder)
        stack.close()
        difference = demonstration.compare_with_simulation(place, config, run_folder)
        seconds = time.monotonic() - began
        out.print(f"largest difference from `fedcomposite run` on the same experiment: {difference:.1e}")
        out.print(f"{seconds:.0f} s in all")
        if difference > 1e-12:
            raise FederationError("the federation and the simulator disagree")


def _print(frame: pd.DataFrame, caption: str) -> None:
    table = Table()
    for column in frame.columns:
        numeric = pd.api.types.is_numeric_dtype(frame[column])
        table.add_column(escape(str(column)), justify="right" if numeric else "left", overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*(f"{v:.6g}" if isinstance(v, float) else escape(str(v)) for v in row))
    out.print(table)
    out.print(escape(caption), highlight=False)
