"""Where the parties live: all at once or one after another, in one process or several."""

from fedcomposite.runtime.transports.base import Exchange, Gathered, MethodTransport, Parties, StoppedError, Transport
from fedcomposite.runtime.transports.in_process import LocalTransport
from fedcomposite.runtime.transports.loop import ClientError, Loop
from fedcomposite.runtime.transports.silo_answers import SiloTransport, StackedSums
from fedcomposite.runtime.transports.stacked import Stacked

__all__ = [
    "ClientError",
    "Exchange",
    "Gathered",
    "LocalTransport",
    "Loop",
    "MethodTransport",
    "Parties",
    "SiloTransport",
    "Stacked",
    "StackedSums",
    "StoppedError",
    "Transport",
]
