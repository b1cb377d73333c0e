"""Shamir's shares: a secret of 32 bytes in n parts, of which any t give it back and any t - 1 say nothing.

The secret is the value at zero of a random polynomial of degree t - 1 over the integers modulo the prime 2^521 - 1, and
share x is its value at x = 1, ..., n (A. Shamir, How to share a secret, 1979).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from fedcomposite.federation.secure.masking import SEED, MaskError

PRIME = (1 << 521) - 1
SIZE = 66
"""Bytes of a share."""


def split(secret: bytes, count: int, threshold: int) -> list[bytes]:
    """The shares 1, ..., ``count``."""
    if not 1 <= threshold <= count or len(secret) != SEED:
        raise MaskError(f"{threshold} of {count} shares of {len(secret)} bytes")
    polynomial = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value(polynomial, x).to_bytes(SIZE, "big") for x in range(1, count + 1)]


def _value(polynomial: list[int], x: int) -> int:
    found = 0
    for coefficient in reversed(polynomial):
        found = (found * x + coefficient) % PRIME
    return found


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from ``threshold`` shares by their numbers."""
    if len(shares) < threshold:
        raise MaskError(f"{len(shares)} shares, {threshold} are needed")
    chosen = {x: int.from_bytes(shares[x], "big") for x in sorted(shares)[:threshold]}
    secret = 0
    for x, y in chosen.items():
        above = below = 1
        for other in chosen:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        secret = (secret + y * above * pow(below, -1, PRIME)) % PRIME
    if secret >> (8 * SEED):
        raise MaskError("the shares do not belong together")
    return secret.to_bytes(SEED, "big")


def least(parties: int) -> int:
    """The threshold for so many parties: more than two thirds, so that any two groups that reach it share a third."""
    return 2 * parties // 3 + 1
