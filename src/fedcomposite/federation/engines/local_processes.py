"""Sites as processes of this account on this machine, without a network: a run asks at their sockets itself."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from fedcomposite.federation.engines import sockets
from fedcomposite.federation.engines.dispatch import Dispatch
from fedcomposite.federation.engines.sealing import Sealed
from fedcomposite.federation.folders import FederationFolder

_LOOK = 0.5  # seconds between two looks for a site that is not there


class LocalEngine(Dispatch):
    """One thread per site: it watches for the site's process, and a second one carries its orders."""

    def __init__(self, federation: FederationFolder, job: str) -> None:
        super().__init__(federation)
        self._over, self._looked = threading.Event(), set[str]()
        for site in federation.sites:
            threading.Thread(target=self._watch, args=(site, place(federation, site)), daemon=True).start()

    def close(self) -> None:
        self._over.set()
        super().close()

    def settled(self) -> bool:
        """Whether every site was looked for."""
        return self._looked.issuperset(self._federation.sites)

    def _watch(self, site: str, path: Path) -> None:
        orders: queue.SimpleQueue[tuple[str, Sealed]] = queue.SimpleQueue()

        def way(to: str, order: str, sealed: Sealed) -> None:
            orders.put((order, sealed))

        threading.Thread(target=self._carry, args=(orders, path), daemon=True).start()
        while not self._over.wait(_LOOK if site in self.present() else _LOOK / 10):
            try:
                session = sockets.ask_site(path).session
            except OSError:
                self.left(site, "the site's process is gone", way)
            else:
                self.came(site, session, way)
            self._looked.add(site)

    def _carry(self, orders: queue.SimpleQueue[tuple[str, Sealed]], path: Path) -> None:
        while not self._over.is_set():
            order, sealed = orders.get()
            try:
                report = sockets.ask_site(path, *sealed).report
            except OSError:
                self.arrived(order, None, "the site's process is gone")
                continue
            self.arrived(order, report, "the site was started anew")


def seen(federation: FederationFolder) -> dict[str, str]:
    """The sites whose processes answer now."""
    found = {}
    for site in federation.sites:
        try:
            sockets.ask_site(place(federation, site))
        except OSError:
            continue
        found[site] = ""
    return found


def place(federation: FederationFolder, site: str) -> Path:
    """Where the sites of this machine have their sockets."""
    return sockets.place(federation.state / "sites", site)
