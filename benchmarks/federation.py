"""Time per round of a real federation on this machine: an engine's server and clients, one process per party or more.

* warm: four sites that run ``join``, the Heart Disease hospitals, FedNMap;
* many: as many sites as ``--sites`` says, each with a part of the same patients;
* large: two sites with a ResNet-18 in float32 (45 MB a vector) and FedDR (two vectors of state at each site);
* state: the same with a perceptron of 13 million weights (52 MB a vector, over 100 MB of state at each site);
* newton: the four hospitals with ProxNewton to a stationarity of 1e-9; also prints rounds, their seconds, and the
  largest difference from the simulator's model;
* secure: four sites, a linear model of a million coefficients in float64, three times: plain, with ``--secure``, and
  with ``--secure --policy skip`` (shares of the masks' seeds in every round); prints the ratios to the plain round.

Every round is evaluated. The time of a round is the median difference between the history's clock readings; ``compute``
is the part that the slowest site spent computing, by its own log, and the rest is overhead. ``first`` are the seconds
from the start of ``run`` to its first record. ``cpu`` is the processor time per round of ``serve`` and what it started,
``idle`` their share of a core while nothing happens, ``service_mb`` the largest memory of any of them, and ``files_mb``
what lies in its folder in the end. ``cpu_ready`` is the processor time of all parties until they wait for work,
``cpu_first`` that from then to the first record, ``cpu_all`` that per round, and what follows are its parts, by what
the processes are: they say the same on a busy machine as on a quiet one.

Run ``python -m benchmarks.federation [--cases warm,many,large,state,newton,secure] [--sites 20] [--engine nvflare]``.
With ``--light`` the sites of ``many`` are one process with a FLARE client each: fifty of them fit on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import tomli_w

from fedcomposite.experiments.store import RunFolder
from fedcomposite.federation import demo
from fedcomposite.federation.folders import EngineName, FederationFolder

SECURE = {"secure": ["--secure"], "skip": ["--secure", "--policy", "skip"], "plain": []}
ROUNDS = {"warm": 30, "many": 40, "large": 6, "state": 6, "newton": 40, **dict.fromkeys(SECURE, 8)}
ROLES = {
    "watchers": "engines.watched",
    "server": "server_train",
    "server's job": "runner_process",
    "clients": "client_train",
    "clients' jobs": "worker_process",
    "sites": "federation join",
    "serve": "federation serve",
    "run": "federation run",
}
"""What the processes of a federation are, by a word of their commands."""
IDLE = 20.0  # seconds for which an idle service is watched
MODELS = {"large": {"name": "resnet18"}, "state": {"name": "mlp", "options": {"hidden": [4096, 64]}}}


def hospitals(folder: Path, rounds: int) -> tuple[list[str], str, str]:
    """The demo's data and experiment."""
    sites = demo.write_hospitals(folder)
    (folder / "config.toml").write_text(demo.CONFIG.format(rounds=rounds))
    return sites, "csv", "num"


def second_order(folder: Path, rounds: int) -> tuple[list[str], str, str]:
    """The demo's problem, solved by Newton steps."""
    found = hospitals(folder, rounds)
    config = tomllib.loads((folder / "config.toml").read_text())
    config["algorithm"] = {"name": "ProxNewton"}
    config["run"]["tolerance"] = 1e-9
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    return found


def parts(folder: Path, rounds: int, count: int) -> tuple[list[str], str, str]:
    """The demo's patients, dealt to more sites, so often that each has enough for the model."""
    hospitals(folder, rounds)
    everybody = pd.concat([pd.read_csv(p) for p in sorted(folder.glob("*.csv"))])
    everybody = pd.concat([everybody] * math.ceil(40 * count / len(everybody)))
    sites = [f"site{i:02d}" for i in range(count)]
    for i, site in enumerate(sites):
        everybody.iloc[i::count].to_csv(folder / f"{site}.csv", index=False)
    return sites, "csv", "num"


