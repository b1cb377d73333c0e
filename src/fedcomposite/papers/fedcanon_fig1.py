"""Claims of the FedCanon paper about its Figure 1 and its Remark 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from fedcomposite.algorithms import FedCanon
from fedcomposite.analysis import solve
from fedcomposite.experiments import Config
from fedcomposite.papers.base import classes, histories, last, only, slope, split
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.verdicts import Claim, fact, row
from fedcomposite.plots import Panel, draw_panels
from fedcomposite.runtime import simulate


def measure(study: Study) -> pd.DataFrame:
    """The figure's runs, and runs that start at the solution."""
    wanted, content = study.settings, split(study.content)[0]
    cell = {"experiment": {k: content[k] for k in ("data", "partition", "problem", "regularizer")}, **wanted}
    residuals = study.each(residual, [cell], alone=True).drop(columns=["experiment", *wanted], errors="ignore")
    residuals = residuals.assign(method="residual", run=[f"residual, beta = {b:g}" for b in residuals.get("step", [])])
    return pd.concat([study.sweep(), residuals.assign(seed=0)])


def residual(cell: dict[str, Any]) -> pd.DataFrame:
    """The stationarity at which FedCanon settles, for each beta."""
    config = Config.check({**cell["experiment"], "seed": 0, "run": {"rounds": 0}})
    problem = config.make_problem()
    start = solve(problem, tolerance=1e-12).solution
    rows = []
    for beta in cell["betas"]:
        method = FedCanon(local_steps=5, step=beta, server_step=cell["alpha"])
        run = simulate(problem, method, rounds=cell["rounds"], evaluate_every=cell["rounds"], x0=start, progress=False)
        rows.append({"step": beta, "start": run.history[0]["stationarity"], **run.history[-1]})
    return pd.DataFrame(rows)[["step", "start", "stationarity", "objective", "round"]]


def claims(data: pd.DataFrame) -> list[Claim]:
    """Larger alpha is faster, beta does not matter; and what beta leaves."""
    ends = last(data[data["method"] != "residual"])
    alpha, beta = (only(ends, method=m) for m in ("alpha", "beta"))
    by_alpha = alpha.set_index("server_step")["stationarity"].sort_index()
    by_beta = beta.set_index("step")["stationarity"].sort_index()
    left = only(data, method="residual").sort_values("step")
    exponent = slope(left["step"], left["stationarity"])[0]
    change = float(by_beta.max() / by_beta.min() - 1)
    start, least = float(left["start"].max()), float(left["stationarity"].min())
    residuals = [row(f"residual, beta = {b:g}", v) for b, v in zip(left["step"], left["stationarity"], strict=True)]
    printed = {"paper": "a figure", "source": "paper: alpha, beta; ours: K, MCP"}
    return [
        fact(
            "a larger alpha, with beta fixed, makes loss and prox-gradient fall faster",
            bool(by_alpha.is_monotonic_decreasing),
            *(row(f"stationarity at the end, alpha = {a:g}", v, digits=3, **printed) for a, v in by_alpha.items()),
        ),
        fact(
            "beta, with alpha fixed, hardly influences the rate of convergence (ends within 10 %)",
            change < 0.1,
            *(row(f"stationarity at the end, beta = {b:g}", v, digits=4, **printed) for b, v in by_beta.items()),
        ),
        fact(
            "beta does not matter for the limit either (Remark 4: its influence vanishes with the aggregation)",
            not (exponent > 0.5 and least > 100 * start),
            row("stationarity at the solution, where the runs start", start),
            *residuals,
            note=f"the residual is proportional to beta to the power {exponent:.2f}: it vanishes with beta only",
        ),
    ]


def draw(data: pd.DataFrame, path: Path) -> None:
    """Loss and stationarity for both sweeps."""
    panels = []
    for sweep, key, fixed in (("alpha", "server_step", "beta = 0.02"), ("beta", "step", "alpha = 0.05")):
        rows = only(data, method=sweep)
        rows = rows.assign(curve=[f"{sweep} = {v:g}" for v in rows[key]])
        runs = histories(rows, "curve")
        panels += [Panel(runs, "loss", title=fixed, log_y=False), Panel(runs, "stationarity", title=fixed)]
    names = {label: "FedCanon" for panel in panels for label in panel.histories}
    draw_panels(panels, path, columns=4, methods={**classes(data.dropna(subset=["class"])), **names})
