"""Claims of the FedNMap paper about its Figure 3."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd

from fedcomposite.papers.base import histories, only, slope
from fedcomposite.papers.fednmap_fig2 import final
from fedcomposite.papers.fednmap_fig2 import given as measure
from fedcomposite.papers.verdicts import Claim, against, lead, row, told
from fedcomposite.plots import canvas
from fedcomposite.plots.charts import dress
from fedcomposite.plots.looks import COLORS

__all__ = ["claims", "draw", "measure"]

THEORY = -0.25


def speedup(data: pd.DataFrame, key: str, what: str) -> list[Claim]:
    """The claims that hold for clients and for local steps alike."""
    ends = final(data)
    values = sorted(ends[key].unique())
    by = {v: only(ends, **{key: v}).set_index("seed")["stationarity"] for v in values}
    rows = [row(f"{what} = {values[0]}", by[values[0]], digits=3)]
    for small, large in itertools.pairwise(values):
        compared = lead(by[large], by[small], lower=True, ratio=True)
        rows.append(row(f"{what} = {large}", by[large], digits=3)._replace(lead=compared))
    predicts = f"{what} to the power -1/4, which a communication complexity of 1 / (n tau epsilon^4) predicts"
    without = f"without {what} = {values[0]}"
    return [
        Claim(f"larger {what} leads to a smaller stationarity, value by value", tuple(rows)),
        against(
            f"linear speedup in {what}: the norm falls faster than {predicts}", "slope of log norm",
            slopes(ends, key), THEORY, above=False, paper="steeper than predicted",
        ),
        against(
            f"linear speedup in {what}, {without}: the norm falls faster than {predicts}",
            f"slope of log norm, {without}",
            slopes(ends[ends[key] > values[0]], key), THEORY, above=False, paper="steeper than predicted",
        ),
    ]  # fmt: skip


def slopes(ends: pd.DataFrame, key: str) -> pd.Series:
    """The slope of the logarithm against that of a key, for every seed."""
    return pd.Series({s: slope(part[key], part["stationarity"])[0] for s, part in ends.groupby("seed")}, dtype=float)


def _centres(ends: pd.DataFrame, key: str) -> pd.Series:
    """The geometric mean over seeds for each value."""
    centres: pd.Series = np.exp(np.log(ends["stationarity"]).groupby(ends[key]).mean())
    return centres


def draw_speedup(data: pd.DataFrame, key: str, what: str, path: Path) -> None:
    """Curves on the left, final values with the fitted line on the right."""
    figure, (left, right) = canvas.make(7.0, 3.0, 2)
    ends = final(data)
    values = sorted(data[key].unique())
    for i, value in enumerate(values):
        runs = histories(data[data[key] == value], label="class")["FedNMap"]
        rounds = [r["round"] for r in runs[0]]
        mean = np.exp(np.mean(np.log([[r["stationarity"] for r in run] for run in runs]), axis=0))
        left.plot(rounds, mean, color=COLORS[i % len(COLORS)], label=f"{what} = {value}")
    left.set_yscale("log")
    dress(left, "round", "stationarity", "geometric mean over seeds")
    right.plot(
        *zip(*_centres(ends, key).items(), strict=True), "_", color=COLORS[0], markersize=9, label="geometric mean"
    )
    found = slopes(ends, key)
    right.plot(ends[key], ends["stationarity"], "o", color=COLORS[7], markersize=4, label="seeds")
    centre = np.exp(np.log(ends["stationarity"]).mean())
    middle = np.exp(np.log(ends[key].astype(float)).mean())
    line = np.asarray(values, float)
    right.plot(
        line, centre * (line / middle) ** found.mean(), "-", color=COLORS[5], label=f"slope {told(found)} over seeds"
    )
    right.plot(line, centre * (line / middle) ** THEORY, ":", color=COLORS[6], label="slope -1/4")
    right.plot(line, centre * (line / middle) ** -0.5, "--", color=COLORS[6], linewidth=0.8, label="slope -1/2")
    right.set(xscale="log", yscale="log")
    dress(right, what, "final stationarity", "mean of the last quarter")
    right.set_xticks(values, [str(v) for v in values])
    right.minorticks_off()
    low, high = ends["stationarity"].min(), ends["stationarity"].max()
    ticks = [t for t in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if low / 2 < t < 2 * high]
    right.set_yticks(ticks, [f"{t:g}" for t in ticks])
    handles, names = left.get_legend_handles_labels()
    more = right.get_legend_handles_labels()
    figure.legend(handles + more[0], names + more[1], loc="outside lower center", ncols=4, frameon=False, fontsize=7)
    canvas.finish(figure, path)


def claims(data: pd.DataFrame) -> list[Claim]:
    """Speedup in the number of clients."""
    return speedup(data, "clients", "n")


def draw(data: pd.DataFrame, path: Path) -> None:
    """Stationarity for each n."""
    draw_speedup(data, "clients", "n", path)
