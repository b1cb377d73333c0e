"""Claims of the FedCanon paper's Table VI."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import Claim, judged, only
from fedcomposite.papers.fedcanon_fig3 import METHODS, measure
from fedcomposite.plots import canvas
from fedcomposite.plots.charts import dress
from fedcomposite.plots.looks import looks

__all__ = ["claims", "draw", "measure"]

PAPER = {  # seconds
    10: {"FedCanon": 230, "FedMid": 662, "FedDA": 804, "Zhang": 1106},
    20: {"FedCanon": 293, "FedMid": 1132, "FedDA": 1281, "Zhang": 2048},
    40: {"FedCanon": 417, "FedMid": 2364, "FedDA": 2230, "Zhang": 4062},
    80: {"FedCanon": 719, "FedMid": 3875, "FedDA": 4126, "Zhang": 7201},
}
RATIOS = {  # to FedCanon's, as printed there: its seconds are rounded
    10: {"FedMid": 2.87, "FedDA": 3.49, "Zhang": 4.80},
    20: {"FedMid": 3.86, "FedDA": 4.37, "Zhang": 6.99},
    40: {"FedMid": 5.67, "FedDA": 5.35, "Zhang": 9.74},
    80: {"FedMid": 5.39, "FedDA": 5.74, "Zhang": 10.02},
}


def times(data: pd.DataFrame) -> pd.DataFrame:
    """Seconds of 200 rounds, by K and method, from the second half of the records."""
    found: dict[tuple[int, str], float] = {}
    for method, steps in data[["method", "local_steps"]].drop_duplicates().itertuples(index=False):
        rows = only(data, method=method, local_steps=steps).sort_values("round")
        half, end = rows.iloc[len(rows) // 2], rows.iloc[-1]
        found[int(steps), str(method)] = 200 * (end["seconds"] - half["seconds"]) / (end["round"] - half["round"])
    return pd.Series(found).unstack()


def claims(data: pd.DataFrame) -> list[Claim]:
    """Ratios to FedCanon, row by row, and growth with K."""
    table, found = times(data), []
    steps = sorted(table.index)
    for k in steps:
        row, paper = table.loc[k], RATIOS.get(int(k), {})
        others = [m for m in METHODS if m in row and m != "FedCanon"]
        theirs = ", ".join(f"{m} {paper[m]:.2f}" for m in others if paper)
        ours = ", ".join(f"{m} {row[m] / row['FedCanon']:.2f}" for m in others)
        found.append(
            Claim(
                f"K = {k}: the others take several times FedCanon's time ({theirs or 'not in the paper'})",
                f"{ours}; FedCanon {row['FedCanon']:.1f} s",
                judged(bool(others) and min(row[m] / row["FedCanon"] for m in others) > 2, row),
            )
        )
    factor = table.loc[steps[-1], "FedCanon"] / table.loc[steps[0], "FedCanon"]
    found.append(
        Claim(
            f"FedCanon's time grows much slower than K: {719 / 230:.1f} times from K = 10 to 80",
            f"{factor:.1f} times from K = {steps[0]} to {steps[-1]}, {steps[-1] / steps[0]:g} times the steps",
            judged(factor < steps[-1] / steps[0] / 2),
        )
    )
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """Ratios to FedCanon by K: ours, and the paper's."""
    table = times(data)
    figure, axes = canvas.make(7.0, 2.8, 2)
    style = looks(METHODS)
    for axis, values, title in ((axes[0], pd.DataFrame(PAPER).T, "the paper's"), (axes[1], table, "measured here")):
        ratio = values.div(values["FedCanon"], axis=0)
        for method in (m for m in METHODS if m in ratio):
            axis.plot(ratio.index, ratio[method], label=method, markersize=4, **style[method]._asdict())
        dress(axis, "local steps K", "time / FedCanon's", title)
        axis.set_ylim(0, 11)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=7)
    canvas.finish(figure, path)
