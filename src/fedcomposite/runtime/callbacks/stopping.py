"""Ending a run that no longer gets better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedcomposite._validation import Count, validate
from fedcomposite.runtime.callbacks.base import Callback, View
from fedcomposite.runtime.history import Record

_LARGER = ("accuracy", "auc", "f1", "r2", "sparsity")  # what ends like this is better when it is larger


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Stop when a recorded metric has not improved for ``patience`` records.

    It looks at the whole history, so it is right after a resume too.

    Parameters
    ----------
    metric : str
        Any entry of a record: ``"validation_accuracy"``, ``"objective"``.
    patience : int
        Records without improvement after which the run stops.
    mode : {"auto", "min", "max"}
        Whether smaller or larger is better; by default larger for accuracies, AUC, F1, R2 and sparsity.
    min_delta : float
        What counts as an improvement.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=5, features=6, samples=20)
    >>> problem = fc.Problem(silos, loss="logistic")
    >>> stop = fc.callbacks.EarlyStopping("objective", patience=5, min_delta=1e-3)
    >>> run = fc.simulate(problem, fc.algorithms.FedAvg(5, 0.5), rounds=500, callbacks=[stop])
    >>> run.status
    'stopped'
    """

    metric: str
    patience: Count = 10
    mode: Literal["auto", "min", "max"] = "auto"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        validate(self)
        if not self.min_delta >= 0:
            raise ValueError(f"EarlyStopping: min_delta = {self.min_delta}, must be a number >= 0")

    def begin(self, view: View) -> None:
        """Judge the past of a resumed run."""
        if view.history:
            self(view)

    def __call__(self, view: View) -> None:
        """Judge the newest record."""
        history = view.history
        if self.metric not in history[-1]:
            known = ", ".join(k for k, v in history[-1].items() if isinstance(v, int | float))
            raise ValueError(f"EarlyStopping: no {self.metric!r} in the records (they have: {known})")
        best = self._best(history)
        waited = len(history) - 1 - best
        if waited >= self.patience:
            value = history[best][self.metric]
            view.stop(
                f"{self.metric} has not improved for {waited} records (best {value:.6g} in round "
                f"{history[best]['round']})"
            )

    def _best(self, history: list[Record]) -> int:
        """The record with the last improvement."""
        larger = self.metric.endswith(_LARGER) if self.mode == "auto" else self.mode == "max"
        sign, best = -1.0 if larger else 1.0, 0
        for i, record in enumerate(history):
            value, known = sign * record[self.metric], sign * history[best][self.metric]
            if value < known - self.min_delta or known != known:
                best = i
        return best
