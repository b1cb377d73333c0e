"""Every composite method on six problems: the sweeps, the ranking, the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedcomposite.experiments import grids
from fedcomposite.papers.base import classes, first_at, histories, last, relative
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.verdicts import NOT_JUDGED, Claim, open_claim, row
from fedcomposite.plots import Panel, draw_panels

METHODS = [
    "Zhang", "FedNMap", "FedCanon", "FedCanonII", "FedMid", "FedDA", "FastFedDA", "FedDR", "FedADMM", "ProxScaffnew",
    "EControlDA", "ProximalGradient",
]  # fmt: skip
COSTS = {"round": "rounds", "bytes": "MB", "prox_evaluations": "proxes", "seconds": "seconds"}
TARGET = 1e-4
NOBODY = "nobody"
NO_CLAIM = "a ranking of ours: no paper claims it"


def measure(study: Study) -> pd.DataFrame:
    """A sweep for each problem, with the methods that its regularizer allows."""
    wanted, found = study.settings, []
    (pattern,) = study.content["algorithms"]
    for data in wanted["data"]:
        for h in wanted["regularizers"]:
            names = [m for m in METHODS if h["name"] == "L1" or m not in wanted["convex_only"]]
            specs: list[dict[str, Any]] = [_spec(pattern, name) for name in names]
            part = f"{data['name']}, {grids.shown(h)}"
            rows = study.sweep(part, data=data, regularizer=h, algorithms=[*specs, {"name": "ProxNewton"}])
            found.append(rows.assign(data=data["name"], h=h["name"]))
    whole = pd.concat(found, ignore_index=True)
    return _brief(whole) if len(whole) else whole


def _brief(data: pd.DataFrame) -> pd.DataFrame:
    """A few points of every curve, and at its last one what it cost to reach the target; inf if it was not."""
    data = data.assign(relative=relative(data), bytes=(data["bytes_up"] + data["bytes_down"]) / 1e6)
    costs = {name: first_at(data, data["relative"], TARGET, key).fillna(np.inf) for key, name in COSTS.items()}
    kept = ["round", "stationarity", "status", "method", "class", "seed", "run", "part", "data", "h"]
    rows = []
    for run, part in data.groupby("run", sort=False):
        few = part.iloc[np.unique(np.linspace(0, len(part) - 1, 10).round().astype(int))][kept]
        empty = [np.nan] * (len(few) - 1)
        rows.append(few.assign(**{name: [*empty, float(series.loc[str(run)])] for name, series in costs.items()}))
    return pd.concat(rows, ignore_index=True)


def _spec(pattern: dict[str, Any], name: str) -> dict[str, Any]:
    """The common table for one method, without local steps if it has none."""
    plain = {k: v for k, v in pattern.items() if k not in ("name", "local_steps")}
    local = {} if name in ("ProximalGradient", "EControlDA") else {"local_steps": pattern["local_steps"]}
    return {"name": name, **plain, **local}


def ranking(data: pd.DataFrame) -> pd.DataFrame:
    """For each problem and method the median over seeds of every cost of reaching the target; inf if it is not."""
    ends = last(data.assign(relative=relative(data)))
    ends = ends.fillna({cost: np.inf for cost in COSTS.values()})
    return ends.groupby(["part", "method"], sort=False)[[*COSTS.values(), "relative"]].median().reset_index()


def claims(data: pd.DataFrame) -> list[Claim]:
    """Who is first, problem by problem, and how often a method gets there."""
    table, found = ranking(data), []
    first_order = table[table["method"] != "ProxNewton"]
    for part, rows in first_order.groupby("part", sort=False):
        best = {name: _best(rows, name) for name in COSTS.values()}
        if best["rounds"] == NOBODY:
            low = rows.sort_values("relative").head(3)
            names = ", ".join(f"{m} {v:.2g}" for m, v in zip(low["method"], low["relative"], strict=True))
            best = {"nobody gets there; lowest at the end": names}
        newton = table[(table["part"] == part) & (table["method"] == "ProxNewton")]["rounds"].iloc[0]
        ranks = [row(cost, who) for cost, who in best.items()]
        more = row("ProxNewton, rounds", float(newton), digits=3)
        says = f"{part}: first to 1e-4 (first-order methods)"
        found.append(open_claim(says, *ranks, more, note=NO_CLAIM, verdict=NOT_JUDGED))
    reached = first_order.assign(there=np.isfinite(first_order["rounds"])).groupby("method")["there"]
    score = (reached.sum().astype(int).astype(str) + " of " + reached.count().astype(str)).sort_values(ascending=False)
    rows_ = [row(str(m), s) for m, s in score.items()]
    found.append(open_claim("problems on which a method reaches the target", *rows_, note=NO_CLAIM, verdict=NOT_JUDGED))
    return found


def _best(rows: pd.DataFrame, cost: str, most: int = 3) -> str:
    there = rows[np.isfinite(rows[cost])].sort_values(cost).head(most)
    return ", ".join(f"{m} {v:.3g}" for m, v in zip(there["method"], there[cost], strict=True)) or NOBODY


def draw(data: pd.DataFrame, path: Path) -> None:
    """Relative stationarity against rounds, a panel for each problem."""
    panels = [
        Panel(histories(rows), title=f"{d}, {h}", name="relative stationarity")
        for (d, h), rows in data.groupby(["data", "h"], sort=False)
    ]
    draw_panels(panels, path, columns=3, methods=classes(data))
