"""FedMLS: Palenzuela, Dadras, Yurtsever & Lofstedt, *Provable reduction in communication rounds*, 2025."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedcomposite.theory.base import Correction, Floats, Theorem, convex, everyone
from fedcomposite.theory.measured import Constants


class FedMLS32(Theorem):
    """f(x_K) - min f <= (10 n D^2 + 8 d) / (lam K (K + 1)) + G^2 lam / (2 n), D = ||x0 - x*||, constant lam and T.

    This is Theorem 3.1 on the product space, where the mean of the f_i(x_i) is G / sqrt(n)-Lipschitz and its
    subgradients have the variance sigma^2 / n, so that T >= (4 G^2 + sigma^2) lam^2 K^3 / (2 n d) local steps give d.
    Corollary 3.2 fixes an accuracy eps = 6 sqrt(n) D G / K and lam = eps / G^2, with G and sigma^2 themselves for those
    of the product space; then T = 108 sqrt(n) D (4 G^2 + sigma^2) / (G eps). (It prints 36 sqrt(3 n) for 108 sqrt(n) =
    36 * 3 sqrt(n).) That is more than the product space asks for, by a factor of n, and so are its rounds, by sqrt(n):
    see :meth:`corrections`. A regularizer's subgradients count in G. ``lambda0`` and ``first_steps`` with
    ``schedule="growing"``, lam_0 / k and T_0 k, are the practical rule of Remark 3.3, which is not proved.
    """

    paper = "Palenzuela et al. (2025), Corollary 3.2"
    bounds = "objective"
    chooses = ("lambda0", "first_steps", "schedule")

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """Corollary 3.2 for the accuracy that the planned rounds can reach; it sets the local steps itself."""
        G, noise = self._lipschitz(c), c.noise
        distance, rounds = c.need("distance", "rounds")
        eps = 6 * math.sqrt(c.n) * distance * G / rounds
        local = math.ceil(108 * math.sqrt(c.n) * distance * (4 * G**2 + noise) / (G * eps))
        return {"lambda0": eps / G**2, "first_steps": local, "schedule": "constant"}

    def corrections(self, method: Any, c: Constants) -> list[Correction]:
        """The factor of the local steps T of Corollary 3.2, which takes G and sigma^2 for those of the product space.

        With its own, G / sqrt(n) and sigma^2 / n, T = 108 / sqrt(n) D (4 G^2 + sigma^2) / (G eps) is enough, less than
        the printed one from two clients on, and lam = n eps / G^2 reaches eps in K = 6 D G / eps rounds, whatever n.
        """
        root = math.sqrt(c.n)
        note = (
            "K = 6 sqrt(n) D G / eps leaves d = n D^2, for which Theorem 3.1 with G and sigma^2 asks 36 * 3 sqrt(n), "
            "not 36 sqrt(3 n); with the product space's G / sqrt(n) and sigma^2 / n it asks 108 / sqrt(n)"
        )
        return [Correction("D (4 G^2 + sigma^2) / (G eps) in T", 36 * math.sqrt(3) * root, 108 * root, note)]

    def _lipschitz(self, c: Constants) -> float:
        G, B = c.need("G", "B")
        return G + B

    def violations(self, method: Any, c: Constants) -> list[str]:
        """A constant schedule, convexity and full participation; any lam and T then have a bound."""
        found = [*convex(c), *everyone(c)]
        if method.schedule == "growing":
            found.append("schedule = 'growing' is the practical rule of Remark 3.3, the theorem has a constant one")
        if c.G is None and method.radius is None:
            found.append("the losses are not Lipschitz on the whole space, the theorem then needs a radius")
        return found

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """Theorem 3.1 with the d that the number of local steps gives; no bound before the first round."""
        if method.schedule == "growing":
            raise ValueError(f"{self} has no bound for schedule = 'growing'; use schedule = 'constant'")
        G, noise = self._lipschitz(c), c.noise
        (distance,) = c.need("distance")
        lam, K = method.lambda0, np.where(rounds > 0, rounds, np.nan)
        d = (4 * G**2 + noise) / c.n * lam**2 * K**3 / (2 * method.first_steps)
        out: Floats = (10 * c.n * distance**2 + 8 * d) / (lam * K * (K + 1)) + G**2 * lam / (2 * c.n)
        return np.where(rounds > 0, out, np.inf)
