"""Regularizers seen through a runtime: counted."""

from __future__ import annotations

from torch import Tensor

from fedcomposite.problems import Counter
from fedcomposite.regularizers.base import Regularizer, Step


class Wrapped(Regularizer):
    """h itself; subclasses change how its prox is carried out."""

    def __init__(self, h: Regularizer) -> None:
        self.h = h

    @property
    def rho(self) -> float:
        """That of h."""
        return self.h.rho

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """That of h."""
        return self.h.formula(v, step)

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        """The prox of h."""
        return self.h.prox(v, step, out)

    def value(self, x: Tensor) -> Tensor:
        """h(x)."""
        return self.h.value(x)

    def subgradient(self, x: Tensor) -> Tensor:
        """A subgradient of h."""
        return self.h.subgradient(x)

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Distance from ``-gradient`` to the subdifferential of h."""
        return self.h.optimality(x, gradient)

    def coupling(self, dimension: int) -> Tensor:
        """The parts of h."""
        return self.h.coupling(dimension)

    def scaled(self, kappa: float) -> Regularizer:
        """The regularizer kappa * h, no longer wrapped."""
        return self.h.scaled(kappa)


class Counted(Wrapped):
    """h, counting the vectors that pass through its prox."""

    def __init__(self, h: Regularizer, counter: Counter) -> None:
        super().__init__(h)
        self._counter = counter

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        """The prox of h, counted."""
        self._counter.proxes += v.shape[:-1].numel()
        return self.h.prox(v, step, out)
