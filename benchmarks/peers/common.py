"""What every contestant but ours shares: the task as files, plain PyTorch models, naive proxes, and a proximal SGD.

It needs nothing but NumPy and torch, since it runs in the peers' own environments. A task is a folder that
:func:`benchmarks.workloads.export` wrote: ``task.json``, the samples, the starting model, and the minibatches and
cohorts of every round, so that all do the same work. The method is FedMid: proximal gradient steps at the clients, the
mean of their models, one more prox at the server.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Prox = Callable[[Tensor, float], Tensor]
Pair = tuple[Tensor, Tensor]


# -- proxes as they are usually written ---------------------------------------------------------------------------


def soft(v: Tensor, threshold: float) -> Tensor:
    """Soft-thresholding."""
    return torch.sign(v) * torch.relu(v.abs() - threshold)


def mcp(v: Tensor, step: float, lam: float, theta: float) -> Tensor:
    """Firm thresholding."""
    return torch.where(v.abs() <= theta * lam, soft(v, step * lam) / (1 - step / theta), v)


def scad(v: Tensor, step: float, lam: float, a: float, kappa: float) -> Tensor:
    """The three pieces of SCAD."""
    s, size = kappa * step, v.abs()
    middle = ((a - 1) * v - torch.sign(v) * s * a * lam) / (a - 1 - s)
    return torch.where(size <= lam * (1 + s), soft(v, s * lam), torch.where(size <= a * lam, middle, v))


def prox_of(regularizer: dict[str, Any]) -> Prox:
    """The prox of ``{"name": "l1" | "mcp" | "scad", parameters}``."""
    given = {k: v for k, v in regularizer.items() if k != "name"}
    return {
        "l1": lambda v, step: soft(v, step * given["lam"]),
        "mcp": lambda v, step: mcp(v, step, **given),
        "scad": lambda v, step: scad(v, step, **given),
    }[regularizer["name"]]


class ProxSGD(torch.optim.Optimizer):
    """p <- P_lr(p - lr g) for weights (two axes or more), p <- p - lr g for the rest; ``prox_step`` replaces P's lr."""

    def __init__(self, params: Any, lr: float, prox: Prox, prox_step: float | None = None) -> None:
        super().__init__(params, {"lr": lr, "prox": prox, "prox_step": prox_step})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            lr, length = group["lr"], group["prox_step"]
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-lr)
                    if p.ndim >= 2:
                        p.copy_(group["prox"](p, lr if length is None else length))


# -- models -------------------------------------------------------------------------------------------------------


class Enlarge(nn.Module):
    """Images of 28 x 28 as 32 x 32."""

    def forward(self, x: Tensor) -> Tensor:
        """Bilinear."""
        return nn.functional.interpolate(x, size=(32, 32), mode="bilinear", align_corners=False)


