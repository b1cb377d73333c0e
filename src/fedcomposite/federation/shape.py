"""The problem without data: the same at the server and at every site, so that x means the same everywhere."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import tomllib
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tomli_w
import torch

from fedcomposite._validation import UserError, suggest
from fedcomposite.data import FittedRecipe, Silos
from fedcomposite.data.sparse import columns
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.experiments.grids import FILLER
from fedcomposite.federation.orders import Introduction, Shape
from fedcomposite.federation.wire import DTYPES, clean
from fedcomposite.problems import OneClassWarning, Problem
from fedcomposite.problems.losses import LOSSES, Loss

_NO_DATA = {"files": [], "target": "-"}  # a federation's data is at its sites
_SCALE = 1e12  # how much larger than the others' a site's scale may be


class AgreementError(UserError):
    """Sites whose data do not fit together; the message names the site and the column."""


@functools.lru_cache(maxsize=8)
def parse(text: str, where: str = "config", *, recipe: bool = False) -> Config:
    """Read an experiment from TOML, whose data are at the sites; one ``[algorithm]`` is needed.

    With ``recipe`` it may be an analysis, which needs no ``[run]``. Every order of a job brings the same text.
    """
    try:
        content = tomllib.loads(text.removeprefix("\ufeff"))
    except ValueError as error:  # also an integer of thousands of digits
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    found: list[str] = []
    given = content.get("data")
    section: dict[str, Any] = given if isinstance(given, dict) else {}
    found += [
        f"[data] {option}: the data of a federation are at its sites; "
        "name columns of weights and offsets in each site.toml, and leave this out"
        for option in ("weight", "offset", "class_weights")
        if option in section
    ]
    problem = content.get("problem")
    weight = problem.get("class_weight") if isinstance(problem, dict) else None
    if weight is not None and "model" not in content:
        found.append(
            "[problem] class_weight: what a sample counts is for its site to say; name a column of weights in each "
            "site.toml, and leave this out"
        )
    elif weight == "balanced":
        found.append("[problem] class_weight = 'balanced': sites do not count their classes; give a number by label")
    content = {"run": FILLER["run"], **content} if recipe else content
    run = content.get("run")
    if isinstance(run, dict) and run.get("replace") is True:
        found.append("[run] replace = true: a site cannot take part twice in a round")
    if not content.get("algorithm") or content.get("algorithms"):
        found.append("a federation runs one [algorithm]")
    named = section.get("name")
    here = (
        _NO_DATA if named is None or "recipe" in content else {"name": named}
    )  # a name says how images are normalised
    try:
        config = Config.check({**content, "data": here, "partition": None}, where)
    except ConfigError as error:
        raise ConfigError.of(found, where, error) from error
    if config.algorithms:  # what grids make
        found.append("a federation runs one [algorithm]")
    if found:
        raise ConfigError.of(found, where)
    if config.run.device != "cpu":
        config = config.model_copy(update={"run": config.run.model_copy(update={"device": "cpu"})})
    return config


def write(config: Config, *, callbacks: bool = False) -> str:
    """The experiment as TOML, without the data that a federation has at its sites; :func:`parse` reads it.

    Callbacks are the coordinator's matter and stay there.
    """
    content = config.model_dump(exclude_none=True, exclude={"data", "partition"})
    if not callbacks:
        del content["callbacks"]
    if "name" in config.data:
        content["data"] = {"name": config.data["name"]}
    return tomli_w.dumps({k: v for k, v in content.items() if v != []})


def blank(shape: Shape, times: bool = False, recipe: FittedRecipe | None = None) -> Silos:
    """One client with a sample of zeros for every class, or a time: all that a model must know of the data."""
    labels = shape.labels or [0.0]
    features = torch.zeros((len(labels), *shape.features), dtype=DTYPES[shape.dtype])
    targets = torch.tensor([[1.0, 0.0]] * len(labels) if times else labels, dtype=DTYPES[shape.target_dtype])
    if shape.targets is not None:
        targets = targets.view(-1, *(1 for _ in shape.targets)).repeat(1, *shape.targets)
    return Silos(features, targets, (0, len(labels)), feature_names=tuple(shape.names), recipe=recipe)


def skeleton(config: Config, shape: Shape, recipe: FittedRecipe | None = None) -> Problem:
    """The problem with zeros in place of the sites' samples: its model, layout, h and start are the real ones."""
    loss = LOSSES.canonical(config.problem.loss or "logistic") if config.model is None else ""
    return config.make_problem(blank(shape, times=loss == "cox", recipe=recipe), analysed=True)


