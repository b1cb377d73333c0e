"""The command line of a federation: ``init | run | status | demo``, and who may take part.

``serve`` and ``join`` are in ``federation_parties``, what a site's people decide and read in ``federation_site``.

Exit codes: 0 done, 1 failed or stopped, 2 wrong usage, data or configuration.
"""

from __future__ import annotations

import contextlib
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import typer
from rich.markup import escape

from fedcomposite.cli.analysis import Secure, Sites
from fedcomposite.cli.console import AsJson, out, reporting, results
from fedcomposite.cli.federation_analysis import add_analysis_commands
from fedcomposite.cli.federation_jobs import (
    begin,
    chosen,
    conduct,
    job_status,
    require_service,
)
from fedcomposite.cli.federation_parties import Federation, add_party_commands, interruptible, say, show
from fedcomposite.cli.federation_site import add_site_commands
from fedcomposite.cli.runs import Overrides
from fedcomposite.experiments.store import RunFolder
from fedcomposite.federation import demo as demonstration
from fedcomposite.federation.coordinator.delivery import FederationError, Settings, in_wait
from fedcomposite.federation.coordinator.jobs import Job
from fedcomposite.federation.engines import certificate_lifetimes, pki, selection
from fedcomposite.federation.engines.engine import EngineError
from fedcomposite.federation.folders import EngineName, FederationFolder, FolderError

federation_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A real federation, over NVIDIA FLARE or Flower.",
)
add_party_commands(federation_app)
add_site_commands(federation_app)
add_analysis_commands(federation_app)
Engine = Annotated[EngineName, typer.Option(help="What carries orders; 'local' is for sites on this machine.")]


def _one_line() -> contextlib.AbstractContextManager[None]:
    return reporting(failures=(FederationError, EngineError))


@federation_app.command()
def init(
    folder: Federation,
    sites: Annotated[str, typer.Option(help="The sites' names, separated by commas; their order is the clients'.")],
    host: Annotated[str, typer.Option(help="Address or name under which sites reach the coordinator.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The service's port; 0 takes a free one.")] = 9443,
    keys: Annotated[
        bool, typer.Option("--keys", help="Also make the sites' private keys here, to be carried to them.")
    ] = False,
    engine: Engine = "nvflare",
) -> None:
    """Make a federation: the engine's project, certificates and kits, the order key; sites make their own (`enrol`)."""
    with _one_line():
        made = FederationFolder.create(folder, host, port, [s.strip() for s in sites.split(",")], keys, engine)
        out.print(f"written: {escape(str(folder))} for {made.reached}, over {engine}", highlight=False, soft_wrap=True)
        for name, left in certificate_lifetimes.days(made).items():
            out.print(f"  the certificate of the {name} is good for {left:.0f} days", highlight=False)
        for site in made.sites:
            if keys:
                out.print(f"  carry to {site}: {escape(str(folder / 'sites' / site))}", highlight=False)
            else:
                out.print(f"  at {site}: fedcomposite federation enrol FOLDER --name {site}", highlight=False)
        if not keys:
            out.print(f"then, for each request: fedcomposite federation admit {escape(str(folder))} REQUEST")
        if engine != "local":
            out.print(f"next: fedcomposite federation serve {escape(str(folder))}")


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
    sites: Sites = None,
    overrides: Overrides = None,
    secure: Secure = False,
    as_json: AsJson = False,
) -> None:
    """Analyst, on the coordinator's machine: run an experiment across the sites and leave a run folder."""
    with _one_line(), results(as_json) as found:
        interruptible()
        try:
            settings = Settings(policy, round_timeout, patience, give_up, min_sites, secure=secure)
        except ValueError as error:
            raise FolderError(str(error)) from None
        federation = FederationFolder(folder)
        named = chosen(federation, sites) or None
        conduct(federation, begin(federation, config, resume, destination, settings, named, overrides or ()), found)


@federation_app.command()
def status(folder: Federation, as_json: AsJson = False) -> None:
    """Show the sites (online, last seen) and what the newest job is doing."""
    with _one_line(), results(as_json) as found:
        federation = FederationFolder(folder)
        require_service(federation)
        seen = selection.seen(federation)
        rows = [_site_row(name, seen, name in federation.revoked()) for name in federation.sites]
        found |= {"engine": federation.engine, "address": federation.reached, "sites": rows, "job": None}
        show(pd.DataFrame(rows), f"{federation.engine} at {federation.reached}")
        for line in certificate_lifetimes.warnings(federation):
            out.print(line, style="red", highlight=False, soft_wrap=True)
        jobs = sorted((federation.state / "jobs").glob("*.json"), key=lambda p: p.stat().st_mtime)
        if not jobs:
            out.print("no job yet")
            return
        job = Job.model_validate_json(jobs[-1].read_text(encoding="utf-8"))
        place = RunFolder(job.out)
        now = job_status(place)
        found["job"] = {"folder": place.path, "kind": job.kind, **now}
        missing = now.get("missing", {})
        far = f"round {now.get('round', 0)}/{now.get('rounds', '?')}"
        if job.kind != "run":
            far = f"{job.kind}, {now.get('exchanges', 0)} exchanges"
        line = f"{place.path.name}: {now.get('state', 'unknown')}, {far}"
        out.print(line + (f", {in_wait(missing, now.get('unapproved', []))}" if missing else ""), highlight=False)


