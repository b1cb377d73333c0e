"""A sparse ResNet-18 on CIFAR-10 across ten clients: accuracy, zeros, and what pruning the zeros saves.

``python -m benchmarks.cifar [--json FILE] [--figure FILE]``. ResNet-18 with the 3x3 stem, Dirichlet(0.5), FedNMap with
ten local steps at batch 50, crops and flips, bf16, a cosine in stairs. h kills single weights, whole filters (sparse
group lasso) and gains, and pushes the biases behind them down to zero, so that a dead filter is a zero behind its ReLU
and can be cut out. The surviving weights are then trained without h. Both models are timed whole and pruned.
``--plain`` trains torchvision's form without augmentation.

Every record is on disk at once (``--json``), ``--limit`` ends the rounds in time for the rest, and with
``--checkpoint`` a run that was killed goes on where it was saved last, every fifth of its rounds.

How strong h is. Three things make a zero. First, a weight that f does not hold moves by l1 times the step in every
local step, over a run by l1 times the sum of the steps, which is 1,140; that must exceed its start, 0.02 in the last
layers, where most weights are: 4e-5 moves 0.046. Second, noise must not push it out again. The z of such a weight
wanders: it is spread evenly over the interval of length 2 gamma l1 where the weight is zero, and falls off over
step s^2 / (2 l1) on both sides, if gradients have the deviation s. So the weight is zero for a share R / (1 + R) of the
time, R = 2 gamma l1^2 / (step s^2). A larger gamma is as good as a smaller step, but its memory, gamma / step local
steps, must fit into the last stair: 350 of 1,250. Third, f must not hold it.

A filter before batch norm does not die of its own accord: f does not see its length, and its gradients grow as it
shrinks. They are in proportion to the gain behind it, so it is the gains that h takes to zero: they start at 0.5, and
6e-4 moves 0.68. A channel without gain has no gradient, and all its weights follow: zeros rise from 42 to 81 % between
rounds 300 and 450. Without the term on gains no filter died (docs/benchmarks.md). There is no warm-up: cut into stairs,
its first value, a small part of the step, would be that of a whole stair.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedcomposite as fc
from benchmarks.inference import recorded
from fedcomposite.algorithms import FedNMap
from fedcomposite.data.augmentation import Chain, Crop, Flip
from fedcomposite.exporting import ExportError
from fedcomposite.files import write_atomic
from fedcomposite.plots import canvas
from fedcomposite.regularizers import L1, PositivePart, SparseGroupLasso
from fedcomposite.schedules import Cosine, Staircase

STEP, STAIRS = 0.2, 8
GAIN = 0.5  # at the start, where a channel may die; as in network slimming (Liu et al. 2017)
TURNS = 20
MULTIPLES = (1, 8, 32)  # of which the sizes of pruned layers are
SPEEDS = ((1, torch.float32), (256, torch.float32), (1024, torch.bfloat16))


def problem_of(arguments: argparse.Namespace) -> fc.Problem:
    pooled = fc.data.load("cifar10")
    if arguments.images:
        X, y = pooled.features[: arguments.images], pooled.targets[: arguments.images]
        pooled = fc.Silos.from_arrays([(X, y)], test=(pooled.test[0][:100], pooled.test[1][:100]))
    silos = pooled.partition("dirichlet", clients=arguments.clients, alpha=0.5, minimum=8)
    if arguments.plain:
        h: Any = L1(1e-5)
        arguments.gain = 0.0
    else:
        h = SparseGroupLasso(arguments.l1, arguments.group, "rows").on(("*conv1.weight", "*conv2.weight"))
        h += L1(arguments.l1).on(("*.downsample.0.weight", "fc.weight"))
        h += PositivePart(arguments.bias).on("layer*.bn1.bias")
        if arguments.gain:
            h += L1(arguments.gain).on("layer*.bn1.weight")
    model = fc.models.build("resnet18", "cifar10", stem="large" if arguments.plain else "small")
    if arguments.gain:
        for name, gains in model.named_parameters():
            if name.startswith("layer") and name.endswith("bn1.weight"):
                nn.init.constant_(gains, GAIN)
    return fc.Problem(
        silos,
        model=model,
        regularizer=h,
        normalization=fc.data.normalization("cifar10"),
        augment=None if arguments.plain else Chain((Crop(4), Flip())),
        precision="bf16" if arguments.device == "cuda" else "full",
        evaluation_samples=arguments.images or 10_000,
    )


def accuracy(module: nn.Module, test: tuple[torch.Tensor, torch.Tensor], device: str) -> float:
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in fc.data.normalization("cifar10"))
    right = 0
    with torch.no_grad():
        for X, y in zip(test[0].split(1000), test[1].split(1000), strict=True):
            right += int((module((X.to(device).float() / 255 - mean) / std).argmax(1).cpu() == y).sum())
    return right / len(test[1])


def speed(modules: dict[str, nn.Module], device: str, batch: int, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Milliseconds for a batch, channels last, medians of alternating calls; on a GPU also as one recorded call."""
    layout = torch.channels_last
    X = torch.randn(batch, 3, 32, 32, device=device, dtype=dtype).contiguous(memory_format=layout)
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    times: dict[tuple[str, str], list[float]] = {}
    with torch.no_grad():
        for name, module in modules.items():
            made = copy.deepcopy(module).to(dtype).to(memory_format=layout)  # type: ignore[call-overload]
            calls[name, "eager"] = partial(made, X)
            if device == "cuda":
                calls[name, "recorded"] = recorded(partial(made, X))
        for turn in range(TURNS + 2):
            for key, work in calls.items():
                if device == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                work()
                if device == "cuda":
                    torch.cuda.synchronize()
                if turn > 1:
                    times.setdefault(key, []).append(1e3 * (time.perf_counter() - began))
    return {
        way: {name: statistics.median(t) for (name, w), t in times.items() if w == way}
        for way in dict.fromkeys(way for _, way in calls)
    }


