"""Claims of the FedCanon paper about its Figure 2."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import Claim, classes, histories, judged, last, only, skewed, told
from fedcomposite.papers.measuring import Study
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
            m: only(ends, method=m)[lambda e: e["status"] != "diverged"]["test_accuracy"]
            for m in ("FedAvg", *CORRECTED)
        }
        drop = float(pd.concat([each[m] for m in CORRECTED]).mean() - each["FedAvg"].mean())
        text = ", ".join(f"{m} {told(v, 4)}" for m, v in each.items())
        text += "".join(f", {m} diverged with {k} seed{'s' if k > 1 else ''}" for m, k in lost.items())
        says = f"{title}: FedAvg is about {points} points below the others" if points else f"{title}: all perform alike"
        right = points / 2 < 100 * drop < 2 * points if points else abs(drop) < 0.01
        found.append(
            Claim(
                says,
                f"{text}: FedAvg {abs(100 * drop):.1f} points {'below' if drop > 0 else 'above'}",
                judged(right, rows),
            )
        )
        means = [each[m].mean() for m in CORRECTED]
        found.append(
            Claim(
                f"{title}: FedCanon, SCAFFOLD and Scaffnew are comparable",
                f"their means are within {100 * (max(means) - min(means)):.1f} points",
                judged(max(means) - min(means) < 0.02, rows),
            )
        )
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """Test accuracy against rounds, a panel for each partition."""
    panels = [Panel(histories(rows), y="test_accuracy", title=title, zoom=True) for title, _, rows in _panels(data)]
    draw_panels([p for p in panels if p.histories], path, methods=classes(data))
