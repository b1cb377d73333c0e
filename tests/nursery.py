"""Processes without the start of an interpreter: one that has imported everything forks another for every command.

Each is a process of its own, in a session of its own, with its words in a file; it can be signalled and killed. The
process that forks them has one thread and no connection, so that nothing is shared that a command would use.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Child:
    """A process of the nursery, as :class:`subprocess.Popen` has it."""

    def __init__(self, nursery, pid):
        self.pid, self._nursery, self._code = pid, nursery, None

    def poll(self):
        if self._code is None:
            self._code = self._nursery.ask({"poll": self.pid})
        return self._code

    def wait(self, timeout=None):
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return self._code

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


class Nursery:
    """The process that forks, started when it is first needed."""

    def __init__(self):
        self._file, self._process = None, None

    def start(self, log, arguments, variables=None):
        """A command as a process; ``arguments`` are those of a program in this folder, or of ``fedcomposite``."""
        given = {"start": [str(a) for a in arguments], "log": str(log), "variables": variables or {}}
        return Child(self, self.ask(given))

    def ask(self, request):
        if self._file is None:
            ours, theirs = socket.socketpair()
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, env=ENVIRONMENT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
            theirs.close()
            self._file = ours.makefile("rw")
            ours.close()
            atexit.register(self.close)
        self._file.write(json.dumps(request) + "\n")
        self._file.flush()
        return json.loads(self._file.readline())

    def close(self):
        """End it, and with it what it has started."""
        self._file.close()
        self._process.wait()


NURSERY = Nursery()


def _become(request, file):
    """The forked process: the command, as if it had been started anew."""
    os.setsid()
    file.close()
    out = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.environ.update(request["variables"])
    program, *arguments = request["start"]
    sys.argv = [program, *arguments]
    if program == "fedcomposite":
        from fedcomposite import cli

        cli.main()
    else:
        import held_site

        held_site.main()
    sys.exit(0)


def serve(number):
    """Fork when asked; say who has ended, and how."""
    import held_site
    import matplotlib.pyplot  # noqa: F401

    import fedcomposite.cli.federation  # noqa: F401

    assert held_site.main
    assert threading.active_count() == 1
    alive, codes = set(), {}
    file = socket.socket(fileno=number).makefile("rw")
    for line in iter(file.readline, ""):
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                _become(request, file)
            alive.add(pid)
            answer = pid
        else:
            answer = _code(request["poll"], alive, codes)
        file.write(json.dumps(answer) + "\n")
        file.flush()
    for pid in alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _code(pid, alive, codes):
    if pid in alive:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done == pid:
            alive.discard(pid)
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes.get(pid)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(int(sys.argv[1]))
