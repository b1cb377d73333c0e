"""Claims of the FedCanon paper's Table III."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import classes, last
from fedcomposite.papers.verdicts import Claim, Row, fact
from fedcomposite.plots import draw_bars

N, D = 10, 50
PAPER: dict[str, tuple[Callable[[int], int], str, int]] = {  # proxes by K; floats per client, in models
    "FedCanon": (lambda K: 1, "1", 3),
    "FedCanonII": (lambda K: N, "N", 2),
    "FedMid": (lambda K: N * K + 1, "NK + 1", 2),
    "FedDA": (lambda K: N * K + 1, "NK + 1", 2),
    "FastFedDA": (lambda K: N * K + 1, "NK + 1", 4),
    "Zhang": (lambda K: 2 * N * K + 1, "2NK + 1", 2),
}


def counted(data: pd.DataFrame) -> pd.DataFrame:
    """Proxes a round, and models' worth of floats for each client and round; between the first and the last record."""
    ends = last(data)
    rounds = ends["round"]
    floats = (ends["bytes_up"] + ends["bytes_down"]) / (8 * D * N * rounds)
    return ends.assign(proxes=ends["prox_evaluations"] / rounds, floats=floats)


def claims(data: pd.DataFrame) -> list[Claim]:
    """Both columns of the table, method by method; one prox more or less, of the server, is not held against it."""
    table, found = counted(data), []
    for method, (proxes, formula, floats) in PAPER.items():
        rows = table[table["method"] == method].sort_values("local_steps")
        K = [int(k) for k in rows["local_steps"]]
        right = all(abs(p - proxes(k)) <= 1 for p, k in zip(rows["proxes"], K, strict=True))
        sent = float(rows["floats"].mean())
        same = abs(sent - floats) < 0.15
        counts = [
            Row(f"proxes a round, K = {k}", f"{p:.4g}", f"{proxes(k)} ({formula})")
            for p, k in zip(rows["proxes"], K, strict=True)
        ]
        exchanged = Row("floats for each client and round, in models", f"{sent:.2f}", str(floats))
        found.append(fact(f"{method}: {formula} proxes a round", right, *counts))
        found.append(fact(f"{method}: {floats}d floats for each client", same, exchanged))
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """Bars for both columns."""
    table = counted(data)
    panels = {
        title: {
            f"K = {k}": {str(r["method"]): (float(r[key]), 0.0) for _, r in rows.iterrows()}
            for k, rows in table.groupby("local_steps")
        }
        for title, key in (("proxes of h a round", "proxes"), ("models sent, each client and round", "floats"))
    }
    draw_bars(panels, path, methods=classes(data))
