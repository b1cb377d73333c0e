"""Claims of Zhang, Hu & Johansson about their Figure 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedcomposite.algorithms import build
from fedcomposite.analysis import solve
from fedcomposite.papers import seed_stack
from fedcomposite.papers.base import classes, histories, only, split
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.searches import Tunable, tuned
from fedcomposite.papers.verdicts import Claim, ahead, fact, row
from fedcomposite.papers.zhang_fig2 import NUMBERS
from fedcomposite.plots import Panel, draw_panels

METHODS, BATCHES = ["Zhang", "FedDA", "FastFedDA"], (1, 20)


def run(cell: dict[str, Any]) -> pd.DataFrame:
    """The records of all seeds of a cell; from the solution where ``start`` says so."""
    stack, name = seed_stack.stack_of(cell["experiment"], cell["seeds"]), cell["method"]
    given = {k: cell[k] for k in NUMBERS if k in cell}
    if "step" in given:
        given["step"] /= cell["local_steps"]
    method, starts = build(name, local_steps=cell["local_steps"], **given), None
    if cell["start"] == "solution":
        reach = given["server_step"] * given["step"] * cell["local_steps"]
        found = [solve(p, tolerance=1e-12).solution for p in stack.problems]
        starts = [x - reach * p.evaluate(x).gradient for x, p in zip(found, stack.problems, strict=True)]
    records = seed_stack.follow(
        stack, method, rounds=cell["rounds"], every=cell["every"], batch_size=cell["batch_size"], starts=starts
    )
    table = pd.DataFrame(records)
    at_zero = [p.stationarity(np.zeros(p.dimension)) for p in stack.problems]
    table["relative"] = table["stationarity"] / table["place"].map(dict(enumerate(at_zero)))
    table["seed"] = table["place"].map(dict(enumerate(cell["seeds"])))
    return table[["seed", "round", "stationarity", "relative", "objective", "gradient_evaluations", "bytes_up"]]


def measure(study: Study) -> pd.DataFrame:
    """Tune all methods for each batch size, then run all seeds, and Zhang from the solution."""
    experiment, wanted = split(study.content)
    options = {"experiment": experiment, "local_steps": wanted["local_steps"]}
    far = {"rounds": wanted["rounds"], "every": wanted["every"], "start": "zero", **options}
    searches = {
        f"{m}, b = {b}": Tunable(
            {"method": m, "batch_size": b, "seeds": [wanted["tuning_seed"]], **far}, wanted["grids"][m]
        )
        for m in METHODS
        for b in wanted["batches"]
    }
    chosen, trials = tuned(study, run, searches, _score, extensions=wanted["extensions"])
    study.note("tuning", trials)
    cells = [{**searches[label].fixed, "seeds": wanted["seeds"], **point} for label, point in chosen.items()]
    cells += [
        {"method": "Zhang", "batch_size": b, "seeds": wanted["seeds"], "start": "solution", **options, **wanted["near"]}
        for b in (wanted["batches"] if cells else ())
    ]
    data = study.each(run, cells)
    if not len(data):
        return data
    name = data["method"] + np.where(data["start"] == "solution", " from the solution", "")
    run_ = name + ", b = " + data["batch_size"].astype(str) + ", seed " + data["seed"].astype(str)
    return data.assign(run=run_, **{"class": data["method"]})


def _score(rows: pd.DataFrame) -> float:
    """The mean logarithm of the stationarity over the last quarter."""
    late = rows[rows["round"] > 0.75 * rows["round"].max()]["relative"]
    return float(np.log(late).mean()) if np.isfinite(late).all() else np.nan


def claims(data: pd.DataFrame) -> list[Claim]:
    """Where the methods end, and how far from the solution noise keeps Zhang."""
    far, close = (only(data, start=s) for s in ("zero", "solution"))
    late = far[far["round"] >= 0.75 * far["round"].max()]

    def end(method: str, batch: int) -> pd.Series:
        return only(late, method=method, batch_size=batch).groupby("seed")["relative"].mean()

    def level(batch: int) -> pd.Series:
        settled = close[close["round"] >= close["round"].max() / 2]
        return only(settled, batch_size=batch).groupby("seed")["relative"].mean()

    noise = {b: level(b) for b in BATCHES}
    settled, plateau = "relative stationarity, started at the solution", "the same, started at zero, last quarter"
    order = sorted(BATCHES, reverse=True)
    begun = close[close["round"] == 0].groupby("seed")["relative"].first()
    return [
        fact(
            "with minibatches Zhang converges to a neighbourhood, not to zero",
            bool(noise[1].min() > 1e-6),
            row("where it starts, x* - eta~ grad f(x*)", begun, source="paper, A.2"),
            *(row(f"{settled}, b = {b}", v) for b, v in noise.items()),
            *(row(f"{plateau}, b = {b}, tuned", end("Zhang", b)) for b in BATCHES),
        ),
        ahead(
            "a batch of 20 in place of 1 makes Zhang more precise, with the same steps",
            {f"{settled}, b = {b}": noise[b] for b in order}, lower=True, ratio=True,
        ),
        *(
            ahead(
                f"b = {b}: the other methods do worse, by client drift or decaying steps",
                {m: end(m, b) for m in METHODS}, lower=True, ratio=True, note="started at zero, last quarter, tuned",
            )
            for b in BATCHES
        ),
    ]  # fmt: skip


def draw(data: pd.DataFrame, path: Path) -> None:
    """Relative stationarity against rounds, a panel for each batch size."""
    names = {"solution": "Zhang, from the solution"}
    data = data[(data["start"] != "solution") | (data["round"] > 0)]  # where it starts, 1e-15, would be all of the axis
    data = data.assign(curve=data["start"].map(names).fillna(data["method"]))
    panels = [
        Panel(
            histories(data, "curve", batch_size=b), "relative", title=f"b = {b}",
            name="relative stationarity (full gradient)", log_y=True,
        )
        for b in BATCHES
    ]  # fmt: skip
    draw_panels(panels, path, methods=classes(data, "curve"))
