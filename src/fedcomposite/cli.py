"""The command line: ``fedcomposite run | compare | export | list | plot | data``.

Exit codes: 0 done, 1 failed (diverged, interrupted, a client failed), 2 wrong usage or configuration.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import EntryPoint
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import pandas as pd
import typer
from rich import filesize
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedcomposite import __version__, algorithms, data, models, problems, regularizers
from fedcomposite._validation import suggest
from fedcomposite.data.catalog import FILES
from fedcomposite.data.fetch import SHIPPED, File, cache_folder
from fedcomposite.experiments import runner
from fedcomposite.experiments.config import Config, ConfigError, shipped
from fedcomposite.experiments.store import RunFolder, StoreError, coefficients
from fedcomposite.exporting import ExportError, Format, export
from fedcomposite.runtime import ClientError, Interrupted, Record

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
data_app = typer.Typer(no_args_is_help=True, help="Look at data before using it, and get it ahead of time.")
app.add_typer(data_app, name="data")
_WIDTH = None if sys.stdout.isatty() else 120  # a log or a pipe has no width of its own
out, err = Console(width=_WIDTH), Console(stderr=True)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write (default: runs/NAME-TIME).")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the folder holds from an earlier run.")]
Resume = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this folder, from its checkpoint.")
]
Source = Annotated[
    str | None, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a shipped experiment.")
]


_SUFFIXES = {"state_dict": ".pt", "safetensors": ".safetensors", "onnx": ".onnx", "csr": ".npz", "csv": ".csv"}


class FailedError(Exception):
    """Something went wrong that is not the user's wording; exit code 1."""


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """Composite federated learning: sparse, constrained models across silos that keep their data."""
    if show:
        out.print(__version__, highlight=False)
        raise typer.Exit


@app.command()
def run(
    config: Source = None,
    overrides: Overrides = None,
    destination: Out = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
) -> None:
    """Run one method on one problem and leave a run folder."""
    experiment, path = _open(config, overrides, destination, resume)
    if len(experiment.specs) != 1 or experiment.algorithm is None:
        raise ConfigError(f"{config or resume}: `run` needs one [algorithm]; for several [[algorithms]] use `compare`")
    folder = RunFolder(path)
    problem = experiment.make_problem()
    if resume is None:
        folder.create(overwrite)
    out.print(f"[bold]{escape(experiment.name)}[/]: {experiment.labels[0]} on {escape(str(problem.silos))}")
    with _progress(experiment.run.rounds) as begin:
        try:
            result = runner.execute(experiment, folder, problem, begin(experiment.labels[0]))
        except Interrupted as stop:
            raise FailedError(f"{stop.run.message}; go on with: fedcomposite run --resume {folder.path}") from None
    last = result.history[-1]
    out.print(
        f"{result.message}: objective {last['objective']:.8g}, stationarity {last['stationarity']:.2e}, "
        f"{last['nonzeros']} of {problem.dimension} nonzero, {_megabytes(last):.3g} MB sent, {last['seconds']:.2f} s"
        + (f", test accuracy {last['test_accuracy']:.4f}" if "test_accuracy" in last else ""),
        soft_wrap=True,
    )
    if problem.model is None:
        found = coefficients(problem, result.solution)
        caption = f"largest of {len(found)} nonzero coefficients" if len(found) > 15 else "nonzero coefficients"
        _print_frame(found.head(15), caption)
    out.print(f"written: {escape(str(folder.path))}")
    if result.status == "diverged":
        raise FailedError(result.message)


@app.command()
def compare(
    config: Source = None,
    overrides: Overrides = None,
    destination: Out = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
) -> None:
    """Run several methods over several seeds; a table, a plot, and a run folder for each."""
    experiment, path = _open(config, overrides, destination, resume)
    if not experiment.specs:
        raise ConfigError(f"{config or resume}: no [[algorithms]] to compare")
    if resume is None:
        if overwrite:
            if path.exists():
                experiment.make_problem()  # data that cannot be used must not cost an old comparison
            runner.clear(path)
        elif path.exists() and any(path.iterdir()):
            raise ConfigError(f"{path}: already holds files; use --resume, --overwrite or another --out")
        path.mkdir(parents=True, exist_ok=True)
    seeds = experiment.seeds or [experiment.seed]
    out.print(f"[bold]{escape(experiment.name)}[/]: {len(experiment.specs)} methods, {len(seeds)} seed(s)")
    with _progress(experiment.run.rounds) as begin:
        try:
            table = runner.compare(
                experiment, path, begin=lambda label, seed: begin(f"{label}, seed {seed}" if len(seeds) > 1 else label)
            )
        except Interrupted as stop:
            raise FailedError(f"{stop.run.message}; go on with: fedcomposite compare --resume {path}") from None
    shown = table if len(seeds) > 1 else table.drop(columns=[c for c in table if str(c).endswith("±")])
    if (table["status"] == "completed").all():
        shown = shown.drop(columns="status")
    _print_frame(shown, "stationarity is relative to the start; nonzeros, MB and seconds at the end")
    out.print(f"written: {escape(str(path))} (plot.png, comparison.csv)")
    if (table["status"] == "diverged").all():
        raise FailedError("every method diverged; try smaller steps")


