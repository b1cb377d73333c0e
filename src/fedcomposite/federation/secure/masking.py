"""The mathematics of sums that nobody can open: numbers as integers, keys between pairs, masks. No network, no files.

A number v of a vector becomes the integer round(v 2^40) modulo 2^64. The sum over the parties is exact as long as every
party stays within 2^22 divided by their number, which each of them checks for itself; the rounding of a mean is at most
2^-41, about 5e-13. Scalars (losses, counts) are round(v 2^64) modulo 2^128, within 2^62 divided by the parties.

Two parties u < v have a seed in common, from their X25519 keys. u adds the stream that it gives, v subtracts it, so the
sum of all parties is free of masks and every smaller sum is not. A stream belongs to one ``context``: job, round,
parties, experiment and what was broadcast. Streams are ChaCha20 under keys derived by HKDF-SHA256.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Words = npt.NDArray[np.uint64]

BITS, WIDE_BITS = 40, 64
"""Binary digits behind the point, of vectors and of scalars."""
REACH, WIDE_REACH = 2.0**22, 2.0**62
"""Largest sum of the absolute values, of vectors' entries and of scalars."""
SEED = 32
"""Bytes of a seed."""
_RING = 1 << 128


class MaskError(ValueError):
    """What cannot be masked, or opened, and why, in one line."""


def frame(*parts: str | bytes | int) -> bytes:
    """Some words as bytes, with their lengths, so that no two lists of words give the same."""
    raw = [p if isinstance(p, bytes) else str(p).encode() for p in parts]
    return b"fedcomposite masks 1" + b"".join(len(p).to_bytes(8, "big") + p for p in raw)


def seal(*parts: str | bytes | int) -> str:
    """A digest of some words."""
    return hashlib.sha256(frame(*parts)).hexdigest()


# -- numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """What one party brings to a sum, or the sum: a vector's words, and scalars."""

    words: Words
    wide: list[int]

    @classmethod
    def of(cls, vector: npt.NDArray[np.float64], scalars: Sequence[float], parties: int) -> Numbers:
        """Numbers as integers; one that is too large for a sum of so many parties is an error."""
        # The errors do not say which number it was: they leave the site.
        if vector.size and not float(np.abs(vector).max()) <= REACH / parties:
            raise MaskError(f"an entry is beyond {REACH / parties:.3g}, the range of a secure sum of {parties} sites")
        if not all(abs(v) <= WIDE_REACH / parties for v in scalars):
            raise MaskError(
                f"a number is beyond {WIDE_REACH / parties:.3g}, the range of a secure sum of {parties} sites"
            )
        words = np.rint(np.ldexp(vector, BITS)).astype(np.int64).view(np.uint64)
        return cls(words, [round(math.ldexp(v, WIDE_BITS)) % _RING for v in scalars])

    def vector(self) -> npt.NDArray[np.float64]:
        """The words as numbers."""
        return np.ldexp(self.words.view(np.int64).astype(np.float64), -BITS)

    def scalars(self) -> list[float]:
        """The wide integers as numbers."""
        signed = [w - _RING if w >= _RING >> 1 else w for w in self.wide]
        return [math.ldexp(float(w), -WIDE_BITS) for w in signed]

    def wide_bytes(self) -> bytes:
        """The wide integers, 16 bytes each."""
        return b"".join(w.to_bytes(16, "little") for w in self.wide)

    @staticmethod
    def read_wide(raw: bytes) -> list[int]:
        """The wide integers in some bytes."""
        return [int.from_bytes(raw[i : i + 16], "little") for i in range(0, len(raw), 16)]


def total(parts: Iterable[Numbers]) -> Numbers:
    """The sum."""
    found = list(parts)
    words = found[0].words.copy()
    for one in found[1:]:
        words += one.words
    return Numbers(words, [sum(column) % _RING for column in zip(*(p.wide for p in found), strict=True)])


# -- masks ------------------------------------------------------------------------------------------------------------


def derive(secret: bytes, info: bytes) -> bytes:
    """A key for one use."""
    return HKDF(algorithm=hashes.SHA256(), length=SEED, salt=None, info=info).derive(secret)


def _stream(key: bytes, size: int) -> bytes:
    # The counter begins at zero: a key has one stream, which lasts for 256 GB.
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))


@dataclass(frozen=True)
class Mask:
    """The stream of one seed in one context."""

    seed: bytes
    context: bytes

    def add(self, to: Numbers, sign: int) -> Numbers:
        """The numbers with this mask added or taken away; the words are changed in place."""
        words = np.frombuffer(_stream(derive(self.seed, self.context + b"words"), 8 * to.words.size), np.uint64)
        if sign > 0:
            np.add(to.words, words, out=to.words)
        else:
            np.subtract(to.words, words, out=to.words)
        wide = Numbers.read_wide(_stream(derive(self.seed, self.context + b"wide"), 16 * len(to.wide)))
        return Numbers(to.words, [(a + sign * b) % _RING for a, b in zip(to.wide, wide, strict=True)])


def side(me: str, other: str) -> int:
    """Who of a pair adds their mask (1), and who takes it away (-1)."""
    return 1 if me < other else -1


def conceal(numbers: Numbers, me: str, seeds: Mapping[str, bytes], own: bytes | None, context: bytes) -> Numbers:
    """A party's numbers under the masks that it has with the others, and under its own, if it has one."""
    for other, seed in seeds.items():
        numbers = Mask(seed, context).add(numbers, side(me, other))
    return numbers if own is None else Mask(own, context).add(numbers, 1)


# -- keys -------------------------------------------------------------------------------------------------------------


def public(key: X25519PrivateKey) -> str:
    """The public part of a key, as text."""
    return key.public_key().public_bytes_raw().hex()


def agree(key: X25519PrivateKey, theirs: str, info: bytes) -> bytes:
    """What two parties have in common, for one use; a key that gives no secret is an error."""
    try:
        return derive(key.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(theirs))), info)
    except ValueError:
        raise MaskError("a party's key for masks cannot be used") from None


def pair_seed(key: X25519PrivateKey, theirs: str, one: str, other: str, epoch: str) -> bytes:
    """The seed that two named parties have in common; ``epoch`` says for which keys of all parties it is."""
    return agree(key, theirs, frame("pair", *sorted((one, other)), epoch))
