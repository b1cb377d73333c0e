"""Composite federated learning: minimise ``mean_i f_i(x) + h(x)`` over silos that keep their data."""

from fedcomposite import algorithms, data, metrics, models, problems, regularizers, runtime, schedules, theory
from fedcomposite._validation import UserError
from fedcomposite._version import __version__
from fedcomposite.data import DataError, FittedRecipe, Recipe, Silos, describe
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
    "FittedRecipe",
    "GrowthWarning",
    "Interrupted",
    "LoopWarning",
    "NonSmoothWarning",
    "OneClassWarning",
    "Problem",
    "Recipe",
    "Record",
    "Run",
    "Silos",
    "UnnamedError",
    "UserError",
    "__version__",
    "algorithms",
    "callbacks",
    "data",
    "describe",
    "export",
    "metrics",
    "models",
    "problems",
    "regularizers",
    "runtime",
    "schedules",
    "simulate",
    "solve",
    "theory",
]
