"""Callbacks: what is done after each record, as ``from fedcomposite.callbacks import EarlyStopping`` finds it.

They live in :mod:`fedcomposite.runtime.callbacks`; this is the short name, with the same objects.
"""

from fedcomposite.runtime.callbacks import (
    REGISTRY,
    AnyCallback,
    BestModel,
    Callback,
    Csv,
    EarlyStopping,
    JsonLines,
    MissingPackageError,
    MLflow,
    OnRecord,
    Progress,
    TensorBoard,
    View,
    WandB,
    build,
)

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
