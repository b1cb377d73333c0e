"""Certificates do not last: how long each is good for, words of warning in time, and renewal.

The authority's certificate is renewed with the same key and name, so the service's certificate is good under the old
and the new one: sites can be given the new ``ca.crt`` one after another, while the old one still counts.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from fedcomposite.federation.engines import pki
from fedcomposite.federation.folders import FederationFolder, SiteFolder

WARN = {"service": 30.0, "authority": 180.0}
"""Days before its end at which a certificate is spoken of."""


def certificates(place: FederationFolder | SiteFolder) -> dict[str, Path]:
    """The certificates that a folder depends on."""
    if isinstance(place, SiteFolder):
        return {"authority": place.authority}
    return {"service": place.path / "server" / "server.pem", "authority": place.authority}


def days(place: FederationFolder | SiteFolder) -> dict[str, float]:
    """For how many days each of them is good."""
    return {name: pki.days_left(path) for name, path in certificates(place).items() if path.is_file()}


def warnings(place: FederationFolder | SiteFolder) -> list[str]:
    """One line for each certificate that ends soon, or has ended, and what to do."""
    return _lines(days(place), None if isinstance(place, SiteFolder) else place.path)


def _lines(left: Mapping[str, float], federation: Path | None) -> list[str]:
    lines = []
    for name, rest in left.items():
        if rest > WARN[name]:
            continue
        option = " --authority" if name == "authority" else ""
        remedy = f"fedcomposite federation renew {federation}{option}"
        if federation is None:
            remedy = "ask the coordinator for a new ca.crt"
        when = f"expires in {rest:.0f} days" if rest >= 1 else "expires today" if rest > 0 else "has expired"
        lines.append(f"the certificate of the {name} {when}: {remedy}")
    return lines


def keep(federation: FederationFolder) -> bool:
    """Renew the service's certificate where it ends soon, or cannot be used; whether that was so."""
    ending = days(federation).get("service", 0.0) <= WARN["service"] or not _fit(federation.path / "server")
    if ending:
        renew(federation)
    return ending


def _fit(server: Path) -> bool:
    """Whether key and certificate belong together: a crash may have replaced one of them only."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server / "server.pem", server / "server.key")
    except (OSError, ssl.SSLError):
        return False
    return True


def renew(federation: FederationFolder, lasting: int | None = None, *, authority: bool = False) -> list[Path]:
    """A new certificate for the service, and before it for the authority if that is asked for.

    Returns the sites' new ``ca.crt``, to be carried to them before the old one ends.
    """
    carried = []
    if authority:
        pki.extend_authority(federation.path / "ca")
        for folder in sorted(p for p in (federation.path / "sites").glob("*") if p.is_dir()):
            (folder / "ca.crt").write_bytes(federation.authority.read_bytes())
            carried.append(folder / "ca.crt")
    place, fresh = federation.path / "server", federation.path / "server" / "next"
    for old in (fresh / "server.key", fresh / "server.pem"):
        old.unlink(missing_ok=True)
    most = int(pki.days_left(federation.authority))  # nothing outlives who vouches for it
    pki.make_server_certificate(federation.path / "ca", fresh, federation.host, min(lasting or pki.DAYS_SERVER, most))
    for name in ("server.key", "server.pem"):
        os.replace(fresh / name, place / name)
    fresh.rmdir()
    return carried
