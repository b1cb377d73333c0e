"""Claims of the FedMLS paper about its Figure 1, and its methods with the step rules of the authors' code."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy.optimize import linprog

from fedcomposite.data import load
from fedcomposite.data.sparse import dense
from fedcomposite.experiments import ConfigError
from fedcomposite.papers.base import classes, first_at, histories, last, only, slope
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.searches import Tunable, tuned
from fedcomposite.papers.verdicts import Claim, against, ahead, open_claim, row
from fedcomposite.plots import Panel, canvas, draw_panels

Floats = npt.NDArray[np.float64]
SOURCE = Path(__file__).with_suffix(".c")
METHODS = ["FedAvg", "Scaffold", "Scaffnew", "FedMLS"]
"""In the order of the compiled loop."""
CLIENTS, WIDTH = 10, 12
LEVELS = np.array([1.0, 0.3, 0.1, 0.03, 0.01])
CLASSES = {
    "FedMLS": "FedMLS", "FedAvg": "FedAvg", "Scaffold": "Scaffold", "Scaffnew": "Scaffnew",
    "Scaffnew, uncorrected": "Scaffnew",
}  # fmt: skip


@functools.cache
def loop() -> Any:
    """The compiled loop, ``fedmls_fig1.c``."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise ConfigError("fedmls-fig1 needs a C compiler: install gcc or clang, or set CC")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "loop.so"
        options = ["-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno"]
        subprocess.run([compiler, *options, str(SOURCE), "-o", str(target), "-lm"], check=True)
        library = ctypes.CDLL(str(target))
    library.follow.restype = None
    return library.follow


@functools.cache
def clients(seed: int) -> tuple[tuple[Floats, ...], float]:
    """The clients' samples times their labels, raw and with a bias, for the seed's split and clusters; the optimum."""
    pooled = load("wisconsin", standardize=False, test=0.2, seed=seed)
    silos = pooled.partition("kmeans", clients=CLIENTS, seed=seed)
    parts = [silos[i] for i in range(CLIENTS)]
    rows = tuple(
        (y[:, None].double() * torch.cat([dense(X).double(), torch.ones(len(X), 1).double()], 1)).numpy()
        for X, y in parts
    )
    whole = np.concatenate(rows)
    m, d = whole.shape
    cost = np.r_[np.zeros(d), np.ones(m)]  # min sum xi,  xi >= 1 - A w,  xi >= 0
    lowest = linprog(cost, np.c_[-whole, -np.eye(m)], -np.ones(m), bounds=[(None, None)] * d + [(0, None)] * m)
    return rows, float(lowest.fun or 0.0)


def objective(rows: Sequence[Floats], x: Floats) -> Floats:
    """The sum of hinge losses at each of the models ``(k, d)``."""
    found: Floats = np.maximum(1 - x @ np.concatenate(rows).T, 0).sum(1)
    return found


def kept(rounds: int, count: int = 60) -> list[int]:
    """The rounds that are recorded, evenly on a logarithmic axis."""
    spaced = np.geomspace(1, rounds, count).round().astype(int)
    return [0, *sorted(set(spaced.tolist()))]


def follow(
    method: str, rows: Sequence[Floats], first: float, rounds: Sequence[int], seed: int, share: float = 0.1
) -> Floats:
    """The models after some rounds, ``(k, d)``; ``share`` of a client's samples make a minibatch."""
    name, d = method.split(",")[0], rows[0].shape[1]
    padded = np.zeros((sum(map(len, rows)), WIDTH))
    padded[:, :d] = np.concatenate(rows)
    sizes = (ctypes.c_int * len(rows))(*map(len, rows))
    wanted = (ctypes.c_long * (len(rounds) + 1))(*rounds, -1)
    models = np.zeros((len(rounds), WIDTH))
    double = ctypes.POINTER(ctypes.c_double)
    loop()(
        METHODS.index(name), len(rows), sizes, padded.ctypes.data_as(double), ctypes.c_double(share),
        ctypes.c_double(first), ctypes.c_long(rounds[-1]), method == name, ctypes.c_uint64(seed), wanted,
        models.ctypes.data_as(double),
    )  # fmt: skip
    return models[:, :d]


def run(cell: dict[str, Any]) -> pd.DataFrame:
    """One method with one first step and one seed: the objective at some rounds."""
    rows, best = clients(cell["seed"])
    rounds = kept(cell["rounds"])
    values = objective(rows, follow(cell["method"], rows, cell["first"], rounds, cell["seed"]))
    return pd.DataFrame({"round": rounds, "objective": values, "gap": (values - best) / best, "reference": best})


def trial(cell: dict[str, Any]) -> pd.DataFrame:
    """The gap at the end, for every tuning seed."""
    ends = [run({**cell, "seed": s}).tail(1).assign(seed=s) for s in cell["seeds"]]
    return pd.concat(ends, ignore_index=True)


