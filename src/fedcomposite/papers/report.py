"""The table of all claims of a folder of reproductions."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.files import write_atomic
from fedcomposite.papers.base import load, names, read_state
from fedcomposite.papers.reproduce import judge, same_settings
from fedcomposite.papers.verdicts import cell


def write_report(out: Path) -> Path:
    """Write ``out/README.md``: every claim with what was measured and the verdict, from the data in the folders."""
    lines = [
        "# Reproductions",
        "",
        "Written by `fedcomposite reproduce`. A claim is a paper's, in our words; what was measured is computed from",
        "the `data.csv` beside the figure; `±` is one standard deviation over seeds where nothing else is said. That a",
        "method is ahead is judged by paired differences over seeds, corrected for the number of comparisons of a page",
        "(Holm, 5 %). The words are *holds*, *does not hold*, *no difference measured*, *not testable with these",
        "settings* (also where seeds are too few for a page's number of comparisons: each says what it can tell) and",
        "*not judged* (not run: what needs a GPU that was not there); each `verdict.md` has the numbers behind them,",
        "with the paper's beside ours, and says which settings are ours. *(partial)*: not all runs are finished;",
        "*(other settings)*: made with settings that are not, or no longer, those of the file of the reproduction.",
        "",
        "| name | the paper's claim | measured | verdict |",
        "| --- | --- | --- | --- |",
    ]
    missing = []
    for name in names():
        state, data = read_state(out / name), out / name / "data.csv"
        if not data.is_file() or data.stat().st_size <= 1:
            missing.append(name)
            continue
        form = " (quick)" if state.get("quick") else "" if state.get("complete") else " (partial)"
        form += "" if same_settings(load(name), state) else " (other settings)"
        link = f"[{name}]({name}/verdict.md){form}"
        for claim in judge(load(name), pd.read_csv(data), quick=bool(state.get("quick"))):
            told = " | ".join(map(cell, (claim.says, claim.measured)))
            lines.append(f"| {link} | {told} | **{claim.verdict}** |")
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    lines += ["", "## Figures", ""]
    for name in names():
        if (out / name / "figure.png").is_file():
            lines += [f"### {name}: {load(name).card['title']}", "", f"![{name}]({name}/figure.png)", ""]
    target = out / "README.md"
    write_atomic(target, "\n".join(lines).rstrip().encode() + b"\n")
    return target
