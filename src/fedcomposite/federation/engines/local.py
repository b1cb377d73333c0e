"""Sites on this machine, without a network."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from fedcomposite.federation import wire
from fedcomposite.federation.engines.engine import Reply
from fedcomposite.federation.wire import Content


class Answering(Protocol):
    """A site, as an engine sees it."""

    name: str

    def answer(self, request: Content) -> Content:
        """Do what a message asks, or refuse it."""

    def note_refusal(self, what: str, reason: str) -> None:
        """Take down, for its own people, what came to it and was refused unread."""


class InProcess:
    """Sites in this process: an order is answered when it is pushed."""

    def __init__(self, sites: Sequence[Answering]) -> None:
        self.sites = {site.name: site for site in sites}
        self._numbers, self._replies = itertools.count(1), dict[str, Reply]()

    def permitted(self) -> list[str]:
        """All of them may take part."""
        return list(self.sites)

    def present(self) -> Mapping[str, str]:
        """All of them are there."""
        return dict.fromkeys(self.sites, "")

    def settled(self) -> bool:
        """Nothing has to start."""
        return True

    def push(self, orders: Mapping[str, bytes]) -> Mapping[str, str]:
        """Have each site answer."""
        made = {site: str(next(self._numbers)) for site in orders}
        for site, payload in orders.items():
            self._replies[made[site]] = self.carried(site, made[site], payload)
        return made

    def carried(self, site: str, order: str, payload: bytes) -> Reply:
        """One order on its way to a site, and what comes back."""
        return Reply(order, wire.encode(self.sites[site].answer(wire.decode(payload))))

    def pull(self, orders: Collection[str]) -> list[Reply]:
        """The replies to these orders; each is given once."""
        return [self._replies.pop(order) for order in orders if order in self._replies]

    def wait(self, orders: Collection[str], seconds: float) -> None:
        """Nothing is ever on its way; only sites that were away may come."""
        time.sleep(min(seconds, 0.05))

    def close(self) -> None:
        """Nothing is open."""
