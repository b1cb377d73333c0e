"""``python -m benchmarks all|NAME... [--quick] [--device cpu|cuda] [--json FILE] [--chart FILE]``.

Each workload is run by ours, by a plain per-client PyTorch loop, by the installed peers (Flower's simulation,
pfl-research and fluke: ``make bench-peers``) and as centralised steps on the same samples, the floor. All take the same
minibatches and must arrive at the same objective, or the row says so and the exit status is 1. Seconds are medians over
rounds after a warm-up; the time until the first round (imports, actors, compilation) stands apart. The others have the
better of one thread and all of them, ours the number it chooses. Compare ratios of one run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks import prox, table6
from benchmarks.workloads import WORKLOADS, Timing, Workload, central, export, loop, ours
from fedcomposite.data import DataError

HERE = Path(__file__).parent
SAME = {"loop": 1e-5}  # relative difference of the objective that is still the same work; 1e-3 for the peers
TF32 = 5e-3  # the same for everyone on a GPU, where convolutions round to ten bits
QUICK_ROUNDS = 3
LIMIT = 150  # seconds that a peer may take


@dataclass
class Row:
    """One contestant on one workload."""

    workload: str
    name: str
    seconds: float | None = None
    ratio: float | None = None  # to ours
    startup: float | None = None
    objective: float | None = None
    difference: float | None = None  # of the objective, relative to ours
    note: str = ""
    same: float = 1e-3  # how far apart the objectives of the same work may be

    @property
    def differs(self) -> bool:
        """Whether it did not do the same work."""
        return self.difference is not None and not self.difference <= self.same


class NotRunError(Exception):
    """A peer that gave no result, and why."""


def peer(name: str, work: Workload, problem: object, device: str, rounds: int) -> Timing:
    """Run a peer's adapter in its own environment."""
    python = HERE / ".peers" / name / "bin" / "python"
    if not python.exists():
        raise NotRunError("not installed (make bench-peers)")
    with tempfile.TemporaryDirectory() as folder:
        export(work, problem, device, rounds, Path(folder))  # type: ignore[arg-type]
        threads = os.cpu_count() or 1
        command = [str(python), str(HERE / "peers" / f"run_{name}.py"), folder, str(time.time()), str(threads)]
        hushed = {"PYTHONPATH": str(HERE / "peers"), "PYTHONWARNINGS": "ignore"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=os.environ | hushed, capture_output=True, text=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            raise NotRunError(f"took more than {LIMIT} s") from None
        if done.returncode or not (Path(folder) / "outcome.json").exists():
            last = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-1:]
            raise NotRunError(f"failed: {' '.join(last)[:200]}")
        outcome = json.loads((Path(folder) / "outcome.json").read_text())
        solution = torch.from_numpy(np.load(Path(folder) / "solution.npy")).to(work.dtype)
    return Timing(
        statistics.median(outcome["rounds"][2:]), solution, outcome["startup"], {"version": outcome["version"]}
    )


def compare(name: str, device: str, quick: bool, peers: bool = True) -> list[Row]:
    """All contestants on one workload."""
    work = WORKLOADS[name]
    if work.gpu and device != "cuda":
        return [Row(name, "ours", note="skipped: it takes a GPU (--device cuda)")]
    try:
        problem = work.problem(quick)
    except DataError as error:
        return [Row(name, "ours", note=f"skipped: {str(error).splitlines()[0]}")]
    rounds = QUICK_ROUNDS if quick else work.rounds
    first = ours(work, problem, device, rounds)
    assert first.solution is not None
    floor = central(work, problem, device, rounds)  # next to ours in time, since a machine's speed drifts
    reference = problem.objective(first.solution.cpu())
    rows = [Row(name, "ours", first.seconds, 1.0, first.startup, reference)]

    def add(contestant: str, found: Timing) -> None:
        row = Row(name, contestant, found.seconds, found.seconds / first.seconds, found.startup or None)
        row.same = TF32 if device == "cuda" else SAME.get(contestant, row.same)
        if found.solution is not None:
            row.objective = problem.objective(found.solution.cpu())
            row.difference = abs(row.objective - reference) / abs(reference)
        row.note = found.notes.get("version", "")
        rows.append(row)

    add("loop", loop(work, problem, device, rounds))
    for other in work.peers if peers else ():
        try:
            add(other, peer(other, work, problem, device, rounds))
        except NotRunError as error:
            rows.append(Row(name, other, note=str(error)))
    add("centralised", floor)
    if work.skipped_peers:
        rows.append(Row(name, "peers", note=f"left out: {work.skipped_peers}"))
    return rows


