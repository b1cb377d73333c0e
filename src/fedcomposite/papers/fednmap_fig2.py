"""Claims of the FedNMap paper about its Figure 2, and the runs that figures 2 to 5 share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedcomposite.papers import seed_stack
from fedcomposite.papers.base import histories, only, parts, split
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.searches import Tunable, tuned
from fedcomposite.papers.verdicts import Claim, ahead, lead, row
from fedcomposite.plots import Panel, draw_panels

METHODS = ["FedNMap", "Zhang", "FedCanon"]
LEAST = 0.02


def common(study: Study, clients: int, seeds: list[int]) -> dict[str, Any]:
    """What the cells of figures 2 to 5 have in common."""
    experiment, wanted = split(study.content)
    experiment = {**experiment, "partition": {**experiment["partition"], "clients": clients}}
    options = {k: wanted[k] for k in ("rounds", "every", "batch_size")}
    return {
        "experiment": experiment, "seeds": seeds, **options, "stationarity_step": 1.0, "dtype": "float32",
        "device": study.device,
    }  # fmt: skip


def given(study: Study) -> pd.DataFrame:
    """The runs of ``settings.methods`` for every number of clients."""
    wanted = study.settings
    cells = [
        {**common(study, n, wanted["seeds"]), "clients": n, "method": method}
        for n in wanted["clients"]
        for method in wanted["methods"]
    ]
    return brief(study.each(run, cells))


def run(cell: Mapping[str, Any]) -> pd.DataFrame:
    """The records of a cell, with its method's numbers."""
    method = {k: v for k, v in cell["method"].items() if k != "label"}
    head = {"class": method["name"], "label": cell["method"].get("label", method["name"])}
    numbers = {k: method[k] for k in ("local_steps", "step", "server_step", "gamma") if k in method}
    return seed_stack.run({**cell, "method": method}).assign(**head, **numbers)


def brief(data: pd.DataFrame) -> pd.DataFrame:
    """What data.csv keeps."""
    kept = ["class", "label", "clients", "local_steps", "step", "server_step", "gamma", "seed", "round", "loss",
            "objective", "stationarity", "nonzeros", "gradient_evaluations", "bytes_up", "bytes_down"]  # fmt: skip
    data = data[[c for c in kept if c in data]]
    if not len(data):
        return data
    name = data[["label", "clients", "local_steps", "seed"]].astype(str).agg(" ".join, axis=1)
    return data.assign(method=data["label"], run=name)


