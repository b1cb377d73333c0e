"""One knob for sparsity against dense training, pruning and the published methods: 10 of 100 clients a round.

    python -m benchmarks.knob --out DIR                                 # everything, one seed
    python -m benchmarks.knob --methods dense,nmap-95 --seeds 0,1 --jobs 4 --out DIR
    python -m benchmarks.knob --fit 1,4,8 --out DIR                     # how many runs fit on the GPU side by side
    python -m benchmarks.knob --model vit-small --out DIR               # or --model gpt-small --data stories
    python -m benchmarks.knob --device cpu --data fashion_mnist --model cnn --images 600 --rounds 8 --out DIR

CIFAR-10 (or made-up stories) dealt out by Dirichlet(--alpha), ResNet-18 with the 3x3 stem, ten local steps at batch 50,
crops and flips, bf16, a cosine in stairs, weight decay. Every run is a process of its own, ``--jobs`` at a time, since
one run leaves much of a GPU idle; NVIDIA's MPS lets them run at the same time (``--mps``). Records are on disk at once;
a run that is late ends after ``--limit`` seconds with what it has. ``--collect`` makes table and figure anew from what
is there.

Bytes are those of messages as they travel, where many zeros take little.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import fedcomposite as fc
from benchmarks.peers.sparse_training import Powered, Regrown
from fedcomposite.algorithms import FedAvg, FedMid, FedNMap
from fedcomposite.data.augmentation import Chain, Crop, Flip
from fedcomposite.files import write_atomic
from fedcomposite.plots import canvas
from fedcomposite.regularizers import L2Squared
from fedcomposite.schedules import Cosine, Piecewise, Ramp, Staircase

STAIRS = 8
METHODS = (
    *("dense", "nmap-95", "nmap-97", "mid-95", "mid-97", "avg-95", "avg-97", "lean-95", "lean-97"),
    *("prune-95", "prune-97", "feddst-95", "flash-95", "sparsyfed-95", "feddst-97", "flash-97", "sparsyfed-97"),
)
KEYS = ("round", "seconds", "loss", "train_accuracy", "test_accuracy", "sparsity", "bytes_up", "bytes_down")


def problem_of(arguments: argparse.Namespace, seed: int) -> fc.Problem:
    if arguments.data == "stories":
        told = arguments.images or 100
        silos = fc.data.load(
            "stories", clients=arguments.clients, samples=told, alpha=arguments.alpha, test=0.1, seed=seed
        )
        model = fc.models.build(arguments.model, silos, seed=seed)
        decay, precision = L2Squared(arguments.decay).on("*"), "bf16" if arguments.device == "cuda" else "full"
        return fc.Problem(silos, model=model, regularizer=decay, precision=precision, evaluation_samples=2_000)
    pooled: Any = fc.data.load(arguments.data)
    if arguments.images:
        X, y = pooled.features[: arguments.images], pooled.targets[: arguments.images]
        pooled = fc.Silos.from_arrays([(X, y)], test=(pooled.test[0][:100], pooled.test[1][:100]))
    silos = pooled.partition("dirichlet", clients=arguments.clients, alpha=arguments.alpha, minimum=2, seed=seed)
    stem: dict[str, Any] = {"stem": "small"} if arguments.model == "resnet18" else {}
    return fc.Problem(
        silos,
        model=fc.models.build(arguments.model, arguments.data, seed=seed, **stem),
        regularizer=L2Squared(arguments.decay).on("*"),
        normalization=fc.data.normalization(arguments.data),
        augment=Chain((Crop(4), Flip())),
        precision="bf16" if arguments.device == "cuda" else "full",
        evaluation_samples=arguments.images or 10_000,
    )


def method_of(name: str, problem: fc.Problem, arguments: argparse.Namespace) -> tuple[Any, fc.Problem, dict[str, Any]]:
    """The method of a name, its problem, and what else the run is given."""
    kind, _, percent = name.partition("-")
    tau, rounds, decay = arguments.local_steps, arguments.rounds, arguments.decay
    step = Staircase(max(1, rounds // STAIRS), Cosine(arguments.step, arguments.step / 50, rounds))
    if kind in ("dense", "prune"):
        return FedAvg(tau, step), problem, {}
    share = float(percent) / 100
    knob = {"sparsity": share}
    if kind.startswith("nmap"):
        gamma = float(kind.removeprefix("nmap") or arguments.gamma)
        return FedNMap(tau, step, gamma=gamma, partial_participation=True), problem, knob
    if kind == "mid":
        return FedMid(tau, step, server_prox_only=True), problem, knob
    runs = tuple((s.start, s.stop) for s in problem.layout if len(s.shape) > 1)
    if kind == "avg":
        return FedAvg(tau, step), problem, knob
    ramps: dict[str, Any] = {
        "flash": Piecewise((1e-3, 1.0), (max(1, rounds // 20),)),
        "lean": Ramp(0.5, 1.0, rounds=max(1, 2 * rounds // 5)),  # half of the zeros from the start, for fewer bytes
    }
    same = problem.with_zeros(share, ramp=ramps.get(kind))
    if kind in ramps:
        return FedAvg(tau, step), same, {}
    if kind == "sparsyfed":
        return Powered(tau, step, decay, weights=runs), same, {}
    entries = sum(b - a for a, b in runs)
    kept = entries - round(share * problem.dimension)
    return Regrown(tau, step, decay, kept=kept, changed=max(1, kept // 100), weights=runs), same, {}


class Told:
    """Records on disk as soon as they are known, and an end in time."""

    def __init__(self, path: Path, limit: float) -> None:
        self.path, self.found, self._began, self._limit = path, dict[str, Any](), time.perf_counter(), limit

    def add(self, **found: Any) -> None:
        self.found |= found
        write_atomic(self.path, (json.dumps(self.found) + "\n").encode())

    def following(self, part: str) -> Any:
        curve: list[dict[str, float]] = []

        def record(r: fc.Record) -> None:
            curve.append({k: float(r[k]) for k in KEYS})
            self.add(**{part: curve})

        return record

    def in_time(self, view: fc.callbacks.View) -> None:
        if time.perf_counter() - self._began > self._limit:
            view.stop(f"{self._limit:g} s are over")


def train(arguments: argparse.Namespace) -> None:
    """One run, in this process; for pruning, what follows after the cut as well."""
    name, seed, rounds = arguments.run, arguments.seed, arguments.rounds
    told = Told(arguments.out / f"{name}-seed-{seed}.json", arguments.limit)
    told.add(method=name, seed=seed, torch=torch.__version__, rounds=rounds, alpha=arguments.alpha)
    began = time.perf_counter()
    problem = problem_of(arguments, seed)
    method, problem, more = method_of(name, problem, arguments)
    settings: dict[str, Any] = {"batch_size": arguments.batch, "dtype": torch.float32, "device": arguments.device}
    settings |= {"participation": arguments.cohort / arguments.clients, "seed": seed, "callbacks": [told.in_time]}
    settings |= {"mode": "record"} if arguments.device == "cuda" else {}
    every = max(1, rounds // arguments.records)
    again = max(1, rounds // 7) if name.startswith("prune") else 0
    run = fc.simulate(
        problem, method, rounds=rounds, evaluate_every=every, on_record=told.following("curve"), **more, **settings
    )
    told.add(message=run.message, seconds=time.perf_counter() - began)
    if again:
        share = float(name.partition("-")[2]) / 100
        cut = problem.with_zeros(share).regularizer.prox(run.solution, 0.0)
        steps = Staircase(max(1, again // 4), Cosine(arguments.step / 10, arguments.step / 500, again))
        kept = problem.on_support((cut != 0) | ~weights_of(problem), cut, run.buffers)
        second = fc.simulate(
            kept, FedMid(arguments.local_steps, steps), rounds=again, evaluate_every=max(1, again // 5),
            on_record=told.following("refit"), **settings,
        )  # fmt: skip
        told.add(message=second.message)
    told.add(done=True, seconds=time.perf_counter() - began)
    if arguments.device == "cuda":
        told.add(gib=torch.cuda.max_memory_reserved() / 2**30)


def weights_of(problem: fc.Problem) -> torch.Tensor:
    """The coordinates in which zeros are made."""
    mask = torch.zeros(problem.dimension, dtype=torch.bool)
    for s in problem.layout:
        mask[s.start : s.stop] = len(s.shape) > 1
    return mask


@contextmanager
def shared_gpu(wanted: bool, folder: Path) -> Iterator[dict[str, str]]:
    """Environment for processes that use the GPU at the same time, by NVIDIA's MPS where it starts."""
    environment = dict(os.environ)
    if not wanted:
        yield environment
        return
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps-pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}
    for place in own.values():
        Path(place).mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment | own, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no MPS: {error}", flush=True)
        yield environment
        return
    try:
        yield environment | own
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=environment | own, check=False, timeout=20)


