"""Noise of counts in bins that costs about as much of ranks in fine bins as in coarse ones.

Noise in each bin alone adds up over many bins. Here the numbers in halves, quarters, ... of the bins have noise, each
its own, and told are the counts that agree best with all of them and add up to the exact total (Hay, Rastogi, Miklau
and Suciu 2010). A sample is in a few such parts only, however many bins there are, and wherever their edges lie.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@functools.cache
def factor(bins: int) -> Floats:
    """R ``(bins, bins - 1)`` of the noise R u, with u standard normal, where that of every part has variance 1.

    Examples
    --------
    >>> np.abs(factor(2)).round(3)  # of two halves, where each was told with noise
    array([[0.707],
           [0.707]])
    """
    parts, undivided = [], [(0, bins)]
    while undivided:
        low, high = undivided.pop()
        if high - low > 1:
            halves = [(low, (low + high) // 2), ((low + high) // 2, high)]
            parts += [(np.arange(bins) >= first) & (np.arange(bins) < last) for first, last in halves]
            undivided += halves
    basis = np.linalg.svd(np.eye(bins) - 1 / bins)[0][:, : bins - 1]  # of what adds up to 0
    inside = np.array(parts, np.float64) @ basis
    made: Floats = basis @ np.linalg.cholesky(np.linalg.inv(inside.T @ inside))
    return made
