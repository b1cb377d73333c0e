"""Samples in an order whose every beginning has the labels in their shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedcomposite import rng


def stratified(labels: npt.NDArray[Any], seed: int, client: int) -> npt.NDArray[np.int64]:
    """The rows of one client, at random, so that any first part of them has every label in its share, within one.

    Of a label with m rows the j-th, in a random order, comes at (j + u) / m with one u for the label.

    Examples
    --------
    >>> order = stratified(np.array([0] * 6 + [1] * 3), seed=0, client=0)
    >>> [int((order[:3] < 6).sum()), int((order[:6] < 6).sum())]
    [2, 4]
    """
    kinds, which, counts = np.unique(labels, return_inverse=True, return_counts=True)
    keys = rng.words(seed, rng.Use.SPLIT, np.uint64(client), 0, np.uint64(0), len(labels))
    shifts = rng.words(seed, rng.Use.SPLIT, np.uint64(client), 1, np.uint64(0), len(kinds)) / 2.0**32
    at = np.empty(len(labels))
    for kind, count in enumerate(counts.tolist()):
        mine = np.flatnonzero(which == kind)
        at[mine[np.argsort(keys[mine], kind="stable")]] = (np.arange(count) + shifts[kind]) / count
    return np.lexsort((keys, at))
