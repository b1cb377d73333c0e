"""What an experiment would refuse: all that shows without its data at once, the rest before anything is written."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedcomposite import data, models
from fedcomposite._validation import UserError, check_call, suggest
from fedcomposite.algorithms import AnyAlgorithm
from fedcomposite.choice import AUTO
from fedcomposite.data import Recipe
from fedcomposite.data.client_files import is_svmlight
from fedcomposite.data.databases import check_databases
from fedcomposite.data.sheets import read_sheets
from fedcomposite.experiments.toml import ConfigError, file_tables, name_in
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import get_loss
from fedcomposite.problems.metrics import METRICS
from fedcomposite.problems.network import named_loss
from fedcomposite.regularizers.base import StepError
from fedcomposite.runtime import Cohorts, simulate
from fedcomposite.runtime.callbacks import AnyCallback, BestModel, Callback, EarlyStopping, View
from fedcomposite.runtime.fit import check_rules, check_steps

if TYPE_CHECKING:
    from fedcomposite.experiments.config import Config


def mistakes(config: Config) -> list[ConfigError]:
    """What is wrong with the names and values of each section."""
    checks: list[Callable[[], Any]] = [config.make_regularizer]
    checks += [functools.partial(config.make_algorithm, spec, None) for spec in config.specs]
    checks += [functools.partial(check, config) for check in (_labels, _seeds, _data, _partition, _problem, _model)]
    checks += [functools.partial(config.make_callbacks, Path()), config.make_privacy, config.make_aggregator]
    return [error for check in checks if (error := _refusal(check)) is not None]


def conflicts(config: Config) -> list[ConfigError]:
    """Methods that cannot take the regularizer, where both can be made; the rest shows with the data."""
    if _refusal(config.make_regularizer) is not None:
        return []
    checks = [functools.partial(_conflict, config, spec) for spec in config.specs if spec.get("name") != AUTO]
    return [error for check in checks if (error := _refusal(check)) is not None]


def missing_files(content: Mapping[str, Any]) -> list[str]:
    """A line for every file of ``[data]`` that is not there. Only for experiments of whoever owns this machine."""
    tables = file_tables(content.get("data"))
    section = content.get("data")
    databases = section.get("databases") if isinstance(section, Mapping) else None
    stored = databases.values() if isinstance(databases, Mapping) else ()
    given = [one.get("database") for one in stored if isinstance(one, Mapping)]
    named = [one for one in given if isinstance(one, str) and "://" not in one]
    named += [f for table in tables for f in (*table["files"], table.get("test")) if isinstance(f, str)]
    return [f"[data] {file}: no such file" for file in dict.fromkeys(named) if not Path(file).exists()]


def _refusal(check: Callable[[], Any]) -> ConfigError | None:
    try:
        check()
    except ConfigError as error:
        return error
    return None


def _conflict(config: Config, spec: Mapping[str, Any]) -> None:
    """Try the method's rules on a model of one coordinate; what a larger one would need is not a conflict."""
    h = config.make_regularizer()
    try:
        algorithm = config.make_algorithm(spec, None)
    except ConfigError:
        return  # told already
    label = spec.get("label", algorithm.name)
    try:
        check_rules(algorithm, h)
    except ValueError as error:
        raise ConfigError(f"{label}: {error}") from None
    try:
        if "steps" not in spec:
            check_steps(algorithm, h, Cohorts(1))
    except StepError as error:
        raise ConfigError(f"{label}: {error}") from None
    except Exception:  # groups and names that need all coordinates: the run's own check will tell
        return


def _labels(config: Config) -> None:
    wrong = [s["label"] for s in config.specs if "label" in s and not str(s["label"]).strip()]
    wrong += [s["label"] for s in config.specs if not isinstance(s.get("label", ""), str)]
    if wrong:
        raise ConfigError("\n".join(f"[algorithm] label = {label!r}, must be a string" for label in wrong))


def _seeds(config: Config) -> None:
    if len(set(config.seeds)) < len(config.seeds):
        raise ConfigError(f"seeds = {config.seeds}: a seed is there twice")


def _data(config: Config) -> None:
    """Refuse unknown names and options before anything is read."""
    section = config.data
    if config.recipe is not None:
        _recipe(section, config.recipe)
        return
    if "databases" in section:
        raise ConfigError("[data] databases hold tables as people have them: add a [recipe], which may be empty")
    files = section.get("files")
    if ("name" in section) == (files is not None):
        raise ConfigError("[data] needs either a name (of a data set) or files (one .csv or .npz per client)")
    if files is None:
        try:
            loader = data.DATASETS[name_in(section)]
            if options := {k: v for k, v in section.items() if k != "name"}:
                check_call(section["name"], loader, options)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError.at("[data]", error) from None
    elif "target" not in section and not is_svmlight([Path(str(file)) for file in files]):
        raise ConfigError("[data] files need a target: the name of the column to predict")


