"""Who carries a message to the clients, and where they live: what the driver asks of a transport."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fedcomposite import rng
from fedcomposite.problems import Counter, Evaluation


class StoppedError(Exception):
    """Somebody asked the run to stop while an exchange was on its way."""


@dataclass(frozen=True)
class Request:
    """What one exchange is for: a round, a measurement, or both."""

    round: int
    buffers: Tensor
    """What a model keeps beside its parameters, ``(b,)``."""
    message: NamedTuple | None = None
    """For the participants; None if nobody trains."""
    participants: rng.Ints | None = None
    """Their numbers, sorted."""
    model: Tensor | None = None
    """To be measured by everybody."""
    stop: bool = False
    """Whether this process wants the run to end after the round."""


class Gathered(NamedTuple):
    """What comes back from the participants of a round."""

    mean: NamedTuple
    """The weighted mean of their decoded replies."""
    buffers: Tensor
    """The weighted mean of their buffers."""
    participants: int
    """How many of them were counted."""
    stop: bool
    """Whether any process wants the run to end."""


class Exchange(Protocol):
    """One exchange on its way. A part that nobody asks for need not be carried out."""

    def measured(self) -> Evaluation:
        """Loss, gradient and counts of the model over all the data."""

    def gathered(self) -> Gathered:
        """The outcome of the round."""

    def remarks(self) -> dict[str, int]:
        """Further entries of the measurement's record, as the number of sites where some were missing."""


class Transport(Protocol):
    """Where the clients are. A transport owns their states, and counts the work and the bytes of this process."""

    clients: int
    """How many there are."""
    counter: Counter
    lockstep: bool
    """Whether several processes must end after the same round."""

    def exchange(self, request: Request) -> Exchange:
        """Carry a message to the participants, a model to everybody, or both."""

    @property
    def leads(self) -> bool:
        """Whether this process writes files, calls callbacks and counts the server's work; one of them does."""

    def totals(self) -> Counter:
        """Work and bytes of all processes."""

    def agree(self, stop: bool) -> bool:
        """Whether any process wants the run to end."""

    def running(self) -> AbstractContextManager[None]:
        """Settings of the process under which rounds are fastest, for as long as the run lasts."""

    def save(self, path: Path, name: str) -> NamedTuple:
        """What a checkpoint holds of the clients' states; ``name`` is particular to the run and the round."""

    def saved(self, path: Path, name: str) -> None:
        """The checkpoint is complete: what belonged to the last one may go."""

    def load(self, path: Path, name: str) -> None:
        """Take the clients' states back from a checkpoint that is known to be this run's."""

    @property
    def states(self) -> Any:
        """The clients' states, as they are shown to the user after a run."""

    @property
    def remark(self) -> str:
        """How the rounds were carried out, where that is worth telling."""
