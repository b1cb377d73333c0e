"""Callbacks: what is done after each record, in Python or from ``[[callbacks]]`` of an experiment."""

from typing import Any

from fedcomposite._faults import MissingPackageError
from fedcomposite.registry import Registry, of_class
from fedcomposite.runtime.callbacks.base import AnyCallback, Callback, OnRecord, View
from fedcomposite.runtime.callbacks.progress import Progress
from fedcomposite.runtime.callbacks.stopping import BestModel, EarlyStopping
from fedcomposite.runtime.callbacks.trackers import MLflow, TensorBoard, WandB
from fedcomposite.runtime.callbacks.writers import Csv, JsonLines

REGISTRY: Registry[type[Callback]] = Registry(
    "callback",
    {c.__name__: c for c in (BestModel, Csv, EarlyStopping, JsonLines, MLflow, TensorBoard, WandB)},
    group="fedcomposite.callbacks",
    accept=of_class(Callback),
)


def build(name: str, **fields: Any) -> Callback:
    """Make a callback by name, as ``[[callbacks]]`` of an experiment does."""
    made: Callback = REGISTRY.build(name, fields)
    return made


__all__ = [
    "REGISTRY",
    "AnyCallback",
    "BestModel",
    "Callback",
    "Csv",
    "EarlyStopping",
    "JsonLines",
    "MLflow",
    "MissingPackageError",
    "OnRecord",
    "Progress",
    "TensorBoard",
    "View",
    "WandB",
    "build",
]
