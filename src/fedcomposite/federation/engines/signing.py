"""Who says what: requests of sites, and orders of the coordinator, signed with elliptic-curve keys.

A site signs every request: its session, a number that is used once, the method, the path and the digest of the body. So
nothing of a request can be changed, moved to another, or sent again, and the service knows who asks before it has read
any of the body. A session begins with the service's own challenge: no clock of a site is asked. The coordinator signs
every order for one site; the site checks that before it decodes anything.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

_ALGORITHM = ec.ECDSA(hashes.SHA256())
SITE, SESSION, NUMBER, DIGEST, SIGNATURE = (f"fed-{k}" for k in ("site", "session", "number", "digest", "signature"))
"""Headers of a signed request."""


def sign(key: ec.EllipticCurvePrivateKey, *parts: str) -> str:
    """Sign some words in their order."""
    return base64.b64encode(key.sign(_join(parts), _ALGORITHM)).decode()


def is_signed(key: ec.EllipticCurvePublicKey, signature: str, *parts: str) -> bool:
    """Whether the owner of a key signed these words."""
    try:
        key.verify(base64.b64decode(signature, validate=True), _join(parts), _ALGORITHM)
    except (InvalidSignature, ValueError):
        return False
    return True


def _join(parts: tuple[str, ...]) -> bytes:
    # With their lengths, so that no two lists of words give the same bytes.
    return b"".join(f"{len(p.encode())}:".encode() + p.encode() for p in ("fedcomposite", *parts))


def digest(*parts: bytes) -> str:
    """The digest under which a body, whole or in parts, is signed."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def request_headers(
    key: ec.EllipticCurvePrivateKey, site: str, session: str, number: int, method: str, path: str, body: bytes
) -> dict[str, str]:
    """The headers that make a request a site's own."""
    seal = digest(body)
    signature = sign(key, "request", site, session, str(number), method, path, seal)
    return {SITE: site, SESSION: session, NUMBER: str(number), DIGEST: seal, SIGNATURE: signature}


def is_request_signed(key: ec.EllipticCurvePublicKey, headers: Mapping[str, str], method: str, path: str) -> bool:
    """Whether a request with these headers is the key's owner's; the body's digest is compared by the caller."""
    words = [headers.get(name, "") for name in (SITE, SESSION, NUMBER)]
    return is_signed(key, headers.get(SIGNATURE, ""), "request", *words, method, path, headers.get(DIGEST, ""))


class Challenges:
    """What a session begins with: made by the service, recognised without being stored, good for a minute, once."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._secret, self._seconds = secrets.token_bytes(32), seconds
        self._used: dict[str, float] = {}

    def make(self) -> str:
        """A new challenge."""
        return self._seal(f"{time.monotonic():.3f}.{secrets.token_hex(16)}")

    def _seal(self, text: str) -> str:
        return f"{text}.{hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()}"

    def use(self, challenge: str) -> bool:
        """Whether a challenge is one of these, still good, and not used before; from now on it is."""
        text = challenge.rpartition(".")[0]
        if not hmac.compare_digest(self._seal(text).encode(), challenge.encode()):
            return False
        now = time.monotonic()
        self._used = {k: v for k, v in self._used.items() if now - v <= self._seconds}
        made = float(text.partition(".")[0] + "." + text.split(".")[1])
        if now - made > self._seconds or challenge in self._used:
            return False
        self._used[challenge] = made
        return True


@dataclass
class Once:
    """Numbers that may be used once: any order, but not older than a window."""

    window: int = 256
    _highest: int = 0
    _seen: set[int] = field(default_factory=set)

    def take(self, number: int) -> bool:
        """Use a number; false if it was used or is too old."""
        if number <= self._highest - self.window or number in self._seen:
            return False
        self._highest = max(self._highest, number)
        self._seen = {n for n in self._seen if n > self._highest - self.window} | {number}
        return True
