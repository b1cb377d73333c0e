"""SIGKILLs in the middle of a run over NVIDIA FLARE, over all roles: the same bits and the same records as without.

Four hospitals, FedNMap with minibatches, every round evaluated. In one run, again and again, a process is killed at a
random round: a site's own process, its FLARE client, that client's job, FLARE's server, its job, ``serve``, the
analyst's ``run``, or all of them at once. What a service manager would start again is started again; the run goes on
by itself, or with ``--resume`` where it was killed.

Run ``python -m benchmarks.kills [--kills 30] [--rounds 600] [--seed 0]``: some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.federation import ROLES, family, hospitals
from fedcomposite.federation import demo
from fedcomposite.federation.folders import FederationFolder

LIMITS = "min_class = 1\nmin_count = 1\nreproducible_batches = true\n"
KILLED = ["sites", "clients", "clients' jobs", "server", "server's job", "serve", "run", "everybody"]
PATIENCE = 300.0


class Party:
    """A command of the federation that is started again with the same words."""

    def __init__(self, stack: contextlib.ExitStack, log: Path, *words: str) -> None:
        self._stack, self.log, self.words = stack, log, words
        self.process = self.start()

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start it, or start it again."""
        self.process = self._stack.enter_context(demo.party(self.log, *(words or self.words)))
        return self.process


def rounds_of(run: Path) -> int:
    """The last round that a run has recorded."""
    path = run / "history.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["round"]) if lines else -1


def reach(run: Path, wanted: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a run has recorded a round, or is over."""
    end = time.monotonic() + PATIENCE
    while rounds_of(run) < wanted and process.poll() is None:
        if time.monotonic() > end:
            raise RuntimeError(f"round {wanted} was not reached in {PATIENCE:.0f} s")
        time.sleep(0.05)


def below(parties: list[Party], role: str) -> list[int]:
    """The processes of a role below some parties."""
    found = []
    for pid in family([one.process.pid for one in parties]):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if ROLES[role] in command and "engines.watched" not in command:
                found.append(pid)
    return found


def kill(role: str, parties: dict[str, Party], run: Party, out: Path, chosen: random.Random) -> int:
    """Kill one process of a role, or everybody, and start what nobody else would; how many were killed."""
    every = [*parties.values(), run]
    pids = [pid for name in ROLES if name in KILLED for pid in below(every, name)]
    if role != "everybody":
        pids = [chosen.choice(found)] if (found := below(every, role)) else []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for one in every:
        if one.process.pid in pids:
            one.process.wait()
            one.start(*(["run", one.words[1], "--resume", str(out)] if one is run else []))
    return len(pids)


def disturbed(folder: Path, fed: FederationFolder, rounds: int, kills: int, seed: int) -> dict[str, Any]:
    """A run left alone, and one in which processes are killed; what differs between them."""
    chosen, data, counted = random.Random(seed), folder / "data", dict.fromkeys(KILLED, 0)
    with contextlib.ExitStack() as stack:
        parties = {"serve": Party(stack, folder / "serve.log", "serve", str(fed.path))}
        demo.wait_for(folder / "serve.log", "serving on", parties["serve"].process, PATIENCE)
        for site in fed.sites:
            words = ["join", str(fed.path / "sites" / site), "--data", str(data / f"{site}.csv"), "--target", "num"]
            parties[site] = Party(stack, folder / f"{site}.log", *words)
        for site in fed.sites:
            demo.wait_for(folder / f"{site}.log", "waiting for work", parties[site].process, PATIENCE)
        asked = ["run", str(fed.path), str(data / "config.toml"), "--out"]
        if Party(stack, folder / "whole.log", *asked, str(folder / "whole")).process.wait(900) != 0:
            raise RuntimeError((folder / "whole.log").read_text())
        out = folder / "killed"
        run = Party(stack, folder / "killed.log", *asked, str(out))
        roles = [KILLED[i % len(KILLED)] for i in range(kills)]
        chosen.shuffle(roles)
        step, began = rounds // (kills + 1), time.monotonic()
        for i, role in enumerate(roles):
            reach(out, i * step + chosen.randrange(1, step), run.process)
            time.sleep(chosen.random() * 0.1)  # anywhere in a round
            counted[role] += kill(role, parties, run, out, chosen)
        if run.process.wait(900) != 0:
            raise RuntimeError((folder / "killed.log").read_text())
        seconds = time.monotonic() - began
    models = [(folder / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    histories = [(folder / name / "history.jsonl").read_text().splitlines() for name in ("whole", "killed")]
    records = [[{**json.loads(line), "seconds": 0} for line in lines] for lines in histories]
    return {"killed": counted, "seconds": seconds, "bits": models[0] == models[1], "records": records[0] == records[1]}


def main() -> None:
    """Kill, and say what differs; the exit code is 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="federation-kills-") as name:
        folder = Path(name)
        sites, _, _ = hospitals(folder / "data", given.rounds)
        config = tomllib.loads((folder / "data" / "config.toml").read_text())
        config["run"]["batch_size"] = 20
        (folder / "data" / "config.toml").write_text(tomli_w.dumps(config))
        fed = FederationFolder.create(folder / "fed", "127.0.0.1", 0, sites)
        for path in (fed.path / "sites").glob("*/site.toml"):
            path.write_text(path.read_text() + LIMITS)
        found = disturbed(folder, fed, given.rounds, given.kills, given.seed)
    print(", ".join(f"{role} {count}" for role, count in found["killed"].items()))
    print(f"{given.kills} kills, {given.rounds} rounds in {found['seconds']:.0f} s; same bits: {found['bits']}; "
          f"same records: {found['records']}")  # fmt: skip
    raise SystemExit(0 if found["bits"] and found["records"] else 1)


if __name__ == "__main__":
    main()
