"""``reproduce``: the papers' figures and tables, with a verdict on each claim."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.markup import escape

from fedcomposite import papers
from fedcomposite.cli.console import AsJson, FailedError, err, out, print_frame, results, rows, written
from fedcomposite.cli.runs import Jobs, Overrides
from fedcomposite.experiments.workers import FailedRunsError
from fedcomposite.papers.base import read_state
from fedcomposite.runtime import Interrupted

OUT, QUICK = Path("reproductions"), Path("reproductions-quick")


def reproduce(
    names: Annotated[list[str], typer.Argument(help="What to reproduce: `fedcomposite list papers`; or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="A reduced form, about a minute on a CPU.")] = False,
    destination: Annotated[
        Path | None, typer.Option("--out", help=f"Folder above that of each name (default: {OUT}, {QUICK}).")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the runs are done: cpu, cuda.")] = "cpu",
    jobs: Jobs = 1,
    partial: Annotated[bool, typer.Option("--partial", help="Run nothing: tell what is finished so far.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Make a paper's figure and table, and a verdict on each of its claims.

    What was interrupted goes on where it was, what is finished is not repeated: give the same command again.
    """
    folder = destination or (QUICK if quick else OUT)
    wanted = papers.names() if names == ["all"] else names
    options: dict[str, Any] = {"quick": quick, "device": device, "partial": partial, "overrides": overrides or ()}
    for name in wanted:
        papers.load(name)
    for name in wanted:  # before any work
        papers.check(name, folder, **options)
    with results(as_json) as found:
        for name in wanted:
            try:
                done = papers.reproduce(
                    name,
                    folder,
                    jobs=jobs,
                    **options,
                    say=lambda line: err.print(line, markup=False, highlight=False, soft_wrap=True),
                )
            except Interrupted as stop:
                raise FailedError(f"{name}: {stop.run.message}; the same command goes on from there") from None
            except FailedRunsError as error:
                raise FailedError(f"{name}: {error}") from None
            out.print(f"[bold]{name}[/]: {escape(done.paper.card['title'])}")
            told = [(claim.says, claim.measured, claim.verdict) for claim in done.claims]
            claims = pd.DataFrame(told, columns=["claim", "measured", "verdict"])
            found[name] = {"claims": rows(claims), "folder": str(done.folder)}
            print_frame(claims)
            if quick:
                out.print("the reduced form: it shows that everything works, and is no verdict on the paper")
            out.print(f"written: {escape(str(done.folder))} (figure.pdf, figure.png, data.csv, verdict.md)")
        written(papers.write_report(folder))


def paper_table() -> pd.DataFrame:
    """Every reproduction: what it is, how long it takes, and what has been run in the default folder."""
    rows = []
    for name in papers.names():
        card, state = papers.load(name).card, read_state(OUT / name)
        minutes = card.get("minutes", {})
        ran = "–" if not state else f"{state['date']}, {state['device']}" + ("" if state["complete"] else " (partly)")
        rows.append(
            {
                "name": name,
                "what": card["title"],
                "CPU min": minutes.get("cpu"),
                "GPU min": minutes.get("gpu"),
                "run here": ran,
            }
        )
    return pd.DataFrame(rows)
