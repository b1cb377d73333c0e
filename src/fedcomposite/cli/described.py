"""The page that ``data describe`` prints about tables: at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedcomposite import data
from fedcomposite.cli.console import out, print_json, rows
from fedcomposite.data import Recipe
from fedcomposite.data.queries import Rules
from fedcomposite.experiments import Config, ConfigError

_WIDTH = 80
_NUMBERS = ("mean", "sd", "5 %", "25 %", "50 %", "75 %", "95 %")


def show_tables(
    files: Sequence[str] | None,
    experiment: Config | None,
    target: str | None,
    min_count: int | None,
    as_json: bool,
) -> None:
    """Describe files, or the tables of an experiment, and print it."""
    source = experiment.data if experiment is not None else {}
    recipe = Recipe(**(experiment.recipe or {})) if experiment is not None else Recipe()
    given: Any = files
    if files is None:
        given = data.frames(source["name"]) if "name" in source else source["files"]
    if min_count is not None and min_count < 1:
        raise ConfigError(f"--min-count {min_count}: must be 1 or more")
    style = {k: v for k, v in source.items() if k in ("separator", "decimal", "encoding", "thousands", "missing")}
    found = data.describe(
        given,
        target=target or source.get("target"),
        recipe=recipe,
        rules=Rules(min_count or recipe.min_count),
        **({} if isinstance(given, dict) else style),
    )
    if as_json:
        print_json(rows(found))
        return
    for line in page(found):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def page(found: pd.DataFrame) -> list[str]:
    """The description as lines: a block per feature, then all flags."""
    sites = list(dict.fromkeys(found["site"]))
    wide = max(8, min(14, max(map(len, sites)) + 2))
    numbers = "".join(f"{name:>8}" for name in _NUMBERS)
    lines = [f"{'':{wide}}{'n':>5}{'miss':>5}{numbers}"]
    flags = []
    for feature, group in found.groupby("feature", sort=False):
        lines.append(str(feature))
        for row in group.to_dict("records"):
            lines += _row(row, wide)
            if row["flags"]:
                flags.append(f"{feature}, {row['site']}: {row['flags']}")
    lines.append("")
    lines.append(f"{len(flags)} thing(s) to look at" + (":" if flags else ""))
    for flag in flags:
        lines += textwrap.wrap(flag, _WIDTH, initial_indent="! ", subsequent_indent="    ")
    return lines


def _row(row: Mapping[Any, Any], wide: int) -> list[str]:
    mark = "!" if row["flags"] else " "
    start = f"{mark}{row['site'][: wide - 1]:{wide - 1}}{row['n']:>5}{row['missing']:>5}"
    if row["levels"]:
        return textwrap.wrap(
            start + "  " + row["levels"], _WIDTH, subsequent_indent=" " * (wide + 12), drop_whitespace=True
        )
    if row["n"] == 0 or row["kind"] != "number":
        return [f"{start}  {row['kind']}"]
    return [start + "".join(f"{_short(row[name]):>8}" for name in _NUMBERS)]


def _short(value: float) -> str:
    if value != value:
        return "–"
    text = f"{value:.4g}"
    return text if len(text) <= 7 else f"{value:.1e}"
