"""What the driver asks of a transport, and what comes back of a round."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fedcomposite.problems import Counter, Evaluation


class StoppedError(Exception):
    """Somebody asked the run to stop while an exchange was on its way."""


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
    """Where the parties are: it carries what the driver's tasks ask at the same time, and counts work and bytes."""

    counter: Counter

    def ask(self, requests: Sequence[Any]) -> list[Any]:
        """The parties' answers to requests of :mod:`fedcomposite.runtime.protocol`, in one exchange."""

    def running(self) -> AbstractContextManager[None]:
        """Settings of the process under which answers are fastest, for as long as tasks run."""


class Parties(Transport, Protocol):
    """A transport of analyses, which knows who answers."""

    names: list[str]
    ids: list[int]
    """The numbers of those with samples."""
    centre: Tensor | None
    """About which parties can take their features, where these are far from zero; None if they cannot, or need not."""
    by_site: bool
    """Whether single sites' answers may be asked for."""
    noised: bool
    """Whether some parties put noise on what they count at a model."""

    def recalled(self, requests: Sequence[Any]) -> None:
        """These were answered before, and the answers are known: they count as asked, and nobody is asked."""


class MethodTransport(Transport, Protocol):
    """A transport of a method's rounds: it owns the clients' states."""

    clients: int
    """How many there are."""
    lockstep: bool
    """Whether several processes must end after the same round."""

    @property
    def leads(self) -> bool:
        """Whether this process writes files, calls callbacks and counts the server's work; one of them does."""

    def totals(self) -> Counter:
        """Work and bytes of all processes."""

    def agree(self, stop: bool) -> bool:
        """Whether any process wants the run to end."""

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
