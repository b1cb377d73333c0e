"""Where noise and samples come from: the operating system at a site, counters in a simulator.

Whoever knows the noise can take it off, and whoever knows the sample gets no less than the whole: at a real site both
come from the operating system's generator. The counters of a simulator are for studies that can be repeated; their seed
is no secret, so what they give protects nobody, and sites do not use them.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedcomposite import rng

Floats = npt.NDArray[np.float64]
_PARTS = 4  # normal numbers behind one: their sum hides which of the doubles near a number can occur


class Source(Protocol):
    """Random numbers for the queries of some clients; ``query`` counts those of a round."""

    def chosen(self, clients: rng.Ints, sizes: rng.Ints, round: int, query: int, rate: float) -> list[rng.Ints]:
        """The samples of each client that take part, each with probability ``rate``."""

    def normal(self, clients: rng.Ints, round: int, query: int, count: int) -> Floats:
        """Standard normal numbers, ``(clients, count)``."""


class Counters:
    """A pure function of (seed, client, round, query), for simulators only."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def chosen(self, clients: rng.Ints, sizes: rng.Ints, round: int, query: int, rate: float) -> list[rng.Ints]:
        """By one 32-bit word per sample."""
        if rate == 1:
            return [np.arange(m, dtype=np.uint64) for m in sizes.tolist()]
        below = np.uint64(rate * 2.0**32)
        words = (
            rng.words(self._seed, rng.Use.POISSON, client, round, np.uint64(query), int(m))
            for client, m in zip(clients, sizes, strict=True)
        )
        return [np.flatnonzero(drawn < below).astype(np.uint64) for drawn in words]

    def normal(self, clients: rng.Ints, round: int, query: int, count: int) -> Floats:
        """From NumPy's Philox, whose key and counter are made of the same words."""
        seeds = rng.words(self._seed, rng.Use.NOISE, clients, round, np.full(len(clients), query, np.uint64), 4)
        rows = [np.random.Generator(np.random.Philox(key=_joined(words))).standard_normal(count) for words in seeds]
        return np.stack(rows) if rows else np.zeros((0, count))


def _joined(words: rng.Ints) -> rng.Ints:
    """Four 32-bit words as two of 64 bits."""
    joined: rng.Ints = words[0::2] << np.uint64(32) | words[1::2]
    return joined


class System:
    """The operating system's generator; clients, rounds and queries make no difference to it."""

    def chosen(self, clients: rng.Ints, sizes: rng.Ints, round: int, query: int, rate: float) -> list[rng.Ints]:
        """By one number in [0, 1) per sample."""
        drawn = (_uniforms(int(m)) if rate < 1 else np.zeros(int(m)) for m in sizes.tolist())
        return [np.flatnonzero(u < rate).astype(np.uint64) for u in drawn]

    def normal(self, clients: rng.Ints, round: int, query: int, count: int) -> Floats:
        """By Box and Muller, each the sum of four (after Holohan and Braghin, against reading noise off its bits)."""
        size = len(clients) * count
        total = np.zeros(2 * -(-size // 2))
        for _ in range(_PARTS):
            radius = np.sqrt(-2 * np.log1p(-_uniforms(len(total) // 2)))
            angle = 2 * np.pi * _uniforms(len(total) // 2)
            total += np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        normal: Floats = (total[:size] / np.sqrt(_PARTS)).reshape(len(clients), count)
        return normal


def _uniforms(count: int) -> Floats:
    """Multiples of 2**-53 in [0, 1)."""
    raw = np.frombuffer(os.urandom(8 * count), np.uint64)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
