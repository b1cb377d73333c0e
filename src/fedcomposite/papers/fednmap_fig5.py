"""Claims of the FedNMap paper about its Figure 5."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import FAILS, HOLDS, Claim, first_at, histories, judged
from fedcomposite.papers.fednmap_fig2 import final
from fedcomposite.plots import Panel, draw_panels

RULES = ("1/tau", "1/sqrt(tau)", "constant")


def claims(data: pd.DataFrame) -> list[Claim]:
    """What each rule does to speed and to the final value."""
    ends, found = final(data), []
    for rule in RULES:
        rows = ends[ends["method"].str.startswith(f"{rule},")]
        level = rows.groupby("local_steps")["stationarity"].mean()
        listed = ", ".join(f"tau = {t} {v:.2g}" for t, v in level.items())
        if rule == "1/tau":
            says = "step 1/tau: larger tau yields a smaller stationarity"
            found.append(Claim(says, listed, judged(level.is_monotonic_decreasing, level)))
            continue
        curves = data[data["method"].str.startswith(f"{rule},")]
        target = 0.5 * float(curves[curves["round"] == 0]["stationarity"].mean())
        reached = {t: first_at(r, r["stationarity"], target).mean() for t, r in curves.groupby("local_steps")}
        speed, every = pd.Series(reached), float(pd.Series(sorted(set(curves["round"]))).diff().median())
        faster = bool(speed.notna().all() and speed.iloc[-1] < speed.iloc[0] and speed.diff().max() <= every)
        ratio = level.iloc[-1] / level.iloc[0]
        found.append(
            Claim(
                f"step {rule}: larger tau is faster",
                f"rounds to half of the start, records every {every:.0f}: "
                + ", ".join(f"tau = {t} {v:.0f}" for t, v in speed.items()),
                judged(faster, speed),
            )
        )
        found.append(
            Claim(
                f"step {rule}: the final stationarity is comparable, slightly higher with larger tau",
                listed,
                HOLDS if 1 <= ratio < 2 else "holds in part: comparable, but lower" if 0.5 < ratio < 1 else FAILS,
            )
        )
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """Stationarity against rounds, a panel for each rule."""
    panels = []
    for rule in RULES:
        rows = data[data["method"].str.startswith(f"{rule},")]
        rows = rows.assign(method=rows["method"].str.removeprefix(f"{rule}, "))
        panels.append(Panel(histories(rows), title=f"step {rule}"))
    draw_panels(panels, path)
