"""How often 95 % intervals hold the truth, and how many wrong features stability selection lets through.

    python -m benchmarks.coverage                    # 200 data sets of each kind
    python -m benchmarks.coverage --sets 20 --only linear
    python -m benchmarks.coverage --only "logistic, many" --seed 200   # data sets on which nothing was chosen

Every data set has four sites, features with correlations 0.5^|j - k|, five coefficients of 0.5 or -0.5 and the others
zero. Intervals are those of ``fc.confidence`` at a lasso whose strength is sqrt(log p / n); coverage is the share
of intervals that hold the truth, over all coefficients, over those that are not zero and over those that are.
Stability selection allows one wrong feature in expectation: the mean over data sets has to be below that.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
import torch

import fedcomposite as fc

SITES, NONZERO = 4, 5
KINDS = {  # loss, samples per site, features
    "linear": ("least_squares", 100, 20),
    "linear, many features": ("least_squares", 50, 150),
    "logistic": ("logistic", 200, 20),
    "logistic, many features": ("logistic", 100, 120),
}


def drawn(loss: str, samples: int, features: int, seed: int) -> tuple[fc.Silos, np.ndarray]:
    generator = np.random.default_rng(seed)
    at = np.arange(features)
    root = np.linalg.cholesky(0.5 ** np.abs(at[:, None] - at[None, :]))
    truth = np.zeros(features)
    truth[generator.choice(features, NONZERO, replace=False)] = generator.choice([-0.5, 0.5], NONZERO)
    arrays = []
    for _ in range(SITES):
        X = generator.normal(size=(samples, features)) @ root.T
        z = X @ truth
        noise = generator.normal(size=samples)
        y = z + noise if loss == "least_squares" else (generator.random(samples) < 1 / (1 + np.exp(-z))).astype(float)
        arrays.append((X, y))
    return fc.Silos.from_arrays(arrays), truth


def problem_of(loss: str, silos: fc.Silos, features: int) -> fc.Problem:
    n = len(silos.targets)
    size = 1.0 if loss == "least_squares" else 0.5
    lam = size * math.sqrt(math.log(features) / n)
    return fc.Problem(silos, loss=loss, regularizer=fc.regularizers.L1(lam), bias=True, weights="samples")


def intervals(kind: str, sets: int, first: int) -> None:
    loss, samples, features = KINDS[kind]
    inside, lengths, truths = [], [], []
    began = time.perf_counter()
    for seed in range(first, first + sets):
        silos, truth = drawn(loss, samples, features, seed)
        problem = problem_of(loss, silos, features)
        model = fc.LogisticRegression if loss == "logistic" else fc.LinearRegression
        x = torch.from_numpy(model(regularizer=problem.regularizer.h, tolerance=1e-6).fit(silos).solution_)
        table = fc.confidence(problem, x).iloc[:features]
        inside.append(((table.lower <= truth) & (truth <= table.upper)).to_numpy())
        lengths.append((table.upper - table.lower).to_numpy())
        truths.append(truth != 0)
    holds, some = np.array(inside), np.array(truths)
    shares = holds.mean(), holds[some].mean(), holds[~some].mean()
    print(
        f"{kind:25s} n {SITES * samples:4d} p {features:4d}   coverage {100 * shares[0]:.1f} %, of nonzero "
        f"{100 * shares[1]:.1f} %, of zero {100 * shares[2]:.1f} %; mean length {np.mean(lengths):.3f}   "
        f"{sets} sets, {time.perf_counter() - began:.0f} s",
        flush=True,
    )


def selection(sets: int, first: int) -> None:
    wrong, right = [], []
    began = time.perf_counter()
    bound = math.nan
    for seed in range(first, first + sets):
        silos, truth = drawn("least_squares", 50, 60, 1000 + seed)
        problem = problem_of("least_squares", silos, 60)
        found = fc.stability(problem, draws=30, errors=1.0, threshold=0.75, seed=seed, count=15, ratio=0.1)
        bound = found.bound
        chosen = found.share >= found.threshold
        wrong.append(int((chosen & (truth == 0)).sum()))
        right.append(int((chosen & (truth != 0)).sum()))
    print(
        f"stability selection       n  200 p   60  {np.mean(wrong):.3f} wrong features on average (bound {bound:.2f}), "
        f"right ones {np.mean(right):.2f} of {NONZERO}   {sets} sets, {time.perf_counter() - began:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first data set; the others follow it")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for kind in KINDS:
        if kind.startswith(options.only):
            intervals(kind, options.sets, options.seed)
    if "stability".startswith(options.only):
        selection(options.sets, options.seed)


if __name__ == "__main__":
    main()
