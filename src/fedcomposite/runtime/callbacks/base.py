"""Callbacks: called after each record with a view of the run; they may stop it, and change nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from fedcomposite.runtime.history import Best, Record


class _Watched(Protocol):
    """What a view shows of a driver."""

    round: int
    history: list[Record]
    best: Best | None
    buffers: Tensor
    algorithm: Any

    @property
    def solution(self) -> Tensor: ...

    def keep(self, metric: str, value: float) -> None: ...

    def stop(self, reason: str) -> None: ...


class View:
    """A run as a callback sees it: all are copies, so that nothing but :meth:`stop` and :meth:`keep` has an effect."""

    __slots__ = ("_copies", "_driver", "_rounds")

    def __init__(self, driver: _Watched, rounds: int) -> None:
        self._driver, self._rounds = driver, rounds
        self._copies: list[Record] = []  # each record is copied once, not at every look

    @property
    def rounds(self) -> int:
        """Rounds that the run will do at most."""
        return self._rounds

    @property
    def round(self) -> int:
        """Rounds done."""
        return self._driver.round

    @property
    def record(self) -> Record:
        """The newest record."""
        return Record(self._driver.history[-1])

    @property
    def history(self) -> list[Record]:
        """All records, those before a resumed run's checkpoint included."""
        self._copies += map(Record, self._driver.history[len(self._copies) :])
        return list(self._copies)

    @property
    def solution(self) -> Tensor:
        """The model of now."""
        return self._driver.solution.detach().clone()

    @property
    def buffers(self) -> Tensor:
        """A network's running statistics of now, flat."""
        return self._driver.buffers.detach().clone()

    @property
    def best(self) -> Best | None:
        """The model that was kept, if any."""
        return self._driver.best

    def keep(self, metric: str, value: float) -> None:
        """Keep the model of now as the run's best one, ``run.best``; checkpoints have it too."""
        self._driver.keep(metric, value)

    @property
    def algorithm(self) -> Any:
        """The method."""
        return self._driver.algorithm

    def stop(self, reason: str) -> None:
        """End the run cleanly after this record; its status is then "stopped" and its message gives the reason."""
        self._driver.stop(reason)


class Callback:
    """The base of callbacks that need to know where a run begins and ends; a plain function of the view does as well.

    A resumed run begins with the history of its checkpoint, so a callback that depends on the past reads
    ``view.history`` and is right after a resume too.
    """

    def begin(self, view: View) -> None:
        """Before the first round, or after a checkpoint was read."""

    def __call__(self, view: View) -> None:
        """After each record."""

    def end(self, view: View) -> None:
        """At the end, also after an error."""


AnyCallback = Callback | Callable[[View], Any]


class _Function(Callback):
    """A plain function as a callback."""

    def __init__(self, function: Callable[[View], Any]) -> None:
        self._function = function

    def __call__(self, view: View) -> None:
        self._function(view)


class OnRecord(Callback):
    """Calls a function with every record, those of a resumed run's past included."""

    def __init__(self, function: Callable[[Record], Any]) -> None:
        self._function = function

    def begin(self, view: View) -> None:
        for old in view.history:
            self._function(old)

    def __call__(self, view: View) -> None:
        self._function(view.record)


def attach(callbacks: Sequence[AnyCallback]) -> list[Callback]:
    """Callbacks in their common form."""
    for one in callbacks:
        if isinstance(one, type):
            raise TypeError(f"callbacks: {one.__name__} is a class; give one of it: {one.__name__}(...)")
        if not callable(one):
            raise TypeError(f"callbacks: {one!r} is neither a Callback nor a function of a view")
    return [one if isinstance(one, Callback) else _Function(one) for one in callbacks]
