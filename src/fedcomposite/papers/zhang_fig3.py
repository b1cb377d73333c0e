"""Claims of Zhang, Hu & Johansson about their Figure 3."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import Claim, classes, histories, judged, only, relative, told
from fedcomposite.plots import Panel, draw_panels

METHODS = ["Zhang", "FedDA", "FastFedDA"]


def claims(data: pd.DataFrame) -> list[Claim]:
    """Where the methods end: relative stationarity (full gradient), mean over the last quarter of the rounds."""
    data = data.assign(relative=relative(data))
    late = data[data["round"] >= 0.75 * data["round"].max()]

    def floor(method: str, batch: int) -> pd.Series:
        return only(late, method=method, batch_size=batch).groupby("seed")["relative"].mean()

    ends = {b: ", ".join(f"{m} {told(floor(m, b))}" for m in METHODS) for b in (1, 20)}
    before = data[(data["round"] < 0.75 * data["round"].max()) & (data["round"] >= 0.5 * data["round"].max())]
    flat = floor("Zhang", 1).mean() > 0.8 * only(before, method="Zhang", batch_size=1)["relative"].mean()
    gain = floor("Zhang", 1).mean() / floor("Zhang", 20).mean()
    return [
        Claim(
            "with minibatches Zhang converges to a neighbourhood, not to zero",
            f"relative stationarity over the last quarter: {told(floor('Zhang', 1))} (b = 1), "
            f"{told(floor('Zhang', 20))} (b = 20)",
            (
                "holds"
                if gain > 1.1
                else "does not hold: the level is the same for both batches, so it is not the noise's"
            )
            if flat
            else "not seen: it is still falling at the end",
        ),
        Claim(
            "a batch of 20 in place of 1 makes Zhang more precise",
            f"{gain:.2f} times smaller" + ("" if flat else "; noise is not what limits it yet: both are still falling"),
            judged(gain > 1.1, floor("Zhang", 20)),
        ),
        *(
            Claim(
                f"b = {b}: the other methods do worse, by client drift or decaying steps",
                ends[b],
                judged(min(METHODS, key=lambda m: floor(m, b).mean()) == "Zhang", floor("Zhang", b)),
            )
            for b in (1, 20)
        ),
    ]


def draw(data: pd.DataFrame, path: Path) -> None:
    """Relative stationarity against rounds, a panel for each batch size."""
    panels = [
        Panel(histories(data, batch_size=b), title=f"b = {b}", name="relative stationarity (full gradient)")
        for b in (1, 20)
    ]
    draw_panels(panels, path, methods=classes(data))
