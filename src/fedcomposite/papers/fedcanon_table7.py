"""Claims of the FedCanon paper's Table VII."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from fedcomposite.algorithms import build
from fedcomposite.experiments import grids
from fedcomposite.papers import seed_stack
from fedcomposite.papers.base import skewed, split
from fedcomposite.papers.fedcanon_fig3 import LEAST, SKEWS
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.searches import Tunable, tuned
from fedcomposite.papers.verdicts import NOT_JUDGED, Claim, ahead, open_claim, over_rows, row
from fedcomposite.plots import canvas
from fedcomposite.plots.charts import dress
from fedcomposite.plots.looks import looks
from fedcomposite.runtime import simulate

METHODS = ["FedCanon", "FedDR", "FedADMM"]
OWN = {"FedCanon": "server_step", "FedDR": "alpha", "FedADMM": "prox_step"}
"""Each method's own number, which is tuned."""
COUNTED = "FedCanon is ahead in all rows"
PAPER = {  # accuracies of FedCanon, FedDR, FedADMM: iid, Dir(1), Dir(0.2)
    "mnist linear": ((0.9039, 0.8752, 0.8751), (0.9028, 0.8744, 0.8743), (0.9018, 0.8691, 0.8691)),
    "mnist mlp": ((0.9229, 0.8478, 0.8479), (0.9221, 0.8395, 0.8427), (0.9218, 0.8197, 0.8198)),
    "mnist cnn": ((0.9742, 0.8822, 0.9172), (0.9735, 0.8622, 0.9035), (0.9722, 0.8263, 0.8655)),
    "fashion_mnist mlp": ((0.8291, 0.7056, 0.7085), (0.8266, 0.6908, 0.7080), (0.8255, 0.6794, 0.7052)),
    "fashion_mnist cnn": ((0.8510, 0.7529, 0.7751), (0.8449, 0.7233, 0.7335), (0.8355, 0.7033, 0.7161)),
    "fashion_mnist resnet18": ((0.8791, 0.8784, 0.8765), (0.8743, 0.8709, 0.8700), (0.8513, 0.8442, 0.8415)),
    "cifar10 cnn": ((0.5299, 0.3100, 0.3207), (0.5241, 0.2791, 0.3144), (0.4150, 0.2183, 0.2525)),
    "cifar10 resnet18": ((0.5695, 0.5248, 0.5174), (0.5183, 0.5181, 0.5070), (0.4815, 0.4812, 0.4699)),
}


def run(cell: dict[str, Any]) -> pd.DataFrame:
    """The records of all seeds of a cell; a single one of nan where the method refuses its numbers."""
    name = cell["method"]
    given = {**cell["fixed"], OWN[name]: cell[OWN[name]]}
    try:
        method = build(name, **given)
    except ValueError:
        return pd.DataFrame([{"seed": s, "round": 0, "objective": np.nan} for s in cell["seeds"]])
    if cell["experiment"]["model"]["name"] != "resnet18":
        return _kept(seed_stack.run({**cell, "method": {"name": name, **given}}))
    found = []  # batch norm has statistics, which a stack of seeds does not carry
    for seed in cell["seeds"]:
        made = simulate(
            seed_stack.stack_of(cell["experiment"], [seed]).problems[0], method, rounds=cell["rounds"], seed=seed,
            batch_size=cell["batch_size"], dtype=torch.float32, device=cell["device"], evaluate_every=cell["every"],
            mode="record" if cell["device"].startswith("cuda") else "auto", progress=False,
        )  # fmt: skip
        found.append(pd.DataFrame(made.history).assign(seed=seed))
    return _kept(pd.concat(found, ignore_index=True))


