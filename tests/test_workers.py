"""Runs side by side in real processes: one that is killed, Ctrl-C, and a parent that is gone."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fedcomposite.experiments import workers
from fedcomposite.experiments.config import Config
from fedcomposite.experiments.store import RunFolder

pytestmark = pytest.mark.slow

TEXT = """
seeds = [0, 1]
[data]
name = "synthetic"
clients = 3
features = 4
samples = 10
[[algorithms]]
name = "FedAvg"
local_steps = 1
step = 0.1
[run]
rounds = 100_000_000
evaluate_every = 1000
"""


def until(condition):
    end = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def holder(folder):
    """The process that is at a run, once its first rounds are done."""

    def found():
        try:
            return (folder / "history.jsonl").stat().st_size and json.loads((folder / ".lock").read_text())["pid"]
        except (OSError, ValueError):
            return None

    return until(found)


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_killed_process_is_told_with_its_run_and_the_others_go_on(tmp_path):
    def task(name, rounds):
        text = (
            TEXT.replace("seeds = [0, 1]", "")
            .replace("100_000_000", str(rounds))
            .replace("[[algorithms]]", "[algorithm]")
        )
        path = tmp_path / name
        (tmp_path / f"{name}.toml").write_text(text)
        return workers.Task(name, 5, RunFolder(path), Config.read(tmp_path / f"{name}.toml"))

    tasks = [task("endless", 10**8), task("a", 2), task("b", 3), task("c", 4)]
    ended = []

    def kill():
        os.kill(holder(tmp_path / "endless"), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(workers.FailedRunsError) as caught:
        workers.carry_out(tasks, 2, lambda label, seed: ended.append((label, seed)))
    thread.join()
    first, line = str(caught.value).splitlines()
    assert first.startswith("1 of 4 runs")
    assert line.startswith("endless, seed 5: ")
    assert "killed" in line
    assert sorted(ended) == [("a", 5), ("b", 5), ("c", 5)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_a_parent_that_ends_takes_its_processes_with_it(tmp_path, number):
    (tmp_path / "c.toml").write_text(TEXT)
    command = [
        sys.executable,
        "-m",
        "fedcomposite",
        "compare",
        tmp_path / "c.toml",
        "--out",
        tmp_path / "c",
        "--jobs",
        "2",
    ]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    folders = [tmp_path / "c" / "FedAvg" / f"seed-{seed}" for seed in (0, 1)]
    try:
        pids = [holder(folder) for folder in folders]
        assert parent.pid not in pids
        parent.send_signal(number)
        said = parent.communicate(timeout=60)[0]
    finally:
        parent.kill()
        parent.wait()
    until(lambda: all(map(gone, pids)))
    assert "Traceback" not in said
    if number == signal.SIGINT:
        assert parent.returncode == 130
        for folder in folders:  # completed with what there is
            assert RunFolder(folder).summary()["status"] == "interrupted"
            assert not (folder / ".lock").exists()
