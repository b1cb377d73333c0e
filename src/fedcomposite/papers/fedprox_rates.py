"""Theorems 1 to 4 of Yuan & Li, measured."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from scipy.optimize import minimize
from torch import Tensor

from fedcomposite import theory
from fedcomposite.algorithms import AnyAlgorithm, lookup
from fedcomposite.data import load
from fedcomposite.data.sparse import dense
from fedcomposite.papers.base import HOLDS, NOT_RUN, Claim, ahead, only, slope
from fedcomposite.papers.measuring import Study
from fedcomposite.plots import Scatter, draw_scatter
from fedcomposite.problems import Problem
from fedcomposite.runtime import NonSmoothWarning, simulate

CLIENTS, RADIUS = 10, 1.0
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


def fits(data: pd.DataFrame) -> pd.DataFrame:
    """For each theorem and I or b the mean over seeds of the slope in T, with its 95 % confidence interval."""
    rows = []
    for (t, i, b), part in data.groupby(["theorem", "I", "b"]):
        each = [slope(run["T"], run["squared"])[0] for _, run in part.groupby("seed")]
        rate, n = float(np.mean(each)), len(each)
        half = float(stats.t.ppf(0.975, n - 1) * np.std(each, ddof=1) / n**0.5) if n > 1 else 0.0
        ends = np.log(part.groupby("T")["squared"].agg(lambda v: np.exp(np.log(v).mean())))
        end = float((ends.iloc[-1] - ends.iloc[-2]) / np.log(ends.index[-1] / ends.index[-2]))
        rows.append({"theorem": str(t), "I": i, "b": b, "rate": rate, "half": half, "end": end})
    return pd.DataFrame(rows)


def bound_at(T: int, size: int) -> float:
    """max(T^-2/3, (T size)^-1/2): the bounds of Theorems 1 and 3 without their constants, size = I or b I."""
    return float(max(T ** (-2 / 3), (T * size) ** -0.5))


def claims(data: pd.DataFrame) -> list[Claim]:
    """Whether measured rates are at least those of the bounds."""
    table, found, most = fits(data.assign(theorem=data["theorem"].astype(str))), [], int(data["T"].max())
    for t, (name, loss, bound) in THEOREMS.items():
        part = only(table, theorem=t)
        if not len(part):
            found.append(Claim(f"Theorem {t}", NOT_RUN, NOT_RUN))
            continue
        told = "; ".join(
            f"slope {r['rate']:.2f} ± {r['half']:.2f}, at the last two T {r['end']:.2f} "
            f"(I = {r['I']:.0f}{f', b = {r.b:.0f}' if r['b'] else ''})"
            for _, r in part.iterrows()
        )
        verdict = f"not seen up to T = {most}: flatter than the bound's -1/2"
        if max(part["rate"]) <= -0.5:
            verdict = HOLDS
        elif max(part["rate"] - part["half"]) <= -0.5:
            verdict = "not contradicted: the intervals contain the bound's -1/2"
        found.append(
            Claim(
                f"Theorem {t}: {name}, {loss} loss: the squared gradient falls like {bound}",
                told,
                verdict,
            )
        )
    for t, key in (("1", "I"), ("3", "b")):
        rows = only(data.assign(theorem=data["theorem"].astype(str)), theorem=t, T=most)
        level = rows.groupby(key)["squared"].mean()
        each = rows.pivot(index="seed", columns=key, values="squared")
        few, many = level.index.min(), level.index.max()
        others = 1 if t == "1" else int(rows["I"].iloc[0])
        promised = bound_at(most, few * others) / bound_at(most, many * others)
        found.append(
            Claim(
                f"Theorem {t}: more {'clients' if key == 'I' else 'samples'} make it faster (speedup in the bound)",
                f"at T = {most}: {level[few]:.2g} ({key} = {few}), {level[many]:.2g} ({key} = {many}); "
                f"the bound's ratio is {promised:.1f}, measured {level[few] / level[many]:.1f}",
                ahead(each[many], [each[few]], lower=True),
            )
        )
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
