"""What the service knows, in memory: sites and their sessions, orders on their way, replies that have arrived.

Orders and replies lie in a folder of files, so the service's memory does not grow with the model. An order stays in a
site's box until the site's reply is complete: what a broken connection lost is asked for, or sent, again. A reply
arrives in pieces; a piece that comes twice changes nothing. What nobody asks for any more is withdrawn.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, ConfigDict, Field

from fedcomposite.federation.engines import signing

SILENCE = 20.0
"""Seconds without a word after which a site counts as away."""
LAPSE = 60.0
"""Seconds after which the orders of a job that does not ask for replies are withdrawn."""
_ROOM = 16_000_000  # bytes that a reply may have beyond a multiple of its order
_ID = re.compile("[0-9a-f]{32}")


class RefusedRequestError(Exception):
    """An answer to a request that is not carried out."""

    def __init__(self, status: int, reason: str, **more: Any) -> None:
        super().__init__(reason)
        self.status, self.more = status, more


class Ticket(BaseModel):
    """An order's cover: for whom, how large, signed by the coordinator."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    id: str = Field(pattern="^[0-9a-f]{32}$")
    site: str
    job: str
    size: int = Field(ge=0)
    digest: str
    signature: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """What is signed."""
        return "order", self.id, self.site, str(self.size), self.digest

    def sealed(self, key: ec.EllipticCurvePrivateKey) -> Ticket:
        """The same with the coordinator's signature."""
        return self.model_copy(update={"signature": signing.sign(key, *self.words)})

    def vouches_for(self, key: ec.EllipticCurvePublicKey, site: str, payload: bytes) -> bool:
        """Whether the coordinator signed this payload for this site."""
        fits = self.site == site and self.size == len(payload) and self.digest == signing.digest(payload)
        return fits and signing.is_signed(key, self.signature, *self.words)


@dataclass
class Session:
    """One connection of a site: from its challenge to the next."""

    name: str
    address: str
    opened: float
    numbers: signing.Once = field(default_factory=signing.Once)


@dataclass
class Party:
    """A registered site."""

    name: str
    key: ec.EllipticCurvePublicKey
    node: int
    session: Session | None = None
    heard: float = -1e9
    """When it was last heard, by the monotonic clock."""
    left: float = 0.0
    taken_over: list[tuple[float, str, str]] = field(default_factory=list)
    """When a session was replaced that was still alive, and the two addresses."""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def online(self) -> bool:
        """Whether it was heard lately."""
        return self.session is not None and time.monotonic() - self.heard < SILENCE


@dataclass
class _Waiting:
    ticket: Ticket
    received: int = 0


