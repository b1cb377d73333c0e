"""What an analyst calls: the answer to a problem, with a certificate, and everything around it.

Classes with scikit-learn's conventions are loaded when they are asked for, since scikit-learn takes long to load.
"""

from typing import TYPE_CHECKING, Any

from fedcomposite.analysis.common_baseline import common_baseline
from fedcomposite.analysis.cross_validation import CrossValidation, cross_validate, fold_of_samples
from fedcomposite.analysis.effects import EffectCurves, effect_curves
from fedcomposite.analysis.imputed import combine_imputations
from fedcomposite.analysis.inference import (
    SeparationWarning,
    UndeterminedWarning,
    adjusted,
    bootstrap,
    confidence,
    covariance,
)
from fedcomposite.analysis.joint_tests import likelihood_ratio_test, wald_test
from fedcomposite.analysis.paths import Path, path
from fedcomposite.analysis.prediction import Scored, predict
from fedcomposite.analysis.quality import Quality, Report, quality
from fedcomposite.analysis.refitting import refit
from fedcomposite.analysis.regression_quality import Errors
from fedcomposite.analysis.site_effects import SiteEffects, by_site, meta_analysis, site_coefficients
from fedcomposite.analysis.solve import solve
from fedcomposite.analysis.stability import Stability, stability
from fedcomposite.analysis.study import Analysis, analyse
from fedcomposite.analysis.survival_curves import (
    EventCurves,
    LogRank,
    baseline_hazard,
    event_curves,
    logrank_test,
    schoenfeld_test,
)
from fedcomposite.analysis.survival_quality import SurvivalQuality
from fedcomposite.analysis.table_one import TableOne, table_one
from fedcomposite.runtime.certificate import certify
from fedcomposite.runtime.driver import Driver
from fedcomposite.runtime.protocol import Request, Rows, answer

if TYPE_CHECKING:
    from fedcomposite.analysis.estimators import (
        CoxRegression,
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
    "CoxRegression",
    "CrossValidation",
    "Driver",
    "EffectCurves",
    "Errors",
    "EventCurves",
    "HuberRegression",
    "LinearRegression",
    "LinearSVC",
    "LogRank",
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
    "SiteEffects",
    "Stability",
    "SurvivalQuality",
    "TableOne",
    "UndeterminedWarning",
    "adjusted",
    "analyse",
    "answer",
    "baseline_hazard",
    "bootstrap",
    "by_site",
    "certify",
    "combine_imputations",
    "common_baseline",
    "confidence",
    "covariance",
    "cross_validate",
    "effect_curves",
    "event_curves",
    "fold_of_samples",
    "likelihood_ratio_test",
    "logrank_test",
    "meta_analysis",
    "path",
    "predict",
    "quality",
    "refit",
    "schoenfeld_test",
    "site_coefficients",
    "solve",
    "stability",
    "table_one",
    "wald_test",
]

_MODELS = [name for name in __all__ if name.endswith(("Regression", "SVC"))]


def __getattr__(name: str) -> Any:
    if name not in _MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedcomposite.analysis import estimators

    return getattr(estimators, name)
