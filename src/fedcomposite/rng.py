"""Counter-based random numbers: the same counter gives the same number in every process and on every device.

The generator is Philox4x32-10 (Salmon, Moraes, Dror & Shaw, *Parallel random numbers: as easy as 1, 2, 3*, SC 2011):
a keyed bijection of 128-bit counters. There is no state to advance or to save, so a minibatch is a pure
function of (seed, client, round, local step), and a resumed or distributed run draws the same ones.

The 64-bit seed is the key; the four 32-bit words of the counter are (position // 4, step, round, client). What a number
is used for is mixed into the key, so batches, client sampling and the methods' own coins are independent.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF

Ints = npt.NDArray[np.uint64]


class Use(IntEnum):
    """What the numbers are for; each use is an independent stream."""

    BATCH = 0
    SHUFFLE = 1
    COHORT = 2
    METHOD = 3
    MODEL = 4
    FOLD = 5
    POISSON = 6
    NOISE = 7
    SPLIT = 8


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Four 32-bit words for each counter; ``uint64`` arrays or ``int64`` tensors, with values below 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1  # wraps modulo 2**64
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def _key(seed: int, use: Use) -> tuple[int, int]:
    # An odd multiple of 2**32 / golden ratio per use keeps the keys of different uses apart.
    return seed & _LOW, ((seed >> 32) ^ (int(use) * _W0)) & _LOW


def words(seed: int, use: Use, client: Any, round: int | Tensor, step: Any, count: int) -> Any:
    """``count`` 32-bit words along a new last axis for every (client, step).

    ``client`` and ``step`` broadcast against each other; NumPy ``uint64`` arrays or torch ``int64`` tensors. Beside
    tensors ``round`` may be one as well: in a recorded program it changes.
    """
    blocks = -(-count // 4)
    if isinstance(client, Tensor):
        position: Any = torch.arange(blocks, device=client.device)
        shape = (*torch.broadcast_shapes(client.shape, step.shape), blocks)  # type: ignore[no-untyped-call]
        client, step, position = (t.expand(shape) for t in (client[..., None], step[..., None], position))
        out: Any = torch.stack(philox((position, step, position * 0 + round, client), _key(seed, use)), dim=-1)
        return out.flatten(-2)[..., :count]
    position = np.arange(blocks, dtype=np.uint64)
    client, step, position = np.broadcast_arrays(
        np.asarray(client, np.uint64)[..., None], np.asarray(step, np.uint64)[..., None], position
    )
    out = np.stack(philox((position, step, np.full_like(position, round), client), _key(seed, use)), axis=-1)
    return out.reshape(*out.shape[:-2], -1)[..., :count]


def uniforms(seed: int, use: Use, client: Tensor, round: int, step: int, count: int) -> Tensor:
    """``count`` numbers in (0, 1) along a new last axis for every client, float64, on the client tensor's device."""
    drawn: Tensor = words(seed, use, client, round, torch.full_like(client, step), count)
    return (drawn.to(torch.float64) + 0.5) / 2.0**32


def batches(seed: int, clients: Ints, sizes: Ints, round: int, steps: range, batch: int) -> Ints:
    """Sample indices ``(steps, clients, batch)``, drawn with replacement, each below its client's size."""
    step = np.arange(steps.start, steps.stop, dtype=np.uint64)[:, None]
    drawn: Ints = words(seed, Use.BATCH, clients[None, :], round, step, batch)
    return (drawn * sizes[None, :, None]) >> np.uint64(32)


def epochs(seed: int, clients: Ints, sizes: Ints, round: int, steps: range, batch: int) -> Ints:
    """Like :func:`batches`, but without replacement within an epoch.

    Each round starts a fresh shuffle of every client's samples and reads it from left to right; when it
    is used up the next one follows, so a batch may straddle two epochs.
    """
    out = np.empty((len(steps), len(clients), batch), np.uint64)
    at = np.arange(steps.start * batch, steps.stop * batch)
    for j, (client, size) in enumerate(zip(clients, sizes, strict=True)):
        m = int(size)
        first, last = int(at[0]) // m, int(at[-1]) // m
        keys = words(seed, Use.SHUFFLE, client, round, np.arange(first, last + 1), m)
        order = np.argsort(keys, axis=-1, kind="stable")
        out[:, j] = order[at // m - first, at % m].reshape(len(steps), batch)
    return out


def choose(seed: int, round: int, n: int, count: int, replace: bool = False) -> npt.NDArray[np.int64]:
    """``count`` of ``range(n)``, sorted; cost grows with ``count``, not with ``n`` (Floyd's algorithm)."""
    drawn = words(seed, Use.COHORT, np.uint64(0), round, np.uint64(0), count)
    if replace:
        return np.sort((drawn * np.uint64(n)) >> np.uint64(32)).astype(np.int64)
    chosen: set[int] = set()
    for top, word in zip(range(n - count, n), drawn.tolist(), strict=True):
        pick = word * (top + 1) >> 32
        chosen.add(top if pick in chosen else pick)
    return np.sort(np.fromiter(chosen, np.int64, count))


SERVER = _LOW
"""A client number that no client has: the coins that all parties share are drawn under it."""


def geometric(p: float, seed: int, round: int) -> int:
    """Tosses of a shared p-coin until the first head, in round ``round``: 1 + floor(log u / log(1 - p)), u uniform."""
    if p == 1:
        return 1
    word = int(words(seed, Use.METHOD, SERVER, round, 0, 1)[0])
    return 1 + math.floor(math.log((word + 0.5) / 2.0**32) / math.log1p(-p))
