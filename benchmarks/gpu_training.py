"""Training on a GPU: the MNIST experiment against the same on a CPU, and ResNet-18 on CIFAR-10.

``python benchmarks/gpu_training.py [--rounds 20] [--cifar FILE...]``. Data sets are found as ``fedcomposite.data``
finds them; ``--cifar`` names some of the binary batches instead (``.bin`` or ``.bin.xz``, the test batch last).
"""

from __future__ import annotations

import argparse
import lzma
import time
from pathlib import Path

import numpy as np
import torch

import fedcomposite as fc
from fedcomposite.algorithms import FedNMap, Zhang
from fedcomposite.regularizers import L1


def mnist(rounds: int) -> None:
    """Zhang's CNN as in the experiment ``zhang-mnist``, on both devices: how far apart the histories are.

    The GPU works in true float32 here; by default its convolutions use TF32, which has ten bits of mantissa.
    """
    torch.backends.cudnn.allow_tf32 = False
    problem = fc.Problem(
        fc.data.load("mnist").partition("half_by_label", clients=10),
        model=fc.models.build("zhang-cnn", "mnist"),
        regularizer=L1(1e-4),
        normalization=fc.data.normalization("mnist"),
        evaluation_samples=10_000,
    )
    for method in (Zhang(10, 0.02, 2.0), FedNMap(10, 0.02, 2.0, gamma=0.4)):
        runs = {}
        for device in ("cpu", "cuda"):
            began = time.perf_counter()
            runs[device] = fc.simulate(
                problem, method, rounds=rounds, batch_size=10, dtype=torch.float32, device=device, evaluate_every=5
            )
            seconds = (time.perf_counter() - began) / rounds
            print(f"{type(method).__name__} on {device}: {seconds:.3f} s a round", runs[device], flush=True)
        for key in ("loss", "objective", "stationarity", "test_accuracy"):
            pairs = [(a[key], b[key]) for a, b in zip(runs["cpu"].history, runs["cuda"].history, strict=True)]
            print(
                f"  {key}: differences {', '.join(f'{abs(a - b):.1e}' for a, b in pairs)}, last {pairs[-1]}", flush=True
            )
    torch.backends.cudnn.allow_tf32 = True


def cifar(files: list[Path], rounds: int) -> None:
    """ResNet-18 with batch norm, ten clients, Dirichlet(0.5), l1."""
    if files:
        parts = []
        for file in files:
            raw = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
            table = np.frombuffer(raw, np.uint8).reshape(-1, 3073)
            parts.append((table[:, 1:].reshape(-1, 3, 32, 32).copy(), table[:, 0].astype(np.int64)))
        train = tuple(np.concatenate(p) for p in zip(*parts[:-1], strict=True))
        pooled = fc.Silos.from_arrays([train], test=parts[-1])
    else:
        pooled = fc.data.load("cifar10")
    silos = pooled.partition("dirichlet", clients=10, alpha=0.5, minimum=64)
    print(silos)
    problem = fc.Problem(
        silos, model=fc.models.build("resnet18", "cifar10"), regularizer=L1(1e-5),
        normalization=fc.data.normalization("cifar10"), evaluation_samples=10_000,
    )  # fmt: skip
    began = time.perf_counter()
    run = fc.simulate(
        problem, FedNMap(10, 0.05, gamma=0.5), rounds=rounds, batch_size=32, dtype=torch.float32, device="cuda",
        evaluate_every=max(1, rounds // 10),
    )  # fmt: skip
    print(f"ResNet-18, {rounds} rounds of 10 steps: {time.perf_counter() - began:.1f} s")
    for r in run.history:
        print(f"  round {r.round}: loss {r.loss:.3f}, test accuracy {r.test_accuracy:.3f}, zeros {r.sparsity:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the MNIST comparison; 0 skips it")
    parser.add_argument("--cifar-rounds", type=int, default=200, help="0 skips it")
    parser.add_argument("--cifar", type=Path, nargs="*", default=[], help="binary batches, the test batch last")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu_training.py needs a CUDA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if arguments.rounds:
        mnist(arguments.rounds)
    if arguments.cifar_rounds:
        cifar(arguments.cifar, arguments.cifar_rounds)


if __name__ == "__main__":
    main()
