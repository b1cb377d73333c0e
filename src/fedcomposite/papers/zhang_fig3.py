"""Claims of Zhang, Hu & Johansson about their Figure 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from fedcomposite.algorithms import Zhang
from fedcomposite.analysis import solve
from fedcomposite.experiments import Config
from fedcomposite.papers.base import classes, histories, only, relative, split
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.verdicts import Claim, ahead, fact, row
from fedcomposite.plots import Panel, draw_panels
from fedcomposite.runtime import simulate

METHODS, BATCHES = ["Zhang", "FedDA", "FastFedDA"], (1, 20)


def measure(study: Study) -> pd.DataFrame:
    """The figure's runs, and runs of Zhang that start at the solution."""
    content, near = split(study.content)[0], study.settings["near"]
    experiment = {k: content[k] for k in ("data", "problem", "regularizer")}
    (steps,) = (a for a in content["algorithms"] if a["name"] == "Zhang")
    cells = [
        {"experiment": {**experiment, "algorithm": steps}, "batch_size": b, "seed": s, **near}
        for b in BATCHES
        for s in content["seeds"]
    ]
    close = study.each(settle, cells)
    far = study.sweep()
    if len(close):
        close = close.drop(columns=list(near)).assign(start="solution", method="Zhang", **{"class": "Zhang"})
        close["run"] = [f"Zhang from the solution, b = {r.batch_size}, seed {r.seed}" for r in close.itertuples()]
    return pd.concat([far.assign(start="zero"), close], ignore_index=True)


def settle(cell: dict[str, Any]) -> pd.DataFrame:
    """The stationarity of a run that starts at the solution, over its value at zero."""
    config = Config.check({**cell["experiment"], "seed": cell["seed"], "run": {"rounds": 0}})
    problem, given = config.make_problem(), cell["experiment"]["algorithm"]
    best = solve(problem, tolerance=1e-12).solution
    method = Zhang(given["local_steps"], given["step"], server_step=given["server_step"])
    run = simulate(
        problem, method, rounds=cell["rounds"], batch_size=cell["batch_size"], seed=cell["seed"],
        evaluate_every=max(1, cell["rounds"] // 80), x0=best, progress=False,
    )  # fmt: skip
    first = problem.stationarity(best.new_zeros(best.shape))
    rows = [{"round": r["round"], "stationarity": r["stationarity"]} for r in run.history]
    return pd.DataFrame(rows).assign(relative=lambda t: t["stationarity"] / first)


def claims(data: pd.DataFrame) -> list[Claim]:
    """Where the methods end, and how far from the solution noise keeps Zhang."""
    far, close = (only(data, start=s) for s in ("zero", "solution"))
    far = far.assign(relative=relative(far))
    late = far[far["round"] >= 0.75 * far["round"].max()]

    def end(method: str, batch: int) -> pd.Series:
        return only(late, method=method, batch_size=batch).groupby("seed")["relative"].mean()

    def level(batch: int) -> pd.Series:
        settled = close[close["round"] >= close["round"].max() / 2]
        return only(settled, batch_size=batch).groupby("seed")["relative"].mean()

    noise = {b: level(b) for b in BATCHES}
    settled, plateau = "relative stationarity, started at the solution", "the same, started at zero, last quarter"
    order = sorted(BATCHES, reverse=True)
    return [
        fact(
            "with minibatches Zhang converges to a neighbourhood, not to zero",
            bool(noise[1].min() > 1e-6),
            *(row(f"{settled}, b = {b}", v) for b, v in noise.items()),
            *(row(f"{plateau}, b = {b}", end("Zhang", b)) for b in BATCHES),
            note="from zero all batches end on the same plateau of slow coordinates, which is not noise",
        ),
        ahead(
            "a batch of 20 in place of 1 makes Zhang more precise",
            {f"{settled}, b = {b}": noise[b] for b in order}, lower=True, ratio=True,
        ),
        *(
            ahead(
                f"b = {b}: the other methods do worse, by client drift or decaying steps",
                {m: end(m, b) for m in METHODS}, lower=True, ratio=True, note="started at zero, last quarter",
            )
            for b in BATCHES
        ),
    ]  # fmt: skip


def draw(data: pd.DataFrame, path: Path) -> None:
    """Relative stationarity against rounds, a panel for each batch size."""
    names = {"solution": "Zhang, from the solution"}
    data = data.assign(curve=data["start"].map(names).fillna(data["method"]))
    data = data.assign(relative=data.get("relative", relative(data)).fillna(relative(data)))
    panels = [
        Panel(
            histories(data, "curve", batch_size=b), "relative", title=f"b = {b}",
            name="relative stationarity (full gradient)", log_y=True,
        )
        for b in BATCHES
    ]  # fmt: skip
    draw_panels(panels, path, methods=classes(data, "curve"))
