"""Composite federated learning: minimise ``mean_i f_i(x) + h(x)`` over silos that keep their data."""

from fedcomposite import (
    aggregators,
    algorithms,
    data,
    metrics,
    models,
    privacy,
    problems,
    regularizers,
    runtime,
    schedules,
    theory,
)
from fedcomposite._validation import UserError
from fedcomposite._version import __version__
from fedcomposite.data import DataError, Silos
from fedcomposite.data.faults import DataWarning
from fedcomposite.estimators import solve
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
    "aggregators",
    "algorithms",
    "callbacks",
    "data",
    "export",
    "metrics",
    "models",
    "privacy",
    "problems",
    "regularizers",
    "runtime",
    "schedules",
    "simulate",
    "solve",
    "theory",
]
