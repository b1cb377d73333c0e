"""The page: one file of HTML with its pictures and its few lines of script inside; and the tables as files."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from fedcomposite._validation import refuse, wrong_arguments
from fedcomposite.experiments.tables import latex
from fedcomposite.files import write_atomic
from fedcomposite.reports.figures import figures
from fedcomposite.reports.reading import Found, read_run
from fedcomposite.reports.words import notes, studied

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1000px;margin:2em auto;padding:0 1.2em}
h1{font-size:1.6em;margin-bottom:.2em}h2{font-size:1.2em;border-bottom:1px solid #ddd;margin-top:2em}
table{border-collapse:collapse;font-size:13px;margin:.8em 0}th,td{padding:.25em .7em;text-align:left;vertical-align:top}
th,td{border-bottom:1px solid #eee}thead th{border-bottom:2px solid #888}td.n,th.n{text-align:right;white-space:nowrap}
.wide,figure{overflow-x:auto}figure{margin:1em 0;display:inline-block;vertical-align:top;max-width:100%}
figcaption{font-size:13px;color:#555}
svg{max-width:100%;height:auto}pre{background:#f6f6f6;padding:1em;overflow-x:auto;font-size:12px}
.message{background:#eef5fb;border-left:4px solid #0072B2;padding:.6em 1em}.bad{background:#fdeee7;border-color:#D55E00}
.flags li{margin:.2em 0}#tip{position:fixed;display:none;background:#222;color:#fff;padding:.2em .6em;font-size:12px;
border-radius:3px;pointer-events:none}.faded{opacity:.15}
@media screen and (max-width:700px){svg[width="760"]{max-width:none;width:640px}.wide td{min-width:5em}}
@media print{body{max-width:none;margin:0;padding:0;font-size:11px}table{font-size:9.5px}th,td{padding:.2em .5em}
svg[width="420"]{width:320px}svg[width="760"]{width:600px}figure,table,tr{break-inside:avoid}h2{break-after:avoid}
.wide,figure{overflow:visible}figcaption{font-size:11px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:9px}#tip{display:none!important}.faded{opacity:1}}
"""
_SCRIPT = """
const tip=document.getElementById('tip'),traces=[...document.querySelectorAll('polyline.trace')];
for(const t of traces){t.style.strokeWidth=2.4;
t.addEventListener('mousemove',e=>{tip.textContent=t.dataset.name;tip.style.display='block';
tip.style.left=e.clientX+14+'px';tip.style.top=e.clientY+10+'px';
for(const o of traces)o.classList.toggle('faded',o!==t)});
t.addEventListener('mouseleave',()=>{tip.style.display='none';for(const o of traces)o.classList.remove('faded')})}
"""
_AFTER = {
    "Data": [],
    "Coefficients": ["Coefficients with 95 % confidence intervals"],
    "Quality": ["ROC curves", "Calibration", "Decision curve"],
    "Test": ["ROC curves on the test part", "Calibration on the test part", "Decision curve on the test part"],
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
        texts[f"report-{name.lower()}.csv"] = noted.to_csv(index=False)
    for name, text in texts.items():
        write_atomic(place / name, text.encode())
    return [place / name for name in texts]


def html(found: Found) -> str:
    """The page."""
    drawn = figures(found)
    good = found.summary.get("status") in ("converged", "completed")
    body = [
        f"<h1>{escape(found.name)}</h1>",
        f'<p class="message{"" if good else " bad"}">{escape(str(found.summary.get("message", "")))}</p>',
        _facts(found),
    ]
    for name, table in found.tables.items():
        body.append(f"<h2>{escape(name)}</h2>")
        body += [_figure(caption, drawn.pop(caption)) for caption in _AFTER[name] if caption in drawn]
        folded = name == "Path" and len(table) > 25
        body.append(
            f"<details><summary>all {len(table)} rows</summary>{_table(table)}</details>" if folded else _table(table)
        )
        body += [f"<p>{escape(site)}: {escape(why)}</p>" for site, why in found.untold(name).items()]
        body.append(f"<p>{escape(note)}</p>" if (note := notes(found).get(name)) else "")
        if name == "Data" and found.flags:
            items = "".join(f"<li>{escape(flag)}</li>" for flag in found.flags)
            body.append(f'<p>To look at:</p><ul class="flags">{items}</ul>')
    if drawn:
        body.append("<h2>Curves</h2>" + "".join(_figure(c, svg) for c, svg in drawn.items()))
    body.append(f"<h2>Configuration</h2><pre>{escape(found.config)}</pre>")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(found.name)}</title>'
    )
    safe = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    safe += "script-src 'unsafe-inline'\">"
    joined = "\n".join(part for part in body if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}{safe}<style>{_STYLE}</style></head>\n<body>\n{joined}\n'
        f'<div id="tip"></div><script>{_SCRIPT}</script></body></html>\n'
    )


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


def _facts(found: Found) -> str:
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in facts(found).items())
    return f"<table>{rows}</table>"


def _figure(caption: str, svg: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


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


def _rows(table: pd.DataFrame) -> list[tuple[str, ...]]:
    return list(zip(*(cells(table.iloc[:, i].tolist()) for i in range(table.shape[1])), strict=True))


def _table(table: pd.DataFrame) -> str:
    numeric = [pd.api.types.is_numeric_dtype(table[c]) for c in table.columns]
    sides = [' class="n"' if n else "" for n in numeric]
    head = "".join(f"<th{side}>{escape(str(c))}</th>" for c, side in zip(table.columns, sides, strict=True))
    rows = [
        "<tr>" + "".join(f"<td{s}>{escape(v)}</td>" for v, s in zip(row, sides, strict=True)) + "</tr>"
        for row in _rows(table)
    ]
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def markdown(found: Found) -> str:
    """The facts and the tables as Markdown."""
    parts = [f"# {found.name}", str(found.summary.get("message", ""))]
    parts.append("\n".join(f"* {k}: {v}" for k, v in facts(found).items()))
    for name, table in found.tables.items():
        rows = [[v.replace("|", "\\|") for v in row] for row in _rows(table)]
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
