"""What a run changes in its process while it lasts: torch's threads, and what Ctrl-C does. All of it is undone."""

from __future__ import annotations

import signal
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
