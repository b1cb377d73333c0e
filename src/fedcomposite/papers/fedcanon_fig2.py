"""Claims of the FedCanon paper about its Figure 2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fedcomposite.papers.base import classes, histories, last, only, skewed
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.verdicts import Claim, Row, lead, row
from fedcomposite.plots import Panel, draw_panels

CORRECTED = ["FedCanon", "Scaffold", "Scaffnew"]
SKEWS = (("iid", None, 0), ("Dir(0.1)", 0.1, 2), ("Dir(0.01)", 0.01, 10))
"""Title, alpha, and the points that FedAvg loses in the paper."""


def measure(study: Study) -> pd.DataFrame:
    """The three partitions, and the most skewed one again with longer rounds."""
    longer = dict(study.settings["longer"])
    run = {**study.content["run"], "rounds": longer["rounds"]}
    again = study.sweep("longer", partition=longer["partition"], algorithms=longer["algorithms"], run=run)
    return pd.concat([study.sweep().assign(part="paper"), again], ignore_index=True)


def _panels(data: pd.DataFrame) -> list[tuple[str, int, pd.DataFrame]]:
    """Title, points and rows of each panel."""
    first, again = only(data, part="paper"), only(data, part="longer")
    found = [(title, points, skewed(first, alpha)) for title, alpha, points in SKEWS]
    return [*found, ("Dir(0.01), K = 50", 10, again)]


def claims(data: pd.DataFrame) -> list[Claim]:
    """Accuracies in the panels; runs that diverged are told and left out of the means."""
    found = []
    for title, points, rows in _panels(data):
        ends = last(rows)
        lost = ends[ends["status"] == "diverged"]["method"].value_counts()
        each = {
            m: only(ends, method=m)[lambda e: e["status"] != "diverged"].set_index("seed")["test_accuracy"]
            for m in ("FedAvg", *CORRECTED)
        }
        note = ", ".join(f"{m} diverged with {k} seed{'s' if k > 1 else ''}" for m, k in lost.items())
        printed = f"{points} points below" if points else "alike"
        if points:
            says = f"{title}: FedAvg is below each of the others (in the paper by about {points} points)"
            compared = [_against(m, each[m], each["FedAvg"], 0.01) for m in CORRECTED]
            found.append(Claim(says, (row("FedAvg", each["FedAvg"], printed, digits=4), *compared), None, note))
        else:
            says = f"{title}: FedAvg and each of the others are within one point"
            found.append(alike(says, each, printed, note))
        says = f"{title}: FedCanon, SCAFFOLD and Scaffnew are within one point of each other"
        found.append(alike(says, {m: each[m] for m in CORRECTED}, "comparable", note))
    return found


def alike(says: str, each: dict[str, pd.Series], paper: str, note: str) -> Claim:
    """The claim that accuracies are within a point: the difference is significantly above -1 and below 1 point."""
    (first, base), *others = each.items()
    rows = [row(first, base, paper, digits=4)]
    for name, values in others:
        above, below = lead(values, base - 0.01), lead(values, base + 0.01, lower=True)
        worse = above if above.mean < below.mean else below
        text = lead(values, base).text
        rows.append(row(name, values, paper, digits=4)._replace(lead=worse._replace(text=text)))
    return Claim(says, tuple(rows), None, note)


def _against(name: str, values: pd.Series, base: pd.Series, least: float) -> Row:
    return row(name, values, digits=4)._replace(lead=lead(values, base, least=least))


def draw(data: pd.DataFrame, path: Path) -> None:
    """Test accuracy against rounds, a panel for each partition; a run that diverged is a line of its own."""
    lost = data["status"] == "diverged"
    names = data["method"] + np.where(lost, " (diverged, seed " + data["seed"].astype(str) + ")", "")
    data = data.assign(curve=names)
    panels = [Panel(histories(rows, "curve"), y="test_accuracy", title=t, zoom=True) for t, _, rows in _panels(data)]
    draw_panels([p for p in panels if p.histories], path, methods=classes(data, "curve"), band="seeds")
