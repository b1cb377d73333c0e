"""``fit | path | cv``: a linear model of files at hand or of a federation's sites, how sure and how good it is.

One implementation for both: what differs is who answers (:class:`AnalysisSource`). The answers are written to the run
folder while the analysis lasts, so that it can go on after it was stopped or killed.
"""

from __future__ import annotations

import json
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import click
import numpy as np
import pandas as pd
import typer
from click.core import ParameterSource
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fedcomposite import data
from fedcomposite._faults import UserError
from fedcomposite.analysis.study import Analysis, Kind, analyse
from fedcomposite.analysis.table_one import TableOne, table_one
from fedcomposite.choice import AUTO
from fedcomposite.cli.console import AsJson, FailedError, err, out, print_frame, print_notes, results, rows, written
from fedcomposite.cli.lazy import load
from fedcomposite.cli.runs import Overrides
from fedcomposite.cli.solving import NOT_CONVERGED
from fedcomposite.data import Recipe
from fedcomposite.data.queries import Rules
from fedcomposite.experiments import Config, ConfigError, FolderLock, RunFolder
from fedcomposite.experiments.config import TableOneSection
from fedcomposite.experiments.grids import FILLER
from fedcomposite.experiments.store import coefficients
from fedcomposite.privacy import Counters
from fedcomposite.problems import Problem
from fedcomposite.regularizers import Zero
from fedcomposite.runtime.answers import AT_HAND, AnswerLog, identity_of
from fedcomposite.runtime.driver import Driver, StudyDriver, identify_analysis
from fedcomposite.runtime.identity import Identity
from fedcomposite.runtime.protocol import in_words
from fedcomposite.runtime.transports import StoppedError
from fedcomposite.runtime.transports.noised_silos import NoisedSilos
from fedcomposite.runtime.transports.silo_answers import SiloTransport

_SHOWN = 15  # coefficients
_SEEN = 5e-4  # bounds of measures that are smaller are not printed
_MEASURES = (
    *("samples", "positives", "auroc", "auroc_error", "brier", "mean", "r2", "rmse", "mae", "deviance_explained"),
    *("calibration_slope", "calibration_slope_error", "events", "c_index", "horizon", "predicted", "observed"),
)

ConfigFile = Annotated[
    str | None, typer.Argument(metavar="CONFIG", help="A TOML file; its [algorithm] is not looked at.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write (default: runs/NAME-KIND-TIME).")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the folder holds.")]
Resume = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this folder, from the answers it has.")
]
Count = Annotated[int, typer.Option(min=2, help="Strengths of the path.")]
Ratio = Annotated[float | None, typer.Option(help="The last strength over the first (default: 1e-4, or 1e-2).")]
Gamma = Annotated[
    str | None,
    typer.Option(help="Relaxed lasso: the share of the regularized coefficients (1: all); of several the best by cv."),
]
Folds = Annotated[str, typer.Option(help="How many folds, or 'sites': every site is left out once.")]
Score = Annotated[Literal["deviance", "auc", "error"], typer.Option(help="What is compared.")]
OldScore = Annotated[Literal["deviance", "auc", "error"] | None, typer.Option(hidden=True)]
Seconds = Annotated[float | None, typer.Option(min=0.001, help="Most seconds; what is done by then is the result.")]
Segments = Annotated[
    int | None,
    typer.Option(min=1, help="Parts of the path that are followed side by side (default: one per dozen strengths)."),
]
Horizon = Annotated[float | None, typer.Option(help="Of times to an event: by when it is looked at who has had it.")]
Times = Annotated[
    str | None, typer.Option(help="Of times to an event: the grid of curves, such as 6,12,24, or 60:6 for steps of 6.")
]
BySite = Annotated[bool, typer.Option("--by-site", help="Also fit every site on its own, and combine the models.")]
PathChoice = Annotated[Literal["aic", "bic", "ebic"], typer.Option(help="Which model of the path.")]
CVChoice = Annotated[Literal["min", "1se", "aic", "bic", "ebic"], typer.Option(help="Which model.")]
Federation = Annotated[
    Path | None,
    typer.Option("--federation", metavar="FOLDER", help="Ask the sites of this federation; the data are theirs."),
]
Policy = Annotated[
    Literal["wait", "skip"], typer.Option(help="Sites that are missing when it begins: wait, or leave them out.")
]
Patience = Annotated[float, typer.Option(help="Seconds that 'skip' waits for a site.")]
GiveUp = Annotated[float, typer.Option(help="Seconds that are waited for a site.")]
Sites = Annotated[
    str | None, typer.Option(help="Who takes part, separated by commas (default: all sites of the federation).")
]
Secure = Annotated[bool, typer.Option("--secure", help="Only sums over the sites are known here (secure aggregation).")]


