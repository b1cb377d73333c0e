"""A run's way to its sites through the service: orders go into its spool, signed, and replies come back there."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Mapping

from fedcomposite.federation.engines import pki, signing
from fedcomposite.federation.engines.admin_socket import AdminClient, AdminSocketError
from fedcomposite.federation.engines.engine import Reply
from fedcomposite.federation.engines.mailbox import Ticket
from fedcomposite.federation.folders import FederationFolder


class ServiceEngine:
    """The coordinator's own service as an engine."""

    def __init__(self, federation: FederationFolder, job: str) -> None:
        self._job, self._spool = job, federation.spool
        self._key = pki.read_private(federation.order_key)
        self._counter = AdminClient(federation.state)
        self._present: dict[str, list[object]] = self._counter.ask("begin", job=job)["present"]
        self._sent: dict[str, str] = {}  # orders on their way, and to whom
        self._done: list[str] = []
        self._lost: dict[str, str] = {}  # orders that will not be answered, and why
        self._drop: list[str] = []  # replies that were taken

    def close(self) -> None:
        """The job is over: what is on its way is withdrawn."""
        with contextlib.suppress(AdminSocketError):  # a service that is gone has forgotten the job already
            self._counter.ask("end", job=self._job)
        self._counter.close()

    def wait(self, orders: Collection[str], seconds: float) -> None:
        """Wait until one of some orders is answered, or something else is new; at most so long."""
        wanted = [i for i in orders if i in self._sent]
        got = self._counter.ask("collect", job=self._job, orders=wanted, seconds=seconds, drop=self._drop)
        self._drop, self._done, self._present = [], got["done"], got["present"]
        for order in wanted:
            if order in got["unknown"]:
                self._lost[order] = "the service no longer knows the order"
            elif self._sent[order] not in self._present and order not in self._done:
                self._lost[order] = "the connection to the site is gone"

    def present(self) -> Mapping[str, str]:
        """The sites that are there, and their sessions."""
        self.wait([], 0.0)
        return {name: str(session) for name, (_, session) in self._present.items()}

    def push(self, orders: Mapping[str, bytes]) -> Mapping[str, str]:
        """Sign orders and send them."""
        tickets = {}
        for site, payload in orders.items():
            name = uuid.uuid4().hex
            try:
                (self._spool / name).write_bytes(payload)
            except OSError:  # a full disk: the part that there was room for is nobody's
                (self._spool / name).unlink(missing_ok=True)
                raise
            cover = Ticket(id=name, site=site, job=self._job, size=len(payload), digest=signing.digest(payload))
            tickets[site] = cover.sealed(self._key)
            self._sent[name] = site
        self._counter.ask("put", tickets=[t.model_dump() for t in tickets.values()])
        return {site: ticket.id for site, ticket in tickets.items()}

    def pull(self, orders: Collection[str]) -> list[Reply]:
        """The replies that are here, and a word for each order that was lost."""
        wanted = set(orders)
        if not any(i in wanted for i in (*self._done, *self._lost)):
            self.wait(wanted, 0.0)
        found = []
        for order in [i for i in (*self._done, *self._lost) if i in wanted and i in self._sent]:
            del self._sent[order]
            found.append(self._reply(order) if order in self._done else Reply(order, lost=self._lost[order]))
            self._drop.append(order)
            self._lost.pop(order, None)
        self._done = []
        return found

    def _reply(self, order: str) -> Reply:
        path = self._spool / f"{order}.reply"
        report = path.read_bytes()
        path.unlink(missing_ok=True)
        return Reply(order, report)
