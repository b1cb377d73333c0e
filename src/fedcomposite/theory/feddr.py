"""FedDR: Tran-Dinh, Pham, Phan & Nguyen, *Randomized Douglas-Rachford splitting algorithms*, 2021."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from fedcomposite.theory.base import Theorem, above, convex, smooth_only
from fedcomposite.theory.measured import Constants


class DouglasRachford(Theorem):
    """alpha < (sqrt(17) - 1) / 2 and eta < (sqrt(17) - 1 - 2 alpha) / (2 L (alpha + 2)); h convex; O(1/T) bounds.

    The condition for exact local solutions.
    """

    paper = "Tran-Dinh et al. (2021), Theorem 3.1"
    chooses = ("prox_step", "alpha", "local_steps", "step")
    _ROOT: ClassVar[float] = math.sqrt(17) - 1

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """Alpha = 1 and 0.99 of the limit for eta, which is not allowed itself."""
        (L,) = c.need("L")
        eta = 0.99 * self._limit(c, 1.0)
        return {"prox_step": eta, "alpha": 1.0, "local_steps": local_steps, "step": 1 / (L + 1 / eta)}

    def _limit(self, c: Constants, alpha: float) -> float:
        return (self._ROOT - 2 * alpha) / (2 * c.need("L")[0] * (alpha + 2))

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Both conditions and a convex h."""
        if c.L is None:
            return [*smooth_only(c), *convex(c)]
        if method.alpha >= self._ROOT / 2:
            return [*convex(c), f"alpha = {method.alpha:.3g} is not below (sqrt(17) - 1) / 2 = {self._ROOT / 2:.3g}"]
        formula = "(sqrt(17) - 1 - 2 alpha) / (2 L (alpha + 2))"
        return [*convex(c), *above("prox_step", method.prox_step, self._limit(c, method.alpha), formula)]
