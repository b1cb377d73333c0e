"""A run's side of relays: it listens at a socket, and each relay that connects is a way to the sites of its job."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

from fedcomposite.federation.engines.dispatch import Dispatch, Way
from fedcomposite.federation.engines.relaying import start
from fedcomposite.federation.engines.sealing import Sealed
from fedcomposite.federation.engines.sockets import Channel, listen, stop_listening
from fedcomposite.federation.folders import FederationFolder


class RelayedDispatch(Dispatch):
    """A run's side: the relays of its jobs connect here, each with the sites that its job has."""

    def __init__(self, federation: FederationFolder, path: Path) -> None:
        super().__init__(federation)
        self._path, self._listening = path, listen(path)
        self._channels: dict[Channel, tuple[str, set[str]]] = {}  # of relays: their jobs, and the sites that have come
        start(self._accept)

    def close(self) -> None:
        """End the relays: their jobs are over when the socket is."""
        stop_listening(self._listening, self._path)
        with self._news:
            open_channels = list(self._channels)
        for one in open_channels:
            one.close()
        super().close()

    def relayed(self) -> dict[str, set[str]]:
        """The jobs whose relays are connected, and the sites that have come over each so far."""
        with self._news:
            return {job: set(sites) for job, sites in self._channels.values()}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listening.accept()
                start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            channel = Channel(connection)
        except OSError:
            return

        def way(site: str, order: str, sealed: Sealed) -> None:
            channel.send({"site": site, "order": order}, *sealed)

        sites = set[str]()
        try:
            head, _ = channel.receive()
            with self._news:
                self._channels[channel] = str(head["name"]), sites
            while True:
                self._heard(*channel.receive(), sites, way)
        except (OSError, KeyError, TypeError):
            pass
        finally:
            channel.close()
            with self._news:
                self._channels.pop(channel, None)
            for site in sites:
                self.left(site, "the engine's job has ended", way)

    def _heard(self, head: dict[str, Any], body: bytes, sites: set[str], way: Way) -> None:
        """One frame of a relay."""
        match head["what"]:
            case "came":
                with self._news:
                    sites.add(str(head["site"]))
                self.came(str(head["site"]), str(head["session"]), way)
            case "left":
                self.left(str(head["site"]), "the site does not answer", way)
            case "report":
                self.arrived(str(head["order"]), body)
            case "lost":
                self.arrived(str(head["order"]), None, str(head["why"]))
