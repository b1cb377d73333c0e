"""An experiment with grids: its settings, each a comparison, and the values that are tuned first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import tomli_w
from pydantic import ValidationError

from fedcomposite.experiments import grids, toml
from fedcomposite.experiments.checks import missing_files
from fedcomposite.experiments.config import Config, ConfigError, TrialsSection
from fedcomposite.experiments.store import RunFolder, folder_names


class Part(NamedTuple):
    """One setting of a sweep."""

    point: dict[str, Any]
    """The values of the grids outside the methods."""
    content: dict[str, Any]
    """The experiment, with the methods' grids and choices still in it."""


@dataclass(frozen=True)
class Sweep:
    """An experiment file, which may have grids and values to tune."""

    content: Mapping[str, Any]
    name: str = "config"

    @classmethod
    def read(cls, source: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a file, or one of the package's own by name; everything that the data are not needed for is checked."""
        sweep = cls(*toml.load(source, overrides))
        try:
            sweep.check()
        except ConfigError as error:
            raise ConfigError.of(missing_files(sweep.content), sweep.name, error) from error
        return sweep

    @classmethod
    def of(cls, experiment: Config | Sweep) -> Sweep:
        """The sweep of an experiment without grids, too."""
        if isinstance(experiment, Sweep):
            return experiment
        return cls(experiment.model_dump(exclude_none=True), experiment.name)

    @property
    def text(self) -> str:
        """The experiment as TOML, grids and all."""
        return tomli_w.dumps({k: v for k, v in self.content.items() if v not in ([], None) or k == "data"})

    @property
    def parts(self) -> list[Part]:
        """Its settings."""
        content, lines = grids.mend(self.content)
        if lines:
            raise ConfigError.of(lines, self.name)
        return [Part(*setting) for setting in grids.settings(content)]

    @property
    def tuned(self) -> bool:
        """Whether any value is to be chosen."""
        return next(grids.find(self.content, "tune"), None) is not None

    def check(self) -> list[Config]:
        """Every setting as an experiment, the first of each value to tune in it; all mistakes are told at once."""
        content, lines = grids.mend(self.content)
        whole = Sweep(content, self.name)
        found, mistakes = [], dict[str, list[str]]()
        for part in whole.parts:
            wrong: dict[str, None] = {}
            for look in (whole.trials, whole.final) if whole.tuned else (whole.final,):
                try:
                    made = look(part)
                    found += [made[0]] if isinstance(made, tuple) else []
                except ConfigError as error:
                    wrong |= dict.fromkeys(str(error).splitlines())
            for line in wrong:
                mistakes.setdefault(line, []).append(named(part.point))
        told = dict.fromkeys(f"{self.name}: {line}" for line in lines)
        told |= dict.fromkeys(whole._told(line, where) for line, where in mistakes.items())
        if told:
            raise ConfigError("\n".join(told))
        return found

    def _told(self, line: str, where: Sequence[str]) -> str:
        """A mistake, with the first of the settings that have it; without one if all have it."""
        if len(where) == len(self.parts):
            return line
        return f"{line} ({where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''})"

    def trials(self, part: Part) -> Config:
        """The runs of a setting that values are chosen by."""
        rules = self._tuning(part)
        specs = [trial.spec for one in self._bases(part) for trial in one if trial.tuned]
        trial = {k: v for k, v in part.content.items() if k not in (*grids.METHODS, "seeds", "trials")}
        trial |= {"algorithms": specs, "seed": rules.seed}
        if rules.rounds is not None:
            trial["run"] = {**trial["run"], "rounds": rules.rounds}
        return Config.check(trial, self.name)

    def final(self, part: Part, folder: Path | None = None) -> tuple[Config, dict[str, dict[str, Any]]]:
        """The experiment of a setting with the values that its trials in ``folder`` chose, and each label's values.

        Without a folder the first of the values to tune stand for the choice.
        """
        specs, points = [], []
        names: dict[str, str] = {}
        if self.tuned and folder is not None:
            labels = self.trials(part).labels
            names = dict(zip(labels, folder_names(labels), strict=True))
        for trials in self._bases(part):
            best = trials[0]
            if best.tuned and folder is not None:
                best = self._best(part, trials, folder, names)
            specs.append({k: v for k, v in best.spec.items() if k != "label"} | best.label)
            points.append({**best.fixed, **best.tuned})
        rest = {k: v for k, v in part.content.items() if k not in grids.METHODS}
        config = Config.check({**rest, "algorithms": specs}, self.name)
        return config, dict(zip(config.labels, points, strict=True))

    def _tuning(self, part: Part) -> TrialsSection:
        try:
            rules = TrialsSection.model_validate(part.content.get("trials", {}))
        except ValidationError:
            rules = TrialsSection()  # the check of the sections says what is wrong
        seeds = part.content.get("seeds") or [part.content.get("seed", 0)]
        if rules.seed in seeds:
            raise ConfigError(f"{self.name}: [trials] seed = {rules.seed} is also reported; choose with another seed")
        return rules

    def _bases(self, part: Part) -> list[list[Trial]]:
        """For each method, grids written out, the combinations of the values to tune."""
        return [
            [
                Trial(
                    trial.spec,
                    {"label": plain.spec["label"]} if "label" in plain.spec else {},
                    plain.point,
                    trial.point,
                )
                for trial in grids.variants({"algorithms": [plain.spec]}, "tune")
            ]
            for plain in grids.variants(part.content)
        ]

    def _best(self, part: Part, trials: Sequence[Trial], folder: Path, names: Mapping[str, str]) -> Trial:
        rules = self._tuning(part)
        highest = "accuracy" in rules.criterion or rules.criterion in ("auc", "r2")

        def score(trial: Trial) -> float:
            kept = RunFolder(folder / names[str(trial.spec["label"])] / f"seed-{rules.seed}")
            last = kept.history()[-1]
            if rules.criterion not in last:
                known = ", ".join(last)
                raise ConfigError(
                    f"[trials] criterion = {rules.criterion!r} is not in the records (they have: {known})"
                )
            value = float(last[rules.criterion])
            lost = kept.summary()["status"] == "diverged" or not math.isfinite(value)
            return math.inf if lost else -value if highest else value

        return min(trials, key=score)


class Trial(NamedTuple):
    """A combination of the values to tune of one method."""

    spec: dict[str, Any]
    label: dict[str, str]
    """The label of the method without them, if it has one of its own."""
    fixed: dict[str, Any]
    """The values of its grids."""
    tuned: dict[str, Any]
    """The values to tune; empty if there are none."""


def named(point: Mapping[str, Any]) -> str:
    """A setting in a few words.

    >>> named({"lam": 0.1, "data": {"name": "a9a"}})
    'lam=0.1, data=a9a'
    """
    return ", ".join(f"{k}={grids.shown(v)}" for k, v in point.items())
