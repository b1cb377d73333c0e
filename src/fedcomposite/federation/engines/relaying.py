"""Between a run and an engine: orders come over the run's socket and go to sites by whatever the engine has.

The relay is the only part that an engine's server runs. It holds no key and no data: what it carries is signed, and it
ends when the run does. ``ask(site, order)`` is the engine's way: a site's session and report, or None.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedcomposite.federation.engines.sockets import Channel

Ask = Callable[[str, bytes | None], tuple[str, bytes | None] | None]
"""Asks a site for its session, or to carry out an order; nothing if it does not answer."""
MISSES = 3
"""Looks in a row that a site may miss before it counts as gone."""
_PATIENCE, _SLOW = 10.0, 2e5  # seconds, and bytes per second, after which an order is given again
_QUICK = 2.0  # seconds within which an engine says that it has no way to a site; later it has, and nothing came back


def start(work: Callable[..., None], *given: Any) -> None:
    """Do something in a thread that holds nobody up, however long it takes."""
    threading.Thread(target=work, args=given, daemon=True).start()


class Relay:
    """One job's relay, from its first look at the sites until the run or the job is over."""

    def __init__(self, path: Path, sites: Sequence[str], ask: Ask, name: str = "") -> None:
        self._sites, self._ask, self._over = list(sites), ask, threading.Event()
        self._heard: dict[str, float] = {}  # when sites last answered anything
        self._carried: dict[str, tuple[str, int]] = {}  # orders on their way: to which site, and their bytes
        self._channel = Channel.to(path)
        self._channel.send({"what": "relay", "name": name})

    def run(self, stop: Callable[[], bool] = lambda: False, every: float = 2.0) -> None:
        """Carry orders until the run has ended, or ``stop()`` says so between two looks."""
        start(self._read)
        for site in self._sites:
            start(self._watch, site, every)
        while not self._over.wait(0.5):
            if stop():
                self._over.set()
        self._channel.close()

    def _read(self) -> None:
        try:
            while True:
                head, body = self._channel.receive()
                start(self._carry, str(head["site"]), str(head["order"]), body)
        except (OSError, KeyError):  # the run is over
            self._over.set()

    def _say(self, head: dict[str, Any], body: bytes = b"") -> None:
        try:
            self._channel.send(head, body)
        except OSError:
            self._over.set()

    def _watch(self, site: str, every: float) -> None:
        """Look whether a site is there, and say what has changed; an answer to an order is a look, too."""
        session, missed = "", 0
        while True:
            while session and (rest := self._heard.get(site, 0.0) + every - time.monotonic()) > 0:
                if self._over.wait(rest):
                    return
            began = time.monotonic()
            found = self._asked(site, None)
            missed = 0 if found is not None else missed + 1
            if found is not None and found[0] != session:
                session = found[0]
                self._say({"what": "came", "site": site, "session": session})
            elif missed >= MISSES and session and not self._busy(site, time.monotonic() - began):
                session = ""
                self._say({"what": "left", "site": site})
            if (missed or not session) and self._over.wait(0.3):
                return

    def _busy(self, site: str, took: float) -> bool:
        """Whether a look may have waited behind an order, or its report, on a slow line."""
        silent = time.monotonic() - self._heard.get(site, 0.0)
        return took > _QUICK and silent < sum(n for to, n in list(self._carried.values()) if to == site) / _SLOW

    def _carry(self, site: str, order: str, body: bytes) -> None:
        self._carried[order] = site, len(body)
        found = self._insisted(site, body) if site in self._sites else None
        del self._carried[order]
        if found is None or found[1] is None:
            why = "the site does not answer" if found is None else "the site was started anew"
            self._say({"what": "lost", "order": order, "why": why})
        else:
            self._say({"what": "report", "order": order}, found[1])

    def _insisted(self, site: str, body: bytes) -> tuple[str, bytes | None] | None:
        """What a site says to an order, which is given again when nothing was heard for long.

        A network may lose an order, or its report, without a word. A site carries it out once, however often it comes.
        """
        answers: queue.SimpleQueue[tuple[str, bytes | None] | None] = queue.SimpleQueue()
        patience = _PATIENCE + len(body) / _SLOW
        while not self._over.is_set():
            start(lambda: answers.put(self._asked(site, body)))
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=patience)
            patience *= 2
        return None

    def _asked(self, site: str, order: bytes | None) -> tuple[str, bytes | None] | None:
        try:
            found = self._ask(site, order)
        except Exception:  # whatever an engine comes up with, the site did not answer
            return None
        if found is not None and (order is None or found[1] is not None):
            self._heard[site] = time.monotonic()
        return found