def trial(cell: dict[str, Any]) -> pd.DataFrame:
    """The final stationarity of each tuning seed; the local step is in units of 1 / tau."""
    numbers = {k: cell[k] for k in cell["numbers"]}
    numbers["step"] = numbers["step"] / cell["method"]["local_steps"]
    rows = seed_stack.run({**cell, "method": {**cell["method"], **numbers}, "since": 3 * cell["rounds"] // 4})
    return seed_stack.late(rows).reset_index()


def measure(study: Study) -> pd.DataFrame:
    """Tune every method in every panel, FedNMap's gamma in all together; then run all seeds."""
    wanted = study.settings
    panels = [(n, tau) for n in wanted["clients"] for tau in wanted["taus"]]
    searches = {
        f"{m}, n = {n}, tau = {tau}": Tunable(
            {**common(study, n, wanted["tuning_seeds"]), "method": {"name": m, "local_steps": tau},
             "numbers": sorted(wanted["grids"][m])},
            {k: list(v) for k, v in wanted["grids"][m].items()},
        )
        for m in METHODS
        for n, tau in panels
    }  # fmt: skip
    _, trials = tuned(study, trial, searches, lambda rows: float(np.log(rows["stationarity"]).mean()))
    trials = one_gamma(trials)
    study.note("tuning", trials)
    chosen = trials[trials["chosen"].astype(bool)].set_index("search").to_dict("index")
    cells = []
    for label, search in searches.items():
        if label in chosen:
            numbers = {k: float(chosen[label][k]) for k in search.grid}
            tau = search.fixed["method"]["local_steps"]
            numbers["step"] /= tau
            n = search.fixed["experiment"]["partition"]["clients"]
            method = {**search.fixed["method"], **numbers}
            cells.append({**common(study, n, wanted["seeds"]), "clients": n, "method": method})
    return brief(study.each(run, cells))


def one_gamma(trials: pd.DataFrame) -> pd.DataFrame:
    """The trials with FedNMap's choice for one gamma in all panels: the lowest sum of the panels' best scores."""
    if not len(trials):
        return trials
    ours = trials["search"].str.startswith("FedNMap")
    best = trials[ours].groupby(["gamma", "search"])["score"].min().unstack()
    gamma = best.sum(axis=1, skipna=False).idxmin()
    rows = trials[ours & (trials["gamma"] == gamma)]
    places = rows.groupby("search")["score"].idxmin()
    return trials.assign(chosen=np.where(ours, trials.index.isin(places), trials["chosen"]))


def final(data: pd.DataFrame) -> pd.DataFrame:
    """The mean stationarity over the last quarter of each run's records: a single one is as noisy as its minibatch."""
    late = data[data["round"] > 0.75 * data.groupby("run")["round"].transform("max")]
    columns = ["class", "label", "clients", "local_steps", "seed"]
    return late.groupby(["run", *columns])[["stationarity"]].mean().reset_index()


def claims(data: pd.DataFrame) -> list[Claim]:
    """Who is lowest, and what more clients and more local steps do."""
    ends, found = final(data), []
    wording: dict[str, Any] = {"least": LEAST, "lower": True, "ratio": True}
    steps = (
        data.groupby(["class", "clients", "local_steps"])[["step", "server_step", "gamma"]].first().T.to_dict("series")
    )
    taus, sizes = sorted(ends["local_steps"].unique()), sorted(ends["clients"].unique())
    for tau in taus:
        for n in sizes:
            rows = only(ends, local_steps=tau, clients=n).set_index("seed")
            each = {m: rows[rows["class"] == m]["stationarity"] for m in METHODS}
            tuned_to = "; ".join(
                f"{m} " + ", ".join(f"{k} {v:.3g}" for k, v in steps[m, n, tau].dropna().items())
                for m in METHODS
                if (m, n, tau) in steps
            )
            says = f"n = {n}, tau = {tau}: FedNMap's stationarity is the lowest"
            found.append(ahead(says, each, note=f"tuned to: {tuned_to}", **wording))
    ours = only(ends, **{"class": "FedNMap"})
    found += [
        grows(
            "more local steps improve convergence at a fixed number of clients", ours, "local_steps", "clients", "tau"
        ),
        grows("more clients improve convergence at a fixed number of local steps", ours, "clients", "local_steps", "n"),
    ]
    return found


def grows(says: str, ends: pd.DataFrame, key: str, fixed: str, what: str) -> Claim:
    """The claim that the largest value of a key beats the smallest, for every value of another."""
    rows = []
    for value, part in parts(ends, fixed).items():
        by = {k: p.set_index("seed")["stationarity"] for k, p in parts(part, key).items()}
        name = {"clients": "n", "local_steps": "tau"}[fixed]
        rows += [row(f"{name} = {value}, {what} = {k}", series, digits=3) for k, series in list(by.items())[:-1]]
        first, (most, last) = next(iter(by.values())), list(by.items())[-1]
        compared = lead(last, first, least=LEAST, lower=True, ratio=True)
        rows.append(row(f"{name} = {value}, {what} = {most}", last, digits=3)._replace(lead=compared))
    return Claim(says, tuple(rows))


def draw(data: pd.DataFrame, path: Path) -> None:
    """Stationarity against rounds, a panel for each n and tau."""
    sizes = sorted(data["clients"].unique())
    panels = [
        Panel(histories(data, "class", local_steps=tau, clients=n), title=f"n = {n}, tau = {tau}")
        for tau in sorted(data["local_steps"].unique())
        for n in sizes
    ]
    draw_panels(panels, path, columns=len(sizes))
