"""``referee``: a stranger's method gets a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedcomposite.cli.console import AsJson, FailedError, err, out, print_frame, results, rows, written
from fedcomposite.cli.runs import Jobs
from fedcomposite.testing.arena import ARENA
from fedcomposite.testing.referee import BUDGET, judge


def referee(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A Python file with a method in it.")],
    destination: Annotated[Path, typer.Option("--out", help="Folder of the page; one below it per method.")] = Path(
        "referee"
    ),
    jobs: Jobs = 2,
    budget: Annotated[int, typer.Option(min=1, help="Gradients of each run, in the whole system.")] = BUDGET,
    problems: Annotated[
        list[str] | None, typer.Option("--problem", help="A problem of the arena; may be repeated. All if left out.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option("--against", help="A method to meet; may be repeated. All if left out.")
    ] = None,
    tuned: Annotated[
        bool, typer.Option("--tune", help="Choose every method's step; about five times as long.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Judge a method of yours: the contract, then all methods on twelve problems; one page says where it is first.

    The exit code is 1 if a law of the contract is broken.
    """

    def say(line: str) -> None:
        err.print(line, markup=False, highlight=False, soft_wrap=True)

    with results(as_json) as found:
        made = judge(
            source, budget=budget, jobs=jobs, problems=problems or tuple(ARENA), against=against, tuned=tuned, say=say
        )
        for verdict in made:
            page = verdict.save(destination / verdict.label.partition(" (")[0])
            table = verdict.to_frame()
            found[verdict.label] = {"laws": verdict.laws, "problems": rows(table), "claims": rows(verdict.claims)}
            out.print(escape(repr(verdict)), highlight=False, soft_wrap=True)
            print_frame(table.drop(columns="what"), verdict.label, drop=("its gradients", "its accuracy"))
            for law, how in verdict.laws.items():
                out.print(f"broken: {law}: {escape(how)}", highlight=False, soft_wrap=True)
            written(page)
    if any(verdict.laws for verdict in made):
        raise FailedError("the contract is broken: see the page")
