"""The engine that a federation's folder names: what each of the parties' commands does with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedcomposite.federation.engines import flower, local_processes, nvflare, nvflare_parties, sockets
from fedcomposite.federation.engines.engine import Engine, EngineError
from fedcomposite.federation.folders import FederationFolder

if TYPE_CHECKING:
    from fedcomposite.federation.engines.local import Answering
    from fedcomposite.federation.site_folders import SiteFolder

Say = Callable[[str], None]


def open_engine(federation: FederationFolder, job: str, log: Say) -> Engine:
    """A job's way to its sites."""
    if federation.engine == "local":
        return local_processes.LocalEngine(federation, job)
    if federation.engine == "flower":
        return flower.FlowerEngine(federation, job, log)
    return nvflare.NvflareEngine(federation, job, log)


def serve(federation: FederationFolder, ready: Callable[[], None], log: Say) -> None:
    """Run the engine's server until Ctrl-C."""
    if federation.engine == "local":
        raise EngineError("the engine of this federation is 'local': its sites are on this machine, nothing is served")
    _check_port(federation)
    (flower.serve if federation.engine == "flower" else nvflare_parties.serve)(federation, ready, log)


def _check_port(federation: FederationFolder) -> None:
    """Refuse a port that another program has."""
    if not unreachable(federation):
        raise EngineError(f"cannot listen on port {federation.port}: another program has it")


def unreachable(federation: FederationFolder) -> str:
    """Why the engine's server cannot be reached from this machine now; empty if it can."""
    if federation.engine == "local":
        return ""
    if federation.answers():
        return ""
    return f"nothing answers at {federation.address}; is `fedcomposite federation serve` running?"


def join(place: SiteFolder, site: Answering, log: Say, *, beside: bool = False) -> None:
    """Answer orders at the site's socket until Ctrl-C; the engine's client is started, or is there (``beside``)."""
    from fedcomposite.federation.engines.answering import (  # brings PyTorch, which `serve` needs not
        Answers,
        AnswerSocket,
    )

    answers = Answers(site, place.key, place.coordinator, log)
    listening = AnswerSocket(answers, site_socket(place))
    try:
        if place.engine == "local" or beside:
            log("waiting for work")
            while True:
                time.sleep(60.0)
        (flower.join if place.engine == "flower" else nvflare_parties.join)(place, log)
    finally:
        listening.close()


def site_socket(place: SiteFolder) -> Path:
    """Where a site's own process answers."""
    if place.engine == "local":
        return sockets.place(Path(place.address), place.name)
    return sockets.place(place.state / "socket", sockets.SITE_SOCKET)


def seen(federation: FederationFolder) -> dict[str, str] | None:
    """The sites that the engine's server has now, and when each was last heard; none where it does not say (Flower)."""
    if federation.engine == "flower":
        return None
    return local_processes.seen(federation) if federation.engine == "local" else nvflare.seen(federation)


def tell(federation: FederationFolder) -> bool:
    """Have a running server take over who is revoked; false if it does not run, since it asks when it starts."""
    if federation.engine != "nvflare" or unreachable(federation):
        return False
    with nvflare.administration(federation) as session:
        nvflare_parties.apply_revocations(federation, session)
    return True
