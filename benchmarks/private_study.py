"""What a whole study costs under one budget: description, recipe, path, 5-fold cross-validation, intervals, quality.

Heart Disease (920 patients of four hospitals) and GUSTO-I (40,830 patients of sixteen regions, death within 30 days;
``multicentre/gusto.csv.gz`` in the folder FEDCOMPOSITE_DATA), a quarter of the rows held out, logistic regression with
l1, delta 1e-5. Everything is learned under the budget: means and deviations of the recipe, strength, model. Measured is
the chosen model on the held-out patients, who took no part; the cross-validated AUROC as the study tells it, noise and
all; and standard errors. Opacus trains one model on pooled, exactly prepared features and spends its whole epsilon on
that; of its settings the best one by test AUROC is shown, a choice that is not paid for.

    python -m benchmarks.private_study [--opacus PYTHON] [--figure docs/images/private-study.png] [--seeds 10]
    python -m benchmarks.private_study --coverage
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import fedcomposite as fc
from benchmarks.privacy import DELTA, EPSILONS, opacus_runs
from fedcomposite.data import Recipe
from fedcomposite.privacy import StudyBudget
from fedcomposite.problems.metrics import exact_auc
from fedcomposite.runtime import StudyDriver

STEPS, FOLDS, COUNT, RATIO = 3, 5, 30, 1e-3
REQUESTS = 2 + STEPS + 1 + 1 + 1  # description, recipe; steps and all samples; folds; quality

ROWS = {"own noise": False, "shared noise": True}
Frames = dict[str, pd.DataFrame]


def heart() -> tuple[Frames, str, dict[str, Any], dict[str, Any]]:
    frames = {k: v.drop(columns=["slope", "ca", "thal"]) for k, v in fc.data.frames("heart_disease").items()}
    frames = {k: v.assign(num=(v["num"] > 0).astype(float)) for k, v in frames.items()}
    columns = {
        "age": [25, 85], "sex": ["0", "1"], "cp": ["1", "2", "3", "4"], "trestbps": [80, 200], "chol": [100, 400],
        "fbs": ["0", "1"], "restecg": ["0", "1", "2"], "thalach": [60, 205], "exang": ["0", "1"], "oldpeak": [-1, 5],
        "num": ["0", "1"],
    }  # fmt: skip
    recipe = {"one_hot": ["sex", "cp", "fbs", "restecg", "exang"], "missing": {"chol": [0], "trestbps": [0]}}
    return frames, "num", columns, recipe


def gusto() -> tuple[Frames, str, dict[str, Any], dict[str, Any]]:
    table = pd.read_csv(Path(os.environ["FEDCOMPOSITE_DATA"]) / "multicentre" / "gusto.csv.gz")
    names = ["age", "sysbp", "pulse", "height", "weight", "Killip", "sex", "miloc", "pmi", "smk", "dia", "htn"]
    table = table[[*names, "day30", "regl"]].assign(dia=table["dia"].astype(str), htn=table["htn"].astype(str))
    frames = {f"region {k}": part.drop(columns="regl").reset_index(drop=True) for k, part in table.groupby("regl")}
    categories = ["Killip", "sex", "miloc", "pmi", "smk", "dia", "htn"]
    columns: dict[str, Any] = {
        "age": [25, 95], "sysbp": [60, 220], "pulse": [30, 150], "height": [140, 200], "weight": [40, 130],
    }  # fmt: skip
    columns |= {name: sorted(table[name].dropna().astype(str).unique().tolist()) for name in categories}
    return frames, "day30", {**columns, "day30": ["0", "1"]}, {"one_hot": categories}


TASKS: dict[str, dict[str, Any]] = {
    "heart": {
        "tables": heart, "name": "Heart Disease", "row_clip": 3.0,
        "opacus": [{"clip": 1.0, "lr": lr, "batch": 64, "epochs": e} for e in (5, 20) for lr in (0.5, 2.0)],
    },
    "gusto": {
        "tables": gusto, "name": "GUSTO-I", "row_clip": 3.0,
        "opacus": [{"clip": 1.0, "lr": lr, "batch": 512, "epochs": 5} for lr in (2.0, 8.0)],
    },
}  # fmt: skip


def prepared(task: dict[str, Any], budget: StudyBudget | None, seed: int) -> fc.Silos:
    frames, target, _, recipe = task["tables"]()
    made = Recipe(**recipe, impute="mean", missing_target="drop", unknown="reference", rare=0, min_count=1)
    if budget is not None:
        fc.data.describe(frames, target=target, recipe=made, privacy=budget, seed=seed)
    return made.prepare(frames, target=target, test=0.25, seed=seed, privacy=budget)


def posed(silos: fc.Silos) -> fc.Problem:
    return fc.Problem(silos, regularizer=fc.regularizers.L1(1.0), loss="logistic", bias=True, weights="samples")


def tested(problem: fc.Problem, x: torch.Tensor) -> tuple[float, float]:
    """Accuracy and AUROC on the held-out patients."""
    X, y = problem.silos.held_out["test"]
    z = torch.as_tensor(X).double() @ x[:-1] + x[-1]
    labels = (y > 0).long()
    return float(((z > 0) == (labels > 0)).double().mean()), float(exact_auc(z, labels, torch.ones_like(z)))


def study(task: dict[str, Any], epsilon: float | None, shared: bool, seed: int) -> dict[str, float]:
    """One study: measures of its model, what it says of itself, and how wide its intervals are."""
    frames, _, columns, _ = task["tables"]()
    budget = None
    if epsilon is not None:
        budget = StudyBudget(
            epsilon, DELTA, requests=REQUESTS, steps=STEPS, row_clip=task["row_clip"], columns=columns,
            share=1 / len(frames) if shared else 1.0,
        )  # fmt: skip
    problem = posed(prepared(task, budget, seed))
    driver = None if budget is None else StudyDriver.at_hand(problem, budget, seed=seed)
    cv = fc.cross_validate(problem, folds=FOLDS, seed=seed, count=COUNT, ratio=RATIO, driver=driver)
    x = cv.solution("min")
    accuracy, auroc = tested(problem, x)
    told = fc.quality(problem, cv, choice="min", driver=driver).overall.auroc
    se = fc.confidence(problem, x, driver=driver)["se"].to_numpy()
    if budget is not None:
        assert budget.spent == REQUESTS
        assert budget.cost(budget.spent, len(frames) if shared else 1) <= epsilon * (1 + 1e-9)
    known = {"known": float((se[:-1] < 1).sum()), "features": len(se) - 1.0, "se": float(np.median(se[:-1]))}
    return {"accuracy": accuracy, "auroc": auroc, "told": told, **known}


def measured(task: dict[str, Any], epsilon: float | None, shared: bool, seeds: int) -> dict[str, list[float]]:
    """Means over seeds, and half ranges."""
    found = pd.DataFrame([study(task, epsilon, shared, seed) for seed in range(seeds)])
    return {k: [float(found[k].mean()), float(np.ptp(found[k].to_numpy()) / 2)] for k in found}


def peer(task: dict[str, Any], python: str) -> list[dict[str, list[float]]]:
    """Opacus on the pooled features of an exact recipe: the best setting by AUROC, at each epsilon."""
    runs = pd.DataFrame(opacus_runs({**task, "silos": lambda: prepared(task, None, 0), "seeds": 5}, python))
    runs["setting"] = runs["setting"].astype(str)
    made = []
    for epsilon in EPSILONS:
        each = [one for _, one in runs[runs["epsilon"] == epsilon].groupby("setting")]
        chosen = max(each, key=lambda one: float(one["auroc"].mean()))
        made.append({k: [float(chosen[k].mean()), float(np.ptp(chosen[k]) / 2)] for k in ("accuracy", "auroc")})
    return made


def coverage(sets: int = 200) -> None:
    """How often 95 % intervals of a study have the truth, and how much wider the noise makes them."""
    print("| samples | epsilon | covered | standard error, over that without noise |\n| --- | --- | --- | --- |")
    truth = np.array([1.0, -0.5, 0.25, 0.0, 0.0, 0.3])
    for samples in (1000, 4000, 16000):
        for epsilon in EPSILONS:
            inside, wider = [], []
            for seed in range(sets):
                generator = np.random.default_rng([seed, samples])
                X = generator.uniform(-1, 1, size=(samples, 5))
                y = (generator.random(samples) < 1 / (1 + np.exp(-X @ truth[:-1] - truth[-1]))).astype(float)
                silos = fc.Silos.from_arrays([(X[i::4], y[i::4]) for i in range(4)])
                problem = fc.Problem(silos, loss="logistic", bias=True, weights="samples")
                budget = StudyBudget(epsilon, DELTA, requests=4, steps=3, row_clip=math.sqrt(5), share=0.25)
                driver = StudyDriver.at_hand(problem, budget, seed=seed)
                table, plain = (fc.confidence(problem, torch.zeros(6), driver=d) for d in (driver, None))
                inside.append(((table["lower"] <= truth) & (truth <= table["upper"])).to_numpy())
                wider.append((table["se"] / plain["se"]).to_numpy()[:-1])
            print(f"| {samples} | {epsilon:g} | {100 * np.mean(inside):.1f} % | {np.median(wider):.2f} |", flush=True)


def shown(cell: dict[str, list[float]]) -> str:
    said = f"{cell['auroc'][0]:.3f} ± {cell['auroc'][1]:.3f}, {100 * cell['accuracy'][0]:.1f} %"
    if "told" in cell:
        said += f"; {cell['told'][0]:.3f} ± {cell['told'][1]:.3f}; {cell['known'][0]:.0f} of {cell['features'][0]:.0f}"
    return said


def draw(table: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(table), figsize=(4.6 * len(table), 6.0), layout="constrained", squeeze=False)
    for column, (name, rows) in zip(axes.T, table.items(), strict=True):
        for axis, measure in zip(column, ("auroc", "accuracy"), strict=True):
            for label, cells in rows.items():
                if label == "without privacy":
                    axis.axhline(cells[0][measure][0], color="black", linestyle="--", linewidth=1, label=label)
                elif all(measure in cell for cell in cells):
                    values, spread = (np.array([cell[measure][i] for cell in cells]) for i in (0, 1))
                    axis.errorbar(EPSILONS, values, spread, marker="o", capsize=3, label=label)
            axis.set(
                xscale="log", xlabel="epsilon of the whole study", ylabel=f"test {measure}", title=TASKS[name]["name"]
            )
    axes[1][0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opacus", help="python of an environment with Opacus")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--coverage", action="store_true", help="of intervals, in place of the study")
    parser.add_argument("--results", type=Path, help="rows that are in this file are not measured again")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.coverage:
        coverage()
        return
    table: dict[str, Any] = json.loads(given.results.read_text()) if given.results and given.results.exists() else {}
    for name in given.tasks:
        task, rows = TASKS[name], table.setdefault(name, {})
        cells = " | ".join(f"epsilon {e:g}" for e in EPSILONS)
        print(f"\n| {task['name']} | {cells} |\n|" + " --- |" * (len(EPSILONS) + 1))
        for label in ["without privacy", *ROWS, *(["Opacus, one model, pooled"] if given.opacus else [])]:
            if label not in rows and label == "without privacy":
                rows[label] = [measured(task, None, False, min(given.seeds, 3))]
            elif label not in rows and label in ROWS:
                rows[label] = [measured(task, epsilon, ROWS[label], given.seeds) for epsilon in EPSILONS]
            elif label not in rows:
                rows[label] = peer(task, given.opacus)
            if given.results is not None:
                given.results.write_text(json.dumps(table))
            print(f"| {label} | " + " | ".join(map(shown, rows[label])) + " |", flush=True)
    if given.figure is not None:
        draw(table, given.figure)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
