"""``[recipe]`` of an experiment: its files, or a data set's tables, prepared as it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcomposite import data
from fedcomposite._validation import check_call, suggest
from fedcomposite.data import Recipe, Silos
from fedcomposite.data.sheets import read_sheets
from fedcomposite.experiments.toml import ConfigError

_OWN = ("name", "files", "target", "test", "seed")


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
    test, seed = source.get("test", 0.5), source.get("seed", 0)
    if isinstance(test, bool) or not (isinstance(test, str) or (isinstance(test, int | float) and 0 < test < 1)):
        raise ConfigError(f"[data] test = {test}, must be a file, or a share of every site's rows between 0 and 1")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"[data] seed = {seed}, must be a whole number from 0 on")
    options = {key: value for key, value in source.items() if key not in _OWN}
    for role in ("weight", "offset"):
        if role in options:
            raise ConfigError(
                f"[data] {role} does not go with a [recipe], which is learned from plain counts; "
                f"prepare the files yourself, or leave {role} out"
            )
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
    held = {key: source[key] for key in ("test", "seed") if key in source}
    return Recipe(**recipe).prepare(given, target=source["target"], **held, **options)