def show(rows: list[Row]) -> None:
    """Print one workload's part of the table."""
    print(f"\n{rows[0].workload}: {WORKLOADS[rows[0].workload].title}")
    print(f"  {'':<12}{'s/round':>10}{'/ours':>9}{'start s':>9}{'objective':>13}{'differs by':>12}")
    for r in rows:
        cells = (
            _cell(r.seconds, "{:.4f}", 10) + _cell(r.ratio, "{:.2f}x", 9) + _cell(r.startup, "{:.1f}", 9)
            + _cell(r.objective, "{:.6f}", 13) + _cell(r.difference, "{:.0e}", 12)
        )  # fmt: skip
        flag = "  <- NOT THE SAME WORK" if r.differs else ""
        print(f"  {r.name:<12}{cells}  {r.note}{flag}".rstrip())


def _cell(value: float | None, form: str, width: int) -> str:
    return f"{'' if value is None else form.format(value):>{width}}"


def chart(rows: list[Row], path: Path) -> None:
    """Time per round relative to ours, on a logarithmic axis; shorter is faster."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [r for r in rows if r.ratio is not None]
    names = list(dict.fromkeys(r.workload for r in timed))
    kinds = list(dict.fromkeys(r.name for r in timed))
    colors = dict(zip(kinds, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#888888"), strict=False))
    figure = Figure(figsize=(8, 0.6 + 0.24 * (len(timed) + len(names))), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    at, ticks = 0.0, []
    for name in names:
        here = [r for r in timed if r.workload == name]
        ticks.append(at + (len(here) - 1) / 2)
        for r in here:
            assert r.ratio is not None
            axes.barh(at, r.ratio, color=colors[r.name], label=r.name if r.name in colors else None)
            axes.annotate(f"{r.ratio:.3g}x", (r.ratio, at), (3, 0), textcoords="offset points", va="center", fontsize=7)
            at += 1
        at += 1
    seen = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(seen.values(), seen.keys(), fontsize=8, loc="lower right")
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_yticks(ticks, names)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time per round, relative to fedcomposite")
    figure.savefig(path)


def machine(device: str) -> str:
    """What the figures were measured on."""
    chip = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{time.strftime('%Y-%m-%d')}, {chip}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def main(argv: list[str] | None = None) -> int:
    known = [*WORKLOADS, "table6", "prox"]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="NAME", choices=["all", *known], help=f"all, {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="few rounds and samples: does it run, not how fast")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--no-peers", action="store_true", help="leave other frameworks out")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--chart", type=Path, help="also draw the ratios here")
    given = parser.parse_args(argv)
    names = known if "all" in given.names else given.names
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but this torch sees no GPU")
    began = time.perf_counter()
    print(machine(given.device))
    rows: list[Row] = []
    result: dict[str, object] = {"machine": machine(given.device), "quick": given.quick}
    for name in names:
        if name in WORKLOADS:
            found = compare(name, given.device, given.quick, peers=not given.no_peers)
            show(found)
            rows += found
        elif name == "prox" and given.device == "cpu":
            result["prox"] = prox.measure(given.quick)
            prox.show(result["prox"])
        elif name == "table6":
            try:
                result["table6"] = table6.measure(given.device, given.quick)
                table6.show(result["table6"])
            except DataError as error:
                print(f"\ntable6: skipped: {str(error).splitlines()[0]}")
        sys.stdout.flush()
    result["workloads"] = [asdict(r) for r in rows]
    print(f"\n{time.perf_counter() - began:.0f} s")
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    if given.chart and any(r.ratio is not None for r in rows):
        chart(rows, given.chart)
    wrong = [
        f"{r.workload}/{r.name}" for r in rows if r.differs or (r.objective is not None and math.isnan(r.objective))
    ]
    if wrong:
        print(f"not the same work: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
