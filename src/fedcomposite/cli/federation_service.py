"""The coordinator's service as a process: started, waited for, its sites registered, and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from fedcomposite.federation import engine
from fedcomposite.federation.apps import FEDERATION
from fedcomposite.federation.folder import FederationFolder
from fedcomposite.federation.supernode import RefusedError, reach


@contextlib.contextmanager
def service(federation: FederationFolder) -> Iterator[None]:
    """The running service, its sites registered."""
    federation.state.mkdir(mode=0o700, exist_ok=True)
    federation.write_client_config()
    if not federation.database.exists():
        federation.forget_nodes()
    server = federation.path / "server"
    command = [
        sys.executable, "-m", "fedcomposite.federation.superlink",
        "--host", federation.bind, "--port", str(federation.port),
        "--ssl-ca-certfile", str(federation.authority),
        "--ssl-certfile", str(server / "server.pem"), "--ssl-keyfile", str(server / "server.key"),
        "--enable-supernode-auth", "--database", str(federation.database),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    environment = engine.environment(federation.home, {FEDERATION: str(federation.path)})
    with (federation.state / "superlink.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_for_service(federation, process)
        wanted = [s for s in federation.sites if s not in federation.nodes() and s not in federation.revoked()]
        with ThreadPoolExecutor(2) as pool:
            for site, node in zip(wanted, pool.map(lambda s: _register(federation, s), wanted), strict=True):
                federation.set_node(site, node)
        yield
    finally:
        stop(process)


def _register(federation: FederationFolder, site: str) -> int:
    key = str(federation.path / "keys" / f"{site}.pub")
    return int(engine.flwr(federation.home, "supernode", "register", key, "federation", "--name", site)["node-id"])


def _wait_for_service(federation: FederationFolder, process: subprocess.Popen[bytes], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while True:
        if process.poll() is not None:
            raise engine.EngineError(f"the service did not start; see {federation.state / 'superlink.log'}")
        with contextlib.suppress(RefusedError):
            if not reach(federation.address, federation.authority, 2.0):
                return
        if time.monotonic() > end:
            raise engine.EngineError(f"the service does not answer; see {federation.state / 'superlink.log'}")
        time.sleep(0.2)


def stop(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """End a process that was started here in a session of its own, and what it started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
