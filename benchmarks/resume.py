"""Cross-validations that are killed (SIGKILL) at random points and resumed: do they end with the same bits?

python -m benchmarks.resume --points 10               # files at hand, and four hospitals over TLS
python -m benchmarks.resume --points 10 --at hand
"""

from __future__ import annotations

import argparse
import contextlib
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
from fedcomposite.federation.folders import FederationFolder

_LIMITS = "parameter_share = 1.0\nmax_margin = 1e6\nmin_samples = 10\nmin_count = 5\nforeign_reading = true\n"


def main() -> None:
    """Print a row per kill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--at", choices=["hand", "sites", "both"], default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lambdas", type=int, default=20)
    chosen = parser.parse_args()
    options = ["--folds", "3", "--count", str(chosen.lambdas)]
    tables = []
    with tempfile.TemporaryDirectory() as place:
        files = fc.data.messy_consortium(Path(place) / "hospitals")
        config = Path(place) / "hospitals" / "experiment.toml"
        if chosen.at != "sites":
            found = study(["cv"], [str(config), *options], Path(place) / "hand", chosen.points, chosen.seed)
            tables.append(found.assign(at="hand"))
        if chosen.at != "hand":
            with federation(Path(place), files) as folder:
                command = ["federation", "cv", str(folder)]
                found = study(command, [str(config), *options], Path(place) / "sites", chosen.points, chosen.seed)
                tables.append(found.assign(at="sites"))
    table = pd.concat(tables, ignore_index=True)
    print(table.to_string(index=False))
    print(f"{int(table['same'].sum())} of {len(table)} killed analyses ended with the same bits")
    raise SystemExit(0 if bool(table["same"].all()) else 1)


def study(command: Sequence[str], given: Sequence[str], folder: Path, points: int, seed: int) -> pd.DataFrame:
    """Kill an analysis at random points, a new one for each, and resume it; ``command`` is without the experiment."""
    whole, largest = folder / "whole", 0
    running = _start([*command, *given, "--out", str(whole)])
    while running.poll() is None:
        largest = max(largest, _size(whole))
        time.sleep(0.0005)
    if running.returncode:
        raise RuntimeError(f"{' '.join(command)}: ended with {running.returncode}")
    expected, source, rows = left(whole), random.Random(seed), []
    for k in range(points):
        out, at = folder / f"{k}", int(source.uniform(1, largest))
        running = _start([*command, *given, "--out", str(out)])
        while running.poll() is None and _size(out) < at:
            time.sleep(0.0005)
        os.kill(running.pid, signal.SIGKILL)
        killed = running.wait() == -signal.SIGKILL
        size = _size(out)
        again = _start([*command, "--resume", str(out)]).wait()
        rows.append({"share": size / largest, "killed": killed, "same": again == 0 and left(out) == expected})
    return pd.DataFrame(rows)


def left(folder: Path) -> tuple[bytes, str]:
    """The model's file, and everything that was found apart from the time it took."""
    found = json.loads((folder / "analysis.json").read_text())
    found.pop("seconds")
    return (folder / "model.safetensors").read_bytes(), json.dumps(found)


def _size(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "answers.log").stat().st_size
    return 0


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.Popen([sys.executable, "-m", "fedcomposite", *words], stdout=quiet, env=environment)


@contextlib.contextmanager
def federation(folder: Path, files: dict[str, Path]) -> Iterator[Path]:
    """A coordinator's service and a site for each file, as processes of their own, over TLS."""
    made = FederationFolder.create(folder / "fed", "127.0.0.1", 0, list(files))
    with contextlib.ExitStack() as stack:
        parties = [("serve", "serving", ["serve", str(made.path)])]
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