class Results:
    """What is known so far, on disk as soon as it is known: a run that is killed loses nothing that it has told."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.found: dict[str, Any] = {}

    def add(self, **found: Any) -> None:
        """Write the figures anew."""
        self.found |= found
        if self._path:
            write_atomic(self._path, (json.dumps(self.found, indent=2) + "\n").encode())

    def following(self, name: str) -> Callable[[fc.Record], None]:
        """A curve that grows with every record of a run."""
        curve: list[dict[str, float]] = []
        keys = ("round", "seconds", "loss", "train_accuracy", "test_accuracy", "sparsity")

        def record(r: fc.Record) -> None:
            curve.append({k: float(r[k]) for k in keys})
            self.add(**{name: curve})
            print(
                f"{name} {r.round}: loss {r.loss:.3f}, test {r.test_accuracy:.4f}, zeros {r.sparsity:.1%}, "
                f"{r.seconds:.0f} s",
                flush=True,
            )

        return record


def train(arguments: argparse.Namespace, results: Results) -> None:
    """The run, the surviving weights once more if there is time, and what becomes of both models."""
    began = time.perf_counter()
    problem, device, rounds = problem_of(arguments), arguments.device, arguments.rounds
    print(problem.silos, flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    results.add(arguments={k: str(v) for k, v in vars(arguments).items()}, device=name, torch=torch.__version__)
    steps = Staircase(max(1, rounds // STAIRS), Cosine(STEP, STEP / 50, rounds, arguments.warmup))
    settings: dict[str, Any] = {"batch_size": arguments.batch, "dtype": torch.float32, "device": device}
    settings |= {"mode": arguments.mode} if device == "cuda" else {}

    def in_time(view: fc.callbacks.View) -> None:
        if time.perf_counter() - began > arguments.limit:
            view.stop(f"{arguments.limit:g} s are over")

    kept: dict[str, Any] = {}
    if arguments.checkpoint:
        kept = {"checkpoint": arguments.checkpoint, "checkpoint_every": max(1, rounds // 5), "resume": True}
    run = fc.simulate(
        problem, FedNMap(arguments.local_steps, steps, gamma=arguments.gamma), rounds=rounds,
        evaluate_every=max(1, rounds // 20), on_record=results.following("curve"), callbacks=[in_time],
        **kept, **settings,
    )  # fmt: skip
    print(f"{run.message}: {time.perf_counter() - began:.0f} s since the start", flush=True)
    if arguments.plain:
        return
    began_pruning = time.perf_counter()
    results.add(pruned=pruned(problem, run, device))
    took = time.perf_counter() - began_pruning
    each = run.history[-1].seconds / max(1, run.rounds)
    left = arguments.limit - (time.perf_counter() - began) - 2 * took
    if (again := int(min(arguments.refit, left / each))) < 1:
        return
    # The same method: its prox sets the zeros, its control variates serve clients that differ, and no step grows.
    method = FedNMap(arguments.local_steps, steps(rounds - 1), gamma=1.0)
    second = fc.refit(
        problem, run, method, rounds=again, evaluate_every=max(1, again // 4), on_record=results.following("refit"),
        **settings,
    )  # fmt: skip
    results.add(refit_pruned=pruned(problem, second, device))
    print(f"{time.perf_counter() - began:.0f} s since the start", flush=True)


def pruned(problem: fc.Problem, run: fc.Run, device: str) -> dict[str, Any]:
    """A run's model without its dead filters: size, accuracy and speed beside the dense one's."""
    module = problem.module(run.solution.float().to(device), run.buffers)
    try:
        made = {m: fc.prune(module, torch.randn(8, 3, 32, 32, device=device), multiple=m) for m in MULTIPLES}
    except ExportError as error:  # what else is known is worth having
        return {"error": str(error)}
    print(*made.values(), sep="\n")
    modules = {"dense": module} | {f"pruned, multiples of {m}": small.module for m, small in made.items()}
    found = {
        "zeros": {k: float((p == 0).float().mean()) for k, p in module.named_parameters() if p.ndim > 1},
        "filters": {s.name: [s.shape[0], *(m.layers[i].pruned[0] for m in made.values())]
                    for i, s in enumerate(made[1].layers)},
        "parameters": [made[1].parameters, *(m.pruned_parameters for m in made.values())],
        "flops": [made[1].flops, *(m.pruned_flops for m in made.values())],
        "difference": max(m.difference for m in made.values()),
        "accuracy": {k: accuracy(m, problem.silos.test, device) for k, m in modules.items()},
        "milliseconds": {
            f"batch {batch}, {dtype}".replace("torch.", ""): speed(modules, device, batch, dtype)
            for batch, dtype in (SPEEDS if device == "cuda" else SPEEDS[:1])
        },
    }  # fmt: skip
    print(json.dumps({k: v for k, v in found.items() if k not in ("zeros", "filters")}, indent=1), flush=True)
    return found


def draw(curve: list[dict[str, float]], path: Path) -> None:
    """Accuracy and zeros against rounds."""
    figure, axes = canvas.make(7.0, 2.6, 2)
    for axis, key, label in zip(axes, ("test_accuracy", "sparsity"), ("test accuracy", "exact zeros"), strict=True):
        axis.plot([r["round"] for r in curve], [r[key] for r in curve], "-o", markersize=3)
        axis.set(xlabel="round", ylabel=label, ylim=(0, 1))
    canvas.finish(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a try with few images")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--images", type=int, default=0, help="so many training images; 0 takes all")
    parser.add_argument("--l1", type=float, default=4e-5)
    parser.add_argument("--group", type=float, default=2e-5)
    parser.add_argument("--bias", type=float, default=1e-3)
    parser.add_argument("--gain", type=float, default=6e-4)
    parser.add_argument("--gamma", type=float, default=4.0)
    parser.add_argument("--warmup", type=int, default=0, help="rounds of a slow start")
    parser.add_argument("--plain", action="store_true", help="torchvision's form, l1, no augmentation")
    parser.add_argument("--refit", type=int, default=60, help="rounds for the surviving weights alone; 0 for none")
    parser.add_argument("--mode", choices=("record", "compile"), default="record", help="of rounds on a GPU")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no more rounds are begun")
    parser.add_argument("--checkpoint", type=Path, help="keep the state in this file, and go on from it if it is there")
    parser.add_argument("--json", type=Path, help="write the figures here, anew with every record")
    parser.add_argument("--figure", type=Path, help="also draw the curve here")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.cifar needs a CUDA GPU (--device cpu --images 60 --rounds 1 tries it)")
    results = Results(arguments.json)
    try:
        train(arguments, results)
    finally:  # also when it is interrupted
        if arguments.figure and "curve" in results.found:
            draw(results.found["curve"], arguments.figure)


if __name__ == "__main__":
    main()
