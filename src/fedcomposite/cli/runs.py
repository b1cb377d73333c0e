"""Commands that make runs and look at them: ``run | compare | export | plot``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import filesize
from rich.markup import escape
from torch import Tensor

from fedcomposite import files
from fedcomposite._faults import UserError, first_line
from fedcomposite.cli.console import AsJson, FailedError, err, out, print_frame, results, rows, written
from fedcomposite.experiments import Config, ConfigError, FolderLock, RunFolder, StoreError, Sweep, comparison, runner
from fedcomposite.experiments.store import coefficients
from fedcomposite.experiments.tables import SPREAD, joined
from fedcomposite.experiments.workers import FailedRunsError
from fedcomposite.exporting import Exported, Format, export
from fedcomposite.exporting.quantizing import needs_samples
from fedcomposite.plots import Axis, Band, Width, check_kind, draw_histories
from fedcomposite.problems import Problem
from fedcomposite.runtime import Interrupted, Record
from fedcomposite.runtime.callbacks.progress import make_bar, room_beside, short, summary

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write (default: runs/NAME-TIME).")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the folder holds from an earlier run.")]
Resume = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this folder, from its checkpoint.")
]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Runs at a time, each in a process with one thread.")]
Source = Annotated[
    str | None, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a shipped experiment.")
]

T = TypeVar("T", Config, Sweep)
_SUFFIXES = {"state_dict": ".pt", "safetensors": ".safetensors", "onnx": ".onnx", "csr": ".npz", "csv": ".csv"}


def run(
    config: Source = None,
    overrides: Overrides = None,
    destination: Out = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
    as_json: AsJson = False,
) -> None:
    """Run one method on one problem and leave a run folder."""
    with results(as_json) as found:
        _run(config, overrides, destination, overwrite, resume, found)


def _run(
    config: str | None,
    overrides: list[str] | None,
    destination: Path | None,
    overwrite: bool,
    resume: Path | None,
    found: dict[str, Any],
) -> None:
    experiment, path = _open(config, overrides, destination, overwrite, resume, partial(Config.read, rounds=True))
    if len(experiment.specs) != 1 or experiment.algorithm is None:
        raise ConfigError(f"{config or resume}: `run` needs one [algorithm]; for several [[algorithms]] use `compare`")
    folder, fresh = RunFolder(path), resume is None
    with FolderLock(path):
        if fresh:
            folder.check_new(overwrite)
        prepared = runner.prepare(experiment, folder, fresh=fresh)
        problem = prepared.problem
        out.print(f"[bold]{escape(experiment.name)}[/]: {escape(experiment.labels[0])} on {escape(str(problem.silos))}")
        with _progress(experiment.run.rounds) as begin:
            try:
                result = runner.carry_out(prepared, folder, begin(experiment.labels[0]), fresh=fresh)
            except Interrupted as stop:
                raise FailedError(f"{stop.run.message}; go on with: fedcomposite run --resume {folder.path}") from None
    last = result.history[-1]
    found |= {"status": result.status, "message": result.message, "folder": folder.path, "last": last}
    out.print(
        f"{result.message}: objective {last['objective']:.8g}, stationarity {last['stationarity']:.2e}, "
        f"{last['nonzeros']} of {problem.dimension} nonzero, {_megabytes(last):.3g} MB sent, {last['seconds']:.2f} s"
        + (f", test accuracy {last['test_accuracy']:.4f}" if "test_accuracy" in last else "")
        + (f", epsilon {last['epsilon']:.3g}" if "epsilon" in last else ""),
        soft_wrap=True,
    )
    if problem.model is None:
        table = coefficients(problem, result.solution)
        found["coefficients"] = rows(table)
        caption = f"largest of {len(table)} nonzero coefficients" if len(table) > 15 else "nonzero coefficients"
        print_frame(table.head(15), caption)
    written(folder.path)
    if result.status == "diverged":
        raise FailedError(result.message)


def compare(
    config: Source = None,
    overrides: Overrides = None,
    destination: Out = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
    jobs: Jobs = 1,
    as_json: AsJson = False,
) -> None:
    """Run several methods over several seeds, and all values of grids; a table, a plot, and a run folder for each."""
    with results(as_json) as found:
        _compare(config, overrides, destination, overwrite, resume, jobs, found)


def _compare(
    config: str | None,
    overrides: list[str] | None,
    destination: Path | None,
    overwrite: bool,
    resume: Path | None,
    jobs: int,
    found: dict[str, Any],
) -> None:
    experiment, path = _open(config, overrides, destination, overwrite, resume, Sweep.read)
    parts = experiment.check()
    if not parts[0].specs:
        raise ConfigError(f"{config or resume}: no [[algorithms]] to compare")
    seeds = parts[0].seeds or [parts[0].seed]
    with FolderLock(path), _progress(parts[0].run.rounds) as begin:
        comparison.check_folder(path, anew=resume is None, overwrite=overwrite)
        out.print(
            f"[bold]{escape(parts[0].name)}[/]: {len(parts[0].specs)} methods, {len(seeds)} seed(s)"
            + (f", {len(parts)} settings" if len(parts) > 1 else "")
        )
        try:
            made = comparison.compared(
                experiment,
                path,
                fresh=resume is None,
                jobs=jobs,
                begin=lambda label, seed: begin(f"{label}, seed {seed}" if len(seeds) > 1 else label),
            )
        except Interrupted as stop:
            raise FailedError(f"{stop.run.message}; go on with: fedcomposite compare --resume {path}") from None
        except FailedRunsError as error:
            raise FailedError(f"{error}\ngo on with: fedcomposite compare --resume {path}") from None
    table = made.to_frame()
    spread = f"; {SPREAD}" if len(seeds) > 1 else ""
    told = f"stationarity is relative to the start; nonzeros, MB and seconds at the end{spread}"
    found |= {"folder": path, "methods": rows(table), "notes": made.notes}
    first = next(i for i, name in enumerate(table.columns) if name.startswith(("rounds to", "stationarity")))
    print_frame(joined(table), told, drop=("seconds", "MB", *table.columns[1:first]))  # labels tell the values of grids
    for note in made.notes:
        out.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    out.print(f"written: {escape(str(path))} (plot.png, comparison.csv, comparison.tex)")
    if parts[0].closing and not overrides:  # it is about the experiment as it was written
        out.print(parts[0].closing.strip(), markup=False, highlight=False, soft_wrap=True)
    if (table["status"] == "diverged").all():
        raise FailedError("every method diverged; try smaller steps")


def export_run(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    format: Annotated[Format, typer.Option("--format", help="csv: linear models; csr: sparse.")] = "state_dict",
    destination: Annotated[Path | None, typer.Option("--out", help="The file (default: RUN/exported.SUFFIX).")] = None,
    pruned: Annotated[
        bool, typer.Option("--pruned", help="Remove a network's dead filters and neurons first.")
    ] = False,
    multiple: Annotated[
        int, typer.Option("--multiple", min=1, help="With --pruned: sizes of layers stay multiples of this; a GPU: 8.")
    ] = 1,
    int8: Annotated[bool, typer.Option("--int8", help="With --format onnx: a network's graph in eight bits.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The model that BestModel kept, in place of the last.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's model, zeros and all, to one file, and check that the file gives the same predictions."""
    folder, kept = RunFolder(source), source / ("best.safetensors" if best else "model.safetensors")
    _check_kept(source, kept, best)
    target = destination or source / f"exported{_SUFFIXES[format]}"
    if target.resolve() in {(source / name).resolve() for name in ("model.safetensors", "best.safetensors")}:
        raise ConfigError(f"--out {target}: is the run's own file; give another name")
    if target.is_dir():
        raise ConfigError(f"--out {target}: is a folder; give a file")
    if multiple > 1 and not pruned:
        raise ConfigError(f"--multiple {multiple} is for the layers of a pruned network; add --pruned")
    config = Config.read(folder.config)
    if format == "csv" and config.model is not None:
        raise ConfigError("format = 'csv' is a table of coefficients, for linear models; take 'safetensors' or 'csr'")
    if pruned and config.model is None:
        raise ConfigError("--pruned is for networks; a linear model has no units between its inputs and outputs")
    problem = config.make_problem(folder.stand_in())
    if int8 and problem.model is not None and needs_samples(problem.model):
        problem = _with_samples(config)
    x, buffers = _vectors(kept, problem)
    inside = target.resolve().parent == source.resolve()
    with FolderLock(source) if inside else nullcontext():
        made = export(problem, x, target, format=format, buffers=buffers, pruned=pruned, multiple=multiple, int8=int8)
    with results(as_json) as found:
        found |= made.figures()
        _tell_exported(made, problem, x)


