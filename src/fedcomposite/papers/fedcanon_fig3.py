"""Claims of the FedCanon paper about its Figure 3."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import classes, first_at, histories, last, only, skewed
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.verdicts import Claim, ahead, open_claim, row
from fedcomposite.plots import Panel, draw_panels

METHODS = ["FedCanon", "FedMid", "FedDA", "Zhang"]
LEAST = 0.003
"""The standard error of an accuracy on 10,000 images: less is no difference."""
LEVEL = 0.8
"""A test accuracy that every method passes on every partition."""
SHARED = (
    "these runs shared a GPU with others, and seconds hang on what ran beside them: fedcanon-table6 times them alone"
)
SKEWS = (("iid", None), ("Dir(1)", 1.0), ("Dir(0.2)", 0.2))


def measure(study: Study) -> pd.DataFrame:
    """The runs with SCAD, and FedDA's with l1."""
    other = study.settings
    convex = study.sweep("l1", regularizer=other["regularizer"], algorithms=other["algorithms"])
    return pd.concat([study.sweep("scad"), convex], ignore_index=True)


def claims(data: pd.DataFrame) -> list[Claim]:
    """Accuracy after the same rounds."""
    ends, found = last(data), []
    for title, alpha in SKEWS:
        rows = skewed(ends, alpha)
        accuracy = {m: only(rows, method=m).set_index("seed")["test_accuracy"] for m in METHODS}
        says = f"{title}: after the same rounds FedCanon has the highest test accuracy"
        found.append(ahead(says, accuracy, least=LEAST, source="paper: T, K; ours: steps, batches", digits=4))
    return [*found, *_times(data)]


def _times(data: pd.DataFrame) -> list[Claim]:
    """The figure's own axis: training time to an accuracy that all methods pass."""
    found = []
    for title, alpha in SKEWS:
        rows = skewed(data, alpha)
        heads = rows.groupby("run")[["method", "seed"]].first()
        heads = heads.assign(seconds=first_at(rows, -rows["test_accuracy"], -LEVEL, "seconds"))
        each = (row(f"{m}, seconds", only(heads, method=m)["seconds"], "a figure", digits=3) for m in METHODS)
        says = f"{title}: FedCanon reaches a test accuracy of {LEVEL:g} in less training time"
        found.append(open_claim(says, *each, note=SHARED))
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """Test accuracy against rounds, a panel for each partition."""
    panels = [Panel(histories(skewed(data, a)), y="test_accuracy", title=t, zoom=True) for t, a in SKEWS]
    draw_panels([p for p in panels if p.histories], path, methods=classes(data))
