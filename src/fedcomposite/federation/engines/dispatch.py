"""A run's orders on their way: signed, sent by whoever has a way to a site, and what has become of them.

:class:`Dispatch` keeps the books. Who has a way to sites says when they come and go and what they answered, from any
thread; the run's own thread pushes and pulls.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping

from fedcomposite.federation.engines import pki
from fedcomposite.federation.engines.engine import Reply
from fedcomposite.federation.engines.sealing import Sealed, SealError, open_report, seal_order
from fedcomposite.federation.folders import FederationFolder

Way = Callable[[str, str, Sealed], None]
"""Sends an order, by its site, its name and its bytes; an ``OSError`` if the way is gone."""


class Dispatch:
    """What an :class:`~.engine.Engine` is to a run, over ways to sites that come and go."""

    def __init__(self, federation: FederationFolder) -> None:
        self._federation, self._key = federation, pki.read_private(federation.order_key)
        self._news = threading.Condition()
        self._ways: dict[str, tuple[str, Way]] = {}  # by site: its session, and the way to it
        self._sent: dict[str, str] = {}  # orders on their way, and to whom
        self._done: dict[str, Reply] = {}
        self._changed = False

    # -- for who has a way to sites -----------------------------------------------------------------------------------

    def came(self, site: str, session: str, way: Way) -> None:
        """A site is there; another session than before has lost what was sent to it."""
        with self._news:
            known = self._ways.get(site)
            if known is not None and known[0] != session:
                self._lose(site, "the site was started anew")
            self._ways[site] = session, way
            if known is None or known[0] != session:
                self._notify()

    def left(self, site: str, why: str, way: Way) -> None:
        """A site cannot be reached in a way any more."""
        with self._news:
            if site in self._ways and self._ways[site][1] == way:
                del self._ways[site]
                self._lose(site, why)
                self._notify()

    def arrived(self, order: str, sealed: bytes | None, why: str = "") -> None:
        """A report has come, or the word that there will be none."""
        with self._news:
            if (site := self._sent.pop(order, None)) is None:
                return
            self._done[order] = Reply(order, lost=why) if sealed is None else self._opened(order, site, sealed)
            self._notify()

    def _opened(self, order: str, site: str, sealed: bytes) -> Reply:
        try:
            return Reply(order, open_report(pki.read_public(self._federation.public_key(site)), order, site, sealed))
        except SealError:
            pass
        try:  # a site that cannot read an order does not know its name
            return Reply(order, open_report(pki.read_public(self._federation.public_key(site)), "", site, sealed))
        except SealError as error:
            return Reply(order, lost=str(error))

    def _lose(self, site: str, why: str) -> None:
        for order in [o for o, s in self._sent.items() if s == site]:
            del self._sent[order]
            self._done[order] = Reply(order, lost=why)

    def _notify(self) -> None:
        self._changed = True
        self._news.notify_all()

    # -- for the run --------------------------------------------------------------------------------------------------

    def present(self) -> Mapping[str, str]:
        """The sites that are there, and their sessions."""
        with self._news:
            return {site: session for site, (session, _) in self._ways.items()}

    def settled(self) -> bool:
        """Whether the ways that there can be are there; for who opens them to say."""
        return True

    def push(self, orders: Mapping[str, bytes]) -> Mapping[str, str]:
        """Sign orders and send them; those whose site has just gone are lost."""
        made = {site: uuid.uuid4().hex for site in orders}
        for site, payload in orders.items():
            order = made[site]
            with self._news:
                session, way = self._ways.get(site, ("", None))
                self._sent[order] = site
            try:
                if way is None:
                    raise ConnectionError("the site has gone")
                way(site, order, seal_order(self._key, order, site, session, payload))
            except OSError as error:
                self.arrived(order, None, str(error) or type(error).__name__)
        return made

    def pull(self, orders: Collection[str]) -> list[Reply]:
        """What has become of some orders."""
        with self._news:
            return [self._done.pop(order) for order in orders if order in self._done]

    def wait(self, orders: Collection[str], seconds: float) -> None:
        """Until something is new."""
        wanted, end = set(orders), time.monotonic() + seconds
        with self._news:
            while not self._changed and not wanted & self._done.keys():
                left = end - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    break
            self._changed = False

    def close(self) -> None:
        """What is on its way is nobody's."""
        with self._news:
            self._sent, self._done = {}, {}
