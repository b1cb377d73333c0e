"""Theorems 1 to 4 of Yuan & Li, measured."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from torch import Tensor

from fedcomposite import theory
from fedcomposite.algorithms import AnyAlgorithm, lookup
from fedcomposite.data import load
from fedcomposite.data.sparse import dense
from fedcomposite.papers.base import only, slope
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.verdicts import NOT_JUDGED, Claim, Row, against, ahead, open_claim
from fedcomposite.plots import Scatter, draw_scatter
from fedcomposite.problems import Problem
from fedcomposite.runtime import NonSmoothWarning, simulate

CLIENTS, RADIUS = 10, 1.0
BOUND = "up to T = {}; the theorem is an upper bound with unnamed constants, which a flatter slope does not contradict"
THEOREMS = {
    "1": ("FedProx", "logistic", "max(T^-2/3, (TI)^-1/2)"),
    "2": ("FedProx", "hinge", "T^-1/2"),
    "3": ("FedMSPP", "logistic", "max(T^-2/3, (TbI)^-1/2)"),
    "4": ("FedMSPP", "hinge", "T^-1/2"),
}


def measure(study: Study) -> pd.DataFrame:
    """A run for each theorem, T, I or b, and seed."""
    s = study.settings
    cells = [
        {"theorem": t, "T": T, "I": i, "b": b, "seed": seed}
        for t in THEOREMS
        for i, b in ([(i, 0) for i in s["clients"]] if t in "12" else [(max(s["clients"]), b) for b in s["batches"]])
        for T in s["rounds"]
        for seed in range(s["seeds"])
    ]
    return study.each(run, cells)


def run(cell: dict[str, Any]) -> pd.DataFrame:
    """The mean over a run of what the theorem bounds."""
    name, loss, _ = THEOREMS[cell["theorem"]]
    shape = {"clients": CLIENTS, "features": 5, "samples": 20, "alpha": 0.0, "beta": 0.0, "scale": False}
    silos = load("synthetic", seed=cell["seed"], **shape)
    problem, batch = Problem(silos, loss=loss), cell["b"] or None
    known = theory.constants(problem, batch=batch, rounds=cell["T"], participation=cell["I"] / CLIENTS)
    method: AnyAlgorithm = theory.choose(
        lookup(name), "theory", known, {} if loss == "logistic" else {"local_steps": 100}
    )
    options: dict[str, Any] = {"batch_size": batch, "participation": cell["I"] / CLIENTS, "seed": cell["seed"]}
    options |= {"evaluate_every": cell["T"], "keep_solutions": True, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonSmoothWarning)  # Theorem 2 is about that
        made = simulate(problem, method, rounds=cell["T"], **options)
    assert made.solutions is not None
    models = made.solutions[:: max(1, cell["T"] // 32)]  # 32 of them tell the mean
    return pd.DataFrame({"squared": [float(np.mean([_size(problem, x) ** 2 for x in models]))]})


def _size(problem: Problem, x: Tensor) -> float:
    """The norm of the gradient, of the Moreau envelope where the loss has kinks."""
    return float(problem.gradient(x).norm()) if problem.loss.smooth else _envelope(problem, x)


def _envelope(problem: Problem, x: Tensor) -> float:
    """The norm of the gradient of the RADIUS-Moreau envelope of the mean hinge loss, by its dual: a box QP."""
    silos = problem.silos
    A = (silos.targets[:, None] * dense(silos.features)).double().numpy()
    m, margin = len(A), 1 - A @ x.numpy()

    def dual(a: Any) -> tuple[float, Any]:
        s = A.T @ a
        return float(RADIUS / 2 * s @ s - a @ margin), RADIUS * (A @ s) - margin

    found = minimize(dual, np.full(m, 0.5 / m), jac=True, method="L-BFGS-B", bounds=[(0, 1 / m)] * m)
    return float(np.linalg.norm(A.T @ found.x))


def rates(part: pd.DataFrame) -> pd.Series:
    """For each seed the slope of log(mean squared gradient) against log T."""
    return pd.Series({s: slope(run["T"], run["squared"])[0] for s, run in part.groupby("seed")}, dtype=float)


def bound_at(T: int, size: int) -> float:
    """max(T^-2/3, (T size)^-1/2): the bounds of Theorems 1 and 3 without their constants, size = I or b I."""
    return float(max(T ** (-2 / 3), (T * size) ** -0.5))


def claims(data: pd.DataFrame) -> list[Claim]:
    """Whether measured rates are at least those of the bounds: upper bounds, which a flatter slope up to some T does
    not contradict.
    """
    data, found, most = data.assign(theorem=data["theorem"].astype(str)), [], int(data["T"].max())
    for t, (name, loss, bound) in THEOREMS.items():
        says = (
            f"Theorem {t}: {name}, {loss} loss: the squared gradient falls at least like T to the power -1/2 ({bound})"
        )
        parts = [*only(data, theorem=t).groupby(["I", "b"])]
        if not parts:
            found.append(open_claim(says, note="not run", verdict=NOT_JUDGED))
            continue
        rows: list[Row] = []
        for (i, b), part in parts:
            what = f"slope of log squared gradient, I = {i:g}" + (f", b = {b:g}" if b else "")
            rows += against(says, what, rates(part), -0.5, above=False, paper="-1/2 or steeper", source="paper").rows
        if all(r.lead is not None and r.lead.mean > 0 for r in rows):
            found.append(Claim(says, tuple(rows)))
        else:
            found.append(open_claim(says, *(r._replace(lead=None) for r in rows), note=BOUND.format(most)))
    for t, key in (("1", "I"), ("3", "b")):
        rows_ = only(data, theorem=t, T=most)
        each = rows_.pivot(index="seed", columns=key, values="squared")
        few, many = int(min(rows_[key])), int(max(rows_[key]))
        others = 1 if t == "1" else int(rows_["I"].iloc[0])
        promised = bound_at(most, few * others) / bound_at(most, many * others)
        found.append(
            ahead(
                f"Theorem {t}: more {'clients' if key == 'I' else 'samples'} make it faster (speedup in the bound)",
                {f"squared gradient, {key} = {many}": each[many], f"squared gradient, {key} = {few}": each[few]},
                lower=True, ratio=True, source="paper", note=f"at T = {most}; the bound's ratio is {1 / promised:.2f}",
            )
        )  # fmt: skip
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """The measured quantity against T, a panel for each theorem."""
    panels = []
    for t, (name, loss, _) in THEOREMS.items():
        rows = only(data.assign(theorem=data["theorem"].astype(str)), theorem=t)
        points = {}
        for (i, b), part in rows.groupby(["I", "b"]):
            seen = np.log(part.set_index("T")["squared"]).groupby(level=0).agg(["mean", "std"]).fillna(0.0)
            middle, factor = np.exp(seen["mean"]), np.exp(seen["std"])
            spread = [list(middle - middle / factor), list(middle * factor - middle)]
            points[f"I = {i}" + (f", b = {b}" if b else "")] = (list(seen.index), list(middle), spread)
        panels.append(Scatter(points, "rounds T", "mean squared gradient", f"Theorem {t}: {name}, {loss}"))
    draw_scatter(
        panels,
        path,
        width=9.0,
        caption="means and whiskers (one standard deviation over seeds) are those of the logarithm",
    )
