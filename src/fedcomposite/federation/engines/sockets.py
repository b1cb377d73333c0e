"""Programs of one account on one machine: a Unix socket that only this account can open, and frames over it.

A frame is a small head (JSON) and a body of bytes. Other accounts cannot connect, and the network has no way here. This
module is what relays in an engine's own processes use: it needs neither PyTorch nor the rest of the package.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import struct
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

from fedcomposite._faults import UserError

_LONGEST = 100  # characters of a socket's path; the system takes 107
_SIZES = struct.Struct(">IQ")
_HEAD = 1 << 20  # bytes of a head, at most
_BODY = 1 << 36  # bytes of a body, at most


def place(folder: Path, name: str) -> Path:
    """Where a socket lies: in the folder it belongs to, or in one of our own where that path is too long."""
    near = folder / f"{name}.sock"
    if len(str(near).encode()) <= _LONGEST:
        return near
    short = hashlib.sha256(str(near).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"fedcomposite-{os.getuid()}-{short}" / "s.sock"


def _check_owner(folder: Path) -> None:
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or stat.S_IMODE(seen.st_mode) & 0o077:
        raise UserError(f"{folder}: must be a folder of this account that no other can enter (chmod 700)")


def listen(path: Path) -> socket.socket:
    """The listening socket, for its owner only; one that a dead process left is replaced."""
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
    return made


def stop_listening(listening: socket.socket, path: Path) -> None:
    """Take no more connections; who waits for one is told."""
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    path.unlink(missing_ok=True)


def is_mine(connection: socket.socket) -> bool:
    """Whether the other end is a process of this account, by what the system says where it says it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    known = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", known)[1]
    return uid in (os.getuid(), 0)


class Channel:
    """Frames over one connection; several threads may send. Any failure is an ``OSError``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._sending = connection, threading.Lock()
        if not is_mine(connection):
            connection.close()
            raise ConnectionError("the other end is another account's")
        self._incoming = connection.makefile("rb")

    @classmethod
    def to(cls, path: Path, timeout: float = 5.0) -> Channel:
        """A connection to a program that listens."""
        _check_owner(path.parent)
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(timeout)
        try:
            made.connect(str(path))
        except OSError:
            made.close()
            raise
        made.settimeout(None)
        return cls(made)

    def send(self, head: dict[str, Any], *body: bytes) -> None:
        """Send a frame, whose body may be in pieces."""
        front = json.dumps(head).encode()
        with self._sending:
            self._connection.sendall(_SIZES.pack(len(front), sum(map(len, body))) + front)
            for piece in body:
                self._connection.sendall(piece)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next frame; waits for it."""
        front, body = _SIZES.unpack(self._read(_SIZES.size))
        if front > _HEAD or body > _BODY:
            raise ConnectionError("not a frame")
        try:
            head = json.loads(self._read(front))
        except ValueError:
            raise ConnectionError("not a frame") from None
        return dict(head), self._read(body)

    def _read(self, size: int) -> bytes:
        try:
            found = self._incoming.read(size)  # which lies where it was received
        except ValueError:  # it was closed here
            found = b""
        if len(found) < size:
            raise ConnectionError("the other end is gone")
        return found

    def close(self) -> None:
        """End the connection, also for who waits for a frame of it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._incoming.close()  # after who reads of it was told


SITE_SOCKET = "site"
"""The name of a site's socket in its state folder."""


class SiteAnswer(NamedTuple):
    """What a site's process says to a relay."""

    site: str
    session: str
    report: bytes | None
    """Its signed report to an order, if it took one."""


def ask_site(path: Path, *order: bytes) -> SiteAnswer:
    """A relay's question at a site's socket: who it is, and its report to an order (in pieces) if there is one."""
    head, body = _asked(path, {"what": "order" if order else "session"}, *order)
    try:
        return SiteAnswer(str(head["site"]), str(head["session"]), body if head["answered"] else None)
    except (KeyError, TypeError):
        raise ConnectionError("not a site's process") from None


def show_job(path: Path, job: bytes, submitter: str) -> str:
    """Have a site's process judge an engine's job; why it is refused, or nothing."""
    head, _ = _asked(path, {"what": "job", "submitter": submitter}, job)
    if not isinstance(head.get("refused"), str):
        raise ConnectionError("not a site's process")
    return str(head["refused"])


def _asked(path: Path, head: dict[str, Any], *body: bytes) -> tuple[dict[str, Any], bytes]:
    channel = Channel.to(path)
    try:
        channel.send(head, *body)
        return channel.receive()
    finally:
        channel.close()
