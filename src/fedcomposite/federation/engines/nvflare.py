"""A run over NVIDIA FLARE: it has FLARE start jobs that relay its orders, and starts others when they are lost.

A job has the sites that were there when it began. A site that comes later, or again, gets a job of its own beside the
first; a job or a server that is lost is begun anew when FLARE is there again. The run only sees sites come and go.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fedcomposite.federation.engines import pki
from fedcomposite.federation.engines.engine import EngineError, check_installed
from fedcomposite.federation.engines.nvflare_job_files import write_job
from fedcomposite.federation.engines.relayed_dispatch import RelayedDispatch
from fedcomposite.federation.engines.sockets import place
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.logs import clean

_LOOK = 1.0  # seconds between two looks at FLARE
_AGAIN = 5.0  # seconds before a site that a job has lost gets another one
_START = 60.0  # seconds for a job to start; a site's part of it may come long after the server's


def relay_socket(federation: FederationFolder, job: str) -> Path:
    """Where a run waits for the relays of its jobs."""
    return place(federation.state / "relays", job)


@contextlib.contextmanager
def administration(federation: FederationFolder, timeout: float = 5.0) -> Iterator[Any]:
    """A session with FLARE's server, as the coordinator."""
    made = _session(federation)
    try:
        _connect(made, federation, timeout)
        yield made
    finally:
        _close(made)


def _session(federation: FederationFolder) -> Any:
    """A session that is not connected yet."""
    check_installed("nvflare")
    from nvflare.fuel.flare_api.flare_api import Session

    logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # what matters is said in our own words
    try:
        kit = federation.path / "flare" / "admin"
        made = Session(pki.common_name(kit / "startup" / "client.crt"), str(kit))
    except Exception as error:  # FLARE has many
        raise EngineError(f"{kit}: no kit of FLARE's ({clean(error, 80) or type(error).__name__})") from None
    made.api._print_hci = lambda line: None  # it speaks to a person at FLARE's console
    return made


def _connect(made: Any, federation: FederationFolder, timeout: float) -> None:
    try:
        made.try_connect(timeout)
    except Exception as error:
        raise EngineError(
            f"FLARE's server at {federation.address} does not answer ({clean(error, 80) or type(error).__name__})"
        ) from None


def _close(made: Any) -> None:
    """End a session, also one that never began: else it looks for the server for ever, and its program does not end."""
    with contextlib.suppress(Exception):
        (made if made.api.server_sess_active else made.api).close()


def seen(federation: FederationFolder) -> dict[str, str]:
    """The sites that FLARE's server has, and when each was last heard."""
    with administration(federation) as session:
        found = session.get_system_info().client_info
    return {one.name: f"{datetime.fromtimestamp(float(one.last_connect_time)):%Y-%m-%d %H:%M:%S}" for one in found}


class NvflareEngine(RelayedDispatch):
    """FLARE as a run's engine."""

    def __init__(self, federation: FederationFolder, job: str, log: Callable[[str], None]) -> None:
        super().__init__(federation, relay_socket(federation, job))
        self._job, self._log, self._over = job, log, threading.Event()
        self._begun: dict[str, tuple[list[str], float]] = {}  # jobs that start: the sites to come, and since when
        self._tried: dict[str, float] = {}  # when a site was last given a job
        self._served: set[str] = set()  # jobs that have, or had, a relay
        self._said: set[str] = set()  # of FLARE's words about jobs that sites do not take
        self._lost = self._settled = False
        self._session: Any = None
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """Let the jobs end: their relays see that the run is over, and those without one are aborted."""
        self._served |= self.relayed().keys()
        self._over.set()
        super().close()
        self._keeper.join(10.0)
        if self._session is not None:  # FLARE hangs
            _close(self._session)

    def settled(self) -> bool:
        """Whether every site that FLARE has is in a job, or cannot be."""
        return self._settled and not self._lost

    def _keep(self) -> None:
        """See to it that every site that FLARE has is in a job of this run."""
        while not self._over.is_set():
            try:
                if self._session is None:
                    self._session = _session(self._federation)
                    _connect(self._session, self._federation, 5.0)
                if self._lost:
                    self._log("FLARE's server is back")
                    self._lost = False
                self._look(self._session)
            except Exception as error:  # whatever FLARE raises, it is asked again
                if not self._lost:
                    self._log(f"FLARE does not answer ({clean(error, 120) or type(error).__name__}); asking again")
                self._lost = True
                self._leave()
            self._over.wait(_LOOK)
        for name in self._begun.keys() - self._served:
            with contextlib.suppress(Exception):
                self._session.abort_job(name)
        self._leave()

    def _leave(self) -> None:
        if self._session is not None:
            _close(self._session)
        self._session = None

    def _look(self, session: Any) -> None:
        now, here = time.monotonic(), self.relayed()
        self._served |= here.keys()
        left = {k: ([site for site in v[0] if site not in here.get(k, ())], v[1]) for k, v in self._begun.items()}
        self._begun = {k: v for k, v in left.items() if v[0] and self._starts(session, k, v)}
        online = {one.name for one in session.get_system_info().client_info} & set(self._federation.permitted())
        away = [site for site in self._federation.permitted() if site in online and site not in self.present()]
        starting = {site for sites, _ in self._begun.values() for site in sites}
        waited = {site: now - self._tried.get(site, -_START) for site in away if site not in starting}
        if wanted := [site for site, seconds in waited.items() if seconds >= _AGAIN]:
            self._begun[self._submit(session, wanted)] = wanted, now
            self._tried |= dict.fromkeys(wanted, now)
        self._settled = not starting and all(seconds >= _START for seconds in waited.values())

    def _starts(self, session: Any, name: str, begun: tuple[list[str], float]) -> bool:
        """Whether a job that lacks some of its sites may still get them."""
        try:
            known = session.get_job_meta(name)
        except Exception as error:
            if "connect" in type(error).__name__.lower():
                raise
            return False  # a server that was started anew does not know it
        self._tell_refusals(known.get("job_deploy_detail") or [])
        if time.monotonic() - begun[1] < _START:
            return not str(known.get("status", "")).startswith(("FINISHED", "FAILED"))
        if name not in self.relayed():
            with contextlib.suppress(Exception):
                session.abort_job(name)
        return False

    def _tell_refusals(self, detail: Sequence[str]) -> None:
        """Say once which sites do not take a job, and why."""
        for line in set(map(str, detail)) - self._said:
            self._said.add(line)
            if not line.endswith(": OK"):
                self._log(f"FLARE's job was not taken by {clean(line)}")

    def _submit(self, session: Any, sites: Sequence[str]) -> str:
        with tempfile.TemporaryDirectory() as folder:
            return str(session.submit_job(str(write_job(Path(folder), self._job, sites, self._key))))
