"""``federation describe | fit | path | cv | predict``: analyses of files at hand, across a federation's sites."""

from __future__ import annotations

import contextlib
import inspect
import json
import tomllib
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import tomli_w
import typer
from safetensors import safe_open
from torch import Tensor

from fedcomposite._version import __version__
from fedcomposite.analysis.prediction import baseline_of, predict_at_sites
from fedcomposite.analysis.study import Kind
from fedcomposite.analysis.table_one import TableOne, Wishes, table_from
from fedcomposite.choice import AUTO
from fedcomposite.cli import analysis
from fedcomposite.cli.analysis import GiveUp, Secure, Sites, checked, records, with_bounds
from fedcomposite.cli.console import (
    AsJson,
    out,
    print_frame,
    print_json,
    print_notes,
    reporting,
    results,
    rows,
    written,
)
from fedcomposite.cli.described import AsTableOne, By, Columns, Median, TableFile, page, show_table_one, wished
from fedcomposite.cli.federation_jobs import Interrupt, chosen, failure, keep, require_service
from fedcomposite.cli.federation_parties import say, say_aside
from fedcomposite.cli.runs import Overrides
from fedcomposite.data import FittedRecipe, Recipe
from fedcomposite.data.describing import look_at, table_of
from fedcomposite.data.flags import ColumnFacts
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.experiments.store import RunFolder, StoreError
from fedcomposite.experiments.toml import load
from fedcomposite.federation.coordinator.delivery import Delivery, FederationError, Settings
from fedcomposite.federation.coordinator.inquiry import Inquiry, learn, target_of
from fedcomposite.federation.coordinator.jobs import Diary, Job, followed
from fedcomposite.federation.coordinator.plans import plan_of
from fedcomposite.federation.engines.engine import EngineError
from fedcomposite.federation.engines.selection import open_engine
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.shape import parse, write
from fedcomposite.files import write_atomic
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import Cox, Multinomial, get_loss
from fedcomposite.runtime import Driver, StudyDriver
from fedcomposite.runtime.answers import AnswerLog
from fedcomposite.runtime.identity import Identity
from fedcomposite.runtime.protocol import in_words

Federation = Annotated[Path, typer.Argument(metavar="FEDERATION", help="The coordinator's folder.")]
ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file; the data are the sites'.")]


def add_analysis_commands(app: typer.Typer) -> None:
    """Register describe, fit, path, cv and predict of a federation."""
    app.command()(describe)
    for command in (analysis.fit, analysis.path, analysis.cv):
        app.command(command.__name__)(_with_federation(command))
    app.command()(predict)


