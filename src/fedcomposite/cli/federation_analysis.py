"""``federation describe | fit | path | cv | predict``: analyses of files at hand, across a federation's sites."""

from __future__ import annotations

import contextlib
import json
import time
import tomllib
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from safetensors import safe_open
from torch import Tensor

from fedcomposite.analysis.prediction import predict_at_sites
from fedcomposite.analysis.study import Kind
from fedcomposite.choice import AUTO
from fedcomposite.cli.analysis import (
    Count,
    CVChoice,
    Folds,
    Out,
    PathChoice,
    Ratio,
    Score,
    checked,
    finish,
    folds_of,
    records,
    tried,
    with_bounds,
)
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
from fedcomposite.cli.described import page
from fedcomposite.cli.federation_jobs import require_service, say
from fedcomposite.data import FittedRecipe
from fedcomposite.data.describing import look_at, table_of
from fedcomposite.data.flags import Look
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.experiments.store import RunFolder, StoreError
from fedcomposite.experiments.toml import load
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.inquiry import Inquiry, learn, target_of
from fedcomposite.federation.engines.admin_socket import AdminSocketError
from fedcomposite.federation.engines.grid import ServiceGrid
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.shape import parse, write
from fedcomposite.files import write_atomic
from fedcomposite.problems.losses import Multinomial, get_loss
from fedcomposite.runtime import Driver

Federation = Annotated[Path, typer.Argument(metavar="FEDERATION", help="The coordinator's folder.")]
ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file; the data are the sites'.")]
GiveUp = Annotated[float, typer.Option(help="Seconds that are waited for a site.")]
Secure = Annotated[bool, typer.Option("--secure", help="Only sums over the sites are known here (secure aggregation).")]


def add_analysis_commands(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (describe, fit, path, cv, predict):
        app.command()(command)


def read(source: str, *, fitted: bool = False) -> tuple[Config, str]:
    """An experiment whose data are at sites, and its target's name."""
    content, where = load(source, ())
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
def inquiry(folder: Path, config: Config, give_up: float, secure: bool = False) -> Iterator[Inquiry]:
    """The sites of a federation, asked in one job."""
    federation = FederationFolder(folder)
    require_service(federation)
    job = uuid.uuid4().hex[:16]
    with contextlib.closing(ServiceGrid(federation, job)) as grid:
        settings = Settings(give_up=give_up, secure=secure)
        yield Inquiry(grid, federation.sites, federation.nodes, config, job, settings, log=say)


def describe(
    folder: Federation,
    config: ConfigFile,
    as_json: AsJson = False,
    give_up: GiveUp = 86400.0,
    secure: Secure = False,
) -> None:
    """Analyst: what every site has of every feature, and what differs between them; of all together if secure."""
    with reporting(failures=(FederationError, AdminSocketError)):
        experiment, target = read(config)
        with inquiry(folder, experiment, give_up, secure) as asking:
            found = table_of(_described(Driver(asking)), target)
        if as_json:
            print_json(rows(found))
            return
        for line in page(found):
            out.print(line, markup=False, highlight=False, soft_wrap=True)


def fit(
    folder: Federation,
    config: ConfigFile,
    destination: Out = None,
    give_up: GiveUp = 86400.0,
    secure: Secure = False,
    as_json: AsJson = False,
) -> None:
    """Analyst: fit a linear model across the sites, with confidence intervals and its quality at every site."""
    _conduct(folder, config, "fit", destination, give_up, secure, as_json)


def path(
    folder: Federation,
    config: ConfigFile,
    count: Count = 100,
    ratio: Ratio = None,
    choice: PathChoice = "bic",
    destination: Out = None,
    give_up: GiveUp = 86400.0,
    secure: Secure = False,
    as_json: AsJson = False,
) -> None:
    """Analyst: fit a model for every strength of the regularizer across the sites."""
    _conduct(folder, config, "path", destination, give_up, secure, as_json, count=count, ratio=ratio, choice=choice)


def cv(
    folder: Federation,
    config: ConfigFile,
    folds: Folds = "10",
    score: Score = "deviance",
    count: Count = 100,
    ratio: Ratio = None,
    choice: CVChoice = "1se",
    destination: Out = None,
    give_up: GiveUp = 86400.0,
    secure: Secure = False,
    as_json: AsJson = False,
) -> None:
    """Analyst: choose the strength of the regularizer by cross-validation within the sites, or over them."""
    with reporting():
        number = folds_of(folds)
    options = {"folds": number, "scoring": score, "count": count, "ratio": ratio, "choice": choice}
    _conduct(folder, config, "cv", destination, give_up, secure, as_json, **options)


def predict(
    folder: Federation,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of `federation fit | path | cv`.")],
    threshold: Annotated[float, typer.Option(help="Probability from which on a patient is of class 1.")] = 0.5,
    destination: Annotated[Path | None, typer.Option("--out", help="Table to write (RUN/at-sites.csv).")] = None,
    give_up: GiveUp = 86400.0,
    secure: Secure = False,
    as_json: AsJson = False,
) -> None:
    """Analyst: have every site score its new patients, in a file of its own, and hear how good the model is there.

    Under secure sums they score, and nothing is heard: a sum might be of one site's patients.
    """
    with reporting(failures=(FederationError, AdminSocketError)), results(as_json) as told:
        experiment, recipe, x, names = _finished(RunFolder(run))
        with inquiry(folder, experiment, give_up, secure) as asking:
            asking.recipe = recipe
            problem = asking.meet()
            if names != list(problem.coordinate_names):
                raise ConfigError(f"{run}: the features of its model are not those of these sites' samples")
            found = predict_at_sites(problem, x, Driver(asking), threshold=threshold)
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
        print_frame(with_bounds(found[shown]) if "auroc" in found else found, "on the sites' patients")
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


def _described(driver: Driver) -> list[Look]:
    return look_at(lambda query: list(driver.ask([query])[0]), driver.names, together=not driver.by_site)


def _conduct(
    folder: Path,
    config: str,
    kind: Kind,
    destination: Path | None,
    give_up: float,
    secure: bool,
    as_json: bool,
    **options: Any,
) -> None:
    with reporting(failures=(FederationError, AdminSocketError)), results(as_json) as found:
        experiment, target = read(config, fitted=True)
        runs = FederationFolder(folder).runs
        place = RunFolder((destination or runs / f"{experiment.name}-{kind}-{datetime.now():%Y%m%d-%H%M%S}").absolute())
        place.check_new(instead="another --out")
        began = time.monotonic()
        with inquiry(folder, experiment, give_up, secure) as asking:
            driver = Driver(asking)
            described = table_of(_described(driver), target)
            asking.recipe = learn(driver, asking.config, target)
            if asking.recipe is not None:
                say(f"the recipe is learned, in {driver.exchanges} exchanges so far")
            problem = asking.meet()
            made = tried(problem, kind, experiment.seed, driver=driver, **options)
        text = write(experiment.only({"name": AUTO}, experiment.seed))
        made.write(place, text, records(described), time.monotonic() - began)
        finish(made, place, found)