def _site_row(name: str, seen: dict[str, str] | None, revoked: bool) -> dict[str, str]:
    state = "revoked" if revoked else "unknown" if seen is None else "online" if name in seen else "offline"
    return {"site": name, "status": state, "last heard": (seen or {}).get(name, "")}


Site = Annotated[str, typer.Argument(metavar="SITE", help="Its name.")]


@federation_app.command()
def revoke(folder: Federation, site: Site) -> None:
    """Take a site's permission away: its key is no longer accepted, and runs go on or stop by their policy."""
    with _one_line():
        federation = FederationFolder(folder)
        federation.revoke(site)
        selection.tell(federation)
        out.print(f"{site} is revoked")


@federation_app.command()
def reinstate(folder: Federation, site: Site) -> None:
    """Give a revoked site its permission back, with the key that it has."""
    with _one_line():
        federation = FederationFolder(folder)
        federation.reinstate(site)
        selection.tell(federation)
        out.print(f"{site} may take part again")


@federation_app.command("add-site")
def add_site(folder: Federation, site: Site) -> None:
    """Add a site, the last in the order of the clients, and make its enrolment folder."""
    with _one_line():
        federation = FederationFolder(folder)
        made = federation.add_site(site)
        out.print(f"  carry to {site}: {escape(str(made))}", highlight=False)


@federation_app.command()
def admit(
    folder: Federation,
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="The site's request, a .csr file of `enrol`.")],
    replace: Annotated[bool, typer.Option("--replace", help="In place of the key that the site had.")] = False,
) -> None:
    """Coordinator: take a site by its request, and make the folder that is carried back to it."""
    with _one_line():
        federation = FederationFolder(folder)
        name, public = pki.read_request(request)
        made = federation.admit(name, public, replace)
        shown = pki.fingerprint(pki.read_public(federation.public_key(name)))
        out.print(f"{name} is admitted; its key is {shown}: compare it with {name}'s people", highlight=False)
        out.print(f"  carry to {name}, beside its site.key: {escape(str(made))}", highlight=False)
        others = [s for s in federation.permitted() if s != name]
        if others:
            out.print(f"  for secure sums, carry keys/{name}.pub to peers/ of {', '.join(others)}", highlight=False)


@federation_app.command()
def rekey(folder: Federation, site: Site) -> None:
    """Give a site a new key; what is signed with the old one is no longer accepted."""
    with _one_line():
        federation = FederationFolder(folder)
        made = federation.rekey(site)
        out.print(f"  carry to {site}, in place of its site.key: {escape(str(made / 'site.key'))}", highlight=False)


@federation_app.command()
def rotate(folder: Federation) -> None:
    """Make a new key for orders; sites refuse orders until they have its public part. Best between two runs."""
    with _one_line():
        for made in FederationFolder(folder).rotate():
            out.print(
                f"  carry to {made.parent.name}, in place of its {made.name}: {escape(str(made))}", highlight=False
            )


@federation_app.command()
def demo(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Where to work (default: federation-demo-TIME).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 30,
    secure: Secure = False,
    engine: Engine = "nvflare",
) -> None:
    """Everything on this machine: four hospitals, keys and an engine, one sparse model, compared with the simulator."""
    with _one_line(), contextlib.ExitStack() as stack:
        interruptible()
        place = folder or Path(f"federation-demo-{datetime.now():%Y%m%d-%H%M%S}")
        if place.exists() and any(place.iterdir()):
            raise FolderError(f"{place}: already holds files")
        began = time.monotonic()
        sites = demonstration.write_hospitals(place / "data")
        config = place / "config.toml"
        config.write_text(demonstration.CONFIG.format(rounds=rounds), encoding="utf-8")
        federation = FederationFolder.create(place / "fed", "127.0.0.1", 0, sites, engine=engine)
        demonstration.write_limits(federation.path / "sites", secure)
        say(f"{place}: keys and certificates made; starting {len(sites)} sites over {engine}")
        parties = [] if engine == "local" else [("serve", "serving", ["serve", str(federation.path)])]
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
        say("all sites are connected" + (", and answer in secure sums only" if secure else ""))
        run_folder = begin(federation, str(config), None, place / "run", Settings(secure=secure))
        conduct(federation, run_folder, {})
        for _, _, process in started:  # all at once: each takes its time
            process.send_signal(signal.SIGINT)
        stack.close()
        difference = demonstration.compare_with_simulation(place, config, run_folder)
        seconds = time.monotonic() - began
        out.print(f"largest difference from `fedcomposite run` on the same experiment: {difference:.1e}")
        out.print(f"{seconds:.0f} s in all")
        if difference > demonstration.SAME[secure]:
            raise FederationError("the federation and the simulator disagree")


@federation_app.command()
def renew(folder: Federation) -> None:
    """Coordinator: make new certificates for all parties; the sites' new kits are carried to them."""
    with _one_line():
        federation = FederationFolder(folder)
        carried = certificate_lifetimes.renew(federation)
        for name, left in certificate_lifetimes.days(federation).items():
            out.print(f"the certificate of the {name} is good for {left:.0f} days", highlight=False)
        for path in carried:
            out.print(f"  carry to {path.parent.name}, in place of its {path.name}: {escape(str(path))}",
                      highlight=False, soft_wrap=True)  # fmt: skip
        out.print("the server uses its own when it starts again: restart `fedcomposite federation serve`")