def _with_federation(command: Callable[..., None]) -> Callable[..., None]:
    """The same command with the federation before the experiment, in place of ``--federation``."""

    def alias(federation: Path, **given: Any) -> None:
        with _one_line():
            command(federation=federation, overwrite=False, **given)

    hints = typing.get_type_hints(command, include_extras=True) | {"federation": Federation}
    first = inspect.Parameter("federation", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    others = [p for n, p in inspect.signature(command).parameters.items() if n not in ("federation", "overwrite")]
    taken = [p.replace(annotation=hints[p.name]) for p in (first, *others)]
    alias.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    alias.__annotations__ = {p.name: p.annotation for p in taken}
    alias.__doc__ = f"Analyst, across the sites: {str(command.__doc__)[0].lower()}{str(command.__doc__)[1:]}"
    return alias


def _one_line() -> contextlib.AbstractContextManager[None]:
    return reporting(failures=(FederationError, EngineError))


# -- asking -----------------------------------------------------------------------------------------------------------


def read(source: str, overrides: Sequence[str] = (), *, fitted: bool = False) -> tuple[Config, str]:
    """An experiment whose data are at sites, and its target's name."""
    content, where = load(source, overrides)
    return _accepted(content, where, fitted)


def _accepted(content: dict[str, Any], where: str, fitted: bool) -> tuple[Config, str]:
    content = {**content, "algorithm": {"name": "ProxNewton"}}
    for key in ("algorithms", "trials", "partition", "callbacks"):
        content.pop(key, None)
    target = content.get("data", {}).get("target")
    if "recipe" in content:
        target = target_of(content.get("data"), f"{where}: [data]")
    if fitted and "test" in content.get("data", {}):
        raise ConfigError(
            f"{where}: [data] test: a federation holds no patients out; leave it out here, and measure the model on "
            "each site's new patients (`new` in its site.toml) with `federation predict`"
        )
    return checked(parse(tomli_w.dumps(content), where, recipe=True)), str(target or "target")


@contextlib.contextmanager
def inquiry(
    federation: FederationFolder,
    config: Config,
    settings: Settings,
    *,
    plan: str,
    job: str = "",
    sites: Sequence[str] = (),
    log: Callable[[str], None] = say,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Inquiry]:
    """The sites of a federation, asked in one job: a new one and all sites, or some; or a job that goes on.

    With the policy "skip", a new one is without the sites that are not there.
    """
    require_service(federation)
    name = job or uuid.uuid4().hex[:16]
    with contextlib.closing(open_engine(federation, name, log)) as engine:
        taking_part = list(sites) or federation.sites
        if settings.policy == "skip" and not job:
            permitted = [site for site in federation.permitted() if site in taking_part]
            taking_part = Delivery(engine, federation.permitted, settings, log, stop).present(permitted)
            if not taking_part:
                raise FederationError("no site is there")
        asking = engine, taking_part, federation.permitted, config, name, settings
        yield Inquiry(*asking, plan=plan_of(plan, config), log=log, stop=stop)


class AtSites:
    """The sites of a federation: see :class:`fedcomposite.cli.analysis.AnalysisSource`."""

    most = None  # what a site was asked once it is not asked again
    failures = FederationError, EngineError

    def __init__(self, given: Mapping[str, Any], kept: Identity) -> None:
        self._federation, self._kept = FederationFolder(given["federation"]), kept
        self._chosen = chosen(self._federation, given.get("sites"))
        if kept and self._chosen:
            raise ConfigError("--sites cannot be given with --resume")
        self.runs, self.command = self._federation.runs, f"federation {{}} {given['federation']}"
        if kept:
            if "job" not in kept:
                raise ConfigError(f"--resume {given['resume']}: this analysis is of data at hand, not of a federation")
            content = tomllib.loads(kept["experiment"])
            content["data"] = {**content.get("data", {}), "target": kept["target"]}
            self.experiment, self._target = _accepted(content, str(given["resume"]), fitted=True)
        else:
            self.experiment, self._target = read(given["config"], given["overrides"] or (), fitted=True)
        self.text = write(self.experiment.only({"name": AUTO}, self.experiment.seed))
        try:
            waiting = {"patience": given["patience"], "give_up": given["give_up"]}
            self._settings = Settings(given["policy"], secure=given["secure"] or kept.get("secure") == "yes", **waiting)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.absent: list[str] = json.loads(kept.get("absent", "[]"))
        self._diary: Diary | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[Inquiry, Identity]]:
        """Reach the service; from here on Ctrl-C is heard between looks for answers."""
        job, sites = self._kept.get("job", ""), json.loads(self._kept.get("sites", "[]")) or self._chosen
        given = self._federation, self.experiment, self._settings
        with (
            Interrupt() as self._interrupt,
            inquiry(*given, plan="cv", job=job, sites=sites, log=self._say, stop=self._stop) as self._asking,
        ):
            names = self._asking.names
            if not self._kept:
                self.absent = [site for site in self._chosen or self._federation.sites if site not in names]
            told = {"job": self._asking.job, "target": self._target, "version": __version__}
            told |= {"secure": "yes"} if self._settings.secure else {}
            yield self._asking, {**told, "sites": json.dumps(names), "absent": json.dumps(self.absent)}

    def _say(self, line: str) -> None:
        (say if self._diary is None else self._diary.log)(line)

    def _stop(self) -> bool:
        if self._diary is None:
            return self._interrupt.asked
        self._diary.renew(self._asking.post.missing)
        return self._interrupt.asked or (self._place / "stop").exists()

    @contextlib.contextmanager
    def followed(self, kind: Kind, folder: RunFolder, log: AnswerLog) -> Iterator[Callable[[Driver], None]]:
        """Write the job's files, and keep them up to date."""
        place, asking = folder.path.absolute(), self._asking
        self._place, asking.plan = place, plan_of(kind, self.experiment)
        log.begin()
        for old in ("stop", "status.json"):
            (place / old).unlink(missing_ok=True)
        write_atomic(folder.config, self.text.encode())
        write_atomic(place / "job", f"{asking.job}\n".encode())
        settings, names = asdict(self._settings), asking.names
        keep(self._federation, Job(name=asking.job, out=str(place), kind=kind, settings=settings, sites=names))
        try:
            with followed(place, say, state="running", kind=kind, exchanges=0) as self._diary:
                if self.absent:
                    self._diary.log(f"without {', '.join(self.absent)}: not there when the analysis began")
                yield self._watch
                message = folder.summary()["message"]
                self._diary.log(message)
                self._diary.write(state="finished", message=message, missing={})
        except OSError as error:
            raise FederationError(failure(error, folder)) from error
        finally:
            self._diary = None

    def _watch(self, driver: Driver) -> None:
        assert self._diary is not None
        now = {"exchanges": driver.exchanges, "fits": driver.tasks, "asked": in_words(driver.asked)}
        self._diary.renew(self._asking.post.missing, **now)

    def meet(self, driver: Driver) -> tuple[Problem, list[dict[str, Any]], TableOne | None]:
        """Describe the tables, learn the recipe, and hear what the features are."""
        budget = self.experiment.budget
        blind = budget is not None and not budget.columns
        described = pd.DataFrame() if blind else table_of(_described(driver), self._target)
        first = (
            None if self.experiment.table_one is None or blind else _first_table(driver, self.experiment, self._target)
        )
        others = [site for site in self._federation.sites if site not in driver.names]
        self._asking.recipe = learn(driver, self._asking.config, self._target, others)
        if self._asking.recipe is not None:
            self._say(f"the recipe is learned, in {driver.exchanges} exchanges so far")
        return self._asking.meet(driver), records(described), first


