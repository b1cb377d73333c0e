"""What ``describe`` prints about tables: a page at most 80 columns wide, or Table 1 of a paper."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from fedcomposite import data
from fedcomposite._version import SCHEMA
from fedcomposite.analysis.table_one import TableOne
from fedcomposite.cli.console import out, print_frame, print_json, print_notes, rows, written
from fedcomposite.data import Recipe
from fedcomposite.data.queries import Rules
from fedcomposite.experiments import Config, ConfigError
from fedcomposite.experiments.config import TableOneSection

_WIDTH = 80
_WRITTEN = (".tex", ".md", ".html", ".csv")
AsTableOne = Annotated[
    bool, typer.Option("--table-one", help="Who was studied, as the first table of a paper: also [table_one] in TOML.")
]
By = Annotated[str | None, typer.Option(help="Of --table-one: the column whose levels are compared, not the sites.")]
Columns = Annotated[str | None, typer.Option(help="Of --table-one: the variables, separated by commas.")]
Median = Annotated[str | None, typer.Option(help="Of --table-one: numbers shown as median [quartiles], by commas.")]
TableFile = Annotated[
    Path | None, typer.Option("--out", help="Of --table-one: a .tex, .md, .html or .csv file to write.")
]
_NUMBERS = ("mean", "sd", "5 %", "25 %", "50 %", "75 %", "95 %")


def wished(
    as_table: bool,
    section: TableOneSection | None,
    by: str | None,
    columns: str | None,
    median: str | None,
    destination: Path | None,
) -> TableOneSection | None:
    """What Table 1 is to show, by an experiment and these options; None if it is not wanted."""
    given = {"by": by, "columns": columns, "median": median, "out": destination}
    if not as_table:
        for option, value in given.items():
            if value is not None:
                raise ConfigError(f"--{option} is for --table-one")
        return None
    if destination is not None and destination.suffix.casefold() not in _WRITTEN:
        raise ConfigError(f"--out {destination}: a table is written as {', '.join(_WRITTEN)}")
    lists = {"columns": columns, "median": median}
    update = {key: [name.strip() for name in text.split(",")] for key, text in lists.items() if text is not None}
    return (section or TableOneSection()).model_copy(update=update | ({} if by is None else {"by": by}))


def show_table_one(made: TableOne, as_json: bool, destination: Path | None) -> None:
    """Print Table 1, and write it."""
    if destination is not None:
        made.write(destination)
    if as_json:
        print_json({"schema": SCHEMA, **made.content()})
        return
    print_frame(made.table, drop=("test",))
    print_notes({f"note {i}": note for i, note in enumerate(made.notes, 1)})
    if destination is not None:
        written(destination)


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
        assert experiment is not None
        given = experiment.tables()
    if min_count is not None and min_count < 1:
        raise ConfigError(f"--min-count {min_count}: must be 1 or more")
    style = {k: v for k, v in source.items() if k in ("separator", "decimal", "encoding", "thousands", "missing")}
    found = data.describe(
        given,
        target=target or source.get("target"),
        recipe=recipe,
        rules=None if min_count is None else Rules(min_count),
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
