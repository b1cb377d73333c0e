"""Differential privacy: what is clipped and noised, what that is worth, and where the noise comes from."""

from fedcomposite._faults import MissingPackageError
from fedcomposite.privacy.accounting import Query, compose, noise_for
from fedcomposite.privacy.budgets import BudgetError, StudyBudget
from fedcomposite.privacy.levels import ClientLevel, Privacy, SampleLevel, build
from fedcomposite.privacy.sources import Counters, Source, System

__all__ = [
    "BudgetError",
    "ClientLevel",
    "Counters",
    "MissingPackageError",
    "Privacy",
    "Query",
    "SampleLevel",
    "Source",
    "StudyBudget",
    "System",
    "build",
    "compose",
    "noise_for",
]
