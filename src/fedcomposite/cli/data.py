"""``data``: look at data before using it, and get it ahead of time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated

import pandas as pd
import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from fedcomposite import data
from fedcomposite._validation import suggest
from fedcomposite.cli.analysis import first_table
from fedcomposite.cli.console import (
    AsJson,
    FailedError,
    err,
    first_sentence,
    out,
    print_frame,
    results,
    rows,
    show_frame,
    written,
)
from fedcomposite.cli.described import (
    AsTableOne,
    By,
    Columns,
    Median,
    TableFile,
    show_table_one,
    show_tables,
    wished,
)
from fedcomposite.cli.runs import Overrides, check_picture
from fedcomposite.data import OWN
from fedcomposite.data.catalog import FILES
from fedcomposite.data.fetch import SHIPPED, File, cache_folder
from fedcomposite.data.queries import Rules
from fedcomposite.experiments import Config, ConfigError

data_app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Look at data before using it, and get it ahead of time."
)


@data_app.command("list")
def list_data(as_json: AsJson = False) -> None:
    """List the data sets, and where each would come from now."""
    known = [{"name": k, "what": first_sentence(v), "where": whereabouts(k)} for k, v in data.DATASETS.items()]
    show_frame(pd.DataFrame(known), as_json)


@data_app.command()
def fetch(names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Data sets of `data list`.")]) -> None:
    """Get data sets ahead of time and verify them, as for a machine that will be offline."""
    for name in names:
        if name not in data.DATASETS:
            known = ", ".join(sorted(data.DATASETS))
            raise ConfigError(f"unknown data set {name!r}{suggest(name, data.DATASETS)} (known: {known})")
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(url: str, received: int, total: int | None) -> None:
            if url not in tasks:
                tasks[url] = bar.add_task(escape(PurePosixPath(url).name))
            bar.update(tasks[url], completed=received, total=total)

        for name in names:
            try:
                data.download(name, progress=show)
            except data.DataError as error:
                raise FailedError(str(error)) from None
            out.print(f"{name}: {whereabouts(name)}", highlight=False, markup=False, soft_wrap=True)


@data_app.command()
def describe(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="FILES...|NAME|CONFIG", help="A table per site, a data set, or an experiment."),
    ],
    overrides: Overrides = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Also draw the class counts per client.")] = None,
    config: Annotated[
        str | None, typer.Option(metavar="CONFIG", help="Of FILES: an experiment whose recipe knows names and units.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Of FILES: the column to predict.")] = None,
    min_count: Annotated[
        int | None, typer.Option(help="Fewest rows behind a count, as sites would tell (default: the recipe's, or 1).")
    ] = None,
    table_one: AsTableOne = False,
    by: By = None,
    columns: Columns = None,
    median: Median = None,
    destination: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Look before fitting: what every site has of every feature, and what differs between them.

    Of a data set or an experiment without a recipe: how the samples lie with the clients, and how different these are.
    """
    if picture is not None:
        check_picture(picture)
    experiment = _experiment(sources, config, overrides or ())
    tables = bool(sources[1:]) or _is_table(sources[0])
    section = None if experiment is None else experiment.table_one
    wish = wished(table_one, section, by, columns, median, destination)
    if wish is not None:
        if experiment is None:
            named = {"files": list(sources)} if tables else {"name": sources[0]}
            content = {"data": {**named, "target": target or "-"}, "recipe": {}, "run": {"rounds": 0}}
            experiment = Config.check(content, sources[0])
        rules = None if min_count is None else Rules(min_count)
        made = first_table(experiment, wish, sources if tables else None, rules)
        show_table_one(made, as_json, destination)
        return
    if tables or (experiment is not None and experiment.recipe is not None):
        if picture is not None:
            raise ConfigError("--plot draws silos; it cannot be given with tables")
        show_tables(sources if tables else None, experiment, target, min_count, as_json)
        return
    for option, given in {"--target": target, "--min-count": min_count}.items():
        if given:
            raise ConfigError(f"{option} is for tables: give FILES, or an experiment with a [recipe]")
    if experiment is None:
        experiment = Config.check({"data": {"name": sources[0]}, "run": {"rounds": 0}}, sources[0])
    silos = experiment.make_silos()
    with results(as_json) as found:
        found |= {"silos": rows(silos.summary()), "heterogeneity": silos.heterogeneity()}
        print_frame(silos.summary(), str(silos))
        out.print(", ".join(f"{k.replace('_', ' ')} {v:.3g}" for k, v in silos.heterogeneity().items()))
        if picture is not None:
            silos.plot(picture)
            written(picture)


def _experiment(sources: list[str], config: str | None, overrides: Sequence[str]) -> Config | None:
    """The experiment that was named, if one was."""
    named = config or (None if sources[1:] or sources[0] in data.DATASETS else sources[0])
    return None if named is None or _is_table(named) else Config.read(named, overrides)


def _is_table(source: str) -> bool:
    """Whether a name is that of a file, or of a folder of files."""
    return Path(source).suffix.casefold() in (".csv", ".parquet") or (
        source not in data.DATASETS and Path(source).is_dir()
    )


@data_app.command()
def messy(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    seed: Annotated[int, typer.Option(help="Chooses the patients.")] = 0,
) -> None:
    """Write four hospitals' files as people have them, and an experiment with a recipe for them."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: already there; give a new folder")
    for path in [*data.messy_consortium(folder, seed).values(), folder / "experiment.toml"]:
        written(path)


@data_app.command()
def survivors(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    seed: Annotated[int, typer.Option(help="Chooses the patients.")] = 0,
    messy: Annotated[bool, typer.Option("--messy", help="As people have them: names, units and gaps differ.")] = False,
) -> None:
    """Write four hospitals' files of made-up patients with times until death, and an experiment for them."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: already there; give a new folder")
    for path in [*data.survivor_files(folder, seed=seed, messy=messy).values(), folder / "experiment.toml"]:
        written(path)


def whereabouts(name: str) -> str:
    """Where the files of a data set would come from now; what they hold is checked when they are read."""
    if name in OWN:
        return "your own files"
    return ", ".join(sorted({_place(file) for file in FILES.get(name, ())})) or "no files needed"


def _place(file: File) -> str:
    """The first place that has a copy, in the order of :mod:`fedcomposite.data.fetch`."""
    places = [("shipped", SHIPPED / file.path), ("cached", cache_folder() / file.path)]
    if named := os.environ.get("FEDCOMPOSITE_DATA"):
        first, _, rest = file.path.partition("/")
        own = Path(named).expanduser()
        beside = own.resolve().parent / f"data-{first}"
        places[:0] = [(f"found in {own}", own / file.path), (f"found in {beside}", beside / rest)]
    for where, path in places:
        if any(path.with_name(path.name + suffix).is_file() for suffix in ("", ".gz", ".bz2", ".xz")):
            return where
    return "to download"
