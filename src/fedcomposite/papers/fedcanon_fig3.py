"""Claims of the FedCanon paper about its Figure 3."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import classes, histories, last, only, skewed
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.verdicts import Claim, ahead
from fedcomposite.plots import Panel, draw_panels

METHODS = ["FedCanon", "FedMid", "FedDA", "Zhang"]
LEAST = 0.003
"""The standard error of an accuracy on 10,000 images: less is no difference."""
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
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """Test accuracy against rounds, a panel for each partition."""
    panels = [Panel(histories(skewed(data, a)), y="test_accuracy", title=t, zoom=True) for t, a in SKEWS]
    draw_panels([p for p in panels if p.histories], path, methods=classes(data))
