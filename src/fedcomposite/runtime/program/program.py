"""A local round of all clients as one program: static buffers, a CUDA graph, and compiled gradients and proxes.

The program is built from the very rules of the method: ``local_round`` is run once on static copies of its inputs
while a CUDA graph records the kernels; a round is then a copy of the new message, states and minibatch rows into those
buffers and one launch. Before recording, the model's gradient and the prox of h may be compiled
(:func:`torch.compile`), which fuses the many small operations between the matrix products; the rest of the rule stays
as it is written.

What cannot be recorded runs as before, with one warning that says why: methods that read a number off the device inside
a round (a random number of local steps, private coins), models with random layers or functions that draw from torch's
generator, and full gradients of changing cohorts. Nothing here depends on a timing, so a resumed run takes the same
path.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedcomposite import rng
from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.problems import Batches, Counter, Smooth
from fedcomposite.problems.base import FULL, RoundInputs, UnsuitableError
from fedcomposite.regularizers.base import Regularizer
from fedcomposite.runtime import messages
from fedcomposite.runtime.counted import Counted
from fedcomposite.runtime.program.fused_rounds import Fused
from fedcomposite.runtime.program.prox import CompiledProx

_SECOND = "second-order methods change the size of their replies from round to round"


class _Place(NamedTuple):
    """Where the clients of a program stand in the round's cohort, of which another process may have a part."""

    position: Tensor
    cohort: int


