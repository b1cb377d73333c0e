"""Workloads, and who runs them here: ours, a plain per-client loop, and one centralised step on the same samples.

All do FedMid with the same minibatches, which our counter-based generator draws: x+ = P(mean_i y_i), where client i
takes ``local_steps`` proximal gradient steps from x. :func:`export` writes a workload as files for the peers, whose
adapters are in ``benchmarks/peers``.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedcomposite as fc
from benchmarks.peers import common
from fedcomposite.algorithms import FedMid
from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.problems import Batches
from fedcomposite.regularizers import L1, MCP, SCAD, Regularizer
from fedcomposite.runtime import Simulator, process


@dataclass(frozen=True)
class Workload:
    """What is computed in a round, and how often."""

    title: str
    silos: Callable[[bool], fc.Silos]
    """The data; ``True`` asks for a small part of it."""
    regularizer: dict[str, Any]
    local_steps: int
    step: float
    rounds: int
    """Rounds that everyone runs, the first of which is not timed."""
    model: str = "linear"
    batch: int | None = None
    sampling: str = "replacement"
    participation: float = 1.0
    dtype: torch.dtype = torch.float32
    normalization: Any = None
    gpu: bool = False
    peers: tuple[str, ...] = ("flower", "pfl", "fluke")
    skipped_peers: str = ""
    """Why the others are left out."""

    @property
    def penalty(self) -> Regularizer:
        """The regularizer as ours."""
        given = {k: v for k, v in self.regularizer.items() if k != "name"}
        return {"l1": L1, "mcp": MCP, "scad": SCAD}[self.regularizer["name"]](**given)

    def problem(self, quick: bool = False) -> fc.Problem:
        """F = mean f_i + h."""
        silos = self.silos(quick)
        if self.model == "linear":
            return fc.Problem(silos, loss="logistic", regularizer=self.penalty)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = common.pfl_cnn() if self.model == "pfl-cnn" else fc.models.build(self.model, silos)
        return fc.Problem(silos, model=module, regularizer=self.penalty, normalization=self.normalization)

    @property
    def method(self) -> FedMid:
        """The method that everyone runs."""
        return FedMid(local_steps=self.local_steps, step=self.step)

    def simulator(self, problem: fc.Problem, device: str, method: AnyAlgorithm | None = None) -> Simulator:
        """Ours."""
        return Simulator(
            problem, method or self.method, batches=Batches(0, self.batch, self.sampling), dtype=self.dtype,
            participation=self.participation, device=device, mode="compile" if device == "cuda" else "eager",
        )  # fmt: skip


def _images(name: str, clients: int, most: int | None = None) -> Callable[[bool], fc.Silos]:
    def made(quick: bool) -> fc.Silos:
        pooled = fc.data.load(name)
        keep = 20 * clients if quick else most or len(pooled.targets)
        part = fc.Silos.from_arrays([(pooled.features[:keep], pooled.targets[:keep])])
        return part.partition("iid", clients=clients)

    return made


def _a9a(quick: bool) -> fc.Silos:
    pooled = fc.data.load("a9a")
    return pooled.partition("iid", clients=10)


SCAD_FEDCANON = {"name": "scad", "lam": 0.05, "a": 3.7, "kappa": 0.01}

FASHION_CNN = Workload(
    "Fashion-MNIST, FedCanon's CNN (268,362 parameters), SCAD, 10 clients, 10 steps at batch 10",
    _images("fashion_mnist", 10),
    SCAD_FEDCANON,
    local_steps=10,
    step=0.02,
    rounds=6,
    model="cnn",
    batch=10,
    normalization=((0.2860,), (0.3530,)),
)

WORKLOADS: dict[str, Workload] = {
    "sparse-logistic": Workload(
        "sparse logistic regression, 30 clients x 100 samples, 20 features, l1, 10 full-gradient steps",
        lambda quick: fc.data.load("synthetic", clients=30, features=20, samples=100, alpha=1.0, beta=1.0),
        {"name": "l1", "lam": 0.003},
        local_steps=10,
        step=0.05,
        rounds=31,
        dtype=torch.float64,
    ),
    "a9a-mcp": Workload(
        "A9A, linear, MCP, 10 clients x 3,256 samples, 10 full-gradient steps",
        _a9a,
        {"name": "mcp", "lam": 0.01, "theta": 10.0},
        local_steps=10,
        step=0.02,
        rounds=11,
    ),
    "mnist-mlp": Workload(
        "MNIST, MLP (109,386 parameters), l1, 100 clients, 10 steps at batch 10",
        _images("mnist", 100),
        {"name": "l1", "lam": 1e-4},
        local_steps=10,
        step=0.02,
        rounds=6,
        model="mlp",
        batch=10,
        normalization=((0.1307,), (0.3081,)),
    ),
    "fashion-cnn": FASHION_CNN,
    "fashion-cnn-64": replace(
        FASHION_CNN, title="the same at batch 64", batch=64, peers=(), skipped_peers="they do the same as at batch 10"
    ),
    "cifar-resnet18": Workload(
        "CIFAR-10, ResNet-18 (11.2 M parameters), l1, 10 clients, 10 steps at batch 32",
        _images("cifar10", 10),
        {"name": "l1", "lam": 1e-5},
        local_steps=10,
        step=0.01,
        rounds=6,
        model="resnet18",
        batch=32,
        normalization=((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        gpu=True,
        peers=(),
        skipped_peers="each averages the running statistics of batch norm in its own way, so the work differs",
    ),
    "cifar-pfl": Workload(
        "CIFAR-10 as in pfl-research, its 2-layer CNN (1.6 M), l1, 1,000 clients x 50, cohort 50, 1 epoch at batch 10",
        _images("cifar10", 1000),
        {"name": "l1", "lam": 1e-5},
        local_steps=5,
        step=0.05,
        rounds=11,
        model="pfl-cnn",
        batch=10,
        sampling="epoch",
        participation=0.05,
        normalization=((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        gpu=True,
    ),
}


@dataclass
class Timing:
    """What a contestant took."""

    seconds: float  # per round, median after the warm-up
    solution: Tensor | None = None
    startup: float = 0.0  # seconds until the first round could begin, and the warm-up round where it is ours
    notes: dict[str, Any] = field(default_factory=dict)


def synchronize(device: str) -> None:
    """Wait for the device, so that a clock sees its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def lap(work: Callable[[], object], device: str) -> float:
    """Seconds that a call takes."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def ours(work: Workload, problem: fc.Problem, device: str, rounds: int) -> Timing:
    """The stacked simulator."""
    began = time.perf_counter()
    sim = work.simulator(problem, device)
    with sim.transport.running():
        first = time.perf_counter() - began + lap(sim.step, device)
        times = [lap(sim.step, device) for _ in range(rounds - 1)]
        return Timing(statistics.median(times), sim.solution, first)


class Loop:
    """FedMid as researchers write it: one module, one client after another, an optimizer, state dicts, their mean."""

    def __init__(self, work: Workload, problem: fc.Problem, device: str, rounds: int) -> None:
        assert problem.model is not None or work.model == "linear"
        self.work, self.device = work, torch.device(device)
        self.samples, self.targets = _prepared(work, problem, self.device)
        self.offsets = problem.silos.offsets
        self.cohorts, self.rows = draws(work, problem, rounds)
        module = nn.Linear(problem.dimension, 1, bias=False) if problem.model is None else copy.deepcopy(problem.model)
        if problem.model is None:
            nn.init.zeros_(module.weight)  # type: ignore[arg-type]
        self.module = module.to(self.device, work.dtype).train()
        self.prox = common.prox_of(work.regularizer)
        self.loss: Any = common.logistic if work.model == "linear" else nn.functional.cross_entropy
        self.r = 0

    def batch(self, position: int, k: int) -> tuple[Tensor, Tensor]:
        """Minibatch k of a member of the cohort."""
        if self.rows is None:
            i = self.cohorts[self.r][position]
            whole = slice(self.offsets[i], self.offsets[i + 1])
            return self.samples[whole], self.targets[whole]
        rows = self.rows[self.r, position, k].to(self.device)
        return self.samples[rows], self.targets[rows]

    def round(self) -> None:
        """All clients, one after another."""
        work, module = self.work, self.module
        start = copy.deepcopy(module.state_dict())
        total = {name: torch.zeros_like(value, dtype=work.dtype) for name, value in start.items()}
        cohort = len(self.cohorts[self.r])
        for position in range(cohort):
            module.load_state_dict(start)
            optimizer = common.ProxSGD(module.parameters(), lr=work.step, prox=self.prox)
            for k in range(work.local_steps):
                inputs, targets = self.batch(position, k)
                optimizer.zero_grad()
                self.loss(module(inputs), targets).backward()
                optimizer.step()
            for name, value in module.state_dict().items():
                total[name] += value / cohort
        module.load_state_dict(total)
        with torch.no_grad():
            for p in module.parameters():
                if p.ndim >= 2:
                    p.copy_(self.prox(p, work.step * work.local_steps))
        self.r += 1

    def central(self) -> None:
        """The floor: as many steps of one model, each on the samples that all clients together would use."""
        if self.rows is None:
            batches = [(self.samples, self.targets)] * self.work.local_steps
        else:
            batches = [
                (self.samples[rows], self.targets[rows])
                for rows in self.rows[0].transpose(0, 1).flatten(1).to(self.device)
            ]
        optimizer = common.ProxSGD(self.module.parameters(), lr=self.work.step, prox=self.prox)
        for inputs, targets in batches:
            optimizer.zero_grad()
            self.loss(self.module(inputs), targets).backward()
            optimizer.step()


def loop(work: Workload, problem: fc.Problem, device: str, rounds: int) -> Timing:
    """The per-client loop, with the better of one thread and all of them."""
    run = Loop(work, problem, device, rounds)
    best = _better([run.round] * min(2, rounds - 1), device)
    with process.threads(best):
        times = [lap(run.round, device) for _ in range(rounds - run.r)]
    return Timing(statistics.median(times), common.Task.get(run.module))


def central(work: Workload, problem: fc.Problem, device: str, rounds: int) -> Timing:
    """The centralised step, with the better of one thread and all of them."""
    run = Loop(work, problem, device, 1)
    run.central()  # the warm-up
    best = _better([run.central] * min(2, rounds - 1), device)
    with process.threads(best):
        return Timing(statistics.median(lap(run.central, device) for _ in range(rounds)))


def _better(trials: list[Callable[[], None]], device: str) -> int | None:
    """The number of threads of the faster trial; None is all."""
    times: dict[int | None, float] = {}
    for threads, trial in zip((None, 1), trials, strict=False):
        with process.threads(threads) if device == "cpu" else nullcontext():
            times[threads] = lap(trial, device)
    return min(times, key=lambda t: times[t]) if device == "cpu" else None


def _prepared(work: Workload, problem: fc.Problem, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets on the device, scaled once."""
    X = problem.silos.features.to(device, work.dtype)
    if problem.silos.features.dtype == torch.uint8:
        X = X / 255
    if work.normalization is not None:
        mean, std = (torch.tensor(v, dtype=work.dtype, device=device).reshape(-1, 1, 1) for v in work.normalization)
        X = (X - mean) / std
    y = problem.silos.targets.to(device)
    return X, y.to(work.dtype) if work.model == "linear" else y.long()


