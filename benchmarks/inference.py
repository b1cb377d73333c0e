"""What zeros are worth at inference: dense, pruned, CSR, 2:4 and ONNX, in one run, as ratios.

    python -m benchmarks.inference            # on the CPU, and on a GPU where there is one
    python -m benchmarks.inference --part gpu # there alone
    python -m benchmarks.inference --quick    # small: does it run, not how fast

Zeros are made by hand, since speed depends on where they are and not on how they came about: whole filters and neurons
with the smallest norms (pruned), single weights (CSR), two of every four weights (2:4). Every variant is compared with
the dense network of the same zeros before it is timed; the least of several repetitions counts, taken in turns. On a
GPU every variant is also timed as one recorded call (a CUDA graph), without the host's time for its many kernels.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

import fedcomposite as fc
from fedcomposite.exporting import prune, sparse_layers
from fedcomposite.exporting.onnx import PACKAGES, write_onnx

Row = dict[str, Any]

EIGHT_BITS = 0.25
"""What graphs in eight bits may differ by, of the largest output; others by rounding."""

LEFT = (62, 62, 118, 113, 97, 58, 11, 1)
"""Filters that ``benchmarks.cifar`` leaves alive in the first convolutions of ResNet-18's eight blocks."""


def without_units(module: nn.Module, share: float) -> nn.Module:
    """Set the filters and neurons with the smallest norms to zero, but no outputs."""
    module = copy.deepcopy(module).eval()
    layers = [m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        for layer in layers[:-1]:
            norms = layer.weight.flatten(1).norm(dim=1)
            dead = norms.argsort()[: int(share * len(norms))]
            layer.weight[dead] = 0
            if layer.bias is not None:
                layer.bias[dead] = 0
    return module


def as_trained() -> nn.Module:
    """ResNet-18 with the 3x3 stem, its first convolutions as ``benchmarks.cifar`` leaves them."""
    module = fc.models.MODELS["resnet18"]((3, 32, 32), 10, stem="small").eval()
    inner = [m for name, m in module.named_modules() if name.startswith("layer") and name.endswith(".bn1")]
    with torch.no_grad():
        for layer, left in zip(inner, LEFT, strict=True):
            layer.weight[left:] = 0
    return module


def in_units(share: float, name: str) -> nn.Module:
    """A network (ResNet-18 with the 3x3 stem), so much of it zero in whole filters and all that goes with them."""
    options = {"stem": "small"} if name == "resnet18" else {}
    module = fc.models.MODELS[name]((3, 32, 32), 10, **options).train()
    with torch.no_grad():
        for _ in range(3):  # statistics that are those of some data
            module(torch.randn(16, 3, 32, 32))
    silos = fc.Silos.from_arrays([(torch.randn(4, 3, 32, 32), torch.arange(4) % 10)])
    problem = fc.Problem(silos, model=module.eval(), evaluation_samples=1).with_zeros(share, "filters")
    return problem.module(problem.regularizer.prox(problem.smooth(torch.float32).start(), 0.0))


def without_weights(module: nn.Module, share: float) -> nn.Module:
    """Set the smallest weights of every linear layer to zero."""
    module = copy.deepcopy(module).eval()
    with torch.no_grad():
        for layer in (m for m in module.modules() if isinstance(m, nn.Linear)):
            sizes = layer.weight.abs().flatten()
            layer.weight[layer.weight.abs() <= sizes.sort().values[int(share * len(sizes)) - 1]] = 0
    return module


def two_of_four(module: nn.Module) -> nn.Module:
    """Set the two smallest of every four consecutive weights to zero."""
    module = copy.deepcopy(module).eval()
    with torch.no_grad():
        for layer in (m for m in module.modules() if isinstance(m, nn.Linear)):
            groups = layer.weight.view(-1, 4)
            groups.scatter_(1, groups.abs().topk(2, dim=1, largest=False).indices, 0.0)
    return module


def milliseconds(works: list[Callable[[], object]], repetitions: int, device: str) -> list[float]:
    """The least time of each, in turns: of the processor, or until the GPU is done."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    best = [float("inf")] * len(works)
    for _ in range(repetitions):
        for i, work in enumerate(works):
            if device == "cuda":
                torch.cuda.synchronize()
            began = clock()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            best[i] = min(best[i], 1e3 * (clock() - began))
    return best


def compared(name: str, x: Tensor, variants: dict[str, Any], tolerance: float, repetitions: int) -> list[Row]:
    """Time functions, the first of which is dense; all those that have the same zeros must give the same."""
    with torch.no_grad():
        wanted = variants["dense"](x)
        for label, work in variants.items():
            difference = float((work(x) - wanted).abs().max() / wanted.abs().max())
            assert difference < (EIGHT_BITS if label.endswith("int8") else tolerance), (
                f"{name}, {label}: differs by {difference:.1e}"
            )
        times = milliseconds([lambda w=w: w(x) for w in variants.values()], repetitions, x.device.type)
    rows = zip(variants, times, strict=True)
    return [
        {"network": name, "batch": len(x), "variant": label, "ms": ms, "dense / this": times[0] / ms}
        for label, ms in rows
    ]


def recorded(work: Callable[[], Any], calls: int = 1) -> Callable[..., Any]:
    """So many calls as one CUDA graph, which gives the last one's result; what it is given later is not looked at."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):  # libraries choose their kernels and allocate here, not while recording
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(calls):
            out = work()

    def replay(*_: Tensor) -> Any:
        graph.replay()
        return out

    return replay


def both(variants: dict[str, nn.Module], x: Tensor) -> dict[str, Any]:
    """Every module as it is, and recorded."""
    return {**variants, **{f"{label}, recorded": recorded(partial(module, x)) for label, module in variants.items()}}


def onnx_session(module: nn.Module, x: Tensor, folder: Path, int8: bool = False) -> Callable[[Tensor], Tensor]:
    """The module by onnxruntime, on one thread as the others are."""
    path = folder / f"{id(module)}-{int8}.onnx"
    write_onnx(module, x, path, x if int8 else None)
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda inputs: torch.from_numpy(session.run(None, {name: inputs.numpy()})[0])


def on_the_cpu(quick: bool) -> list[Row]:
    """Units of a ResNet and an MLP, single weights of the MLP."""
    repetitions, rows = (1, []) if quick else (30, [])
    shape, width = ((64,), 32) if quick else ((784,), 1024)
    mlp = fc.models.MODELS["mlp"](shape, 10, hidden=(width, width))
    images = "zhang-cnn" if quick else "resnet18"
    cnn = fc.models.MODELS[images]((3, 32, 32), 10)
    runtime = all(importlib.util.find_spec(p) for p in PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        for name, module, sample in (("mlp", mlp, shape), (images, cnn, (3, 32, 32))):
            thin = without_units(module, 0.5)
            small = prune(thin, torch.randn(4, *sample)).module
            sessions = (
                [onnx_session(m, torch.randn(4, *sample), Path(folder)) for m in (thin, small)] if runtime else []
            )
            for batch in (1, 32):
                x = torch.randn(batch, *sample)
                named = dict(zip(("onnxruntime", "pruned, onnxruntime"), sessions, strict=False))
                variants = {"dense": thin, "pruned": small, **named}
                rows += compared(f"{name}, half of the units", x, variants, 1e-3, repetitions)
        thin = as_trained()
        small = prune(thin, torch.randn(4, 3, 32, 32)).module
        session = (
            {"pruned, onnxruntime": onnx_session(small, torch.randn(4, 3, 32, 32), Path(folder))} if runtime else {}
        )
        for batch in (1,) if quick else (1, 32):
            x = torch.randn(batch, 3, 32, 32)
            variants = {"dense": thin, "pruned": small, **session}
            rows += compared("resnet18 as benchmarks.cifar leaves it", x, variants, 1e-3, repetitions)
        for share in (0.75, 0.85):
            thin = in_units(share, images)
            small, x = prune(thin, torch.randn(4, 3, 32, 32), multiple=8).module, torch.randn(32, 3, 32, 32)
            variants = {"dense": thin, "pruned": small}
            if runtime:
                variants |= {"onnxruntime": onnx_session(thin, x, Path(folder)),
                             "pruned, onnxruntime": onnx_session(small, x, Path(folder)),
                             "onnxruntime, int8": onnx_session(thin, x, Path(folder), int8=True),
                             "pruned, onnxruntime, int8": onnx_session(small, x, Path(folder), int8=True)}  # fmt: skip
            for batch in (1, 32):
                x = torch.randn(batch, 3, 32, 32)
                rows += compared(f"{images}, {share:.0%} zeros in whole filters", x, variants, 1e-3, repetitions)
        for share in (0.95, 0.99):
            thin = without_weights(mlp, share)
            made = sparse_layers(thin, density=0.06)
            for batch in (1, 32):
                x = torch.randn(batch, *shape)
                variants = {"dense": thin, "CSR": made.module}
                rows += compared(f"mlp, {share:.0%} zeros", x, variants, 1e-3, repetitions)
    return rows


def on_a_gpu(quick: bool) -> list[Row]:
    """2:4 in half precision, and half of a ResNet's units."""
    width = 256 if quick else 8192
    repetitions = 2 if quick else 30
    mlp = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False)).cuda()
    thin = two_of_four(mlp).requires_grad_(False)
    made = sparse_layers(thin, "2:4")
    assert made.layers == ("0", "2"), made.left
    variants = {"dense": copy.deepcopy(thin).half(), "2:4": made.module}
    rows: list[Row] = []
    for batch in (64, 1024, 8192):
        x = torch.randn(batch, width, device="cuda").half()
        rows += compared(f"mlp of {width}, 2:4, float16", x, both(variants, x), 0.02, repetitions)
    thin = without_units(fc.models.MODELS["resnet18"]((3, 32, 32), 10, stem="small"), 0.55).cuda()
    small = {
        f"pruned, multiples of {m}": prune(thin, torch.randn(4, 3, 32, 32, device="cuda"), multiple=m).module
        for m in (1, 8, 32)
    }
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(16 if quick else 1024, 3, 32, 32, device="cuda", dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        cast = {k: copy.deepcopy(m).to(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                for k, m in {"dense": thin, **small}.items()}  # fmt: skip
        name = f"resnet18, 55 % of the units, {dtype}".replace("torch.", "")
        rows += compared(name, x, both(cast, x), 0.2, repetitions)
    return rows


def measure(quick: bool = False, part: str = "cpu,gpu") -> pd.DataFrame:
    """A row for each network, batch and variant."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = on_the_cpu(quick) if "cpu" in part else []
    finally:
        torch.set_num_threads(threads)
    return pd.DataFrame(rows + (on_a_gpu(quick) if "gpu" in part and torch.cuda.is_available() else []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small: does it run, not how fast")
    parser.add_argument("--part", default="cpu,gpu", choices=("cpu", "gpu", "cpu,gpu"), help="where")
    given = parser.parse_args()
    table = measure(given.quick, given.part)
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"torch {torch.__version__}, one CPU thread, {place}")
    print(table.to_string(index=False, float_format=lambda v: f"{v:.3g}"))


if __name__ == "__main__":
    main()
