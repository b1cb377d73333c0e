"""``serve`` and ``join`` with NVIDIA FLARE: its own server and client below them, in the foreground."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedcomposite.federation.engines.engine import EngineError
from fedcomposite.federation.engines.nvflare import administration
from fedcomposite.federation.engines.processes import EngineProcess
from fedcomposite.federation.folders import FederationFolder

if TYPE_CHECKING:
    from fedcomposite.federation.site_folders import SiteFolder

_FLARE = [sys.executable, "-u", "-m"]
_START = 120.0  # seconds for FLARE to start


def serve(federation: FederationFolder, ready: Callable[[], None], log: Callable[[str], None]) -> None:
    """Run FLARE's server until Ctrl-C; ``ready`` is called when it answers and takes no revoked site."""
    kit = federation.path / "flare" / "server"
    (kit / "transfer").mkdir(exist_ok=True)
    command = [
        *_FLARE, "nvflare.private.fed.app.server.server_train", "-m", str(kit), "-s", "fed_server.json",
        "--set", "secure_train=true", "org=coordinator", "config_folder=config",
    ]  # fmt: skip
    words = federation.state / "flare" / "server.log"
    program = EngineProcess(command, words, {"FEDCOMPOSITE_FEDERATION": str(federation.path)})
    program.start()

    def answers() -> bool:
        if not federation.answers():  # a session takes long to fail
            return False
        try:
            with administration(federation) as session:
                apply_revocations(federation, session)
        except EngineError:
            return False
        return True

    try:
        program.wait_for(answers, "FLARE's server", _START)
        ready()
        program.keep("FLARE's server", log)
    finally:
        program.stop()


def apply_revocations(federation: FederationFolder, session: object) -> None:
    """Have FLARE's server take the sites that the federation's list takes, and no others."""
    for site in federation.sites:
        change = "disable_client" if site in federation.revoked() else "enable_client"
        with contextlib.suppress(Exception):  # FLARE refuses to enable whom it never disabled
            getattr(session, change)(site)


def join(place: SiteFolder, log: Callable[[str], None]) -> None:
    """Run FLARE's client until Ctrl-C, and say when it is connected and when it is not."""
    words, kit = place.state / "flare.log", place.path / "flare"
    command = [
        *_FLARE, "nvflare.private.fed.app.client.client_train", "-m", str(kit), "-s", "fed_client.json",
        "--set", "secure_train=true", f"uid={place.name}", "org=sites", "config_folder=config",
    ]  # fmt: skip
    program = EngineProcess(command, words, {"FEDCOMPOSITE_SITE": str(place.path)})
    told = _Told(words, place.address, log)
    program.start()
    try:
        program.keep("FLARE's client", log, told.look)
    finally:
        program.stop()


class _Told:
    """What FLARE's client writes down, in our own words and once."""

    def __init__(self, path: Path, address: str, log: Callable[[str], None]) -> None:
        self._path, self._address, self._log = path, address, log
        self._at, self._state = path.stat().st_size if path.exists() else 0, ""

    def look(self) -> None:
        """Read what is new."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(min(self._at, self._path.stat().st_size))
            text = file.read().decode(errors="replace")
            self._at = file.tell()
        for line in text.splitlines():
            if "Successfully registered client" in line:
                self._say(f"connected to {self._address}; waiting for work")
            elif "Retrying [" in line and "ACTIVE" in line:
                self._say(f"{self._address} cannot be reached; trying until it is there")

    def _say(self, line: str) -> None:
        if line != self._state:
            self._state = line
            self._log(line)
