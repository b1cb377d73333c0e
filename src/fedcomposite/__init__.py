"""Composite federated learning: minimise ``mean_i f_i(x) + h(x)`` over silos that keep their data."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from fedcomposite._faults import UserError
from fedcomposite._version import __version__

if TYPE_CHECKING:
    from fedcomposite import (
        aggregators,
        algorithms,
        callbacks,
        compressors,
        data,
        errors,
        metrics,
        models,
        privacy,
        problems,
        regularizers,
        runtime,
        schedules,
        theory,
    )
    from fedcomposite.analysis import (
        CoxRegression,
        HuberRegression,
        LinearRegression,
        LinearSVC,
        LogisticRegression,
        MultinomialRegression,
        PoissonRegression,
        QuantileRegression,
        analyse,
        baseline_hazard,
        bootstrap,
        by_site,
        combine_imputations,
        confidence,
        covariance,
        cross_validate,
        effect_curves,
        event_curves,
        likelihood_ratio_test,
        logrank_test,
        meta_analysis,
        path,
        predict,
        refit,
        schoenfeld_test,
        site_coefficients,
        wald_test,
    )
    from fedcomposite.analysis.quality import quality
    from fedcomposite.analysis.solve import solve
    from fedcomposite.analysis.stability import stability
    from fedcomposite.analysis.table_one import table_one
    from fedcomposite.data import DataError, FittedRecipe, Recipe, Silos, describe
    from fedcomposite.data.faults import DataWarning
    from fedcomposite.experiments.contests import compare, tune
    from fedcomposite.exporting import ExportError, export, prune
    from fedcomposite.problems import OneClassWarning, Problem
    from fedcomposite.problems.network import LoopWarning
    from fedcomposite.reports import write_report
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
        simulate,
    )

__all__ = [
    "CheckpointError",
    "ClientError",
    "CoxRegression",
    "DataError",
    "DataWarning",
    "DivergenceWarning",
    "EagerWarning",
    "ExportError",
    "FittedRecipe",
    "GrowthWarning",
    "HuberRegression",
    "Interrupted",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "LoopWarning",
    "MultinomialRegression",
    "NonSmoothWarning",
    "OneClassWarning",
    "PoissonRegression",
    "Problem",
    "QuantileRegression",
    "Recipe",
    "Record",
    "Run",
    "Silos",
    "UserError",
    "__version__",
    "aggregators",
    "algorithms",
    "analyse",
    "baseline_hazard",
    "bootstrap",
    "by_site",
    "callbacks",
    "combine_imputations",
    "compare",
    "compressors",
    "confidence",
    "covariance",
    "cross_validate",
    "data",
    "describe",
    "effect_curves",
    "errors",
    "event_curves",
    "export",
    "likelihood_ratio_test",
    "logrank_test",
    "meta_analysis",
    "metrics",
    "models",
    "path",
    "predict",
    "privacy",
    "problems",
    "prune",
    "quality",
    "refit",
    "regularizers",
    "runtime",
    "schedules",
    "schoenfeld_test",
    "simulate",
    "site_coefficients",
    "solve",
    "stability",
    "table_one",
    "theory",
    "tune",
    "wald_test",
    "write_report",
]

_ROOMS = {  # where a name lives; a name that is not here is a module of its own
    "data": ("DataError", "FittedRecipe", "Recipe", "Silos", "describe"),
    "data.faults": ("DataWarning",),
    "analysis": (
        "CoxRegression", "HuberRegression", "LinearRegression", "LinearSVC", "LogisticRegression",
        "MultinomialRegression", "PoissonRegression", "QuantileRegression", "analyse", "baseline_hazard", "bootstrap",
        "by_site", "combine_imputations", "confidence", "covariance", "cross_validate", "effect_curves",
        "event_curves", "likelihood_ratio_test", "logrank_test", "meta_analysis", "path", "predict", "quality", "refit",
        "schoenfeld_test", "site_coefficients", "solve", "stability", "table_one", "wald_test",
    ),
    "experiments.contests": ("compare", "tune"),
    "exporting": ("ExportError", "export", "prune"),
    "problems": ("OneClassWarning", "Problem"),
    "problems.network": ("LoopWarning",),
    "reports": ("write_report",),
    "runtime": (
        "CheckpointError", "ClientError", "DivergenceWarning", "EagerWarning", "GrowthWarning", "Interrupted",
        "NonSmoothWarning", "Record", "Run", "simulate",
    ),
}  # fmt: skip
_RENAMED = {"UnnamedError": "CheckpointError"}  # for one version
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

if not TYPE_CHECKING:  # a type checker reads the imports above, and so knows which names do not exist

    def __getattr__(name: str) -> Any:
        """Import what is asked for, and no more: PyTorch alone takes longer than many commands."""
        found = None
        if name in _RENAMED:
            warnings.warn(f"fedcomposite.{name} is now fedcomposite.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
            return __getattr__(_RENAMED[name])
        if name in _HOME:
            found = getattr(importlib.import_module(f"fedcomposite.{_HOME[name]}"), name)
        elif not name.startswith("_"):
            try:
                found = importlib.import_module(f"fedcomposite.{name}")
            except ModuleNotFoundError as missing:
                if missing.name != f"fedcomposite.{name}":
                    raise  # a package that the module needs
        if found is None:
            raise AttributeError(f"module 'fedcomposite' has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
