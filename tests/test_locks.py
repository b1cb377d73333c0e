"""Two processes on one folder: real ones, synchronised by pipes."""

import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from fedcomposite.experiments import FolderLock, LockedError

CONFIG = """
[data]
name = "synthetic"
clients = 3
features = 4
samples = 10
[algorithm]
name = "FedAvg"
local_steps = 1
step = 0.1
[run]
rounds = 2
"""
HOLD = """
import contextlib, sys
from fedcomposite.locks import FolderLock
with contextlib.ExitStack() as locks:
    for folder in sys.argv[1:]:
        locks.enter_context(FolderLock(folder))
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(*folders):
    """A process that has the locks until its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *map(str, folders)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_second_process_is_refused_and_a_killed_one_is_no_obstacle(tmp_path, cli):
    (tmp_path / "c.toml").write_text(CONFIG)
    text = CONFIG.replace("[algorithm]", "[[algorithms]]")
    (tmp_path / "many.toml").write_text(text)
    folder, several = tmp_path / "r", tmp_path / "several"
    cli("run", tmp_path / "c.toml", "--out", folder, check=0)
    cli("compare", tmp_path / "many.toml", "--out", several, check=0)
    before = {p: p.read_bytes() for p in folder.iterdir()}
    with holder(folder, several / "FedAvg" / "seed-0") as process:
        for arguments in (
            ["run", "--resume", folder],
            ["run", tmp_path / "c.toml", "--out", folder, "--overwrite"],
            ["compare", tmp_path / "many.toml", "--out", folder, "--overwrite"],
            ["export", folder],
        ):
            (line,) = cli(*arguments, check=2).err.splitlines()
            words = f"error: {folder}: in use by process {process.pid} on {socket.gethostname()} since 20"
            assert line.startswith(words)
        cli("export", folder, "--out", tmp_path / "model.pt", check=0)  # reading disturbs nobody
        cli("compare", "--resume", several, check=2)
        cli("compare", tmp_path / "many.toml", "--out", several, "--overwrite", check=2)
        assert (several / "FedAvg" / "seed-0" / "history.jsonl").exists()
        assert {p: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"} == before
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (folder / ".lock").exists()
        cli("run", "--resume", folder, check=0)
    assert not (folder / ".lock").exists()


def test_a_lock_is_released_on_every_exit(tmp_path):
    def fail(error):
        with FolderLock(tmp_path / "a" / "b"):
            assert (tmp_path / "a" / "b" / ".lock").exists()
            raise error

    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            fail(error)
        assert not (tmp_path / "a").exists()  # it was made for the lock, and nothing came into it
    with FolderLock(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").touch()
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["file"]


def test_a_thread_may_take_its_lock_again_and_another_may_not(tmp_path):
    refused = []

    def other():
        try:
            with FolderLock(tmp_path):
                pass
        except LockedError as error:
            refused.append(str(error))

    with FolderLock(tmp_path), FolderLock(tmp_path / "." / "x" / ".."):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert refused == [f"{tmp_path}: in use by another thread of this process"]
    other()
    assert len(refused) == 1


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def missing(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", missing)
    with pytest.warns(UserWarning, match="this file system has no locks"), FolderLock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
