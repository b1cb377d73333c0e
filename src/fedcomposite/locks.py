"""One process per folder.

The lock is the kernel's (``flock``, by :mod:`filelock`) on the file ``.lock`` in the folder. It ends with the process
that holds it, no matter how: what a killed process leaves behind is an unlocked file, which the next one takes over.
What the file says is for people only. It is removed when the lock is released.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import warnings
from datetime import datetime
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from fedcomposite._faults import UserError

NAME = ".lock"


class LockedError(UserError):
    """A folder that another process is using; the message says which."""


class LockWarning(UserWarning):
    """A file system without locks, where nothing keeps two processes from using one folder."""


class FolderLock:
    """The right to change a folder, as a context manager; a folder that is not there is made.

    A thread may take a lock again that it holds. Folders that were made for the lock and are still empty when it is
    released are removed: what was refused leaves nothing behind.

    Raises
    ------
    LockedError
        If another process, or another thread of this one, has it.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with FolderLock(f"{place}/run"):
    ...         print(Path(place, "run", ".lock").exists())
    ...     print(Path(place, "run").exists())
    True
    False
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._made: list[Path] = []
        self._lock = FileLock(
            Path(os.path.realpath(self.folder), NAME),
            timeout=0.1,  # a second try, for a file that its last holder has just removed
            is_singleton=True,  # so that a thread's second lock on a folder is its first one
            fallback_to_soft=False,  # a file alone would outlive a killed process
            on_acquired=_sign,
        )

    def __enter__(self) -> Self:
        self._made = _make(self.folder)
        try:
            self._lock.acquire()
        except Timeout:
            who = _holder(Path(self._lock.lock_file))
            self._tidy()
            raise LockedError(f"{self.folder}: in use by {who}") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                self._tidy()
                raise
            Path(self._lock.lock_file).unlink(missing_ok=True)
            warnings.warn(
                f"{self.folder}: this file system has no locks; see to it that no other process uses the folder",
                LockWarning,
                stacklevel=3,
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock.lock_counter == 1:
            Path(self._lock.lock_file).unlink(missing_ok=True)  # while it is still locked: it is ours
        self._lock.release()
        self._tidy()

    def _tidy(self) -> None:
        """Remove the folders that were made, from the inmost to the first that something is in."""
        while self._made:
            try:
                self._made.pop().rmdir()
            except OSError:
                self._made.clear()


def _make(folder: Path) -> list[Path]:
    """Make a folder and those above it that are missing; returns what was made, outermost first."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{folder}: is a file; give another folder with --out") from None
    except OSError as error:
        raise UserError(f"{folder}: cannot be created ({error.strerror})") from None
    return missing[::-1]


def _sign(file: int) -> None:
    """Say in the locked file who has it."""
    words = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
    os.ftruncate(file, 0)
    os.write(file, (json.dumps(words) + "\n").encode())


def _holder(path: Path) -> str:
    """Who has the lock, as it says itself."""
    try:
        words = json.loads(path.read_bytes())
        if (words["pid"], words["host"]) == (os.getpid(), socket.gethostname()):
            return "another thread of this process"
        return f"process {words['pid']} on {words['host']} since {words['since']}; wait for it, or use another folder"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process; wait for it, or use another folder"