def fit(
    config: ConfigFile = None,
    seconds: Seconds = None,
    horizon: Horizon = None,
    times: Times = None,
    by_site: BySite = False,
    overrides: Overrides = None,
    destination: Out = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
    federation: Federation = None,
    sites: Sites = None,
    policy: Policy = "wait",
    patience: Patience = 30.0,
    give_up: GiveUp = 86400.0,
    secure: Secure = False,
    as_json: AsJson = False,
) -> None:
    """Fit a linear model, with confidence intervals and its quality at every site."""
    conduct("fit", {**locals(), "times": times_of(times)})


def path(
    config: ConfigFile = None,
    count: Count = 100,
    ratio: Ratio = None,
    gamma: Gamma = None,
    choice: PathChoice = "bic",
    segments: Segments = None,
    seconds: Seconds = None,
    horizon: Horizon = None,
    times: Times = None,
    by_site: BySite = False,
    overrides: Overrides = None,
    destination: Out = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
    federation: Federation = None,
    sites: Sites = None,
    policy: Policy = "wait",
    patience: Patience = 30.0,
    give_up: GiveUp = 86400.0,
    secure: Secure = False,
    as_json: AsJson = False,
) -> None:
    """Fit a model for every strength of the regularizer."""
    conduct("path", {**locals(), "times": times_of(times), "gamma": gamma_of(gamma, several=False)})


def cv(
    config: ConfigFile = None,
    folds: Folds = "10",
    scoring: Score = "deviance",
    count: Count = 100,
    ratio: Ratio = None,
    gamma: Gamma = None,
    choice: CVChoice = "1se",
    segments: Segments = None,
    seconds: Seconds = None,
    horizon: Horizon = None,
    times: Times = None,
    by_site: BySite = False,
    overrides: Overrides = None,
    destination: Out = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
    federation: Federation = None,
    sites: Sites = None,
    policy: Policy = "wait",
    patience: Patience = 30.0,
    give_up: GiveUp = 86400.0,
    secure: Secure = False,
    as_json: AsJson = False,
    score: OldScore = None,
) -> None:
    """Choose the strength of the regularizer by cross-validation, and measure the model on the folds held out."""
    if score is not None:
        warnings.warn("--score is now --scoring; the old name goes with the next version", FutureWarning, stacklevel=2)
        scoring = score
    conduct(
        "cv",
        {**locals(), "folds": folds_of(folds), "scoring": scoring, "times": times_of(times), "gamma": gamma_of(gamma)},
    )


_OPTIONS = (
    "folds",
    "scoring",
    "count",
    "ratio",
    "gamma",
    "choice",
    "segments",
    "seconds",
    "horizon",
    "times",
    "by_site",
)
_OF_SITES = ("sites", "policy", "patience", "give_up", "secure")


def folds_of(text: str) -> int | Literal["sites"]:
    """A number of folds, or "sites"."""
    if text == "sites":
        return "sites"
    if not text.isdecimal() or int(text) < 2:
        raise ConfigError(f"--folds {text}: must be a number from 2 on, or 'sites'")
    return int(text)


