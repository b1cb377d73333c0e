"""Claims of the FedCanon paper about its Figure 2."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import Claim, classes, histories, judged, last, only, told
from fedcomposite.plots import Panel, draw_panels

CORRECTED = ["FedCanon", "Scaffold", "Scaffnew"]
SKEWS = (("iid", None), ("dirichlet", 0.1), ("dirichlet", 0.01))


def _title(name: str, alpha: float | None) -> str:
    return "iid" if alpha is None else f"Dir({alpha:g})"


def _part(data: pd.DataFrame, name: str, alpha: float | None) -> pd.DataFrame:
    """The rows of one partition, which is a table of a grid."""
    return data[data["partition"].str.contains(name if alpha is None else f"alpha={alpha:g}(?![0-9])", regex=True)]


def claims(data: pd.DataFrame) -> list[Claim]:
    """Accuracies in the three panels."""
    ends, found = last(data), []
    for skew in SKEWS:
        rows = _part(ends, *skew)
        each = {m: only(rows, method=m)["test_accuracy"] for m in ("FedAvg", *CORRECTED)}
        others = pd.concat([each[m] for m in CORRECTED])
        drop = float(others.mean() - each["FedAvg"].mean())
        told_all = ", ".join(f"{m} {told(v, 4)}" for m, v in each.items())
        if skew[1] is None:
            says, right = "iid: all methods perform alike", abs(drop) < 0.01
        else:
            points = 2 if skew[1] == 0.1 else 10
            says = f"{_title(*skew)}: FedAvg is about {points} points below the others"
            right = points / 2 < 100 * drop < 2 * points
        found.append(Claim(says, f"{told_all}: FedAvg {100 * drop:+.1f} points below", judged(right, rows)))
        spread = max(each[m].mean() for m in CORRECTED) - min(each[m].mean() for m in CORRECTED)
        found.append(
            Claim(
                f"{_title(*skew)}: FedCanon, SCAFFOLD and Scaffnew are comparable",
                f"their means are within {100 * spread:.1f} points",
                judged(spread < 0.02, rows),
            )
        )
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """Test accuracy against rounds, a panel for each partition."""
    panels = [Panel(histories(_part(data, *s)), y="test_accuracy", title=_title(*s)) for s in SKEWS]
    draw_panels([p for p in panels if p.histories], path, methods=classes(data))