def local_problem(general: Problem, config: Config, shape: Shape, silos: Silos) -> Problem:
    """The problem of one site: its own samples, and everything else as in the ``general`` one, a :func:`skeleton`."""
    own: dict[str, Any] = {"regularizer": general.regularizer, "metrics": config.problem.metrics}
    if isinstance(general.loss, Loss):
        own |= {"loss": general.loss.adapt(general.silos), "bias": general.bias}
    else:
        own |= {"loss": general.loss, "model": general.model, **vars(general.options)}
        if (most := general.options.evaluation_samples) is not None:  # the simulator spreads them over all clients
            own["evaluation_samples"] = -(-most // shape.clients)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OneClassWarning)  # the other sites have the other classes
        return Problem(silos, **own)


def agree(introductions: Sequence[Introduction]) -> Shape:
    """The common shape of the sites' data, or an error that names the site and the column that differ."""
    first = introductions[0]
    for other in introductions[1:]:
        theirs, ours = set(other.names), set(first.names)
        missing = [clean(c, 60) for c in first.names if c not in theirs]
        extra = [clean(c, 60) for c in other.names if c not in ours]
        if missing:
            raise AgreementError(
                f"{other.site} has no column {missing[0]!r}, which {first.site} has{suggest(missing[0], extra[:99])}; "
                "map it under [data.columns] in its site.toml or drop it everywhere"
            )
        if extra:
            raise AgreementError(
                f"{other.site} has a column {extra[0]!r} that {first.site} does not have; drop it there"
            )
        if other.features != first.features:
            raise AgreementError(
                f"{other.site} has samples of shape {other.features}, {first.site} of shape {first.features}"
            )
        if (other.targets, other.target_dtype) != (first.targets, first.target_dtype):
            raise AgreementError(
                f"{other.site} has targets of shape {other.targets or []}, {other.target_dtype}, {first.site} of shape "
                f"{first.targets or []}, {first.target_dtype}; store them alike"
            )
        if other.dtype != first.dtype:
            raise AgreementError(f"{other.site} stores {other.dtype}, {first.site} {first.dtype}; store them alike")
        if other.version != first.version:
            raise AgreementError(
                f"{other.site} runs fedcomposite {clean(other.version, 60)}, {first.site} "
                f"{clean(first.version, 60)}; install the same"
            )
    if strange := _strange(introductions):
        raise AgreementError(next(iter(strange.values())))
    labels = sorted({v for one in introductions for v in one.labels})
    return Shape(
        features=first.features,
        dtype=first.dtype,
        targets=first.targets,
        target_dtype=first.target_dtype,
        names=first.names,
        labels=labels,
        clients=len(introductions),
        sites=[one.site for one in introductions],
    )


def misfits(introductions: Sequence[Introduction]) -> dict[str, str]:
    """The sites that do not fit to most others, and why."""

    def form(one: Introduction) -> str:
        return repr((sorted(one.names), one.features, one.dtype, one.targets, one.target_dtype, one.version))

    usual = Counter(map(form, introductions)).most_common(1)[0][0] if introductions else ""
    found: dict[str, str] = {}
    model = next((i for i in introductions if form(i) == usual), None)
    for one in introductions:
        if model is not None and form(one) != usual:
            try:
                agree([model, one])
            except AgreementError as error:
                found[one.site] = str(error)
    return found | _strange([i for i in introductions if i.site not in found])


def _strange(introductions: Sequence[Introduction]) -> dict[str, str]:
    """Sites whose features are on a scale that no unit explains: they would set everybody's steps."""
    found: dict[str, str] = {}
    for one in introductions:
        others = [i.scale for i in introductions if i is not one and i.scale is not None]
        if one.scale is not None and len(others) > 1 and one.scale > _SCALE * max(1.0, statistics.median(others)):
            found[one.site] = (
                f"{one.site} says that its features are on the scale {one.scale:.3g} (the largest eigenvalue of "
                f"X'X/m), the others {statistics.median(others):.3g}; check the units of its columns"
            )
    return found


def arrange(silos: Silos, names: Sequence[str]) -> Silos:
    """A site's samples with the columns in the agreed order."""
    if list(names) == list(silos.feature_names):
        return silos
    order = [silos.feature_names.index(name) for name in names]
    held: dict[str, Any] = {part: (columns(X, order), y) for part, (X, y) in silos.held_out.items()}
    return dataclasses.replace(
        silos,
        features=columns(silos.features, order),
        copies=tuple(one[:, order] for one in silos.copies),
        feature_names=tuple(names),
        **held,
    )
