"""The coordinator's service: one process, one port for the sites (TLS), one Unix socket for its owner.

Nothing about the address of a request decides what it may do, so proxies, NAT and the variables of the environment that
speak of them change nothing. Before the service says that it serves, it asks itself, as somebody from outside, for what
must be refused. Connections, the size of headers and the time for them are limited before anything is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, cast

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from fedcomposite.federation.coordinator.monitor import Monitor
from fedcomposite.federation.engines import admin_socket, certificate_lifetimes, flower, pki
from fedcomposite.federation.engines.connection_limit import ConnectionLimit, Guarded
from fedcomposite.federation.engines.mailbox import Mailbox, Ticket
from fedcomposite.federation.engines.site_api import App, SiteApi
from fedcomposite.federation.engines.superlink import SuperLink
from fedcomposite.federation.folders import FederationFolder

_IDLE = 75.0  # seconds between two requests
_DAY = 86400.0  # seconds between two looks at the certificates
_REFUSED = ["/", "/docs", "/v1/control/start-run", "/v1/runtime/acquire-task", "/put", "/reload", "/v1/sites/next"]


class OwnersOnly(H11Protocol):
    """A connection of this account's own programs."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection if its other end is this account's."""
        super().connection_made(transport)
        if not admin_socket.is_mine(transport.get_extra_info("socket")):
            transport.abort()


class Service:
    """Exchange, gate and office of one federation."""

    def __init__(self, federation: FederationFolder, fleet: bool = False) -> None:
        self._federation = federation
        self.link = SuperLink()
        self.exchange = Mailbox(federation.spool)
        self.exchange.elsewhere, self.exchange.others = self._to_fleet, self._in_fleet
        self._keys: dict[str, tuple[ec.EllipticCurvePublicKey, int]] = {}
        self._runs: dict[str, int] = {}
        self._fleet = fleet
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.reload()
        self.gate = SiteApi(self.exchange, self.link.app if fleet else None)
        self.office = admin_socket.AdminSocket(self.exchange, self.reload, self._begin)

    def reload(self) -> None:
        """Read the list of sites, their keys and the certificate, as they are in the folder now."""
        federation = FederationFolder(self._federation.path)
        server = federation.path / "server"
        self.context.load_cert_chain(server / "server.pem", server / "server.key")  # for connections from now on
        wanted: dict[str, tuple[ec.EllipticCurvePublicKey, int]] = {}
        for name in federation.permitted():
            key = pki.read_public(federation.public_key(name))
            old = self._keys.get(name)
            wanted[name] = old if old is not None and old[0] == key else (key, self.link.register(name, key))
        for name, (_, node) in self._keys.items():
            if name not in wanted or wanted[name][1] != node:
                self.link.forget(node)
        self._keys = wanted
        self.exchange.register(wanted, federation.revoked())

    def _begin(self, job: str) -> int:
        self._runs[job] = self.link.begin()
        return self._runs[job]

    def _in_fleet(self) -> dict[str, tuple[int, str]]:
        here = self.link.present() if self._fleet else {}
        return {name: (node, here[node]) for name, (_, node) in self._keys.items() if node in here}

    def _to_fleet(self, ticket: Ticket) -> bool:
        if ticket.site not in self._in_fleet():
            return False
        payload = (self.exchange.spool / ticket.id).read_bytes()
        self.link.send(self._keys[ticket.site][1], self._runs[ticket.job], ticket.id, payload)
        return True

    def keep_certificate(self, log: Callable[[str], None]) -> None:
        """Renew the certificate in time, and say what else is about to end."""
        if _kept(self._federation, log):
            self.reload()
        for line in certificate_lifetimes.warnings(self._federation):
            log(line)

    async def housekeeping(self, log: Callable[[str], None]) -> None:
        """End what nobody waits for any more, and bring replies over from Flower's own protocol."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(0.2 if self._fleet else 5.0)
            self.exchange.sweep()
            if time.monotonic() - looked > _DAY:
                looked = time.monotonic()
                self.keep_certificate(log)
            if self._fleet:
                for order, payload in await asyncio.to_thread(self.link.replies):
                    self.exchange.bring(order, payload)


