"""Tables of comparisons: the mean over seeds and its spread for every column, as CSV, LaTeX, and to read.

The spread is the sample standard deviation over seeds (divisor: seeds - 1), in a column of its own whose name ends in
``±``; it is empty for a single seed. Where a cell shows both it is "mean ± standard deviation".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

Records = Sequence[Mapping[str, Any]]
SPREAD = "±: standard deviation over seeds (divisor: seeds - 1)"
_DUST = 1e-12
"""Part of a mean below which a deviation is rounding."""


def tabulate(
    histories: Mapping[str, Sequence[Records]],
    outcomes: Mapping[str, Sequence[Mapping[str, Any]]],
    target: float = 1e-6,
    points: Mapping[str, Mapping[str, Any]] | None = None,
) -> pd.DataFrame:
    """One row per method: rounds until stationarity fell to ``target`` of its first value, and where it ended.

    Numbers are means over seeds, ``±`` columns their standard deviation. Rounds are there if every seed got there.
    ``points`` are the values of grids by label, which come first.
    """
    rows = []
    for label, runs in histories.items():
        relative = [run[-1]["stationarity"] / (run[0]["stationarity"] or 1.0) for run in runs]
        columns: dict[str, list[float | None]] = {
            f"rounds to {target:g}": [
                next((r["round"] for r in run if r["stationarity"] <= target * run[0]["stationarity"]), None)
                for run in runs
            ],
            "stationarity": list(relative),
            "objective": [run[-1]["objective"] for run in runs],
            "nonzeros": [run[-1]["nonzeros"] for run in runs],
            "MB": [(run[-1]["bytes_up"] + run[-1]["bytes_down"]) / 1e6 for run in runs],
            "seconds": [run[-1]["seconds"] for run in runs],
        }
        if all("test_accuracy" in run[-1] for run in runs):
            columns["test accuracy"] = [run[-1]["test_accuracy"] for run in runs]
        if all("epsilon" in run[-1] for run in runs):
            columns["epsilon"] = [run[-1]["epsilon"] for run in runs]
        row: dict[str, Any] = {"method": label, **dict((points or {}).get(label, {}))}
        for name, values in columns.items():
            row[name], row[f"{name} ±"] = spread(values)
        row["status"] = ", ".join(sorted({str(o["status"]) for o in outcomes[label]}))
        rows.append(row)
    table = pd.DataFrame(rows)
    said = [c for c in table.columns if c != "status" and not table[c].isna().all()]  # no column that is always empty
    return table[[*said, "status"]]


def spread(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation; none if a value is missing, and no deviation of a single one."""
    there = [float(v) for v in values if v is not None]
    if len(there) < len(values) or not there:
        return None, None
    mean = math.fsum(there) / len(there)
    if len(there) == 1:
        return mean, None
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in there) / (len(there) - 1))
    return mean, deviation if deviation > _DUST * abs(mean) else 0.0


def joined(table: pd.DataFrame, digits: int = 3) -> pd.DataFrame:
    """The table with "mean ± deviation" in one cell, and without columns that say nothing."""
    shown: dict[str, Any] = {}
    for name in table.columns:
        if str(name).endswith(" ±"):
            continue
        deviation = table.get(f"{name} ±")
        if deviation is None or not pd.api.types.is_numeric_dtype(table[name]):
            shown[name] = [cell(v, digits) for v in table[name]]
        else:
            shown[name] = [
                cell(v, digits) + (f" ± {cell(d, 2)}" if d is not None and v == v and d > 0 else "")
                for v, d in zip(table[name], deviation, strict=True)
            ]
    found = pd.DataFrame(shown)
    if "status" in found and (found["status"] == "completed").all():
        found = found.drop(columns="status")
    return found


def cell(value: Any, digits: int = 3) -> str:
    """A number in few letters; a dash where there is none."""
    if value is None or value != value:
        return "–"
    if isinstance(value, str | bool):
        return str(value)
    if isinstance(value, Mapping | list):
        from fedcomposite.experiments.grids import shown

        return shown(value)
    number = float(value)
    return f"{number:.0f}" if number == round(number) and abs(number) < 1e6 else f"{number:.{digits}g}"


def latex(table: pd.DataFrame, caption: str = "", label: str = "") -> str:
    r"""The table for a paper, with ``\toprule`` of booktabs; the spread is named in the caption.

    >>> print(latex(pd.DataFrame({"method": ["A_1"], "MB": [1.5], "MB ±": [0.25]})))
    \begin{table}
    \centering
    \caption{$\pm$: standard deviation over seeds (divisor: seeds $-$ 1).}
    \begin{tabular}{lr}
    \toprule
    method & MB \\
    \midrule
    A\_1 & $1.5 \pm 0.25$ \\
    \bottomrule
    \end{tabular}
    \end{table}
    """
    shown = joined(table)
    numeric = [_numeric(table[c]) for c in shown.columns]
    told = "$\\pm$: standard deviation over seeds (divisor: seeds $-$ 1)." if "±" in "".join(map(str, table)) else ""
    told = " ".join(filter(None, [_escape(caption), told]))
    lines = ["\\begin{table}", "\\centering", *([f"\\caption{{{told}}}"] if told else [])]
    lines += [f"\\label{{{label}}}"] if label else []
    lines += [f"\\begin{{tabular}}{{{''.join('r' if n else 'l' for n in numeric)}}}", "\\toprule"]
    lines += [" & ".join(_escape(str(c)) for c in shown.columns) + " \\\\", "\\midrule"]
    for row in shown.itertuples(index=False):
        cells = [_number(str(v)) if n else _escape(str(v)) for v, n in zip(row, numeric, strict=True)]
        cells[0] = re.sub("^  ", r"\\quad ", cells[0])  # a level below its variable
        lines.append(" & ".join(cells) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}"])


def _numeric(column: pd.Series[Any]) -> bool:
    """Whether a column has numbers alone, some of which may be missing."""
    return bool(column.map(lambda v: v is None or (isinstance(v, int | float) and not isinstance(v, bool))).all())


def _number(text: str) -> str:
    r"""A cell of numbers as TeX sets them.

    >>> _number("1.2e-05 ± 3"), _number("–"), _number("-3")
    ('$1.2 \\times 10^{-5} \\pm 3$', '--', '$-3$')
    """
    if not re.search(r"\d", text):
        return _escape(text)
    text = re.sub(r"e([+-]?)0*(\d+)", lambda m: rf" \times 10^{{{m[1].strip('+')}{m[2]}}}", text)
    return f"${text.replace('±', chr(92) + 'pm')}$"


def _escape(text: str) -> str:
    for letter in "\\&%$#_{}":
        text = text.replace(letter, {"\\": "\\textbackslash "}.get(letter, f"\\{letter}"))
    for sign, command in {"±": "$\\pm$", "–": "--", "<": "$<$", ">": "$>$", "^": "\\^{}", "~": "\\~{}"}.items():
        text = text.replace(sign, command)
    return text
