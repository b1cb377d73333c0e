"""The coordinator's service: Flower's SuperLink, with its administration closed to the network.

Flower serves three interfaces on one port: one for sites (signed by their keys), one that starts runs and registers
sites, and one for the programs of a run. The last two ask for no credentials, and starting a run means running code. So
they are answered only on this machine. Run as ``python -m fedcomposite.federation.superlink`` with the arguments of
``flower-superlink``.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fedcomposite.federation import engine

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

OPEN = ("/v1/fleet/", "/health")
"""What a site may reach; everything else is for this machine."""


class LocalOnly:
    """Answer 403 to other machines outside the sites' interface."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "lifespan" and not scope["path"].startswith(OPEN) and not _is_local(scope):
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"only on the coordinator's own machine\n"})
            return
        await self._app(scope, receive, send)


def _is_local(scope: Scope) -> bool:
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback or bool(server and client[0] == server[0])
    except ValueError:
        return False


def main() -> None:
    """Start the service."""
    engine.check_version()
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    extensions.get_middleware = lambda: (Middleware(LocalOnly),)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    flower_superlink()


def _end_with(parent: int) -> None:
    """Stop when the process that started the service is gone, so that no orphan keeps the port."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def quicken() -> None:
    """Shorten a wait of one second that Flower's Grid makes when a reply is announced before it has arrived."""
    engine.check_version()
    from flwr.supercore.inflatable import inflatable_utils

    defaults = inflatable_utils.pull_objects.__kwdefaults__
    assert defaults is not None
    defaults["initial_backoff"] = 0.05


if __name__ == "__main__":
    main()
