"""What a run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pandas as pd
from torch import Tensor

from fedcomposite.results import Result
from fedcomposite.runtime.certificate import Certificate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Status = Literal["completed", "converged", "stopped", "diverged", "interrupted", "not_converged", "dead"]


class DivergenceWarning(RuntimeWarning):
    """A run left the finite numbers, or its objective grew; its history is kept up to there."""


class GrowthWarning(DivergenceWarning):
    """A run did all its rounds and ended with more than twice the objective it began with: it diverged slowly."""


class DeadNetworkWarning(RuntimeWarning):
    """A network's outputs are the same for all samples: nothing is learned any more."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at a run: it stopped after a whole round, and ``run`` holds what was done."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.message)
        self.run = run


class Record(dict[str, Any]):
    """One evaluated round; ``record["objective"]`` and ``record.objective`` are the same.

    Bytes, evaluations and seconds are totals since the start.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no {name!r} in this record (it has: {', '.join(self)})") from None


class Best(NamedTuple):
    """The best model of a run so far, by a recorded number: what :class:`fedcomposite.callbacks.BestModel` keeps."""

    round: int
    metric: str
    value: float
    solution: Tensor
    buffers: Tensor

    def to_frame(self) -> pd.DataFrame:
        """One row: the round, the recorded number and its value, nonzeros."""
        kept = int((self.solution != 0).sum())
        return pd.DataFrame([{"round": self.round, "metric": self.metric, "value": self.value, "nonzeros": kept}])

    def __repr__(self) -> str:
        return f"Best(round {self.round}: {self.metric} {self.value:.6g})"

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False)


@dataclass(repr=False)
class Run(Result):
    """The result of :func:`fedcomposite.simulate`."""

    solution: Tensor
    """The model after the last round, ``(d,)`` (the last finite one if the run diverged)."""
    history: list[Record]
    """One record per evaluated round; the first is the starting model, round 0."""
    status: Status
    """Why it ended: "completed", all rounds done; "converged", tolerance reached; "stopped" by a callback; "diverged";
    "interrupted" by Ctrl-C; "dead", a network whose outputs have become the same for all samples.

    "completed" is said only of a run whose objective did not grow: with one that ends more than 1 % above the first the
    status is "not_converged", and with one more than twice as large "diverged". :func:`fedcomposite.solve` says
    "not_converged" also of a run that ended before its tolerance.
    """
    message: str
    """One line for people."""
    rounds: int
    """Rounds done."""
    server: NamedTuple
    """The server's state."""
    clients: Any
    """The clients' states, a tuple of ``(n, ...)`` tensors; a :class:`ClientStates` store where they are very large."""
    solutions: Tensor | None = None
    """With ``keep_solutions=True``: the model before the first and after each round, ``(rounds + 1, d)``."""
    buffers: Tensor | None = None
    """A network's running statistics after the last round, flat; empty for most models."""
    identity: dict[str, str] = field(default_factory=dict)
    """What determines the run's numbers, as a checkpoint keeps it; empty without one."""
    certificate: Certificate | None = None
    """How good the solution is, as far as it is known: from :func:`fedcomposite.solve`."""

    best: Best | None = None
    """The best model by a recorded number, with the callback ``BestModel``."""

    @property
    def frame(self) -> pd.DataFrame:
        """The history as a table."""
        return self.to_frame()

    def to_frame(self) -> pd.DataFrame:
        """The history: one row per evaluated round."""
        return pd.DataFrame(self.history)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw stationarity, objective and nonzeros against rounds; write a picture when ``path`` is given."""
        from fedcomposite.plots import draw_histories

        return draw_histories({"run": [self.history]}, path)

    def _line(self) -> str:
        last = self.history[-1]
        return (
            f"{self.status} after {self.rounds} rounds: objective {last['objective']:.6g}, "
            f"stationarity {last['stationarity']:.2e}, {last['nonzeros']} of {len(self.solution)} nonzero"
        )
