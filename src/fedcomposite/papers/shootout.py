"""Every composite method on six problems: tuning, runs, the ranking, the picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedcomposite.algorithms import build
from fedcomposite.experiments import grids
from fedcomposite.papers import seed_stack
from fedcomposite.papers.base import classes, first_at, histories
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.searches import Tunable, tuned
from fedcomposite.papers.verdicts import NOT_JUDGED, Claim, ahead, open_claim, row
from fedcomposite.plots import Panel, draw_panels
from fedcomposite.runtime import simulate

COSTS = {"round": "rounds", "bytes": "MB", "gradient_evaluations": "gradients", "prox_evaluations": "proxes"}
TARGET = 1e-4
ALONE = ("EControlDA", "ProxNewton")
"""Methods whose seeds are not stacked: what they send has another size in the first round, or they have tasks."""
NO_CLAIM = "a table of ours, which no paper claims anything about"


def numbers(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a cell's method: its grid's numbers, from units of 1/L."""
    name, L, K = cell["method"], cell["L"], cell["local_steps"]
    given = {k: cell[k] for k in ("step", "server_step", "gamma", "alpha", "prox_step", "mu", "ratio") if k in cell}
    if name == "ProxNewton":
        return {"name": name}
    if name == "FastFedDA":
        given["gamma"] *= L  # the inverse of a step
    else:
        given |= {k: given[k] / L for k in ("step", "gamma", "prox_step") if k in given}
    if name.startswith("FedCanon"):
        given["server_step"] /= L
    if name in ("FedDR", "FedADMM"):
        safe = 1 / (L + 1 / given["prox_step"])
        given["step"] = safe * (cell["step"] if name == "FedADMM" else 1.0)
    local = {} if name in ("ProximalGradient", "EControlDA") else {"local_steps": K}
    return {"name": name, **local, **given}


def run(cell: dict[str, Any]) -> pd.DataFrame:
    """The records of all seeds of a cell; a single one of nan where the numbers are refused."""
    stack = seed_stack.stack_of(cell["experiment"], cell["seeds"])
    options: dict[str, Any] = {"rounds": cell["rounds"], "every": cell["every"]}
    alone: dict[str, Any] = {
        "rounds": cell["rounds"],
        "evaluate_every": cell["every"],
        "tolerance": 1e-12,
        "progress": False,
    }
    try:
        given = numbers(cell)
        if given["name"] in ALONE:
            method, records = build(given.pop("name"), **given), []
            for place, problem in enumerate(stack.problems):
                made = simulate(problem, method, **alone)
                records += [{"place": place, **r} for r in made.history]
        else:
            records = seed_stack.follow(stack, build(given.pop("name"), **given), **options)
    except ValueError:
        records = [{"place": i, "round": 0, "stationarity": np.nan} for i in range(len(stack.problems))]
    table = pd.DataFrame(records)
    kept = ["round", "stationarity", "objective", "nonzeros", "bytes_up", "bytes_down", *list(COSTS)[2:]]
    table["seed"] = table["place"].map(dict(enumerate(cell["seeds"])))
    return table[["seed", *(k for k in kept if k in table)]]


def measure(study: Study) -> pd.DataFrame:
    """Tune every method on every problem, then run all seeds."""
    wanted = study.settings
    options = {k: wanted[k] for k in ("rounds", "every", "local_steps")}
    searches = {}
    for part, name, experiment, L in _problems(wanted):
        fixed = {"method": name, "experiment": experiment, "L": L, "seeds": [wanted["tuning_seed"]], **options}
        searches[f"{part}: {name}"] = Tunable(fixed, wanted["grids"][name])
    chosen, trials = tuned(study, run, searches, score, extensions=wanted["extensions"])
    study.note("tuning", trials)
    inside = trials.groupby("search")["inside"].first()
    found = []
    for label, point in chosen.items():
        cell = {**searches[label].fixed, "seeds": wanted["seeds"], **point}
        found.append((label, cell, bool(inside[label])))
    newton = {label.split(": ")[0]: cell for label, cell, _ in found}
    found += [
        (f"{part}: ProxNewton", {k: v for k, v in cell.items() if k not in COLUMNS} | {"method": "ProxNewton"}, True)
        for part, cell in newton.items()
    ]
    made = study.measured(run, [cell for _, cell, _ in found])
    rows = [
        made[study.key(run, cell)].assign(
            part=label.split(": ")[0], method=cell["method"], inside=sure, **{k: cell.get(k, np.nan) for k in COLUMNS}
        )
        for label, cell, sure in found
    ]
    return _brief(pd.concat(rows, ignore_index=True)) if rows else pd.DataFrame()


NOBODY = "none of them reaches the target with any seed in the rounds that there are"
COLUMNS = ("step", "server_step", "gamma", "alpha", "prox_step", "mu", "ratio")


