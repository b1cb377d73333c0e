"""From queries to epsilon, by Google's ``dp-accounting`` (the extra ``privacy``).

A query is a sum of clipped vectors with Gaussian noise, over samples that take part with probability ``rate`` each.
Neighbouring data sets differ by one sample that is there or not. Without sampling the composition of all queries is one
Gaussian mechanism, whose epsilon is exact; with sampling it is bounded by Rényi divergences.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedcomposite._faults import MissingPackageError
from fedcomposite._validation import Count, Inside, Positive, Probability, refuse, wrong_arguments

ORDERS = (2, 2.25, 2.5, 2.75, *range(3, 64), 80, 96, 128, 192, 256, 512, 1024)
"""Orders of the Rényi divergences among which the best bound is taken."""
_LEAST, _MOST = 1e-3, 1e6  # noise multipliers among which one is looked for; less is none at all


class Query(NamedTuple):
    """One noised sum: the noise's standard deviation in units of the clipping norm, and who takes part."""

    noise: float
    rate: float = 1.0


def compose(queries: Mapping[Query, int], delta: float) -> float:
    """The epsilon of so many queries of each kind, at this delta.

    >>> round(compose({Query(noise=1.0): 1}, delta=1e-5), 4)
    4.3772
    """
    wrong = [count for count in queries.values() if isinstance(count, str) or not count >= 0]
    refuse([f"queries = {count!r}, must be an integer >= 0" for count in wrong])
    asked = tuple(sorted((Query(*query), count) for query, count in queries.items() if count > 0))
    return _epsilon(asked, delta) if asked else 0.0


@functools.lru_cache(maxsize=1024)
def _epsilon(asked: tuple[tuple[Query, int], ...], delta: float) -> float:
    package = _package()
    if min(query.noise for query, _ in asked) < _LEAST:
        return math.inf
    if all(query.rate == 1 for query, _ in asked):
        size = math.sqrt(sum(count / query.noise**2 for query, count in asked))
        with np.errstate(divide="ignore"):  # on its way the package takes log(0)
            return float(package.get_epsilon_gaussian(1 / size, delta))
    accountant = package.rdp.RdpAccountant(ORDERS)
    for query, count in asked:
        noised = package.GaussianDpEvent(query.noise)
        accountant.compose(package.PoissonSampledDpEvent(query.rate, noised) if query.rate < 1 else noised, count)
    return float(accountant.get_epsilon(delta))


def noise_for(*, epsilon: Positive, delta: Inside, queries: Count, rate: Probability = 1.0) -> float:
    """The least noise multiplier with which so many queries cost at most ``epsilon``, to 0.1 %.

    >>> round(noise_for(epsilon=2.0, delta=1e-5, queries=100), 1)
    19.9
    """
    refuse(wrong_arguments(noise_for, locals()))
    low, high = _LEAST, _MOST
    if compose({Query(high, rate): queries}, delta) > epsilon:
        raise ValueError(f"epsilon = {epsilon:g} with delta = {delta:g} needs noise beyond {_MOST:g} times the clip")
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if compose({Query(middle, rate): queries}, delta) <= epsilon else (middle, high)
    return high


def _package() -> Any:
    try:
        return importlib.import_module("dp_accounting")
    except ModuleNotFoundError as missing:
        raise MissingPackageError(
            f"accounting for privacy needs the package {str(missing.name).partition('.')[0]!r}: "
            "pip install 'fedcomposite[privacy]'"
        ) from None
