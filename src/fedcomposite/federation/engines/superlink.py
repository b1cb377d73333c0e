"""Flower's SuperLink in memory: node numbers and runs of the federation, and the messages of Flower's own SuperNodes.

Sites that run ``join`` exchange their messages with the service directly (``engines.site_api``). A site
that runs Flower's SuperNode (``join --stock``) speaks Flower's Fleet protocol with this SuperLink; the service passes
its orders and replies on. The only bundle there is, is the package's own label. Flower's interfaces for administration
and for programs of a run are not served at all. Everything here knows the internals of the versions of flwr that
:data:`fedcomposite.federation.engines.flower.TESTED` names.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID, Status
from flwr.supercore.constant import NOOP_FEDERATION_ID, NodeStatus, TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedcomposite.federation.engines import bundle, flower

_TTL = 86400.0
PAYLOAD = "fedcomposite"
"""The one record, and the one entry, of a message."""


def carried(content: RecordDict) -> bytes:
    """The bytes that a message carries; none where it carries something else."""
    record = content.get(PAYLOAD)
    found = record.get(PAYLOAD) if isinstance(record, ConfigRecord) else None
    return found if isinstance(found, bytes) else b""


class SuperLink:
    """Nodes, runs and messages in Flower's own state."""

    def __init__(self) -> None:
        flower.check_version()
        os.environ.pop("FLWR_DATABASE", None)
        from flwr.superlink.main import create_app

        self.app: Any = create_app()
        self.app.state.enable_supernode_auth = True
        self._state = self.app.state.linkstate_factory.state()
        self._store = self.app.state.linkstate_factory.objectstore_factory.store()
        label = bundle.archive()
        self._fab = self._state.store_fab(Fab(hashlib.sha256(label).hexdigest(), label, {}))
        self._asked: dict[str, tuple[int, str]] = {}  # messages on their way: their run, and the order's name

    def register(self, name: str, key: ec.EllipticCurvePublicKey) -> int:
        """Make a site a node."""
        known = public_key_to_bytes(key)
        return int(self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, known, 0, name=name))

    def forget(self, node: int) -> None:
        """Take a node out; its key may come again."""
        self._state.delete_node(NOOP_FLWR_AID, node)
        known = self._state.node_public_key_to_node_id
        known.pop(next(k for k, v in known.items() if v == node))

    def begin(self) -> int:
        """A new run, of the package's own bundle."""
        run = self._state.create_run(
            f"{bundle.PUBLISHER}/{bundle.NAME}", bundle.VERSION, self._fab, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID,
            TaskType.SERVER_APP,
        )  # fmt: skip
        task = self._state.task_store[self._state.run_ids[run].run.primary_task_id]
        task.status.status = Status.RUNNING  # its program is `federation run`, which Flower need not start
        return int(run)

    # -- Flower's own SuperNodes --------------------------------------------------------------------------------------

    def present(self) -> dict[int, str]:
        """Nodes that are connected by Flower's protocol, and since when."""
        found = self._state.get_node_info(statuses=[NodeStatus.ONLINE])
        return {int(n.node_id): str(n.last_activated_at) for n in found}

    def send(self, node: int, run: int, order: str, payload: bytes) -> None:
        """Give an order to such a node."""
        metadata = Metadata(
            run_id=run, message_id="", src_node_id=SUPERLINK_NODE_ID, dst_node_id=node, reply_to_message_id="",
            group_id=order, created_at=time.time(), ttl=_TTL, message_type="train",
        )  # fmt: skip
        message = make_message(metadata=metadata, content=RecordDict({PAYLOAD: ConfigRecord({PAYLOAD: payload})}))
        with no_object_id_recompute():
            name = message.object_id
            message.metadata.__dict__["_message_id"] = name
            tree, objects = get_object_tree(message), get_all_nested_objects(message)
            session = self._state.start_session(run)
            self._state.store_message_and_object_tree(remove_content_from_message(message), tree, session)
            for key, one in objects.items():
                self._state.store_object(run, session, key, one.deflate())
        self._asked[name] = run, order

    def replies(self) -> list[tuple[str, bytes | None]]:
        """The orders that such nodes have answered, and their replies; none where a reply was lost."""
        found: list[tuple[str, bytes | None]] = []
        for run in {r for r, _ in self._asked.values()}:
            names = {n for n, (r, _) in self._asked.items() if r == run}
            for reply in self._state.get_message_res(names, run):
                name = reply.metadata.reply_to_message_id
                found.append((self._asked.pop(name)[1], self._content(reply, run)))
                self._state.delete_messages(message_ins_ids={name})
        return found

    def _content(self, reply: Message, run: int) -> bytes | None:
        """The objects of an announced reply; waited for a little, since they follow it."""
        if reply.has_error():
            return None
        name = reply.metadata.message_id
        wanted = [t.object_id for t in iterate_object_tree(self._store.get_object_tree(name))]
        end = time.monotonic() + 5.0
        while True:
            contents = {k: self._state.get_object(run, k) for k in wanted}
            if all(contents.values()):
                message = inflate_object_from_contents(name, contents)
                return carried(message.content) if isinstance(message, Message) else None
            if time.monotonic() > end:
                return None
            time.sleep(0.05)
