"""Time of a round and peak memory against the number of clients, with the same number of participants.

Each line is a process of its own, so that its peak memory is that of one run: FedNMap (one state vector per client),
5 local steps on minibatches of 5, with 20 participants in a round. ``linear`` is logistic regression with
50 features in float64, ``mlp`` the network 784-128-64-10 (109,386 parameters) in float32 on images. Every client
holds 10 samples. *States* is what all clients' states take once everybody has taken part; *used* what the run wrote
of them; *where* whether they lie in memory or in a file that is mapped into it. *Setup* makes data, problem and first
record; *round* is the median; *peak* is the largest resident memory, which includes 0.3 GiB for torch itself.

Run ``python benchmarks/scale.py [--rounds 50] [--json FILE] [--quick]``.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedcomposite as fc
from fedcomposite.algorithms import FedNMap
from fedcomposite.problems import Batches
from fedcomposite.runtime import Simulator

COHORT, SAMPLES, FEATURES = 20, 10, 50
LINES = [
    *({"model": "linear", "clients": n, "file": False} for n in (100, 1_000, 10_000, 100_000)),
    {"model": "linear", "clients": 100_000, "file": True},
    *({"model": "mlp", "clients": n, "file": False} for n in (100, 1_000, 10_000)),
    {"model": "mlp", "clients": 10_000, "file": True},
]
QUICK = [
    {"model": "linear", "clients": 100, "file": False},
    {"model": "linear", "clients": 1_000, "file": True},
    {"model": "mlp", "clients": 30, "file": True},
]


def make_problem(model: str, n: int) -> fc.Problem:
    """Random samples of n clients, in one tensor."""
    rng = np.random.default_rng(0)
    offsets = tuple(range(0, n * SAMPLES + 1, SAMPLES))
    if model == "linear":
        X = torch.from_numpy(rng.standard_normal((n * SAMPLES, FEATURES)))
        y = torch.from_numpy(np.sign(rng.standard_normal(n * SAMPLES)))
        return fc.Problem(fc.Silos(X, y, offsets), loss="logistic", regularizer=fc.regularizers.L1(0.001))
    images = torch.from_numpy(rng.integers(0, 256, (n * SAMPLES, 1, 28, 28), np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, n * SAMPLES))
    network = fc.models.build("mlp", "mnist")
    return fc.Problem(fc.Silos(images, labels, offsets), model=network, regularizer=fc.regularizers.L1(0.0001))


def measure(model: str, clients: int, file: bool, rounds: int) -> dict[str, Any]:
    """One line: a few rounds by hand, so that each can be timed."""
    began = time.perf_counter()
    problem = make_problem(model, clients)
    dtype = torch.float64 if model == "linear" else torch.float32
    simulator = Simulator(
        problem,
        FedNMap(5, 0.05, gamma=0.05, partial_participation=True),
        batches=Batches(0, 5),
        participation=COHORT / clients,
        dtype=dtype,
        memory_limit=0 if file else None,
    )
    simulator.measure(0.1, 0.0)
    setup = time.perf_counter() - began
    times, present = [], set()
    with simulator.transport.running():
        for r in range(rounds):
            present |= set(simulator.participants(r).tolist())
            began = time.perf_counter()
            simulator.step()
            times.append(time.perf_counter() - began)
    states = simulator.states
    return {
        "model": model,
        "clients": clients,
        "where": "file" if states.spilled else "memory",
        "states": states.nbytes / 2**20,
        "used": states.nbytes / 2**20 * len(present) / clients,
        "setup": setup,
        "round": 1e3 * statistics.median(times),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,  # kilobytes on Linux
    }


def alone(line: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(line), "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="rounds that are timed")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="a few small lines in one process, to see that it works")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(**json.loads(arguments.one), rounds=arguments.rounds)))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {COHORT} participants")
    heads = ("model", "clients", "where", "states MiB", "used MiB", "setup s", "ms per round", "peak MiB")
    widths = (6, 8, 7, 11, 9, 8, 13, 9)
    print(" ".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True)))
    rows = []
    for line in QUICK if arguments.quick else LINES:
        found = measure(**line, rounds=3) if arguments.quick else alone(line, arguments.rounds)
        rows.append(found)
        numbers = [f"{found[k]:.1f}" for k in ("states", "used", "setup", "round")]
        cells = [found["model"], f"{found['clients']:,}", found["where"], *numbers, f"{found['peak']:.0f}"]
        print(" ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
