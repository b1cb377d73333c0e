"""A sparse ResNet-18 on CIFAR-10 across ten clients: accuracy, zeros, and what pruning the zeros saves.

``python -m benchmarks.cifar [--json FILE] [--figure FILE]``. ResNet-18 with the 3x3 stem, Dirichlet(0.5), FedNMap with
ten local steps at batch 50, crops and flips, bf16, a cosine in stairs. h kills single weights and whole filters (sparse
group lasso) and pushes the biases behind them down to zero, so that a dead filter is a zero behind its ReLU and can be
cut out. ``--plain`` trains torchvision's form without augmentation in its place.

How strong h is. A weight that f does not hold moves by strength times step in every local step: over a run by l1 times
the sum of the steps, which is 680. That must exceed its start, 0.02 in the last layers, where most weights are: 8e-5
moves 0.055. (3e-5 and a sum of 610 moved 0.018 and left 32 % zeros.) The group term, whose weights are the roots of the
groups' sizes, counts in the same units. Noise is the smaller matter: z of a zero is a mean of gradients over gamma /
step local steps and stays below the threshold gamma l1 the better, the longer that is, so gamma is large, but no more
than fits into the last stair. A filter before batch norm gets gradients in proportion to its gain over its length,
which push it away from zero: the gains are shrunk as well. There is no warm-up: cut into stairs, its first value, a
small part of the step, would be that of a whole stair. The strengths are reckoned so and tried on a small network only:
no run on CIFAR-10 has measured these defaults yet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedcomposite as fc
from fedcomposite.algorithms import FedNMap
from fedcomposite.data.augmentation import Chain, Crop, Flip
from fedcomposite.plots import canvas
from fedcomposite.regularizers import L1, PositivePart, SparseGroupLasso
from fedcomposite.schedules import Cosine, Staircase

STEP, STAIRS = 0.2, 8


def problem_of(arguments: argparse.Namespace) -> fc.Problem:
    pooled = fc.data.load("cifar10")
    if arguments.images:
        X, y = pooled.features[: arguments.images], pooled.targets[: arguments.images]
        pooled = fc.Silos.from_arrays([(X, y)], test=(pooled.test[0][:100], pooled.test[1][:100]))
    silos = pooled.partition("dirichlet", clients=arguments.clients, alpha=0.5, minimum=8)
    if arguments.plain:
        h: Any = L1(1e-5)
    else:
        h = SparseGroupLasso(arguments.l1, arguments.group, "rows").on(("*conv1.weight", "*conv2.weight"))
        h += L1(arguments.l1).on(("*.downsample.0.weight", "fc.weight"))
        h += PositivePart(arguments.bias).on("layer*.bn1.bias")
        if arguments.gain:
            h += L1(arguments.gain).on("layer*.bn1.weight")
    return fc.Problem(
        silos,
        model=fc.models.build("resnet18", "cifar10", stem="large" if arguments.plain else "small"),
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


def speed(modules: dict[str, nn.Module], device: str, batch: int) -> dict[str, float]:
    """Milliseconds for a batch, medians of alternating calls."""
    X = torch.randn(batch, 3, 32, 32, device=device)
    times: dict[str, list[float]] = {name: [] for name in modules}
    with torch.no_grad():
        for turn in range(12):
            for name, module in modules.items():
                if device == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                module(X)
                if device == "cuda":
                    torch.cuda.synchronize()
                if turn > 1:
                    times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(t) for name, t in times.items()}


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """The run, and what becomes of its model."""
    problem, device, rounds = problem_of(arguments), arguments.device, arguments.rounds
    print(problem.silos)
    steps = Staircase(max(1, rounds // STAIRS), Cosine(STEP, STEP / 50, rounds, arguments.warmup))
    method = FedNMap(arguments.local_steps, steps, gamma=arguments.gamma)
    began = time.perf_counter()
    run = fc.simulate(
        problem, method, rounds=rounds, batch_size=arguments.batch, dtype=torch.float32, device=device,
        evaluate_every=max(1, rounds // 20), **({"mode": "record"} if device == "cuda" else {}),
    )  # fmt: skip
    seconds = time.perf_counter() - began
    keys = ("round", "loss", "train_accuracy", "test_accuracy", "sparsity")
    curve = [{k: float(r[k]) for k in keys} for r in run.history]
    for r in curve:
        print(
            f"  round {r['round']:.0f}: loss {r['loss']:.3f}, test {r['test_accuracy']:.4f}, zeros {r['sparsity']:.1%}"
        )
    found = {"seconds": seconds, "rounds": rounds, "curve": curve, "device": torch.cuda.get_device_name()
             if device == "cuda" else "cpu", "torch": torch.__version__}  # fmt: skip
    print(f"{rounds} rounds of {arguments.local_steps} steps: {seconds:.0f} s")
    if arguments.plain:
        return found
    module = problem.module(run.solution.float().to(device), run.buffers)
    pruned = fc.prune(module, torch.randn(8, 3, 32, 32, device=device))
    print(pruned)
    test = problem.silos.test
    modules = {"dense": module, "pruned": pruned.module}
    found["pruned"] = {
        "parameters": [pruned.parameters, pruned.pruned_parameters], "flops": [pruned.flops, pruned.pruned_flops],
        "difference": pruned.difference, "accuracy": {k: accuracy(m, test, device) for k, m in modules.items()},
        "milliseconds": {f"batch {b}": speed(modules, device, b) for b in ((1, 256) if device == "cuda" else (1,))},
    }  # fmt: skip
    print(json.dumps(found["pruned"], indent=1))
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
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--images", type=int, default=0, help="so many training images; 0 takes all")
    parser.add_argument("--l1", type=float, default=8e-5)
    parser.add_argument("--group", type=float, default=8e-5)
    parser.add_argument("--bias", type=float, default=1e-3)
    parser.add_argument("--gain", type=float, default=1e-3)
    parser.add_argument("--gamma", type=float, default=4.0)
    parser.add_argument("--warmup", type=int, default=0, help="rounds of a slow start")
    parser.add_argument("--plain", action="store_true", help="torchvision's form, l1, no augmentation")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--figure", type=Path, help="also draw the curve here")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.cifar needs a CUDA GPU (--device cpu --images 60 --rounds 1 tries it)")
    found = train(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if arguments.figure:
        draw(found["curve"], arguments.figure)


if __name__ == "__main__":
    main()
