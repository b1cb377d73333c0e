"""Claims of Zhang, Hu & Johansson about their Figure 4."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import Claim, classes, histories, judged, last, only, told
from fedcomposite.plots import Panel, draw_panels

TAUS = (5, 10)


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
        level = float(theirs.mean())
        rows = only(data, method="Zhang", local_steps=tau)
        sooner = rows[rows["test_accuracy"] >= level].groupby("run")["round"].min()
        all_there = len(sooner) == rows["run"].nunique()
        found.append(
            Claim(
                f"tau = {tau}: Zhang needs fewer rounds than FedDA",
                f"FedDA's last accuracy is reached in round {told(sooner, 3) if all_there else 'none (some seeds)'}",
                judged(all_there and sooner.max() < ends["round"].max(), rows),
            )
        )
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """Test accuracy against rounds, a panel for each tau."""
    panels = [Panel(histories(data, local_steps=tau), y="test_accuracy", title=f"tau = {tau}") for tau in TAUS]
    draw_panels(panels, path, methods=classes(data))
