"""Experiment files: TOML, validated as a whole before any work starts."""

from __future__ import annotations

import inspect
import tomllib
import typing
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcomposite import algorithms, data, models, regularizers, theory
from fedcomposite._validation import suggest
from fedcomposite.algorithms import AnyAlgorithm, ProxNewton
from fedcomposite.choice import choose
from fedcomposite.data import Silos
from fedcomposite.problems import Problem


class ConfigError(ValueError):
    """A configuration that cannot be run; the message is one line and names the place."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ProblemSection(_Section):
    """``[problem]``: the loss and how clients are weighted."""

    loss: str | None = None
    loss_options: dict[str, Any] = {}
    bias: bool = False
    weights: Literal["uniform", "samples"] = "uniform"


class ModelSection(_Section):
    """``[model]``: a network of :mod:`fedcomposite.models` instead of a linear model, and how it is evaluated."""

    name: str
    options: dict[str, Any] = {}
    seed: int | None = None
    gradients: Literal["auto", "vmap", "loop"] = "auto"
    chunk: int | None = Field(default=None, ge=1)
    precision: Literal["full", "bf16"] = "full"
    evaluation_samples: int = Field(default=2000, ge=0)
    """Training samples used for loss, gradient and accuracy, and the most test samples; 0 takes all."""


class RunSection(_Section):
    """``[run]``: the settings of :func:`fedcomposite.simulate`."""

    rounds: int = Field(ge=0)
    batch_size: int | None = Field(default=None, ge=1)
    sampling: Literal["replacement", "epoch"] = "replacement"
    participation: float = Field(default=1.0, gt=0, le=1)
    replace: bool = False
    dtype: Literal["float32", "float64"] = "float64"
    device: str = "cpu"
    evaluate_every: int = Field(default=1, ge=1)
    tolerance: float | None = Field(default=None, gt=0)
    stationarity_step: float | None = Field(default=None, gt=0)
    backend: Literal["stacked", "loop"] = "stacked"
    mode: Literal["auto", "eager", "record", "compile"] = "auto"
    checkpoint_every: int = Field(default=50, ge=0)


class Config(_Section):
    """A whole experiment; one ``[algorithm]`` to run, or several ``[[algorithms]]`` to compare.

    ``seed`` is used wherever a section does not set its own; ``seeds`` repeats a comparison for each.
    """

    name: str = "run"
    seed: int = Field(default=0, ge=0)
    seeds: list[int] = []
    data: dict[str, Any]
    partition: dict[str, Any] | None = None
    problem: ProblemSection = ProblemSection()
    model: ModelSection | None = None
    regularizer: dict[str, Any] = {"name": "Zero"}
    algorithm: dict[str, Any] | None = None
    algorithms: list[dict[str, Any]] = []
    run: RunSection

    # -- reading and writing ----------------------------------------------------------------------------------------

    @classmethod
    def read(cls, source: str | Path, overrides: Sequence[str] = ()) -> Config:
        """Read a file, or one of the package's own by name, and apply ``section.field=value`` overrides."""
        path = locate(source)
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
        for override in overrides:
            _override(content, override)
        base = path.parent.absolute()  # the resolved file lies elsewhere
        if isinstance(content.get("data"), dict) and isinstance(content["data"].get("files"), list):
            content["data"]["files"] = [str(base / str(f)) for f in content["data"]["files"]]
        return cls.check(content, path.name)

    @classmethod
    def check(cls, content: Mapping[str, Any], where: str = "config") -> Config:
        """Validate parsed content; every mistake is one line that says where it is."""
        try:
            config = cls.model_validate(dict(content))
        except ValidationError as error:
            raise ConfigError(f"{where}: {_explain(error, cls)}") from None
        try:
            config.make_regularizer()
            for spec in config.specs:
                config.make_algorithm(spec, None)
            config._check_data()
            config._check_model()
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        return config

    def write(self, path: Path) -> None:
        """Write the resolved experiment."""
        content = self.model_dump(exclude_none=True)
        content = {k: v for k, v in content.items() if v != [] or k == "data"}
        path.write_text(tomli_w.dumps(content), encoding="utf-8")

    def only(self, spec: dict[str, Any], seed: int) -> Config:
        """The single run of one method and one seed."""
        return self.model_copy(update={"algorithm": spec, "algorithms": [], "seed": seed, "seeds": []})

    # -- building ---------------------------------------------------------------------------------------------------

    @property
    def specs(self) -> list[dict[str, Any]]:
        """The methods to run, as written."""
        return self.algorithms or ([self.algorithm] if self.algorithm else [])

    @property
    def labels(self) -> list[str]:
        """A distinct name per method: its ``label``, or its class name, numbered when it repeats."""
        names = [s["name"] if s["name"] == "auto" else algorithms.lookup(s["name"]).__name__ for s in self.specs]
        raw = [str(s.get("label", name)) for s, name in zip(self.specs, names, strict=True)]
        return [f"{r} ({raw[: i + 1].count(r)})" if raw.count(r) > 1 else r for i, r in enumerate(raw)]

    def make_regularizer(self) -> regularizers.Regularizer:
        """Build ``[regularizer]``; ``on = "*.weight"`` restricts it to parameters of those names."""
        fields = dict(self.regularizer)
        try:
            if "name" not in fields:
                raise ConfigError("needs a name")
            on = fields.pop("on", None)
            h = regularizers.build(fields.pop("name"), **fields)
            return h if on is None else h.on(on if isinstance(on, str) else tuple(on))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"[regularizer] {error}") from None

    def make_algorithm(self, spec: Mapping[str, Any], problem: Problem | None) -> AnyAlgorithm:
        """Build a method from its table.

        With ``steps = "auto"`` or ``"theory"`` the fields that are left out come from the problem's measured constants:
        practical ones (:func:`fedcomposite.theory.auto`), or the largest that the method's theorem allows. Without a
        problem only names and values are checked. ``name = "auto"`` leaves the method itself to
        :func:`fedcomposite.choice.choose`.
        """
        fields = {k: v for k, v in spec.items() if k not in ("name", "label", "steps")}
        try:
            if "name" not in spec:
                raise ConfigError("needs a name")
            if spec["name"] == "auto":
                if extra := sorted(set(fields) - {"local_steps"}):
                    raise ConfigError(f"name = 'auto' chooses {extra[0]!r} itself; it takes local_steps only")
                share = self.run.participation
                return ProxNewton() if problem is None else choose(problem, participation=share, **fields).algorithm
            cls, steps = algorithms.lookup(spec["name"]), spec.get("steps")
            if steps is None:
                return algorithms.build(cls.__name__, **fields)
            if steps not in ("auto", "theory"):
                raise ConfigError(f"steps = {steps!r}, must be 'auto' or 'theory' (or leave it out and give the steps)")
            known = (
                self._constants(problem) if problem is not None else theory.Constants(L=1.0, mu=0.01, G=1.0, rounds=1)
            )
            local_steps = fields.get("local_steps", 10)
            if steps == "theory":
                chosen = theory.steps(cls.__name__, known, local_steps)
            else:
                chosen = vars(theory.auto(cls.__name__, known, local_steps))
            # a field that is given replaces the chosen one, and what excludes it
            return algorithms.build(cls.__name__, **{**chosen, **fields})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"[algorithm] {error}") from None

    def _constants(self, problem: Problem) -> theory.Constants:
        if problem.model is not None:
            raise ConfigError("the smoothness of a network is unknown; give the steps yourself")
        return theory.constants(
            problem, batch=self.run.batch_size, rounds=self.run.rounds, participation=self.run.participation
        )

    def outside_theory(self, algorithm: AnyAlgorithm, problem: Problem) -> list[str]:
        """Conditions of the method's theorem that the run breaks, in sentences; none for networks."""
        if problem.model is not None or type(algorithm).__name__ not in theory.THEOREMS:
            return []
        return theory.outside(algorithm, self._constants(problem))

    def _seeded(self, options: dict[str, Any], function: Any) -> dict[str, Any]:
        return {"seed": self.seed, **options} if "seed" in inspect.signature(function).parameters else options

    def _check_data(self) -> None:
        """Refuse unknown names before anything is read."""
        name, files = self.data.get("name"), self.data.get("files")
        if (name is None) == (files is None):
            raise ConfigError("[data] needs either a name (of a data set) or files (one .csv or .npz per client)")
        if name is not None and name not in data.DATASETS:
            raise ConfigError(
                f"[data] unknown data set {name!r}{suggest(str(name), data.DATASETS)} "
                f"(known: {', '.join(sorted(data.DATASETS))})"
            )
        if files is not None and "target" not in self.data:
            raise ConfigError("[data] files need a target: the name of the column to predict")
        if self.partition is not None:
            for key in ("name", "clients"):
                if key not in self.partition:
                    raise ConfigError(f"[partition] needs {key}")
            if self.partition["name"] not in data.PARTITIONERS:
                known = ", ".join(data.PARTITIONERS)
                hint = suggest(str(self.partition["name"]), data.PARTITIONERS)
                raise ConfigError(f"[partition] unknown name {self.partition['name']!r}{hint} (known: {known})")

    def _check_model(self) -> None:
        """Refuse names and options that make no network, before any data are read."""
        if self.model is None:
            return
        try:
            with torch.device("meta"):  # nothing is allocated or drawn
                models.build(self.model.name, "mnist", **self.model.options)
        except ValueError as error:
            raise ConfigError(f"[model] {error}") from None
        except (TypeError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"[model] options = {self.model.options} do not fit {self.model.name!r}: {reason}"
            ) from None

    def make_silos(self) -> Silos:
        """Load ``[data]`` and deal it out as ``[partition]`` says."""
        options = {k: v for k, v in self.data.items() if k not in ("name", "files")}
        try:
            if "files" in self.data:
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

    def make_problem(self, silos: Silos | None = None) -> Problem:
        """Build the problem."""
        silos = silos or self.make_silos()
        h, network = self.make_regularizer(), self._make_network(silos)
        try:
            return Problem(silos, regularizer=h, **network, **self.problem.model_dump())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"[problem] {error}") from None

    def _make_network(self, silos: Silos) -> dict[str, Any]:
        """What ``[model]`` gives to the problem: the network with its start, and how it is fed and evaluated."""
        if self.model is None:
            return {}
        m, seed = self.model, self.seed if self.model.seed is None else self.model.seed
        try:
            module = models.build(m.name, silos, seed=seed, **m.options)
        except ValueError as error:
            raise ConfigError(f"[model] {error}") from None
        images = silos.features.dtype == torch.uint8 and "name" in self.data
        return {
            "model": module,
            "gradients": m.gradients,
            "chunk": m.chunk,
            "precision": m.precision,
            "evaluation_samples": m.evaluation_samples or None,
            "normalization": data.normalization(self.data["name"]) if images else None,
        }

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of :func:`fedcomposite.simulate`; a device that this machine lacks is refused."""
        chosen = self.run.model_dump()
        try:
            torch.empty(0, device=chosen["device"])
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"[run] device = {chosen['device']!r} cannot be used here: {reason}") from None
        return {**chosen, "dtype": getattr(torch, chosen["dtype"]), "seed": self.seed}


def shipped() -> dict[str, str]:
    """The package's own experiments: name and first comment line."""
    folder = resources.files("fedcomposite.experiments") / "configs"
    found = {
        p.name.removesuffix(".toml"): p.read_text(encoding="utf-8")
        for p in folder.iterdir()
        if p.name.endswith(".toml")
    }
    return {k: found[k].splitlines()[0].lstrip("# ") for k in sorted(found)}


