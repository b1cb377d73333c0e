"""Composite federated learning: minimise ``mean_i f_i(x) + h(x)`` over silos that keep their data."""

from fedcomposite import algorithms, data, metrics, models, problems, regularizers, runtime, schedules, theory
from fedcomposite._validation import UserError
from fedcomposite._version import __version__
from fedcomposite.data import DataError, Silos
from fedcomposite.data.faults import DataWarning
from fedcomposite.estimators import cross_validate, path, refit, solve
from fedcomposite.exporting import ExportError, export
from fedcomposite.problems import OneClassWarning, Problem
from fedcomposite.problems.network import LoopWarning
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
    UnnamedError,
    callbacks,
    simulate,
)

__all__ = [
    "CheckpointError",
    "ClientError",
    "DataError",
    "DataWarning",
    "DivergenceWarning",
    "EagerWarning",
    "ExportError",
    "GrowthWarning",
    "Interrupted",
    "LoopWarning",
    "NonSmoothWarning",
    "OneClassWarning",
    "Problem",
    "Record",
    "Run",
    "Silos",
    "UnnamedError",
    "UserError",
    "__version__",
    "algorithms",
    "callbacks",
    "cross_validate",
    "data",
    "export",
    "metrics",
    "models",
    "path",
    "problems",
    "refit",
    "regularizers",
    "runtime",
    "schedules",
    "simulate",
    "solve",
    "theory",
]
