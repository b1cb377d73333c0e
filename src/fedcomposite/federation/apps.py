"""The entry points that the bundle names: the server's side of a job, and a site behind Flower's own SuperNode."""

from __future__ import annotations

import os

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedcomposite.federation.folder import FederationFolder, SiteFolder

FEDERATION, SITE = "FEDCOMPOSITE_FEDERATION", "FEDCOMPOSITE_SITE"
"""Environment variables that name the coordinator's and the site's folder."""

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out the job that the run names."""
    from fedcomposite.federation.jobs import carry_out
    from fedcomposite.federation.superlink import quicken

    quicken()
    carry_out(grid, FederationFolder(os.environ[FEDERATION]), str(context.run_config["job"]))


@client.train()
def train(message: Message, context: Context) -> Message:
    """Answer one order in a process of its own (the warm executor does without)."""
    from fedcomposite.federation.enrol import open_site

    return Message(open_site(SiteFolder(os.environ[SITE])).answer(message.content), reply_to=message)
