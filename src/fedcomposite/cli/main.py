"""The entry point: global options, the groups of commands, and whose move it is when something goes wrong."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from fedcomposite import __version__
from fedcomposite.cli import analysis, cite, data, lists, papers, privacy, reports, runs, solve
from fedcomposite.cli.console import DEBUG, out, plain_warnings, reporting
from fedcomposite.experiments import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Composite federated learning: sparse, constrained models across silos that keep their data.\n\n"
    "Exit codes: 0 done, 1 failed (diverged, interrupted, a client failed), 2 wrong usage or configuration, "
    "3 not converged (solve).",
)
app.command()(runs.run)
app.command()(runs.compare)
app.command()(papers.reproduce)
app.command("solve")(solve.solve_command)
app.command("fit")(analysis.fit)
app.command("path")(analysis.path)
app.command("cv")(analysis.cv)
app.command("report")(reports.report)
app.command("predict")(reports.predict_command)
app.command("export")(runs.export_run)
app.command("list")(lists.list_names)
app.command()(runs.plot)
app.command("cite")(cite.cite)
app.command("privacy")(privacy.privacy_command)
app.add_typer(data.data_app, name="data")


@app.callback(invoke_without_command=True)
def start(
    show: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help=f"Show tracebacks, as {DEBUG}=1 does.")] = False,
) -> None:
    """Take the options that go before a command."""
    if show:
        out.print(__version__, highlight=False)
        raise typer.Exit


def main() -> None:
    """Run the command that the arguments name."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    before = os.environ.get(DEBUG)
    if len(arguments) < len(sys.argv) - 1:
        os.environ[DEBUG] = "1"  # the processes that a command starts show theirs as well
    try:
        with plain_warnings(), reporting():
            _add_federation(arguments)
            app(args=arguments)
    finally:
        if before is None:
            os.environ.pop(DEBUG, None)
        else:
            os.environ[DEBUG] = before


def _add_federation(arguments: list[str]) -> None:
    """The federation's commands; they bring a network stack, so they are loaded when they are used."""
    app.registered_groups[:] = [g for g in app.registered_groups if g.name != "federation"]
    app.registered_commands[:] = [c for c in app.registered_commands if c.name != "federation"]
    if arguments[:1] == ["federation"]:
        try:
            from fedcomposite.cli.federation import federation_app
        except ModuleNotFoundError as missing:
            package = str(missing.name).partition(".")[0]
            raise ConfigError(
                f"a federation needs the package {package!r}: pip install 'fedcomposite[flower]'"
            ) from None
        app.add_typer(federation_app, name="federation")
    else:
        app.command("federation", help="A real federation, over Flower (installed with the extra 'flower').")(_named)


def _named() -> None:
    """Stand for the federation in the list of commands."""
