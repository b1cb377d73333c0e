"""Claims of the FedCanon paper about its Figure 1 and its Remark 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fedcomposite.algorithms import FedCanon
from fedcomposite.analysis import solve
from fedcomposite.experiments import Config
from fedcomposite.papers.base import histories, last, only, slope, split
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.verdicts import Claim, fact, row
from fedcomposite.plots import Panel, canvas, draw_panels
from fedcomposite.plots.looks import swept
from fedcomposite.problems import Problem
from fedcomposite.runtime import simulate

K = 5
"""Local steps."""


def measure(study: Study) -> pd.DataFrame:
    """The figure's runs, and runs that start at a minimum."""
    wanted, content = study.settings, split(study.content)[0]
    cell = {"experiment": {k: content[k] for k in ("data", "partition", "problem", "regularizer")}, **wanted}
    cells = [{**{k: v for k, v in cell.items() if k != "betas"}, "step": beta} for beta in wanted["betas"]]
    residuals = study.each(residual, cells).drop(columns=["alpha", "rounds"], errors="ignore")
    residuals = residuals.assign(method="residual", run=[f"residual, beta = {b:g}" for b in residuals.get("step", [])])
    return pd.concat([study.sweep(), residuals.assign(seed=0)])


def minimum(problem: Problem) -> Tensor:
    """A stationary point that is no saddle.

    Where a coordinate lies in the concave part of MCP, 0 < |x| < theta lam, its curvature -1 / theta is more than the
    loss has to offer, and whatever moves a little leaves for good: such coordinates are set to zero, and solved again.
    """
    h: Any = problem.regularizer
    found = solve(problem, tolerance=1e-12).solution
    while (bent := (found != 0) & (found.abs() < h.theta * h.lam)).any():
        found = solve(problem, tolerance=1e-12, x0=torch.where(bent, 0.0, found)).solution
    return found


def residual(cell: dict[str, Any]) -> pd.DataFrame:
    """The stationarity of FedCanon's models from a minimum on, and what our formula says of its end."""
    config = Config.check({**cell["experiment"], "seed": 0, "run": {"rounds": 0}})
    problem, beta = config.make_problem(), cell["step"]
    start = minimum(problem)
    every = max(1, cell["rounds"] // 40)
    method = FedCanon(local_steps=K, step=beta, server_step=cell["alpha"])
    done = simulate(problem, method, rounds=cell["rounds"], evaluate_every=every, x0=start, progress=False)
    slope_ = problem.gradient(start)
    turned = (problem.gradient(start + 1e-6 * slope_) - slope_) / 1e-6  # H grad f
    predicted = beta / 2 * (K - 1) * float(turned[start != 0].norm())
    table = pd.DataFrame(done.history)[["round", "stationarity", "objective"]]
    return table.assign(residual=table["stationarity"], predicted=predicted)


def claims(data: pd.DataFrame) -> list[Claim]:
    """Larger alpha is faster, beta does not matter; and what beta leaves."""
    ends = last(data[data["method"] != "residual"])
    alpha, beta = (only(ends, method=m) for m in ("alpha", "beta"))
    by_alpha = alpha.set_index("server_step")["stationarity"].sort_index()
    by_beta = beta.set_index("step")["stationarity"].sort_index()
    every = only(data, method="residual")
    left = every[every["round"] == every["round"].max()].sort_values("step")
    small = left[left["step"] <= 0.04]
    exponent = slope(small["step"], small["residual"])[0]
    share = small["residual"] / small["predicted"]
    change = float(by_beta.max() / by_beta.min() - 1)
    start, least = float(every[every["round"] == 0]["residual"].max()), float(left["residual"].min())
    residuals = [
        row(f"residual, beta = {r.step:g} (the formula: {r.predicted:.2g})", float(r.residual), "0")
        for r in left.itertuples()
    ]
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
            row("stationarity at the minimum, where the runs start", start),
            *residuals,
            note=f"for beta up to 0.04 the residual is proportional to beta to the power {exponent:.2f}, and "
            f"{share.min():.2f} to {share.max():.2f} of (beta / 2) (K - 1) ||[H grad f]_support||: it goes with beta",
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
    rows = only(data, method="residual")
    rows = rows[rows["round"] > 0].assign(curve=[f"beta = {b:g}" for b in rows[rows["round"] > 0]["step"]])
    panels.append(Panel(histories(rows, "curve"), "residual", title="started at a minimum", log_y=True))
    every = sorted({f"beta = {b:g}" for b in data["step"].dropna()}, key=lambda label: float(label.split()[-1]))
    labels = [*dict.fromkeys(label for panel in panels[:2] for label in panel.histories), *every]
    figure = draw_panels(panels, columns=3, methods=swept(labels))
    for predicted in rows["predicted"].unique():
        figure.axes[4].axhline(predicted, color="0.6", linestyle=":", linewidth=0.8, zorder=0)
    figure.axes[4].set_title("started at a minimum; dotted: the formula", fontsize=8)
    canvas.finish(figure, path)