def _problems(wanted: Mapping[str, Any]) -> list[tuple[str, str, dict[str, Any], float]]:
    """Part, method, experiment and L of every search."""
    found = []
    for data in wanted["data"]:
        for h in wanted["regularizers"]:
            experiment = {"data": data, "problem": {"loss": "logistic"}, "regularizer": h}
            L = seed_stack.stack_of(experiment, [wanted["tuning_seed"]]).problems[0].smoothness()
            part = f"{data['name']}, {grids.shown(h)}"
            found += [
                (part, name, experiment, L)
                for name in wanted["grids"]
                if (not wanted["only"] or name in wanted["only"])
                and (h["name"] == "L1" or name not in wanted["convex_only"])
            ]
    return found


def score(rows: pd.DataFrame) -> float:
    """Rounds to the target; beyond the horizon, and the further the higher, where it was not reached."""
    relative = rows["stationarity"] / rows["stationarity"].iloc[0]
    there = rows["round"][relative <= TARGET]
    if len(there):
        return float(there.iloc[0])
    end = float(relative.iloc[-1])
    return float(rows["round"].max() * (1 + np.log10(end / TARGET))) if np.isfinite(end) else np.nan


def _brief(data: pd.DataFrame) -> pd.DataFrame:
    """A few points of every curve, and what it cost to reach the target; nan if it was not reached."""
    data = data.assign(run=data["part"] + ": " + data["method"] + ", seed " + data["seed"].astype(str))
    data["class"] = data["method"]
    data["bytes"] = (data["bytes_up"] + data["bytes_down"]) / 1e6
    first = data.sort_values("round").groupby("run")["stationarity"].transform("first")
    data["relative"] = data["stationarity"] / first.reindex(data.index)
    for key, name in COSTS.items():
        data[name] = data["run"].map(first_at(data, data["relative"], TARGET, key))
    kept = data.groupby("run", sort=False).cumcount() % 5 == 0
    ends = data.index.isin(data.groupby("run")["round"].idxmax())
    return data[kept | ends].drop(columns=["bytes_up", "bytes_down", "objective"])


def ends(data: pd.DataFrame) -> pd.DataFrame:
    """The last record of every run, its rounds to the target with the horizon and a step where it was not reached."""
    last = data.loc[data.groupby("run", sort=False)["round"].idxmax()]
    horizon = float(data.loc[data["method"] != "ProxNewton", "round"].max())
    return last.assign(capped=last["rounds"].fillna(horizon + 5))


def claims(data: pd.DataFrame) -> list[Claim]:
    """What two papers say of their methods, problem by problem; and a table of all of them."""
    table, found = ends(data), []
    rest = table[table["method"] != "ProxNewton"]
    for part, rows in rest.groupby("part", sort=False):
        each = {str(m): p.set_index("seed")["capped"] for m, p in rows.groupby("method", sort=False)}
        for ours, others in (("FedCanon", list(each)), ("FedNMap", ["Zhang", "FedCanon"])):
            if ours in each:
                rivals = [m for m in others if m in each and m not in (ours, "FedCanonII")]
                named = {ours: each[ours], **{m: each[m] for m in rivals}}
                says = f"{part}: {ours} takes fewer rounds to 1e-4 than {_listed(others)}"
                made = ahead(says, named, lower=True, ratio=True, least=0.05)
                reached = rows[rows["method"].isin(named)]["rounds"].notna().any()
                found.append(made if reached else open_claim(says, *made.rows, note=NOBODY))
    for part, rows in table.groupby("part", sort=False):
        lines = []
        for m, p in rows.groupby("method", sort=False):
            costs = p[list(COSTS.values())].median(skipna=False)
            told = ", ".join(f"{v:.3g} {k}" for k, v in costs.items()) if costs.notna().all() else _missed(p)
            lines.append(row(str(m), told)._replace(seeds=len(p)))
        found.append(open_claim(f"{part}: medians to 1e-4", *lines, note=NO_CLAIM, verdict=NOT_JUDGED))
    return found


def _missed(rows: pd.DataFrame) -> str:
    return f"reached with {rows['rounds'].notna().sum()} of {len(rows)} seeds, ends at {rows['relative'].median():.2g}"


def _listed(others: list[str]) -> str:
    return "all others" if len(others) > 2 else " and ".join(others)


def draw(data: pd.DataFrame, path: Path) -> None:
    """Relative stationarity against rounds, bytes and gradients, a row for each problem."""
    panels = [
        Panel(histories(rows), title=str(part), name="relative stationarity")
        for part, rows in data.groupby("part", sort=False)
    ]
    draw_panels(panels, path, columns=3, methods=classes(data), band="seeds")
