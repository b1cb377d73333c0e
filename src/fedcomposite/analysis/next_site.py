"""Where the number of a further site lies, given those of a few: prediction intervals by a confidence distribution.

The variance between sites that is plugged into an interval is one of many that the estimates allow; with few sites it
is often 0 although they differ. So it is drawn from all that Cochran's Q allows (Nagashima, Noma and Furukawa 2019):
with Q(t) = sum_r l_r(t) z_r^2 for variances v_i + t, z_r normal, and the observed q,

    P(tau^2 <= t) = P(Q(t) >= q),        number of a further site = m(tau^2) + tau z - s(tau^2) u,

where m and s are mean and Hartung and Knapp's error at that variance, u has Student's t. The distributions are computed
here, by inversion of a characteristic function and quadrature, where the paper draws random numbers.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import scipy  # which loads what is used of it

Floats = npt.NDArray[np.float64]
_VARIANCES = 48  # at which the distribution of the variance is computed
_LEVELS = 100  # quantiles of it
_TOP = 0.9995  # the largest
_TERMS = 20_000  # of a series
_SMALL = 1e-5


def sums_above(q: float, weights: Floats) -> Floats:
    """P(sum_r w_r z_r^2 >= q) of independent normal z, for rows of weights ``(rows, terms)``.

    Davies (1973): the characteristic function at equal steps, so short that no mass lies beyond what they tell apart.
    """
    mean, deviation = weights.sum(1), np.sqrt(2 * (weights**2).sum(1))
    step = 2 * math.pi / (2 * np.maximum(q, mean + 12 * deviation))
    found = np.full(len(weights), 0.5)
    for start in range(0, _TERMS, 200):
        k = start + np.arange(200) + 0.5
        angles = 2 * step[:, None, None] * k[:, None] * weights[:, None]
        size = np.exp(-0.25 * np.log1p(angles**2).sum(2)) / (math.pi * k)
        found += (size * np.sin(0.5 * np.arctan(angles).sum(2) - step[:, None] * k * q)).sum(1)
        if float(size[:, -1].max()) * k[-1] < _SMALL:  # all further terms, where they do not alternate
            break
    made: Floats = found.clip(0.0, 1.0)
    return made


def variances(y: Floats, v: Floats) -> Floats:
    """Quantiles of the variance between sites, those of equally probable parts."""
    w = 1 / v
    A = np.diag(w) - np.outer(w, w) / w.sum()
    q = float(y @ A @ y)

    def above(t: Floats) -> Floats:
        root = np.sqrt(v + t[:, None])
        return sums_above(q, np.linalg.eigvalsh(root[:, :, None] * A * root[:, None, :])[:, 1:])

    top = 4 * (float(((y - y.mean()) ** 2).mean()) + float(v.max()))
    for _ in range(40):
        if float(above(np.array([top]))[0]) >= _TOP:
            break
        top *= 4
    grid = np.concatenate([[0.0], np.geomspace(1e-6 * top, top, _VARIANCES)])
    reached = np.maximum.accumulate(above(grid))
    levels = (np.arange(_LEVELS) + 0.5) / _LEVELS
    made: Floats = np.interp(levels, reached, np.sqrt(grid)) ** 2
    return np.where(levels <= reached[0], 0.0, made)


def further_site(y: Floats, v: Floats, level: float, hartung_knapp: bool) -> tuple[float, float]:
    """The interval that holds the number of a further site with probability ``level``."""
    tau2 = variances(y, v)[:, None]
    w = 1 / (v + tau2)
    mean = (w @ y / w.sum(1))[:, None]
    error = np.sqrt((w * (y - mean) ** 2).sum(1) / ((len(y) - 1) * w.sum(1)) if hartung_knapp else 1 / w.sum(1))
    freedom, error, tau = len(y) - 1 if hartung_knapp else math.inf, error[:, None], np.sqrt(tau2)
    error, tau = np.maximum(error, 1e-12 * np.sqrt(v.min())), np.maximum(tau, 1e-12 * np.sqrt(v.min()))
    places, parts = np.polynomial.legendre.leggauss(32)
    places, parts = (places + 1) / 2, parts / 2
    wide = (tau > error)[:, 0]  # what is narrower is summed over, what is wider has its distribution function
    normal, student = scipy.special.ndtri(places), scipy.special.stdtrit(freedom, places)

    def below(x: float) -> float:
        z = (x - mean[wide] + error[wide] * student) / tau[wide]
        u = (x - mean[~wide] - tau[~wide] * normal) / error[~wide]
        whole = (scipy.special.ndtr(z) @ parts).sum() + (scipy.special.stdtr(freedom, u) @ parts).sum()
        return float(whole) / _LEVELS

    far = 10 * float(tau.max() + error.max()) * (1 + abs(float(scipy.special.stdtrit(freedom, (1 - level) / 2))))
    ends = [
        scipy.optimize.brentq(lambda x, p=p: below(x) - p, float(mean.min()) - far, float(mean.max()) + far)
        for p in ((1 - level) / 2, (1 + level) / 2)
    ]
    return float(ends[0]), float(ends[1])