@app.command("export")
def export_run(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    format: Annotated[Format, typer.Option("--format", help="csv: linear models; csr: sparse.")] = "state_dict",
    destination: Annotated[Path | None, typer.Option("--out", help="The file (default: RUN/exported.SUFFIX).")] = None,
) -> None:
    """Write a run's model, zeros and all, to one file, and check that the file gives the same predictions."""
    folder, kept = RunFolder(source), source / "model.safetensors"
    for needed in (folder.config, kept):
        if not needed.is_file():
            raise StoreError(
                f"{source}: no {needed.name}, so this is not the folder of a run that ended "
                "(a comparison has one in METHOD/seed-N)"
            )
    target = destination or source / f"exported{_SUFFIXES[format]}"
    if target.resolve() == kept.resolve():
        raise ConfigError(f"--out {target}: is the run's own file; give another name")
    if target.is_dir():
        raise ConfigError(f"--out {target}: is a folder; give a file")
    problem = Config.read(folder.config).make_problem()
    try:
        tensors = load_file(kept)
        x = tensors["x"]
    except (OSError, SafetensorError, KeyError) as error:
        raise StoreError(f"{kept}: not a readable model ({error})") from None
    made = export(x, problem, target, format=format, buffers=tensors.get("buffers"))
    if problem.model is not None:
        _print_frame(problem.layers(x), "exact zeros per tensor")
    zeros = made.parameters - made.nonzeros
    dense, file = (filesize.decimal(size) for size in (made.dense_bytes, made.file_bytes))
    out.print(
        f"zeros: {zeros} of {made.parameters} parameters ({100 * zeros / made.parameters:.1f} %)\n"
        f"size: {dense} of dense tensors, {file} in the file\n"
        f"predictions of the file and of the run agree (largest difference {made.difference:.2g})\n"
        f"written: {escape(str(made.path))}",
        highlight=False,
    )


@app.command("list")
def list_names(
    what: Annotated[
        Literal["algorithms", "regularizers", "datasets", "partitions", "losses", "models", "experiments"],
        typer.Argument(help="What to list."),
    ],
) -> None:
    """List what can be named in a configuration."""
    if what == "algorithms":
        caption = (
            "clients: who must take part in a round (*: all, unless partial_participation is set);\n"
            "exact: no residual with full gradients and several local steps; full only: if all clients take part;\n"
            "up, down: vectors per client; proxes of h, all clients: measured with 4 clients and 5 local steps"
        )
        _print_frame(algorithm_table(), caption)
        return
    known: dict[str, str] = {
        "regularizers": lambda: {k: _first_line(v) for k, v in regularizers.REGISTRY.items()},
        "datasets": lambda: {k: _first_line(v) for k, v in data.DATASETS.items()},
        "partitions": lambda: {k: _first_line(v) for k, v in data.PARTITIONERS.items()},
        "losses": lambda: {k: _first_line(v) for k, v in problems.LOSSES.items()},
        "models": lambda: {
            k: f"of {v.value}" if isinstance(v, EntryPoint) else _first_line(v) for k, v in models.available().items()
        },
        "experiments": shipped,
    }[what]()
    _print_frame(pd.DataFrame({"name": known.keys(), "what": known.values()}), "")


def algorithm_table() -> pd.DataFrame:
    """What each method handles and needs; traffic and work are measured on a probe run (4 clients, 5 local steps)."""
    from fedcomposite.testing import measure_traffic

    rows = []
    for name, cls in algorithms.REGISTRY.items():
        seen = measure_traffic(cls)
        rows.append(
            {
                "name": name,
                "paper": _cite(cls.info.paper, cls.info.year),
                "handles h": cls.info.regularizer,
                "clients": "any*" if "partial_participation" in algorithms.fields(cls) else cls.info.participation,
                "exact": ("yes" if cls.info.exact_partial else "full only") if cls.info.exact else "no",
                "up": f"{seen.up:.2g}",
                "down": f"{seen.down:.2g}",
                "proxes": f"{seen.proxes:.3g}",
                "fields": ", ".join(algorithms.fields(cls)),
            }
        )
    return pd.DataFrame(rows)


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or comparisons.")],
    destination: Annotated[Path, typer.Option("--out", help="The picture to write.")] = Path("plot.png"),
    title: Annotated[str, typer.Option(help="A title.")] = "",
) -> None:
    """Draw the curves of one or more runs in one picture."""
    from fedcomposite.experiments.plots import draw_histories

    draw_histories(runner.collect(runs), destination, title)
    out.print(f"written: {escape(str(destination))}")


