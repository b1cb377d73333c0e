"""Claims of the FedCanon paper about its Table I, and the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fedcomposite.papers.base import only
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.verdicts import NOT_JUDGED, Claim, fact, open_claim, row
from fedcomposite.plots import draw_bars
from fedcomposite.regularizers import L1, MCP, SCAD, Regularizer

PENALTIES: dict[str, Regularizer] = {"l1": L1(0.5), "MCP": MCP(0.5, 3.0), "SCAD": SCAD(0.5)}
PAPER = {"MLP": (0.3, 1, 3), "CNN": (4, 8, 19), "ResNet-18": (134, 255, 636), "ResNet-101": (672, 1221, 2537)}


def usual(name: str, v: Tensor, s: float, lam: float = 0.5, theta: float = 3.0, a: float = 3.7) -> Tensor:
    """The prox as formulas of whole vectors."""
    size = v.abs()
    soft = torch.sign(v) * torch.clamp(size - s * lam, min=0)
    if name == "l1":
        return soft
    if name == "MCP":
        return torch.where(size <= theta * lam, soft / (1 - s / theta), v)
    middle = ((a - 1) * v - torch.sign(v) * s * a * lam) / (a - 1 - s)
    return torch.where(size <= lam * (1 + s), soft, torch.where(size <= a * lam, middle, v))


def measure(study: Study) -> pd.DataFrame:
    """Time one after another, whatever the number of jobs."""
    sizes = {k: v for k, v in study.settings["sizes"].items() if v}
    common = {"repeats": study.settings["repeats"], "step": study.settings["step"], "device": study.device}
    cells = [{"model": m, "size": d, "penalty": p, **common} for m, d in sizes.items() for p in PENALTIES]
    return study.each(clock, cells, alone=True)


def clock(cell: dict[str, Any]) -> pd.DataFrame:
    """Milliseconds of the three contestants."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(cell["size"], generator=generator).to(cell["device"])
    out, h, name, s = torch.empty_like(v), PENALTIES[cell["penalty"]], cell["penalty"], cell["step"]
    torch.testing.assert_close(h.prox(v, s), usual(name, v, s), rtol=1e-5, atol=1e-6)  # the same work
    turns: dict[str, Callable[[], object]] = {
        "usual formula": lambda: usual(name, v, s),
        "ours": lambda: h.prox(v, s, out),
        "copy": lambda: out.copy_(v),
    }
    times: dict[str, list[float]] = {key: [] for key in turns}
    for _ in range(cell["repeats"] + 1):
        for key, work in turns.items():
            began = time.perf_counter()
            work()
            if v.is_cuda:
                torch.cuda.synchronize()
            times[key].append(1e3 * (time.perf_counter() - began))
    return pd.DataFrame({"contestant": list(times), "milliseconds": [statistics.median(t[1:]) for t in times.values()]})


def claims(data: pd.DataFrame) -> list[Claim]:
    """The table's order and its growth, and what a better implementation leaves of it."""
    found = []

    def ms(model: str, penalty: str, contestant: str) -> float:
        return float(only(data, model=model, penalty=penalty, contestant=contestant)["milliseconds"].iloc[0])

    for model, numbers in PAPER.items():
        says = f"{model}: one prox of MCP takes longer than one of l1, and one of SCAD longer still"
        if model not in set(data["model"]):
            found.append(open_claim(says, note="not run", verdict=NOT_JUDGED))
            continue
        plain = [ms(model, p, "usual formula") for p in PENALTIES]
        rows = [
            row(f"ms, {p}, usual formula", t, f"{n:g}", digits=3)
            for p, t, n in zip(PENALTIES, plain, numbers, strict=True)
        ]
        rows += [row(f"ms, {p}, ours", ms(model, p, "ours"), digits=3) for p in PENALTIES]
        copy = row("ms, a copy of the vector", ms(model, "l1", "copy"))
        found.append(fact(says, plain[0] < plain[1] < plain[2], *rows, copy))
    large = max((m for m in PAPER if m in set(data["model"])), key=list(PAPER).index)
    ratio = {c: ms(large, "SCAD", c) / ms(large, "l1", c) for c in ("usual formula", "ours")}
    copies = ms(large, "SCAD", "ours") / ms(large, "SCAD", "copy")
    says = "a prox as complicated as SCAD's costs several times that of l1, "
    printed = f"{PAPER[large][2] / PAPER[large][0]:.1f}"
    return [
        *found,
        fact(
            says + "written with whole-vector operations", ratio["usual formula"] > 3,
            row(f"{large}: time of SCAD / of l1, usual formula", ratio["usual formula"], printed),
        ),
        fact(
            says + "however it is written", ratio["ours"] > 3,
            row(f"{large}: time of SCAD / of l1, ours", ratio["ours"], printed),
            row(f"{large}: time of SCAD, ours / of a copy of the vector", copies),
        ),
    ]  # fmt: skip


def draw(data: pd.DataFrame, path: Path) -> None:
    """Bars by size, a panel for each penalty."""
    panels = {
        str(p): {
            str(m): {str(r["contestant"]): (float(r["milliseconds"]), 0.0) for _, r in rows.iterrows()}
            for m, rows in part.groupby("model", sort=False)
        }
        for p, part in data.groupby("penalty", sort=False)
    }
    draw_bars(panels, path, y="ms for one prox", caption=f"medians; {data['device'].iloc[0]}")
