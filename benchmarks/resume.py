"""Cross-validations that are killed (SIGKILL) at random points and resumed: do they end with the same bits?

python -m benchmarks.resume --points 10               # files at hand, then four hospitals over each engine
python -m benchmarks.resume --points 10 --at hand
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

import fedcomposite as fc
from fedcomposite.federation.demo import party, wait_for
from fedcomposite.federation.folders import EngineName, FederationFolder

AT = ["hand", "nvflare", "local"]
_LIMITS = "parameter_share = 1.0\nmax_margin = 1e6\nmin_samples = 10\nmin_count = 5\nforeign_reading = true\n"


def main() -> None:
    """Print a row per kill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--at", nargs="+", choices=AT, default=AT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lambdas", type=int, default=20)
    chosen = parser.parse_args()
    options = ["--folds", "3", "--count", str(chosen.lambdas)]
    tables = []
    for at in chosen.at:
        with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
            files = fc.data.messy_consortium(Path(place) / "hospitals")
            given = [str(Path(place) / "hospitals" / "experiment.toml"), *options]
            command = ["cv"]
            if at != "hand":
                command = ["federation", "cv", str(stack.enter_context(federation(Path(place), files, at)))]
            found = study(command, given, Path(place) / "runs", chosen.points, chosen.seed)
            tables.append(found.assign(at=at))
    table = pd.concat(tables, ignore_index=True)
    print(table.to_string(index=False))
    print(f"{int(table['same'].sum())} of {len(table)} killed analyses ended with the same bits")
    raise SystemExit(0 if bool(table["same"].all()) else 1)


def study(command: Sequence[str], given: Sequence[str], folder: Path, points: int, seed: int) -> pd.DataFrame:
    """Kill an analysis at random points, a new one for each, and resume it; ``command`` is without the experiment."""
    whole, sizes = folder / "whole", [0]
    running = _start([*command, *given, "--out", str(whole)])
    while running.poll() is None:
        if (size := _size(whole)) > sizes[-1]:
            sizes.append(size)
        time.sleep(0.0005)
    if running.returncode:
        raise RuntimeError(f"{' '.join(command)}: ended with {running.returncode}")
    expected, source, rows = left(whole), random.Random(seed), []
    for k in itertools.takewhile(lambda _: len(rows) < points, itertools.count()):
        out, at = folder / f"{k}", source.choice(sizes[1:])  # exchanges differ in size: one of them, each as likely
        running = _start([*command, *given, "--out", str(out)])
        while running.poll() is None and _size(out) < at:
            time.sleep(0.0005)
        running.kill()
        if running.wait() != -signal.SIGKILL:
            continue  # it had ended by itself: the log goes with the last answer
        size = _size(out)
        ended = _start([*command, "--resume", str(out)]).wait()
        found = left(out) if ended == 0 else {}
        apart = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
        rows.append({"share": size / sizes[-1], "ended": ended, "same": not apart, "differs": ", ".join(apart)})
        print(f"{len(rows)}: killed at {size} of {sizes[-1]} bytes, {apart or 'same'}", flush=True)
    return pd.DataFrame(rows)


def left(folder: Path) -> dict[str, object]:
    """The model's file, and everything that was found apart from the time it took and the bytes that travelled.

    A job after another one carries the heads of the sites' logs to them, which the first of a federation has not, and
    a site's entries are numbered: from 100 on a report is a byte longer.
    """
    found = json.loads((folder / "analysis.json").read_text())
    found.pop("seconds")
    for way in ("bytes_up", "bytes_down"):
        found.get("communication", {}).pop(way, None)
    return {key: json.dumps(value) for key, value in found.items()} | {
        "model": (folder / "model.safetensors").read_bytes()
    }


def _size(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "answers.log").stat().st_size
    return 0


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.Popen([sys.executable, "-m", "fedcomposite", *words], stdout=quiet, env=environment)


@contextlib.contextmanager
def federation(folder: Path, files: dict[str, Path], engine: EngineName) -> Iterator[Path]:
    """An engine's server, where it has one, and a site for each file, as processes of their own."""
    made = FederationFolder.create(folder / "fed", "127.0.0.1", 0, list(files), engine=engine)
    with contextlib.ExitStack() as stack:
        parties = [] if engine == "local" else [("serve", "serving", ["serve", str(made.path)])]
        for name, path in files.items():
            place = made.path / "sites" / name
            text = (place / "site.toml").read_text()
            text = text.replace("[data]", f'[data]\nfile = "{path}"\nrecipe = true', 1)
            (place / "site.toml").write_text(text.replace("[limits]", f"[limits]\n{_LIMITS}", 1))
            parties.append((name, "waiting for work", ["join", str(place)]))
        for name, sign, command in parties:
            log = folder / f"{name}.log"
            wait_for(log, sign, stack.enter_context(party(log, *command)))
        yield made.path


if __name__ == "__main__":
    main()
