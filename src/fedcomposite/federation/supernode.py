"""A site's connection to the coordinator: one long-lived process that answers orders itself.

Flower's own SuperNode starts a Python process for every message and unpacks the bundle's code into it. This one keeps
the site's data and problem in memory, looks for orders every tenth of a second while there is a job, opens no port,
and looks into a bundle only to refuse it if it holds code. It speaks the Fleet protocol through internals of the
versions of flwr that :data:`fedcomposite.federation.engine.TESTED` names.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedcomposite.federation import bundle, engine, pki
from fedcomposite.federation.site import Site

T = TypeVar("T")

HEARTBEAT = 10
"""Seconds, the least that the service takes: a site that dies is missed after twice that."""


_ACTIVE = 60.0  # seconds after an order during which the next one is looked for often


class RefusedError(RuntimeError):
    """The coordinator does not accept this site, or the site does not accept the coordinator."""


class _EndedError(Exception):
    """The run of a message is over."""


def reach(address: str, authority: Path, timeout: float = 5.0) -> str:
    """Why the coordinator cannot be reached now, in one line; empty if it can.

    Raises :class:`RefusedError` where waiting does not help: a certificate that the site's authority does not vouch
    for, or a service without TLS.
    """
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError):
        raise RefusedError(f"{authority}: not a readable certificate") from None
    try:
        httpx.get(f"https://{address}/health", verify=context, timeout=timeout)
    except httpx.ConnectError as error:
        text = str(error)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            raise RefusedError(
                f"the service at {address} is not vouched for by {authority.name}; it may be an impostor: "
                f"{text.split(': ')[-1]}"
            ) from None
        if "SSL" in text:
            raise RefusedError(f"the service at {address} does not speak TLS; nothing was sent to it") from None
        return f"{address} cannot be reached"
    except httpx.HTTPError as error:
        return f"{address} does not answer ({type(error).__name__})"
    return ""


class Connection:
    """A site's session with the coordinator."""

    def __init__(
        self, site: Site, address: str, authority: Path, key: Path, log: Callable[[str], None], poll: float = 0.1
    ) -> None:
        engine.check_version()
        self._site, self._address, self._authority, self._log, self._poll = site, address, authority, log, poll
        private = pki.read_site_key(key)
        self._public = public_key_to_bytes(private.public_key())
        self._client = FleetHttpClient.from_server_address(
            address,
            False,
            str(authority),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, private.public_key()),
            ],
        )
        self._verdicts: dict[int, str] = {}  # on the bundles of runs
        self._worked = -_ACTIVE  # when the last order was done
        self._lost = 0.0  # since when the coordinator is silent

    def serve(self) -> None:
        """Answer orders until Ctrl-C; :class:`RefusedError` when the coordinator will not have this site."""
        node = self._activate()
        self._log(f"connected to {self._address}; waiting for work")
        done = threading.Event()
        threading.Thread(target=self._beat, args=(node, done), daemon=True).start()
        try:
            while True:
                answered = self._call(self._client.PullMessages, PullMessagesRequest(node=node))
                if not answered.messages_list:
                    active = time.monotonic() - self._worked < _ACTIVE
                    time.sleep(self._poll if active else max(self._poll, 1.0))
                    continue
                try:
                    self._handle(message_from_proto(answered.messages_list[0]), answered.message_object_trees[0], node)
                except _EndedError:
                    self._log("the run has ended; its last order is dropped")
                except (ObjectPullError, ObjectPushError) as error:
                    self._log(f"a message was lost on the way ({error}); the coordinator will ask again")
        finally:
            done.set()
            with contextlib.suppress(httpx.HTTPError, RuntimeError):
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
            self._client.close()

    def _activate(self) -> Node:
        """Open the session; one that a crash left open lapses after two heartbeats, so that long is waited."""
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT)
        began, told = time.monotonic(), False
        while True:
            try:
                return Node(node_id=self._call(self._client.ActivateNode, request).node_id)
            except (httpx.HTTPStatusError, _EndedError):
                if time.monotonic() - began > 2 * HEARTBEAT + 10:
                    raise RefusedError(
                        f"the coordinator does not accept {self._site.name}: its key is not registered or was revoked, "
                        "or the site is connected elsewhere"
                    ) from None
                if not told:
                    told = True
                    self._log("an earlier session is still open, or this site is not registered; trying again")
                time.sleep(1.0)

    def _call(self, function: Callable[[Any], T], request: Any) -> T:
        """Call the service; wait while it is away, and say so once."""
        while True:
            try:
                answer = function(request)
            except httpx.TransportError:
                now = time.monotonic()
                if not self._lost:
                    self._lost = now
                    self._log(f"no connection to {self._address}; trying until it is back")
                time.sleep(min(5.0, 0.5 + (now - self._lost) / 4))
                continue
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if status == 401:
                    raise RefusedError(f"the coordinator no longer accepts {self._site.name}: it was revoked") from None
                if status == 403:
                    raise _EndedError from None
                if status in (502, 503, 504):
                    time.sleep(1.0)
                    continue
                raise
            if self._lost:
                self._log(f"connected again after {time.monotonic() - self._lost:.0f} s")
                self._lost = 0.0
            return answer

    def _beat(self, node: Node, done: threading.Event) -> None:
        """Send heartbeats, also while a round is being computed."""
        request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
        while not done.wait(0.4 * HEARTBEAT):
            try:
                self._client.SendNodeHeartbeat(request)
            except (httpx.HTTPError, RuntimeError):
                continue  # the main loop notices and says so

    # -- one message --------------------------------------------------------------------------------------------------

    def _handle(self, header: Message, tree: Any, node: Node) -> None:
        run = header.metadata.run_id
        pull = make_pull_object_fn_protobuf(lambda r: self._call(self._client.PullObject, r), node, run)
        contents = pull_objects([t.object_id for t in iterate_object_tree(tree)], pull, initial_backoff=0.05)
        confirm = make_confirm_message_received_fn_protobuf(
            lambda r: self._call(self._client.ConfirmMessageReceived, r), node, run
        )
        confirm(header.metadata.message_id)
        message = inflate_object_from_contents(tree.object_id, contents)
        assert isinstance(message, Message)
        message.metadata.__dict__["_message_id"] = tree.object_id
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, node.node_id, 0
        began = time.perf_counter()
        reason = self._judge(run, node)
        if reason:
            self._log(f"refused: {reason}")
            error = Error(ErrorCode.INVALID_FAB, f"{self._site.name} refuses: {reason}")
            reply = Message(error, reply_to=message)
        else:
            reply = Message(self._site.answer(message.content), reply_to=message)
        self._send(reply, node, time.perf_counter() - began)
        self._worked = time.monotonic()

    def _judge(self, run: int, node: Node) -> str:
        """Why the bundle of a run is not accepted; empty if it is the package's own."""
        if run not in self._verdicts:
            fab = self._call(self._client.GetRun, GetRunRequest(node=node, run_id=run)).run.fab_hash
            request = GetFabRequest(node=node, hash_str=fab, run_id=run)
            try:
                bundle.check(self._call(self._client.GetFab, request).fab.content)
                self._verdicts[run] = ""
            except bundle.BundleError as error:
                self._verdicts[run] = str(error)
        return self._verdicts[run]

    def _send(self, reply: Message, node: Node, seconds: float) -> None:
        run = reply.metadata.run_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
            header = remove_content_from_message(reply) if reply.has_content() else reply
            request = PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(header)],
                message_object_trees=[tree],
                clientapp_runtime_list=[seconds],
            )
            taken = self._call(self._client.PushMessages, request)
            push = make_push_object_fn_protobuf(
                lambda r: self._call(self._client.PushObject, r), node, run, taken.session_id
            )
            push_objects(objects, push, object_ids_to_push=set(taken.objects_to_push))
