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
    found: list[str] = []
    if (name is None) == (files is None):
        found.append("[data] needs either a name (of a data set) or files (one .csv or .parquet per client)")
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
    options = {key: value for key, value in source.items() if key not in _OWN}
    for role in ("weight", "offset"):
        if role in options:
            del options[role]
            found.append(
                f"[data] {role} does not go with a [recipe], which is learned from plain counts; "
                f"prepare the files yourself, or leave {role} out"
            )
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


def prepare(source: Mapping[str, Any], recipe: Mapping[str, Any]) -> Silos:
    """The prepared silos, with what was learned."""
    options = {key: value for key, value in source.items() if key not in _OWN}
    given = data.frames(source["name"]) if "name" in source else source["files"]
    held = {key: source[key] for key in ("test", "seed") if key in source}
    return Recipe(**recipe).prepare(given, target=source["target"], **held, **options)
