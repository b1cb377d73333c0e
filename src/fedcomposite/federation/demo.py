"""A whole federation on one machine: an engine's server and four hospitals as processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from torch import Tensor

from fedcomposite import data, files
from fedcomposite.data.sparse import dense
from fedcomposite.experiments import runner
from fedcomposite.experiments.config import Config
from fedcomposite.experiments.store import RunFolder
from fedcomposite.federation.coordinator.delivery import FederationError

SAME = {False: 1e-12, True: 1e-9}
"""How far a model may be from the simulator's, in plain and in secure sums, whose numbers are rounded to 2^-40."""

CONFIG = """\
# Sparse logistic regression (SCAD) of heart disease over four hospitals.
name = "heart"

[data]
name = "heart_disease"

[problem]
loss = "logistic"
bias = true

[regularizer]
name = "SCAD"
lam = 0.05

[algorithm]
name = "FedNMap"
local_steps = 5
step = 0.3
gamma = 1.0

[run]
rounds = {rounds}
stationarity_step = 1.0
"""


def write_hospitals(folder: Path) -> list[str]:
    """One CSV per hospital, and the experiment; returns the hospitals' names."""
    silos = data.load("heart_disease")
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(silos.names):
        X, y = silos[i]
        frame = pd.DataFrame(dense(X).numpy(), columns=list(silos.feature_names)).assign(num=y.numpy())
        frame.to_csv(folder / f"{name}.csv", index=False)
    return list(silos.names)


def write_limits(sites: Path, secure: bool) -> None:
    """Let the hospitals take part: one has a single patient without the disease, and few with some of the columns.

    A site refuses both by default.
    The data are public, so that nothing is given away. With ``secure`` the hospitals take part in secure sums only.
    """
    lines = "min_class = 1\nmin_count = 1\n" + ('secure = "required"\n' if secure else "")
    for path in sorted(sites.glob("*/site.toml")):
        path.write_text(path.read_text(encoding="utf-8") + lines, encoding="utf-8")


@contextlib.contextmanager
def party(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A party of the federation as a process, its output in a file; it is stopped at the end."""
    with process(log, sys.executable, "-m", "fedcomposite", "federation", *arguments) as started:
        yield started


@contextlib.contextmanager
def process(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a session of its own, its output in a file; it is stopped at the end."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with log.open("ab") as file:
        started = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield started
    finally:
        stop(started)


def stop(process: subprocess.Popen[bytes], patience: float = 15.0) -> None:
    """End a process that was started here in a session of its own, and what it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(
    log: Path, text: str, process: subprocess.Popen[bytes], timeout: float = 90.0, times: int = 1
) -> None:  # fmt: skip
    """Wait until a party has said something, so many times."""
    end = time.monotonic() + timeout
    while (said := log.read_text(encoding="utf-8", errors="replace") if log.exists() else "").count(text) < times:
        if process.poll() is not None or time.monotonic() > end:
            lines = said.strip().splitlines()
            raise FederationError(f"{log.stem}: {lines[-1] if lines else 'said nothing'} (see {log})")
        time.sleep(0.2)


def compare_with_simulation(folder: Path, config: Path, run: RunFolder) -> float:
    """Do the same experiment in the simulator; the largest difference between the two models."""
    alone = RunFolder(folder / "simulated")
    alone.create()
    simulated = runner.execute(Config.read(config), alone)
    x: Tensor = files.read(run.path / "model.safetensors")[0]["x"]
    return float((x - simulated.solution).abs().max())
