"""Experiment files: TOML, validated as a whole before any work starts."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import nn

from fedcomposite import aggregators, algorithms, compressors, data, models, privacy, regularizers, schedules, theory
from fedcomposite._validation import UserError
from fedcomposite.aggregators import Aggregator
from fedcomposite.algorithms import AnyAlgorithm, ProxNewton, current
from fedcomposite.choice import AUTO, check_auto, choose
from fedcomposite.compressed import Compressed
from fedcomposite.data import Recipe, Silos
from fedcomposite.data.databases import stored_tables
from fedcomposite.experiments import grids, toml
from fedcomposite.experiments.allowances import Allowance, BudgetEnd
from fedcomposite.experiments.checks import conflicts, missing_files, mistakes
from fedcomposite.experiments.toml import ConfigError as ConfigError
from fedcomposite.experiments.toml import name_in
from fedcomposite.experiments.tuning import EXTENSIONS, TUNING
from fedcomposite.files import write_atomic
from fedcomposite.privacy import Privacy, StudyBudget
from fedcomposite.problems import Loss, Problem
from fedcomposite.problems.losses import get_loss
from fedcomposite.problems.network import needs
from fedcomposite.regularizers.factors import Deviations
from fedcomposite.regularizers.target import Structure
from fedcomposite.runtime.callbacks import REGISTRY as CALLBACKS
from fedcomposite.runtime.callbacks import Callback
from fedcomposite.runtime.callbacks import build as build_callback
from fedcomposite.schedules import Schedule

_TABLES = ("name", "files", "databases", "query")
"""What says where tables are."""
Seed = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A table: nothing that is not named here, and no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ProblemSection(Section):
    """``[problem]``: the loss, how clients are weighted, and how much each feature is regularized."""

    loss: str | None = None
    loss_options: dict[str, Any] = {}
    baseline: Literal["site", "common"] | None = None
    """Of times to an event: one for all sites, in ``fit``, ``path`` and ``cv``; each has its own if left out."""
    bias: bool = False
    weights: Literal["uniform", "samples"] = "uniform"
    metrics: list[str] = []
    penalty_factor: dict[str, float] | list[float] | None = None
    """What the term of each feature is multiplied by: ``{age = 0.0}`` leaves that column alone."""
    deviations: Deviations | None = None
    """Where the recipe has ``per_site``: what holds the sites' coefficients near the common ones."""
    deviation_ratio: float = Field(default=1.0, gt=0)
    """Strength of that, as a share of the regularizer's."""
    class_weight: Literal["balanced"] | dict[str, float] | None = None
    """What samples count by their class: ``{"1" = 3.0}``, those that are not named 1."""

    @field_validator("class_weight")
    @classmethod
    def _labels(cls, given: Any) -> Any:
        """Refuse classes that are no numbers: a problem's are."""
        if isinstance(given, dict) and (wrong := [label for label in given if not toml.is_number(label)]):
            raise ValueError(f"{wrong[0]!r} is no number, and labels of a problem are")
        return given

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of :class:`fedcomposite.Problem`."""
        given = self.class_weight
        return self.model_dump(exclude={"baseline"}) | {
            "class_weight": {float(k): w for k, w in given.items()} if isinstance(given, dict) else given
        }


class ModelSection(Section):
    """``[model]``: a network of :mod:`fedcomposite.models` instead of a linear model, and how it is evaluated."""

    name: str
    """One of ``fedcomposite list models``."""
    options: dict[str, Any] = {}
    """The model's own."""
    outputs: int | None = Field(default=None, ge=1)
    """Of the network, where they are not the classes, or one for each number that is to be found."""
    seed: int | None = None
    """Of the first parameters; the experiment's if left out."""
    gradients: Literal["auto", "vmap", "loop", "streams"] = "auto"
    chunk: int | None = Field(default=None, ge=1)
    microbatch: int | None = Field(default=None, ge=1)
    """Samples of a client's batch in one pass; gradients add up."""
    class_axis: Literal[1, -1] | None = None
    """Where classes are among outputs for several labels per sample: second, or last."""
    named_inputs: dict[str, list[int]] | None = None
    """Names and shapes of a model's inputs, where it has several."""
    precision: Literal["full", "bf16"] = "full"
    evaluation_samples: int = Field(default=2000, ge=0)
    """Training samples used for loss, gradient and accuracy, and the most test samples; 0 takes all."""