def gamma_of(text: str | None, several: bool = True) -> float | list[float]:
    """A share of the regularized coefficients, or several."""
    try:
        found = [float(part) for part in (text or "1").split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= g <= 1 for g in found) or (len(found) > 1 and not several):
        raise ConfigError(f"--gamma {text}: must be a number from 0 to 1" + ", or several, such as 0,0.5,1" * several)
    return found if len(found) > 1 else found[0]


def times_of(text: str | None) -> list[float] | None:
    """A grid of times: numbers, or the last one and the steps to it."""
    if text is None:
        return None
    try:
        last, colon, step = text.partition(":")
        found = (np.arange(1, 1 + round(float(last) / float(step))) * float(step)).tolist() if colon else [
            float(part) for part in text.split(",")]  # fmt: skip
    except (ValueError, ZeroDivisionError, OverflowError):
        found = []
    if not found or sorted(set(found)) != found or not 0 < found[0] <= found[-1] < float("inf"):
        raise ConfigError(f"--times {text}: must be rising numbers, such as 6,12,24, or 60:6 for steps of 6 up to 60")
    return found


def checked(experiment: Config) -> Config:
    """Refuse what an analysis is not made for."""
    if (experiment.privacy is not None and experiment.budget is None) or experiment.run.aggregator is not None:
        raise ConfigError("an analysis takes sums: [privacy] level = 'study' is for it; for an aggregator use `run`")
    if experiment.model is not None:
        raise ConfigError("an analysis is of linear models; for a [model] use `run` or `solve`")
    return experiment


# -- who answers ------------------------------------------------------------------------------------------------------


class AnalysisSource(Protocol):
    """Who answers an analysis, and the experiment as it is read for them."""

    experiment: Config
    text: str
    """The experiment, as the run folder has it."""
    runs: Path
    """Where run folders go that are not named."""
    command: str
    """What a resumption is called by, before the kind of the analysis and after it."""
    most: int | None
    """Bytes of answers that are written down at most."""
    absent: list[str]
    """Sites that were left out, since they were not there."""
    failures: tuple[type[Exception], ...]
    """Of theirs, after which an analysis can go on."""

    def opened(self) -> AbstractContextManager[tuple[Any, Identity]]:
        """The transport to them, and what tells them from others; nothing on disk changes."""

    def followed(
        self, kind: Kind, folder: RunFolder, log: AnswerLog
    ) -> AbstractContextManager[Callable[[Driver], None]]:
        """While the analysis lasts: what is called after each exchange, for others to see it."""

    def meet(self, driver: Driver) -> tuple[Problem, list[dict[str, Any]], TableOne | None]:
        """The problem, a description of the data (a row per feature and site, or per site), and Table 1 if wanted."""


class AtHand:
    """Data at hand."""

    runs, command = Path("runs"), "{}"
    most: int | None = AT_HAND
    failures: tuple[type[Exception], ...] = ()

    def __init__(self, given: Mapping[str, Any], kept: Identity) -> None:
        if kept:
            content = {"run": FILLER["run"], **tomllib.loads(kept["experiment"])}
            self.experiment = Config.check(content, str(given["resume"]))
        else:
            self.experiment = Config.read(given["config"], given["overrides"] or ())
        checked(self.experiment)
        self.text = self.experiment.only({"name": AUTO}, self.experiment.seed).text
        self.absent: list[str] = []

    @contextmanager
    def opened(self) -> Iterator[tuple[Any, Identity]]:
        """Read the data and open them to a driver, with noise where the experiment has a budget."""
        self._problem = self.experiment.make_problem(analysed=True)
        with mistaken():
            budget, seed = self.experiment.budget, Counters(self.experiment.seed)
            transport = SiloTransport(self._problem) if budget is None else NoisedSilos(self._problem, budget, seed)
        yield transport, identify_analysis(self._problem)

    @contextmanager
    def followed(self, kind: Kind, folder: RunFolder, log: AnswerLog) -> Iterator[Callable[[Driver], None]]:
        """A run at hand has no monitor: what is called after an exchange does nothing."""
        yield lambda driver: None

    def meet(self, driver: Driver) -> tuple[Problem, list[dict[str, Any]], TableOne | None]:
        """The problem, the description of its sites, and Table 1 where the experiment asks for it."""
        described = _description(self.experiment, self._problem.silos)
        wished = self.experiment.table_one
        return self._problem, described, None if wished is None else first_table(self.experiment, wished)


