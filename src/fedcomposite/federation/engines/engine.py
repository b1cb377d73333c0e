"""What the coordinator asks of whatever carries its orders: bytes to named sites, and bytes back.

At a site the other half is one function, ``answer(bytes) -> bytes``. What the bytes say is nobody's on the way.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol


class EngineError(RuntimeError):
    """An engine that is missing, cannot be started, or refused a command; says what to do."""


_NEEDS = {"nvflare": ("nvflare", "NVIDIA FLARE", "federation"), "flower": ("flwr", "Flower", "flower")}


def check_installed(engine: str) -> None:
    """Refuse an engine whose package is not installed."""
    package, name, extra = _NEEDS.get(engine, ("json", "", ""))
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # it is marked as missing
        found = None
    if found is None:
        raise EngineError(f"this federation needs {name}: pip install 'fedcomposite[{extra}]' (or use --engine local)")


class Reply(NamedTuple):
    """What has become of one order."""

    order: str
    """The name that :meth:`Engine.push` gave it."""
    report: bytes | memoryview | None = None
    """The site's answer; none if the order is lost and has to be sent again."""
    lost: str = ""
    """Why there is none: the engine's word, not the site's."""


class Engine(Protocol):
    """A run's way to its sites. Orders are pushed and replies pulled, so that sites may come, go and be late."""

    def present(self) -> Mapping[str, str]:
        """The sites that are there now, and each one's session, which is another after the site was restarted."""

    def settled(self) -> bool:
        """Whether whoever can be there has had the time to: not while the engine itself starts, or is lost."""

    def push(self, orders: Mapping[str, bytes]) -> Mapping[str, str]:
        """Send each site its order; the orders' names, by site."""

    def pull(self, orders: Collection[str]) -> list[Reply]:
        """What has become of some orders since the last look; each is told once."""

    def wait(self, orders: Collection[str], seconds: float) -> None:
        """Until one of some orders may have been answered, or a site has come or gone; at most so long."""

    def close(self) -> None:
        """The run is over: what is on its way is nobody's."""
