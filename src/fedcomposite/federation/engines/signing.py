"""Who says what: words signed with elliptic-curve keys."""

from __future__ import annotations

import base64
import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

_ALGORITHM = ec.ECDSA(hashes.SHA256())


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


def digest(*parts: bytes | memoryview) -> str:
    """The digest under which a body, whole or in parts, is signed."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()
