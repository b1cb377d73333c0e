"""The engine's certificates do not last: how long each is good for, words of warning in time, and renewal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedcomposite.federation.engines import pki
from fedcomposite.federation.folders import FederationFolder

if TYPE_CHECKING:
    from fedcomposite.federation.site_folders import SiteFolder

WARN = {"server": 30.0, "administrator": 30.0, "site": 30.0, "authority": 180.0}
"""Days before its end at which a certificate is spoken of."""


def certificates(place: FederationFolder | SiteFolder) -> dict[str, Path]:
    """The certificates that a folder depends on."""
    if not isinstance(place, FederationFolder):
        found = {"site": "flare/startup/client.crt", "authority": "flare/startup/rootCA.pem"}
        found = {"authority": "ca.crt"} if place.engine == "flower" else found
    else:
        flare = {"server": "server/startup/server.crt", "administrator": "admin/startup/client.crt"}
        found = {name: f"flare/{path}" for name, path in flare.items()} | {
            "authority": "flare/server/startup/rootCA.pem"
        }
        found = {"server": "flower/server.pem", "authority": "flower/ca.crt"} if place.engine == "flower" else found
    return {name: place.path / path for name, path in found.items() if place.engine != "local"}


def days(place: FederationFolder | SiteFolder) -> dict[str, float]:
    """For how many days each of them is good."""
    return {name: pki.days_left(path) for name, path in certificates(place).items() if path.is_file()}


def warnings(place: FederationFolder | SiteFolder) -> list[str]:
    """One line for each certificate that ends soon, or has ended, and what to do."""
    own = isinstance(place, FederationFolder)
    remedy = f"fedcomposite federation renew {place.path}" if own else "ask the coordinator for new ones"
    return [f"{line}: {remedy}" for line in lines(days(place))]


def lines(left: dict[str, float]) -> list[str]:
    """What is said of certificates with so many days left."""
    made = []
    for name, rest in left.items():
        when = f"expires in {rest:.0f} days" if rest >= 1 else "expires today" if rest > 0 else "has expired"
        if rest <= WARN[name]:
            made.append(f"the certificate of the {name} {when}")
    return made


def renew(federation: FederationFolder) -> list[Path]:
    """New certificates for all parties; returns what is to be carried to the sites."""
    if federation.engine != "flower":
        return federation.equip(fresh=True)
    for name in ("server.key", "server.pem"):
        (federation.path / "flower" / name).unlink(missing_ok=True)
    pki.make_server_certificate(federation.path / "flower", federation.path / "flower", federation.host)
    return []