@data_app.command("list")
def list_data() -> None:
    """List the data sets, and where each would come from now."""
    rows = [{"name": k, "what": _first_line(v), "where": _whereabouts(k)} for k, v in data.DATASETS.items()]
    _print_frame(pd.DataFrame(rows), "")


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
            out.print(f"{name}: {_whereabouts(name)}", highlight=False, markup=False, soft_wrap=True)


@data_app.command()
def describe(
    source: Annotated[str, typer.Argument(metavar="NAME|CONFIG", help="A data set, or an experiment with [data].")],
    overrides: Overrides = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Also draw the class counts per client.")] = None,
) -> None:
    """Print how the samples lie with the clients, and how different the clients are."""
    if source in data.DATASETS:
        content = {"data": {"name": source}, "run": {"rounds": 0}}
        silos = Config.check(content, source).make_silos()
    else:
        silos = Config.read(source, overrides or ()).make_silos()
    _print_frame(silos.summary(), str(silos))
    out.print(", ".join(f"{k.replace('_', ' ')} {v:.3g}" for k, v in silos.heterogeneity().items()))
    if picture is not None:
        silos.plot(picture)
        out.print(f"written: {escape(str(picture))}")


# -- helpers --------------------------------------------------------------------------------------------------------


def _open(
    config: str | None, overrides: list[str] | None, destination: Path | None, resume: Path | None
) -> tuple[Config, Path]:
    """Read the experiment and decide the folder."""
    if (config is None) == (resume is None):
        raise ConfigError("give a CONFIG, or --resume RUN to go on with an earlier run")
    if resume is not None:
        if not (resume / "config.toml").is_file():
            raise ConfigError(f"--resume {resume}: no config.toml there, so this is not a run folder")
        if destination is not None:
            raise ConfigError("--out cannot be given with --resume")
        experiment = Config.read(resume / "config.toml", overrides or ())
        experiment.settings()  # refuses a missing device before any work
        return experiment, resume
    experiment = Config.read(str(config), overrides or ())
    experiment.settings()
    return experiment, destination or Path("runs") / f"{experiment.name}-{datetime.now():%Y%m%d-%H%M%S}"


def _whereabouts(name: str) -> str:
    """Where the files of a data set would come from now; what they hold is checked when they are read."""
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


def _megabytes(record: Record) -> float:
    return float(record["bytes_up"] + record["bytes_down"]) / 1e6


@contextmanager
def _progress(rounds: int) -> Iterator[Callable[[str], Callable[[Record], None]]]:
    """A live bar per run on a terminal; a line per tenth of a run elsewhere."""
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
        TextColumn("{task.fields[seen]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:

        def begin(label: str) -> Callable[[Record], None]:
            task = bar.add_task(escape(label), total=rounds, seen="")

            def watch(record: Record) -> None:
                seen = (
                    f"F {record['objective']:.6g}  ‖G‖ {record['stationarity']:.1e}  "
                    f"nnz {record['nonzeros']}  {_megabytes(record):.3g} MB"
                    + (f"  test {record['test_accuracy']:.4f}" if "test_accuracy" in record else "")
                )
                bar.update(task, completed=record["round"], seen=seen)
                if not err.is_terminal and record["round"] % max(1, rounds // 10) == 0:
                    line = f"{label}: round {record['round']}/{rounds}  {seen}"
                    err.print(line, highlight=False, markup=False, soft_wrap=True)

            return watch

        yield begin


def _print_frame(frame: pd.DataFrame, caption: str) -> None:
    table = Table(caption=escape(caption) or None, caption_justify="left")
    for column in frame.columns:
        numeric = pd.api.types.is_numeric_dtype(frame[column])
        table.add_column(escape(str(column)), justify="right" if numeric else "left", overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*(_shown(v) for v in row))
    out.print(table)


def _shown(value: Any) -> str:
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.4g}"
    return escape(str(value))


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    err.print(f"warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _cite(paper: str, year: int) -> str:
    """First author, et al., year."""
    first, *others = paper.partition(":")[0].split(", ")
    return f"{first} et al. {year}" if len(others) > 1 else f"{' & '.join([first, *others])} {year}"


def _first_line(thing: Any) -> str:
    lines = (thing.__doc__ or "").strip().splitlines()
    return lines[0].rstrip(":") if lines else ""


def _add_federation() -> None:
    try:
        from fedcomposite.federation.commands import federation_app
    except ModuleNotFoundError as missing:
        if sys.argv[1:2] == ["federation"]:
            raise ConfigError(
                f"a federation needs the package {missing.name!r}: pip install 'fedcomposite[flower]'"
            ) from None
        return
    app.add_typer(federation_app, name="federation")


def main() -> None:
    """Entry point: one clear line for what went wrong, and the exit code that says whose move it is."""
    warnings.showwarning = _show_warning
    try:
        if sys.argv[1:2] in ([], ["--help"], ["federation"]):  # it brings a network stack, which others need not load
            _add_federation()
        app()
    except (ValueError, TypeError) as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except (ClientError, ExportError, FailedError, OSError) as error:
        err.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("stopped", style="red")
        sys.exit(1)
