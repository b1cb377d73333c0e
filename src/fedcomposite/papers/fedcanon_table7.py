"""Claims of the FedCanon paper's Table VII."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedcomposite.papers.base import HOLDS, NOT_RUN, Claim, ahead, judged, skewed
from fedcomposite.papers.fedcanon_fig3 import LEAST, SKEWS
from fedcomposite.papers.measuring import Study
from fedcomposite.plots import canvas
from fedcomposite.plots.charts import dress
from fedcomposite.plots.looks import looks

METHODS = ["FedCanon", "FedDR", "FedADMM"]
PAPER = {  # accuracies of FedCanon, FedDR, FedADMM: iid, Dir(1), Dir(0.2)
    "mnist linear": ((0.9039, 0.8752, 0.8751), (0.9028, 0.8744, 0.8743), (0.9018, 0.8691, 0.8691)),
    "mnist mlp": ((0.9229, 0.8478, 0.8479), (0.9221, 0.8395, 0.8427), (0.9218, 0.8197, 0.8198)),
    "mnist cnn": ((0.9742, 0.8822, 0.9172), (0.9735, 0.8622, 0.9035), (0.9722, 0.8263, 0.8655)),
    "fashion_mnist mlp": ((0.8291, 0.7056, 0.7085), (0.8266, 0.6908, 0.7080), (0.8255, 0.6794, 0.7052)),
    "fashion_mnist cnn": ((0.8510, 0.7529, 0.7751), (0.8449, 0.7233, 0.7335), (0.8355, 0.7033, 0.7161)),
}


def measure(study: Study) -> pd.DataFrame:
    """A sweep for each pair of data and model."""
    model = study.content["model"]
    parts = [
        study.sweep(f"{data}-{name}", data={"name": data}, model={**model, "name": name}).assign(what=f"{data} {name}")
        for data, name in study.settings["models"]
    ]
    return pd.concat(parts, ignore_index=True)


def best(data: pd.DataFrame) -> pd.DataFrame:
    """The highest test accuracy of each method, a row for each data set, model and partition."""
    rows = {}
    for what, group in data.groupby("what", sort=False):
        for title, alpha in SKEWS:
            part = skewed(group, alpha)
            if len(part):
                rows[what, title] = part.groupby("method")["test_accuracy"].max()
    return pd.DataFrame(rows).T.reindex(columns=METHODS)


def _theirs(what: str, title: str) -> tuple[float, ...]:
    """The paper's row."""
    return PAPER[what][[t for t, _ in SKEWS].index(title)]


def claims(data: pd.DataFrame) -> list[Claim]:
    """One claim for each row of the table, and one for all that were run."""
    table, found = best(data).dropna(), []
    for what, title in ((what, title) for what in PAPER for title, _ in SKEWS):
        theirs = _theirs(what, title)
        says = f"{what}, {title}: FedCanon is best ({', '.join(f'{v:.4f}' for v in theirs)})"
        if (what, title) not in table.index:
            found.append(Claim(says, "not run here", NOT_RUN))
            continue
        row = {m: float(v) for m, v in zip(METHODS, table.loc[[(what, title)]].to_numpy()[0], strict=True)}
        ours, *others = (pd.Series([row[m]]) for m in METHODS)
        found.append(Claim(says, ", ".join(f"{m} {v:.4f}" for m, v in row.items()), ahead(ours, others, least=LEAST)))
    won = sum(claim.verdict == HOLDS for claim in found)
    printed = pd.DataFrame([_theirs(*row) for row in table.index], columns=METHODS)
    lead, paper = (100 * (t["FedCanon"] - t[METHODS[1:]].max(axis=1)).mean() for t in (table, printed))
    found.append(
        Claim(
            f"FedCanon is the most competitive overall (in these rows by {paper:.1f} points on average)",
            f"ahead by more than {100 * LEAST:g} points in {won} of {len(table)} rows, by {lead:.1f} points on average",
            f"{HOLDS}, by less" if won > len(table) / 2 and lead < paper / 2 else judged(won > len(table) / 2, table),
        )
    )
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """A mark for each method in each row, ours full and the paper's hollow."""
    table = best(data)
    figure, (axis,) = canvas.make(7.0, 0.26 * len(table) + 1.3, 1)
    style = looks(METHODS)
    for m, method in enumerate(METHODS):
        look: dict[str, Any] = {
            "color": style[method].color,
            "marker": style[method].marker,
            "linestyle": "none",
            "markersize": 4,
        }
        rows = np.arange(len(table)) + 0.2 * (m - 1)  # beside each other where they are the same
        axis.plot(table[method], rows, label=method, **look)
        paper = [_theirs(what, title)[m] for what, title in table.index]
        axis.plot(paper, rows, fillstyle="none", label=f"{method}, the paper's", **look)
    axis.set_yticks(range(len(table)), [f"{what}, {title}" for what, title in table.index])
    axis.invert_yaxis()
    dress(axis, "highest test accuracy", "", "")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    canvas.finish(figure, path)
