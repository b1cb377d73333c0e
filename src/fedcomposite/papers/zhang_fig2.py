"""Claims of Zhang, Hu & Johansson about their Figure 2."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import classes, first_at, histories, last, only, relative
from fedcomposite.papers.verdicts import Claim, ahead, fact, row
from fedcomposite.plots import Panel, draw_panels

METHODS = ["Zhang", "FedDA", "FedMid", "FastFedDA"]


def claims(data: pd.DataFrame) -> list[Claim]:
    """What the text says about the two panels; stationarity is relative to the start."""
    data = data.assign(relative=relative(data))
    ends = last(data)

    def end(method: str, tau: int) -> pd.Series:
        return only(ends, method=method, local_steps=tau).set_index("seed")["relative"]

    def rounds(method: str, tau: int, target: float) -> pd.Series:
        """By seed; nan where a seed does not get there."""
        rows = only(data, method=method, local_steps=tau)
        return pd.Series({s: first_at(p, p["relative"], target).iloc[0] for s, p in rows.groupby("seed")}, dtype=float)

    machine = {"paper": "machine precision", "source": "ours (the paper's steps diverge)"}
    same = {m: rounds(m, 1, 1e-3) for m in ("FedDA", "Zhang")}
    one, ten = rounds("Zhang, small step", 1, 0.01), rounds("Zhang", 10, 0.01)
    factor = (one / ten).dropna()
    worst = {m: end(m, 1) for m in ("FedMid", *(m for m in METHODS if m != "FedMid"))}
    stalls = {"FedMid": end("FedMid", 10), "FedDA": end("FedDA", 10)}
    level = "relative stationarity at the end"
    return [
        fact(
            "tau = 1: FedDA and Zhang converge to machine precision (below 1e-10)",
            max(end("FedDA", 1).max(), end("Zhang", 1).max()) < 1e-10,
            *(row(f"{m}: {level}", end(m, 1), **machine) for m in ("FedDA", "Zhang")),
        ),
        fact(
            "tau = 1: with the same steps FedDA and Zhang converge at exactly the same rate (rounds within 5 %)",
            bool(((same["FedDA"] / same["Zhang"] - 1).abs() < 0.05).all()),
            *(row(f"{m}: rounds to 1e-3", v, "the same", digits=4) for m, v in same.items()),
        ),
        ahead("tau = 1: FedMid is worst (curse of primal averaging)", worst, ratio=True),
        fact(
            "Fast-FedDA converges slowly because its steps decay (still above 1e-6)",
            min(end("FastFedDA", 1).min(), end("FastFedDA", 10).min()) > 1e-6,
            *(row(f"tau = {t}: {level}", end("FastFedDA", t)) for t in (1, 10)),
        ),
        fact(
            "tau = 10: Zhang still converges exactly (below 1e-10)",
            end("Zhang", 10).max() < 1e-10,
            row(f"Zhang: {level}", end("Zhang", 10), **machine),
        ),
        fact(
            "tau = 10: FedDA stalls in a neighbourhood (above 1e-6)",
            end("FedDA", 10).min() > 1e-6,
            row(f"FedDA: {level}", end("FedDA", 10), "a neighbourhood"),
        ),
        ahead("tau = 10: FedMid is worse than FedDA", stalls, ratio=True),
        fact(
            "with the same eta and eta_g, ten local steps need about a tenth of the rounds of one",
            bool(factor.between(5, 20).all()) and len(factor) == len(one),
            row("rounds to 0.01, tau = 1", one, digits=3),
            row("rounds to 0.01, tau = 10", ten, digits=3),
            row("their ratio", factor, "10 (roughly)"),
        ),
    ]


def draw(data: pd.DataFrame, path: Path) -> None:
    """Relative stationarity against rounds, a panel for each tau."""
    panels = [
        Panel(histories(data, method=METHODS, local_steps=tau), title=f"tau = {tau}", name="relative stationarity")
        for tau in (1, 10)
    ]
    draw_panels(panels, path, methods=classes(data), band="range")
