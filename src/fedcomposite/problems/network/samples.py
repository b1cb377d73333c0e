"""Where a network's passes find their samples: on the device, or in a window onto a file that a thread fills ahead.

Passes read rows of two tensors, X and b. Of samples that fit, these are everything. Of samples in a file they are a
window: the rows of the minibatch of now, at an address that stays, so that lists of operations and CUDA graphs can hold
it. Minibatches are functions of counters, known before they are needed: a thread gathers the next ones in page-locked
memory while the device computes. What was gathered is compared with what is asked for, so a wrong guess costs time and
changes no number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fedcomposite.data.mapped import MappedRows
from fedcomposite.problems.base import UnsuitableError

AHEAD = 2
"""Minibatches that are gathered before they are asked for."""
MOST = 8 << 30
"""Bytes of a recorded round's samples beyond which rounds are carried out step by step."""

After = Callable[[], Tensor]
Samples = tuple[Tensor, Tensor]


class Held:
    """Samples on the device: rows are what they are."""

    def __init__(self, X: Tensor, b: Tensor) -> None:
        self.X, self.b, self.rows_on = X, b, X.device

    def for_recording(self) -> Held:
        """The samples as a recorded round reads them: these, since they stay where they are."""
        return self

    def expect(self, rows: Tensor, after: After | None = None) -> None:
        """Nothing to get ready."""

    def stage(self, rows: Tensor) -> Tensor:
        """The rows as they are numbered on the device: no sample has to be brought there."""
        return rows

    def batch(self, rows: Tensor) -> Tensor:
        """The rows of a minibatch."""
        return rows

    def at(self, rows: Tensor) -> Tensor:
        """The rows of a piece of a silo."""
        return rows


class Window:
    """The samples of a few rows of a file, on the device."""

    def __init__(
        self,
        features: MappedRows,
        targets: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        *,
        recorded: bool = False,
    ) -> None:
        self._features, self._targets, self._recorded = features, targets, recorded
        self._dtype = dtype if features.dtype.is_floating_point else features.dtype
        self._device, self.rows_on = device, torch.device("cpu")
        self._loader = Loader(features, targets, pin=device.type == "cuda")
        self._here = torch.empty(0, dtype=torch.int64)
        self._resize(0)
        self._bring(torch.zeros(2, dtype=torch.int64))  # what modules are tried on

    def for_recording(self) -> Window:
        """A window of its own, whose address no other use changes."""
        return Window(self._features, self._targets, self._dtype, self._device, recorded=True)

    def _resize(self, rows: int) -> None:
        self.X = torch.zeros((rows, *self._features.shape[1:]), dtype=self._dtype, device=self._device)
        self.b = torch.zeros((rows, *self._targets.shape[1:]), dtype=self._targets.dtype, device=self._device)
        self._places = torch.arange(rows, device=self._device)

    def _bring(self, rows: Tensor) -> Tensor:
        """Fill the window with these rows, and say where each is."""
        wanted = rows.reshape(-1).cpu()
        if not torch.equal(wanted, self._here):
            X, b = self._loader.take(wanted)
            if len(wanted) > len(self.X):
                self._resize(len(wanted))
            self.X[: len(X)].copy_(X, non_blocking=True)
            self.b[: len(b)].copy_(b, non_blocking=True)
            self._here = wanted.clone()
        return self._places[: len(wanted)].view(rows.shape)

    def expect(self, rows: Tensor, after: After | None = None) -> None:
        """Gather the minibatches ``(steps, m, b)`` in the background, then those that ``after`` draws."""
        self._loader.expect(rows, after)

    def stage(self, rows: Tensor) -> Tensor:
        """Bring a whole round's samples; its rows are places in the window."""
        if (size := rows.numel() * self._features.row_bytes) > MOST:
            raise UnsuitableError(
                f"the samples of a round, read from a file, are {size / 2**30:.1f} GiB; use smaller batches or cohorts"
            )
        return self._bring(rows)

    def batch(self, rows: Tensor) -> Tensor:
        """The places of a minibatch; a recorded round's are there already."""
        return rows if self._recorded else self._bring(rows)

    def at(self, rows: Tensor) -> Tensor:
        """The places of a piece of a silo."""
        if self._recorded:
            raise UnsuitableError("it needs full gradients of samples that are read from a file")
        return self._bring(rows)


class Loader:
    """Rows of a file in host memory, gathered by a thread before they are asked for."""

    def __init__(self, features: MappedRows, targets: Tensor, *, pin: bool) -> None:
        self._features, self._targets, self._pin = features, targets, pin
        self._thread: ThreadPoolExecutor | None = None
        self._wanted: deque[Tensor] = deque()
        self._begun: deque[tuple[Tensor, Future[Samples]]] = deque()
        self._after: After | None = None

    def _room(self, rows: Tensor) -> Samples:
        """Memory for some rows: the thread asks CUDA for nothing, which would spoil a recording on another stream."""
        X = torch.empty((len(rows), *self._features.shape[1:]), dtype=self._features.dtype, pin_memory=self._pin)
        b = torch.empty((len(rows), *self._targets.shape[1:]), dtype=self._targets.dtype, pin_memory=self._pin)
        return X, b

    def gather(self, rows: Tensor, into: Samples) -> Samples:
        """Features and targets of some rows."""
        X, b = into
        return self._features[rows].read(X), torch.index_select(self._targets, 0, rows, out=b)

    def expect(self, rows: Tensor, after: After | None) -> None:
        """Begin with these minibatches; what has begun already and fits goes on."""
        steps = [step.reshape(-1) for step in rows.cpu()]
        fits = 0
        for (begun, _), step in zip(self._begun, steps, strict=False):
            if not torch.equal(begun, step):
                break
            fits += 1
        self._begun = deque(list(self._begun)[:fits])
        self._wanted, self._after = deque(steps[fits:]), after
        self._begin()

    def take(self, rows: Tensor) -> Samples:
        """A minibatch: one that has been gathered, if it is the one, or gathered now."""
        found: Samples | None = None
        if any(torch.equal(begun, rows) for begun, _ in self._begun):
            while found is None:  # those before it were left out
                begun, job = self._begun.popleft()
                found = job.result() if torch.equal(begun, rows) else None
        self._begin()
        return self.gather(rows, self._room(rows)) if found is None else found

    def _begin(self) -> None:
        """Hand the next minibatches to the thread."""
        while len(self._begun) < AHEAD:
            if not self._wanted and self._after is not None:
                after, self._after = self._after, None
                self._wanted.extend(step.reshape(-1) for step in after())
            if not self._wanted:
                return
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "fedcomposite-samples")
            rows = self._wanted.popleft()
            self._begun.append((rows, self._thread.submit(self.gather, rows, self._room(rows))))
