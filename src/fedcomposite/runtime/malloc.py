"""Keep freed memory for the next operation while a run lasts.

The C library gives large blocks back to the system as soon as they are freed and takes them again for the next vector
of the same size; the system then clears each page anew, which takes several times as long as the arithmetic.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of mallopt(3)
_KEPT = (1 << 31) - 1, 1 << 30
_USUAL = 1 << 26, 1 << 25  # where glibc's own rule ends up after large blocks have been freed; the most for old ones

_lock, _runs = threading.Lock(), 0


@contextmanager
def kept() -> Iterator[None]:
    """Freed memory stays with the process inside, and goes back to the system at the end; with glibc, else nothing."""
    c = _library()
    if c is None:
        yield
        return
    _count(c, +1)
    try:
        yield
    finally:
        _count(c, -1)


def _library() -> Any:
    """The C library, if it has what is needed."""
    if sys.platform != "linux":
        return None
    c = ctypes.CDLL(None)
    return c if hasattr(c, "mallopt") and hasattr(c, "malloc_trim") else None


def _count(c: Any, change: int) -> None:
    """Begin with the first run and end with the last, if there are several at once."""
    global _runs
    with _lock:
        before, _runs = _runs, _runs + change
        if (before > 0) == (_runs > 0):
            return
        trim, mmap = _KEPT if _runs else _USUAL
        if not c.mallopt(_MMAP, mmap):
            c.mallopt(_MMAP, _USUAL[1])
        c.mallopt(_TRIM, trim)
        if not _runs:
            c.malloc_trim(0)
