"""Every error and warning of the package that a caller may want to tell apart, in one place.

* :class:`UserError`, a :class:`ValueError`: what a user can set right. Below it :class:`DataError`,
  :class:`ConfigError` (experiment files), :class:`StoreError` (run folders), :class:`LockedError` (a folder in use),
  :class:`CheckpointError`, :class:`BudgetError` (privacy), :class:`StepError` (a prox step past its limit),
  :class:`MissingPackageError`.
* :class:`FailedError`, a :class:`RuntimeError`: what went wrong in the world. Below it :class:`ClientError` and
  :class:`ExportError`.
* :class:`Interrupted`: Ctrl-C at a run, with what was done.
* Warnings about data: :class:`DataWarning`, :class:`OneClassWarning`, :class:`SeparationWarning`,
  :class:`UndeterminedWarning`; about a run: :class:`DivergenceWarning`, :class:`GrowthWarning`,
  :class:`DeadNetworkWarning`, :class:`NonSmoothWarning`, :class:`TheoryWarning`; about speed:
  :class:`EagerWarning`, :class:`LoopWarning`; :class:`LockWarning`.

They are loaded when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedcomposite._faults import FailedError, MissingPackageError, UserError

if TYPE_CHECKING:
    from fedcomposite.analysis.inference import SeparationWarning, UndeterminedWarning
    from fedcomposite.data.faults import DataError, DataWarning
    from fedcomposite.experiments.runner import TheoryWarning
    from fedcomposite.experiments.store import StoreError
    from fedcomposite.experiments.toml import ConfigError
    from fedcomposite.exporting.errors import ExportError
    from fedcomposite.locks import LockedError, LockWarning
    from fedcomposite.privacy import BudgetError
    from fedcomposite.problems.network.gradients import LoopWarning
    from fedcomposite.problems.problem import OneClassWarning
    from fedcomposite.regularizers.base import StepError
    from fedcomposite.runtime.fit import NonSmoothWarning
    from fedcomposite.runtime.history import DeadNetworkWarning, DivergenceWarning, GrowthWarning, Interrupted
    from fedcomposite.runtime.identity import CheckpointError
    from fedcomposite.runtime.program import EagerWarning
    from fedcomposite.runtime.transports.loop import ClientError

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ClientError",
    "ConfigError",
    "DataError",
    "DataWarning",
    "DeadNetworkWarning",
    "DivergenceWarning",
    "EagerWarning",
    "ExportError",
    "FailedError",
    "GrowthWarning",
    "Interrupted",
    "LockWarning",
    "LockedError",
    "LoopWarning",
    "MissingPackageError",
    "NonSmoothWarning",
    "OneClassWarning",
    "SeparationWarning",
    "StepError",
    "StoreError",
    "TheoryWarning",
    "UndeterminedWarning",
    "UserError",
]

_HOME = {
    "BudgetError": "privacy",
    "CheckpointError": "runtime",
    "ClientError": "runtime",
    "ConfigError": "experiments.toml",
    "DataError": "data.faults",
    "DataWarning": "data.faults",
    "DeadNetworkWarning": "runtime.history",
    "DivergenceWarning": "runtime",
    "EagerWarning": "runtime",
    "ExportError": "exporting.errors",
    "GrowthWarning": "runtime",
    "Interrupted": "runtime",
    "LockWarning": "locks",
    "LockedError": "locks",
    "LoopWarning": "problems.network",
    "NonSmoothWarning": "runtime",
    "OneClassWarning": "problems",
    "SeparationWarning": "analysis.inference",
    "StepError": "regularizers.base",
    "StoreError": "experiments.store",
    "TheoryWarning": "experiments.runner",
    "UndeterminedWarning": "analysis.inference",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedcomposite.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
