"""The old name of :mod:`fedcomposite.analysis`; it goes with the next version."""

from __future__ import annotations

import warnings
from typing import Any

from fedcomposite import analysis


def __getattr__(name: str) -> Any:
    found = getattr(analysis, name)
    warnings.warn(f"fedcomposite.estimators.{name} is now fedcomposite.analysis.{name}", DeprecationWarning, 2)
    return found
