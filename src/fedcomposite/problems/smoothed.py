"""Losses with one kink, made smooth from below."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcomposite._validation import Positive
from fedcomposite.data.silos import Silos
from fedcomposite.problems.loss import Loss
from fedcomposite.problems.losses import Absolute, Hinge, Quantile

KINKED = (Hinge, Absolute, Quantile)
"""Losses that are two straight lines which meet where the margin equals the target."""


@dataclass(frozen=True)
class Smoothed(Loss):
    """phi_w(z, b) = max over t of t z - phi*(t, b) - w t^2 / 2, the Moreau envelope of a loss phi with a kink.

    With slopes between l and r on both sides of the kink the maximiser is t = clip((z - b) / w, l, r), the derivative.
    It is at most phi, at least phi - w slope^2 / 2, and its conjugate is phi* + w t^2 / 2: a dual point of the smooth
    problem is one of the problem with kinks, and at least as good there (Nesterov 2005).
    """

    loss: Loss
    width: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.loss, KINKED):
            raise ValueError(f"Smoothed is made for {', '.join(c.__name__ for c in KINKED)}, not for {self.loss}")
        for name in ("slope", "classifier", "nonnegative", "reduction"):
            object.__setattr__(self, name, getattr(self.loss, name))
        object.__setattr__(self, "curvature", 1 / self.width)

    def prepare(self, silos: Silos, targets: Tensor) -> Tensor:
        """As the loss does."""
        return self.loss.prepare(silos, targets)

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """The maximum, t (z - b) - w t^2 / 2."""
        t = self.derivative(z, b)
        return t * (z - b - self.width / 2 * t)

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """(z - b) / w between the slopes of the two lines."""
        return torch.clamp((z - b) / self.width, *self._slopes(z, b))

    def second(self, z: Tensor, b: Tensor) -> Tensor:
        """1 / w between the lines."""
        t = (z - b) / self.width
        left, right = self._slopes(z, b)
        return ((t >= left) & (t <= right)).to(z) / self.width

    def _slopes(self, z: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The derivatives of the loss on both sides of its kink."""
        b = b.expand_as(z)
        return self.loss.derivative(b - 1, b).to(z), self.loss.derivative(b + 1, b).to(z)