class Mailbox:
    """The state of the service. All calls come from one thread."""

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        shutil.rmtree(spool, ignore_errors=True)
        spool.mkdir(mode=0o700, parents=True)
        self.parties: dict[str, Party] = {}
        self.revoked: set[str] = set()
        self.challenges = signing.Challenges()
        self._orders: dict[str, _Waiting] = {}
        self._done: dict[str, str] = {}  # orders whose reply is here: their job
        self._jobs: dict[str, float] = {}  # when a job was last heard
        self.arrived = asyncio.Event()
        self.elsewhere: Callable[[Ticket], bool] = lambda ticket: False
        """Takes an order to a site that is connected in another way."""
        self.others: Callable[[], dict[str, tuple[int, str]]] = dict
        """Sites that are connected in another way: their node numbers and sessions."""

    # -- sites --------------------------------------------------------------------------------------------------------

    def register(self, wanted: Mapping[str, tuple[ec.EllipticCurvePublicKey, int]], revoked: Iterable[str]) -> None:
        """Take over the list of sites; those that are gone or have another key are out at once."""
        for name, (key, node) in wanted.items():
            if name not in self.parties or self.parties[name].key != key:
                self._forget(name)
                self.parties[name] = Party(name, key, node)
        for name in [n for n in self.parties if n not in wanted]:
            self._forget(name)
        self.revoked = set(revoked)
        self.arrived.set()

    def _forget(self, name: str) -> None:
        if (party := self.parties.pop(name, None)) is not None:
            party.news.set()
            self.withdraw(i for i, one in list(self._orders.items()) if one.ticket.site == name)

    def identify(self, headers: Mapping[str, str], method: str, path: str, address: str) -> Party:
        """The site whose request this is, by the headers alone."""
        name = headers.get(signing.SITE, "")
        party = self.parties.get(name)
        if party is None:
            raise RefusedRequestError(403, "revoked" if name in self.revoked else "unknown")
        if not signing.is_request_signed(party.key, headers, method, path):
            raise RefusedRequestError(403, "unknown")
        session, number = headers.get(signing.SESSION, ""), headers.get(signing.NUMBER, "")
        if path == "/v1/sites/open":
            if not self.challenges.use(session):
                raise RefusedRequestError(401, "session")
            self._open(party, session, address)
        elif party.session is None:
            raise RefusedRequestError(401, "session")
        elif party.session.name != session:
            raise RefusedRequestError(401, "elsewhere" if party.online else "session", address=party.session.address)
        assert party.session is not None
        if not number.isdecimal() or len(number) > 18 or not party.session.numbers.take(int(number)):
            raise RefusedRequestError(401, "number")
        party.heard = time.monotonic()
        return party

    def _open(self, party: Party, session: str, address: str) -> None:
        old = party.session
        if old is not None and party.online:
            party.taken_over = [*party.taken_over[-9:], (time.time(), old.address, address)]
        party.session = Session(session, address, time.time())
        party.news.set()
        self.arrived.set()

    def leave(self, party: Party) -> None:
        """The site has said goodbye."""
        party.session, party.left = None, time.time()
        self.arrived.set()

    # -- orders -------------------------------------------------------------------------------------------------------

    def put(self, tickets: Iterable[Ticket]) -> None:
        """Orders whose payloads lie in the spool; a new one of a job replaces an older one in the site's box."""
        for ticket in tickets:
            if (party := self.parties.get(ticket.site)) is None:
                continue
            self._orders[ticket.id] = _Waiting(ticket)
            if party.online or not self.elsewhere(ticket):
                party.news.set()

    async def next(self, party: Party, seconds: float) -> Ticket | None:
        """The order that a site is to do now, the newest of the oldest job; waits for one."""
        end = time.monotonic() + seconds
        while True:
            party.news.clear()
            mine = [one.ticket for one in self._orders.values() if one.ticket.site == party.name]
            if mine:
                return [t for t in mine if t.job == mine[0].job][-1]
            left = end - time.monotonic()
            session = party.session
            if left <= 0:
                return None
            try:
                await asyncio.wait_for(party.news.wait(), left)
            except TimeoutError:
                return None
            if self.parties.get(party.name) is not party or party.session is not session:
                return None  # revoked or replaced meanwhile: the next request is told

    def piece(self, party: Party, order: str, offset: int, most: int) -> bytes:
        """A part of an order's payload."""
        self._mine(party, order)
        with (self.spool / order).open("rb") as file:
            file.seek(offset)
            return file.read(most)

    def _mine(self, party: Party, order: str) -> _Waiting:
        one = self._orders.get(order)
        if one is None or one.ticket.site != party.name:
            raise RefusedRequestError(410, "over")
        return one

    # -- replies ------------------------------------------------------------------------------------------------------

    def check_piece(self, party: Party, order: str, offset: int, length: int, total: int) -> bool:
        """Whether a piece of a reply is wanted; false if the whole is here already."""
        if order in self._done:
            return False
        one = self._mine(party, order)
        if total > _ROOM + 8 * one.ticket.size or offset + length > total:
            raise RefusedRequestError(413, "too large")
        if offset not in (0, one.received):
            raise RefusedRequestError(409, "another piece", have=one.received)
        if shutil.disk_usage(self.spool).free < 2 * total:
            raise RefusedRequestError(507, "no room")
        return True

    def add_piece(self, party: Party, order: str, offset: int, body: bytes, total: int) -> None:
        """Keep a piece of a reply; the last one completes it."""
        if not self.check_piece(party, order, offset, len(body), total):
            return
        one = self._orders[order]
        part = self.spool / f"{order}.part"
        try:
            with part.open("wb" if offset == 0 else "ab") as file:
                file.write(body)
        except OSError:
            one.received = 0
            part.unlink(missing_ok=True)
            raise RefusedRequestError(507, "no room") from None
        one.received = offset + len(body)
        if one.received == total:
            self._complete(order)

    def bring(self, order: str, payload: bytes | None) -> None:
        """A whole reply that came in another way; without one the order is lost, and its job is told."""
        if order not in self._orders:
            return
        if payload is None:
            self.withdraw([order])
            self.arrived.set()
            return
        (self.spool / f"{order}.part").write_bytes(payload)
        self._complete(order)

    def _complete(self, order: str) -> None:
        """A whole reply lies in the spool: older orders of the same job to this site are no longer wanted."""
        ticket = self._orders.pop(order).ticket
        (self.spool / f"{order}.part").rename(self.spool / f"{order}.reply")
        (self.spool / order).unlink(missing_ok=True)
        self.withdraw(
            i for i, o in list(self._orders.items()) if (o.ticket.site, o.ticket.job) == (ticket.site, ticket.job)
        )
        self._done[order] = ticket.job
        self.arrived.set()

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def collect(self, job: str, orders: list[str], seconds: float) -> list[str]:
        """Those of a job's orders whose replies have arrived; waits for one, or for a change among the sites."""
        self._jobs[job] = time.monotonic()
        self.arrived.clear()
        found = [i for i in orders if i in self._done]
        if not found and seconds > 0:
            try:
                await asyncio.wait_for(self.arrived.wait(), seconds)
            except TimeoutError:
                return []
            found = [i for i in orders if i in self._done]
        return found

    def unknown(self, orders: Iterable[str]) -> list[str]:
        """Orders that are neither on their way nor answered."""
        return [i for i in orders if i not in self._orders and i not in self._done]

    def withdraw(self, orders: Iterable[str]) -> None:
        """Orders, or replies, that nobody wants any more."""
        for order in orders:
            if _ID.fullmatch(order):
                self._orders.pop(order, None)
                self._done.pop(order, None)
                for ending in ("", ".part", ".reply"):
                    (self.spool / f"{order}{ending}").unlink(missing_ok=True)

    def end(self, job: str) -> None:
        """A job is over."""
        self._jobs.pop(job, None)
        self.withdraw([i for i, one in self._orders.items() if one.ticket.job == job])
        self.withdraw([i for i, owner in self._done.items() if owner == job])

    def sweep(self) -> None:
        """End the jobs that were not heard for long."""
        now = time.monotonic()
        for job in [j for j, heard in self._jobs.items() if now - heard > LAPSE]:
            self.end(job)

    def present(self) -> dict[str, tuple[int, str]]:
        """Sites that are there: their node numbers and sessions."""
        here = {p.name: (p.node, p.session.name) for p in self.parties.values() if p.session is not None and p.online}
        return {**self.others(), **here}
