"""Claims of the FedNMap paper about its Figure 6."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from fedcomposite import data as datasets
from fedcomposite import metrics, models
from fedcomposite.algorithms import FedCanon, FedNMap, Zhang
from fedcomposite.papers.base import classes, histories, last, only
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.verdicts import Claim, open_claim, row
from fedcomposite.plots import Panel, draw_panels
from fedcomposite.problems import Problem
from fedcomposite.regularizers import L1
from fedcomposite.runtime import simulate

METHODS = ["FedNMap", "Zhang", "FedCanon"]
WHY = (
    "the paper's text has neither data nor steps, gamma or rounds, and here sparsity is still rising after 200 rounds, "
    "alike for all three: these settings cannot tell the methods apart"
)


def measure(study: Study) -> pd.DataFrame:
    """A run for each method and seed, with Hoyer's measure at every record."""
    settings = {k: v for k, v in study.settings.items() if k != "seeds"}
    cells = [
        {**settings, "method": m, "seed": s, "device": study.device} for m in METHODS for s in study.settings["seeds"]
    ]
    data = study.each(run, cells)
    return data.assign(run=data["method"] + ", seed " + data["seed"].astype(str)) if len(data) else data


def run(cell: dict[str, Any]) -> pd.DataFrame:
    """The history of one cell: a method with its local steps, step and seed, as rows."""
    import torch

    seed, steps, step = cell["seed"], cell["local_steps"], cell["step"]
    pooled = datasets.load("fashion_mnist")
    few = replace(
        pooled, features=pooled.features[: cell["images"]], targets=pooled.targets[: cell["images"]],
        offsets=(0, cell["images"]),
    )  # fmt: skip
    silos = few.partition("dirichlet", clients=cell["clients"], alpha=0.5, seed=seed, minimum=cell["batch"])
    options: dict[str, Any] = {"dropout": 0.0} if cell["model"].startswith("mobilenet") else {}
    problem = Problem(
        silos, model=models.build(cell["model"], "fashion-mnist", seed=seed, **options), regularizer=L1(cell["lam"]),
        normalization=datasets.normalization("fashion_mnist"), evaluation_samples=min(10_000, cell["images"]),
    )  # fmt: skip
    effective = steps * step
    methods: dict[str, Any] = {
        "FedNMap": FedNMap(steps, step, gamma=effective),
        "Zhang": Zhang(steps, step),
        "FedCanon": FedCanon(steps, step, effective),
    }
    where = torch.cat([torch.full((s.stop - s.start,), len(s.shape) > 1) for s in problem.layout])
    sparse: list[float] = []

    def hoyer(view: Any) -> None:
        sparse.append(metrics.hoyer(view.solution.cpu()[where]))

    mode: Literal["record", "auto"] = "record" if cell["device"].startswith("cuda") else "auto"
    done = simulate(
        problem, methods[cell["method"]], rounds=cell["rounds"], batch_size=cell["batch"], seed=seed,
        dtype=torch.float32, device=cell["device"], evaluate_every=cell["every"], callbacks=[hoyer], mode=mode,
    )  # fmt: skip
    keys = ("round", "loss", "objective", "sparsity", "test_accuracy", "seconds")
    rows = pd.DataFrame([{k: r[k] for k in keys} for r in done.history])
    return rows.assign(hoyer=sparse, status=done.status, **{"class": cell["method"]})


def claims(data: pd.DataFrame) -> list[Claim]:
    """Sparsity and loss at the end."""
    ends, found = last(data), []
    for key, says in (("hoyer", "higher sparsity (Hoyer)"), ("loss", "lower training loss")):
        each = {m: only(ends, method=m).set_index("seed")[key] for m in METHODS}
        rows = [row(m, v, "a figure, numbers lost", digits=3) for m, v in each.items()]
        found.append(open_claim(f"FedNMap ends with {says} than Zhang and FedCanon", *rows, note=WHY))
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """Training loss and Hoyer's measure against rounds."""
    shown = histories(data)
    panels = [Panel(shown, y="loss", name="training loss"), Panel(shown, y="hoyer", name="Hoyer sparsity")]
    draw_panels(panels, path, methods=classes(data))
