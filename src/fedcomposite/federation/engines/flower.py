"""Flower as an engine, by its public interface: its SuperLink and SuperNodes as they come, ``flwr run`` for a job.

A site's SuperNode starts whatever a bundle brings, so this engine is for coordinators whom the sites trust with that;
the bundle of this package is a label without code. Orders and reports are signed as with any engine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from fedcomposite._version import __version__
from fedcomposite.federation.engines.engine import check_installed
from fedcomposite.federation.engines.processes import EngineProcess, environment
from fedcomposite.federation.engines.relayed_dispatch import RelayedDispatch
from fedcomposite.federation.engines.sockets import place
from fedcomposite.federation.folders import FederationFolder, free_port

if TYPE_CHECKING:
    from fedcomposite.federation.site_folders import SiteFolder

_APPS = "fedcomposite.federation.engines.flower_apps"
_START = 60.0  # seconds for Flower to start a run's ServerApp
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Nothing is sent anywhere, and nothing is installed at run time."""


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def write_label(folder: Path) -> Path:
    """The bundle: one file that names the installed entry points."""
    content = {
        "project": {
            "name": "fedcomposite-federation",
            "version": ".".join(__version__.split(".")[:3]),
            "description": "Entry points of the installed fedcomposite package",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedcomposite",
                    "components": {"serverapp": f"{_APPS}:server", "clientapp": f"{_APPS}:client"},
                    "config": {"job": ""},
                }
            }
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(tomli_w.dumps(content), encoding="utf-8")
    return folder


def serve(federation: FederationFolder, ready: Callable[[], None], log: Callable[[str], None]) -> None:
    """Run Flower's SuperLink until Ctrl-C."""
    check_installed("flower")
    keys = federation.path / "flower"
    command = [
        _program("flower-superlink"), "--host", "0.0.0.0", "--port", str(federation.port),
        "--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.pem"),
        "--ssl-keyfile", str(keys / "server.key"),
    ]  # fmt: skip
    home = {"FLWR_HOME": str(federation.state / "flower"), "FEDCOMPOSITE_FEDERATION": str(federation.path)}
    program = EngineProcess(command, federation.state / "flower" / "superlink.log", {**QUIET, **home})
    program.start()
    try:
        program.wait_for(federation.answers, "Flower's SuperLink", 60.0)
        ready()
        program.keep("Flower's SuperLink", log)
    finally:
        program.stop()


def join(place: SiteFolder, log: Callable[[str], None]) -> None:
    """Run Flower's SuperNode until Ctrl-C."""
    check_installed("flower")
    command = [
        _program("flower-supernode"), "--superlink", place.address, "--root-certificates", str(place.path / "ca.crt"),
        "--host", "127.0.0.1", "--port", str(free_port()),
    ]  # fmt: skip
    home = {"FLWR_HOME": str(place.state / "flower"), "FEDCOMPOSITE_SITE": str(place.path)}
    program = EngineProcess(command, place.state / "flower.log", {**QUIET, **home})
    program.start()
    try:
        log(f"connecting to {place.address}; waiting for work")
        program.keep("Flower's SuperNode", log)
    finally:
        program.stop()


class FlowerEngine(RelayedDispatch):
    """Flower as a run's engine: a ServerApp relays, and another is begun when it is lost."""

    def __init__(self, federation: FederationFolder, job: str, log: Callable[[str], None]) -> None:
        check_installed("flower")
        super().__init__(federation, place(federation.state / "relays", job))
        self._job, self._log, self._over = job, log, threading.Event()
        self._failed = False
        self._since: float | None = None
        threading.Thread(target=self._keep, daemon=True).start()

    def close(self) -> None:
        """Let the ServerApp end: it sees that the run is over."""
        self._over.set()
        super().close()

    def settled(self) -> bool:
        """Whether sites have had the time to say who they are since the ServerApp was there."""
        return self._since is not None and time.monotonic() - self._since > _START

    def _keep(self) -> None:
        begun = -_START
        while not self._over.is_set():
            if not self.relayed():
                self._since = None
            elif self._since is None:
                self._since = time.monotonic()
            if not self.relayed() and time.monotonic() - begun > _START:
                begun = time.monotonic() if self._begin() else begun
            self._over.wait(1.0)

    def _begin(self) -> bool:
        """Submit the label to the SuperLink; whether that was possible."""
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder) / "home"
            home.mkdir()
            known = {"address": self._federation.address,
                     "root-certificates": str(self._federation.path / "flower" / "ca.crt")}  # fmt: skip
            content = {"superlink": {"default": "federation", "federation": known}}
            (home / "config.toml").write_text(tomli_w.dumps(content), encoding="utf-8")
            label = write_label(Path(folder) / "label")
            done = subprocess.run(
                [_program("flwr"), "run", str(label), "federation", "--run-config", f'job="{self._job}"'],
                env=environment({**QUIET, "FLWR_HOME": str(home)}), stdin=subprocess.DEVNULL, capture_output=True,
                text=True, check=False,
            )  # fmt: skip
        if done.returncode and not self._failed:
            lines = (done.stderr or done.stdout).strip().splitlines()
            self._log(f"Flower does not start the run ({lines[-1] if lines else 'no reason given'}); asking again")
        self._failed = bool(done.returncode)
        return not self._failed
