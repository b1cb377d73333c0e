"""An engine's own program below a party's: started, started again when it ends, and stopped with the party."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from fedcomposite.federation.engines.engine import EngineError

_WATCHED = [sys.executable, "-m", "fedcomposite.federation.engines.watched"]
_REUSED = 1 << 28  # bytes that were freed and stay, at most
_PAUSE = 3.0  # seconds before a program that ended is started again


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of an engine's program: its own helpers are found, its memory stays small.

    Large messages are copied often there: what was freed serves for the next one, as in ``reuse_memory``.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    memory = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(_REUSED)}
    return {**memory, **os.environ, "PATH": path, **variables}


class EngineProcess:
    """A program as a process of its own session, its words in a file of at most some megabytes."""

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        self._command, self._log = list(command), log
        self._environment = environment(variables)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; its output goes to the log."""
        self._log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened() as file:
            self._process = subprocess.Popen(
                [*_WATCHED, *self._command], env=self._environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip

    def _opened(self) -> IO[bytes]:
        if self._log.exists() and self._log.stat().st_size > 5e6:
            os.replace(self._log, self._log.with_suffix(".old"))
        return os.fdopen(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def said(self) -> str:
        """The last line of its own log."""
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return text.strip().splitlines()[-1] if text.strip() else "nothing"

    def wait_for(self, ready: Callable[[], bool], name: str, seconds: float) -> None:
        """Until it is ready; an error if it ends before, or is not ready in time."""
        end = time.monotonic() + seconds
        while not ready():
            if not self.alive or time.monotonic() > end:
                raise EngineError(f"{name} did not start: {self.said()} (see {self._log})")
            time.sleep(0.2)

    def keep(self, name: str, log: Callable[[str], None], look: Callable[[], None] = lambda: None) -> None:
        """Watch it until Ctrl-C, and start it again when it has ended; ``look`` is called every second."""
        while True:
            time.sleep(1.0)
            look()
            if not self.alive:
                log(f"{name} has ended (see {self._log}); starting it again")
                time.sleep(_PAUSE)
                self.start()

    def stop(self, patience: float = 5.0) -> None:
        """End it, and what it started."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
