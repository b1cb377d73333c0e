"""Ending a run that no longer gets better, and keeping its best model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedcomposite._validation import Count, validate
from fedcomposite.runtime.callbacks.base import Callback, View
from fedcomposite.runtime.history import Record

_LARGER = ("accuracy", "auc", "f1", "r2", "sparsity")  # what ends like this is better when it is larger


Mode = Literal["auto", "min", "max"]


def _loss(who: str, record: Record, metric: str, mode: Mode) -> float:
    """A recorded number, with its sign turned where larger is better."""
    if metric not in record:
        known = ", ".join(k for k, v in record.items() if isinstance(v, int | float))
        raise ValueError(f"{who}: no {metric!r} in the records (they have: {known})")
    larger = metric.endswith(_LARGER) if mode == "auto" else mode == "max"
    return float(-record[metric] if larger else record[metric])


@dataclass(frozen=True)
class BestModel(Callback):
    """Keep the model of the record that was best in some metric: ``run.best``.

    It has ``round``, ``value``, ``solution`` and ``buffers``; of equal records the first is kept. Checkpoints have it
    too, so it is right after a resume, and a run's folder has it as ``best.safetensors``.

    Parameters
    ----------
    metric : str
        Any entry of a record. A model that is chosen by its test data looks better there than it is: hold out a
        validation part as well (``silos.split(0.2, validation=0.1)``) and take ``"validation_accuracy"``.
    mode : {"auto", "min", "max"}
        Whether smaller or larger is better; by default larger for accuracies, AUC, F1, R2 and sparsity.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=5, features=6, samples=40).split(0.2, validation=0.2)
    >>> best = fc.callbacks.BestModel("validation_accuracy")
    >>> run = fc.simulate(fc.Problem(silos), fc.algorithms.FedAvg(5, 0.5), rounds=20, callbacks=[best])
    >>> run.best.value == max(r.validation_accuracy for r in run.history)
    True
    """

    metric: str
    mode: Mode = "auto"

    def __post_init__(self) -> None:
        validate(self)

    def begin(self, view: View) -> None:
        """Refuse a checkpoint whose best model was chosen by something else."""
        if view.best is not None and view.best.metric != self.metric:
            raise ValueError(
                f"BestModel: the best model so far was chosen by {view.best.metric!r}, not {self.metric!r}; "
                "one metric decides in a run"
            )

    def __call__(self, view: View) -> None:
        record = view.record
        value, best = _loss("BestModel", record, self.metric, self.mode), view.best
        if best is not None and best.metric != self.metric:
            raise ValueError(f"BestModel: both {best.metric!r} and {self.metric!r}; one metric decides in a run")
        known = None if best is None else _loss("BestModel", Record({self.metric: best.value}), self.metric, self.mode)
        if value == value and (known is None or value < known):
            view.keep(self.metric, record[self.metric])


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Stop when a recorded metric has not improved for ``patience`` records.

    It begins with the whole history of a resumed run, so it is right after a resume too.

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
    mode: Mode = "auto"
    min_delta: float = 0.0
    _seen: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        validate(self)
        self.__dict__["_seen"] = {}  # the best record, and how many came after it
        if not self.min_delta >= 0:
            raise ValueError(f"EarlyStopping: min_delta = {self.min_delta}, must be a number >= 0")

    def begin(self, view: View) -> None:
        """Judge the past of a resumed run."""
        self._seen.clear()
        past = view.history
        for record in past:
            self._take(record)
        if past:
            self._judge(view)

    def __call__(self, view: View) -> None:
        self._take(view.record)
        self._judge(view)

    def _take(self, record: Record) -> None:
        """Count the records, and remember the one with the last improvement."""
        best = self._seen.get("best", record)
        value, known_best = (_loss("EarlyStopping", r, self.metric, self.mode) for r in (record, best))
        better = value < known_best - self.min_delta or known_best != known_best
        waited = 0 if better or not self._seen else self._seen["waited"] + 1
        self._seen.update(best=record if better else best, waited=waited)

    def _judge(self, view: View) -> None:
        best, waited = self._seen["best"], self._seen["waited"]
        if waited >= self.patience:
            view.stop(
                f"{self.metric} has not improved for {waited} records (best {best[self.metric]:.6g} in round "
                f"{best['round']})"
            )
