"""The way in from the network: connections of strangers are few and short.

A stranger is who has not shown a signed request yet, from the first packet on: before TLS, within it, or after it. When
there are too many, the one that has waited longest gives way, of the address that has most of them. So whoever speaks
at once is served, however many others keep silent. A site's own connections are counted by site.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter as Tally
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

STRANGERS, PER_SITE = 256, 16
"""Most connections at once of those who are not known, and of one site."""
_HEADERS, _HANDSHAKE = 10.0, 10.0  # seconds


class Newcomer:
    """A connection: from where it is, and how it is ended."""

    def __init__(self, address: str) -> None:
        self.address, self.site = address, ""
        self.end: Callable[[], object] = lambda: None


class ConnectionLimit:
    """Who is connected."""

    def __init__(self) -> None:
        self._strangers: dict[Newcomer, None] = {}  # in the order of their coming
        self._sites: dict[str, dict[Newcomer, None]] = {}

    def come(self, guest: Newcomer) -> None:
        """Somebody connects."""
        self._strangers[guest] = None
        if len(self._strangers) > STRANGERS:
            self.make_room()

    def make_room(self) -> None:
        """End the connection of the stranger who has waited longest, of the address that has most."""
        if each := Tally(g.address for g in self._strangers):
            most = max(each, key=each.__getitem__)
            oldest = next(g for g in self._strangers if g.address == most)
            self.leave(oldest)
            oldest.end()

    def know(self, guest: Newcomer, site: str) -> None:
        """Somebody has shown a site's signature; the oldest connection gives way where the site has too many."""
        if guest not in self._strangers:
            return
        self.leave(guest)
        guest.site = site
        mine = self._sites.setdefault(site, {})
        mine[guest] = None
        if len(mine) > PER_SITE:
            oldest = next(iter(mine))
            self.leave(oldest)
            oldest.end()

    def leave(self, guest: Newcomer) -> None:
        """A connection is over, or no longer counted."""
        self._strangers.pop(guest, None)
        mine = self._sites.get(guest.site, {})
        mine.pop(guest, None)
        if guest.site and not mine:
            self._sites.pop(guest.site, None)

    async def open(
        self, listening: socket.socket, context: ssl.SSLContext, make: Callable[[Newcomer], asyncio.Protocol]
    ) -> None:
        """Take connections until cancelled."""
        loop = asyncio.get_running_loop()
        welcomes: set[asyncio.Task[None]] = set()
        while True:
            try:
                raw, address = await loop.sock_accept(listening)
            except OSError:  # no more files for this process, or a connection that is gone already
                self.make_room()
                await asyncio.sleep(0.1)
                continue
            guest = Newcomer(address[0])
            task = loop.create_task(self._welcome(raw, guest, context, make))
            welcomes.add(task)
            task.add_done_callback(welcomes.discard)
            guest.end = task.cancel
            self.come(guest)
            await asyncio.sleep(0)  # an accepted connection does not give the others their turn by itself

    async def _welcome(
        self, raw: socket.socket, guest: Newcomer, context: ssl.SSLContext, make: Callable[[Newcomer], asyncio.Protocol]
    ) -> None:
        """The TLS handshake."""
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: make(guest), raw, ssl=context, ssl_handshake_timeout=_HANDSHAKE)
        except OSError:
            self.leave(guest)


class Guarded(H11Protocol):
    """A connection that is counted, and has little time to say what it wants."""

    _late: asyncio.TimerHandle | None = None

    def __init__(self, config: Config, state: ServerState, door: ConnectionLimit, guest: Newcomer) -> None:
        super().__init__(config, state, {"know": lambda site: door.know(guest, site)})
        self._door, self._guest = door, guest

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._guest.end = transport.abort
        self._late = self.loop.call_later(_HEADERS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Give the headers of a request their time."""
        super().data_received(data)
        asked = self.cycle is not None and not self.cycle.response_complete
        if self._late is not None and asked:
            self._late.cancel()
            self._late = None
        elif self._late is None and not asked and not self.transport.is_closing():
            self._late = self.loop.call_later(_HEADERS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._late is not None:
            self._late.cancel()
        self._door.leave(self._guest)
        super().connection_lost(exc)


def introduce(scope: Any, site: str) -> None:
    """Tell the door whose connection a request came over."""
    if know := (scope.get("state") or {}).get("know"):
        know(site)
