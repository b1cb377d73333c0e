"""Processor seconds of analyses of data at hand: they compare two versions also where other work goes on.

python -m benchmarks.seconds
PYTHONPATH=OTHER/src python benchmarks/seconds.py --threads 2      # another version, by its public names alone
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import fedcomposite as fc


def main() -> None:
    """A line for each analysis: the least of some runs, without imports and data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="those whose name starts so")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    small, middle, wide, long = (problem(*sizes) for sizes in ((40, 6), (400, 20), (2000, 100), (20000, 300)))
    calls: dict[str, Callable[[], object]] = {
        "cross-validation as it is, 40 x 6": lambda: fc.cross_validate(small),
        "cross-validation, 5 folds, 400 x 20": lambda: fc.cross_validate(middle, folds=5),
        "path, 2,000 x 100": lambda: fc.path(wide),
        "solve, 2,000 x 100": lambda: fc.solve(wide),
        "solve, 20,000 x 300": lambda: fc.solve(long),
    }
    for name, call in calls.items():
        if name.startswith(chosen.only):
            print(f"| {name} | {min(seconds(call) for _ in range(chosen.runs)):.2f} s |", flush=True)


def problem(samples: int, features: int) -> fc.Problem:
    """A logistic regression with an l1 term on four sites."""
    silos = fc.data.load("synthetic", clients=4, features=features, samples=samples // 4)
    return fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.01), bias=True, weights="samples")


def seconds(call: Callable[[], object]) -> float:
    """What all threads take together."""
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    main()
