"""Regularizers seen through a runtime: counted."""

from __future__ import annotations

from torch import Tensor

from fedcomposite.problems import Counter
from fedcomposite.regularizers.base import Regularizer, Step
from fedcomposite.regularizers.wrapped import Wrapped


class Counted(Wrapped):
    """h, counting the vectors that pass through its prox."""

    def __init__(self, h: Regularizer, counter: Counter) -> None:
        super().__init__(h)
        self._counter = counter

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        """The prox of h, counted."""
        self._counter.proxes += v.shape[:-1].numel()
        return self.h.prox(v, step, out)

    def nearest(self, x: Tensor) -> Tensor:
        """As h; counted where it is a prox."""
        found = self.h.nearest(x)
        self._counter.proxes += 0 if found is x else x.shape[:-1].numel()
        return found

    def among(self, coordinates: Tensor, dimension: int) -> Regularizer | None:
        found = self.h.among(coordinates, dimension)
        return None if found is None else Counted(found, self._counter)

    def during(self, round: int) -> Regularizer:
        """The term of a round, counted."""
        now = self.h.during(round)
        return self if now is self.h else Counted(now, self._counter)
