"""What the people of a site do: make its key, approve experiments, read the audit log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import typer
from rich.markup import escape

from fedcomposite.cli.console import AsJson, out, print_json, reporting
from fedcomposite.cli.federation_parties import show
from fedcomposite.federation.engines import pki
from fedcomposite.federation.site.approval import Approvals
from fedcomposite.federation.site.audit import Audit, AuditError
from fedcomposite.federation.site.enrolment import make_request
from fedcomposite.federation.site.peer_heads import PeerHeads
from fedcomposite.federation.site_folders import SiteFolder

Folder = Annotated[Path, typer.Argument(metavar="SITE", help="The site's folder.")]
Digest = Annotated[str, typer.Argument(metavar="DIGEST", help="The experiment's digest, or its first characters.")]


def add_site_commands(app: typer.Typer) -> None:
    """Make them commands of ``federation``."""
    for command in (enrol, peers, pending, approve, reject, audit):
        app.command()(command)


def enrol(folder: Folder, name: Annotated[str, typer.Option(help="The site's name in the federation.")]) -> None:
    """Site: make its private key, which stays here, and the request for the coordinator."""
    with reporting():
        made = make_request(folder, name)
        key = pki.fingerprint(pki.read_private(folder / "site.key").public_key())
        out.print(f"written: {escape(str(folder / 'site.key'))} (keep it here)", highlight=False, soft_wrap=True)
        out.print(f"send to the coordinator: {escape(str(made))}; the key is {key}", highlight=False, soft_wrap=True)


def peers(folder: Folder, as_json: AsJson = False) -> None:
    """Site: show the other sites' keys, to be compared with them before secure sums."""
    with reporting():
        place = SiteFolder(folder)
        own = {place.name: pki.fingerprint(pki.read_private(place.key).public_key())}
        others = {name: pki.fingerprint(pki.read_public(path)) for name, path in place.peers.items()}
        if as_json:
            print_json({"this site": own, "others": others})
            return
        out.print(f"{place.name} (this site): {own[place.name]}")
        for name, key in others.items():
            out.print(f"{name}: {key}", highlight=False, soft_wrap=True)


def pending(
    folder: Folder,
    digest: Annotated[str | None, typer.Argument(metavar="DIGEST", help="Show this experiment as a whole.")] = None,
    as_json: AsJson = False,
) -> None:
    """Site: list the experiments that were asked for and what was decided, or show one."""
    with reporting():
        place = SiteFolder(folder)
        known = Approvals(place.state, place.file.approval).all()
        if as_json:
            print_json({name: entry for name, entry in known.items() if name.startswith(digest or "")})
            return
        if digest is not None:
            for name, entry in known.items():
                if name.startswith(digest):
                    who = f"secure sum of {', '.join(entry['parties'])}" if entry["secure"] else "not a secure sum"
                    if plan := entry.get("plan"):
                        who = f"{who}, an analysis of at most {', '.join(f'{n} {kind}' for kind, n in plan.items())}"
                    out.print(
                        f"{name} {entry['status']}, asked for {entry['asked']}, {who}", highlight=False, soft_wrap=True
                    )
                    out.print(entry["experiment"], markup=False, highlight=False, soft_wrap=True)
            return
        if not known:
            out.print("nothing was asked for")
            return
        rows = [
            {"experiment": name[:16], "status": one["status"], "asked": one["asked"], "secure": str(one["secure"])}
            for name, one in known.items()
        ]
        show(pd.DataFrame(rows), "fedcomposite federation pending | approve | reject SITE DIGEST")


def approve(
    folder: Folder,
    digest: Digest,
    jobs: Annotated[int, typer.Option(min=1, help="How many more jobs the yes is for.")] = 1,
) -> None:
    """Site: let an experiment be computed here, in one job."""
    _decide(folder, digest, "approved", jobs)


def reject(folder: Folder, digest: Digest) -> None:
    """Site: do not let an experiment be computed here, or no longer."""
    _decide(folder, digest, "rejected")


def _decide(folder: Path, digest: str, status: Literal["approved", "rejected"], jobs: int = 1) -> None:
    with reporting():
        place = SiteFolder(folder)
        name = Approvals(place.state, place.file.approval).decide(digest, status, jobs)
        Audit(place.state, pki.read_private(place.key)).append(
            {"asked by": "this site", "what": status, "experiment": name}
        )
        out.print(f"{name} is {status}", highlight=False, soft_wrap=True)


def audit(
    folder: Folder,
    lines: Annotated[int, typer.Option(min=0, help="How many of the last lines to show; 0 shows all.")] = 20,
    raw: Annotated[bool, typer.Option("--json", help="Print whole lines.")] = False,
    holds: Annotated[
        str | None,
        typer.Option(help="A head from before, or another site's state/heads.json: is the log still a continuation?"),
    ] = None,
) -> None:
    """Site: verify the audit log, and show its end and its head, which should be kept elsewhere, too."""
    with reporting():
        place = SiteFolder(folder)
        log = Audit(place.state, pki.read_private(place.key))
        if holds is not None:
            kept = PeerHeads(Path(holds)).all().get(place.name, []) if Path(holds).is_file() else [holds]
            mine = [head for head in kept if head == holds or log.signed(head)]
            if lost := [head for head in mine if not log.holds(head)]:
                raise AuditError(
                    f"{log.path}: does not hold the head {lost[0][:40]!r}; it was turned back, or replaced"
                )
            if kept != [holds]:
                out.print(f"it holds all {len(mine)} heads of this site that are in {holds}", highlight=False)
        found = log.verify()
        for line in found[-lines:]:
            if raw:
                out.print(json.dumps(line), markup=False, highlight=False, soft_wrap=True)
                continue
            sent = line.get("sent", {})
            left = f"{sent['kind']}, {sent['bytes']} bytes" if sent else ""
            outcome = f"refused: {line['refused']}" if "refused" in line else left
            about = f"{line['what']}, round {line['round']}" if "round" in line else line["what"]
            out.print(f"{line['number']:6d} {line['time']} {line.get('job', '')} {about}: {outcome}", markup=False,
                      highlight=False, soft_wrap=True)  # fmt: skip
        out.print(f"{len(found)} lines, each as it was written")
        out.print(f"head: {log.head()}", highlight=False, soft_wrap=True)