def locate(source: str | Path) -> Path:
    """Find a config file by path, or by the name of a shipped one."""
    path = Path(source)
    if path.is_file():
        return path
    own = Path(str(resources.files("fedcomposite.experiments"))) / "configs" / f"{source}.toml"
    if path.suffix == "" and own.is_file():
        return own
    hint = suggest(str(source), shipped())
    raise ConfigError(
        f"{source}: no such file, and no shipped experiment of that name{hint} (shipped: {', '.join(shipped())})"
    )


def _override(content: dict[str, Any], override: str) -> None:
    """Apply ``section.field=value``; the value is TOML, or a bare string."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override}: expected section.field=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    place: Any = content
    *path, last = key.strip().split(".")
    for part in path:
        if isinstance(place, list):
            if not part.isdigit() or int(part) >= len(place):
                raise ConfigError(f"--set {override}: {part!r} is not a position in a list of {len(place)}")
            place = place[int(part)]
        else:
            place = place.setdefault(part, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"--set {override}: {part!r} is not a section")
    if isinstance(place, list):
        raise ConfigError(
            f"--set {override}: name a field of one of the {len(place)} entries, as in algorithms.0.step=0.1"
        )
    place[last] = value


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of a validation, in one line."""
    first = error.errors()[0]
    *sections, last = [str(p) for p in first["loc"]] or ["?"]
    where = f"[{'.'.join(sections)}] {last}" if sections else last
    if first["type"] == "extra_forbidden":
        known: Any = model
        for part in sections:
            hint = known.model_fields[part].annotation
            known = next((a for a in typing.get_args(hint) if isinstance(a, type) and issubclass(a, BaseModel)), hint)
        names = list(known.model_fields)
        return f"{where} is not a known field{suggest(last, names)} (known: {', '.join(names)})"
    if first["type"] == "missing":
        return f"{where} is missing"
    return f"{where} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
