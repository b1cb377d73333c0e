"""Cox's partial likelihood for the fuzz, by its definition: every event beside everyone at risk, a row each.

    sum_r q_r log(sum_k C_rk exp(z_k)) - sum_j a_j z_j

is what the samples together say, in Breslow's way and in Efron's, with weights, late entries, and strata within sites.
Row r is an event: q_r is its weight (Efron's: the mean over those that happen at the same time), and C_rk the weight of
sample k, relative to the mean of its site, if it is at risk then: it entered before, and leaves then or later. In
Efron's way the l-th of d tied events has (1 - l/d) of their weights at risk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np

Array = np.ndarray[Any, Any]
TIME, EVENT, ENTRY, STRATUM, SITE = range(5)


@dataclass(frozen=True)
class Likelihood:
    """The partial likelihood of some samples, from their margins ``(n,)``."""

    q: Array
    C: Array
    a: Array
    own: Array  # (rows, n): which samples have their event in a row, to which share

    @classmethod
    def of(cls, y: Array, o: Array, efron: bool) -> Likelihood:
        """From targets ``(n, 5)`` and what each sample counts."""
        time, event, entry, stratum, site = y.T
        known = o > 0
        mean = {k: o[known & (site == k)].mean() for k in np.unique(site[known])}
        relative = np.array([v / mean[k] if v > 0 else 0.0 for v, k in zip(o, site, strict=True)])
        rows, q, own = [], [], []
        happened = np.flatnonzero((event > 0) & known)
        for t, g, k in sorted({(time[j], stratum[j], site[j]) for j in happened}):
            together = (stratum == g) & (site == k)
            tied = np.array([j for j in happened if time[j] == t and together[j]])
            at_risk = np.where(together & (entry < t) & (t <= time), relative, 0.0)
            for number, j in enumerate(tied):
                C, share = at_risk.copy(), np.zeros(len(y))
                share[tied if efron else j] = 1 / len(tied) if efron else 1.0
                if efron:
                    C[tied] *= 1 - number / len(tied)
                rows.append(C)
                q.append(o[tied].mean() if efron else o[j])
                own.append(share)
        n = len(y)
        return cls(
            np.array(q), np.array(rows).reshape(-1, n), np.where(event > 0, o, 0.0), np.array(own).reshape(-1, n)
        )

    def value(self, z: Array) -> Any:
        """Minus the logarithm, in the dtype of the margins."""
        top, sums = self._sums(z)
        return (self.q * (top + np.log(sums))).sum() - (self.a * z).sum()

    def _sums(self, z: Array) -> tuple[Array, Array]:
        top = np.where(self.C > 0, z, -np.inf).max(1, initial=-np.inf)
        return top, (self.C * np.exp(np.minimum(z - top[:, None], 0.0))).sum(1)

    def shares(self, z: Array) -> Array:
        """Of each sample in the sum of a row, ``(rows, n)``."""
        top, sums = self._sums(z)
        made: Array = self.C * np.exp(np.minimum(z - top[:, None], 0.0)) / sums[:, None]
        return made

    def slopes(self, z: Array) -> Array:
        """The derivatives in the margins."""
        made: Array = self.q @ self.shares(z) - self.a
        return made

    def design(self, A: Array, z: Array) -> Array:
        """Rows whose squares sum to the Hessian of columns A: one for each event and sample at risk."""
        P = self.shares(z)
        apart = A[None] - (P @ A)[:, None]
        made: Array = (np.sqrt(self.q[:, None] * P)[..., None] * apart).reshape(P.size, A.shape[1])
        return made

    def scores(self, A: Array, z: Array) -> Array:
        """What each sample adds to the gradient: its part in every row where it is at risk, less that of its own."""
        P = self.shares(z)
        means = P @ A
        expected = (self.q @ P)[:, None] * A - (self.q[:, None] * P).T @ means
        happened = self.a[:, None] * (A - self.own.T @ means / np.maximum(self.own.sum(0), 1e-300)[:, None])
        made: Array = expected - happened
        return made

    def expression(self, z: Any) -> Any:
        """The same for cvxpy."""
        parts = []
        for q, C in zip(self.q, self.C, strict=True):
            at = np.flatnonzero(C)
            parts.append(q * cp.log_sum_exp(z[at] + np.log(C[at])))
        return sum(parts) - self.a @ z

    def ascents(self, A: Array) -> Array:
        """What may not be negative along a direction in which the likelihood never falls: z_j - z_k at each event j."""
        pairs = {(j, k) for own, C in zip(self.own, self.C, strict=True) for j in np.flatnonzero(own)
                 for k in np.flatnonzero(C) if j != k}  # fmt: skip
        made: Array = np.array([A[j] - A[k] for j, k in sorted(pairs)]).reshape(-1, A.shape[1])
        return made
