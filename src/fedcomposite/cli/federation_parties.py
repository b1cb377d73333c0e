"""The two commands that run for long, and start with their machines: ``federation serve | join``.

They are loaded without the others: a coordinator's server needs no PyTorch, a site nothing of an analyst's.
"""

from __future__ import annotations

import functools
import math
import signal
from collections.abc import Callable, Iterator, MutableMapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
import typer
from rich.markup import escape
from typer.core import TyperGroup
from typer.main import get_command

from fedcomposite.cli.console import err, out, print_frame, reporting
from fedcomposite.cli.lazy import load
from fedcomposite.federation.engines import certificate_lifetimes, selection
from fedcomposite.federation.engines.engine import EngineError
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.logs import Rotating
from fedcomposite.federation.systemd import write_unit
from fedcomposite.locks import FolderLock

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

Federation = Annotated[Path, typer.Argument(metavar="FEDERATION", help="The coordinator's folder.")]
UnitForm = Annotated[
    Literal["user", "system"] | None,
    typer.Option(help="Write a unit of systemd that runs this command, and start nothing."),
]
LogFile = Annotated[Path | None, typer.Option(help="Also write what is said to this file; old parts are numbered.")]
LogSize = Annotated[float, typer.Option(min=0.001, help="Megabytes of that file; five older parts are kept.")]

_also: list[Callable[[str], None]] = []


def log_to(path: Path | None, megabytes: float) -> None:
    """Have what is said from now on taken down in a file, too."""
    if path is not None:
        _also.append(Rotating(path, megabytes))


def say(line: str, console: Console = out) -> None:
    """Print a line with the time."""
    for write_down in _also:
        write_down(line)
    console.print(f"{datetime.now():%H:%M:%S} {line}", markup=False, highlight=False, soft_wrap=True)


def say_aside(line: str) -> None:
    """The same beside a result that is for machines."""
    say(line, err)


def show(frame: pd.DataFrame, caption: str) -> None:
    """Print a table and a line below it."""
    print_frame(frame, digits=6)
    out.print(escape(caption), highlight=False)


def interruptible() -> None:
    """Make a polite kill the same as Ctrl-C."""

    def on_signal(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_signal)


def serve(
    folder: Federation,
    service: UnitForm = None,
    log: LogFile = None,
    log_mb: LogSize = 5.0,
) -> None:
    """Coordinator: run the engine's own server until Ctrl-C."""
    with reporting(failures=(EngineError,)):
        interruptible()
        federation = FederationFolder(folder)
        if service is not None:
            arguments = ["serve", str(federation.path), *_logged(log, log_mb)]
            _install(service, "coordinator", federation.path, arguments, log)
            return
        log_to(log, log_mb)
        with FolderLock(federation.state):
            for line in certificate_lifetimes.warnings(federation):
                say(line)
            names = ", ".join(federation.permitted()) or "nobody yet"
            try:
                selection.serve(
                    federation, lambda: say(f"serving on port {federation.port} for {names}; Ctrl-C stops"), say
                )
            except KeyboardInterrupt:
                say("stopping")


def join(
    folder: Annotated[Path, typer.Argument(metavar="SITE", help="The site's enrolment folder.")],
    data: Annotated[Path | None, typer.Option(help="The site's data: .csv, .parquet or .npz.")] = None,
    target: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    beside: Annotated[
        bool, typer.Option("--beside", help="Only answer: the engine's own client is run by others on this machine.")
    ] = False,
    service: UnitForm = None,
    log: LogFile = None,
    log_mb: LogSize = 5.0,
) -> None:
    """Site: check the data, print a summary of it, connect and wait for work until Ctrl-C."""
    with reporting(failures=(EngineError,)):
        interruptible()
        open_site = load("fedcomposite.federation.site.enrolment:open_site")
        from fedcomposite.federation.site.table_site import TableSite
        from fedcomposite.federation.site_folders import SiteFolder

        place = SiteFolder(folder)
        if not beside:
            place.check_kit()
        if service is not None:
            arguments = [*_join_arguments(place.path, data, target, log, log_mb), *["--beside"] * beside]
            _install(service, place.name, place.path, arguments, log)
            return
        log_to(log, log_mb)
        for line in certificate_lifetimes.warnings(place):
            say(line)
        site = open_site(place, data, target, say)
        if isinstance(site, TableSite):
            show(site.summary(), f"{place.name}: a table that recipes prepare; this stays here")
        else:
            count = math.prod(site.silos.features.shape[1:])
            show(site.silos.summary(), f"{place.name}: {count} features; this stays here")
        with FolderLock(place.state):
            try:
                selection.join(place, site, say, beside=beside)
            except KeyboardInterrupt:
                say(f"{place.name} has left")


def _install(form: Literal["user", "system"], name: str, folder: Path, arguments: list[str], log: Path | None) -> None:
    """Write the unit of a party, and say how it is installed."""
    path, command = write_unit(form, name, f"fedcomposite federation, {name}", folder, arguments, log)
    out.print(f"written: {escape(str(path))}", highlight=False, soft_wrap=True)
    out.print(f"install it with: {command}", markup=False, highlight=False, soft_wrap=True)
    if form == "system":
        out.print("it runs as the account fedcomposite, which must own the folder and read the data", highlight=False)


def _logged(log: Path | None, log_mb: float) -> list[str]:
    return [] if log is None else ["--log", str(log.absolute()), "--log-mb", f"{log_mb:g}"]


def _join_arguments(folder: Path, data: Path | None, target: str | None, log: Path | None, log_mb: float) -> list[str]:
    """The words of a `join` command, whatever folder it is started in."""
    given = [] if data is None else ["--data", str(data.absolute())]
    given += [] if target is None else ["--target", target]
    return ["join", str(folder), *given, *_logged(log, log_mb)]


def add_party_commands(app: typer.Typer) -> None:
    """Make them commands of ``federation``."""
    for command in (serve, join):
        app.command()(command)


class _Commands(MutableMapping[str, click.Command]):
    """Commands of which some are there; whoever asks for another one, or for all, has all of them loaded."""

    def __init__(self, here: MutableMapping[str, click.Command]) -> None:
        self._here = here

    def __getitem__(self, name: str) -> click.Command:
        return self._here[name] if name in self._here else _all().commands[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._here[name] = command

    def __delitem__(self, name: str) -> None:
        del self._here[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_all().commands)

    def __len__(self) -> int:
        return len(_all().commands)


class FederationCommands(TyperGroup):
    """``serve`` and ``join`` by themselves, and all others together."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands(self.commands)


@functools.cache
def _all() -> TyperGroup:
    found = get_command(load("fedcomposite.cli.federation:federation_app"))
    assert isinstance(found, TyperGroup)
    return found


parties_app = typer.Typer(
    cls=FederationCommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A real federation, over NVIDIA FLARE or Flower.",
)
add_party_commands(parties_app)
