"""Claims of the FedCanon paper's Table VI."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import only
from fedcomposite.papers.fedcanon_fig3 import METHODS, measure
from fedcomposite.papers.verdicts import Claim, fact, row
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
        row_, paper = table.loc[k], RATIOS.get(int(k), {})
        others = [m for m in METHODS if m in row_ and m != "FedCanon"]
        ratio = {m: float(row_[m] / row_["FedCanon"]) for m in others}
        times_ = [row(f"{m}: time / FedCanon's", v, str(paper.get(m, "–")), digits=3) for m, v in ratio.items()]
        printed = str(PAPER[k]["FedCanon"]) if k in PAPER else "–"
        seconds = row("FedCanon: seconds", float(row_["FedCanon"]), printed, digits=3)
        slow = bool(others) and min(ratio.values()) > 2
        found.append(fact(f"K = {k}: the others take several times FedCanon's time", slow, *times_, seconds))
    first, most = steps[0], steps[-1]
    factor = float(table.loc[most, "FedCanon"] / table.loc[first, "FedCanon"])
    grown = row(f"FedCanon's time, K = {most} / K = {first}", factor, f"{719 / 230:.1f}")
    found.append(fact("FedCanon's time grows much slower than K", factor < most / first / 2, grown))
    return [*found, *_of_table1()]


def _of_table1() -> list[Claim]:
    """What Table I alone makes of Table VI: FedCanon's time and a prox of 19 ms for every prox more."""
    found = []
    for prox, rows in ((0.019, []), (0.002, [])):
        for k, printed in PAPER.items():
            for m, per in (("FedMid", 10 * k + 1), ("FedDA", 10 * k + 1), ("Zhang", 2 * 10 * k + 1)):
                predicted = printed["FedCanon"] + 200 * (per - 1) * prox
                rows.append((k, m, predicted / printed[m], predicted / printed["FedCanon"]))
        found.append(rows)
    dear, cheap = found
    shares = [share for _, _, share, _ in dear]
    largest = max(ratio for _, _, _, ratio in cheap)
    return [
        fact(
            "the others' times come from their rounds, not from the prox of Table I alone",
            max(shares) < 0.5,
            row(
                "FedCanon's time + 200 x proxes x 19 ms, over the printed time: least", min(shares), "Tables I, III, VI"
            ),
            row("the same: most", max(shares), "Tables I, III, VI"),
            row("largest ratio to FedCanon if the prox took 2 ms", largest, "10.02 with 19 ms"),
            note="a computation with the paper's own numbers",
        )
    ]


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