def _with_samples(config: Config) -> Problem:
    """The problem with its data, of which samples tell the ranges of what flows between convolutions."""
    try:
        return config.make_problem()
    except (UserError, OSError) as error:
        raise ConfigError(
            f"--int8: a network with convolutions needs samples of its data, which are not here ({first_line(error)}); "
            "quantise the file of --format onnx where they are"
        ) from error


def _check_kept(source: Path, kept: Path, best: bool) -> None:
    """Refuse a folder without the model that is asked for."""
    for needed in (RunFolder(source).config, source / "model.safetensors", kept):
        if best and needed == kept and not kept.is_file():
            raise StoreError(
                f"{source}: no best.safetensors; it is there with the callback BestModel in the experiment"
            )
        if not needed.is_file():
            raise StoreError(
                f"{source}: no {needed.name}, so this is not the folder of a run that ended "
                "(a comparison has one in METHOD/seed-N)"
            )


def _vectors(kept: Path, problem: Problem) -> tuple[Tensor, Tensor | None]:
    """The parameters and buffers in a model's file."""
    try:
        tensors = files.read(kept)[0]
        x = tensors["x"]
    except (OSError, KeyError) as error:
        raise StoreError(f"{kept}: not a readable model ({error})") from None
    if x.shape != (problem.dimension,):
        raise StoreError(f"{kept}: x has shape {tuple(x.shape)}, expected ({problem.dimension},)")
    return x, tensors.get("buffers")


