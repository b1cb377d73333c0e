"""Composite federated learning: minimise ``mean_i f_i(x) + h(x)`` over silos that keep their data."""

from fedcomposite import algorithms, data, metrics, models, problems, regularizers, runtime, theory
from fedcomposite._validation import UserError
from fedcomposite._version import __version__
from fedcomposite.data import DataError, Silos
from fedcomposite.exporting import export
from fedcomposite.problems import Problem
from fedcomposite.runtime import (
    CheckpointError,
    ClientError,
    DivergenceWarning,
    EagerWarning,
    GrowthWarning,
    Interrupted,
    NonSmoothWarning,
    Record,
    Run,
    callbacks,
    simulate,
)

__all__ = [
    "CheckpointError",
    "ClientError",
    "DataError",
    "DivergenceWarning",
    "EagerWarning",
    "GrowthWarning",
    "Interrupted",
    "NonSmoothWarning",
    "Problem",
    "Record",
    "Run",
    "Silos",
    "UserError",
    "__version__",
    "algorithms",
    "callbacks",
    "data",
    "export",
    "metrics",
    "models",
    "problems",
    "regularizers",
    "runtime",
    "simulate",
    "theory",
]
