"""``fit | path | cv``: a linear model of files at hand, how sure and how good it is, in a run folder for ``report``."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import typer

from fedcomposite import data
from fedcomposite.analysis.study import Analysis, Kind, analyse
from fedcomposite.choice import AUTO
from fedcomposite.cli.console import AsJson, out, print_frame, print_notes, results, rows, written
from fedcomposite.cli.runs import Overrides
from fedcomposite.cli.solve import NOT_CONVERGED
from fedcomposite.data import Recipe
from fedcomposite.experiments import Config, ConfigError, FolderLock, RunFolder
from fedcomposite.experiments.store import coefficients

_SHOWN = 15  # coefficients
_SEEN = 5e-4  # bounds of measures that are smaller are not printed
_MEASURES = (
    *("samples", "positives", "auroc", "auroc_error", "brier", "mean", "r2", "rmse", "mae", "deviance_explained"),
    *("calibration_slope", "calibration_slope_error"),
)

ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file; its [algorithm] is not looked at.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write (default: runs/NAME-KIND-TIME).")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the folder holds.")]
Count = Annotated[int, typer.Option(min=2, help="Strengths of the path.")]
Ratio = Annotated[float | None, typer.Option(help="The last strength over the first (default: 1e-4, or 1e-2).")]
Folds = Annotated[str, typer.Option(help="How many folds, or 'sites': every site is left out once.")]
Score = Annotated[Literal["deviance", "auc", "error"], typer.Option(help="What is compared.")]
Seconds = Annotated[float | None, typer.Option(min=0.001, help="Most seconds; what is done by then is the result.")]
PathChoice = Annotated[Literal["aic", "bic", "ebic"], typer.Option(help="Which model of the path.")]
CVChoice = Annotated[Literal["min", "1se", "aic", "bic", "ebic"], typer.Option(help="Which model.")]


def fit(
    config: ConfigFile,
    seconds: Seconds = None,
    overrides: Overrides = None,
    destination: Out = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Fit a linear model, with confidence intervals and its quality at every site."""
    _local(config, "fit", overrides, destination, overwrite, as_json, seconds=seconds)


def path(
    config: ConfigFile,
    count: Count = 100,
    ratio: Ratio = None,
    choice: PathChoice = "bic",
    seconds: Seconds = None,
    overrides: Overrides = None,
    destination: Out = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Fit a model for every strength of the regularizer."""
    given = {"count": count, "ratio": ratio, "choice": choice, "seconds": seconds}
    _local(config, "path", overrides, destination, overwrite, as_json, **given)


def cv(
    config: ConfigFile,
    folds: Folds = "10",
    score: Score = "deviance",
    count: Count = 100,
    ratio: Ratio = None,
    choice: CVChoice = "1se",
    seconds: Seconds = None,
    overrides: Overrides = None,
    destination: Out = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Choose the strength of the regularizer by cross-validation, and measure the model on the folds held out."""
    given = {"folds": folds_of(folds), "scoring": score, "count": count, "ratio": ratio, "choice": choice}
    given |= {"seconds": seconds}
    _local(config, "cv", overrides, destination, overwrite, as_json, **given)


def folds_of(text: str) -> int | Literal["sites"]:
    """A number of folds, or "sites"."""
    if text == "sites":
        return "sites"
    if not text.isdecimal() or int(text) < 2:
        raise ConfigError(f"--folds {text}: must be a number from 2 on, or 'sites'")
    return int(text)


def checked(experiment: Config) -> Config:
    """Refuse what an analysis is not made for."""
    if experiment.privacy is not None or experiment.run.aggregator is not None:
        raise ConfigError("an analysis takes exact sums; for [privacy] or an aggregator use `run`")
    if experiment.model is not None:
        raise ConfigError("an analysis is of linear models; for a [model] use `run` or `solve`")
    return experiment


def _local(
    config: str,
    kind: Kind,
    overrides: list[str] | None,
    destination: Path | None,
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    experiment = checked(Config.read(config, overrides or ()))
    folder = RunFolder(destination or Path("runs") / f"{experiment.name}-{kind}-{datetime.now():%Y%m%d-%H%M%S}")
    with FolderLock(folder.path):
        folder.check_new(overwrite, instead="--overwrite or another --out")
        began = time.monotonic()
        problem = experiment.make_problem()
        made = tried(problem, kind, experiment.seed, **options)
        text = experiment.only({"name": AUTO}, experiment.seed).text
        made.write(folder, text, _description(experiment, problem.silos), time.monotonic() - began)
    with results(as_json) as found:
        finish(made, folder, found)


def tried(problem: Any, kind: Kind, seed: int, **options: Any) -> Analysis:
    """The analysis; what cannot be analysed is the experiment's mistake."""
    try:
        return analyse(problem, kind, seed=seed, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _description(experiment: Config, silos: data.Silos) -> list[dict[str, Any]]:
    """A row per feature and site of the tables that a recipe prepared, or a row per site."""
    if experiment.recipe is None:
        return records(silos.summary())
    source = experiment.data
    given = data.frames(source["name"]) if "name" in source else source["files"]
    style = {k: v for k, v in source.items() if k in ("separator", "decimal", "encoding", "thousands", "missing")}
    recipe = Recipe(**experiment.recipe)
    found = data.describe(given, target=source["target"], recipe=recipe, **({} if "name" in source else style))
    return records(found)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table."""
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def with_bounds(measured: pd.DataFrame) -> pd.DataFrame:
    """A table of measures as it is printed: without bounds that are too small to be seen in any row."""
    small = [c for c in measured if str(c).endswith("_error") and not (measured[c] > _SEEN).any()]
    return measured.drop(columns=small)


def finish(made: Analysis, folder: RunFolder, found: dict[str, Any]) -> None:
    """Say what was found and where it is, to people and to machines."""
    out.print(made.message, markup=False, highlight=False, soft_wrap=True)
    table = coefficients(made.problem, made.x)
    found |= {"message": made.message, "converged": made.converged, "folder": folder.path, "coefficients": rows(table)}
    caption = f"largest of {len(table)} nonzero coefficients" if len(table) > _SHOWN else "nonzero coefficients"
    print_frame(table.head(_SHOWN), caption, digits=6)
    where = "on held-out folds" if made.cv is not None else "on the samples of the fit"
    for key, report, caption in (("quality", made.quality, where), ("tested", made.tested, "on the test part")):
        if report is not None:
            names = [name for name in _MEASURES if name in report.table]
            measured: pd.DataFrame = report.table[names].reset_index(names="site")
            why = report.why(names)
            found[key] = [{**row, "note": why.get(row["site"], "")} for row in rows(measured)]
            print_frame(with_bounds(measured), caption)
            print_notes(why)
    if made.cv is not None and (off := float(made.cv.mean_error[made.cv.index_min])) > 0:
        said = f"the cross-validated {made.cv.score} at the best strength is off by at most {off:.2g}"
        print_notes({"": f"{said}, since the sites tell bins"})
    written(folder.path)
    if not made.converged:
        out.print("[bold red]NOT CONVERGED[/]: see `converged` in analysis.json; take a larger lambda or --ratio")
        raise typer.Exit(NOT_CONVERGED)