def _kept(federation: FederationFolder, log: Callable[[str], None]) -> bool:
    renewed = certificate_lifetimes.keep(federation)
    if renewed:
        log("the service's certificate was about to expire, or could not be used; a new one is in use")
    return renewed


def _config(app: App) -> Config:
    config = Config(
        cast(Any, app),
        lifespan="off",
        proxy_headers=False,
        forwarded_allow_ips="",
        server_header=False,
        date_header=False,
        access_log=False,
        log_config=None,
        timeout_keep_alive=int(_IDLE),
        h11_max_incomplete_event_size=16 << 10,
        ws="none",
    )
    config.load()
    return config


def bind(host: str, port: int) -> socket.socket:
    """The listening socket; ``::`` takes both families."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=256, dualstack_ipv6=host == "::")
    except OSError as error:
        raise flower.EngineError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    made.setblocking(False)
    return made


async def _serve(
    service: Service,
    listening: socket.socket,
    folder: FederationFolder,
    ready: Callable[[], None],
    monitor: socket.socket | None,
    log: Callable[[str], None],
) -> None:
    loop, state, own = asyncio.get_running_loop(), ServerState(), ServerState()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    outside, inside = _config(service.gate), _config(service.office)
    door = ConnectionLimit()
    public = asyncio.create_task(
        door.open(listening, service.context, lambda guest: Guarded(outside, state, door, guest))
    )
    private = await loop.create_unix_server(lambda: OwnersOnly(inside, own, {}), sock=admin_socket.listen(folder.state))
    watching = _config(Monitor(folder, service.exchange))
    live = None
    if monitor is not None:
        live = await loop.create_server(lambda: H11Protocol(watching, own, {}), sock=monitor)
    keeper = asyncio.create_task(service.housekeeping(log))
    try:
        await asyncio.to_thread(probe, folder)
        ready()
        await asyncio.wait([asyncio.ensure_future(stop.wait()), keeper, public], return_when=asyncio.FIRST_COMPLETED)
        for task in (keeper, public):
            if task.done():
                task.result()  # raises what went wrong
    finally:
        keeper.cancel()
        public.cancel()
        private.close()
        if live is not None:
            live.close()
        for connection in [*state.connections, *own.connections]:
            cast(H11Protocol, connection).transport.abort()
        for task in [*state.tasks, *own.tasks]:
            task.cancel()
        with contextlib.suppress(FileNotFoundError):
            admin_socket.place(folder.state).unlink()


def serve(
    federation: FederationFolder,
    ready: Callable[[], None],
    fleet: bool = False,
    *,
    monitor: int | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Serve until SIGINT or SIGTERM; ``ready`` is called when sites can connect.

    ``monitor`` is the port of a live page on this machine's loopback; ``log`` is told what ends soon.
    """
    flower.check_version()
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(bind(federation.bind, federation.port))
        watched = None if monitor is None else stack.enter_context(bind("127.0.0.1", monitor))
        _kept(federation, log)
        service = Service(federation, fleet)
        service.keep_certificate(log)
        asyncio.run(_serve(service, listening, federation, ready, watched, log))


def probe(federation: FederationFolder) -> None:
    """Ask, as somebody from outside, for what must be refused; an error if any of it is granted."""
    context = ssl.create_default_context(cafile=str(federation.authority))
    claims = {"x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1", "x-real-ip": "127.0.0.1"}
    with httpx.Client(verify=context, timeout=30.0, trust_env=False) as client:
        for path in _REFUSED:
            for headers in ({}, claims):
                got = client.post(f"https://{federation.address}{path}", headers=headers, content=b"{}")
                if got.status_code != 403:
                    raise flower.EngineError(
                        f"{path} was not refused to the network (status {got.status_code}); nothing is served"
                    )
        if client.get(f"https://{federation.address}/health").json() != {"status": "ok"}:
            raise flower.EngineError(f"another program answers at {federation.address}")
