"""What is known about the quality of a solution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Certificate:
    """A number that bounds how far a model is from the best one, or measures it.

    A ``"duality gap"`` is a bound: the objective is at most ``value`` above its minimum. An ``"optimality measure"`` is
    the distance from -grad f to the subdifferential of h: zero exactly at stationary points, and no bound by itself.
    """

    kind: Literal["duality gap", "optimality measure"]
    value: float

    def __str__(self) -> str:
        if self.kind == "duality gap":
            return f"objective within {self.value:.1e} of the optimum (duality gap)"
        return f"optimality measure {self.value:.1e} (distance from -grad f to the subdifferential of h)"
