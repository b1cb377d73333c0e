"""The page, ``report.html`` filled in: one file with its pictures and script inside; and the tables as files."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w

from fedcomposite._validation import refuse, wrong_arguments
from fedcomposite.experiments.tables import latex
from fedcomposite.files import write_atomic
from fedcomposite.reports.figures import figures
from fedcomposite.reports.reading import Found, read_run
from fedcomposite.reports.words import notes, studied

_AFTER = {
    "Table 1": [],
    "Data": [],
    "Coefficients": ["Coefficients with 95 % confidence intervals", "What columns do"],
    "Coefficients of the sites": [],
    "Quality": ["ROC curves", "Calibration", "Decision curve"],
    "Test": ["ROC curves on the test part", "Calibration on the test part", "Decision curve on the test part"],
    "Sites": ["Coefficients by site"],
    "Survival": ["Survival curves"],
    "Proportionality": [],
    "Path": ["Coefficients along the path", "Cross-validation", "Convergence"],
}


def write_report(run: str | Path, folder: str | Path | None = None) -> list[Path]:
    """Write ``report.html``, ``report.md``, ``report.tex`` and a ``report-TABLE.csv`` each; returns their paths."""
    refuse(wrong_arguments(write_report, locals()))
    found, place = read_run(run), Path(folder or run)
    place.mkdir(parents=True, exist_ok=True)
    texts = {"report.html": html(found), "report.md": markdown(found), "report.tex": tex(found)}
    for name, table in found.tables.items():
        why = found.untold(name)
        noted = table.assign(note=[why.get(site, "") for site in table["site"]]) if why else table
        texts[f"report-{name.lower().replace(' ', '-')}.csv"] = noted.to_csv(index=False)
    for name, text in texts.items():
        write_atomic(place / name, text.encode())
    return [place / name for name in texts]


def html(found: Found) -> str:
    """A report as one page that opens without a network."""
    from jinja2 import Environment, PackageLoader

    drawn = figures(found)
    sections = [_section(found, name, table, drawn) for name, table in found.tables.items()]
    good = found.summary.get("status") in ("converged", "completed")
    page = Environment(loader=PackageLoader(__package__, ""), keep_trailing_newline=True, autoescape=True)
    template = page.get_template("report.html")
    return template.render(
        found=found,
        good=good,
        facts=facts(found),
        sections=sections,
        curves=drawn,
        config=_configuration(found.config),
    )


def _section(found: Found, name: str, table: pd.DataFrame, drawn: dict[str, str]) -> dict[str, Any]:
    """What the page tells of a table: itself, its pictures, which are taken from ``drawn``, and notes."""
    numeric = [pd.api.types.is_numeric_dtype(table[c]) for c in table.columns]
    return {
        "name": name,
        "columns": [(str(c), ' class="n"' if n else "") for c, n in zip(table.columns, numeric, strict=True)],
        "rows": _rows(table, "\u2003"),
        "folded": name == "Path" and len(table) > 25,
        "figures": {caption: drawn.pop(caption) for caption in _AFTER[name] if caption in drawn},
        "untold": found.untold(name),
        "note": notes(found).get(name),
        "flags": found.flags if name == "Data" else [],
    }


def facts(found: Found) -> dict[str, str]:
    """What was studied and how the model was chosen; communication, certificate and versions; in words."""
    made: dict[str, Any] = {"status": found.summary.get("status"), **studied(found)}
    one = found.analysis.get("communication")
    if one is not None:
        made["sites"] = ", ".join(found.analysis["sites"])
        made["exchanges"] = one["exchanges"]
        made["sent"] = f"{one['bytes_up'] / 1e6:.3g} MB by the sites, {one['bytes_down'] / 1e6:.3g} MB to them"
        if found.analysis.get("seconds") is not None:
            made["time"] = f"{found.analysis['seconds']:.1f} s"
    elif found.history:
        last = found.history[-1]
        made["rounds"] = last.get("round")
        if "bytes_up" in last:
            made["sent"] = f"{last['bytes_up'] / 1e6:.3g} MB by the sites, {last['bytes_down'] / 1e6:.3g} MB to them"
    certificate = found.analysis.get("certificate") or found.summary.get("certificate")
    if certificate is not None:
        made["certificate"] = f"{certificate['kind']} {certificate['value']:.2e}"
    made["finished"] = found.summary.get("finished")
    made["versions"] = ", ".join(f"{k} {v}" for k, v in found.summary.get("versions", {}).items())
    return {k: str(v) for k, v in made.items() if v not in (None, "")}


def cells(column: Sequence[Any]) -> list[str]:
    """A column's values, numbers with as many decimals each: four, or those of four digits and of two of the smallest.

    A zero is exact, and shown as such.

    Examples
    --------
    >>> cells([0.71, 0.7183, None, 0.0]), cells([12.0, 3.0]), cells([0.25, 3e-12])
    (['0.7100', '0.7183', '–', '0'], ['12', '3'], ['0.25', '3e-12'])
    """
    sizes = [abs(v) for v in column if isinstance(v, float) and math.isfinite(v) and v]
    whole = all(v == round(v) and v < 1e6 for v in sizes)
    ends = [math.floor(math.log10(v)) for v in (max(sizes), min(sizes))] if sizes else [0, 0]
    decimals = 0 if whole else max(4 - max(ends[0], 0), 3 - ends[0], 1 - ends[1], 0)

    def shown(value: Any) -> str:
        if value is None or value != value:
            return "–"
        if not isinstance(value, float):
            return str(value)
        return "0" if not value else f"{value:.{decimals}f}" if decimals < 7 else f"{value:.4g}"

    return [shown(v) for v in column]


def _rows(table: pd.DataFrame, indent: str) -> list[tuple[str, ...]]:
    """The printed cells; a level below its variable, as Table 1 has it, begins with ``indent``."""
    rows = zip(*(cells(table.iloc[:, i].tolist()) for i in range(table.shape[1])), strict=True)
    return [(re.sub("^  ", indent, first), *rest) for first, *rest in rows]


def _configuration(text: str) -> str:
    """The experiment, texts of several lines, such as a query, on as many."""
    try:
        return tomli_w.dumps(tomllib.loads(text), multiline_strings=True)
    except ValueError:
        return text


def markdown(found: Found) -> str:
    """The facts and the tables as Markdown."""
    parts = [f"# {found.name}", str(found.summary.get("message", ""))]
    parts.append("\n".join(f"* {k}: {v}" for k, v in facts(found).items()))
    for name, table in found.tables.items():
        rows = [[v.replace("|", "\\|") for v in row] for row in _rows(table, "&emsp;")]
        lines = [[str(c).replace("|", "\\|") for c in table.columns], ["---"] * len(table.columns), *rows]
        parts += [f"## {name}", "\n".join("| " + " | ".join(line) + " |" for line in lines)]
        parts += [f"{site}: {why}" for site, why in found.untold(name).items()]
        parts += [note] if (note := notes(found).get(name)) else []
        parts += [f"* {flag}" for flag in found.flags] if name == "Data" else []
    return "\n\n".join(part for part in parts if part) + "\n"


def tex(found: Found) -> str:
    """The tables as LaTeX, to be put into a paper, their notes in the captions; the path's is left to the CSV."""
    made, told = [], notes(found)
    for name, table in found.tables.items():
        if name != "Path":
            missing = [f"{site}: {why}." for site, why in found.untold(name).items()]
            caption = " ".join(filter(None, [f"{name} ({found.name}).", *missing, told.get(name)]))
            made.append(latex(table, caption, f"tab:{re.sub('[^a-z0-9]', '-', name.lower())}"))
    return "\n".join(made)