def table() -> dict[int, list[str]]:
    """The system's own table of processes: their fields from the parent on."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()[1:]
    return found


def family(pids: Sequence[int]) -> dict[int, list[str]]:
    """Some processes and those below them."""
    every = table()
    below: dict[int, list[int]] = {}
    for pid, fields in every.items():
        below.setdefault(int(fields[0]), []).append(pid)
    found, left = dict[int, list[str]](), list(pids)
    while left:
        pid = left.pop()
        left += below.get(pid, [])
        found |= {pid: every[pid]} if pid in every else {}
    return found


def spent(pid: int) -> float:
    """Processor time of a process and those below it so far, with those that have ended."""
    return sum(sum(map(int, fields[10:14])) for fields in family([pid]).values()) / os.sysconf("SC_CLK_TCK")


def by_role(parties: Sequence[int]) -> dict[str, float]:
    """Processor seconds so far of some parties and of what they started, by what it is."""
    found = dict.fromkeys([*ROLES, "other"], 0.0)
    for pid, fields in family(parties).items():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            role = next((role for role, word in ROLES.items() if word in command), "other")
            found[role] += sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK")
    return found


def watch_rounds(
    history: Path, parties: Sequence[int], rounds: int, alive: Callable[[], bool]
) -> tuple[dict[str, float], dict[str, float]]:
    """Processor seconds by role until the first record, and per round between two near the beginning and the end."""
    seen: list[tuple[int, dict[str, float]]] = []
    for wanted in (1, min(4, rounds // 3 + 1), rounds - min(2, rounds // 6)):
        while alive() and (not history.exists() or history.read_bytes().count(b"\n") < wanted):
            time.sleep(0.01)
        seen.append((history.read_bytes().count(b"\n") if history.exists() else 0, by_role(parties)))
    (_, first), (before, then), (after, now) = seen
    return first, {k: (now[k] - then[k]) / max(1, after - before) for k in now if now[k] > then[k]}


def most_memory(pid: int) -> float:
    """Largest resident memory of a process, or of one below it, so far, in MB."""
    found = []
    for one in family([pid]):
        with contextlib.suppress(OSError, TypeError):
            found.append(int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{one}/status").read_text())[1]) / 1e3)
    return max(found)


def images(folder: Path, rounds: int, model: dict[str, object]) -> tuple[list[str], str, str]:
    """Random images for a network."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    sites = ["left", "right"]
    for site in sites:
        X = rng.integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
        np.savez(folder / f"{site}.npz", X=X, label=np.arange(20) % 10)
    config = {
        "problem": {"loss": "cross_entropy"},
        "model": model,
        "regularizer": {"name": "L1", "lam": 1e-5},
        "algorithm": {"name": "FedDR", "eta": 10.0, "alpha": 1.0, "local_steps": 1, "step": 0.01},
        "run": {"rounds": rounds, "batch_size": 4, "dtype": "float32"},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    return sites, "npz", "label"


def long_vectors(folder: Path, rounds: int) -> tuple[list[str], str, str]:
    """Few samples with a million features, at four sites."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    sites = ["north", "south", "east", "west"]
    for site in sites:
        np.savez(folder / f"{site}.npz", X=rng.normal(size=(10, 10**6)) / 1e3, label=np.arange(10) % 2)
    config = {
        "algorithm": {"name": "FedAvg", "local_steps": 2, "step": 0.1},
        "run": {"rounds": rounds, "stationarity_step": 0.1},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    return sites, "npz", "label"


def measure(case: str, folder: Path, count: int, engine: EngineName, light: bool = False) -> dict[str, float]:
    rounds = ROUNDS[case]
    data = folder / "data"
    if case in SECURE:
        sites, kind, target = long_vectors(data, rounds)
    elif case == "newton":
        sites, kind, target = second_order(data, rounds)
    elif case in MODELS:
        sites, kind, target = images(data, rounds, MODELS[case])
    else:
        sites, kind, target = parts(data, rounds, count) if case == "many" else hospitals(data, rounds)
    fed = FederationFolder.create(folder / "fed", "127.0.0.1", 0, sites, engine=engine)
    for site in sites:
        place = fed.path / "sites" / site / "site.toml"
        added = f'[data]\nfile = "{data / f"{site}.{kind}"}"\ntarget = "{target}"\n'
        added += f"classes = {list(range(10))}\n" if case in MODELS else ""
        limits = "networks = true\nmin_batch = 1\nmin_class = 1\nmin_count = 1\nmin_parties = 1\n"
        limits += "parameter_share = 1e6\nchanging_cohorts = true\n" if case in SECURE else ""
        place.write_text(place.read_text().replace("[data]\n", added, 1) + limits)
    with contextlib.ExitStack() as stack:
        began = time.perf_counter()
        server = stack.enter_context(demo.party(folder / "serve.log", "serve", str(fed.path)))
        if light:
            program = str(Path(__file__).with_name("light_sites.py"))
            command = [sys.executable, program, str(fed.path), str(data)]
            joined = [stack.enter_context(demo.process(folder / "sites.log", *command))]
        else:
            words = [(folder / f"{site}.log", "join", str(fed.path / "sites" / site)) for site in sites]
            joined = [stack.enter_context(demo.party(*one)) for one in words]
        demo.wait_for(folder / "serve.log", "serving on", server, 600)
        logs = [folder / "sites.log"] if light else [folder / f"{site}.log" for site in sites]
        for log, process in zip(logs, joined, strict=True):
            demo.wait_for(log, "waiting for work", process, 600, len(sites) if light else 1)
        ready, before = time.perf_counter() - began, spent(server.pid)
        time.sleep(IDLE if case not in SECURE else 1.0)
        idle, before = (spent(server.pid) - before) / IDLE, spent(server.pid)
        command = ["run", str(fed.path), str(data / "config.toml"), "--out", str(folder / "run"), *SECURE.get(case, [])]
        asked, at_ready = time.time(), by_role([server.pid, *(one.pid for one in joined)])
        with demo.party(folder / "run.log", *command) as run:
            parties = [server.pid, run.pid, *(one.pid for one in joined)]
            at_first, each_role = watch_rounds(
                folder / "run" / "history.jsonl", parties, rounds, lambda: run.poll() is None
            )
            if run.wait(900) != 0:
                raise RuntimeError((folder / "run.log").read_text())
        cpu, service = (spent(server.pid) - before) / rounds, most_memory(server.pid)
    history = [json.loads(line) for line in (folder / "run" / "history.jsonl").read_text().splitlines()]
    clock = [record["seconds"] for record in history]
    first = (folder / "run" / "history.jsonl").stat().st_mtime - asked - (clock[-1] - clock[0])
    each = [b - a for a, b in itertools.pairwise(clock)][1:]
    said = [re.findall(r"round (\d+) in ([\d.]+) s", log.read_text()) for log in logs]
    slowest = [max([float(t) for one in said for r, t in one if int(r) == k + 1] or [0.0]) for k in range(rounds)]
    states = [sum(p.stat().st_size for p in (fed.path / "sites" / s / "state").rglob("*.safetensors")) for s in sites]
    own: dict[str, float] = {}
    if case == "newton":
        apart = demo.compare_with_simulation(folder, data / "config.toml", RunFolder(folder / "run"))
        own = {"rounds": history[-1]["round"], "seconds": clock[-1]}
        own |= {"stationarity": history[-1]["stationarity"], "difference": apart}
    return {
        **own,
        "ready": ready,
        "first": first,
        "round": statistics.median(each),
        "worst": max(each),
        "compute": statistics.median(slowest),
        "overhead": statistics.median(each) - statistics.median(slowest),
        "cpu": cpu,
        "idle": idle,
        "service_mb": service,
        "files_mb": sum(p.stat().st_size for p in fed.state.rglob("*") if p.is_file()) / 1e6,
        "state_mb": max(states) / 2e6,  # two states are kept
        "cpu_ready": sum(at_ready.values()),
        **{f"cpu_ready, {role}": seconds for role, seconds in at_ready.items() if seconds},
        "cpu_first": sum(at_first.values()) - sum(at_ready.values()),
        **{f"cpu_first, {k}": v - at_ready.get(k, 0.0) for k, v in at_first.items() if v > at_ready.get(k, 0.0)},
        "cpu_all": sum(each_role.values()),
        **{f"cpu, {role}": seconds for role, seconds in each_role.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="warm,many,large,state")
    parser.add_argument("--sites", type=int, default=20, help="for the case many")
    parser.add_argument("--engine", choices=["nvflare", "flower"], default="nvflare")
    parser.add_argument("--light", action="store_true", help="for the case many: all sites in one process")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    results = {}
    cases = [
        c for case in chosen.cases.split(",") for c in (["plain", "secure", "skip"] if case == "secure" else [case])
    ]
    for case in cases:
        with tempfile.TemporaryDirectory(prefix=f"federation-{case}-") as folder:
            results[case] = measure(case, Path(folder), chosen.sites, chosen.engine, chosen.light)
        shown = "  ".join(f"{k} {v:.2f}" if v > 0.005 or v == 0 else f"{k} {v:.1e}" for k, v in results[case].items())
        print(f"{case:6s} {shown}", flush=True)
    for case in ("secure", "skip"):
        if {"plain", case} <= set(results):
            print(f"{case} / plain: {results[case]['round'] / results['plain']['round']:.2f}")
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
