"""Every separable prox on 11.2 million numbers (ResNet-18's weights) against a copy and against the usual formula.

``python -m benchmarks prox``, in float32 and float64, with one thread and with all of them. *Copy* is
``out.copy_(v)``, the least any prox has to move; it has the better of one thread and all of them. *Naive* is the
formula written down with whole-vector operations.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import common
from fedcomposite.regularizers import (
    L0,
    L1,
    MCP,
    SCAD,
    Box,
    ElasticNet,
    L2Squared,
    NonNegative,
    PositivePart,
    Regularizer,
    Zero,
)

SIZE, STEP = 11_200_000, 0.5
PROMISED = 3.0  # times a copy, on a CPU

Naive = Callable[[Tensor], Tensor]

CASES: dict[str, tuple[Regularizer, Naive]] = {
    "Zero": (Zero(), lambda v: v.clone()),
    "L1": (L1(0.5), lambda v: common.soft(v, STEP * 0.5)),
    "L2Squared": (L2Squared(0.5), lambda v: v / (1 + STEP * 0.5)),
    "PositivePart": (PositivePart(0.5), lambda v: torch.where(v > 0, torch.relu(v - STEP * 0.5), v)),
    "ElasticNet": (ElasticNet(0.5, 0.2), lambda v: common.soft(v, STEP * 0.5) / (1 + STEP * 0.2)),
    "MCP": (MCP(0.5, 3.0), lambda v: common.mcp(v, STEP, 0.5, 3.0)),
    "SCAD": (SCAD(0.5), lambda v: common.scad(v, STEP, 0.5, 3.7, 1.0)),
    "L0": (L0(0.1), lambda v: torch.where(v.abs() > (2 * 0.1 * STEP) ** 0.5, v, torch.zeros_like(v))),
    "Box": (Box(-1.0, 1.0), lambda v: torch.minimum(torch.maximum(v, torch.tensor(-1.0)), torch.tensor(1.0))),
    "NonNegative": (NonNegative(), lambda v: torch.where(v > 0, v, torch.zeros_like(v))),
}


def measure(quick: bool = False) -> list[dict[str, Any]]:
    """A row for each number of threads, dtype and prox."""
    threads, size, rows = torch.get_num_threads(), SIZE // 50 if quick else SIZE, []
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        try:
            for dtype in (torch.float32, torch.float64):
                v = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=dtype)
                rows += [_timed(name, v, 3 if quick else 11) for name in CASES]
        finally:
            torch.set_num_threads(threads)
    return rows


def _timed(name: str, v: Tensor, repeats: int) -> dict[str, Any]:
    """Milliseconds, medians; the contestants take turns, so that a busy machine slows all alike."""
    h, naive = CASES[name]
    out, threads = torch.empty_like(v), torch.get_num_threads()

    def copy_alone() -> None:
        torch.set_num_threads(1)
        out.copy_(v)
        torch.set_num_threads(threads)

    torch.testing.assert_close(h.prox(v, STEP), naive(v), rtol=1e-5, atol=1e-6)  # the same work
    turns: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(v),
        "copy, 1 thread": copy_alone,
        "ours": lambda: h.prox(v, STEP, out),
        "naive": lambda: naive(v),
    }
    times: dict[str, list[float]] = {key: [] for key in turns}
    for _ in range(repeats):
        for key, work in turns.items():
            began = time.perf_counter()
            work()
            times[key].append(1e3 * (time.perf_counter() - began))
    found = {key: statistics.median(t[1:]) for key, t in times.items()}
    copy = min(found["copy"], found["copy, 1 thread"])
    return {
        "prox": name, "threads": threads, "dtype": str(v.dtype).removeprefix("torch."),
        "copy": copy, "ours": found["ours"], "naive": found["naive"], "ratio": found["ours"] / copy,
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"\nprox of {SIZE / 1e6:.1f} M numbers, ms; promised: {PROMISED:.0f}x")
    print(
        f"{'prox':<14}{'threads':>8}{'dtype':>9}{'copy':>8}{'ours':>8}{'naive':>9}{'ours/copy':>11}{'naive/ours':>12}"
    )
    for r in rows:
        late = "" if r["ratio"] <= PROMISED else "  <- above"
        print(
            f"{r['prox']:<14}{r['threads']:>8}{r['dtype']:>9}{r['copy']:>8.2f}{r['ours']:>8.2f}{r['naive']:>9.2f}"
            f"{r['ratio']:>10.1f}x{r['naive'] / r['ours']:>11.1f}x{late}"
        )
