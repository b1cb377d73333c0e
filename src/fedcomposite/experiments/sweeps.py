"""An experiment with grids: its settings, each a comparison, and the values that are tuned first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import tomli_w
from pydantic import ValidationError

from fedcomposite.experiments import grids, toml
from fedcomposite.experiments.checks import missing_files
from fedcomposite.experiments.config import Config, ConfigError, TrialsSection, distinct
from fedcomposite.experiments.tuning import Point, Search, search


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
        """Its settings: one for each combination of the values in its grids."""
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
        """The runs of a setting that values are chosen by, as far as they are known before any of them is done."""
        searched = self.searches(part)
        asked = [(place, point) for place, one in searched.items() for point in next(one)]
        return Config.check(self.trial_content(part, asked), self.name)

    def searches(self, part: Part) -> dict[int, Search]:
        """The search of each method that has values to choose, by its place among the methods."""
        rules, bases = self.tuning(part), self._bases(part)
        return {
            i: search(grids.tunable(b.spec), rules.extensions) for i, b in enumerate(bases) if grids.tunable(b.spec)
        }

    def trial_content(self, part: Part, asked: Sequence[tuple[int, Point]]) -> dict[str, Any]:
        """The experiment that tries points of some methods, which are given by their places."""
        rules, bases = self.tuning(part), self._bases(part)
        names = self.names(part)
        specs = [grids.labelled(grids.with_values(bases[i].spec, p), names[i], p) for i, p in asked]
        content = {k: v for k, v in part.content.items() if k not in (*grids.METHODS, "seeds", "trials")}
        content |= {"algorithms": specs, "seed": rules.seed}
        if rules.rounds is not None:
            content["run"] = {**content["run"], "rounds": rules.rounds}
        return content

    def names(self, part: Part) -> list[str]:
        """What the methods of a setting are called, each differently."""
        return distinct([str(base.spec.get("label", base.spec.get("name"))) for base in self._bases(part)])

    def final(self, part: Part, chosen: Mapping[int, Point] | None = None) -> tuple[Config, dict[str, dict[str, Any]]]:
        """The experiment of a setting with the values that were chosen for each method, and each label's values.

        The first of the values to tune stand for a choice that is not there.
        """
        specs, points = [], []
        for i, base in enumerate(self._bases(part)):
            grid = grids.tunable(base.spec)
            point = (chosen or {}).get(i, {name: values[0] for name, values in grid.items()})
            specs.append(grids.with_values(base.spec, point))
            points.append({**base.point, **point})
        rest = {k: v for k, v in part.content.items() if k not in grids.METHODS}
        config = Config.check({**rest, "algorithms": specs}, self.name)
        return config, dict(zip(config.labels, points, strict=True))

    def tuning(self, part: Part) -> TrialsSection:
        """How values are chosen."""
        try:
            rules = TrialsSection.model_validate(part.content.get("trials", {}))
        except ValidationError:
            rules = TrialsSection()  # the check of the sections says what is wrong
        seeds = part.content.get("seeds") or [part.content.get("seed", 0)]
        if rules.seed in seeds:
            raise ConfigError(f"{self.name}: [trials] seed = {rules.seed} is also reported; choose with another seed")
        return rules

    def _bases(self, part: Part) -> list[grids.Variant]:
        """The methods of a setting, grids written out; values to tune are still in them."""
        return grids.variants(part.content)


def named(point: Mapping[str, Any]) -> str:
    """A setting in a few words.

    >>> named({"lam": 0.1, "data": {"name": "a9a"}})
    'lam=0.1, data=a9a'
    """
    return ", ".join(f"{k}={grids.shown(v)}" for k, v in point.items())
