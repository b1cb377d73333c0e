"""Work of different clients side by side on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

MOST = 10
"""Pieces of work that overlap; what they keep in memory is there together."""


class Streams:
    """CUDA streams that take turns; on a CPU one piece of work follows the other.

    A recorded round keeps the fork and the join, so that the kernels of different clients fill the device together.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []

    def run(self, count: int, work: Callable[[int], None]) -> None:
        """``work(i)`` for i below ``count``; what each reads was ready before, and all of it is when this returns."""
        if self._device.type != "cuda":
            for i in range(count):
                work(i)
            return
        missing = min(MOST, count) - len(self._streams)
        self._streams += [torch.cuda.Stream(self._device) for _ in range(missing)]  # type: ignore[no-untyped-call]
        used, here = self._streams[:count], torch.cuda.current_stream(self._device)
        for stream in used:
            stream.wait_stream(here)
        for i in range(count):
            with torch.cuda.stream(used[i % len(used)]):
                work(i)
        for stream in used:  # nothing that a stream reads or writes is given back before it has ended
            here.wait_stream(stream)
