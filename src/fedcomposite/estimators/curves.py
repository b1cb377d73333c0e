"""Curves from samples in bins: precision and recall, calibration."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]

_SPAN = 0.75  # of the samples that a local line is fitted to, as R's loess has it


def average_precision(zeros: Floats, ones: Floats) -> tuple[float, float]:
    """The mean of the precision over samples of class 1, and the most that ties within bins can change it.

    ``zeros`` and ``ones`` count the classes in each bin, the largest scores first.
    """
    total = ones.sum()
    if not total:
        return math.nan, math.nan
    tp, fp = ones.cumsum(), zeros.cumsum()
    some = ones > 0
    tp, fp, here, against = tp[some], fp[some], ones[some], zeros[some]
    middle = float((here * tp / (tp + fp)).sum() / total)
    before = tp - here
    best = tp / (tp + fp - against)
    least = np.minimum(here, 1.0)  # the first of the bin, after all that it may follow
    worst = np.minimum(best, (before + least) / (before + least + fp))
    alone = here + against <= 1
    low = np.where(alone, tp / (tp + fp), worst)
    return middle, float(max((here * best).sum() / total - middle, middle - (here * low).sum() / total))


def recalibrated(z: Floats, n: Floats, ones: Floats, slope: bool = True) -> tuple[float, float]:
    """Intercept and slope of a logistic regression of the outcomes on margins; NaN where it has none."""
    if not 0 < ones.sum() < n.sum() or (slope and len(z) < 2):
        return math.nan, math.nan
    X = np.stack([np.ones_like(z), z], 1) if slope else np.ones((len(z), 1))
    offset = np.zeros_like(z) if slope else z
    b = np.zeros(X.shape[1])
    value = _deviance(X @ b + offset, n, ones)
    for _ in range(100):
        p = _sigmoid(X @ b + offset)
        gradient = X.T @ (ones - n * p)
        if np.abs(gradient).max() < 1e-10 * n.sum():
            break
        move = np.linalg.pinv((X * (n * p * (1 - p))[:, None]).T @ X) @ gradient
        step = 1.0
        while _deviance(X @ (b + step * move) + offset, n, ones) > value + 1e-12 * abs(value) and step > 1e-8:
            step /= 2
        b = b + step * move
        value = _deviance(X @ b + offset, n, ones)
        if np.abs(b).max() > 1e4:  # outcomes that the margins separate
            return math.nan, math.nan
    return float(b[0]), float(b[1]) if slope else 1.0


def _sigmoid(z: Floats) -> Floats:
    e = np.exp(-np.abs(z))
    return np.asarray(np.where(z >= 0, 1, e) / (1 + e))


def _deviance(z: Floats, n: Floats, ones: Floats) -> float:
    return float((n * np.logaddexp(0, z) - ones * z).sum())


def smoothed(p: Floats, n: Floats, ones: Floats) -> Floats:
    """The share of class 1 near each probability: local lines with tricube weights over 75 % of the samples (loess)."""
    shares, made = ones / n, np.empty_like(p)
    most = _SPAN * n.sum()
    for k, at in enumerate(p):
        distance = np.abs(p - at)
        order = np.argsort(distance, kind="stable")
        inside = order[np.searchsorted(n[order].cumsum(), most - 1e-9).clip(0, len(p) - 1)]
        reach = max(float(distance[inside]), 1e-12)
        w = n * np.clip(1 - (distance / (reach * (1 + 1e-9))) ** 3, 0, None) ** 3
        total = w.sum()
        middle = (w * p).sum() / total
        spread = (w * (p - middle) ** 2).sum()
        tilt = (w * (p - middle) * shares).sum() / spread if spread > 1e-14 * total else 0.0
        made[k] = (w * shares).sum() / total + tilt * (at - middle)
    return np.clip(made, 0.0, 1.0)


def integrated_error(p: Floats, n: Floats, ones: Floats) -> float:
    """The integrated calibration index (Austin & Steyerberg 2019): the mean of |p - smoothed share|."""
    if not len(p):
        return math.nan
    return float((n * np.abs(p - smoothed(p, n, ones))).sum() / n.sum())


def grouped(n: Floats, predicted: Floats, observed: Floats, groups: int) -> pd.DataFrame:
    """Means of what was predicted and observed, whose sums in bins are given, in groups of about equal size."""
    at = np.minimum((groups * (n.cumsum() - n / 2) / n.sum()).astype(int), groups - 1)
    size, said, seen = (np.bincount(at, v, groups) for v in (n, predicted, observed))
    some = size > 0
    columns = {"samples": size[some], "predicted": said[some] / size[some], "observed": seen[some] / size[some]}
    return pd.DataFrame(columns)


def rate_slope(z: Floats, n: Floats, wanted: float) -> float:
    """The slope of a Poisson regression of counts on margins, ``wanted`` being the mean margin of what was counted.

    At the slope b the mean of z under weights n exp(b z) is that; it grows with b. NaN where there is none.
    """
    z, wanted = z - z.max(), wanted - z.max()
    b, low, high = 1.0, -math.inf, math.inf
    for _ in range(200):
        w = n * np.exp(b * z - (b * z).max())
        mean = float((w * z).sum() / w.sum())
        spread = float((w * (z - mean) ** 2).sum() / w.sum())
        low, high = (b, high) if mean < wanted else (low, b)
        move = (wanted - mean) / spread if spread > 0 else math.nan
        if not abs(b) < 1e4 or math.isnan(move):
            return math.nan
        if abs(move) <= 1e-12 * max(1.0, abs(b)):
            return b + move
        b = b + move if low < b + move < high else (low + high) / 2 if math.isfinite(low + high) else 2 * b + move
    return b
