"""Vectors with many zeros as they travel: the numbers that are there, and where.

The places are told in one of two ways, whichever takes fewer bytes: a bit for each entry, or, where few are left, one
byte for each number that is there (its place among 255 entries in a row) and one for each such row (how many there
are). What an encoding weighs depends on the number of nonzero entries alone, so a simulation counts what a federation
sends. Nothing is lost: entries are nonzero by their bits, so that a zero with a sign stays one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

LEAST = 4096
"""Entries from which on it is worth looking for zeros."""
ROW = 255
"""Entries of a row, at most what a byte can count."""
SHAPE, VALUES, BITS, PLACES, COUNTS = "/shape", "/values", "/bits", "/places", "/counts"
"""The parts that stand for a vector, after its name."""
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def sizes(tensor: Tensor, clients: bool = False) -> int:
    """Bytes of a vector as it travels; with ``clients``, of one for each entry of its first axis."""
    count = len(tensor) if clients else 1
    whole = tensor.nbytes // max(1, count)
    if not count or not _worth_a_look(tensor, tensor.numel() // count):
        return tensor.nbytes
    words = _words(tensor).reshape(count, -1)
    n, item = words.shape[1], tensor.element_size()
    return sum(min(whole, k * item + min(_bits(n), _rows(n) + k)) for k in _counts(words))


def encode(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The vectors by their names, and in place of one with many zeros the parts that stand for it."""
    made: dict[str, Tensor] = {}
    for name, tensor in vectors.items():
        made |= {f"{name}{end}": part for end, part in _parts(tensor).items()}
    return made


def _parts(tensor: Tensor) -> dict[str, Tensor]:
    """What stands for a vector, or itself where nothing is shorter."""
    if not _worth_a_look(tensor, tensor.numel()):
        return {"": tensor}
    flat = tensor.detach().cpu().reshape(-1)
    words, n = _words(flat), flat.numel()
    (k,) = _counts(words[None])
    if tensor.nbytes <= k * flat.element_size() + min(_bits(n), _rows(n) + k):
        return {"": tensor}
    there = words != 0
    parts = {SHAPE: torch.tensor(tensor.shape), VALUES: flat[there]}
    if _bits(n) <= _rows(n) + k:
        return parts | {BITS: torch.from_numpy(np.packbits(there.numpy(), bitorder="little"))}
    at = there.nonzero().squeeze(1)
    counts = torch.bincount(at // ROW, minlength=_rows(n))
    return parts | {PLACES: (at % ROW).to(torch.uint8), COUNTS: counts.to(torch.uint8)}


def fits(parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]], dtype: torch.dtype, most: int) -> bool:
    """Whether shapes and types are those of what stands for a vector of at most so many entries."""
    by_bits = BITS in parts
    if parts.keys() != {SHAPE, VALUES} | ({BITS} if by_bits else {PLACES, COUNTS}):
        return False
    (axes, words), (values, kind) = parts[SHAPE], parts[VALUES]
    if len(axes) != 1 or axes[0] > 8 or words != torch.int64 or len(values) != 1 or values[0] > most or kind != dtype:
        return False
    longest = {BITS: _bits(most), PLACES: values[0], COUNTS: _rows(most)}
    rest = [(k, *v) for k, v in parts.items() if k in longest]
    return all(len(shape) == 1 and shape[0] <= longest[k] and kind == torch.uint8 for k, shape, kind in rest)


def decode(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The vector of a shape that some parts stand for; ValueError if they do not fit each other."""
    values, n = parts[VALUES], math.prod(shape)
    made = values.new_zeros(n)
    if (bits := parts.get(BITS)) is not None:
        there = torch.from_numpy(np.unpackbits(bits.numpy(), bitorder="little")).bool()
        if int(torch.count_nonzero(there)) != len(values) or bool(there[n:].any()) or len(there) < n:
            raise ValueError("its numbers and their places differ")
        return made.masked_scatter_(there[:n], values).reshape(shape)
    counts, places = parts[COUNTS].long(), parts[PLACES].long()
    if int(counts.sum()) != len(places):
        raise ValueError("counts and places of its numbers differ")
    at = torch.repeat_interleave(torch.arange(len(counts)) * ROW, counts) + places
    if bool((places >= ROW).any()) or bool((at[1:] <= at[:-1]).any()):
        raise ValueError("the places of its numbers are out of order")
    if len(at) != len(values) or (len(at) and int(at[-1]) >= n):
        raise ValueError("its numbers and their places differ")
    return made.index_copy_(0, at, values).reshape(shape)


def _worth_a_look(tensor: Tensor, entries: int) -> bool:
    return entries >= LEAST and tensor.is_floating_point() and tensor.element_size() in _WORDS


def _words(tensor: Tensor) -> Tensor:
    """The entries' bits, as whole numbers."""
    return tensor.detach().view(_WORDS[tensor.element_size()])


def _counts(rows: Tensor) -> list[int]:
    """How many entries of each row are not zero; a row at a time is eight times as fast in memory."""
    if rows.device.type != "cpu":
        return [int(k) for k in torch.count_nonzero(rows, dim=1).tolist()]
    return [int(torch.count_nonzero(row)) for row in rows]


def _bits(n: int) -> int:
    return -(-n // 8)


def _rows(n: int) -> int:
    return -(-n // ROW)
