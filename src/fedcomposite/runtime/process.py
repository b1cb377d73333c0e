"""What a run changes in its process while it lasts: threads, freed memory, what Ctrl-C does. All of it is undone."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def on_main_thread() -> bool:
    """Whether this is the thread that may change the process."""
    return threading.current_thread() is threading.main_thread()


_SMALL = 1 << 18  # numbers in one operation below which a second thread costs more than it gives


def fitting_threads(elements: int, device: torch.device) -> int | None:
    """One thread for operations on so few elements on a CPU (a second only adds waiting); None: whatever is set.

    It depends on the size of the work alone, never on a clock: sums over several threads may differ in their last bit,
    and a run that is repeated or resumed has the same bits.
    """
    return 1 if device.type == "cpu" and elements < _SMALL else None


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """With so many of torch's threads; None leaves the setting alone."""
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None and count != before:
            torch.set_num_threads(before)


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Turn Ctrl-C into a flag that is read between rounds; a second one stops at once."""
    flag = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def on_signal(number: int, frame: Any) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


_TRIM, _MMAP, _MAPS, _ARENAS = -1, -3, -4, -8
"""M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX of mallopt(3)."""
_REUSED = 1 << 28  # bytes that were freed and stay, at most
_KEPT = (1 << 31) - 1, 1 << 30
_USUAL = 1 << 26, 1 << 25  # where glibc's own rule ends up after large blocks have been freed; the most for old ones

_lock, _runs = threading.Lock(), 0


@contextmanager
def keep_memory() -> Iterator[None]:
    """Freed memory stays with the process inside, and goes back to the system at the end; with glibc, else nothing.

    The C library gives large blocks back as soon as they are freed and takes them again for the next vector of the same
    size; the system then clears each page anew, which takes several times as long as the arithmetic.
    """
    c = _library()
    if c is None:
        yield
        return
    _count(c, +1)
    try:
        yield
    finally:
        _count(c, -1)


def reuse_memory() -> None:
    """From now on up to 256 MB that were freed serve for the next block, of any size, in any thread.

    For a process whose work is to pass long vectors on; with glibc, else nothing. See :func:`keep_memory`.
    """
    if (c := _library()) is not None:
        for option, value in ((_ARENAS, 1), (_MAPS, 0), (_TRIM, _REUSED)):
            c.mallopt(option, value)


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
