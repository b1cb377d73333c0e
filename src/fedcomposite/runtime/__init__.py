"""Runtimes: where the rules of a method are carried out."""

from fedcomposite.runtime.checkpoint import CheckpointError
from fedcomposite.runtime.history import Record, Run
from fedcomposite.runtime.simulator import (
    ClientError,
    DivergenceWarning,
    EagerWarning,
    Interrupted,
    NonSmoothWarning,
    Simulator,
    simulate,
)

__all__ = [
    "CheckpointError",
    "ClientError",
    "DivergenceWarning",
    "EagerWarning",
    "Interrupted",
    "NonSmoothWarning",
    "Record",
    "Run",
    "Simulator",
    "simulate",
]
