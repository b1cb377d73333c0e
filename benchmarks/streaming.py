"""Samples in a file beside samples in memory: rounds of a network, and the memory that they take.

    python -m benchmarks.streaming                    # 60,000 images of 3 x 64 x 64 bytes, a small CNN, on a CPU
    python -m benchmarks.streaming --device cuda      # recorded rounds on a GPU
    python -m benchmarks.streaming --quick            # small: does it run, not how fast

The images are written to a folder, one by one, with ``Silos.from_datasets(..., save_to=...)``. Each way of using them
then runs in a process of its own: read into memory; mapped, with the page cache as it is; mapped without reading ahead;
and mapped after the page cache has been told to forget the file. Memory is the process's own (anonymous, not the page
cache), what it has more at its peak than before it opened the folder. Time is that of the clock and of the processor,
whose part of reading ahead is not waited for. The models that come out must be equal bit by bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

import fedcomposite as fc
from fedcomposite.data.mapped import in_memory
from fedcomposite.problems.network import samples as reading

WAYS = ("memory", "mapped", "mapped, nothing ahead", "mapped, cold")
CLIENTS = 10


class Images:
    """Random images that exist only while they are looked at."""

    def __init__(self, count: int, side: int, seed: int) -> None:
        self._count, self._side, self._seed = count, side, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        generator = np.random.default_rng((self._seed, i))
        return generator.integers(0, 256, (3, self._side, self._side), np.uint8), i % 10


def write(folder: Path, count: int, side: int) -> None:
    """Ten silos, each of which has a tenth of the images."""
    parts = [Images(count // CLIENTS, side, i) for i in range(CLIENTS)]
    fc.Silos.from_datasets(parts, test=Images(100, side, CLIENTS), save_to=folder)


def own_memory() -> int:
    """Bytes of this process that are not of a file."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


class Peak:
    """The most memory while it watches."""

    def __init__(self) -> None:
        self.first = self.most = own_memory()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            self.most = max(self.most, own_memory())

    def stop(self) -> int:
        """Bytes beyond those at the start."""
        self._end.set()
        self._thread.join()
        return max(self.most, own_memory()) - self.first


def forget(folder: Path) -> None:
    """Have the system drop the files from its cache."""
    for path in folder.glob("*.npy"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def network(side: int) -> torch.nn.Module:
    """A small convolutional network."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3, stride=2), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(256, 10),
    )  # fmt: skip


def measure(way: str, folder: Path, rounds: int, device: str) -> dict[str, float | str]:
    """One way of using the folder, in this process."""
    torch.set_num_threads(1)
    warm = torch.zeros(1, device=device)  # what the library itself takes
    if way == "mapped, cold":
        forget(folder)
    reading.AHEAD = 0 if way == "mapped, nothing ahead" else reading.AHEAD
    peak = Peak()
    silos = fc.Silos.open(folder)
    silos = silos.dense() if way == "memory" else silos
    side = silos.features.shape[-1]
    problem = fc.Problem(silos, model=network(side), normalization=(0.5, 0.3), evaluation_samples=200)
    method = fc.algorithms.FedAvg(local_steps=10, step=0.05)
    settings = {"batch_size": 32, "dtype": torch.float32, "device": device, "evaluate_every": 10**6, "progress": False}
    fc.simulate(problem, method, rounds=2, mode="auto" if device == "cpu" else "record", **settings)
    began, worked = time.perf_counter(), time.process_time()
    run = fc.simulate(problem, method, rounds=rounds, mode="auto" if device == "cpu" else "record", **settings)
    seconds, processor = (time.perf_counter() - began) / rounds, (time.process_time() - worked) / rounds
    content = run.solution.cpu().numpy().tobytes() + in_memory(silos.features[:1]).numpy().tobytes()
    on_device = torch.cuda.max_memory_allocated() if device != "cpu" else warm.nbytes
    return {
        "seconds": seconds, "processor": processor, "memory": peak.stop(), "device": on_device,
        "digest": hashlib.sha256(content).hexdigest(),
    }  # fmt: skip


def in_a_process(way: str, folder: Path, rounds: int, device: str) -> dict[str, float | str]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.streaming", "--way", way, "--folder", str(folder)]
    command += ["--rounds", str(rounds), "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(given: list[str] | None = None) -> int:
    """Write the images, run every way, compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small folder, few rounds")
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--side", type=int, default=64, help="pixels of an image's side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where the images go; a temporary folder if left out")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(given)
    if chosen.way is not None:
        print(json.dumps(measure(chosen.way, chosen.folder, chosen.rounds, chosen.device)))
        return 0
    samples, side, rounds = (400, 16, 2) if chosen.quick else (chosen.samples, chosen.side, chosen.rounds)
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch) / "images"
        peak, began = Peak(), time.perf_counter()
        write(folder, samples, side)
        size = (folder / "features.npy").stat().st_size
        print(f"{samples} images of 3 x {side} x {side}, {size / 1e6:.0f} MB, {CLIENTS} clients, batch 32, 10 steps")
        print(f"written in {time.perf_counter() - began:.1f} s with {peak.stop() / 1e6:.0f} MB of memory")
        print(f"{'way':<24}{'ms per round':>14}{'processor ms':>14}{'memory MB':>12}{'device MB':>12}")
        found = {way: in_a_process(way, folder, rounds, chosen.device) for way in (WAYS[:2] if chosen.quick else WAYS)}
        for way, seen in found.items():
            times = "".join(f"{1e3 * float(seen[k]):>14.1f}" for k in ("seconds", "processor"))
            print(f"{way:<24}{times}" + "".join(f"{float(seen[k]) / 1e6:>12.0f}" for k in ("memory", "device")))
    equal = len({seen["digest"] for seen in found.values()}) == 1
    print("models are equal bit by bit" if equal else "models DIFFER")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
