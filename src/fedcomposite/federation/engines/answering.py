"""A site's own process: it holds the data, and answers signed orders that a relay of an engine brings to its socket.

The relay (``nvflare_job``, ``flower_apps``, or a run itself on one machine) is another process, without data, keys or
rights of its own: it passes bytes on. However many jobs and relays there are, orders are carried out one after another
here, by the one process that keeps the site's ledger.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from fedcomposite._validation import UserError
from fedcomposite.federation import wire
from fedcomposite.federation.engines import pki, sockets
from fedcomposite.federation.engines.local import Answering
from fedcomposite.federation.engines.sealing import SealError, Session, StaleError, seal_report
from fedcomposite.federation.engines.sockets import Channel


class Answers:
    """``answer(bytes) -> bytes`` for one site: what is not signed for it is refused before anything is decoded."""

    def __init__(self, site: Answering, key: Path, coordinator: Path, log: Callable[[str], None]) -> None:
        self._site, self._log, self._coordinator = site, log, coordinator
        self._key, self._trusted = pki.read_private(key), pki.read_public(coordinator)
        self.session, self._one = Session(site.name), threading.Lock()

    def answer(self, sealed: bytes) -> bytes | None:
        """The signed report to a signed order; none where the order has to be signed again for this session."""
        with self._one:
            try:
                order, payload = self._opened(sealed)
            except StaleError:
                return None
            except SealError as error:
                hint = f"if the coordinator has a new key, put its {self._coordinator.name} into the site's folder"
                return self._refusal("", f"{error}; {hint}")
            try:
                content = wire.decode(payload)
            except wire.WireError:
                return self._refusal(order, "the order cannot be read")
            return self._sealed(order, self._site.answer(content))

    def _opened(self, sealed: bytes) -> tuple[str, bytes]:
        """An order by the coordinator's key that lies here, maybe only since a moment ago."""
        try:
            return self.session.open_order(self._trusted, sealed)
        except StaleError:
            raise
        except SealError:
            with contextlib.suppress(UserError):
                self._trusted = pki.read_public(self._coordinator)
            return self.session.open_order(self._trusted, sealed)

    def _refusal(self, order: str, reason: str) -> bytes:
        self._log(f"refused: {reason}")
        return self._sealed(order, wire.content(refusal=reason))

    def _sealed(self, order: str, content: wire.Content) -> bytes:
        return seal_report(self._key, order, self._site.name, wire.encode(content))


class AnswerSocket:
    """The socket at which a site's relays ask; each connection has a thread."""

    def __init__(self, answers: Answers, path: Path) -> None:
        self._answers, self._path = answers, path
        self._listening = sockets.listen(path)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(Channel(connection)) as channel:
            while True:
                head, body = channel.receive()
                made = self._answers.answer(body) if head.get("what") == "order" else None
                session = self._answers.session
                told = {"site": session.site, "session": session.name, "answered": made is not None}
                channel.send(told, made or b"")

    def close(self) -> None:
        """Answer no more."""
        sockets.stop_listening(self._listening, self._path)
