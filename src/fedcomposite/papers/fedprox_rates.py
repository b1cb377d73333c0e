"""Theorems 1 to 4 of Yuan & Li and their remarks, measured."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize
from torch import Tensor

from fedcomposite import theory
from fedcomposite.algorithms import AnyAlgorithm, lookup
from fedcomposite.data import Silos, load
from fedcomposite.data.sparse import dense
from fedcomposite.papers.base import only, slope
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.verdicts import NOT_JUDGED, Claim, Row, against, ahead, open_claim, row
from fedcomposite.plots import Scatter, canvas, draw_scatter
from fedcomposite.plots.looks import swept
from fedcomposite.problems import Problem
from fedcomposite.regularizers import MCP
from fedcomposite.runtime import NonSmoothWarning, simulate

CLIENTS, RADIUS = 10, 1.0
BOUND = "up to T = {}; the theorem is an upper bound with unnamed constants, which a flatter slope does not contradict"
THEOREMS = {
    "1": ("FedProx", "logistic", "max(T^-2/3, (TI)^-1/2)"),
    "2": ("FedProx", "hinge", "T^-1/2"),
    "3": ("FedMSPP", "logistic", "max(T^-2/3, (TbI)^-1/2)"),
    "4": ("FedMSPP", "hinge", "T^-1/2"),
    "1 all": ("FedProx", "logistic", "T^-2/3"),
    "1 alike": ("FedProx", "logistic", "T^-1"),
    "1 replaced": ("FedProx", "logistic", "max(T^-2/3, (TI)^-1/2)"),
    "2 weak": ("FedProx", "hinge", "T^-1/2"),
}
REMARKS = {
    "1 all": ("Remark 2: FedProx, logistic loss, all clients in every round", -2 / 3, "-2/3"),
    "1 alike": ("Remark 2: FedProx, logistic loss, all clients, (B, 0)-LGD (all have the same samples)", -1.0, "-1"),
    "2 weak": ("Theorem 2: FedProx, hinge loss and MCP, weakly convex and with kinks", -0.5, "-1/2"),
}
"""What is said of other settings, and the exponent of the bound."""
WEAK = MCP(0.1, theta=2.0)


def measure(study: Study) -> pd.DataFrame:
    """A run for each theorem, T, I or b, and seed."""
    s = study.settings
    some = {t: [(i, 0) for i in s["clients"]] for t in "12"}
    some |= {t: [(max(s["clients"]), b) for b in s["batches"]] for t in "34"}
    some |= {"1 all": [(CLIENTS, 0)], "1 alike": [(CLIENTS, 0)]}
    some |= {t: [(max(s["clients"]), 0)] for t in ("1 replaced", "2 weak")}
    cells = [
        {"theorem": t, "T": T, "I": i, "b": b, "seed": seed}
        for t in THEOREMS
        for i, b in some[t]
        for T in s["rounds"]
        for seed in range(s["seeds"])
    ]
    return study.each(run, cells)


def run(cell: dict[str, Any]) -> pd.DataFrame:
    """The mean over a run of what the theorem bounds."""
    what = cell["theorem"]
    name, loss, _ = THEOREMS[what]
    shape = {"clients": CLIENTS, "features": 5, "samples": 20, "alpha": 0.0, "beta": 0.0, "scale": False}
    silos = load("synthetic", seed=cell["seed"], **shape)
    if what == "1 alike":
        silos = Silos.from_arrays([(dense(silos.features), silos.targets)] * CLIENTS)
    h = WEAK if what == "2 weak" else None
    problem, batch = Problem(silos, loss=loss, regularizer=h), cell["b"] or None
    known = theory.constants(problem, batch=batch, rounds=cell["T"], participation=cell["I"] / CLIENTS)
    fields: dict[str, Any] = {} if loss == "logistic" else {"local_steps": 100}
    if what == "1 alike":  # nothing is to be averaged away, so eta need not shrink with T
        fields["prox_step"] = 1 / (3 * problem.smoothness())
    method: AnyAlgorithm = theory.choose(lookup(name), "theory", known, fields)
    options: dict[str, Any] = {"batch_size": batch, "participation": cell["I"] / CLIENTS, "seed": cell["seed"]}
    options |= {"evaluate_every": cell["T"], "keep_solutions": True, "progress": False}
    options |= {"replace": True} if what == "1 replaced" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonSmoothWarning)  # Theorem 2 is about that
        made = simulate(problem, method, rounds=cell["T"], **options)
    assert made.solutions is not None
    models = made.solutions[:: max(1, cell["T"] // 32)]  # 32 of them tell the mean
    return pd.DataFrame({"squared": [float(np.mean([_size(problem, x) ** 2 for x in models]))]})


def _size(problem: Problem, x: Tensor) -> float:
    """The norm of the gradient, of the Moreau envelope where the loss has kinks."""
    return float(problem.gradient(x).norm()) if problem.loss.smooth else envelope(problem, x)


def envelope(problem: Problem, w: Tensor) -> float:
    """The norm of the gradient of the Moreau envelope of the mean hinge loss plus h, by the dual in a box.

    Its radius is RADIUS, or what Theorem 2 allows where h is weakly convex: h + ||. - w||^2 / (2 r) is convex then.
    """
    silos, h = problem.silos, problem.regularizer
    radius = min(RADIUS, 0.99 / (2 * h.rho)) if h.rho else RADIUS
    A = (silos.targets[:, None] * dense(silos.features)).double()
    m = len(A)

    def dual(a: Any) -> tuple[float, Any]:
        t = torch.from_numpy(a)
        x = h.prox(w + radius * (t @ A), radius)
        below = float(t.sum() - t @ (A @ x)) + float(h.value(x)) + float((x - w).square().sum()) / (2 * radius)
        return -below, (A @ x - 1).numpy()

    found = minimize(dual, np.full(m, 0.5 / m), jac=True, method="L-BFGS-B", bounds=[(0, 1 / m)] * m)
    x = h.prox(w + radius * (torch.from_numpy(found.x) @ A), radius)
    return float((w - x).norm()) / radius


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
    for t in "1234":
        name, loss, bound = THEOREMS[t]
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
        found.append(_at_least(says, rows, most))
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
    return [*found, *_remarks(data, most)]


def _at_least(says: str, rows: list[Row], most: int) -> Claim:
    """A claim about rates, which flatter slopes do not contradict."""
    if all(r.lead is not None and r.lead.mean > 0 for r in rows):
        return Claim(says, tuple(rows))
    return open_claim(says, *(r._replace(lead=None) for r in rows), note=BOUND.format(most))


def _remarks(data: pd.DataFrame, most: int) -> list[Claim]:
    """Other settings than those of the theorems' own claims."""
    found = []
    for t, (says, exponent, told_) in REMARKS.items():
        part = only(data, theorem=t)
        if len(part):
            printed = f"{told_} or steeper"
            made = against(
                says, "slope of log squared gradient", rates(part), exponent, above=False, paper=printed, source="paper"
            )
            says = f"{says}: the squared gradient falls at least like T to the power {told_}"
            found.append(_at_least(says, list(made.rows), most))
    ends = only(data, T=most)
    rough = only(ends, theorem="2").pivot(index="seed", columns="I", values="squared")
    if len(rough):
        found.append(
            open_claim(
                "Remark 6: the bound of Theorem 2 does not depend on I",
                *(row(f"squared gradient, I = {i}", rough[i], source="paper") for i in rough.columns),
                note="an upper bound, which neither a difference nor none contradicts",
            )
        )
    again = only(ends, theorem="1 replaced")
    plain = only(ends, theorem="1", I=list(again["I"].unique()))
    if len(plain) and len(again):
        each = {"without": plain.set_index("seed")["squared"], "with": again.set_index("seed")["squared"]}
        says = "Theorem 1 is about clients drawn with replacement: drawing without does better"
        found.append(ahead(says, each, lower=True, ratio=True, least=0.02, source="paper"))
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
        title = f"{t}: {name}, {loss}" if len(t) == 1 else f"{t}: {loss}"
        panels.append(Scatter(points, "rounds T", "mean squared gradient", title))
    labels = swept(label for panel in panels for label in panel.points)
    caption = "means and whiskers (one standard deviation over seeds) are those of the logarithm; dotted: T^(-1/2)"
    figure = draw_scatter(panels, columns=4, methods=labels, caption=caption)
    for axis, panel in zip(figure.axes, panels, strict=True):
        if panel.points:
            across, levels, _ = next(iter(panel.points.values()))
            fall = [levels[0] * (across[0] / T) ** 0.5 for T in across]
            axis.plot(across, fall, color="0.6", linestyle=":", linewidth=0.8, zorder=0)
    canvas.finish(figure, path)
