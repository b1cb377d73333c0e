"""Where the clients live: all at once or one after another, in one process or several."""

from fedcomposite.runtime.transports.base import Exchange, Gathered, Request, StoppedError, Transport
from fedcomposite.runtime.transports.local import LocalTransport
from fedcomposite.runtime.transports.loop import ClientError, Loop
from fedcomposite.runtime.transports.stacked import Stacked

__all__ = [
    "ClientError",
    "Exchange",
    "Gathered",
    "LocalTransport",
    "Loop",
    "Request",
    "Stacked",
    "StoppedError",
    "Transport",
]