def build(name: str, features: int) -> nn.Module:
    """A network by name; its parameters come in the order of the flat vector."""
    if name == "linear":
        return nn.Linear(features, 1, bias=False)
    if name == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        )
    if name == "cnn":
        return nn.Sequential(
            Enlarge(), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
    if name == "pfl-cnn":
        return pfl_cnn()
    raise ValueError(f"unknown model {name!r}")


def pfl_cnn() -> nn.Module:
    """The network of pfl-research's CIFAR-10 benchmark, without its dropout, which would make the work random."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean logistic loss for labels -1 and 1."""
    return nn.functional.softplus(-targets * outputs.squeeze(1)).mean()


# -- the task -----------------------------------------------------------------------------------------------------


class Task:
    """A workload read from its folder, its samples on the device."""

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        self.folder, self.spec = path, json.loads((path / "task.json").read_text())
        self.device = torch.device(self.spec["device"])
        self.dtype = getattr(torch, self.spec["dtype"])
        self.steps, self.lr, self.rounds = (self.spec[k] for k in ("local_steps", "step", "rounds"))
        X = torch.from_numpy(np.load(path / "features.npy"))
        scale = 255 if X.dtype == torch.uint8 else 1
        X = X.to(self.device, self.dtype) / scale
        if self.spec["normalization"] is not None:
            mean, std = (torch.tensor(v, dtype=self.dtype, device=self.device) for v in self.spec["normalization"])
            X = (X - mean.reshape(-1, 1, 1)) / std.reshape(-1, 1, 1)
        self.features = X.shape[1]
        y = torch.from_numpy(np.load(path / "targets.npy")).to(self.device)
        self.X, self.y = X, y.to(self.dtype) if y.is_floating_point() else y
        self.offsets = np.load(path / "offsets.npy").tolist()
        self.cohorts = np.load(path / "cohorts.npy").tolist()
        self.start = torch.from_numpy(np.load(path / "start.npy")).to(self.device)
        rows = path / "rows.npy"
        self.rows = torch.from_numpy(np.load(rows)).to(self.device) if rows.exists() else None
        self.prox = prox_of(self.spec["regularizer"])
        self.loss: Callable[[Tensor, Tensor], Tensor] = (
            logistic if self.spec["loss"] == "logistic" else nn.functional.cross_entropy
        )

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.offsets) - 1

    def module(self) -> nn.Module:
        """The network with the starting parameters."""
        made = build(self.spec["model"], self.features).to(self.device, self.dtype)
        self.put(made, self.start)
        return made

    @staticmethod
    def put(module: nn.Module, x: Tensor) -> None:
        """Set the parameters to a copy of a flat vector."""
        nn.utils.vector_to_parameters(x.clone(), module.parameters())

    @staticmethod
    def get(module: nn.Module) -> Tensor:
        """The parameters as a flat vector."""
        return nn.utils.parameters_to_vector(module.parameters()).detach()

    def optimizer(self, module: nn.Module) -> ProxSGD:
        """The clients' optimizer."""
        return ProxSGD(module.parameters(), lr=self.lr, prox=self.prox)

    def batches(self, r: int, position: int) -> Iterator[Pair]:
        """The minibatches of the member at ``position`` of round r's cohort: all its samples, where none are drawn."""
        if self.rows is None:
            i = self.cohorts[r][position]
            whole = slice(self.offsets[i], self.offsets[i + 1])
            for _ in range(self.steps):
                yield self.X[whole], self.y[whole]
        else:
            for rows in self.rows[r, position]:
                yield self.X[rows], self.y[rows]

    def train(self, module: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Pair]) -> None:
        """Local steps, as one writes them."""
        for inputs, targets in batches:
            optimizer.zero_grad()
            self.loss(module(inputs), targets).backward()
            optimizer.step()

    @torch.no_grad()
    def server_prox(self, module: nn.Module) -> None:
        """The prox of a whole round's step on the weights."""
        for p in module.parameters():
            if p.ndim >= 2:
                p.copy_(self.prox(p, self.lr * self.steps))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


load = lru_cache(maxsize=1)(Task)
"""The task of a folder, read once per process."""


class Clock:
    """Ends of rounds; ``began`` is the wall time at which the process was launched.

    The first two rounds, which do not count, try all threads and one, and the better stays.
    """

    def __init__(self, began: float, threads: int) -> None:
        self.began, self.threads, self.ends = began, threads, [time.perf_counter()]
        self.startup = time.time() - began

    def start(self) -> None:
        """The first round begins now."""
        self.startup, self.ends = time.time() - self.began, [time.perf_counter()]

    def lap(self) -> None:
        """A round ends now."""
        self.ends.append(time.perf_counter())
        if len(self.ends) == 2:
            torch.set_num_threads(1)
        if len(self.ends) == 3:
            every, one = np.diff(self.ends)
            torch.set_num_threads(1 if one < every else self.threads)

    def save(self, task: Task, x: Tensor, version: str) -> None:
        """Write the outcome beside the task."""
        rounds = np.diff(self.ends).tolist()
        np.save(task.folder / "solution.npy", x.detach().cpu().double().numpy())
        outcome = {"startup": self.startup, "rounds": rounds, "version": version}
        (task.folder / "outcome.json").write_text(json.dumps(outcome))


def arguments() -> tuple[Task, Clock, int]:
    """Task, clock and threads from the command line: FOLDER BEGAN THREADS."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("began", type=float)
    parser.add_argument("threads", type=int)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    return load(given.folder), Clock(given.began, given.threads), given.threads
