"""``[recipe]`` of an experiment: its files, or a data set's tables, prepared as it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcomposite import data
from fedcomposite._validation import check_call, suggest
from fedcomposite.data import Recipe, Silos
from fedcomposite.data.sheets import read_sheets
from fedcomposite.experiments.toml import ConfigError

_OWN = ("name", "files", "target", "test")


def check(source: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    """Refuse what can be seen to be wrong before anything is read."""
    name, files = source.get("name"), source.get("files")
    if (name is None) == (files is None):
        raise ConfigError("[data] needs either a name (of a data set) or files (one .csv or .parquet per client)")
    if name is not None and name not in data.FRAMES:
        raise ConfigError(
            f"[recipe] {name!r} has no tables to prepare{suggest(str(name), data.FRAMES)} "
            f"(there are: {', '.join(data.FRAMES)}; or give files)"
        )
    if not isinstance(source.get("target"), str):
        raise ConfigError("[data] a recipe needs a target: the name of the column to predict")
    options = {key: value for key, value in source.items() if key not in _OWN}
    try:
        check_call("[data] with a recipe", read_sheets, options, ConfigError)
        Recipe(**recipe)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[recipe] {str(error).removeprefix('recipe: ')}") from None


def prepare(source: Mapping[str, Any], recipe: Mapping[str, Any]) -> Silos:
    """The prepared silos, with what was learned."""
    options = {key: value for key, value in source.items() if key not in _OWN}
    given = data.frames(source["name"]) if "name" in source else source["files"]
    return Recipe(**recipe).prepare(given, target=source["target"], test=source.get("test"), **options)
