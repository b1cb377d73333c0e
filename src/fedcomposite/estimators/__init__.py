"""What an analyst calls: the answer to a problem, with a certificate, and everything around it.

Classes with scikit-learn's conventions are loaded when they are asked for, since scikit-learn takes long to load.
"""

from typing import TYPE_CHECKING, Any

from fedcomposite.estimators.analysis import Analysis, analyse
from fedcomposite.estimators.crossvalidate import CrossValidation, cross_validate, fold_of_samples
from fedcomposite.estimators.errors import Errors
from fedcomposite.estimators.inference import SeparationWarning, UndeterminedWarning, adjusted, bootstrap, confidence
from fedcomposite.estimators.paths import Path, path
from fedcomposite.estimators.predicting import Scored, predict
from fedcomposite.estimators.quality import Quality, Report, quality
from fedcomposite.estimators.refitting import refit
from fedcomposite.estimators.sites import Local, Sites, together
from fedcomposite.estimators.solve import solve
from fedcomposite.estimators.stability import Stability, stability
from fedcomposite.problems.requests import Request, Rows, answer
from fedcomposite.runtime.certificate import certify

if TYPE_CHECKING:
    from fedcomposite.estimators.models import (
        HuberRegression,
        LinearRegression,
        LinearSVC,
        LogisticRegression,
        MultinomialRegression,
        PoissonRegression,
        QuantileRegression,
    )

__all__ = [
    "Analysis",
    "CrossValidation",
    "Errors",
    "HuberRegression",
    "LinearRegression",
    "LinearSVC",
    "Local",
    "LogisticRegression",
    "MultinomialRegression",
    "Path",
    "PoissonRegression",
    "Quality",
    "QuantileRegression",
    "Report",
    "Request",
    "Rows",
    "Scored",
    "SeparationWarning",
    "Sites",
    "Stability",
    "UndeterminedWarning",
    "adjusted",
    "analyse",
    "answer",
    "bootstrap",
    "certify",
    "confidence",
    "cross_validate",
    "fold_of_samples",
    "path",
    "predict",
    "quality",
    "refit",
    "solve",
    "stability",
    "together",
]

_MODELS = [name for name in __all__ if name.endswith(("Regression", "SVC"))]


def __getattr__(name: str) -> Any:
    if name not in _MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedcomposite.estimators import models

    return getattr(models, name)