def _kept(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[["seed", "round", "loss", "objective", "nonzeros", "test_accuracy"]]


def measure(study: Study) -> pd.DataFrame:
    """Each method's own number for each pair of data and model, on a middling partition; then all partitions."""
    experiment, wanted = split(study.content)
    partitions = {grids.shown(p): p for p in wanted["partitions"]}
    options = {k: wanted[k] for k in ("rounds", "every", "batch_size")} | {"dtype": "float32", "device": study.device}
    searches: dict[str, Tunable] = {}
    for data, model in wanted["models"]:
        one = {**experiment, "data": {"name": data}, "model": {**experiment["model"], "name": model}}
        one["partition"] = wanted["partitions"][wanted["tuned_on"]]
        searches |= {
            f"{data} {model}: {m}": Tunable(
                {"method": m, "experiment": one, "fixed": wanted["fixed"][m], "seeds": [wanted["tuning_seed"]],
                 **options}, {OWN[m]: wanted["grids"][m]},
            )
            for m in METHODS
        }  # fmt: skip
    chosen, trials = tuned(study, run, searches, _score, extensions=2)
    study.note("tuning", trials)
    cells = []
    for name, partition in partitions.items():  # a row of the table after another
        for label, point in chosen.items():
            cell = {**searches[label].fixed, "seeds": wanted["seeds"], **point}
            cell["experiment"] = {**cell["experiment"], "partition": partition}
            cells.append({**cell, "what": label.split(":")[0], "partition": name})
    data = study.each(run, cells)
    return data.drop(columns=["device", "dtype", "rounds", "every", "batch_size"], errors="ignore")


def _score(rows: pd.DataFrame) -> float:
    """The training objective at the end: test images choose nothing."""
    return float(rows["objective"].iloc[-1])


def diverged(data: pd.DataFrame) -> pd.Series:
    """Which of the rows are of a run whose loss was not finite at the end."""
    runs = data.groupby(["what", "partition", "method", "seed"])
    ends = data.loc[runs["round"].idxmax()]
    lost = ends[~np.isfinite(ends["loss"])].set_index(list(runs.keys)).index
    return pd.Series(pd.MultiIndex.from_frame(data[runs.keys]).isin(lost), index=data.index)


def highest(data: pd.DataFrame) -> dict[tuple[str, str], dict[str, pd.Series]]:
    """The highest test accuracy of each seed that did not diverge, by data set and model, partition, and method."""
    found = {}
    data = data[~diverged(data)]
    for what, group in data.groupby("what", sort=False):
        for title, alpha in SKEWS:
            part = skewed(group, alpha)
            if len(part):
                tops = part.groupby(["method", "seed"])["test_accuracy"].max().unstack("method")
                found[str(what), title] = {m: tops[m].dropna() for m in METHODS if m in tops}
    return found


def best(data: pd.DataFrame) -> pd.DataFrame:
    """The mean over seeds of the highest test accuracy, a row for each data set, model and partition."""
    rows = {key: {m: v.mean() for m, v in each.items()} for key, each in highest(data).items()}
    return pd.DataFrame(rows).T.reindex(columns=METHODS)


def _theirs(what: str, title: str) -> tuple[float, ...]:
    """The paper's row."""
    return PAPER[what][[t for t, _ in SKEWS].index(title)]


def claims(data: pd.DataFrame) -> list[Claim]:
    """One claim for each row of the table, and one for all that were run."""
    there, found, ended = highest(data), [], data[diverged(data)]
    for what, title in ((what, title) for what in PAPER for title, _ in SKEWS):
        printed = {m: f"{v:.4f}" for m, v in zip(METHODS, _theirs(what, title), strict=True)}
        says, each = f"{what}, {title}: FedCanon is best", there.get((what, title), {})
        lost = skewed(ended[ended["what"] == what], dict(SKEWS)[title]).groupby("method")["seed"].nunique()
        note = ", ".join(f"{m} diverged with {n} seed{'s' if n > 1 else ''}" for m, n in lost.items())
        if METHODS[0] in each and len(each) > 1:
            found.append(ahead(says, each, least=LEAST, paper=printed, digits=4, note=note))
        else:
            found.append(open_claim(says, note=note or "not run here", verdict=NOT_JUDGED))
    table = best(data).dropna()
    theirs = pd.DataFrame([_theirs(*key) for key in table.index], columns=METHODS)
    lead, paper = (100 * (t["FedCanon"] - t[METHODS[1:]].max(axis=1)).median() for t in (table, theirs))
    won = int((table["FedCanon"] > table[METHODS[1:]].max(axis=1) + LEAST).sum())
    rows = [
        row("rows in which it is ahead by more than 0.3 points", f"{won} of {len(table)}", f"all {len(theirs)}"),
        row("median lead over the second, in points", float(lead), f"{paper:.1f}"),
    ]
    note = "a count of means over seeds; the rows themselves are judged above"
    apart = "runs that diverged left out; the rows of one data set and model are not independent of each other"
    says = "over the rows FedCanon's accuracy is higher than FedDR's and FedADMM's"
    each = {m: table[m] for m in METHODS}
    return [*found, over_rows(says, each, least=LEAST, note=apart), open_claim(COUNTED, *rows, note=note)]


def draw(data: pd.DataFrame, path: Path) -> None:
    """A mark for each method in each row, ours full and the paper's pale."""
    table = best(data)
    figure, (axis,) = canvas.make(7.0, 0.26 * len(table) + 1.3, 1)
    style = looks(METHODS, {"FedDR": "FedAvg", "FedADMM": "Scaffold"})  # their own colours are three kinds of purple
    for m, method in enumerate(METHODS):
        look: dict[str, Any] = {
            "color": style[method].color,
            "marker": style[method].marker,
            "linestyle": "none",
            "markersize": 4,
        }
        rows = np.arange(len(table)) + 0.2 * (m - 1)  # beside each other where they are the same
        axis.plot(table[method], rows, label=method, **look)
        paper = [_theirs(what, title)[m] for what, title in table.index]
        axis.plot(paper, rows, alpha=0.35, label=f"{method}, the paper's", **look)
    axis.set_yticks(range(len(table)), [f"{what}, {title}" for what, title in table.index])
    axis.invert_yaxis()
    dress(axis, "highest test accuracy", "", "")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    canvas.finish(figure, path)
