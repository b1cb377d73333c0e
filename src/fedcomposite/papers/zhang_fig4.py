"""Claims of Zhang, Hu & Johansson about their Figure 4."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import classes, first_at, histories, last, only
from fedcomposite.papers.verdicts import Claim, ahead
from fedcomposite.plots import Panel, draw_panels

TAUS = (5, 10)
LEVELS = (0.7, 0.8, 0.9, 0.91)


def claims(data: pd.DataFrame) -> list[Claim]:
    """What the text says about the two panels."""
    ends = last(data)
    found = []
    for tau in TAUS:
        each = {m: only(ends, method=m, local_steps=tau).set_index("seed")["test_accuracy"] for m in ("Zhang", "FedDA")}
        says = f"tau = {tau}: Zhang reaches a higher test accuracy than FedDA (after {int(ends['round'].max())} rounds)"
        found.append(ahead(says, each, least=0.003, source="paper; ours: rounds", digits=4))
        for level in LEVELS:
            times = {m: _rounds(data, m, tau, level) for m in ("Zhang", "FedDA")}
            says = f"tau = {tau}: Zhang needs fewer rounds than FedDA to an accuracy of {level:g}"
            found.append(ahead(says, times, lower=True, source="paper; ours: rounds"))
    return found


def _rounds(data: pd.DataFrame, method: str, tau: int, accuracy: float) -> pd.Series:
    """For each seed the first recorded round with this accuracy; nan where it is not reached."""
    rows = only(data, method=method, local_steps=tau)
    return pd.Series(
        {s: first_at(p, -p["test_accuracy"], -accuracy).iloc[0] for s, p in rows.groupby("seed")}, dtype=float
    )


def draw(data: pd.DataFrame, path: Path) -> None:
    """Test accuracy against rounds, a panel for each tau."""
    panels = [Panel(histories(data, local_steps=tau), y="test_accuracy", title=f"tau = {tau}") for tau in TAUS]
    draw_panels(panels, path, methods=classes(data))
