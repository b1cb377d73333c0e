"""Claims of the FedNMap paper about its Figure 5."""

from __future__ import annotations

import itertools
from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import first_at, histories, parts
from fedcomposite.papers.fednmap_fig2 import final
from fedcomposite.papers.fednmap_fig2 import given as measure
from fedcomposite.papers.verdicts import Claim, lead, row
from fedcomposite.plots import Panel, draw_panels
from fedcomposite.plots.looks import swept

__all__ = ["claims", "draw", "measure"]

RULES = ("1/tau", "1/sqrt(tau)", "constant")


def claims(data: pd.DataFrame) -> list[Claim]:
    """What each rule does to speed and to the final value."""
    ends, found = final(data), []
    for rule in RULES:
        rows = ends[ends["label"] == rule]
        by = {t: p.set_index("seed")["stationarity"] for t, p in parts(rows, "local_steps").items()}
        if rule == "1/tau":
            found.append(_pairs("step 1/tau: larger tau yields a smaller stationarity, value by value", by))
            continue
        few, most = min(by), max(by)
        reached = _speeds(data[data["label"] == rule])
        speed = [row(f"rounds to half of the start, tau = {t}", v, digits=3) for t, v in reached.items()]
        speed[-1] = speed[-1]._replace(lead=lead(reached[most], reached[few], lower=True))
        found.append(Claim(f"step {rule}: tau = {most} is faster than tau = {few}", tuple(speed)))
        levels = [row(f"final stationarity, tau = {t}", v, digits=3) for t, v in by.items()]
        levels[-1] = levels[-1]._replace(lead=lead(by[most], by[few], least=0.02, ratio=True))
        says = f"step {rule}: the final stationarity is slightly higher with tau = {most} than with tau = {few}"
        found.append(Claim(says, tuple(levels)))
    return found


def _pairs(says: str, by: dict[int, pd.Series]) -> Claim:
    """The claim that every value is below the one before."""
    rows = [row(f"tau = {min(by)}", by[min(by)], digits=3)]
    for small, large in itertools.pairwise(by):
        compared = lead(by[large], by[small], lower=True, ratio=True)
        rows.append(row(f"tau = {large}", by[large], digits=3)._replace(lead=compared))
    return Claim(says, tuple(rows))


def _speeds(curves: pd.DataFrame) -> dict[int, pd.Series]:
    """For each tau and seed the first recorded round at half of the rule's mean start."""
    target = 0.5 * float(curves[curves["round"] == 0]["stationarity"].mean())
    return {
        t: pd.Series({s: first_at(p, p["stationarity"], target).iloc[0] for s, p in rows.groupby("seed")}, dtype=float)
        for t, rows in parts(curves, "local_steps").items()
    }


def draw(data: pd.DataFrame, path: Path) -> None:
    """Stationarity against rounds, a panel for each rule."""
    panels = []
    for rule in RULES:
        rows = data[data["label"] == rule]
        rows = rows.assign(method=[f"tau = {t}" for t in rows["local_steps"]])
        panels.append(Panel(histories(rows), title=f"step {rule}"))
    draw_panels(panels, path, methods=swept(label for panel in panels for label in panel.histories))
