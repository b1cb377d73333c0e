"""The entry point: global options, the groups of commands, and whose move it is when something goes wrong."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from fedcomposite._version import __version__
from fedcomposite.cli.console import DEBUG, out, plain_warnings, reporting
from fedcomposite.cli.lazy import LazyCommand, LazyGroup

_HERE = "fedcomposite.cli."


class Commands(LazyGroup):
    """All commands: where each is found, and the first paragraph of its documentation."""

    entries = {  # noqa: RUF012
        "run": LazyCommand(_HERE + "runs:run", "Run one method on one problem and leave a run folder."),
        "compare": LazyCommand(
            _HERE + "runs:compare",
            "Run several methods over several seeds, and all values of grids; a table, a plot, and a run folder for "
            "each.",
        ),
        "referee": LazyCommand(
            _HERE + "judging:referee",
            "Judge a method of yours: the contract, then all methods on twelve problems; one page says where it is "
            "first.",
        ),
        "reproduce": LazyCommand(
            _HERE + "papers:reproduce", "Make a paper's figure and table, and a verdict on each of its claims."
        ),
        "solve": LazyCommand(
            _HERE + "solving:solve_command",
            "Solve a problem: the method and its steps are chosen, and a certificate says how good the answer is.",
        ),
        "fit": LazyCommand(
            _HERE + "analysis:fit", "Fit a linear model, with confidence intervals and its quality at every site."
        ),
        "path": LazyCommand(_HERE + "analysis:path", "Fit a model for every strength of the regularizer."),
        "cv": LazyCommand(
            _HERE + "analysis:cv",
            "Choose the strength of the regularizer by cross-validation, and measure the model on the folds held out.",
        ),
        "report": LazyCommand(
            _HERE + "reports:report",
            "Write a run's report: one HTML page that needs no network, and its tables as Markdown, LaTeX and CSV.",
        ),
        "predict": LazyCommand(
            _HERE + "reports:predict_command",
            "Apply a run's recipe and model to new samples; with a target in the file, say how good the predictions "
            "are.",
        ),
        "export": LazyCommand(
            _HERE + "runs:export_run",
            "Write a run's model, zeros and all, to one file, and check that the file gives the same predictions.",
        ),
        "list": LazyCommand(_HERE + "lists:list_names", "List what can be named in a configuration."),
        "plot": LazyCommand(_HERE + "runs:plot", "Draw the curves of one or more runs in one picture."),
        "cite": LazyCommand(_HERE + "cite:cite", "Print the BibTeX entry of the paper that a method is from."),
        "privacy": LazyCommand(
            _HERE + "privacy:privacy_command",
            "Say what noise an epsilon needs, or what epsilon a noise gives; accounting by dp-accounting.",
        ),
        "data": LazyCommand(_HERE + "data:data_app", "Look at data before using it, and get it ahead of time."),
        "federation": LazyCommand(
            _HERE + "federation_parties:parties_app", "A real federation, over NVIDIA FLARE or Flower."
        ),
    }


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Composite federated learning: sparse, constrained models across silos that keep their data.\n\n"
    "Exit codes: 0 done, 1 failed (diverged, interrupted, a client failed), 2 wrong usage or configuration, "
    "3 not converged (solve).",
)


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
            app(args=arguments)
    finally:
        if before is None:
            os.environ.pop(DEBUG, None)
        else:
            os.environ[DEBUG] = before
