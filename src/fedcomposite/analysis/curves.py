"""Curves from samples in bins: precision and recall, calibration."""

from __future__ import annotations

import math
from collections.abc import Generator

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]

_SPAN = 0.75  # of the samples that a local line is fitted to, as R's loess has it
_STEPS = 30  # of Newton's method for a slope; each is an exchange with the sites


def average_precision(zeros: Floats, ones: Floats) -> float:
    """The mean of the precision over samples of class 1, those of a bin being tied.

    ``zeros`` and ``ones`` count the classes in each bin, the largest scores first.
    """
    tp, fp, some = ones.cumsum(), zeros.cumsum(), ones > 0
    return float((ones * tp)[some] @ (1 / (tp + fp)[some]) / ones.sum()) if some.any() else math.nan


def recalibrated(z: Floats, n: Floats, ones: Floats, slope: bool = True) -> tuple[float, float]:
    """Intercept and slope of a logistic regression of the outcomes on margins; NaN where it has none."""
    alike = slope and (len(z) < 2 or np.ptp(z) <= 1e-9 * max(1.0, float(np.abs(z).max())))
    if not 0 < ones.sum() < n.sum() or alike:
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


def rate_slope(wanted: float) -> Generator[float, tuple[float, float], float]:
    """The slope of a Poisson regression of counts on margins, ``wanted`` being the mean margin of what was counted.

    It yields slopes b and is sent mean and variance of the margins under weights exp(b z) times exposure: at the slope
    that it returns the mean is the wanted one; it grows with b. NaN where there is none.
    """
    b, low, high = 1.0, -math.inf, math.inf
    for _ in range(_STEPS):
        mean, spread = yield b
        low, high = (b, high) if mean < wanted else (low, b)
        move = (wanted - mean) / spread if spread > 0 else math.nan
        if math.isnan(move):
            return math.nan
        if abs(move) <= 1e-9 * max(1.0, abs(b)):
            return b + move  # the error of a Newton step is the square of it
        further = b + min(max(move, -1.0), 1.0)  # far slopes make numbers too large to be told
        b = further if low < further < high else (low + high) / 2
    return math.nan


def calibration_line(slope: bool) -> Generator[tuple[float, float], dict[str, float] | None, tuple[float, float]]:
    """Intercept a and slope b of a logistic regression of outcomes on margins z; NaN where it has none.

    It yields lines (a, b), the first (0, 1), and is sent the sums there (``CALIBRATION`` of the protocol), or None if
    they are not known. Without ``slope`` b stays 1.
    """
    at, best, move, step, before = np.array([0.0, 1.0]), math.inf, np.zeros(2), 1.0, 0.0
    nothing = math.nan, math.nan
    for _ in range(_STEPS):
        told = yield float(at[0]), float(at[1])
        if told is None or not 0 < told["ones"] < told["weight"]:
            return nothing
        if told["loss"] > best + 1e-12 * abs(best):  # too far
            step /= 2
            at = at - step * move
            continue
        gradient = np.array([told["ones"] - told["p"], told["z_ones"] - told["zp"]])
        hessian = np.array([[told["v"], told["vz"]], [told["vz"], told["vzz"]]])
        if slope and np.linalg.det(hessian) > 1e-12 * told["v"] * told["vzz"]:
            move = np.linalg.solve(hessian, gradient)
        elif not slope and told["v"] > 0:
            move = np.array([gradient[0] / told["v"], 0.0])
        else:
            return nothing
        size, scale = float(np.abs(move).max()), max(1.0, float(np.abs(at).max()))
        ahead = (
            size**3 / before**2 if before > 0 else math.inf
        )  # errors are squared: about what is left after this move
        if size <= 1e-9 * scale or (step == 1.0 and size < before and ahead <= 1e-12 * scale):
            return float(at[0] + move[0]), float(at[1] + move[1])
        best, step, before = told["loss"], 1.0, size
        move = move * min(1.0, 2.0 / size)  # far lines make margins too large to be told
        at = at + move
    return nothing
