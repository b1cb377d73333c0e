"""The entry points that the bundle names, for sites behind Flower's own SuperNode."""

from __future__ import annotations

import os

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedcomposite.federation import wire
from fedcomposite.federation.engines.superlink import PAYLOAD, carried
from fedcomposite.federation.folders import SiteFolder

SITE = "FEDCOMPOSITE_SITE"
"""Environment variable that names the site's folder."""

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """The server's side is ``federation run``, which Flower does not start."""
    raise RuntimeError("start the run with: fedcomposite federation run")


@client.train()
def train(message: Message, context: Context) -> Message:
    """Answer one order in a process of its own (``join`` does without)."""
    from fedcomposite.federation.site.enrolment import open_site

    try:
        order = wire.decode(carried(message.content))
    except wire.WireError as error:
        made = wire.content(refusal=str(error))
    else:
        made = open_site(SiteFolder(os.environ[SITE])).answer(order)
    return Message(RecordDict({PAYLOAD: ConfigRecord({PAYLOAD: wire.encode(made)})}), reply_to=message)
