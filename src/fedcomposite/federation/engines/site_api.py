"""What the network may reach: the sites' requests, each signed. Everything else is refused, from wherever it comes.

==============================================  =====================================================================
``GET /health``                                 whether the service is there
``GET /v1/sites/challenge``                     what a session begins with
``POST /v1/sites/open``                         begin a session
``POST /v1/sites/next``                         the next order; held open until there is one
``GET /v1/sites/order/ID/OFFSET``               a piece of a large order
``PUT /v1/sites/reply/ID/OFFSET/TOTAL``         a piece of a reply
``POST /v1/sites/beat``, ``/v1/sites/leave``    still there; goodbye
==============================================  =====================================================================

Who asks is known from the headers, before anything of the body is read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fedcomposite.federation.engines import signing
from fedcomposite.federation.engines.connection_limit import introduce
from fedcomposite.federation.engines.mailbox import Mailbox, Party, RefusedRequestError

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

HOLD = 10.0
"""Seconds for which a request for an order is held open."""
PIECE = 4 << 20
"""Most bytes of an order or a reply that go with one request."""
INLINE = 256 << 10
"""Orders up to this size come with their ticket."""
_SILENT = 30.0  # seconds without a byte after which a body is given up
_FLEET = "/v1/fleet/"


class SiteApi:
    """The service as the network sees it; ``fleet`` answers Flower's own protocol, if that is wanted at all."""

    def __init__(self, exchange: Mailbox, fleet: App | None = None) -> None:
        self._exchange, self._fleet = exchange, fleet

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if path.startswith(_FLEET) and self._fleet is not None:
            await self._fleet(scope, Limited(receive, 2 * PIECE), send)
            return
        try:
            if (method, path) == ("GET", "/health"):
                await answer(send, b'{"status":"ok"}')
            elif (method, path) == ("GET", "/v1/sites/challenge"):
                await answer(send, json.dumps({"challenge": self._exchange.challenges.make()}).encode())
            elif path.startswith("/v1/sites/"):
                await self._signed(scope, receive, send)
            else:
                raise RefusedRequestError(403, "administration is not on the network")
        except RefusedRequestError as error:
            await answer(send, json.dumps({"reason": str(error), **error.more}).encode(), error.status, close=True)
        except asyncio.CancelledError:
            return  # the service stops

    async def _signed(self, scope: Scope, receive: Any, send: Any) -> None:
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        method, path = scope["method"], scope["path"]
        client = scope.get("client") or ("?", 0)
        party = self._exchange.identify(headers, method, path, client[0])
        introduce(scope, party.name)
        words = path.removeprefix("/v1/sites/").split("/")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not length.isdecimal() or int(length) > PIECE:
            raise RefusedRequestError(413, "too large")
        match method, words:
            case "PUT", ["reply", order, offset, total]:
                where = _number(offset), int(length), _number(total)
                wanted = self._exchange.check_piece(party, order, *where)
                body = await self._body(receive, int(length), headers)
                if wanted:
                    self._exchange.add_piece(party, order, where[0], body, where[2])
                await answer(send, b"{}")
            case "GET", ["order", order, offset]:
                await answer(send, self._exchange.piece(party, order, _number(offset), PIECE))
            case "POST", ["next"]:
                await self._body(receive, int(length), headers)
                await self._next(party, send)
            case "POST", ["open" | "beat" | "leave" as what]:
                await self._body(receive, int(length), headers)
                if what == "leave":
                    self._exchange.leave(party)
                await answer(send, b"{}")
            case _:
                raise RefusedRequestError(404, "no such request")

    async def _next(self, party: Party, send: Any) -> None:
        ticket = await self._exchange.next(party, HOLD)
        if ticket is None:
            await answer(send, b"")
            return
        cover = ticket.model_dump_json().encode() + b"\n"
        small = ticket.size <= INLINE
        await answer(send, cover + (self._exchange.piece(party, ticket.id, 0, INLINE) if small else b""))

    @staticmethod
    async def _body(receive: Any, length: int, headers: dict[str, str]) -> bytes:
        parts, got = [], 0
        while True:
            try:
                event = await asyncio.wait_for(receive(), _SILENT)
            except TimeoutError:
                raise RefusedRequestError(408, "too slow") from None
            if event["type"] == "http.disconnect":
                raise RefusedRequestError(400, "not complete")
            parts.append(event.get("body", b""))
            got += len(parts[-1])
            if got > length:
                raise RefusedRequestError(413, "too large")
            if not event.get("more_body"):
                break
        body = b"".join(parts)
        if signing.digest(body) != headers.get(signing.DIGEST):
            raise RefusedRequestError(403, "another body")
        return body


class Limited:
    """Reads a body that is not larger than a limit."""

    def __init__(self, receive: Any, most: int) -> None:
        self._receive, self._left = receive, most

    async def __call__(self) -> Any:
        """The next part."""
        event = await asyncio.wait_for(self._receive(), _SILENT)
        self._left -= len(event.get("body", b""))
        if self._left < 0:
            return {"type": "http.disconnect"}
        return event


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 15:
        raise RefusedRequestError(400, "not a number")
    return int(text)


async def answer(send: Any, body: bytes, status: int = 200, close: bool = False) -> None:
    """One whole answer."""
    headers = [(b"content-length", str(len(body)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
