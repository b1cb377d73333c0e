"""SCAFFOLD: Karimireddy et al., *Stochastic controlled averaging for federated learning*, 2020."""

from __future__ import annotations

import math
from typing import Any

from fedcomposite.theory.base import Theorem, above, below, smooth_only
from fedcomposite.theory.measured import Constants


class Scaffold(Theorem):
    """eta <= (I / n)^(2/3) / (24 L tau eta_g), eta_g >= 1, I of n clients: non-convex; O(.) bounds.

    For convex f_i the published condition is eta <= 1 / (81 L tau eta_g).
    """

    paper = "Karimireddy et al. (2020), Theorem VII"
    chooses = ("step", "server_step")

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """eta_g = sqrt(I), which the theory recommends, and equality for eta."""
        server = math.sqrt(c.participants)
        return {
            "local_steps": local_steps,
            "step": self._limit(c) / (server * local_steps),
            "server_step": server,
        }

    def _limit(self, c: Constants) -> float:
        return math.pow(c.participants / c.n, 2 / 3) / (24 * c.need("L")[0])

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Both step conditions."""
        if c.L is None:
            return smooth_only(c)
        reach = method.server_step * method.step * method.local_steps
        return [
            *above("server_step * step * local_steps", reach, self._limit(c), "(I / n)^(2/3) / (24 L)"),
            *below("server_step", method.server_step, 1, "1, the least allowed,"),
        ]