def together(arguments: argparse.Namespace, runs: list[tuple[str, int]], jobs: int, more: list[str]) -> float:
    """Runs as processes, so many at a time; the seconds that it took."""
    began, waiting, running = time.perf_counter(), list(runs), list[subprocess.Popen[bytes]]()
    logs: dict[int, str] = {}
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with shared_gpu(arguments.mps and jobs > 1, Path("/tmp") / f"mps-{os.getpid()}") as environment:
        environment["OMP_NUM_THREADS"] = str(threads)
        while waiting or running:
            while waiting and len(running) < jobs:
                name, seed = waiting.pop(0)
                left = arguments.limit - (time.perf_counter() - began)
                if left < 20:
                    print(f"no time for {name}, seed {seed}", flush=True)
                    continue
                command = [sys.executable, "-m", "benchmarks.knob", "--run", name, "--seed", str(seed), *more]
                log = (arguments.out / f"{name}-seed-{seed}.log").open("wb")
                command += ["--limit", f"{left - 10:g}"]
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
                logs[running[-1].pid] = log.name
            time.sleep(0.5)
            for ended in [p for p in running if p.poll() is not None]:
                running.remove(ended)
                if ended.returncode:
                    lines = Path(logs[ended.pid]).read_text().splitlines()
                    print(f"{logs[ended.pid]}: {lines[-1] if lines else ended.returncode}", flush=True)
    return time.perf_counter() - began


