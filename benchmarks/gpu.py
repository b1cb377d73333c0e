"""Full local steps on a GPU: ours, a per-client loop as researchers write it, and one centralised gradient.

One local step of FedNMap with a SCAD prox (gather the batch, gradient, control variate, prox) for all clients, on
images of random bytes, with FedCanon's CNN; then ResNet-18 and MobileNetV3-Small with batch norm; recurrent and
attention layers; the prox alone against a copy; and FedCanon's Table VI.
``python -m benchmarks.gpu [--json FILE] [--part steps,prox]``.
Times are milliseconds, medians; compare the ratios.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedcomposite as fc
from benchmarks.inference import recorded
from benchmarks.peers import common
from fedcomposite.algorithms import FedAvg, FedCanon, FedDA, FedMid, FedNMap, Zhang
from fedcomposite.data.augmentation import Chain, Crop, Flip
from fedcomposite.problems import Batches
from fedcomposite.regularizers import L1, MCP, SCAD, ElasticNet, SparseGroupLasso
from fedcomposite.runtime import EagerWarning, Simulator
from fedcomposite.runtime.program import CompiledProx

H = SCAD(0.05, kappa=0.01)
STEP, GAMMA, TAU = 0.01, 0.1, 10
BEGAN = time.perf_counter()


def clock(work: Any, repeats: int = 5, calls: int = 1) -> float:
    """Median time of a call in milliseconds; several calls in a row keep the device busy."""
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began) / calls)
    return statistics.median(times)


def images(clients: int, samples: int, channels: int, size: int) -> fc.Silos:
    rng = np.random.default_rng(0)
    shape = (samples, channels, size, size)
    return fc.Silos.from_arrays(
        [(rng.integers(0, 256, shape, dtype=np.uint8), rng.integers(0, 10, samples)) for _ in range(clients)]
    )


def inputs(raw: torch.Tensor) -> torch.Tensor:
    """Bytes as numbers in [0, 1], words as they are."""
    return raw.float() / 255 if raw.dtype == torch.uint8 else raw


class Loop:
    """FedNMap as one would write it: a module per client, one client after another."""

    def __init__(self, silos: fc.Silos, module: nn.Module, batch: int) -> None:
        self.batch = batch
        self.data = [(x.cuda(), y.cuda()) for x, y in (silos[i] for i in range(len(silos)))]
        self.models = [copy.deepcopy(module).cuda().train() for _ in self.data]
        self.z = [[p.detach().clone() for p in m.parameters()] for m in self.models]
        self.c = [[torch.zeros_like(p) for p in m.parameters()] for m in self.models]
        self.loss = nn.CrossEntropyLoss()

    def gradients(self) -> None:
        """One gradient of every client."""
        for (X, y), model in zip(self.data, self.models, strict=True):
            rows = torch.randint(len(X), (self.batch,), device="cuda")
            model.zero_grad()
            self.loss(model(inputs(X[rows])), y[rows]).backward()

    def step(self) -> None:
        """One full local step of every client."""
        for (X, y), model, z, c in zip(self.data, self.models, self.z, self.c, strict=True):
            with torch.no_grad():
                for p, zp in zip(model.parameters(), z, strict=True):
                    p.copy_(common.scad(zp, GAMMA, H.lam, H.a, H.kappa) if p.ndim > 1 else zp)
            rows = torch.randint(len(X), (self.batch,), device="cuda")
            model.zero_grad()
            self.loss(model(inputs(X[rows])), y[rows]).backward()
            with torch.no_grad():
                for p, zp, cp in zip(model.parameters(), z, c, strict=True):
                    zp -= STEP * (p.grad + (zp - p) / GAMMA + cp)


def centralised(silos: fc.Silos, module: nn.Module, batch: int) -> Any:
    """One eager gradient of one model on as many samples."""
    X, y = silos.features.cuda(), silos.targets.cuda()
    model, loss, n = copy.deepcopy(module).cuda().train(), nn.CrossEntropyLoss(), len(silos)

    def work() -> None:
        rows = torch.randint(len(X), (n * batch,), device="cuda")
        model.zero_grad()
        loss(model(inputs(X[rows])), y[rows]).backward()

    return work


def ours(problem: fc.Problem, method: Any, batch: int, mode: str) -> tuple[float, float]:
    """Milliseconds per local step inside a round, and seconds to prepare."""
    sim = Simulator(problem, method, batches=Batches(0, batch), dtype=torch.float32, device="cuda", mode=mode)  # type: ignore[arg-type]
    began = time.perf_counter()
    sim.step()
    torch.cuda.synchronize()
    prepared = time.perf_counter() - began
    return clock(sim.step) / TAU, prepared


def steps() -> list[dict[str, Any]]:
    rows = []
    module = fc.models.build("cnn", "mnist")
    for clients, batch in ((10, 10), (10, 64), (100, 32)):
        silos = images(clients, 600, 1, 28)
        problem = fc.Problem(silos, model=module, regularizer=H)
        method = FedNMap(TAU, STEP, gamma=GAMMA)
        row: dict[str, Any] = {"what": f"CNN, {clients} clients, batch {batch}"}
        row["loop"] = clock(Loop(silos, module, batch).step)
        for mode in ("eager", "record", "compile"):
            row[mode], row[f"{mode} start s"] = ours(problem, method, batch, mode)
        row["centralised"] = clock(centralised(silos, module, batch))
        row["gain"] = row["loop"] / row["compile"]
        row["of centralised"] = row["compile"] / row["centralised"]
        rows.append(row)
        show(row)
    return rows


def models() -> list[dict[str, Any]]:
    """Deep networks with batch norm: the loop and the centralised gradient take no step, ours do."""
    rows = []
    silos = images(10, 200, 3, 32)
    for name in ("resnet18", "mobilenetv3-small"):
        module = fc.models.build(name, "cifar10", **({"dropout": 0.0} if name.startswith("mobile") else {}))
        problem = fc.Problem(silos, model=module, regularizer=L1(1e-5))
        row: dict[str, Any] = {
            "what": f"{name}, 10 clients, batch 32",
            "loop": clock(Loop(silos, module, 32).gradients),
        }
        for mode in ("record", "compile"):
            row[mode], row[f"{mode} start s"] = ours(problem, FedAvg(TAU, STEP), 32, mode)
        if name == "resnet18":
            row["FedNMap"], row["FedNMap start s"] = ours(problem, FedNMap(TAU, STEP, gamma=GAMMA), 32, "compile")
        row["centralised"] = clock(centralised(silos, module, 32))
        row["gain"] = row["loop"] / row["compile"]
        row["of centralised"] = row["compile"] / row["centralised"]
        rows.append(row)
        show(row)
    return rows


def stem() -> list[dict[str, Any]]:
    """The local step of ``benchmarks.cifar``: fifteen times the work of the usual stem, batch 50, crops and flips."""
    rows = []
    silos, module = images(10, 200, 3, 32), fc.models.build("resnet18", "cifar10", stem="small")
    h = SparseGroupLasso(1e-4, 1e-4, "rows").on(("*conv1.weight", "*conv2.weight"))
    for precision in ("full", "bf16"):
        problem = fc.Problem(silos, model=module, regularizer=h, precision=precision, augment=Chain((Crop(4), Flip())))
        row: dict[str, Any] = {"what": f"resnet18, 3x3 stem, 10 clients, batch 50, {precision}"}
        for mode in ("record", "compile"):
            row[mode], row[f"{mode} start s"] = ours(problem, FedNMap(TAU, STEP, gamma=GAMMA), 50, mode)
        row["centralised"] = clock(centralised(silos, module, 50))
        rows.append(row)
        show(row)
    return rows


class Sequences(nn.Module):
    """Words, two recurrent or attention layers, a class."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.inner: nn.Module = (
            nn.GRU(64, 64, num_layers=2, batch_first=True)
            if kind == "GRU"
            else nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of the classes."""
        found = self.inner(self.embedding(x))
        return self.head((found[0] if isinstance(found, tuple) else found).mean(1))


class Patches(nn.Module):
    """A small vision transformer for images of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.place = nn.Conv2d(3, 64, 4, stride=4), nn.Parameter(torch.randn(64, 64) / 10)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.inner = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of the classes."""
        return self.head(self.inner(self.cut(x).flatten(2).mT + self.place).mean(1))


def sequences() -> list[dict[str, Any]]:
    """Recurrent and attention layers: full local steps of FedNMap."""
    rows = []
    rng = np.random.default_rng(0)
    words = fc.Silos.from_arrays([(rng.integers(0, 1000, (200, 32)), rng.integers(0, 10, 200)) for _ in range(20)])
    for name, module, silos in (
        ("GRU", Sequences("GRU"), words),
        ("Transformer", Sequences("Transformer"), words),
        ("ViT", Patches(), images(20, 200, 3, 32)),
    ):
        problem = fc.Problem(silos, model=module, regularizer=H)
        row: dict[str, Any] = {"what": f"{name}, 20 clients, batch 16", "loop": clock(Loop(silos, module, 16).step)}
        row["record"], row["record start s"] = ours(problem, FedNMap(TAU, STEP, gamma=GAMMA), 16, "record")
        row["gain"] = row["loop"] / row["record"]
        rows.append(row)
        show(row)
    return rows


def prox() -> list[dict[str, Any]]:
    rows = []
    v = torch.randn(44_700_000, device="cuda")
    out = torch.empty_like(v)
    copying = min(clock(lambda: out.copy_(v), calls=50), clock(recorded(lambda: out.copy_(v), 10), calls=5) / 10)
    for h in (L1(0.1), ElasticNet(0.1, 0.1), MCP(0.1, 3.0), SCAD(0.1)):
        compiled = CompiledProx(h)
        torch.testing.assert_close(compiled.prox(v, 0.5), h.prox(v, 0.5), rtol=1e-6, atol=1e-6)
        row = {
            "what": f"prox of {type(h).__name__}, 44.7 M floats",
            "eager": clock(lambda h=h: h.prox(v, 0.5), calls=50),
            "compiled": clock(recorded(lambda c=compiled: c.prox(v, 0.5), 10), calls=5) / 10,
        }
        row |= {"copy": copying, "share of copy bandwidth": copying / row["compiled"]}
        rows.append(row)
        show(row)
    return rows


def table() -> list[dict[str, Any]]:
    """FedCanon's Table VI: 200 rounds, K = 80, 10 clients, batch 64; the preparation (compilation) stands apart."""
    rows = []
    silos = images(10, 6000, 1, 28)
    for method, h in (
        (FedMid(80, STEP), H), (FedDA(80, STEP), L1(5e-4)), (Zhang(80, STEP), H), (FedCanon(80, STEP, 80 * STEP), H),
    ):  # fmt: skip
        problem = fc.Problem(silos, model=fc.models.build("cnn", "mnist"), regularizer=h)
        began = time.perf_counter()
        sim = Simulator(problem, method, batches=Batches(0, 64), dtype=torch.float32, device="cuda", mode="compile")
        sim.step()
        torch.cuda.synchronize()
        ready = time.perf_counter()
        while sim.round < 200:
            sim.step()
            if sim.round % 50 == 0:
                sim.measure(0.1, 0.0)
        torch.cuda.synchronize()
        done = time.perf_counter()
        row = {"what": f"{type(method).__name__}, K = 80, T = 200", "seconds": done - ready, "before": ready - began}
        row["proxes"] = sim.counter.proxes
        rows.append(row)
        show(row)
    return rows


def show(row: dict[str, Any]) -> None:
    cells = [f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "what"]
    print(f"[{time.perf_counter() - BEGAN:.0f} s] {row['what']}: " + ", ".join(cells), flush=True)


PARTS = {"steps": steps, "models": models, "stem": stem, "sequences": sequences, "prox": prox, "table": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=",".join(PARTS), help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA GPU")
    warnings.simplefilter("default", EagerWarning)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    found = {}
    for part in arguments.part.split(","):
        found[part] = PARTS[part]()
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