def describe(
    folder: Federation,
    config: ConfigFile,
    overrides: Overrides = None,
    sites: Sites = None,
    table_one: AsTableOne = False,
    by: By = None,
    columns: Columns = None,
    median: Median = None,
    destination: TableFile = None,
    as_json: AsJson = False,
    give_up: GiveUp = 86400.0,
    secure: Secure = False,
) -> None:
    """Analyst: what every site has of every feature, and what differs between them; of all together if secure."""
    with _one_line():
        experiment, target = read(config, overrides or ())
        wish = wished(table_one, experiment.table_one, by, columns, median, destination)
        experiment = experiment.model_copy(update={"table_one": wish})
        settings, federation = Settings(give_up=give_up, secure=secure), FederationFolder(folder)
        plan, named = "describe" if wish is None else "table_one", chosen(federation, sites)
        log = say_aside if as_json else say
        with inquiry(federation, experiment, settings, plan=plan, sites=named, log=log) as asking:
            driver, budget = Driver(asking), experiment.budget
            if budget is not None:
                driver = StudyDriver(driver, budget, experiment.make_loss(), experiment.problem.bias)
            if wish is not None:
                made = _first_table(driver, experiment, target)
            else:
                found = table_of(_described(driver), target)
        if wish is not None:
            show_table_one(made, as_json, destination)
            return
        if as_json:
            print_json(rows(found))
            return
        for line in page(found):
            out.print(line, markup=False, highlight=False, soft_wrap=True)


