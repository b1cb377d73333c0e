"""Scaffnew: Mishchenko, Malinovsky, Stich & Richtarik, *ProxSkip*, 2022."""

from __future__ import annotations

import math
from typing import Any

from fedcomposite.theory.base import Floats, Theorem, above, convex, curved, everyone, positive_mu, smooth_only
from fedcomposite.theory.measured import Constants


class ProxSkip(Theorem):
    """E ||x - x*||^2 <= (1 - min(gamma mu, p^2))^T (||x0 - x*||^2 + (gamma / p)^2 spread) after T iterations.

    Conditions: f_i mu-strongly convex, gamma = ``step`` <= 1 / L, a coin of probability p; p = 1 / sqrt(kappa), kappa =
    L / mu, is best. A round has one iteration or more, so T is at least the number of rounds: that is what the bound
    takes. Control variates start at zero and tend to grad f_i(x*), whence the spread.
    """

    paper = "Mishchenko et al. (2022), Theorem 3.6"
    bounds = "distance"
    chooses = ("step", "p")

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """Gamma = 1 / L, p = sqrt(mu / L), or 1 / local_steps where no strong convexity is known."""
        (L,) = c.need("L")
        return {"step": 1 / L, "p": math.sqrt(c.mu / L) if c.mu else 1 / local_steps}

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Gamma <= 1 / L, a coin, a convex h, strong convexity and full participation."""
        found = [*smooth_only(c), *convex(c), *everyone(c), *curved(c)]
        if c.L is not None:
            found += above("step", method.step, 1 / c.L, "1 / L")
        if method.p is None:
            found.append("local_steps is a fixed number, the theorem tosses a coin; give p = 1 / local_steps")
        return found

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """As stated, with one iteration per round."""
        distance, spread = c.need("distance", "spread")
        mu, p = positive_mu(self, c), method.probability
        start = distance**2 + (method.step / p) ** 2 * spread
        values: Floats = (1 - min(method.step * mu, p**2)) ** rounds * start
        return values
