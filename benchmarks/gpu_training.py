"""Training on a GPU: the MNIST experiment against the same on a CPU.

``python benchmarks/gpu_training.py [--rounds 25]``. Data sets are found as ``fedcomposite.data`` finds them.
"""

from __future__ import annotations

import argparse
import time

import torch

import fedcomposite as fc
from fedcomposite.algorithms import FedNMap, Zhang
from fedcomposite.regularizers import L1


def mnist(rounds: int) -> None:
    """Zhang's CNN on MNIST as in the experiment ``zhang-mnist``, on both devices: how far apart the histories are.

    The GPU works in true float32 here; by default its convolutions use TF32, which has ten bits of mantissa. At the
    steps of the experiment any two float32 runs part sooner or later, since rounding errors grow from round to round:
    beside the GPU stands a second CPU run that differs by one rounding error in the starting model. In float64 and at
    smaller steps the same rounds are compared without that.
    """
    torch.backends.cudnn.allow_tf32 = False
    problem = fc.Problem(
        fc.data.load("mnist").partition("half_by_label", clients=10),
        model=fc.models.build("zhang-cnn", "mnist"),
        regularizer=L1(1e-4),
        normalization=fc.data.normalization("mnist"),
        evaluation_samples=10_000,
    )
    for title, step, server_step, dtype, methods in (
        ("small steps, float32", 0.005, 1.0, torch.float32, 2),
        ("the experiment's steps, float32", 0.02, 2.0, torch.float32, 2),
        ("the experiment's steps, float64", 0.02, 2.0, torch.float64, 1),
    ):
        for method in (Zhang(10, step, server_step), FedNMap(10, step, server_step, gamma=10 * step * server_step))[
            :methods
        ]:
            start = problem.smooth(dtype).start()
            runs = {"cpu": start, "gpu": start, "cpu, start + 1e-7": start * (1 + 1e-7)}
            found = {}
            for name, x0 in runs.items():
                if dtype == torch.float64 and x0 is not start:
                    continue
                device = "cuda" if name == "gpu" else "cpu"
                began = time.perf_counter()
                found[name] = fc.simulate(
                    problem, method, rounds=rounds, batch_size=10, dtype=dtype, device=device, evaluate_every=5, x0=x0
                )
                seconds = (time.perf_counter() - began) / rounds
                last = found[name].history[-1]
                print(
                    f"{title}, {type(method).__name__} on {name}: {seconds:.3f} s a round, loss {last.loss:.6f}, "
                    f"test accuracy {last.test_accuracy:.4f}",
                    flush=True,
                )
            for name in list(found)[1:]:
                for key in ("loss", "objective", "test_accuracy"):
                    pairs = [(a[key], b[key]) for a, b in zip(found["cpu"].history, found[name].history, strict=True)]
                    print(
                        f"  cpu against {name}, {key}: " + ", ".join(f"{abs(a - b):.0e}" for a, b in pairs), flush=True
                    )
    torch.backends.cudnn.allow_tf32 = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="rounds of each run")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu_training.py needs a CUDA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    mnist(arguments.rounds)


if __name__ == "__main__":
    main()
