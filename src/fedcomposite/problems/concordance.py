"""Pairs of samples whose order in time a model's margins should have: what a concordance index counts.

An event at t makes a pair with every sample of its group that was there and left later, or left at t without an event.
All pairs are counted in O(m log m), by the bits of the margins' ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Pairs(NamedTuple):
    """Of each sample the weight of its pairs, zero where it has no event, ``(m,)`` each."""

    right: Floats
    """The sample that had its event has the larger margin."""
    tied: Floats
    """Both have the same margin."""
    all: Floats


def pairs(
    margins: Floats, time: Floats, event: Floats, entry: Floats | None = None, group: Ints | None = None,
    weight: Floats | None = None
) -> Pairs:  # fmt: skip
    """Count the pairs of each event; those of different groups are not compared.

    >>> found = pairs(np.array([2.0, 1.0, 1.0]), np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 0.0]))
    >>> float(found.right.sum()), float(found.tied.sum()), float(found.all.sum())
    (2.0, 1.0, 3.0)
    """
    m = len(margins)
    group = np.zeros(m, np.int64) if group is None else group
    weight = np.ones(m) if weight is None else weight
    rank = np.unique(margins, return_inverse=True)[1].reshape(-1)
    asks = np.flatnonzero((event > 0) & (weight > 0))
    kind = np.where(event > 0, 0, 2)  # events of the same time come before the question, censored samples behind it
    made = _behind(rank, weight, group, time, kind, asks)
    if entry is not None and np.isfinite(entry).any():
        absent = _behind(rank, weight, group, entry, np.full(m, 2), asks, time)
        made = [a - b for a, b in zip(made, absent, strict=True)]
    found = [np.zeros(m) for _ in range(3)]
    for whole, part in zip(found, made, strict=True):
        whole[asks] = part * weight[asks]
    return Pairs(*found)


def _behind(
    rank: Ints, weight: Floats, group: Ints, when: Floats, kind: Ints, asks: Ints, asked_at: Floats | None = None
) -> list[Floats]:
    """For each question the weights of points behind it in time: with a lower rank, with the same, and of all."""
    at = (when if asked_at is None else asked_at)[asks]
    order = np.lexsort((np.r_[kind, np.ones(len(asks), np.int64)], np.r_[when, at], np.r_[group, group[asks]]))
    ranks, groups = np.r_[rank, rank[asks]][order], np.r_[group, group[asks]][order]
    points = np.r_[weight, np.zeros(len(asks))][order]
    question = np.r_[np.zeros(len(rank), bool), np.ones(len(asks), bool)][order]
    lower = np.zeros(len(order))
    everything = _after(points, groups)
    for bit in range(int(rank.max(initial=0)).bit_length() - 1, -1, -1):
        prefix = (groups * (int(rank.max()) + 2) + (ranks >> (bit + 1))).astype(np.int64)
        by = np.argsort(prefix, kind="stable")
        one = (ranks[by] >> bit) & 1
        low = _after(np.where(one == 0, points[by], 0.0), prefix[by])
        lower[by] += np.where(one == 1, low, 0.0)
    same = groups * (int(rank.max(initial=0)) + 2) + ranks
    by = np.argsort(same, kind="stable")
    tied = np.empty(len(order))
    tied[by] = _after(points[by], same[by])
    back = np.empty(len(asks), np.int64)
    back[order[question] - len(rank)] = np.flatnonzero(question)
    return [lower[back], tied[back], everything[back]]


def _after(values: Floats, groups: Ints) -> Floats:
    """The sum of the values behind each place, within runs of the same group."""
    total = np.cumsum(values)
    last = np.searchsorted(groups, groups, side="right") - 1 if len(groups) else groups
    return np.asarray(total[last] - total)
