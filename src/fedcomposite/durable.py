"""Files that a crash cannot spoil: replaced as a whole, on the disk before they count; one process at a time."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    What killed writers of this file left behind is removed.
    """
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of the one at ``path`` when it is whole and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_name(path)
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
        _sync_folder(path.parent)
    finally:
        scratch.unlink(missing_ok=True)
    remove_scratch(path)


def _sync_folder(folder: Path) -> None:
    """Have a folder's list of names on the disk: a file that took another's place stays there after a power cut."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:  # of a kind of system on which folders cannot be opened
        return
    try:
        os.fsync(opened)
    except OSError:  # nor synced
        pass
    finally:
        os.close(opened)


def one_at_a_time(what: str) -> AbstractContextManager[Any]:
    """Wait until no other process of this user is at ``what``, any name that they share, then keep them waiting.

    The lock is the kernel's, on a file in the system's temporary folder, and ends with its process.
    """
    name = f"fedcomposite-{os.getuid()}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.lock"
    return FileLock(Path(tempfile.gettempdir(), name), mode=0o600)


def scratch_name(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def remove_scratch(path: Path) -> None:
    """Remove the unfinished copies of a file whose writers are gone."""
    start = f".{path.name}."
    for old in path.parent.glob(f"{start}*.tmp"):
        owner = old.name[len(start) : -len(".tmp")]
        if owner.isdigit() and int(owner) != os.getpid() and not _alive(int(owner)):
            old.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
