"""Flower's Grid for a run: orders go into the service's spool, signed, and replies come back the same way."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedcomposite.federation.engines import pki, signing
from fedcomposite.federation.engines.admin_socket import AdminClient, AdminSocketError
from fedcomposite.federation.engines.mailbox import Ticket
from fedcomposite.federation.engines.parcel import parts, unpack
from fedcomposite.federation.folders import FederationFolder


@dataclass(frozen=True)
class _Sent:
    site: str
    node: int
    group: str


class ServiceGrid(Grid):
    """A job's way to its sites."""

    def __init__(self, federation: FederationFolder, job: str) -> None:
        self._job, self._spool = job, federation.spool
        self._key = pki.read_private(federation.order_key)
        self._names = {node: name for name, node in federation.nodes().items()}
        self._counter = AdminClient(federation.state)
        begun = self._counter.ask("begin", job=job)
        self._present: dict[str, list[object]] = begun["present"]
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = begun["run"], SUPERLINK_NODE_ID, 0
        self._sent: dict[str, _Sent] = {}
        self._done: list[str] = []
        self._lost: dict[str, str] = {}  # orders that will not be answered, and why
        self._drop: list[str] = []  # replies that were taken

    def close(self) -> None:
        """The job is over: what is on its way is withdrawn."""
        with contextlib.suppress(AdminSocketError):  # a service that is gone has forgotten the job already
            self._counter.ask("end", job=self._job)
        self._counter.close()

    def wait(self, orders: Iterable[str], seconds: float) -> None:
        """Wait until one of some orders is answered, or something else is new; at most so long."""
        wanted = [i for i in orders if i in self._sent]
        got = self._counter.ask("collect", job=self._job, orders=wanted, seconds=seconds, drop=self._drop)
        self._drop, self._done, self._present = [], got["done"], got["present"]
        for order in wanted:
            if order in got["unknown"]:
                self._lost[order] = "the service no longer knows the order"
            elif self._sent[order].site not in self._present and order not in self._done:
                self._lost[order] = "the connection to the site is gone"

    # -- Flower's interface -------------------------------------------------------------------------------------------

    def get_nodes(self) -> Iterable[NodeInfo]:
        """The sites that are there; ``last_activated_at`` names their session."""
        self.wait([], 0.0)
        return [NodeInfo(node_id=int(str(node)), name=name, last_activated_at=str(session))
                for name, (node, session) in self._present.items()]  # fmt: skip

    def get_node_ids(self) -> Iterable[int]:
        """Their numbers."""
        return [node.node_id for node in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send orders; returns their names."""
        tickets = []
        for message in messages:
            node, group = message.metadata.dst_node_id, message.metadata.group_id
            payload, name = parts(message.content), uuid.uuid4().hex
            site = self._names[node]
            try:
                with (self._spool / name).open("wb") as file:
                    file.writelines(payload)
            except OSError:  # a full disk: the part that there was room for is nobody's
                (self._spool / name).unlink(missing_ok=True)
                raise
            size, seal = sum(map(len, payload)), signing.digest(*payload)
            cover = Ticket(id=name, site=site, job=self._job, group=group, size=size, digest=seal)
            tickets.append(cover.sealed(self._key))
            self._sent[name] = _Sent(site, node, group)
        self._counter.ask("put", tickets=[t.model_dump() for t in tickets])
        return [t.id for t in tickets]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are here, and an error for each order that was lost."""
        wanted = set(message_ids)
        if not any(i in wanted for i in (*self._done, *self._lost)):
            self.wait(wanted, 0.0)
        found = []
        for order in [i for i in (*self._done, *self._lost) if i in wanted and i in self._sent]:
            sent = self._sent.pop(order)
            if order in self._done:
                found.append(self._reply(order, sent))
            else:
                error = Error(ErrorCode.NODE_UNAVAILABLE, self._lost[order])
                found.append(make_message(metadata=self._metadata(order, sent), error=error))
            self._drop.append(order)
            self._lost.pop(order, None)
        self._done = []
        return found

    def _reply(self, order: str, sent: _Sent) -> Message:
        path = self._spool / f"{order}.reply"
        try:
            content = unpack(path.read_bytes())
        except ValueError:
            content = RecordDict()  # refused in the site's name: nothing that a site sends may stop a run
        path.unlink(missing_ok=True)
        return make_message(metadata=self._metadata(order, sent), content=content)

    @staticmethod
    def _metadata(order: str, sent: _Sent) -> Metadata:
        return Metadata(
            run_id=TaskIdentity.run_id, message_id=uuid.uuid4().hex, src_node_id=sent.node,
            dst_node_id=SUPERLINK_NODE_ID, reply_to_message_id=order, group_id=sent.group, created_at=time.time(),
            ttl=86400.0, message_type="train",
        )  # fmt: skip

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send orders and wait for their replies."""
        pending = set(self.push_messages(messages))
        found: list[Message] = []
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while pending and time.monotonic() < end:
            self.wait(pending, 1.0)
            got = list(self.pull_messages(pending))
            pending -= {m.metadata.reply_to_message_id for m in got}
            found += got
        return found

    def set_run(self, run: Run) -> None:
        """A run has one Grid, made for it."""

    @property
    def run(self) -> Run:
        """Flower's description of the run."""
        return Run.create_empty(TaskIdentity.run_id)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Flower's old way to make a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)
