"""Runtimes: where the rules of a method are carried out."""

from fedcomposite.runtime.checkpoint import CheckpointError
from fedcomposite.runtime.cohorts import Cohorts
from fedcomposite.runtime.driver import Driver, StudyDriver
from fedcomposite.runtime.fit import NonSmoothWarning, check_fit
from fedcomposite.runtime.history import DivergenceWarning, GrowthWarning, Interrupted, Record, Run
from fedcomposite.runtime.program import EagerWarning
from fedcomposite.runtime.rounds import Plan, Rounds
from fedcomposite.runtime.simulator import Simulator, simulate
from fedcomposite.runtime.transports import ClientError, Transport

__all__ = [
    "CheckpointError",
    "ClientError",
    "Cohorts",
    "DivergenceWarning",
    "Driver",
    "EagerWarning",
    "GrowthWarning",
    "Interrupted",
    "NonSmoothWarning",
    "Plan",
    "Record",
    "Rounds",
    "Run",
    "Simulator",
    "StudyDriver",
    "Transport",
    "check_fit",
    "simulate",
]