class _Recorded:
    """The oracle of the program: minibatches are rows of one static tensor."""

    def __init__(
        self, smooth: Smooth, local: RoundInputs, rows: Tensor | None, full: Any, counter: Counter, batches: Batches,
        place: _Place, trial: bool,
    ) -> None:  # fmt: skip
        self._smooth, self._local, self._rows, self._full = smooth.during(local), local, rows, full
        self._counter, self._mine, self._place, self._trial = counter, len(place.position), place, trial
        self._batches = batches
        self.steps = 0

    def __call__(self, x: Tensor, k: int) -> Tensor:
        if self._rows is None:
            return self.full(x)
        self._counter.gradients += self._mine
        self._local.step = k
        self.steps = max(self.steps, k + 1)
        if k >= len(self._rows) and not self._trial:
            raise UnsuitableError("the number of local steps changes from round to round")
        return self._batches.clipped(self._smooth.minibatch(x, self._rows[min(k, len(self._rows) - 1)]))

    def full(self, x: Tensor) -> Tensor:
        if self._full is None:
            raise UnsuitableError("it needs full gradients of a cohort that changes")
        self._counter.gradients += self._mine
        self._local.step = FULL
        return self._batches.clipped(self._full(x))

    def loss(self, x: Tensor) -> Tensor:
        raise UnsuitableError(_SECOND)

    def hessian(self, x: Tensor, where: Tensor) -> Tensor:
        raise UnsuitableError(_SECOND)

    def uniform(self, k: int, count: int = 1) -> Tensor:
        raise UnsuitableError("the method tosses private coins in every round")

    @property
    def position(self) -> Tensor:
        return self._place.position

    @property
    def cohort(self) -> int:
        return self._place.cohort


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection, which could end another recorded program, and with it the recording of this one."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Program:
    """One method's local round for a cohort of fixed size; call it with the round's inputs."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        smooth: Smooth,
        h: Regularizer,
        batches: Batches,
        message: NamedTuple,
        clients: NamedTuple,
        buffers: Tensor,
        who: rng.Ints,
        place: tuple[int, int],
        *,
        everyone: bool,
        compile: bool,
    ) -> None:
        began = time.perf_counter()
        if not algorithm.recordable:
            raise UnsuitableError("the operations of a round depend on a count, a phase or a coin")
        smooth = smooth.ready(compile)
        self._algorithm, self._smooth, self._batches = algorithm, smooth, batches
        self._h = h
        self._local_round: Callable[..., tuple[Any, Any]] = algorithm.local_round
        self._cohort, self._counter = len(who), Counter()
        self._message = messages.each(message, torch.clone)
        self._clients = messages.each(clients, lambda t: t.clone(memory_format=torch.contiguous_format))
        self._buffers = buffers.clone()
        self._ids = torch.from_numpy(smooth.ids[who].astype(np.int64)).to(smooth.device)
        positions = torch.arange(place[0], place[0] + len(who), device=smooth.device).unsqueeze(1)
        self._first, self._place = place[0], _Place(positions, place[1])
        self._round = torch.zeros((), dtype=torch.int64, device=smooth.device)
        self._full = smooth.full(who) if everyone else None
        self._rows: Tensor | None = None
        self._ahead: tuple[tuple[int, bytes], Tensor] = (-1, b""), torch.empty(0)
        self._steps = 1
        if batches.size is not None:
            self._rows = smooth.stage(self._draw(who, 0, 1)).to(smooth.device)
            self._steps = max(1, self._run(trial=True)[3])  # how many local steps there are; compiles, which may wait
            self._rows = smooth.stage(self._draw(who, 0, self._steps)).to(smooth.device)
        else:
            self._run()
        self._check()
        self.gradients, self.proxes = self._counter.gradients, self._counter.proxes
        if compile:
            self._compile(h)
        self._graph = torch.cuda.CUDAGraph() if smooth.device.type == "cuda" else None
        if self._graph is not None:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._run()  # libraries allocate their workspaces here, not while recording
            torch.cuda.current_stream().wait_stream(side)
            # Threads of a process group may ask for the state of their own operations meanwhile.
            alone = not (dist.is_available() and dist.is_initialized())
            errors = "global" if alone else "thread_local"
            with _uncollected(), torch.cuda.graph(self._graph, capture_error_mode=errors):
                self._out = self._run()
        self.seconds = time.perf_counter() - began

    def _compile(self, h: Regularizer) -> None:
        """Compile what the method does between gradients; where that cannot be listed, the prox alone."""
        message = messages.each(messages.stack(self._message, self._cohort), Tensor.contiguous)
        try:
            self._local_round = Fused(self._algorithm, message, self._clients, h, _compiled)
        except Exception:
            self._h = CompiledProx(h)

    def _check(self) -> None:
        """Run once more, refusing anything that waits for the device, and count the work."""
        self._counter.gradients = self._counter.proxes = 0
        cuda = self._smooth.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            before = torch.cuda.get_sync_debug_mode()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it does not find every kind of waiting: recording finds the rest
                torch.cuda.set_sync_debug_mode("error")
        try:
            self._run()
        except RuntimeError as error:
            if isinstance(error, UnsuitableError) or "synchroniz" not in str(error):
                raise
            raise UnsuitableError("it reads a number off the device inside the round") from None
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode(before)

    def _run(self, trial: bool = False) -> tuple[NamedTuple, NamedTuple, Tensor, int]:
        """The round on the static buffers."""
        none = np.zeros(self._cohort, np.uint64)
        local = RoundInputs(self._buffers.repeat(self._cohort, 1), none, self._batches.seed, self._round, ids=self._ids)
        grad = _Recorded(self._smooth, local, self._rows, self._full, self._counter, self._batches, self._place, trial)
        h = Counted(self._h, self._counter)
        # Whole copies of the message, so that compiled functions see one memory layout and are compiled once.
        message = messages.each(messages.stack(self._message, self._cohort), Tensor.contiguous)
        replies, new = self._local_round(message, self._clients, grad, h)
        inputs = {t.untyped_storage().data_ptr() for t in (*self._message, *self._clients, self._buffers)}

        def own(t: Tensor) -> Tensor:  # an output that is an input would change under the next copy
            return t.clone() if t.untyped_storage().data_ptr() in inputs else t

        return messages.each(replies, own), messages.each(new, own), own(local.buffers), grad.steps

    def _draw(self, who: rng.Ints, round: int, steps: int) -> Tensor:
        """The round's minibatch rows, on the host."""
        s = self._smooth
        local = self._batches.draw(s.ids[who], s.sizes[who], round, range(steps))
        return torch.from_numpy((local + s.offsets[who][None, :, None]).astype(np.int64))

    def __call__(
        self, message: NamedTuple, clients: NamedTuple, buffers: Tensor, who: rng.Ints, round: int, first: int = 0
    ) -> tuple[NamedTuple, NamedTuple, Tensor]:
        """Replies, new states and buffers of one round; they are overwritten by the next.

        ``first`` is the place of the first client in the cohort.
        """
        for old, new in zip(
            (*self._clients, *self._message, self._buffers), (*clients, *message, buffers), strict=True
        ):
            old.copy_(new)
        self._round.fill_(round)
        if first != self._first:
            self._place.position.add_(first - self._first)
            self._first = first
        self._ids.copy_(torch.from_numpy(self._smooth.ids[who].astype(np.int64)))
        if self._rows is not None:
            key = round, who.tobytes()
            drawn = self._ahead[1] if self._ahead[0] == key else self._draw(who, round, self._steps)
            self._rows.copy_(self._smooth.stage(drawn))
        if self._graph is None:
            return self._run()[:3]
        self._graph.replay()
        if self._rows is not None and self._full is not None:  # the next round's rows, while the device is at work
            self._ahead = (round + 1, who.tobytes()), self._draw(who, round + 1, self._steps)
            self._smooth.expect(self._ahead[1][None])
        return self._out[:3]
