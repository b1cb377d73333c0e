"""Composite federated learning: minimise ``mean_i f_i(x) + h(x)`` over silos that keep their data."""

from fedcomposite import algorithms, data, metrics, models, problems, regularizers, runtime, theory
from fedcomposite._version import __version__
from fedcomposite.data import DataError, Silos
from fedcomposite.estimators import solve
from fedcomposite.exporting import export
from fedcomposite.problems import Problem
from fedcomposite.runtime import (
    CheckpointError,
    ClientError,
    DivergenceWarning,
    Interrupted,
    NonSmoothWarning,
    Record,
    Run,
    simulate,
)

__all__ = [
    "CheckpointError",
    "ClientError",
    "DataError",
    "DivergenceWarning",
    "Interrupted",
    "NonSmoothWarning",
    "Problem",
    "Record",
    "Run",
    "Silos",
    "__version__",
    "algorithms",
    "data",
    "export",
    "metrics",
    "models",
    "problems",
    "regularizers",
    "runtime",
    "simulate",
    "solve",
    "theory",
]