class RunSection(Section):
    """``[run]``: the settings of :func:`fedcomposite.simulate`."""

    rounds: int = Field(ge=0)
    batch_size: int | None = Field(default=None, ge=1)
    sampling: Literal["replacement", "epoch"] = "replacement"
    clip_norm: float | None = Field(default=None, gt=0)
    participation: float = Field(default=1.0, gt=0, le=1)
    replace: bool = False
    """Whether cohorts are drawn with replacement."""
    dtype: Literal["float32", "float64"] | None = None
    """float64 for linear models and float32 for networks if left out."""
    device: str = "cpu"
    """``"cpu"``, ``"cuda"`` or ``"cuda:1"``."""
    evaluate_every: int = Field(default=1, ge=1)
    tolerance: float | None = Field(default=None, gt=0)
    stationarity_step: float | None = Field(default=None, gt=0)
    backend: Literal["stacked", "loop"] = "stacked"
    mode: Literal["auto", "eager", "record", "compile"] = "auto"
    checkpoint_every: int = Field(default=50, ge=0)
    """Rounds between checkpoints; 0 writes one at the end and at Ctrl-C."""
    sparsity: float | None = Field(default=None, gt=0, lt=1)
    """The share of all parameters that is zero at the end; the run finds strengths and layers."""
    structure: Structure = "weights"
    """What becomes zero."""
    aggregator: dict[str, Any] | None = None
    """A robust mean of :mod:`fedcomposite.aggregators`: its name and fields."""
    budget: dict[str, float] | None = None
    """What a run may spend, as ``{bytes = 1e6}``; ``rounds`` are then the most."""


class TrialsSection(Section):
    """``[trials]``: how values are chosen for the fields that say ``{tune = [...]}``."""

    seed: Seed = 1000
    """The seed they are chosen with, none of those that are reported."""
    criterion: str = "objective"
    """What the last record is judged by: the lowest wins, of accuracies the highest."""
    rounds: int | None = Field(default=None, ge=1)
    """Rounds of a trial; as many as a run has if left out."""
    extensions: int = Field(default=EXTENSIONS, ge=0)
    """How often a search goes on past an end of the values that are given, where the best of them is one."""


class TableOneSection(Section):
    """``[table_one]``: who was studied, as the first table of a paper says it (:func:`fedcomposite.table_one`)."""

    by: str | None = None
    """The column whose levels are compared, in place of the sites."""
    columns: list[str] | None = None
    """The variables, in their order; all if left out."""
    median: list[str] = []
    """Numbers that are shown as median and quartiles, and compared by ranks."""
    categorical: list[str] = []
    """Numbers that are levels."""