def _source(given: Mapping[str, Any], kept: Identity) -> AnalysisSource:
    """The sites of a federation if one is given, or the data that the experiment names."""
    if given["federation"] is not None:
        if given["overwrite"]:
            raise ConfigError("--overwrite cannot be given with --federation; give another --out")
        made: AnalysisSource = load("fedcomposite.cli.federation_analysis:AtSites")(given, kept)
        return made
    for name in sorted(_explicit() & {*_OF_SITES}):
        raise ConfigError(f"--{name.replace('_', '-')} is for the sites of a --federation")
    if "job" in kept:
        raise ConfigError(f"--resume {given['resume']}: this analysis asks the sites of a federation; add --federation")
    return AtHand(given, kept)


def _explicit() -> set[str]:
    """The options that were given on the command line."""
    context = click.get_current_context(silent=True)
    names = [] if context is None else context.params
    return {n for n in names if context and context.get_parameter_source(n) is ParameterSource.COMMANDLINE}


# -- doing it ---------------------------------------------------------------------------------------------------------


def conduct(kind: Kind, given: Mapping[str, Any]) -> None:
    """Do an analysis, leave its run folder, and say what was found."""
    options = {name: given[name] for name in _OPTIONS if name in given}
    with results(given["as_json"]) as found:
        kept = _kept(kind, given, options)
        if kept is None:
            _tell_finished(RunFolder(given["resume"]), found)
            return
        source = _source(given, kept)
        options = json.loads(kept["options"]) if kept else options
        name = f"{source.experiment.name}-{kind}-{datetime.now():%Y%m%d-%H%M%S}"
        folder = RunFolder(given["resume"] or given["destination"] or source.runs / name)
        hint = f"go on with: fedcomposite {source.command.format(kind)} --resume {folder.path}"
        with FolderLock(folder.path):
            if not kept:
                folder.check_new(given["overwrite"], instead=_instead(folder, given))
            with source.opened() as (transport, identity):
                identity = {"experiment": source.text, "kind": kind, "options": json.dumps(options), **identity}
                log = AnswerLog(folder.answers, identity, resume=bool(kept), most=source.most)
                made = _analysed(kind, options, source, Driver(transport, log=log), folder, hint)
        finish(made, folder, found)


def _kept(kind: Kind, given: Mapping[str, Any], options: Mapping[str, Any]) -> Identity | None:
    """What the log of an analysis says that is to go on: empty for a new one, None if it is at its end already."""
    resume: Path | None = given["resume"]
    if (given["config"] is None) == (resume is None):
        raise ConfigError("give a CONFIG, or --resume RUN to go on with an earlier analysis")
    if resume is None:
        return {}
    for name, option in {"destination": "--out", "overwrite": "--overwrite", "overrides": "--set"}.items():
        if given[name]:
            raise ConfigError(f"{option} cannot be given with --resume")
    folder = RunFolder(resume)
    if not folder.answers.exists():
        if folder.finished:
            return None
        raise ConfigError(f"--resume {resume}: no {folder.answers.name} there, so there is no analysis to go on with")
    kept = identity_of(folder.answers)
    if kept.get("kind") != kind:
        raise ConfigError(f"--resume {resume}: an analysis of `{kept.get('kind')}`, not of `{kind}`")
    before = json.loads(kept["options"])
    for name in sorted(_explicit() & {*options}):
        if options[name] != before.get(name):
            began = f"this analysis was begun with {before.get(name)}; leave it out"
            raise ConfigError(f"--{name} {options[name]}: {began}")
    return kept


def _instead(folder: RunFolder, given: Mapping[str, Any]) -> str:
    """What there is to do about a folder that holds something."""
    ways = ["--resume"] if folder.answers.exists() else []
    return " or ".join([*ways, *(["--overwrite"] if given["federation"] is None else []), "another --out"])


