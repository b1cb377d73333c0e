"""Records for the trackers that others use: TensorBoard, MLflow, Weights & Biases. All of them work offline.

The packages are extras: ``pip install 'fedcomposite[tensorboard]'``, ``[mlflow]``, ``[wandb]``. Numbers of a record are
logged at its round; a resumed run logs the records of its checkpoint again, so that every tracker run is whole.
"""

from __future__ import annotations

import importlib
import os
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedcomposite._faults import MissingPackageError
from fedcomposite._validation import validate
from fedcomposite.data.fetch import cache_folder
from fedcomposite.files import one_at_a_time
from fedcomposite.runtime.callbacks.base import Callback, View
from fedcomposite.runtime.history import Record


def _package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(f"{name} cannot be imported ({error}): pip install 'fedcomposite[{extra}]'") from None


class _Tracker(Callback):
    """Opens a tracker's run, logs every record, and closes it."""

    _run: ClassVar[Any] = None  # of an instance, between its begin and its end
    parameters: Mapping[str, str]
    """Beside the method and its fields; an experiment adds label, seed, and whether it is a trial of a tuning."""

    def __post_init__(self) -> None:
        validate(self)

    def begin(self, view: View) -> None:
        """Open, and log the past."""
        object.__setattr__(self, "_run", self._open(view))
        for old in view.history:
            self._log(self._run, _numbers(old), int(old["round"]))

    def __call__(self, view: View) -> None:
        record = view.record
        self._log(self._run, _numbers(record), int(record["round"]))

    def end(self, view: View) -> None:
        if (run := self.__dict__.pop("_run", None)) is not None:
            self._close(run)

    @abstractmethod
    def _open(self, view: View) -> Any: ...

    @abstractmethod
    def _log(self, run: Any, numbers: dict[str, float], round: int) -> None: ...

    @abstractmethod
    def _close(self, run: Any) -> None: ...


@dataclass(frozen=True)
class TensorBoard(_Tracker):
    """Scalars in TensorBoard's files below ``folder``."""

    folder: str
    parameters: Mapping[str, str] = field(default_factory=dict)

    def _open(self, view: View) -> Any:
        _package("tensorboard", "tensorboard")
        writer = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter(self.folder)
        writer.add_text("method", repr(view.algorithm))
        for key, value in self.parameters.items():
            writer.add_text(key, value)
        return writer

    def _log(self, run: Any, numbers: dict[str, float], round: int) -> None:
        for name, value in numbers.items():
            run.add_scalar(name, value, round)

    def _close(self, run: Any) -> None:
        run.close()


@dataclass(frozen=True)
class MLflow(_Tracker):
    """A run of an MLflow experiment, on a server or in a local database (``uri = "sqlite:///mlflow.db"``).

    Runs side by side may share a database that is not there yet: one of them makes it, and the others wait.
    """

    experiment: str = "fedcomposite"
    uri: str | None = None
    """Where; MLflow's own setting (``MLFLOW_TRACKING_URI``) if left out."""
    name: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)

    def _open(self, view: View) -> Any:
        mlflow = _package("mlflow", "mlflow")
        # The first look at a new database makes its tables in many small steps; two processes at it spoil it for good.
        with one_at_a_time(f"mlflow {self.uri or mlflow.get_tracking_uri()}"):
            client = mlflow.MlflowClient(tracking_uri=self.uri)
            trial = self.parameters.get("part") == "tuning"
            experiment = f"{self.experiment}, tuning" if trial else self.experiment
            found = client.get_experiment_by_name(experiment)
            number = client.create_experiment(experiment) if found is None else found.experiment_id
        run = client.create_run(number, run_name=self.name).info.run_id
        for key, value in {**_settings(view), **self.parameters}.items():
            client.log_param(run, key, value)
        return client, run

    def _log(self, run: Any, numbers: dict[str, float], round: int) -> None:
        entities = _package("mlflow.entities", "mlflow")
        client, number = run
        now = int(1000 * time.time())
        client.log_batch(number, [entities.Metric(k, v, now, round) for k, v in numbers.items()])

    def _close(self, run: Any) -> None:
        client, number = run
        client.set_terminated(number)


@dataclass(frozen=True)
class WandB(_Tracker):
    """A run of Weights & Biases; ``mode="offline"`` writes files below ``folder`` that ``wandb sync`` sends later.

    If left out, ``folder`` is the run's own in an experiment. A run without one writes where ``WANDB_DIR`` says, else
    into the cache, ``~/.cache/fedcomposite/wandb`` (``FEDCOMPOSITE_CACHE``), never into the working directory.
    """

    project: str = "fedcomposite"
    name: str | None = None
    mode: str = "offline"
    folder: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)

    def _open(self, view: View) -> Any:
        wandb = _package("wandb", "wandb")
        folder = self.folder or os.environ.get("WANDB_DIR") or str(cache_folder())
        os.makedirs(folder, exist_ok=True)  # W&B adds a folder "wandb" to it, or takes a temporary one if it is missing
        return wandb.init(
            project=self.project,
            name=self.name,
            mode=self.mode,
            dir=folder,
            config={**_settings(view), **self.parameters},
        )

    def _log(self, run: Any, numbers: dict[str, float], round: int) -> None:
        run.log(numbers, step=round)

    def _close(self, run: Any) -> None:
        run.finish()


def _numbers(record: Record) -> dict[str, float]:
    return {k: float(v) for k, v in record.items() if isinstance(v, int | float) and k != "round"}


def _settings(view: View) -> dict[str, str]:
    """The method and its fields."""
    fields = {name: str(value) for name, value in view.algorithm.table.items() if name != "name"}
    return {"method": view.algorithm.name, **fields}
