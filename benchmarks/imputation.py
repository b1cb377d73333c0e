"""How often intervals after imputation hold the truth, and whether imputed means are those of statsmodels' MICE.

    python -m benchmarks.imputation                # 200 data sets: some minutes of one core
    python -m benchmarks.imputation --sets 20

Every data set has three sites and 450 patients: a pressure that rises with age, a grade with three levels, an outcome
that hangs on all of them. Gaps hang on the outcome and on age, so that rows without gaps are not like the others: a
third of the pressures and a fifth of the grades are gone. Coverage is the share of 95 % intervals of a logistic model
that hold its true coefficients: of data without gaps, of draws (``impute="chained"``), of means and commonest levels,
and of complete cases. "borrowed" are draws where the last site lacks the pressure altogether. Then one larger data set
of numbers: the mean of what was missing, by draws here and by statsmodels' MICE at each site, with the Monte Carlo
error of the difference, and the truth. MICE takes values of the 20 nearest predictions, which draws them to the middle.
"""

from __future__ import annotations

import argparse
import warnings
from itertools import pairwise

import numpy as np
import pandas as pd
import torch

import fedcomposite as fc

TRUTH = {"age": 0.07, "pressure": 0.05, "grade=b": 0.5, "grade=c": -0.5}
WAYS = {
    "without gaps": None,
    "chained": "chained",
    "borrowed": "chained",
    "means": {"default": "mean"},
    "complete cases": "complete",
}


def patients(n: int, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    g = np.random.default_rng(seed)
    age = g.normal(60, 10, n)
    pressure = 130 + 0.8 * (age - 60) + g.normal(0, 10, n)
    margins = np.column_stack([0 * age, (age - 60) / 15, -(pressure - 130) / 15])
    grade = np.array(["a", "b", "c"], object)[(margins + g.gumbel(size=(n, 3))).argmax(1)]
    z = 0.07 * (age - 60) + 0.05 * (pressure - 130) + 0.5 * (grade == "b") - 0.5 * (grade == "c")
    y = (g.random(n) < 1 / (1 + np.exp(-z))).astype(float)
    whole = pd.DataFrame({"age": age, "pressure": pressure, "grade": grade, "y": y})
    seen = whole.copy()
    seen.loc[g.random(n) < 0.1 + 0.45 * y, "pressure"] = np.nan
    seen.loc[g.random(n) < 0.1 + 0.2 * (age > 60), "grade"] = None
    return whole, seen


def at_sites(frame: pd.DataFrame, sites: int = 3) -> dict[str, pd.DataFrame]:
    ends = [i * len(frame) // sites for i in range(sites + 1)]
    return {f"s{i}": frame.iloc[a:b] for i, (a, b) in enumerate(pairwise(ends))}


def coverage(sets: int, seed: int, copies: int) -> pd.DataFrame:
    """Of each way the share of intervals that hold the truth, their mean length, and the mean error."""
    rows = []
    for k in range(sets):
        whole, seen = patients(450, seed + k)
        for way, impute in WAYS.items():
            recipe = fc.Recipe(impute=impute or {}, one_hot={"grade": "a"}, copies=copies, iterations=5)
            tables = at_sites(seen if impute else whole)
            if way == "borrowed":
                tables["s2"] = tables["s2"].assign(pressure=np.nan)
            silos = recipe.prepare(tables, target="y", seed=seed + k)
            problem = fc.Problem(silos, bias=True, weights="samples")
            found = fc.confidence(problem, torch.zeros(problem.dimension), jeffreys=0)
            for name, truth in TRUTH.items():
                low, high, middle = found.loc[name, ["unit_lower", "unit_upper", "unit_estimate"]]
                rows.append({"way": way, "name": name, "held": low <= truth <= high, "length": high - low,
                             "off": middle - truth})  # fmt: skip
    table = pd.DataFrame(rows)
    made = table.groupby(["way", "name"], sort=False).mean()
    every = table.groupby("way", sort=False)[["held"]].mean()
    made["held, all"] = [every.loc[way, "held"] for way, _ in made.index]
    return made


def beside_statsmodels(n: int, seed: int, copies: int) -> pd.DataFrame:
    """Means of what was missing, here and by statsmodels, and how far they may be apart by chance."""
    from statsmodels.imputation.mice import MICEData

    whole, seen = patients(n, seed)
    seen = seen.drop(columns="grade")
    gone = seen["pressure"].isna().to_numpy().copy()
    silos = fc.Recipe(impute="chained", copies=copies, iterations=5, standardize=False).prepare(
        at_sites(seen), target="y", seed=seed
    )
    ours = np.array([float(one[gone, 1].mean()) for one in silos.copies])
    np.random.seed(seed)  # it draws from there
    each = [MICEData(one.reset_index(drop=True), perturbation_method="gaussian") for one in at_sites(seen).values()]
    theirs = []
    for _ in range(copies):
        for data in each:
            data.update_all()
        theirs.append(float(np.concatenate([data.data["pressure"].to_numpy() for data in each])[gone].mean()))
    error = float(np.sqrt(ours.var(ddof=1) / copies + np.var(theirs, ddof=1) / copies))
    truth = float(whole["pressure"].to_numpy()[gone].mean())
    return pd.DataFrame([{"truth": truth, "ours": ours.mean(), "statsmodels": np.mean(theirs), "error": error}])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--copies", type=int, default=20)
    given = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(coverage(given.sets, given.seed, given.copies).round(3).to_string())
        print(beside_statsmodels(2000, given.seed, given.copies).round(3).to_string(index=False))


if __name__ == "__main__":
    main()
