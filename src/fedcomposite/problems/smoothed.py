"""Losses with one kink, made smooth from below, as interior-point methods do it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcomposite._validation import Positive
from fedcomposite.data.silos import Silos
from fedcomposite.problems.losses import Absolute, Hinge, Loss, Quantile

KINKED = (Hinge, Absolute, Quantile)
"""Losses that are two straight lines which meet where the margin equals the target."""


@dataclass(frozen=True)
class Smoothed(Loss):
    """phi_w(z, b) = max over s in (0, 1) of t (z - b) + w (log s + log(1 - s)), with t = l + (r - l) s.

    Here l and r are the slopes of the loss on both sides of its kink at z = b, so that phi is the same maximum without
    logarithms: these are a barrier that keeps the dual point t inside its box, and Newton's method follows the
    minimisers for falling w as an interior-point method follows its central path. With y = (r - l)(z - b) / w the
    maximiser is s = 1/2 + y / (2 (sqrt(y^2 + 4) + 2)). phi_w has curvature everywhere, where the Moreau envelope has
    none outside a strip, in which at last no sample lies.

    phi_w is at most phi. Its conjugate is that of phi minus w (log s + log(1 - s)), so a dual point of the smooth
    problem is one of the problem itself: at the minimiser for w the duality gap is
    sum_j o_j (phi(z_j) - t_j (z_j - b_j)), at most 2 w for weights o_j that sum to 1.
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
        return self.loss.prepare(silos, targets)

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        left, _, y, s, rest = self._maximiser(z, b)
        return left * (z - b) + self.width * (s * y + s.log() + rest.log())

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        left, jump, y, s, rest = self._maximiser(z, b)
        return torch.where(y < 0, left + jump * s, left + jump - jump * rest)

    def second(self, z: Tensor, b: Tensor) -> Tensor:
        """(r - l)^2 / (w q (q + 2)) with q = sqrt(y^2 + 4)."""
        _, jump, y, *_ = self._maximiser(z, b)
        root = torch.hypot(y, y.new_full((), 2.0))
        return jump.square() / self.width / (root * (root + 2))

    def response(self, z: Tensor) -> Tensor:
        return self.loss.response(z)

    def _maximiser(self, z: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The slope l, the jump r - l, y, s and 1 - s; the smaller one of these without cancellation."""
        b = b.expand_as(z)
        left, right = self.loss.derivative(b - 1, b).to(z), self.loss.derivative(b + 1, b).to(z)
        jump = right - left
        y = jump * (z - b) / self.width
        root = torch.hypot(y, y.new_full((), 2.0))
        small = (1 + 2 / (root + y.abs())) / (root + 2)
        return left, jump, y, torch.where(y < 0, small, 1 - small), torch.where(y < 0, 1 - small, small)