def _analysed(
    kind: Kind, options: Mapping[str, Any], source: AnalysisSource, driver: Driver, folder: RunFolder, hint: str
) -> Analysis:
    """Ask, and write the run folder; from then on the log of answers is not needed any more."""
    log = driver.log
    assert log is not None
    try:
        with closing(log), source.followed(kind, folder, log) as tell, _progress(kind, tell) as driver.watch:
            if log.known:
                out.print(f"going on after {log.known} exchanges")
            asking, budget = driver, source.experiment.budget
            if budget is not None:
                asking = StudyDriver(driver, budget, source.experiment.make_loss(), source.experiment.problem.bias)
            problem, description, first = source.meet(asking)
            with mistaken():
                options = {**options, "baseline": source.experiment.problem.baseline or "site"}
                made = analyse(problem, kind, seed=source.experiment.seed, driver=asking, **options)
            made.write(folder, source.text, description, driver.seconds, source.absent, first)
            log.remove()
    except (KeyboardInterrupt, StoppedError):
        raise FailedError(f"interrupted after {driver.exchanges} exchanges; {hint}") from None
    except source.failures as error:
        raise FailedError(f"{error}; {hint}") from error
    return made


@contextmanager
def mistaken() -> Iterator[None]:
    """What cannot be analysed is the experiment's mistake."""
    try:
        yield
    except ValueError as error:
        raise error if isinstance(error, UserError) else ConfigError(str(error)) from None


