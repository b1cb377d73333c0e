"""Estimates from several completed copies of tables whose gaps were imputed by draws (Rubin's rules).

With estimates q_k and variances u_k of m copies, their means q and u, and the variance b of the q_k,

    t = u + (1 + 1/m) b,    r = (1 + 1/m) b / u,    lambda = (1 + 1/m) b / t

are the variance of q, the increase by what was missing, and its share. Intervals have quantiles of t with Barnard and
Rubin's (1999) degrees of freedom: 1 / (1/v + 1/w), v = (m - 1) / lambda^2, w = (1 - lambda) n (n + 1) / (n + 3) with
those n of complete data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy  # which loads what is used of it
import torch
from torch import Tensor

from fedcomposite._validation import Inside, refuse, wrong_arguments

Floats = npt.NDArray[np.float64]


class Asker(Protocol):
    """Who answers: a driver, or one that asks about some samples only."""

    transport: Any

    @property
    def centre(self) -> Tensor | None:
        """What features are taken about."""

    @property
    def copies(self) -> int:
        """How many completed copies of the samples there are."""

    def ask(self, requests: Sequence[Any]) -> list[Any]:
        """The sums over all sites, a dictionary for each request."""


class OneCopy:
    """Who asks about one completed copy."""

    copies = 1

    def __init__(self, driver: Asker, number: int) -> None:
        self._driver, self._number, self.transport = driver, number, driver.transport

    @property
    def centre(self) -> Tensor | None:
        """What features are taken about."""
        return self._driver.centre

    def ask(self, requests: Sequence[Any]) -> list[Any]:
        """The sums over this copy's samples."""
        return self._driver.ask([replace(one, rows=replace(one.rows, copy_number=self._number)) for one in requests])


def each_copy(driver: Asker) -> list[Asker]:
    """The driver, or one for each completed copy."""
    return [driver] if driver.copies == 1 else [OneCopy(driver, k + 1) for k in range(driver.copies)]


def combine_imputations(
    estimates: npt.ArrayLike, errors: npt.ArrayLike, *, df: float = math.inf, level: Inside = 0.95
) -> pd.DataFrame:
    """Estimates from several completed copies as one, by Rubin's rules.

    Parameters
    ----------
    estimates, errors : array_like
        Estimates and their standard errors, ``(copies,)`` or ``(copies, coefficients)``.
    df : float
        Degrees of freedom that complete data would have: samples less coefficients.
    level : float
        Of the intervals.

    Returns
    -------
    DataFrame
        A row per coefficient: ``estimate``, ``se``, ``lower``, ``upper``, ``z``, ``p``, the degrees of freedom ``df``,
        and ``missing_share``, the share of the variance that is due to what was missing.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> fc.combine_imputations([1.0, 1.2, 1.1], [0.2, 0.2, 0.2])[["estimate", "se", "missing_share"]].round(3)
       estimate     se  missing_share
    0       1.1  0.231           0.25
    """
    refuse(wrong_arguments(combine_imputations, locals()))
    q, se = (np.asarray(one, float) for one in (estimates, errors))
    if q.shape != se.shape or q.ndim not in (1, 2) or len(q) < 2:
        raise ValueError(f"estimates {q.shape} and errors {se.shape}, must have one shape: two copies or more")
    q, se = q.reshape(len(q), -1), se.reshape(len(se), -1)
    m = len(q)
    within, between = (se**2).mean(0), (1 + 1 / m) * q.var(0, ddof=1)
    total, middle = within + between, q.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(total > 0, between / total, 0.0)
        old = (m - 1) / share**2
        seen = (1 - share) * (df * (df + 1) / (df + 3) if math.isfinite(df) else math.inf)
        freedom = 1 / (1 / old + 1 / seen)
        error = np.sqrt(total)
        t = middle / error
    half = scipy.special.stdtrit(freedom, (1 + level) / 2)
    half = np.where(np.isfinite(freedom), half, scipy.special.ndtri((1 + level) / 2))
    p = 2 * np.where(np.isfinite(freedom), scipy.special.stdtr(freedom, -np.abs(t)), scipy.special.ndtr(-np.abs(t)))
    columns = {"estimate": middle, "se": error, "lower": middle - half * error, "upper": middle + half * error}
    return pd.DataFrame({**columns, "z": t, "p": p, "df": freedom, "missing_share": share})


def combined_table(tables: Sequence[pd.DataFrame], df: float, level: float) -> pd.DataFrame:
    """The tables of confidence intervals of every copy as one, on both scales."""
    made = tables[0].copy()
    for unit in ("", "unit_"):
        if f"{unit}estimate" not in made:
            continue
        q, se = (np.stack([one[f"{unit}{name}"].to_numpy() for one in tables]) for name in ("estimate", "se"))
        found = combine_imputations(q, se, df=df, level=level)
        for name in ("estimate", "se", "lower", "upper", "z", "p"):
            made[f"{unit}{name}"] = found[name].to_numpy()
        ends = {"ratio": "estimate", "lower": "lower", "upper": "upper"}
        for kind in ("odds", "rate", "hazard"):
            for end, of in ends.items():
                if f"{unit}{kind}_{end}" in made:
                    made[f"{unit}{kind}_{end}"] = np.exp(made[f"{unit}{of}"])
        if not unit:
            made["df"], made["missing_share"] = found["df"].to_numpy(), found["missing_share"].to_numpy()
    return made


def joint_statistic(estimates: Tensor, covariances: Tensor) -> tuple[float, float]:
    """Li, Raghunathan and Rubin's (1991) statistic of no effect, and the second degrees of freedom of its F.

    ``estimates`` are ``(copies, k)``, ``covariances`` ``(copies, k, k)``.
    """
    m, k = estimates.shape
    U, q = covariances.mean(0), estimates.mean(0)
    B = torch.cov(estimates.T).reshape(k, k)
    r = (1 + 1 / m) * float(torch.linalg.solve(U, B).trace()) / k
    statistic = float(q @ torch.linalg.solve(U, q)) / (k * (1 + r))
    t = k * (m - 1)
    if t > 4:
        return statistic, 4 + (t - 4) * (1 + (1 - 2 / t) / r) ** 2
    return statistic, t * (1 + 1 / k) * (1 + 1 / r) ** 2 / 2
