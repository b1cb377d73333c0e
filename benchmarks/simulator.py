"""The stacked simulator against what one would write by hand, on the same samples, in one run.

For each shape, the time of one local step of all clients (full logistic gradients, float64):

* loop: a plain PyTorch loop over clients with autograd, as researchers write it;
* stacked: this package's gradient oracle, with the contraction and the number of threads it chooses itself;
* floor: one gradient of the pooled loss on the same samples, which no federated method can avoid.

Run ``python benchmarks/simulator.py [--seconds 1.0] [--json FILE]``. Times are medians; compare the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import fedcomposite as fc
from fedcomposite.algorithms import FedAvg
from fedcomposite.problems import Batches
from fedcomposite.runtime import Simulator, process

SHAPES = [(30, 100, 20), (100, 50, 1000), (1000, 20, 50)]
PROMISED = {(30, 100, 20): 8.0, (100, 50, 1000): 1.0, (1000, 20, 50): 10.0}


def median_time(work: Callable[[], object], seconds: float) -> float:
    """Median time of a call, after a warm-up."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(n: int, m: int, d: int, seconds: float) -> dict[str, float]:
    """Microseconds per local step of n clients with m samples of d features."""
    rng = np.random.default_rng(0)
    arrays = [(rng.standard_normal((m, d)), np.sign(rng.standard_normal(m))) for _ in range(n)]
    problem = fc.Problem(fc.Silos.from_arrays(arrays), loss="logistic")
    simulator = Simulator(problem, FedAvg(1, 0.1), batches=Batches())
    grad = simulator.gradients(simulator.participants(0))
    x = torch.from_numpy(rng.standard_normal((n, d)))
    parts = [(torch.from_numpy(X), torch.from_numpy(y)) for X, y in arrays]

    def loop() -> list[torch.Tensor]:
        out = []
        for (X, y), row in zip(parts, x, strict=True):
            w = row.clone().requires_grad_(True)
            (-torch.nn.functional.logsigmoid(y * (X @ w))).mean().backward()
            out.append(w.grad)
        return out

    pooled, labels, point = problem.silos.features, problem.silos.targets, x[0].contiguous()

    def floor() -> torch.Tensor:
        z = pooled @ point
        return (-labels * torch.sigmoid(-labels * z) / len(z)) @ pooled

    torch.testing.assert_close(grad(x, 0), torch.stack(loop()), rtol=0, atol=1e-12)  # the same work
    result = {"loop": min(_timed(loop, t, seconds) for t in (1, None))}  # the loop gets its better thread count
    result["stacked"] = _timed(lambda: grad(x, 0), simulator.transport.threads, seconds)
    result["floor"] = min(_timed(floor, t, seconds) for t in (1, None))
    return {k: 1e6 * v for k, v in result.items()}


def _timed(work: Callable[[], object], threads: int | None, seconds: float) -> float:
    with process.threads(threads):
        return median_time(work, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each measurement")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    heads = ("n", "m", "d", "loop us", "stacked us", "floor us", "loop/stacked", "promised", "stacked/floor")
    widths = (5, 5, 5, 10, 11, 9, 13, 9, 14)
    print(" ".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True)))
    rows = []
    for shape in SHAPES:
        found = measure(*shape, arguments.seconds)
        gain, above = found["loop"] / found["stacked"], found["stacked"] / found["floor"]
        rows.append({"shape": shape, **found, "gain": gain, "above_floor": above})
        cells = [*shape, *(f"{found[k]:.0f}" for k in ("loop", "stacked", "floor"))]
        cells += [f"{gain:.1f}x", f"{PROMISED[shape]:.0f}x", f"{above:.1f}x"]
        print(" ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
