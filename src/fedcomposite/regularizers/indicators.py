"""Constraints as regularizers: zero inside a set, infinite outside; the prox is the projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcomposite.regularizers.base import Separable, Step


@dataclass(frozen=True)
class Box(Separable):
    """The constraint low <= x_j <= high; the prox clamps."""

    low: float
    high: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ValueError(f"Box: low = {self.low:g} is above high = {self.high:g}")

    def value(self, x: Tensor) -> Tensor:
        """0 inside the box, infinity outside."""
        inside = ((x >= self.low) & (x <= self.high)).all(dim=-1)
        return torch.where(inside, 0.0, torch.inf).to(x.dtype)

    def _prox(self, v: Tensor, step: Step) -> Tensor:
        return v.clamp(self.low, self.high)

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normal cone: {0} inside, a half-line on the boundary, empty (low > high) outside."""
        low = torch.zeros_like(x).masked_fill(x <= self.low, -torch.inf).masked_fill(x > self.high, torch.inf)
        high = torch.zeros_like(x).masked_fill(x >= self.high, torch.inf).masked_fill(x < self.low, -torch.inf)
        return low, high

    def subgradient(self, x: Tensor) -> Tensor:
        """Refused: a constraint has no subgradient outside its set, so a subgradient step cannot keep it."""
        raise TypeError(
            "Box is a constraint and has no useful subgradient; use a method with a prox, "
            "for example FedNMap, Zhang, FedCanon or ProximalGradient"
        )

    def scaled(self, kappa: float) -> Box:
        """The same constraint: 0 and infinity do not scale."""
        return self
