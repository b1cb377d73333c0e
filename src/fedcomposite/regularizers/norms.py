"""The largest absolute value as a regularizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcomposite._validation import ZeroOrMore
from fedcomposite.regularizers.base import Regularizer, Step
from fedcomposite.regularizers.indicators import threshold


@dataclass(frozen=True)
class LinfNorm(Regularizer):
    """h(x) = lam max_j |x_j|: entries share a common largest magnitude.

    The prox clamps at the level t where sum_j max(|v_j| - t, 0) = lam * step, which is v minus its projection onto the
    l1 ball of that radius; exact, by sorting.
    """

    lam: ZeroOrMore

    def value(self, x: Tensor) -> Tensor:
        """The largest absolute value, times lam."""
        return self.lam * x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """Every entry brought between minus the level and the level."""
        if v.shape[-1] == 0:
            return v.clone()
        level = threshold(v.abs(), self.lam * step).clamp(min=0)
        return v.clamp(-level, level)

    def subgradient(self, x: Tensor) -> Tensor:
        """Equal shares of lam for the largest entries; zero at zero."""
        largest = self._largest(x)
        return self.lam * x.sign() * largest / largest.sum(-1, keepdim=True)

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Distance to lam conv{sign(x_j) e_j : |x_j| largest}, or to the l1 ball of radius lam at zero."""
        largest = self._largest(x)
        at_zero = (x == 0).all(-1, keepdim=True)
        y = torch.where(at_zero, gradient.abs(), -gradient * x.sign())
        level = threshold(y.masked_fill(~largest, -torch.inf), self.lam)
        level = torch.where(at_zero, level.clamp(min=0), level)
        # What the projection onto a simplex leaves: t where y is above t, y itself below; the rest is all distance.
        distance: Tensor = torch.linalg.vector_norm(torch.where(largest, torch.minimum(y, level), gradient), dim=-1)
        return distance

    @staticmethod
    def _largest(x: Tensor) -> Tensor:
        size = x.abs()
        return size == size.amax(-1, keepdim=True)
