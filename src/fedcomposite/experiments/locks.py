"""One process per folder.

The lock is the kernel's (``flock``) on the file ``.lock`` in the folder. It ends with the process that holds it, no
matter how: what a killed process leaves behind is an unlocked file, which the next one takes over. There is no process
number to be guessed about, which another process, container or boot may have been given meanwhile; what the file says
is for people only. It is removed when the lock is released.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import warnings
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from fedcomposite._validation import UserError

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

    _held: ClassVar[dict[Path, tuple[int, int]]] = {}  # folder: the thread that has it, and how many times
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._key = Path(os.path.realpath(self.folder))
        self._made: list[Path] = []
        self._file: int | None = None

    def __enter__(self) -> Self:
        me = threading.get_ident()
        with self._guard:
            owner, times = self._held.get(self._key, (me, 0))
            if owner != me:
                raise LockedError(f"{self.folder}: in use by another thread of this process")
            self._held[self._key] = owner, times + 1
        if times:
            return self
        try:
            self._made = _make(self.folder)
            self._file = self._acquire()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        with self._guard:
            owner, times = self._held.pop(self._key)
            if times > 1:
                self._held[self._key] = owner, times - 1
                return
        if self._file is not None:
            (self.folder / NAME).unlink(missing_ok=True)  # while it is still locked: it is ours
            os.close(self._file)
            self._file = None
        for path in reversed(self._made):
            try:
                path.rmdir()
            except OSError:  # something is in it
                break
        self._made = []

    def _acquire(self) -> int | None:
        """The open, locked file."""
        path = self.folder / NAME
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(file)
                os.close(file)
                raise LockedError(f"{self.folder}: in use by {holder}; wait for it, or use another folder") from None
            except OSError as error:
                os.close(file)
                path.unlink(missing_ok=True)
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                    raise
                warnings.warn(
                    f"{self.folder}: this file system has no locks; see to it that no other process uses the folder",
                    LockWarning,
                    stacklevel=4,
                )
                return None
            if _same(file, path):
                break
            os.close(file)  # its last holder has just removed it
        words = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        os.ftruncate(file, 0)
        os.write(file, (json.dumps(words) + "\n").encode())
        return file


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


def _same(file: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        here, there = os.fstat(file), path.stat()
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _holder(file: int) -> str:
    """Who has the lock, as it says itself."""
    try:
        words = json.loads(os.pread(file, 4096, 0))
        return f"process {words['pid']} on {words['host']} since {words['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