def passed_on(arguments: argparse.Namespace, **other: Any) -> list[str]:
    """The settings of this run as another process takes them."""
    own: tuple[str, ...] = (
        "rounds",
        "local_steps",
        "batch",
        "clients",
        "cohort",
        "alpha",
        "images",
        "data",
        "model",
        "records",
    )
    own += ("step", "decay", "gamma", "device", "out")
    values = {name: getattr(arguments, name) for name in own} | other
    return [word for k, v in values.items() for word in (f"--{k.replace('_', '-')}", str(v))]


def fit(arguments: argparse.Namespace) -> None:
    """Rounds a second of so many runs side by side; what a start takes is taken off by the records' times."""
    rows = []
    for jobs in map(int, arguments.fit.split(",")):
        for mps in (False, True) if jobs > 1 else (False,):
            arguments.mps, folder = mps, arguments.out / f"fit-{jobs}-{'mps' if mps else 'plain'}"
            folder.mkdir(parents=True, exist_ok=True)
            runs = [("nmap-95", seed) for seed in range(jobs)]
            together(arguments, runs, jobs, passed_on(arguments, rounds=40, records=4, out=folder))
            found = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
            each = [(b["seconds"] - a["seconds"]) / (b["round"] - a["round"])
                    for one in found if len(one.get("curve", [])) > 3
                    for a, b in [(one["curve"][1], one["curve"][-1])]]  # fmt: skip
            speed = sum(1 / s for s in each)
            row = {"side by side": jobs, "MPS": mps, "done": len(each), "rounds a second": speed,
                   "GiB each": max((one.get("gib", 0) for one in found), default=0)}  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    write_atomic(arguments.out / "fit.json", (json.dumps(rows, indent=1) + "\n").encode())


