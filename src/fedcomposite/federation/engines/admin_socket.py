"""What the coordinator's own account may ask of the service, over a Unix socket that only this account can open.

Runs give their orders and fetch replies here, and the lists of sites are renewed. Payloads go through files beside the
socket. Other accounts of the machine cannot connect, and the network has no way here.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from fedcomposite._validation import UserError
from fedcomposite.federation.engines.mailbox import Mailbox, Ticket
from fedcomposite.federation.engines.site_api import Scope, answer

_LONGEST = 100  # characters of a socket's path; the system takes 107


def place(state: Path) -> Path:
    """Where the socket of a federation lies: in its state folder, or where that path is too long in one of our own."""
    near = state / "office.sock"
    if len(str(near).encode()) <= _LONGEST:
        return near
    short = hashlib.sha256(str(state).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"fedcomposite-{os.getuid()}-{short}" / "office.sock"


def _check_owner(folder: Path) -> None:
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or stat.S_IMODE(seen.st_mode) & 0o077:
        raise UserError(f"{folder}: must be a folder of this account that no other can enter (chmod 700)")


def listen(state: Path) -> socket.socket:
    """The listening socket, for its owner only; one that a dead service left is replaced."""
    path = place(state)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(path.parent)
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        made.bind(str(path))
    finally:
        os.umask(mask)
    made.listen(64)
    made.setblocking(False)
    return made


def is_mine(connection: socket.socket) -> bool:
    """Whether the other end is a process of this account, by what the system says where it says it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    known = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", known)[1]
    return uid in (os.getuid(), 0)


class AdminSocket:
    """The service as its owner sees it."""

    def __init__(self, exchange: Mailbox, reload: Callable[[], None], begin: Callable[[str], int]) -> None:
        self._exchange, self._reload, self._begin = exchange, reload, begin

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer one request; a mistake in it is an error 400 with its reason."""
        if scope["type"] != "http":
            return
        parts = []
        while True:
            event = await receive()
            parts.append(event.get("body", b""))
            if not event.get("more_body"):
                break
        try:
            given = json.loads(b"".join(parts) or b"{}")
            found = await self._do(scope["path"], given)
        except (ValueError, KeyError, TypeError, OSError) as error:
            await answer(send, json.dumps({"reason": f"{type(error).__name__}: {error}"}).encode(), 400)
            return
        await answer(send, json.dumps(found).encode())

    async def _do(self, path: str, given: dict[str, Any]) -> dict[str, Any]:
        exchange = self._exchange
        match path:
            case "/begin":
                return {"run": self._begin(given["job"]), **self._present()}
            case "/end":
                exchange.end(given["job"])
                return {}
            case "/put":
                exchange.put([Ticket.model_validate(t) for t in given["tickets"]])
                return {}
            case "/collect":
                exchange.withdraw(given["drop"])
                done = await exchange.collect(given["job"], given["orders"], float(given["seconds"]))
                return {"done": done, "unknown": exchange.unknown(given["orders"]), **self._present()}
            case "/reload":
                self._reload()
                return {}
            case "/status":
                return {"sites": [self._describe(p.name) for p in exchange.parties.values()], "pid": os.getpid()}
        raise ValueError(f"no {path}")

    def _present(self) -> dict[str, Any]:
        return {"present": {k: list(v) for k, v in self._exchange.present().items()}}

    def _describe(self, name: str) -> dict[str, Any]:
        party = self._exchange.parties[name]
        here = party.session
        return {
            "site": name,
            "online": name in self._exchange.present(),
            "address": here.address if here else "",
            "opened": here.opened if here else 0.0,
            "silent": time.monotonic() - party.heard,
            "left": party.left,
            "taken_over": party.taken_over,
        }


class AdminSocketError(RuntimeError):
    """The service is not there, or does not do what it was asked."""


class AdminClient:
    """The way of the owner's programs to the service."""

    def __init__(self, state: Path) -> None:
        path = place(state)
        try:
            _check_owner(path.parent)
            with socket.socket(socket.AF_UNIX) as trial:
                trial.connect(str(path))
        except (FileNotFoundError, ConnectionError):
            raise AdminSocketError("the service does not run") from None
        self._client = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60.0, trust_env=False)

    def ask(self, what: str, **given: Any) -> dict[str, Any]:
        """Ask the service for something."""
        try:
            got = self._client.post(f"http://service/{what}", content=json.dumps(given))
        except httpx.TransportError as error:
            raise AdminSocketError(f"the service does not answer ({type(error).__name__})") from None
        found: dict[str, Any] = got.json()
        if got.status_code != 200:
            raise AdminSocketError(f"the service refuses: {found.get('reason')}")
        return found

    def close(self) -> None:
        """Let the connection go."""
        self._client.close()
