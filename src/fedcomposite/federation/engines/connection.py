"""A site's connection to the coordinator: one long-lived process that answers orders itself.

It keeps the site's data and problem in memory, opens no port, and asks the service for an order with a request that is
held open until there is one. What a broken connection loses is asked for, or sent, again, in pieces that fit the link;
only silence counts as failure, never the time that a large vector takes. An order is decoded only if the coordinator
signed it for this site. A bundle is never asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import getproxies_environment, proxy_bypass

import httpx

from fedcomposite._validation import UserError
from fedcomposite.federation import wire
from fedcomposite.federation.engines import flower, pki, signing, site_api
from fedcomposite.federation.engines.mailbox import SILENCE, Ticket
from fedcomposite.federation.site.site import Site

HEARTBEAT = SILENCE / 5
"""Seconds between signs of life while a site computes."""
_LEAST, _WISH = 32 << 10, 2.0  # bytes of the smallest piece; seconds that one should take
_ELSEWHERE = 30.0  # seconds to wait after another process has taken the session


class RefusedError(RuntimeError):
    """The coordinator does not accept this site, or the site does not accept the coordinator."""


class _OverError(Exception):
    """The order is no longer wanted."""


class _SessionError(Exception):
    """The session has ended; a new one is to be opened. Says from where another process has taken it, if one has."""


def reach(address: str, authority: Path, timeout: float = 5.0) -> str:
    """Why the coordinator cannot be reached now, in one line; empty if it can.

    Raises :class:`RefusedError` where waiting does not help: a certificate that the site's authority does not vouch
    for, or a service without TLS.
    """
    context = _context(authority)
    try:
        httpx.get(
            f"https://{address}/health", verify=context, timeout=timeout, trust_env=False, proxy=proxy_for(address)
        )
    except httpx.ProxyError as error:
        return f"the proxy of HTTPS_PROXY does not let through to {address} ({wire.clean(error, 80)})"
    except httpx.ConnectError as error:
        return _explain(str(error), address, authority)
    except httpx.HTTPError as error:
        return f"{address} does not answer ({type(error).__name__})"
    return ""


def proxy_for(address: str) -> str | None:
    """The proxy of the environment (HTTPS_PROXY, unless NO_PROXY names the host); TLS goes through it end to end."""
    host = address.rsplit(":", 1)[0].strip("[]")
    known = getproxies_environment()
    if "https" not in known or proxy_bypass(host, known):
        return None
    proxy = known["https"]
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    try:
        good = httpx.URL(proxy).scheme in ("http", "https") and bool(httpx.URL(proxy).host)
    except httpx.InvalidURL:
        good = False
    if not good:
        raise RefusedError("HTTPS_PROXY is not of the form http://host:port")
    return proxy


def _context(authority: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError):
        raise RefusedError(f"{authority}: not a readable certificate") from None


def _explain(text: str, address: str, authority: Path) -> str:
    """What a failed connection means: a reason to wait, or an error where waiting does not help."""
    if "certificate has expired" in text:
        return (
            f"the certificate of the service at {address} has expired; the coordinator renews it by restarting `serve`"
        )
    if "certificate is not yet valid" in text:
        return f"the certificate of the service at {address} is not yet valid by this machine's clock; set the clock"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        raise RefusedError(
            f"the service at {address} is not vouched for by {authority.name}; it may be an impostor: "
            f"{text.split(': ')[-1]}"
        )
    if "SSL" in text and "EOF" not in text:
        raise RefusedError(f"the service at {address} does not speak TLS; nothing was sent to it")
    return f"{address} cannot be reached"


class Connection:
    """A site's session with the coordinator."""

    def __init__(
        self,
        site: Site,
        address: str,
        authority: Path,
        key: Path,
        coordinator: Path,
        log: Callable[[str], None],
        silence: float = site_api.HOLD + 15.0,
    ) -> None:
        flower.check_version()
        self._site, self._address, self._authority, self._log = site, address, authority, log
        self._key, self._coordinator = pki.read_private(key), coordinator
        self._trusted = pki.read_public(coordinator)
        # Seconds of silence, on either way, after which a connection counts as broken.
        self._client = httpx.Client(
            base_url=f"https://{address}", verify=_context(authority), timeout=httpx.Timeout(silence, connect=10.0),
            trust_env=False, proxy=proxy_for(address),
        )  # fmt: skip
        self._session, self._numbers = "", itertools.count(1)
        self._lost = 0.0  # since when the coordinator is silent
        self._piece = 256 << 10
        self._stop: Callable[[], bool] = lambda: False

    # -- sessions -----------------------------------------------------------------------------------------------------

    def serve(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Answer orders until Ctrl-C, or until ``stop()`` says so between two requests.

        Raises :class:`RefusedError` when the coordinator will not have this site.
        """
        told, self._stop = False, stop
        try:
            while not stop():
                self._open()
                if not told:
                    self._log(f"connected to {self._address}; waiting for work")
                    told = True
                try:
                    while not stop():
                        self._once()
                except _SessionError as error:
                    if thief := str(error):
                        self._log(
                            f"another process has connected with the key of {self._site.name}, from {thief}; if it is "
                            "not yours, the key was stolen: ask the coordinator to replace it. Trying again in "
                            f"{_ELSEWHERE:.0f} s"
                        )
                        time.sleep(_ELSEWHERE)
        finally:
            with contextlib.suppress(httpx.HTTPError, _SessionError, _OverError, RefusedError):
                self._request("POST", "leave", timeout=2.0)
            self._client.close()

    def _open(self) -> None:
        """Begin a session with the service's challenge."""
        while not self._stop():
            try:
                got = self._client.get("/v1/sites/challenge")
                got.raise_for_status()
                self._session, self._numbers = str(got.json()["challenge"]), itertools.count(1)
                self._request("POST", "open")
            except _SessionError:
                time.sleep(0.2)  # the challenge was too old, or its answer was lost on the way
                continue
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                self._pause(error)
                continue
            self._back()
            return

    def _request(
        self, method: str, what: str, body: bytes = b"", timeout: float | None = None, into: bytearray | None = None
    ) -> httpx.Response:
        """One signed request, and what the answer means; a body for ``into`` is added to it as it comes."""
        path = f"/v1/sites/{what}"
        headers = signing.request_headers(
            self._key, self._site.name, self._session, next(self._numbers), method, path, body
        )
        more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        if into is None:
            got = self._client.request(method, path, content=body, headers=headers, **more)
        else:
            with self._client.stream(method, path, headers=headers) as got:
                if got.status_code == 200:
                    for part in got.iter_raw():
                        into += part
                else:
                    got.read()
        if got.status_code == 200:
            return got
        try:
            said = json.loads(got.content)
            reason = str(said["reason"])
        except (ValueError, KeyError, TypeError):
            said, reason = {}, ""
        if got.status_code == 403 and reason == "revoked":
            raise RefusedError(f"the coordinator no longer accepts {self._site.name}: it was revoked")
        if got.status_code == 403 and reason == "unknown":
            raise RefusedError(
                f"the coordinator does not accept {self._site.name}: its key is not registered there (or was replaced)"
            )
        if got.status_code == 401:
            raise _SessionError(str(said.get("address", "")) if reason == "elsewhere" else "")
        if got.status_code == 410:
            raise _OverError
        got.raise_for_status()
        raise httpx.HTTPStatusError(f"status {got.status_code}", request=got.request, response=got)

    def _call(self, method: str, what: str, body: bytes = b"") -> httpx.Response:
        """The same, again and again while the service is away or in trouble; says so once."""
        while True:
            try:
                got = self._request(method, what, body)
            except httpx.HTTPError as error:
                self._pause(error)
                continue
            self._back()
            return got

    def _pause(self, error: Exception) -> None:
        """Say what is wrong, once, and wait; an error where waiting does not help."""
        why = f"no connection to {self._address}"
        if isinstance(error, httpx.HTTPStatusError):
            why = f"{self._address} answers with an error ({error.response.status_code})"
        elif isinstance(error, httpx.ConnectError):
            why = _explain(str(error), self._address, self._authority)
        if self._stop():
            raise _OverError
        now = time.monotonic()
        if not self._lost:
            self._lost = now
            self._log(f"{why}; trying until it is back")
        time.sleep(min(5.0, 0.1 + (now - self._lost) / 4))

    def _back(self) -> None:
        if self._lost:
            self._log(f"connected again after {time.monotonic() - self._lost:.0f} s")
            self._lost = 0.0

    # -- one order ----------------------------------------------------------------------------------------------------

    def _once(self) -> None:
        """Ask for an order; do it if there is one."""
        cover, _, payload = self._call("POST", "next").content.partition(b"\n")
        if not cover:
            return
        try:
            ticket = Ticket.model_validate_json(cover)
            payload = payload if ticket.size <= site_api.INLINE else self._fetch(ticket)
            reply = self._answer(ticket, payload)
            del payload
            self._send(ticket.id, reply)
        except _OverError:
            self._log("the run has ended; its last order is dropped")

    def _fetch(self, ticket: Ticket) -> bytes:
        """A large order; what a broken connection had brought is kept, and the rest asked for."""
        if ticket.size > self._site.limits.max_message_mb * 1e6 + (1 << 20):
            return b""
        got = bytearray()
        while len(got) < ticket.size:
            had = len(got)
            try:
                self._request("GET", f"order/{ticket.id}/{had}", into=got)
            except httpx.HTTPError as error:
                if len(got) == had:
                    self._pause(error)
                continue
            self._back()
        return bytes(memoryview(got)[: ticket.size])

    def _answer(self, ticket: Ticket, payload: bytes) -> bytes:
        """Check the coordinator's signature, then let the site do the order, with signs of life meanwhile."""
        if ticket.size > len(payload):
            return self._refuse(f"a message of {ticket.size / 1e6:.0f} MB is over this site's max_message_mb")
        if not self._vouched(ticket, payload):
            return self._refuse(
                f"the order is not signed by the coordinator for this site; if the coordinator has a new key, put its "
                f"{self._coordinator.name} into the site's folder"
            )
        try:
            content = wire.decode(payload)
        except wire.WireError:
            return self._refuse("the order cannot be read")
        done = threading.Event()
        beating = threading.Thread(target=self._beat, args=(done,), daemon=True)
        beating.start()
        try:
            return wire.encode(self._site.answer(content))
        finally:
            done.set()
            beating.join()

    def _vouched(self, ticket: Ticket, payload: bytes) -> bool:
        """Whether the coordinator signed an order, with the key that lies here, maybe only since a moment ago."""
        if ticket.vouches_for(self._trusted, self._site.name, payload):
            return True
        with contextlib.suppress(UserError):
            self._trusted = pki.read_public(self._coordinator)
        return ticket.vouches_for(self._trusted, self._site.name, payload)

    def _refuse(self, reason: str) -> bytes:
        self._log(f"refused: {reason}")
        return wire.encode(wire.content(refusal=reason))

    def _beat(self, done: threading.Event) -> None:
        while not done.wait(HEARTBEAT):
            with contextlib.suppress(httpx.HTTPError, _SessionError, _OverError, RefusedError):
                self._request("POST", "beat", timeout=HEARTBEAT)

    def _send(self, order: str, reply: bytes) -> None:
        """Deliver a reply in pieces whose size follows the link; what has arrived is not sent again."""
        have = 0
        while have < len(reply):
            piece = reply[have : have + self._piece]
            began = time.monotonic()
            try:
                self._request("PUT", f"reply/{order}/{have}/{len(reply)}", piece)
            except httpx.HTTPError as error:
                status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
                if status == 413:
                    self._log("the coordinator refuses a reply of this size")
                    raise _OverError from None
                if isinstance(error, httpx.HTTPStatusError) and status == 409:
                    have = int(error.response.json()["have"])
                else:
                    self._piece = max(_LEAST, self._piece // 2)
                    self._pause(error)
                continue
            self._back()
            have += len(piece)
            took = time.monotonic() - began
            if took > 2 * _WISH:
                self._piece = max(_LEAST, self._piece // 2)
            elif took < _WISH / 2 and len(piece) == self._piece:
                self._piece = min(site_api.PIECE, 2 * self._piece)