def _recipe(source: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    """Refuse what can be seen to be wrong before anything is read."""
    name, files = source.get("name"), source.get("files")
    found: list[str] = []
    if (name is not None) + (files is not None) + ("databases" in source) != 1:
        where = "a name (of a data set), files (one .csv or .parquet per client) or databases (one per client)"
        found.append(f"[data] needs either {where}")
    if "databases" in source:
        found += [f"[data] {line}" for line in check_databases(source)]
    elif "query" in source:
        found.append("[data] query is for databases")
    if name is not None and name not in data.FRAMES:
        found.append(
            f"[recipe] {name!r} has no tables to prepare{suggest(str(name), data.FRAMES)} "
            f"(there are: {', '.join(data.FRAMES)}; or give files)"
        )
    if not isinstance(source.get("target"), str):
        found.append("[data] a recipe needs a target: the name of the column to predict")
    test, seed = source.get("test", 0.5), source.get("seed", 0)
    if isinstance(test, bool) or not (isinstance(test, str) or (isinstance(test, int | float) and 0 < test < 1)):
        found.append(f"[data] test = {test}, must be a file, or a share of every site's rows between 0 and 1")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        found.append(f"[data] seed = {seed}, must be a whole number from 0 on")
    places = ("name", "files", "databases", "query")
    options = {k: v for k, v in source.items() if k not in (*places, "target", "test", "seed", "weight", "offset")}
    if options and "databases" in source:
        found.append(f"[data] {', '.join(options)}: for files only; say it in the query")
    for role in ("weight", "offset"):
        if role in source:
            found.append(f"[data] {role} is for files without a [recipe]; say it there: {role} = {source[role]!r}")
    try:
        check_call("[data] with a recipe", read_sheets, options)
    except ValueError as error:
        found.append(str(error))
    try:
        Recipe(**recipe)
    except (TypeError, ValueError) as error:
        found += [f"[recipe] {line.removeprefix('recipe: ')}" for line in str(error).splitlines()]
    if found:
        raise ConfigError("\n".join(found))


def _partition(config: Config) -> None:
    if config.partition is None:
        return
    given = {k: v for k, v in config.partition.items() if k != "name"}
    shared = ("clients", "seed", "minimum")
    found: list[str] = []
    try:
        name = name_in(config.partition)
        rule = data.PARTITIONERS[name]
    except ValueError as error:
        rule, name = None, str(config.partition.get("name", "?"))
        found.append(str(error))
    every = {k: v for k, v in given.items() if k in shared}
    for function, options in ((data.partition, every), (rule, {k: v for k, v in given.items() if k not in shared})):
        try:
            if function is not None:
                check_call(f"partition {name!r}", function, options)
        except ValueError as error:
            found.append(str(error))
    if found:
        raise ConfigError.at("[partition]", "\n".join(found))


def _problem(config: Config) -> None:
    """Refuse losses and metrics that nobody knows."""
    section, found = config.problem, []
    try:
        if config.model is None and section.loss is not None:
            get_loss(section.loss, section.loss_options)
        elif config.model is not None:
            named_loss(section.loss or "cross_entropy", section.loss_options)
    except (TypeError, ValueError) as error:
        found.append(str(error))
    for name in section.metrics:
        try:
            METRICS[name]
        except ValueError as error:
            found.append(str(error))
    if found:
        raise ConfigError.at("[problem]", "\n".join(found))


def _model(config: Config) -> None:
    """Refuse names and options that make no network, before any data are read."""
    if config.model is None:
        return
    name, options = config.model.name, config.model.options
    try:
        with torch.device("meta"):  # nothing is allocated or drawn
            models.build(name, "mnist", outputs=config.model.outputs, **options)
    except ValueError as error:
        raise ConfigError(f"[model] {error}") from None
    except (TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"[model] options = {options} do not fit {name!r}: {reason}") from None


class _Accepted(BaseException):
    """A run has begun: nothing speaks against it."""


def check_run(
    problem: Problem,
    algorithm: AnyAlgorithm,
    settings: dict[str, Any],
    checkpoint: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Refuse what cannot be run: method x regularizer x participation x data x settings x checkpoint.

    The run is begun without a place to write, from ``checkpoint`` if there is one, and left at its first record. Of
    the callbacks those are asked that read the records.
    """

    def leave(view: View) -> None:
        raise _Accepted

    watchers: list[AnyCallback] = [*(c for c in callbacks if isinstance(c, BestModel | EarlyStopping)), leave]

    resume = checkpoint is not None and checkpoint.exists()
    quiet = {**settings, "checkpoint": checkpoint if resume else None, "checkpoint_every": 0, "resume": resume}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself will say it
            with contextlib.suppress(_Accepted):
                simulate(problem, algorithm, **quiet, callbacks=watchers, progress=False)
            clients = Cohorts(len(problem.silos), settings["participation"])
            check_steps(algorithm, problem.regularizer, clients, problem.dimension)
    except ValueError as error:
        if isinstance(error, UserError) and not isinstance(error, StepError):
            raise
        raise ConfigError(str(error)) from error