def _tell_exported(made: Exported, problem: Problem, x: Tensor) -> None:
    """Print what was written."""
    if made.pruned is not None:
        print_frame(made.pruned.table().iloc[:, :-1], "layers before and after; flops are per sample")
        for dead in made.pruned.kept:
            out.print(escape(f"kept: {dead.count} dead of {dead.layer}: {dead.reason}"), highlight=False)
        out.print(f"pruned: {made.pruned}", highlight=False)
    elif problem.model is not None:
        print_frame(problem.layers(x), "exact zeros per tensor")
    zeros = made.parameters - made.nonzeros
    dense, file = (filesize.decimal(size) for size in (made.dense_bytes, made.file_bytes))
    out.print(
        f"zeros: {zeros} of {made.parameters} parameters ({100 * zeros / made.parameters:.1f} %)\n"
        f"size: {dense} of dense tensors, {file} in the file\n"
        f"predictions of the file and of the run agree (largest difference {made.difference:.2g})\n"
        f"written: {escape(str(made.path))}",
        highlight=False,
    )


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or comparisons.")],
    destination: Annotated[Path, typer.Option("--out", help="The picture: .png, .pdf, .svg.")] = Path("plot.png"),
    title: Annotated[str, typer.Option(help="A title.")] = "",
    x: Annotated[Axis, typer.Option("--x", help="What the curves are drawn against.")] = "rounds",
    reference: Annotated[
        float | None, typer.Option(help="The optimal value to measure the objective against, if it is known.")
    ] = None,
    panels: Annotated[
        list[str] | None, typer.Option("--panel", help="What to draw: a key of the records, or suboptimality; repeat.")
    ] = None,
    width: Annotated[Width, typer.Option(help="For a column or the page of a paper, or for a screen.")] = "screen",
    band: Annotated[Band, typer.Option(help="What is shaded: a standard deviation over seeds, or their range.")] = "sd",
    log_x: Annotated[bool, typer.Option("--log-x", help="A logarithmic axis for x.")] = False,
) -> None:
    """Draw the curves of one or more runs in one picture."""
    check_picture(destination)
    histories, methods = runner.collect(runs)
    chosen: dict[str, Any] = {"x": x, "reference": reference, "methods": methods, "width": width, "band": band}
    chosen["log_x"] = log_x
    try:
        draw_histories(histories, destination, title, panels=panels, **chosen)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    written(destination)


def check_picture(path: Path) -> None:
    """Refuse a name that no picture can have, before any work."""
    try:
        check_kind(path)
    except ValueError as error:
        raise ConfigError(f"--out {error}") from None


# -- helpers --------------------------------------------------------------------------------------------------------


def _open(
    config: str | None,
    overrides: list[str] | None,
    destination: Path | None,
    overwrite: bool,
    resume: Path | None,
    read: Callable[[str | Path, Sequence[str]], T],
) -> tuple[T, Path]:
    """Read the experiment and decide the folder."""
    if (config is None) == (resume is None):
        raise ConfigError("give a CONFIG, or --resume RUN to go on with an earlier run")
    if resume is not None:
        if not (resume / "config.toml").is_file():
            raise ConfigError(f"--resume {resume}: no config.toml there, so this is not a run folder")
        if destination is not None:
            raise ConfigError("--out cannot be given with --resume")
        if overwrite:
            raise ConfigError("--overwrite cannot be given with --resume")
    experiment = read(str(config) if resume is None else resume / "config.toml", overrides or ())
    parts = experiment.check() if isinstance(experiment, Sweep) else [experiment]
    for part in parts:
        part.settings()  # refuses a missing device before any work
    if resume is not None:
        return experiment, resume
    return experiment, destination or Path("runs") / f"{parts[0].name}-{datetime.now():%Y%m%d-%H%M%S}"


def _megabytes(record: Record) -> float:
    return float(record["bytes_up"] + record["bytes_down"]) / 1e6


@contextmanager
def _progress(rounds: int) -> Iterator[Callable[[str], Callable[[Record], None]]]:
    """A live bar per run on a terminal; a line per tenth of a run elsewhere."""
    with make_bar(err, disable=not err.is_terminal) as bar:

        def begin(label: str) -> Callable[[Record], None]:
            name = short(label, err)
            task, room = bar.add_task(name, total=rounds, seen=""), room_beside(name, rounds, err)

            def watch(record: Record) -> None:
                bar.update(task, completed=record["round"], seen=summary(record, room))
                if not err.is_terminal and record["round"] % max(1, rounds // 10) == 0:
                    line = f"{label}: round {record['round']}/{rounds}  {summary(record)}"
                    err.print(line, highlight=False, markup=False, soft_wrap=True)

            return watch

        yield begin
