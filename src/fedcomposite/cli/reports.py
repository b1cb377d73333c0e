"""``report RUN`` and ``predict RUN FILE``: what a run is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcomposite.analysis.prediction import predict
from fedcomposite.cli.console import AsJson, out, print_frame, results, rows, written
from fedcomposite.files import write_atomic
from fedcomposite.reports import write_report

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A folder of solve, fit, path or cv, also of a federation.")]


def report(
    run: Run,
    destination: Annotated[Path | None, typer.Option("--out", help="Folder to write (default: RUN itself).")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's report: one HTML page that needs no network, and its tables as Markdown, LaTeX and CSV."""
    with results(as_json) as found:
        found["written"] = write_report(run, destination)
        for path in found["written"]:
            written(path)


def predict_command(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New samples: .csv or .parquet.")],
    destination: Annotated[Path, typer.Option("--out", help="File to write.")] = Path("scored.csv"),
    site: Annotated[
        str | None, typer.Option(help="Whose names and units the file has (default: the site it is called after).")
    ] = None,
    threshold: Annotated[float, typer.Option(help="Probability from which on a sample is of class 1.")] = 0.5,
    offset: Annotated[
        str | None, typer.Option(help="Column that is added to the margins (default: the run's [data] offset).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Apply a run's recipe and model to new samples; with a target in the file, say how good the predictions are."""
    made = predict(run, file, site=site, threshold=threshold, offset=offset)
    if made.site is not None and site is None:
        out.print(f"{file.name} is read with the names and units of {made.site}, as it is called", markup=False)
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(destination, made.table.to_csv(index=False).encode())
    with results(as_json) as found:
        found |= {"written": destination, "measures": None if made.measures is None else rows(made.measures)}
        if made.measures is not None:
            print_frame(made.measures, f"on {file.name}")
        else:
            out.print("the file has no target, so nothing can be said about how good this is")
        written(destination)
