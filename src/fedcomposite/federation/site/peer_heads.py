"""Heads of the other sites' audit logs, which a site keeps for them: whoever turns one back is found elsewhere.

Every introduction has the head of the site's log, signed; the coordinator passes them on with its next orders. They lie
in ``state/heads.json``, by site, oldest first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from fedcomposite._validation import UserError
from fedcomposite.federation.site.audit import head_signed
from fedcomposite.files import write_atomic

_MOST = 1000  # heads of one site; in between some are left out


class PeerHeads:
    """The heads that one site keeps."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> dict[str, list[str]]:
        """The heads of each site."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            return {str(site): [str(head) for head in heads] for site, heads in found.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, TypeError, OSError):
            raise UserError(f"{self._path}: is no file of heads that a site has kept of others") from None

    def keep(self, own: str, heads: Mapping[str, str], peers: Mapping[str, ec.EllipticCurvePublicKey]) -> None:
        """Take down heads of others that are new; those of a site whose key is known only if it has signed them."""
        if not heads:
            return
        known = self.all()
        new = {site: head for site, head in heads.items() if site != own and head not in known.get(site, [])}
        new = {site: head for site, head in new.items() if site not in peers or head_signed(peers[site], head)}
        if not new:
            return
        for site, head in new.items():
            every = [*known.get(site, []), head]
            known[site] = every if len(every) <= _MOST else [*every[:-1:2], head]
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self._path, json.dumps(known).encode())
