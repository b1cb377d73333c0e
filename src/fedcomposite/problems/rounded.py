"""Losses with kinks, rounded off over a width, so that Newton steps apply; the width then goes to zero.

A kink of slope s at t becomes a parabola on [t - width, t + width] (He, Pan, Tan & Zhou 2023 do so for quantiles, with
a uniform kernel). The rounded loss is above the loss by at most s width / 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedcomposite.data.silos import Silos
from fedcomposite.problems.loss import Loss
from fedcomposite.problems.losses import Absolute, Hinge, Quantile


@dataclass(frozen=True)
class Rounded(Loss):
    """A piecewise linear loss (hinge, absolute, quantile) with its kink rounded off."""

    loss: Loss
    width: float

    nonnegative = True
    smooth = True

    def __post_init__(self) -> None:
        if not isinstance(self.loss, Hinge | Absolute | Quantile):
            raise ValueError(f"{self.loss} has no kink to round off")

    @property
    def classifier(self) -> bool:  # type: ignore[override]
        """As the loss."""
        return self.loss.classifier

    @property
    def slope(self) -> float:  # type: ignore[override]
        """As the loss."""
        return self.loss.slope

    @property
    def curvature(self) -> float:  # type: ignore[override]
        """The change of slope at the kink over twice the width."""
        return self._jump / (2 * self.width)

    @property
    def _jump(self) -> float:
        return 2.0 if isinstance(self.loss, Absolute) else 1.0

    def _beyond(self, z: Tensor, b: Tensor) -> Tensor:
        """Where a margin is, seen from the kink."""
        return b * z - 1 if isinstance(self.loss, Hinge) else z - b

    def prepare(self, silos: Silos, targets: Tensor) -> Tensor:
        """As the loss."""
        return self.loss.prepare(silos, targets)

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """The loss, and what the rounding adds: jump (width - |r|)^2 / (4 width) within the width."""
        near = (self.width - self._beyond(z, b).abs()).clamp(min=0)
        return self.loss.value(z, b) + self._jump / (4 * self.width) * near.square()

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """From one slope to the other, linearly."""
        r = self._beyond(z, b)
        inside = (r / self.width).clamp(-1, 1)  # -1 before the kink, 1 beyond
        if isinstance(self.loss, Hinge):
            return b * (inside - 1) / 2
        if isinstance(self.loss, Quantile):
            return (inside + 1) / 2 - self.loss.tau
        return inside

    def second(self, z: Tensor, b: Tensor) -> Tensor:
        """The curvature within the width, 0 beyond."""
        return self.curvature * (self._beyond(z, b).abs() < self.width).to(z)

    def response(self, z: Tensor) -> Tensor:
        """As the loss."""
        return self.loss.response(z)