class Config(Section):
    """A whole experiment; one ``[algorithm]`` to run, or several ``[[algorithms]]`` to compare.

    ``seed`` is used wherever a section does not set its own; ``seeds`` repeats a comparison for each.
    """

    name: str = "run"
    seed: Seed = 0
    seeds: list[Seed] = Field(default_factory=list)
    data: dict[str, Any]
    recipe: dict[str, Any] | None = None
    table_one: TableOneSection | None = None
    partition: dict[str, Any] | None = None
    problem: ProblemSection = ProblemSection()
    model: ModelSection | None = None
    regularizer: dict[str, Any] | list[dict[str, Any]] = Field(default_factory=lambda: {"name": "Zero"})
    algorithm: dict[str, Any] | None = None
    algorithms: list[dict[str, Any]] = Field(default_factory=list)
    callbacks: list[dict[str, Any]] = Field(default_factory=list)
    trials: TrialsSection | None = None
    privacy: dict[str, Any] | None = None
    practical: bool | None = None
    """Steps were found by trial, and are meant so: no warning that they leave what is proven."""
    closing: str | None = None
    """What a comparison says at its end: what the picture means, what to try next."""
    run: RunSection

    # -- reading and writing ----------------------------------------------------------------------------------------

    @classmethod
    def read(cls, source: str | Path, overrides: Sequence[str] = (), *, rounds: bool = False) -> Config:
        """Read a file, or one of the package's own by name, and apply ``section.field=value`` overrides.

        ``[run]`` may be left out, as for an analysis, unless ``rounds`` are needed.
        """
        content, name = toml.load(source, overrides)
        content = content if rounds else {"run": grids.FILLER["run"], **content}
        try:
            return cls.check(content, name)
        except ConfigError as error:
            raise ConfigError.of(missing_files(content), name, error) from error

    @classmethod
    def check(cls, content: Mapping[str, Any], where: str = "config") -> Config:
        """Validate parsed content; every mistake that can be seen without the data is told, each in one line.

        A method's grids are written out as methods; any other grid makes several experiments, which is for `compare`.
        """
        content, told = grids.single(toml.with_times(toml.by_new_names(content)))
        large = list(toml.oversized(content))
        told, wrong = [*told, *(line for _, line in large)], {path[0] for path, _ in large}
        rest = {k: v for k, v in content.items() if k not in wrong}
        try:
            config = cls.model_validate({k: v for k, v in grids.FILLER.items() if k in wrong} | rest)
        except ValidationError as error:  # the other sections are looked at all the same
            told += toml.explain(error, cls)
            config = cls.model_validate(grids.FILLER | toml.sound(rest, error, grids.FILLER))
        found = mistakes(config)
        if told or found:
            found += conflicts(config)
            raise ConfigError.of([*told, *map(str, found)], where) from (found[0] if found else None)
        return config

    @property
    def text(self) -> str:
        """The experiment as TOML."""
        content = self.model_dump(exclude_none=True)
        return tomli_w.dumps({k: v for k, v in content.items() if v != [] or k == "data"})

    def write(self, path: Path) -> None:
        """Write the resolved experiment."""
        write_atomic(path, self.text.encode())

    def only(self, spec: dict[str, Any], seed: int) -> Config:
        """The single run of one method and one seed."""
        update = {"algorithm": spec, "algorithms": [], "seed": seed, "seeds": [], "trials": None}
        return self.model_copy(update=update)

    # -- building ---------------------------------------------------------------------------------------------------

    @property
    def specs(self) -> list[dict[str, Any]]:
        """The methods to run, as written; fields that had other names in the last version by their new ones."""
        return [current(s) for s in self.algorithms or ([self.algorithm] if self.algorithm else [])]

    @property
    def labels(self) -> list[str]:
        """A distinct name per method: its ``label``, or its class name, numbered when it repeats."""
        return distinct([str(s.get("label", _method(s))) for s in self.specs])

    @property
    def methods(self) -> dict[str, str]:
        """The class name of the method behind each label."""
        return dict(zip(self.labels, map(_method, self.specs), strict=True))

    def make_regularizer(self) -> regularizers.Regularizer:
        """Build ``[regularizer]``; ``on = "*.weight"`` restricts it to parameters of those names.

        ``strength`` is a schedule that h is multiplied with, round by round.

        Several ``[[regularizer]]`` tables, each with its ``on``, are added up: one term for each layer.
        """
        if isinstance(self.regularizer, dict):
            return _term(self.regularizer, "[regularizer]")
        each = [
            functools.partial(_term, fields, f"[[regularizer]] {i + 1}:") for i, fields in enumerate(self.regularizer)
        ]
        terms = toml.every(each)
        if not terms:
            raise ConfigError("[[regularizer]] is an empty list; leave it out for no regularizer")
        try:
            return functools.reduce(operator.add, terms)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"[[regularizer]] {error}") from None

    def make_algorithm(self, spec: Mapping[str, Any], problem: Problem | None) -> AnyAlgorithm:
        """Build a method from its table.

        With ``steps = "auto"`` or ``"theory"`` the fields that are left out come from the problem's measured constants
        (:func:`fedcomposite.theory.choose`). ``name = "auto"`` leaves the method itself to
        :func:`fedcomposite.choice.choose`. A table ``compressor`` compresses what clients send
        (:class:`fedcomposite.compressed.Compressed`). Without a problem only names and values are checked.
        """
        fields = {k: v for k, v in spec.items() if k not in ("name", "label", "steps")}
        kept = fields.pop("compressor") if isinstance(fields.get("compressor"), Mapping) else None
        try:
            made = self._plain_algorithm(spec, fields, problem)
            if kept is None:
                return made
            compressor = compressors.build(name_in(kept), **{k: v for k, v in kept.items() if k != "name"})
            return Compressed(made, compressor, everybody=self.run.participation == 1)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError.at("[algorithm]", error) from None

    def _plain_algorithm(
        self, spec: Mapping[str, Any], fields: dict[str, Any], problem: Problem | None
    ) -> AnyAlgorithm:
        """A method as :meth:`make_algorithm` finds it, whose replies are sent as they are."""
        name = name_in(spec)
        if self.privacy is not None and not self.budget and (name == AUTO or spec.get("steps") is not None):
            raise ConfigError("with [privacy] no step may be read off the data; name the method and give its steps")
        if name == AUTO:
            check_auto(fields)
            share = self.run.participation
            return ProxNewton() if problem is None else choose(problem, participation=share, **fields).algorithm
        if spec.get("steps") is None:
            return algorithms.build(name, **fields)
        known = None if problem is None else self._constants(problem)
        return theory.choose(algorithms.lookup(name), spec["steps"], known, fields)

    def _constants(self, problem: Problem) -> theory.Constants:
        if problem.model is not None:
            raise ConfigError("the smoothness of a network is unknown; give the steps yourself")
        return theory.constants(
            problem, batch=self.run.batch_size, rounds=self.run.rounds, participation=self.run.participation
        )

    @functools.cached_property
    def budget(self) -> StudyBudget | None:
        """``[privacy]`` of an analysis, whose level is "study"; None for any other."""
        made = self.make_privacy()
        return made if isinstance(made, StudyBudget) else None

    def make_privacy(self) -> Privacy | StudyBudget | None:
        """Build ``[privacy]``: its ``level`` ("sample", "client" or "study") and the fields of that."""
        try:
            made = None if self.privacy is None else privacy.build(self.privacy)
            if isinstance(made, privacy.SampleLevel) and self.run.clip_norm is not None:
                raise ConfigError("each sample's gradient is clipped already; leave clip_norm of [run] out")
            return made
        except (TypeError, ValueError) as error:
            raise ConfigError.at("[privacy]", error) from None

    def make_aggregator(self) -> Aggregator | None:
        """Build ``aggregator`` of ``[run]``."""
        if (given := self.run.aggregator) is None:
            return None
        try:
            return aggregators.build(name_in(given), **{k: v for k, v in given.items() if k != "name"})
        except (TypeError, ValueError) as error:
            raise ConfigError.at("[run] aggregator:", error) from None

    def make_callbacks(self, folder: Path) -> list[Callback]:
        """Build ``[[callbacks]]``; paths that are not absolute lie in the run's folder."""
        names = [str(spec.get("label", spec.get("name"))) for spec in self.specs]
        run = {"label": names[0] if len(names) == 1 else "", "seed": str(self.seed)}
        run["part"] = "tuning" if TUNING in folder.parts else "run"
        made = toml.every([functools.partial(_callback, spec, folder, run) for spec in self.callbacks])
        return made if self.allowance is None else [*made, BudgetEnd(self.allowance)]

    @property
    def allowance(self) -> Allowance | None:
        """``budget`` of ``[run]``."""
        try:
            return None if self.run.budget is None else Allowance.of(self.run.budget)
        except UserError as error:
            raise ConfigError(f"[run] {error}") from None

    def outside_theory(self, algorithm: AnyAlgorithm, problem: Problem) -> list[str]:
        """Conditions of the method's theorem that the run breaks, in sentences; none for networks."""
        if problem.model is not None or type(algorithm).__name__ not in theory.THEOREMS:
            return []
        return theory.outside(algorithm, self._constants(problem))

    def _seeded(self, options: dict[str, Any], function: Any) -> dict[str, Any]:
        return {"seed": self.seed, **options} if "seed" in inspect.signature(function).parameters else options

    def tables(self) -> Any:
        """The tables of ``[data]`` that a recipe prepares: files, or frames by the names of their sites."""
        if "databases" in self.data:
            return stored_tables(self.data)
        return data.frames(self.data["name"]) if "name" in self.data else self.data["files"]

    def make_silos(self) -> Silos:
        """Load ``[data]``, prepare it as ``[recipe]`` and deal it out as ``[partition]`` says."""
        options = {k: v for k, v in self.data.items() if k not in _TABLES}
        try:
            if self.recipe is not None:
                tables = self.tables()
                noised = self.budget if self.budget is not None and self.budget.columns else None
                silos = Recipe(**self.recipe).prepare(tables, privacy=noised, **options)
            elif "files" in self.data:
                silos = Silos.from_files(self.data["files"], **options)
            else:
                silos = data.load(self.data["name"], **self._seeded(options, data.DATASETS[self.data["name"]]))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"[data] {error}") from None
        if self.partition is None:
            return silos
        dealt = {k: v for k, v in self.partition.items() if k != "name"}
        try:
            return silos.partition(self.partition["name"], **{"seed": self.seed, **dealt})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"[partition] {error}") from None

    def make_loss(self) -> Loss:
        """The loss of a linear model."""
        try:
            return get_loss(self.problem.loss or "logistic", self.problem.loss_options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"[problem] {error}") from None

    def make_problem(self, silos: Silos | None = None, *, analysed: bool = False) -> Problem:
        """Build the problem; ``analysed`` if it is asked by an analysis, which may take one baseline for all sites."""
        if self.problem.baseline == "common" and not analysed:
            raise ConfigError(
                "[problem] baseline = 'common' is for fit, path and cv: patients of different sites are compared, so "
                "that sites' gradients do not add up to rounds"
            )
        silos = silos or self.make_silos()
        h, network = self.make_regularizer(), self._make_network(silos)
        try:
            problem = Problem(silos, regularizer=h, **network, **self.problem.settings)
            share, run = self.run.sparsity, self.run
            return problem if share is None else problem.with_zeros(share, run.structure, rounds=run.rounds)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"[problem] {error}") from None

    def make_module(self, silos: Silos) -> nn.Module:
        """The network of ``[model]`` for these data, with its start."""
        assert self.model is not None
        m, seed = self.model, self.seed if self.model.seed is None else self.model.seed
        try:
            return models.build(m.name, silos, seed=seed, outputs=m.outputs or self._numbers(silos), **m.options)
        except ValueError as error:
            raise ConfigError(f"[model] {error}") from None

    def _numbers(self, silos: Silos) -> int | None:
        """How many numbers are to be found for each sample; None where it is a class."""
        wanted, targets = needs(self.problem.loss), silos.targets
        if wanted == "classes":
            return None
        if wanted == "either" and (silos.classes is not None or not targets.is_floating_point()):
            return None
        return math.prod(targets.shape[1:])

    def _make_network(self, silos: Silos) -> dict[str, Any]:
        """What ``[model]`` gives to the problem: the network with its start, and how it is fed and evaluated."""
        if self.model is None:
            return {}
        m, module = self.model, self.make_module(silos)
        name = data.DATASETS.canonical(str(self.data.get("name")))
        pixels = silos.features.dtype == torch.uint8 and name in data.images.NORMALIZATION
        return {
            "model": module,
            "gradients": m.gradients,
            "chunk": m.chunk,
            "microbatch": m.microbatch,
            "class_axis": m.class_axis,
            "named_inputs": None if m.named_inputs is None else {k: tuple(v) for k, v in m.named_inputs.items()},
            "precision": m.precision,
            "evaluation_samples": m.evaluation_samples or None,
            "normalization": data.normalization(name) if pixels else None,
        }

    @property
    def dtype(self) -> torch.dtype:
        """What runs compute in."""
        made: torch.dtype = getattr(torch, self.run.dtype or ("float64" if self.model is None else "float32"))
        return made

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of :func:`fedcomposite.simulate`; a device that this machine lacks is refused."""
        chosen = self.run.model_dump(exclude={"sparsity", "structure", "budget"})  # for the problem, and the callbacks
        try:
            torch.empty(0, device=chosen["device"])
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"[run] device = {chosen['device']!r} cannot be used here: {reason}") from None
        if self.budget is not None:
            raise ConfigError(
                "[privacy] level = 'study' is for `fit`, `path` and `cv`; for the rounds of a run 'sample'"
            )
        made = {"dtype": self.dtype, "seed": self.seed, "aggregator": self.make_aggregator()}
        return {**chosen, **made, "privacy": self.make_privacy()}


def _term(fields: Mapping[str, Any], where: str) -> regularizers.Regularizer:
    """One regularizer, on the parameters that ``on`` names."""
    try:
        on = fields.get("on")
        if not (on is None or isinstance(on, str | list)):
            raise ConfigError(f"on = {on!r}, must be a pattern of parameter names, or a list of them")
        rest = {k: v for k, v in fields.items() if k not in ("name", "on", "strength")}
        h = regularizers.build(name_in(fields), **rest)
        h = h if on is None else h.on(on if isinstance(on, str) else tuple(on))
        return h.ramped(_schedule(fields["strength"])) if "strength" in fields else h
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError.at(where, error) from None


def _callback(spec: Mapping[str, Any], folder: Path, run: Mapping[str, str]) -> Callback:
    """One callback, whose files lie in the run's folder; trackers are told which run it is."""
    fields = {k: v for k, v in spec.items() if k != "name"}
    try:
        name = name_in(spec)
        own = {f.name: f.default for f in dataclasses.fields(CALLBACKS[name])}  # type: ignore[arg-type]
        for key in ("path", "folder"):
            if isinstance(given := fields.get(key, ""), str) and (given or own.get(key, "") is None):
                fields[key] = str(folder / given)
        if "parameters" in own:
            fields["parameters"] = {**run, **fields.get("parameters", {})}
        return build_callback(name, **fields)
    except (TypeError, ValueError) as error:
        raise ConfigError.at("[[callbacks]]", error) from None


def _schedule(given: Any) -> Schedule:
    """The schedule that a table says."""
    if not isinstance(found := schedules.read(given), Schedule):
        raise ConfigError(f'strength = {given!r}, must be a schedule: {{ schedule = "ramp", start = 0.1, ... }}')
    return found


def distinct(raw: Sequence[str]) -> list[str]:
    """Labels with numbers where they repeat.

    >>> distinct(["FedAvg", "Zhang", "FedAvg"])
    ['FedAvg (1)', 'Zhang', 'FedAvg (2)']
    """
    found = [f"{r} ({raw[: i + 1].count(r)})" if raw.count(r) > 1 else r for i, r in enumerate(raw)]
    for i, label in enumerate(found):
        number = 2
        while found[i] in found[:i]:  # somebody's own label looks like a numbered one
            found[i], number = f"{label} ({number})", number + 1
    return found


def _method(spec: Mapping[str, Any]) -> str:
    """The class name of a method, or "auto"."""
    return AUTO if spec["name"] == AUTO else algorithms.lookup(spec["name"]).__name__
