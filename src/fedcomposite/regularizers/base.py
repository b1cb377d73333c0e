"""What a method may ask of the composite term h."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedcomposite._validation import validate

if TYPE_CHECKING:
    from fedcomposite.regularizers.algebra import On

Step = float | Tensor
"""A prox step; a tensor has shape ``(..., 1)`` and holds one step per client."""

_BLOCK = 1 << 15  # elements per block: a few temporaries of this size stay in a core's cache


class Regularizer(ABC):
    """A function h on R^d with a computable prox; ``x`` is ``(..., d)`` and every reduction is over ``dim=-1``.

    Subclasses are frozen dataclasses: their fields are validated from their annotations.
    """

    def __post_init__(self) -> None:
        validate(self)

    @property
    def rho(self) -> float:
        """Weak-convexity modulus: h + (rho/2)||x||^2 is convex; the prox is single-valued for steps below 1/rho."""
        return 0.0

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """h(x), of shape ``(...)``."""

    @abstractmethod
    def subgradient(self, x: Tensor) -> Tensor:
        """One element of the subdifferential of h at x (zero where zero is one)."""

    @abstractmethod
    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Distance from ``-gradient`` to the subdifferential of h at x: zero exactly at stationary points of f + h."""

    @abstractmethod
    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        """argmin_u h(u) + ||u - v||^2 / (2 step); ``out`` may be ``v`` itself."""

    @abstractmethod
    def scaled(self, kappa: float) -> Regularizer:
        """The regularizer kappa * h, kappa > 0."""

    def on(self, mask: Tensor | Iterable[bool]) -> On:
        """Restrict h to the coordinates where ``mask`` is true; zero on the others."""
        from fedcomposite.regularizers.algebra import On

        return On.from_mask(self, mask)

    def _check(self, step: Step) -> None:
        """Refuse steps outside (0, 1/rho): past it the prox is not the minimiser any formula returns."""
        if isinstance(step, Tensor):
            if self.rho == 0.0:
                return  # nothing to refuse, and reading a device's tensor would stall it
            step = float(step.max())
        if not step >= 0:
            raise ValueError(f"prox of {self}: step = {step:g}, must be >= 0")
        if step * self.rho >= 1:
            raise ValueError(
                f"prox of {self}: step = {step:g}, must be below 1/rho = {1 / self.rho:g}; "
                "take a smaller step or a less concave regularizer"
            )


class Separable(Regularizer):
    """h(x) = sum_j phi(x_j): subclasses give phi's prox on a block, in place of memory traffic.

    A large vector is worked through in blocks that stay in cache, so a prox reads and writes memory once.
    """

    @abstractmethod
    def _prox(self, v: Tensor, step: Step) -> Tensor:
        """The prox of phi at each entry of a block; must not modify ``v``."""

    @abstractmethod
    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper ends of the subdifferential of phi at each entry."""

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        """argmin_u h(u) + ||u - v||^2 / (2 step), entry by entry."""
        self._check(step)
        if v.numel() <= _BLOCK or v.device.type != "cpu" or isinstance(step, Tensor) or not v.is_contiguous():
            result = self._prox(v, step)
            return result if out is None else out.copy_(result)
        target = torch.empty_like(v) if out is None or not out.is_contiguous() else out
        source, sink = v.view(-1), target.view(-1)
        for a in range(0, len(source), _BLOCK):
            sink[a : a + _BLOCK] = self._prox(source[a : a + _BLOCK], step)
        return target if out is None or out is target else out.copy_(target)

    def subgradient(self, x: Tensor) -> Tensor:
        """The element of the subdifferential nearest to zero."""
        low, high = self.interval(x)
        return torch.zeros_like(x).clamp(low, high)

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Distance from ``-gradient`` to the subdifferential, which is a box; infinite outside the domain of h."""
        low, high = self.interval(x)
        outside = low > high
        distance: Tensor = torch.linalg.vector_norm((-gradient) - (-gradient).clamp(low, high), dim=-1)
        return distance.masked_fill(outside.any(dim=-1), torch.inf)
