"""Keeping a federation going: certificates that are renewed, and parties that are services of their machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from fedcomposite.cli.console import out, reporting
from fedcomposite.cli.federation_jobs import tell_service
from fedcomposite.federation.engines import certificate_lifetimes, pki
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.systemd import write_unit

UnitForm = Annotated[
    Literal["user", "system"] | None,
    typer.Option(help="Write a unit of systemd that runs this command, and start nothing."),
]
LogFile = Annotated[Path | None, typer.Option(help="Also write what is said to this file; old parts are numbered.")]
LogSize = Annotated[float, typer.Option(min=0.001, help="Megabytes of that file; five older parts are kept.")]


def renew(
    folder: Annotated[Path, typer.Argument(metavar="FEDERATION", help="The coordinator's folder.")],
    authority: Annotated[
        bool, typer.Option("--authority", help="Also the authority's; its new ca.crt is carried to the sites.")
    ] = False,
    days: Annotated[int, typer.Option(min=1, help="For how long the service's is good.")] = pki.DAYS_SERVER,
) -> None:
    """Coordinator: make new certificates; a running service uses them at once."""
    with reporting():
        federation = FederationFolder(folder)
        before = pki.days_left(federation.authority)
        carried = certificate_lifetimes.renew(federation, days, authority=authority)
        used = tell_service(federation)
        for name, left in certificate_lifetimes.days(federation).items():
            out.print(f"the certificate of the {name} is good for {left:.0f} days", highlight=False)
        for path in carried:
            out.print(f"  carry to {path.parent.name}, in place of its ca.crt, within {max(0.0, before):.0f} days: "
                      f"{escape(str(path))}", highlight=False, soft_wrap=True)  # fmt: skip
        out.print("the service uses it" if used else "the service does not run; it uses it when it starts")


def install(form: Literal["user", "system"], name: str, folder: Path, arguments: list[str], log: Path | None) -> None:
    """Write the unit of a party, and say how it is installed."""
    path, command = write_unit(form, name, f"fedcomposite federation, {name}", folder, arguments, log)
    out.print(f"written: {escape(str(path))}", highlight=False, soft_wrap=True)
    out.print(f"install it with: {command}", markup=False, highlight=False, soft_wrap=True)
    if form == "system":
        out.print("it runs as the account fedcomposite, which must own the folder and read the data", highlight=False)


def _logged(log: Path | None, log_mb: float) -> list[str]:
    return [] if log is None else ["--log", str(log.absolute()), "--log-mb", f"{log_mb:g}"]


def serve_arguments(folder: Path, stock: bool, monitor: int | None, log: Path | None, log_mb: float) -> list[str]:
    """The words of a `serve` command, whatever folder it is started in."""
    watched = [] if monitor is None else ["--monitor", str(monitor)]
    return ["serve", str(folder), *["--stock"] * stock, *watched, *_logged(log, log_mb)]


def join_arguments(
    folder: Path, data: Path | None, target: str | None, stock: bool, log: Path | None, log_mb: float
) -> list[str]:
    """The words of a `join` command, whatever folder it is started in."""
    given = [] if data is None else ["--data", str(data.absolute())]
    given += [] if target is None else ["--target", target]
    return ["join", str(folder), *given, *["--stock"] * stock, *_logged(log, log_mb)]
