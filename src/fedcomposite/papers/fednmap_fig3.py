"""Claims of the FedNMap paper about its Figure 3."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fedcomposite.papers.base import Claim, histories, judged, slope
from fedcomposite.papers.fednmap_fig2 import clients_of, final
from fedcomposite.plots import canvas
from fedcomposite.plots.charts import dress
from fedcomposite.plots.looks import COLORS

_THEORY = -0.25


def speedup(data: pd.DataFrame, key: str, what: str) -> list[Claim]:
    """The claims that hold for clients and for local steps alike."""
    ends = final(data)
    means = ends.groupby(key)["stationarity"].mean()
    (found, half), (rest, about) = (slope(m.index, m) for m in (_centres(ends, key), _centres(ends, key).iloc[1:]))
    listed = ", ".join(f"{n}: {v:.2g}" for n, v in means.items())
    return [
        Claim(f"larger {what} leads to a smaller stationarity", listed, judged(means.is_monotonic_decreasing, means)),
        Claim(
            f"linear speedup in {what}: the norm falls faster than {what} to the power -1/4, which a communication "
            f"complexity of 1 / (n tau epsilon^4) predicts",
            f"fitted slope {found:.2f} ± {half:.2f} (95 %), of the squared norm {2 * found:.2f} ± {2 * half:.2f}; "
            f"without {what} = {means.index[0]} {rest:.2f} ± {about:.2f}",
            f"holds only if {what} = {means.index[0]} counts: without it the slope is flatter than predicted"
            if found < _THEORY < rest
            else judged(found + half < _THEORY, means),
        ),
    ]


def _centres(ends: pd.DataFrame, key: str) -> pd.Series:
    """The geometric mean over seeds for each value: what a line is fitted to, since seeds tell nothing of its bends."""
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
    centres = _centres(ends, key)
    found, half = slope(centres.index, centres)
    right.plot(ends[key], ends["stationarity"], "o", color=COLORS[7], markersize=4, label="seeds")
    centre = np.exp(np.log(ends["stationarity"]).mean())
    middle = np.exp(np.log(ends[key].astype(float)).mean())
    line = np.asarray(values, float)
    right.plot(
        line, centre * (line / middle) ** found, "-", color=COLORS[5], label=f"slope {found:.2f} ± {half:.2f} (95 %)"
    )
    right.plot(line, centre * (line / middle) ** _THEORY, ":", color=COLORS[6], label="slope -1/4")
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
    return speedup(data, clients_of(data), "n")


def draw(data: pd.DataFrame, path: Path) -> None:
    """Stationarity for each n."""
    draw_speedup(data, clients_of(data), "n", path)