def draws(work: Workload, problem: fc.Problem, rounds: int) -> tuple[list[list[int]], Tensor | None]:
    """The cohorts of all rounds, and the rows of their minibatches ``(rounds, cohort, local_steps, batch)``."""
    sim = work.simulator(problem, "cpu")
    cohorts = [sim.participants(r) for r in range(rounds)]
    if work.batch is None:
        return [who.tolist() for who in cohorts], None
    silos, rows = problem.silos, []
    sizes, first = silos.sizes.astype(np.uint64), np.asarray(silos.offsets[:-1], np.uint64)
    for r, who in enumerate(cohorts):
        drawn = sim.batches.draw(np.asarray(silos.ids, np.uint64)[who], sizes[who], r, range(work.local_steps))
        rows.append((drawn + first[who][None, :, None]).astype(np.int64).swapaxes(0, 1))
    return [who.tolist() for who in cohorts], torch.from_numpy(np.stack(rows))


def export(work: Workload, problem: fc.Problem, device: str, rounds: int, folder: Path) -> None:
    """Write the workload for a peer: samples, starting model, minibatches, cohorts and settings."""
    cohorts, rows = draws(work, problem, rounds)
    linear = work.model == "linear"
    features, targets = problem.silos.features.numpy(), problem.silos.targets.numpy()
    start = problem.smooth(work.dtype).start()
    np.save(folder / "features.npy", features)
    np.save(folder / "targets.npy", targets.astype(np.float64) if linear else targets.astype(np.int64))
    np.save(folder / "offsets.npy", np.asarray(problem.silos.offsets))
    np.save(folder / "cohorts.npy", np.asarray(cohorts))
    np.save(folder / "start.npy", start.numpy())
    if rows is not None:
        np.save(folder / "rows.npy", rows.numpy())
    settings = {
        "model": work.model, "loss": "logistic" if linear else "cross_entropy", "regularizer": work.regularizer,
        "local_steps": work.local_steps, "step": work.step, "rounds": rounds, "device": device,
        "dtype": str(work.dtype).removeprefix("torch."), "normalization": work.normalization,
    }  # fmt: skip
    (folder / "task.json").write_text(json.dumps(settings))