def measure(study: Study) -> pd.DataFrame:
    """Choose the first steps on splits of their own and at the full horizon, then run all seeds."""
    wanted, rounds = study.settings, study.settings["rounds"]
    searches = {
        m: Tunable({"method": m, "rounds": rounds, "seeds": wanted["tuning_seeds"]}, {"first": list(wanted[_kind(m)])})
        for m in CLASSES
    }
    chosen, trials = tuned(study, trial, searches, lambda rows: float(np.log(rows["gap"]).mean()))
    study.note("tuning", trials)
    every = range(wanted["seeds"])
    cells = [{"method": m, "seed": s, "rounds": rounds, **chosen[m]} for s in every for m in CLASSES if m in chosen]
    data = study.each(run, cells).drop(columns="rounds", errors="ignore")
    if not len(data):
        return data
    return data.assign(**{"class": data["method"].map(CLASSES), "run": data["method"] + data["seed"].astype(str)})


def _kind(method: str) -> str:
    return "lambda0" if method == "FedMLS" else "eta0"


def claims(data: pd.DataFrame) -> list[Claim]:
    """Who converges to the optimum."""
    ends = last(data)
    gap = {m: only(ends, method=m).set_index("seed")["gap"] for m in CLASSES}
    first = data.groupby("method")["first"].first()
    most = int(ends["round"].max())
    steps = "first steps: " + ", ".join(f"{m} {first[m]:g}" for m in CLASSES if m in first)
    pair = {m: {"FedMLS": gap["FedMLS"], m: gap[m]} for m in CLASSES}
    wording: dict[str, Any] = {"lower": True, "ratio": True, "source": "authors' code"}
    return [
        ahead(f"FedMLS ends closest to the optimum, after {most} rounds", gap, note=steps, **wording),
        _rate(slopes(data, "FedMLS")),
        against(
            "FedAvg drifts and does not converge (here: slower than k to the power -1/4)",
            "slope of log gap against log k over the last decade of rounds",
            slopes(data, "FedAvg"),
            -0.25,
            above=True,
            source="authors' code",
        ),
        ahead("Scaffnew, as published, does worse than FedMLS", pair["Scaffnew"], **wording),
        ahead(
            "Scaffnew, as in the authors' code (control variates that stay zero), does worse than FedMLS",
            pair["Scaffnew, uncorrected"],
            **wording,
        ),
        _to_epsilon(data),
    ]


def _rate(falling: pd.Series) -> Claim:
    """A rate of 1/k: an upper bound, which a flatter slope over some decade does not contradict."""
    says = "FedMLS converges at a rate of at least 1/k"
    what = "slope of log gap against log k over the last decade of rounds"
    made = against(says, what, falling, -1.0, above=False, paper="-1 or steeper", source="authors' code")
    if not falling.mean() >= -1.0:
        return made
    note = "the theorem is an upper bound, for lambda and T fixed beforehand; a flatter slope does not contradict it"
    return open_claim(says, *(r._replace(lead=None) for r in made.rows), note=note)


def _to_epsilon(data: pd.DataFrame) -> Claim:
    """Corollary 3.2: rounds and local steps to a gap; with T_k = k there are k (k + 1) / 2 steps in k rounds."""
    needed = {e: first_at(data, data["gap"], e) for e in LEVELS}
    ours = pd.DataFrame({e: needed[e][only(data, method="FedMLS")["run"].unique()] for e in LEVELS})
    powers = ours.apply(lambda k: -np.polyfit(np.log(LEVELS), np.log(k * (k + 1) / 2), 1)[0], axis=1)
    made = against(
        "FedMLS needs at most of the order of 1/epsilon rounds and 1/epsilon^2 local steps to a gap of epsilon",
        "power of 1/epsilon in the local steps of a client, epsilon = 1 to 0.01",
        powers.reset_index(drop=True),
        2.0,
        above=False,
        paper="2 (Corollary 3.2)",
        source="authors' code",
    )
    rows = [
        row(
            f"{m}: rounds to a gap of {e:g}",
            needed[e][only(data, method=m)["run"].unique()],
            source="authors' code",
            digits=3,
        )
        for e in LEVELS[[0, -1]]
        for m in ("FedMLS", "Scaffold", "Scaffnew")
    ]
    return made._replace(rows=(*made.rows, *(r for r in rows if "nan" not in r.ours)))


def slopes(data: pd.DataFrame, method: str) -> pd.Series:
    """For each seed the slope of log gap against log k over the last decade of rounds."""
    rows = only(data, method=method)
    late = rows[rows["round"] >= max(1, rows["round"].max() / 10)]
    return pd.Series({s: slope(part["round"], part["gap"])[0] for s, part in late.groupby("seed")}, dtype=float)


def draw(data: pd.DataFrame, path: Path) -> None:
    """The gap against communication rounds, on logarithmic axes, with slopes to compare."""
    data = data[data["round"] > 0]
    panels = [Panel(histories(data), "gap", name="(F − F*) / F*", log_x=True, log_y=True)]
    apart = {"Scaffnew, uncorrected": "FedNMap"}  # in a colour of its own: it is not Scaffnew
    figure = draw_panels(panels, width=4.5, methods={**classes(data), **apart})
    axis, k = figure.axes[0], np.array([1.0, float(data["round"].max())])
    for power, told in ((0.5, "k^(-1/2)"), (1.0, "1/k")):
        level = float(data["gap"].max()) / k**power
        axis.plot(k, level, color="0.6", linestyle=":", linewidth=1)
        axis.annotate(told, (k[1], level[1]), (0, -9), textcoords="offset points", color="0.4", fontsize=6, ha="right")
    canvas.finish(figure, path)