def collect(folder: Path) -> pd.DataFrame:
    """A row for each run that is there; and the figure."""
    rows, curves = [], {}
    for path in sorted(folder.glob("*-seed-*.json")):
        one = json.loads(path.read_text())
        parts = [one[k][-1] for k in ("curve", "refit") if one.get(k)]
        if not parts:
            continue
        last = parts[-1]
        up, down = (sum(p[k] for p in parts) / 1e9 for k in ("bytes_up", "bytes_down"))
        rows.append({"method": one["method"], "seed": one["seed"], "round": sum(p["round"] for p in parts),
                     "accuracy": last["test_accuracy"], "zeros": last["sparsity"], "loss": last["loss"],
                     "GB up": up, "GB down": down, "s": one.get("seconds"), "done": "done" in one})  # fmt: skip
        if one["seed"] == 0:
            curves[one["method"]] = one["curve"]
    table = pd.DataFrame(rows)
    if rows:
        table.to_csv(folder / "table.csv", index=False)
        draw(table, curves, folder / "knob.png")
    return table


def draw(table: pd.DataFrame, curves: dict[str, Any], path: Path) -> None:
    """Accuracy against zeros at the end, and against bytes on the way."""
    figure, axes = canvas.make(9.0, 3.2, 2)
    for key, part in table.groupby("method"):
        name = str(key)
        axes[0].errorbar(
            part["zeros"].mean(), part["accuracy"].mean(), yerr=part["accuracy"].std(ddof=0), fmt="o", label=name
        )
        if name in curves:
            sent = [(r["bytes_up"] + r["bytes_down"]) / 1e9 for r in curves[name]]
            axes[1].plot(sent[1:], [r["test_accuracy"] for r in curves[name]][1:], "-", label=name)
    axes[0].set(xlabel="exact zeros", ylabel="test accuracy")
    axes[1].set(xlabel="GB sent", ylabel="test accuracy", xscale="log")
    axes[1].legend(fontsize=6)
    canvas.finish(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for records, table and figure")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--mps", action="store_true", help="start NVIDIA's MPS for them")
    parser.add_argument("--fit", default="", help="numbers of runs to try side by side, and nothing else")
    parser.add_argument("--collect", action="store_true", help="table and figure from what is there")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for all of it")
    parser.add_argument("--rounds", type=int, default=700)
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=10, help="clients that take part in a round")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--images", type=int, default=0, help="so many training images; 0 takes all")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--records", type=int, default=14, help="records of a run")
    parser.add_argument("--step", type=float, default=0.2)
    parser.add_argument("--decay", type=float, default=5e-4)
    parser.add_argument("--gamma", type=float, default=4.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.device == "cuda" and not arguments.collect and not torch.cuda.is_available():
        raise SystemExit("benchmarks.knob needs a CUDA GPU (--device cpu --data fashion_mnist --model cnn tries it)")
    if arguments.run:
        train(arguments)
        return
    if arguments.fit:
        fit(arguments)
        return
    if not arguments.collect:
        runs = [(name, int(seed)) for seed in arguments.seeds.split(",") for name in arguments.methods.split(",")]
        print(f"{together(arguments, runs, arguments.jobs, passed_on(arguments)):.0f} s in all", flush=True)
    print(collect(arguments.out).to_string(index=False, float_format=lambda v: f"{v:.4g}"))


if __name__ == "__main__":
    main()
