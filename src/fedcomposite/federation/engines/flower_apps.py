"""What Flower runs: a ServerApp and a ClientApp that carry orders, by Flower's public interface alone.

Both are installed with the package; the bundle that ``flwr run`` ships is a label that names them. The ServerApp
connects to the run's socket, the ClientApp asks at the socket of ``federation join``: neither reads or signs anything.
"""

from __future__ import annotations

import os
import queue
import time
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedcomposite.federation.engines import sockets
from fedcomposite.federation.engines.relaying import start

FEDERATION, SITE = "FEDCOMPOSITE_FEDERATION", "FEDCOMPOSITE_SITE"
"""Variables that name the folder of ``serve`` and of ``join`` to what Flower starts."""
_RECORD = "fedcomposite"
_NODES = 2.0  # seconds between two looks at who is connected
_POLL = 0.2  # seconds between two looks for replies

server = ServerApp()
client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Ask the site's own process, in a process of Flower's."""
    order = message.content[_RECORD].get("order")
    path = sockets.place(Path(os.environ[SITE]) / "state" / "socket", sockets.SITE_SOCKET)
    made = sockets.ask_site(path, *([order] if isinstance(order, bytes) else []))
    told: dict[str, Any] = {"site": made.site, "session": made.session}
    told |= {} if made.report is None else {"report": made.report}
    return Message(RecordDict({_RECORD: ConfigRecord(told)}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Relay until the run has ended."""
    job = str(context.run_config["job"])
    path = sockets.place(Path(os.environ[FEDERATION]) / "state" / "relays", job)
    try:
        channel = sockets.Channel.to(path)
    except OSError:
        return  # the run that asked for this is gone
    channel.send({"what": "relay", "name": str(context.run_id)})
    GridRelay(grid, channel).run()


class GridRelay:
    """Orders of one run on Flower's Grid, which one thread uses."""

    def __init__(self, grid: Grid, channel: sockets.Channel) -> None:
        self._grid, self._channel = grid, channel
        self._orders: queue.SimpleQueue[tuple[dict[str, Any], bytes] | None] = queue.SimpleQueue()
        self._nodes: dict[int, str] = {}  # connected nodes, and their sites once they said so
        self._sites: dict[str, int] = {}
        self._asked: dict[str, tuple[int, str]] = {}  # messages on their way: to which node, and the order's name

    def run(self) -> None:
        """Carry orders until the run's socket is closed."""
        start(self._read)
        look = 0.0
        while True:
            if time.monotonic() >= look:
                self._look()
                look = time.monotonic() + _NODES
            self._collect()
            try:
                found = self._orders.get(timeout=_POLL)
            except queue.Empty:
                continue
            if found is None:
                return
            head, body = found
            node = self._sites.get(str(head["site"]))
            if node is None:
                self._say({"what": "lost", "order": head["order"], "why": "the site is not connected"})
            else:
                self._push(node, str(head["order"]), {"order": body})

    def _read(self) -> None:
        try:
            while True:
                self._orders.put(self._channel.receive())
        except OSError:
            self._orders.put(None)

    def _say(self, head: dict[str, Any], body: bytes = b"") -> None:
        try:
            self._channel.send(head, body)
        except OSError:
            self._orders.put(None)

    def _push(self, node: int, order: str, content: dict[str, Any]) -> None:
        message = Message(RecordDict({_RECORD: ConfigRecord(content)}), dst_node_id=node, message_type="train")
        (name,) = self._grid.push_messages([message])
        self._asked[name] = node, order

    def _look(self) -> None:
        """Who has come, who has gone."""
        here = set(self._grid.get_node_ids())
        for node in here - self._nodes.keys():
            self._nodes[node] = ""
            self._push(node, "", {"who": "are you"})
        for node in self._nodes.keys() - here:
            site = self._nodes.pop(node)
            if site and self._sites.get(site) == node:
                del self._sites[site]
                self._say({"what": "left", "site": site})

    def _collect(self) -> None:
        for reply in self._grid.pull_messages(list(self._asked)) if self._asked else []:
            node, order = self._asked.pop(reply.metadata.reply_to_message_id, (0, ""))
            said = None if reply.has_error() else reply.content.get(_RECORD)
            if not isinstance(said, ConfigRecord) or "session" not in said:
                self._nodes.pop(node, None)  # asked anew at the next look
                if order:
                    self._say({"what": "lost", "order": order, "why": "the site does not answer"})
                continue
            site, report = str(said["site"]), said.get("report")
            self._nodes[node], self._sites[site] = site, node
            self._say({"what": "came", "site": site, "session": str(said["session"])})
            if isinstance(report, bytes):
                self._say({"what": "report", "order": order}, report)
            elif order:
                self._say({"what": "lost", "order": order, "why": "the site was started anew"})
