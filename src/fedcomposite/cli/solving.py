"""``fedcomposite solve CONFIG``: the answer of an experiment's problem, without a method or steps.

Exit code 3: the rounds were done and the answer is not there yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from fedcomposite.analysis import solve
from fedcomposite.choice import AUTO, Curvature
from fedcomposite.cli.console import AsJson, FailedError, out, print_frame, results, rows, written
from fedcomposite.experiments import Config, ConfigError, FolderLock, RunFolder
from fedcomposite.experiments.store import Journal, coefficients
from fedcomposite.problems import Problem
from fedcomposite.runtime import Interrupted, Run

NOT_CONVERGED = 3
"""Exit code of a solution that was not found."""

_SHOWN = 15  # coefficients


def solve_command(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file; its [algorithm] is not looked at.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated."),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Stationarity to reach (default: the file's, or 1e-8).")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Most rounds (default: 100 for Newton steps, 500 with kinks, 5000 for others).")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Most seconds; the best model by then counts.")
    ] = None,
    curvature: Annotated[
        Curvature, typer.Option(help='"never": no Hessian leaves a client; gradients and a few products with one do.')
    ] = "auto",
    destination: Annotated[Path | None, typer.Option("--out", help="Folder to write; nothing if left out.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what the folder holds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Solve a problem: the method and its steps are chosen, and a certificate says how good the answer is."""
    experiment = Config.read(config, overrides or ())
    chosen = experiment.settings()  # refuses a missing device before any work
    if chosen["privacy"] is not None or chosen["aggregator"] is not None:
        raise ConfigError("solve takes exact means of exact gradients; for [privacy] or an aggregator use `run`")
    limits: dict[str, Any] = {"rounds": rounds, "seconds": seconds, "curvature": curvature}
    limits |= {} if tolerance is None else {"tolerance": tolerance}
    if destination is None:
        found, problem = _solved(experiment, limits)
    else:
        folder = RunFolder(destination)
        with FolderLock(destination):
            folder.check_new(overwrite, instead="--overwrite or another --out")
            journal = Journal(folder, experiment.only({"name": AUTO}, experiment.seed).text, fresh=True)
            found, problem = _solved(experiment, limits, journal)
            journal.close()
            folder.finish(found, problem, "solve")
    with results(as_json) as told:
        told |= _told(found, problem, destination)
        _show(found, problem)
        if destination is not None:
            written(destination)
    if found.status == "diverged":
        raise FailedError(found.message)
    if found.status != "converged":
        raise typer.Exit(NOT_CONVERGED)


def _solved(experiment: Config, given: dict[str, Any], journal: Journal | None = None) -> tuple[Run, Problem]:
    """The answer to the experiment's problem."""
    problem, run = experiment.make_problem(), experiment.run
    given = {"tolerance": 1e-8 if run.tolerance is None else run.tolerance} | given
    try:
        found = solve(
            problem,
            **given,
            participation=run.participation,
            batch_size=run.batch_size,
            seed=experiment.seed,
            dtype=getattr(torch, run.dtype or "float64"),
            device=run.device,
            on_record=journal,
        )
    except Interrupted as stop:
        raise FailedError(stop.run.message) from None
    return found, problem


def _told(found: Run, problem: Problem, folder: Path | None) -> dict[str, Any]:
    """What was found, for machines."""
    sure = found.certificate
    return {
        "status": found.status,
        "message": found.message,
        "folder": folder,
        "last": found.history[-1],
        "certificate": None if sure is None else {"kind": sure.kind, "value": sure.value},
        "coefficients": None if problem.model is not None else rows(coefficients(problem, found.solution)),
    }


def _show(found: Run, problem: Problem) -> None:
    """What was found; above it, whether it can be relied upon."""
    said = escape(found.message)
    sure = found.status == "converged"
    out.print(said if sure else f"[bold red]NOT CONVERGED[/]: {said}", highlight=False, soft_wrap=True)
    last = found.history[-1]
    out.print(f"objective {last['objective']:.12g}, {last['nonzeros']} of {problem.dimension} nonzero", highlight=False)
    if problem.model is None:
        table = coefficients(problem, found.solution)
        caption = f"largest of {len(table)} nonzero coefficients" if len(table) > _SHOWN else "nonzero coefficients"
        print_frame(table.head(_SHOWN), caption, digits=6)
