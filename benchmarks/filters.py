"""Zeros that pay: ResNet-18 with a share of zeros in whole filters, its accuracy and its speed beside the dense one's.

    python -m benchmarks.filters --out DIR                       # shares one after another, then the table
    python -m benchmarks.filters --share 0.85 --out DIR          # one of them
    python -m benchmarks.filters --device cpu --images 60 --rounds 4 --shares 0,0.7 --out DIR

CIFAR-10 across ten clients, Dirichlet(0.5), the 3x3 stem, ten local steps at batch 50, crops and flips, bf16, weight
decay, a cosine in stairs. A share of 0 is FedAvg; of others the server's prox sets whole units to zero
(``structure="filters"``) and clients train what is left. The model is pruned and timed by ``benchmarks.cifar``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import torch

import fedcomposite as fc
from benchmarks.cifar import Results, pruned
from fedcomposite.algorithms import FedAvg, FedMid
from fedcomposite.data.augmentation import Chain, Crop, Flip
from fedcomposite.regularizers import L2Squared
from fedcomposite.schedules import Cosine, Staircase

STAIRS = 8
TIMED = "batch 1024, bfloat16"


def problem_of(arguments: argparse.Namespace) -> fc.Problem:
    pooled = fc.data.load("cifar10")
    if arguments.images:
        X, y = pooled.features[: arguments.images], pooled.targets[: arguments.images]
        pooled = fc.Silos.from_arrays([(X, y)], test=(pooled.test[0][:100], pooled.test[1][:100]))
    return fc.Problem(
        pooled.partition("dirichlet", clients=10, alpha=0.5, minimum=2, seed=arguments.seed),
        model=fc.models.build("resnet18", "cifar10", stem="small", seed=arguments.seed),
        regularizer=L2Squared(arguments.decay).on("*"),
        normalization=fc.data.normalization("cifar10"),
        augment=Chain((Crop(4), Flip())),
        precision="bf16" if arguments.device == "cuda" else "full",
        evaluation_samples=arguments.images or 10_000,
    )


def train(arguments: argparse.Namespace) -> None:
    """One share: the run, and what its model is when it is pruned."""
    results = Results(
        arguments.out / f"filters-{arguments.share:g}-rounds-{arguments.rounds}-seed-{arguments.seed}.json"
    )
    results.add(share=arguments.share, seed=arguments.seed, rounds=arguments.rounds, torch=torch.__version__)
    began, rounds, problem = time.perf_counter(), arguments.rounds, problem_of(arguments)
    steps = Staircase(max(1, rounds // STAIRS), Cosine(arguments.step, arguments.step / 50, max(1, rounds)))
    settings: dict[str, Any] = {"batch_size": 50, "dtype": torch.float32, "device": arguments.device}
    settings |= {"mode": "record"} if arguments.device == "cuda" else {}
    method: Any = FedAvg(10, steps)
    if arguments.share:
        method = FedMid(10, steps, server_prox_only=True)
        settings |= {"sparsity": arguments.share, "structure": "filters"}

    def in_time(view: fc.callbacks.View) -> None:
        if time.perf_counter() - began > arguments.limit:
            view.stop(f"{arguments.limit:g} s are over")

    if not rounds:  # speed alone: the sizes of layers as they are at the start
        h = problem.with_zeros(arguments.share, "filters").regularizer
        start = SimpleNamespace(solution=h.prox(problem.smooth(torch.float32).start(), 0.0), buffers=None)
        results.add(pruned=pruned(problem, cast(Any, start), arguments.device))
        return
    run = fc.simulate(
        problem, method, rounds=rounds, seed=arguments.seed, evaluate_every=max(1, rounds // 10), callbacks=[in_time],
        on_record=results.following("curve"), **settings,
    )  # fmt: skip
    results.add(message=run.message, done=run.rounds, seconds=time.perf_counter() - began)
    results.add(pruned=pruned(problem, run, arguments.device))


def collect(folder: Path) -> pd.DataFrame:
    """A row for each share that is there; speeds are dense over pruned, recorded where there is a GPU."""
    rows = []
    for path in sorted(folder.glob("filters-*.json")):
        one = json.loads(path.read_text())
        row = {"share": one["share"], "seed": one["seed"], "rounds": one.get("done", 0),
               **{k: one["curve"][-1][k] for k in ("test_accuracy", "sparsity") if "curve" in one}}  # fmt: skip
        if "accuracy" in (found := one.get("pruned", {})):
            row |= {k: found["accuracy"][k] for k in found["accuracy"] if k.endswith(" 8")}
            row |= {"parameters": found["parameters"][1], "flops": found["flops"][0] / found["flops"][1]}
            for setting, ways in found["milliseconds"].items():
                times = ways.get("recorded", ways["eager"])
                row |= {f"{setting}, x{k.split()[-1]}": times["dense"] / t for k, t in times.items() if k != "dense"}
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for records")
    parser.add_argument("--share", type=float, help="train with this share of zeros alone")
    parser.add_argument("--shares", default="0,0.7,0.8,0.9")
    parser.add_argument("--collect", action="store_true", help="the table of what is there")
    parser.add_argument("--rounds", type=int, default=700, help="0 for the speed of an untrained one")
    parser.add_argument("--step", type=float, default=0.2)
    parser.add_argument("--decay", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=0, help="so many training images; 0 takes all")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which a run begins no round")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.collect:
        given = [arguments.share] if arguments.share is not None else map(float, arguments.shares.split(","))
        for arguments.share in given:
            train(arguments)
    print(collect(arguments.out).to_string(index=False, float_format=lambda v: f"{v:.4g}"))


if __name__ == "__main__":
    main()
