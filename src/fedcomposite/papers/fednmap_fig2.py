"""Claims of the FedNMap paper about its Figure 2."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import Claim, ahead, histories, judged, only, told
from fedcomposite.plots import Panel, draw_panels

TAUS = (2, 10)
METHODS = ["FedNMap", "Zhang", "FedCanon"]


def final(data: pd.DataFrame) -> pd.DataFrame:
    """The mean stationarity over the last quarter of each run's records: a single one is as noisy as its minibatch."""
    late = data[data["round"] > 0.75 * data.groupby("run")["round"].transform("max")]
    columns = [c for c in ("class", "method", "local_steps", "partition.clients", "clients", "seed") if c in late]
    return late.groupby(["run", *columns])[["stationarity"]].mean().reset_index()


def clients_of(data: pd.DataFrame) -> str:
    """The column that holds the number of clients."""
    return next(c for c in ("partition.clients", "clients") if c in data)


def claims(data: pd.DataFrame) -> list[Claim]:
    """Who is lowest, and what more clients and more local steps do."""
    ends, key = final(data), clients_of(data)
    found = []
    for tau in TAUS:
        for n in sorted(ends[key].unique()):
            rows = only(ends, local_steps=tau, **{key: n}).set_index("seed")
            each = {m: rows[rows["class"] == m]["stationarity"] for m in METHODS}
            theirs = [each[m] for m in METHODS[1:]]
            found.append(
                Claim(
                    f"n = {n}, tau = {tau}: FedNMap's stationarity is the lowest",
                    ", ".join(f"{m} {told(v)}" for m, v in each.items()),
                    ahead(each["FedNMap"], theirs, least=0.05 * each["FedNMap"].mean(), lower=True),
                )
            )
    ours = only(ends, **{"class": "FedNMap"})
    by_tau = ours.pivot_table(index=key, columns="local_steps", values="stationarity")
    found.append(
        Claim(
            "more local steps improve convergence at a fixed number of clients",
            "; ".join(
                f"n = {n}: " + ", ".join(f"tau = {t} {v:.2g}" for t, v in row.items()) for n, row in by_tau.iterrows()
            ),
            judged(bool((by_tau[TAUS[-1]] < by_tau[TAUS[0]]).all()), by_tau),
        )
    )
    falls = all(column.is_monotonic_decreasing for _, column in by_tau.items())
    found.append(
        Claim(
            "more clients improve convergence at a fixed number of local steps",
            "; ".join(
                f"tau = {t}: " + ", ".join(f"n = {n} {v:.2g}" for n, v in column.items())
                for t, column in by_tau.items()
            ),
            judged(falls, by_tau),
        )
    )
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """Stationarity against rounds, a panel for each n and tau."""
    key = clients_of(data)
    panels = [
        Panel(histories(data, "class", local_steps=tau, **{key: n}), title=f"n = {n}, tau = {tau}")
        for tau in TAUS
        for n in sorted(data[key].unique())
    ]
    draw_panels(panels, path, columns=data[key].nunique())
