"""Claims of Zhang, Hu & Johansson about their Figure 4."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import FAILS, Claim, classes, histories, judged, last, only, told
from fedcomposite.plots import Panel, draw_panels

TAUS = (5, 10)
LEVELS = (0.7, 0.8, 0.9, 0.91)


def claims(data: pd.DataFrame) -> list[Claim]:
    """What the text says about the two panels."""
    ends = last(data)
    found = []
    for tau in TAUS:
        ours, theirs = (
            only(ends, method=m, local_steps=tau).set_index("seed")["test_accuracy"] for m in ("Zhang", "FedDA")
        )
        ahead = int((ours > theirs.reindex(ours.index)).sum())  # a seed has one partition and one start for both
        found.append(
            Claim(
                f"tau = {tau}: Zhang reaches a higher test accuracy than FedDA",
                f"after {int(ends['round'].max())} rounds: Zhang {told(ours, 4)}, FedDA {told(theirs, 4)}; "
                f"Zhang is ahead with {ahead} of {len(ours)} seeds",
                judged(ahead == len(ours), ours, theirs),
            )
        )
        reached = {a: tuple(_rounds(data, m, tau, a) for m in ("Zhang", "FedDA")) for a in LEVELS}
        fewer = [one < two for one, two in reached.values()]
        says = f"tau = {tau}: Zhang needs fewer rounds than FedDA"
        shown = ", ".join(
            f"to {a:g} {one:.0f} and {two:.0f}".replace("inf", "never") for a, (one, two) in reached.items()
        )
        only_late = f"holds only if the accuracy is high: FedDA is not later at {LEVELS[0]:g}" if fewer[-1] else FAILS
        verdict = judged(all(fewer), ours, theirs) if all(fewer) or not len(ours) else only_late
        found.append(Claim(says, f"rounds of Zhang and of FedDA, means: {shown}", verdict))
    return found


def _rounds(data: pd.DataFrame, method: str, tau: int, accuracy: float) -> float:
    """The mean over seeds of the first round with this accuracy; infinite where a seed does not get there."""
    rows = only(data, method=method, local_steps=tau)
    there = rows[rows["test_accuracy"] >= accuracy].groupby("run")["round"].min()
    return float(there.mean()) if len(rows) and len(there) == rows["run"].nunique() else math.inf


def draw(data: pd.DataFrame, path: Path) -> None:
    """Test accuracy against rounds, a panel for each tau."""
    panels = [Panel(histories(data, local_steps=tau), y="test_accuracy", title=f"tau = {tau}") for tau in TAUS]
    draw_panels(panels, path, methods=classes(data))