@contextmanager
def _progress(kind: Kind, tell: Callable[[Driver], None]) -> Iterator[Callable[[Driver], None]]:
    """A live line on a terminal: exchanges so far, fits that are running, what was asked last."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("{task.fields[seen]}")
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        line = bar.add_task(kind, total=None, seen="")

        def show(driver: Driver) -> None:
            tell(driver)
            if err.is_terminal:
                said = f"{driver.exchanges} exchanges  {driver.tasks} fits  {in_words(driver.asked)}"
                bar.update(line, seen=said[: max(20, err.width - 30)])

        yield show


def _tell_finished(folder: RunFolder, found: dict[str, Any]) -> None:
    """There is nothing to go on with: say what the analysis said."""
    summary = folder.summary()
    converged = summary["status"] == "converged"
    found |= {"message": summary["message"], "converged": converged, "folder": folder.path}
    out.print(f"finished already: {summary['message']}", markup=False, highlight=False, soft_wrap=True)
    if not converged:
        raise typer.Exit(NOT_CONVERGED)


def _description(experiment: Config, silos: data.Silos) -> list[dict[str, Any]]:
    """A row per feature and site of the tables that a recipe prepared, or a row per site."""
    if experiment.budget is not None and not experiment.budget.columns:
        return []  # nothing may be told
    if experiment.recipe is None:
        return records(silos.summary()) if experiment.budget is None else []
    given, recipe, style = tables_of(experiment)
    target = experiment.data["target"]
    return records(data.describe(given, target=target, recipe=recipe, privacy=experiment.budget, **style))


def tables_of(experiment: Config) -> tuple[Any, Recipe, dict[str, Any]]:
    """The tables that an experiment names, its recipe, and how its files are written."""
    source, recipe = experiment.data, Recipe(**(experiment.recipe or {}))
    style = ("separator", "decimal", "encoding", "thousands", "missing") if "files" in source else ()
    return experiment.tables(), recipe, {k: v for k, v in source.items() if k in style}


def first_table(experiment: Config, wished: TableOneSection, given: Any = None, rules: Rules | None = None) -> TableOne:
    """Table 1 of an experiment's tables, or of others by its recipe."""
    tables, recipe, style = tables_of(experiment) if given is None else (given, Recipe(**(experiment.recipe or {})), {})
    budget, target = experiment.budget, experiment.data.get("target")
    return table_one(tables, recipe=recipe, target=target, rules=rules, privacy=budget, **wished.model_dump(), **style)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table."""
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def with_bounds(measured: pd.DataFrame) -> pd.DataFrame:
    """A table of measures as it is printed: without bounds that are too small to be seen in any row."""
    small = [c for c in measured if str(c).endswith("_error") and not (measured[c] > _SEEN).any()]
    return measured.drop(columns=small)


def _print_largest(table: pd.DataFrame) -> None:
    caption = f"largest of {len(table)} nonzero coefficients" if len(table) > _SHOWN else "nonzero coefficients"
    print_frame(table.head(_SHOWN), caption, digits=6)


def _estimates(intervals: pd.DataFrame) -> pd.DataFrame:
    """The table of a model without a regularizer as it is printed: per unit of the columns where a recipe made them."""
    unit = "unit_" if "unit_estimate" in intervals else ""
    shown = [unit + name for name in ("estimate", "se", "z", "p", "lower", "upper")]
    ratios = [c for c in intervals if str(c).startswith((f"{unit}odds", f"{unit}rate", f"{unit}hazard"))]
    table = intervals[[*shown, *ratios]].reset_index(names="name")
    return table.rename(columns=lambda c: str(c).removeprefix("unit_"))


def _ends(effects: pd.DataFrame) -> pd.DataFrame:
    """Some values of each curve: its ends and the middle between them."""
    each = [one.iloc[[0, len(one) // 4, len(one) // 2, 3 * len(one) // 4, -1]].drop_duplicates()
            for _, one in effects.groupby(["column", "given"], sort=False)]  # fmt: skip
    return pd.concat(each, ignore_index=True)


def finish(made: Analysis, folder: RunFolder, found: dict[str, Any]) -> None:
    """Say what was found and where it is, to people and to machines."""
    out.print(made.message, markup=False, highlight=False, soft_wrap=True)
    table = coefficients(made.problem, made.x)
    found |= {"message": made.message, "converged": made.converged, "folder": folder.path, "coefficients": rows(table)}
    if made.intervals is not None:
        found["intervals"] = rows(made.intervals.reset_index(names="name"))
    if made.intervals is not None and isinstance(made.problem.regularizer, Zero):
        print_frame(_estimates(made.intervals), "estimates with 95 % confidence intervals", drop=("z",))
    else:
        _print_largest(table)
    if made.effects is not None:
        found["effects"] = rows(made.effects.table)
        print_frame(_ends(made.effects.table), "what columns do, beside a reference, with 95 % bands", drop=("z", "se"))
    if each := made.content().get("site_coefficients"):
        found["site_coefficients"] = each
        print_frame(pd.DataFrame(each), "coefficients of every site, per unit of the columns", digits=6)
    where = "on held-out folds" if made.cv is not None else "on the samples of the fit"
    for key, report, caption in (("quality", made.quality, where), ("tested", made.tested, "on the test part")):
        if report is not None:
            told = report.table
            names = [name for name in _MEASURES if name in told]
            measured: pd.DataFrame = told[names].reset_index(names="site")
            why = report.why(names)
            found[key] = [{**row, "note": why.get(row["site"], "")} for row in rows(measured)]
            print_frame(with_bounds(measured), caption)
            print_notes(why)
    if (apart := made.by_site) is not None:
        found["by_site"] = rows(apart.combined.reset_index(names="name"))
        shown = ["estimate", "lower", "upper", "p", "tau2", "i2", "predict_lower", "predict_upper"]
        print_frame(apart.combined[shown].reset_index(names="name"), "over sites that each have a model of their own")
        print_notes(apart.notes)
    if made.cv is not None and (off := float(made.cv.mean_error[made.cv.index_min])) > 0:
        said = f"the cross-validated {made.cv.scoring} at the best strength is off by at most {off:.2g}"
        print_notes({"": f"{said}, since the sites tell bins"})
    written(folder.path)
    if not made.converged:
        out.print("[bold red]NOT CONVERGED[/]: see `converged` in analysis.json; take a larger lambda or --ratio")
        raise typer.Exit(NOT_CONVERGED)
