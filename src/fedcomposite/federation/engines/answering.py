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

from cryptography.hazmat.primitives.asymmetric import ec

from fedcomposite._validation import UserError
from fedcomposite.federation import wire
from fedcomposite.federation.engines import pki, sockets
from fedcomposite.federation.engines.local import Answering
from fedcomposite.federation.engines.nvflare_job_files import foreign
from fedcomposite.federation.engines.sealing import RepeatedError, Sealed, SealError, Session, StaleError, seal_report
from fedcomposite.federation.engines.sockets import Channel
from fedcomposite.runtime.process import reuse_memory

_KEPT = 16 << 20  # bytes of reports that are kept for orders that come again, beside the last one


class Answers:
    """``answer(bytes) -> bytes`` for one site: what is not signed for it is refused before anything is decoded."""

    def __init__(self, site: Answering, key: Path, coordinator: Path, log: Callable[[str], None]) -> None:
        self._site, self._log, self._coordinator = site, log, coordinator
        self._key, self._trusted = pki.read_private(key), pki.read_public(coordinator)
        self.session, self._one = Session(site.name), threading.Lock()
        self._told: dict[str, Sealed] = {}  # reports to the latest orders

    def answer(self, sealed: bytes) -> Sealed | None:
        """The signed report to a signed order; none where the order has to be signed again for this session.

        An order that comes again, since an engine lost it or its report on the way, is not carried out again.
        """
        with self._one:
            try:
                order, payload = self.session.open_order(self._coordinators_key(), sealed)
            except StaleError:
                return None
            except RepeatedError as error:
                return self._told.get(str(error))
            except SealError as error:
                hint = f"; if the coordinator has a new key, put its {self._coordinator.name} into the site's folder"
                return self._refusal("", str(error), hint)
            try:
                content = wire.decode(payload)
            except wire.WireError:
                return self._refusal(order, "the order cannot be read")
            return self._kept(order, self._sealed(order, self._site.answer(content)))

    def _kept(self, order: str, report: Sealed) -> Sealed:
        """Keep a report for an order that comes again, and of the older ones what is not large."""
        self._told[order] = report
        while len(self._told) > 1 and sum(len(one) for told in self._told.values() for one in told) > _KEPT:
            del self._told[next(iter(self._told))]
        return report

    def _coordinators_key(self) -> ec.EllipticCurvePublicKey:
        """The key that lies here now: one that was replaced counts no more, without a restart."""
        with contextlib.suppress(UserError):  # a file that is being copied
            self._trusted = pki.read_public(self._coordinator)
        return self._trusted

    def judge(self, job: bytes, submitter: str) -> str:
        """Why a job that an engine brings is not let in; nothing if it is the coordinator's."""
        if reason := foreign(job, self._site.name, self._coordinators_key()):
            what = f"a job of the engine, by {wire.clean(submitter, 60)}"
            self._log(f"refused: {what}: {reason}")
            self._site.note_refusal(what, reason)
        return reason

    def _refusal(self, order: str, reason: str, hint: str = "") -> Sealed:
        self._log(f"refused: {reason}{hint}")
        self._site.note_refusal("an order that is not the coordinator's" if not order else "an order", reason)
        return self._sealed(order, wire.content(refusal=f"{reason}{hint}"))

    def _sealed(self, order: str, content: wire.Content) -> Sealed:
        return seal_report(self._key, order, self._site.name, wire.encode(content))


class AnswerSocket:
    """The socket at which a site's relays ask; each connection has a thread."""

    def __init__(self, answers: Answers, path: Path) -> None:
        self._answers, self._path = answers, path
        self._listening = sockets.listen(path)
        reuse_memory()
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
                if head.get("what") == "job":
                    channel.send({"refused": self._answers.judge(body, str(head.get("submitter", "")))})
                    continue
                made = self._answers.answer(body) if head.get("what") == "order" else None
                session = self._answers.session
                told = {"site": session.site, "session": session.name, "answered": made is not None}
                channel.send(told, *(made or []))

    def close(self) -> None:
        """Answer no more."""
        sockets.stop_listening(self._listening, self._path)
