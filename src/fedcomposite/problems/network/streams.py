"""Work of different clients side by side on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedcomposite.problems.network.aligned import Aligned
from fedcomposite.problems.network.flat import FlatModule

Objective = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor], Tensor]
"""From a module, inputs, targets and weights of the samples to the loss."""

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


class SideBySide:
    """Gradients of many clients, each by a pass of its own.

    A pass has few kernels beside the module's: parameters and statistics are moved to aligned places for all clients at
    once, and the counters of batch norm are increased together.
    """

    def __init__(self, flat: FlatModule, objective: Objective) -> None:
        self._flat, self._objective = flat, objective
        self._parameters = Aligned(flat.layout, channels_last=flat.device.type == "cuda" and flat.convolves)
        self._statistics = [slot for slot in flat.buffer_layout if slot.name not in flat.integers]
        self._aligned = Aligned(self._statistics, channels_last=False)
        self._integers = [s for s in flat.buffer_layout if s.name in flat.integers and s.name not in flat.counters]
        self._streams = Streams(flat.device)

    def __call__(
        self, x: Tensor, buffers: Tensor, inputs: Tensor, b: Tensor, weight: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients ``(m, d)`` and buffers; a pass adds ``counts`` to the buffers that count it."""
        gradient, after = torch.empty_like(x), buffers + counts
        for a in range(0, len(x), MOST):
            c = slice(a, a + MOST)
            self._together(x[c].detach(), buffers[c], inputs[c], b[c], weight[c], gradient[c], after[c])
        return gradient, after

    def _together(
        self, x: Tensor, buffers: Tensor, inputs: Tensor, b: Tensor, weight: Tensor, gradient: Tensor, after: Tensor
    ) -> None:
        parameters, statistics = self._parameters.spread(x), self._aligned.spread(buffers)
        together = self._flat.placed(inputs.flatten(0, 1))
        inputs = together.view(*inputs.shape[:2], *together.shape[1:])

        def one(i: int) -> None:
            leaves = {k: v.requires_grad_() for k, v in self._parameters.tensors(parameters[i]).items()}
            state: dict[str, Tensor | None] = dict.fromkeys(self._flat.counters)
            state |= leaves | self._aligned.tensors(statistics[i]) | self._flat.unpack(buffers[i], self._integers)
            with torch.enable_grad(), self._flat.holding(state, train=True) as module:
                value = self._objective(module, inputs[i], b[i], weight[i])
                found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            self._parameters.gather(found, gradient[i])
            self._aligned.gather((state[slot.name] for slot in self._statistics), after[i])  # type: ignore[misc]
            for slot in self._integers:
                after[i, slot.start : slot.stop] = state[slot.name].flatten()  # type: ignore[union-attr]

        self._streams.run(len(x), one)
