"""The proximal gradient method: Beck, *First-order methods in optimization*, 2017."""

from __future__ import annotations

from typing import Any

from fedcomposite.theory.base import Floats, Theorem, above, smooth_only
from fedcomposite.theory.measured import Constants


class ProximalGradientDescent(Theorem):
    """mean ||G_s||^2 <= gap / (s (1 - s (L + rho) / 2) T) over T models, for s (L + rho) < 2.

    From F(x+) <= F(x) - s (1 - s (L + rho) / 2) ||G_s(x)||^2 (Beck, First-order methods in optimization, 2017, Lemma
    10.4 for rho = 0). The guaranteed decrease is largest at s = 1 / (L + rho), the step chosen here.
    """

    paper = "Beck (2017), Theorem 10.15"
    bounds = "stationarity"
    chooses = ("step",)

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """The step 1 / (L + rho)."""
        return {"step": 1 / (c.need("L")[0] + c.rho)}

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Only s (L + rho) < 2."""
        if c.L is None:
            return smooth_only(c)
        return above("step", method.step, 2 / (c.L + c.rho), "2 / (L + rho)")

    def measured_at(self, method: Any) -> float | None:
        """The step itself."""
        return float(method.step)

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """As stated, for full gradients."""
        L, gap = c.need("L", "gap")
        if c.batch is not None:
            raise ValueError(f"{self} is about full gradients")
        s = float(method.step)
        return gap / (s * (1 - s * (L + c.rho) / 2) * (rounds + 1))
