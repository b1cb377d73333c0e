"""``fedcomposite solve CONFIG``: the answer of an experiment's problem, without a method or steps.

Exit code 3: the rounds were done and the answer is not there yet.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from fedcomposite.estimators import solve
from fedcomposite.experiments.config import Config
from fedcomposite.experiments.store import RunFolder, coefficients
from fedcomposite.problems import Problem
from fedcomposite.runtime import Record, Run

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
        int | None, typer.Option(help="Most rounds (default: 100 for Newton steps, 5000 for others).")
    ] = None,
    destination: Annotated[Path | None, typer.Option("--out", help="Folder to write; nothing if left out.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what the folder holds.")] = False,
) -> None:
    """Solve a problem: the method and its steps are chosen, and a certificate says how good the answer is."""
    out = Console(soft_wrap=True)
    experiment = Config.read(config, overrides or ())
    problem, run = experiment.make_problem(), experiment.run
    folder = None if destination is None else RunFolder(destination)
    if folder is not None:
        folder.create(overwrite)
    reach = tolerance if tolerance is not None else run.tolerance if run.tolerance is not None else 1e-8
    found = solve(
        problem,
        tolerance=reach,
        rounds=rounds,
        participation=run.participation,
        batch_size=run.batch_size,
        seed=experiment.seed,
        dtype=getattr(torch, run.dtype),
        device=run.device,
    )
    if found.status != "converged":
        out.print(f"[bold red]NOT CONVERGED[/]: {escape(found.message)}")
    else:
        out.print(escape(found.message))
    last = found.history[-1]
    out.print(f"objective {last['objective']:.12g}, {last['nonzeros']} of {problem.dimension} nonzero", highlight=False)
    if problem.model is None:
        table = coefficients(problem, found.solution)
        for name, value in table.head(_SHOWN).itertuples(index=False):
            out.print(f"  {value:+.6g}  {escape(str(name))}", highlight=False)
        if len(table) > _SHOWN:
            out.print(f"  and {len(table) - _SHOWN} more")
    if folder is not None:
        _keep(folder, experiment, found, problem)
        out.print(f"written: {escape(str(folder.path))}")
    if found.status != "converged":
        raise typer.Exit(NOT_CONVERGED)


def _keep(folder: RunFolder, experiment: Config, found: Run, problem: Problem) -> None:
    """A run folder like that of ``run``, with the certificate in its summary's message."""
    experiment.only({"name": "auto"}, experiment.seed).write(folder.config)
    lines = [json.dumps(Record(record)) for record in found.history]
    (folder.path / "history.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    folder.finish(found, problem, "solve")
