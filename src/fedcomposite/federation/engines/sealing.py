"""Orders signed by the coordinator, reports signed by their site: whatever carries them can change or invent nothing.

An order is for one site and for one session of it: a site process that was started anew takes none that was signed
before, and takes each only once. So who keeps an order cannot have it carried out again, and no clock is asked. A
report is for one order.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fedcomposite.federation.engines import signing

_COVER = 4096  # bytes of a cover, at most
_KEPT = 1 << 20  # orders that a session takes; then it is another one


class SealError(ValueError):
    """Something that is not signed, or not for whom it came to."""


class StaleError(SealError):
    """An order for a session that is over: it has to be signed again."""


class RepeatedError(SealError):
    """An order that was taken before, by its name: it is not carried out again."""


Sealed = list[bytes]
"""A cover and what it covers, which are sent one after the other."""


def _sealed(key: ec.EllipticCurvePrivateKey, kind: str, words: dict[str, str], payload: bytes) -> Sealed:
    words = {**words, "digest": signing.digest(payload)}
    cover = json.dumps({**words, "signature": signing.sign(key, kind, *words.values())}).encode()
    return [len(cover).to_bytes(2, "big") + cover, payload]


def _opened(sealed: bytes, names: list[str]) -> tuple[dict[str, str], memoryview]:
    """The words of a cover, and the payload that fits to its digest, where it lies."""
    size = int.from_bytes(sealed[:2], "big")
    if size > min(_COVER, len(sealed) - 2):
        raise SealError("not signed")
    try:
        found: Any = json.loads(sealed[2 : 2 + size])
        cover = {name: str(found[name]) for name in [*names, "digest", "signature"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SealError("not signed") from None
    payload = memoryview(sealed)[2 + size :]
    if cover["digest"] != signing.digest(payload):
        raise SealError("changed on its way")
    return cover, payload


_ORDER = ["order", "site", "session"]
_REPORT = ["order", "site"]


def seal_order(key: ec.EllipticCurvePrivateKey, order: str, site: str, session: str, payload: bytes) -> Sealed:
    """An order, signed by the coordinator."""
    return _sealed(key, "order", dict(zip(_ORDER, (order, site, session), strict=True)), payload)


def seal_report(key: ec.EllipticCurvePrivateKey, order: str, site: str, payload: bytes) -> Sealed:
    """A report, signed by its site."""
    return _sealed(key, "report", dict(zip(_REPORT, (order, site), strict=True)), payload)


def open_report(key: ec.EllipticCurvePublicKey, order: str, site: str, sealed: bytes) -> memoryview:
    """What a site reports to an order."""
    cover, payload = _opened(sealed, _REPORT)
    words = [cover[name] for name in (*_REPORT, "digest")]
    if words[:2] != [order, site] or not signing.is_signed(key, cover["signature"], "report", *words):
        raise SealError(f"its answer is not signed by {site} for this order")
    return payload


@dataclass
class Session:
    """A site process's own word for itself, and the orders that it has taken."""

    site: str
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    _taken: set[str] = field(default_factory=set)

    def open_order(self, key: ec.EllipticCurvePublicKey, sealed: bytes) -> tuple[str, memoryview]:
        """The name of an order and what it says; it is not taken again."""
        cover, payload = _opened(sealed, _ORDER)
        words = [cover[name] for name in (*_ORDER, "digest")]
        if cover["site"] != self.site or not signing.is_signed(key, cover["signature"], "order", *words):
            raise SealError("the order is not signed by the coordinator for this site")
        if cover["session"] != self.name:
            raise StaleError("the site was started anew since the order was signed")
        if cover["order"] in self._taken:
            raise RepeatedError(cover["order"])
        if len(self._taken) >= _KEPT:
            self.name, self._taken = secrets.token_hex(16), set()
            raise StaleError("the site has begun a new session")
        self._taken.add(cover["order"])
        return cover["order"], payload