def predict(
    folder: Federation,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of `federation fit | path | cv`.")],
    threshold: Annotated[float, typer.Option(help="Probability from which on a patient is of class 1.")] = 0.5,
    destination: Annotated[Path | None, typer.Option("--out", help="Table to write (RUN/at-sites.csv).")] = None,
    sites: Sites = None,
    give_up: GiveUp = 86400.0,
    secure: Secure = False,
    as_json: AsJson = False,
) -> None:
    """Analyst: have every site score its new patients, in a file of its own, and hear how good the model is there.

    Under secure sums they score, and nothing is heard: a sum might be of one site's patients.
    """
    with _one_line(), results(as_json) as told:
        experiment, recipe, x, names = _finished(RunFolder(run))
        settings = Settings(give_up=give_up, secure=secure)
        federation = FederationFolder(folder)
        log = say_aside if as_json else say
        named = chosen(federation, sites)
        with inquiry(federation, experiment, settings, plan="predict", sites=named, log=log) as asking:
            asking.recipe = recipe
            driver = Driver(asking)
            problem = asking.meet(driver)
            if names != list(problem.coordinate_names):
                raise ConfigError(f"{run}: the features of its model are not those of these sites' samples")
            at = baseline_of(RunFolder(run)) if isinstance(problem.loss, Cox) else None
            until = {} if at is None else dict(zip(("horizon", "hazard"), at, strict=True))
            found = predict_at_sites(problem, x, driver, threshold=threshold, **until)
        say(f"scored at {', '.join(asking.names)}, each in a file of its own, which stays there")
        if secure:
            say("secure sums do not tell how good this is, since one site alone might have such patients")
            return
        if found.empty:
            say("no site knows the outcome of enough patients to say how good this is")
            return
        shown = ["site", "samples", "positives", "auroc", "auroc_error", "brier", "calibration_slope", "sensitivity"]
        shown += ["sensitivity_error", "specificity", "specificity_error"]
        told["sites"] = rows(found)
        print_frame(with_bounds(found[shown]) if "positives" in found else found, "on the sites' patients")
        missing = found[found[shown].isna().any(axis=1)] if "note" in found else found[:0]
        print_notes(dict(zip(missing["site"], missing.get("note", ()), strict=True)))
        target = destination or run / "at-sites.csv"
        write_atomic(target, found.to_csv(index=False).encode())
        written(target)


def _finished(run: RunFolder) -> tuple[Config, FittedRecipe | None, Tensor, list[str]]:
    """The experiment, the recipe and the model of an analysis, and the names of its coordinates."""
    run.summary()  # refuses what is no finished run
    content = tomllib.loads(run.config.read_text(encoding="utf-8"))
    loss = content.get("problem", {}).get("loss") or "logistic"
    if "model" in content or isinstance(get_loss(loss), Multinomial):
        raise StoreError(f"{run.path}: predict is for linear models with one output")
    experiment = parse(tomli_w.dumps({**content, "algorithm": {"name": "ProxNewton"}}), str(run.config), recipe=True)
    path = run.path / "recipe.json"
    with safe_open(run.path / "model.safetensors", "pt") as opened:
        x, names = opened.get_tensor("x").double(), json.loads(opened.metadata()["coordinates"])
    return checked(experiment), FittedRecipe.read(path) if path.is_file() else None, x, names


def _first_table(driver: Driver, experiment: Config, target: str) -> TableOne:
    """Table 1, as its section says it."""
    assert experiment.table_one is not None
    wishes = Wishes.of(Recipe(**(experiment.recipe or {})), target, **experiment.table_one.model_dump())
    together, noised = not driver.by_site, experiment.budget is not None
    return table_from(
        lambda query: list(driver.ask([query])[0]), driver.names, wishes, together=together, noised=noised
    )


def _described(driver: Driver) -> list[ColumnFacts]:
    return look_at(lambda query: list(driver.ask([query])[0]), driver.names, together=not driver.by_site)
