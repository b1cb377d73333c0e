"""The mathematics of sums that nobody can open: numbers as integers, keys between pairs, masks. No network, no files.

A number v of a vector becomes the integer round(v 2^40) modulo 2^64. The sum over the parties is exact as long as the
largest numbers of all parties together stay within 2^22; the rounding of a mean is at most 2^-41, about 5e-13. Scalars
of a round (losses, counts) are round(v 2^64) modulo 2^128, within 2^62. Numbers of an analysis are round(v 2^128)
modulo 2^256, within 2^126: squares of columns in any unit, from 1e-12 to 1e12, have all their digits. No party refuses
a number that is too large, since that would tell something of this party alone: how much of the range it needs is
summed, too (:func:`needed`), and the sum says whether all others can be used.

Two parties u < v have a seed in common, from their X25519 keys. u adds the stream that it gives, v subtracts it, so the
sum of all parties is free of masks and every smaller sum is not. A stream belongs to one ``context``: job, round,
parties, experiment and what was broadcast. Streams are ChaCha20 under keys derived by HKDF-SHA256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

BITS = 40
"""Binary digits behind the point of a vector's entries."""
REACH = 2.0**22
"""Largest sum of the absolute values of vectors' entries."""
WIDE, WIDEST = 2, 4
"""Words of a scalar of a round, and of a number of an analysis; half of their bits are behind the point."""
SEED = 32
"""Bytes of a seed."""
_ONE = np.uint64(1)
_BEYOND = 2.0**30


def reach(width: int) -> float:
    """Largest sum of the absolute values of numbers of so many words."""
    return 2.0 ** (32 * width - 2)


def needed(vector: Floats, scalars: npt.ArrayLike, width: int) -> float:
    """What share of the range of a sum one party's numbers need; beyond all bounds it is told as a large one."""
    wide = np.asarray(scalars, np.float64).reshape(-1)
    shares = [float(np.abs(vector).max(initial=0.0)) / REACH, float(np.abs(wide).max(initial=0.0)) / reach(width)]
    return min(max(shares), _BEYOND)


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
    """What one party brings to a sum, or the sum: a vector's words, and wide numbers."""

    words: Words
    wide: Words
    """Integers of several words each, the lowest first, ``(numbers, words)``."""

    @classmethod
    def of(cls, vector: Floats, scalars: npt.ArrayLike, width: int = WIDE) -> Numbers:
        """Numbers as integers, scalars of ``width`` words, whatever their size is."""
        wide = np.asarray(scalars, np.float64).reshape(-1)
        with np.errstate(over="ignore"):
            left, finite = np.ldexp(vector, BITS), bool(np.isfinite(np.ldexp(wide, 32 * width)).all())
        if not (finite and np.isfinite(left).all()):
            raise MaskError("its numbers left the finite range")
        left = np.fmod(np.rint(left), 2.0**64)
        size = np.abs(left).astype(np.uint64)
        return cls(np.where(left < 0, ~size + _ONE, size), _integers(wide, width))

    def vector(self) -> Floats:
        """The words as numbers."""
        return np.ldexp(self.words.view(np.int64).astype(np.float64), -BITS)

    def scalars(self) -> Floats:
        """The wide integers as numbers, each rounded once."""
        return _floats(self.wide)

    def wide_bytes(self) -> bytes:
        """The wide integers, 8 bytes a word."""
        return self.wide.astype("<u8").tobytes()

    @staticmethod
    def read_wide(raw: bytes, width: int = WIDE) -> Words:
        """The wide integers in some bytes."""
        return np.frombuffer(raw, "<u8").astype(np.uint64).reshape(-1, width)


def _integers(values: Floats, width: int) -> Words:
    """Rounded to integers of so many words, half of their bits behind the point; negative ones as two's complements."""
    left = np.fmod(np.rint(np.ldexp(np.abs(values), 32 * width)), 2.0 ** (64 * width))
    made = np.zeros((len(values), width), np.uint64)
    for j in reversed(range(width)):  # all of this is exact: a float has 53 bits
        part = np.floor(np.ldexp(left, -64 * j))
        made[:, j] = part.astype(np.uint64)
        left -= np.ldexp(part, 64 * j)
    return np.where((values < 0)[:, None], _sum(~made, _unit(width)), made)


def _floats(wide: Words) -> Floats:
    """The floats closest to integers of several words, half of whose bits are behind the point."""
    count, width = wide.shape
    negative = (wide[:, -1] >> np.uint64(63)).astype(bool)
    size = np.where(negative[:, None], _sum(~wide, _unit(width)), wide)
    top = width - 1 - np.argmax((size != 0)[:, ::-1], axis=1) if count else np.zeros(0, np.int64)
    place, below = np.arange(count), np.where(top > 0, top - 1, 0)
    high, low = size[place, top], np.where(top > 0, size[place, below], np.uint64(0))
    rest = ((size != 0) & (np.arange(width) < below[:, None])).any(1)
    shift = np.maximum(64 - np.frexp(high.astype(np.float64))[1], 0).astype(np.uint64)  # zeros before the first one
    lead = (high << shift) | ((low >> _ONE) >> (np.uint64(63) - np.minimum(shift, np.uint64(63))))
    lead |= (((low << shift) != 0) | rest).astype(np.uint64)  # what is cut off decides between two floats only
    found: Floats = np.ldexp(lead.astype(np.float64), 64 * top - shift.astype(np.int64) - 32 * width)
    found[negative] *= -1
    return found


def _unit(width: int) -> Words:
    """The integer 1."""
    return np.array([[1] + [0] * (width - 1)], np.uint64)


def _sum(a: Words, b: Words) -> Words:
    """Sums of integers of several words, modulo the next power of two."""
    made = a + b
    carry = made[:, 0] < a[:, 0]
    for j in range(1, made.shape[1]):
        over = made[:, j] < a[:, j]
        made[:, j] += carry
        carry = over | (carry & (made[:, j] == 0))
    return made


def total(parts: Iterable[Numbers]) -> Numbers:
    """The sum."""
    found = list(parts)
    words, wide = found[0].words.copy(), found[0].wide
    for one in found[1:]:
        words += one.words
        wide = _sum(wide, one.wide)
    return Numbers(words, wide)


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
        width = to.wide.shape[1]
        wide = Numbers.read_wide(_stream(derive(self.seed, self.context + b"wide"), 8 * to.wide.size), width)
        return Numbers(to.words, _sum(to.wide, wide if sign > 0 else _sum(~wide, _unit(width))))


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
