"""Regularizers seen through something else: all that is not said otherwise is that of h."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from fedcomposite.regularizers.base import Layout, Regularizer, Step
from fedcomposite.regularizers.memory import give
from fedcomposite.schedules import Schedule, read

if TYPE_CHECKING:
    from fedcomposite.regularizers.algebra import Blocks


class Wrapped(Regularizer):
    """h itself; subclasses change how its prox is carried out, or what it is in a round."""

    def __init__(self, h: Regularizer) -> None:
        self.h = h

    @property
    def rho(self) -> float:
        return self.h.rho

    def formula(self, v: Tensor, step: Step) -> Tensor:
        return self.h.formula(v, step)

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        return self.h.prox(v, step, out)

    def prox_slope(self, v: Tensor, step: Step) -> Tensor | None:
        return self.h.prox_slope(v, step)

    def value(self, x: Tensor) -> Tensor:
        return self.h.value(x)

    def subgradient(self, x: Tensor) -> Tensor:
        return self.h.subgradient(x)

    def descent(self, x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        return self.h.descent(x)

    def nearest(self, x: Tensor) -> Tensor:
        return self.h.nearest(x)

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        return self.h.optimality(x, gradient)

    def coupling(self, dimension: int) -> Tensor:
        return self.h.coupling(dimension)

    def acts_on(self, dimension: int) -> Tensor:
        return self.h.acts_on(dimension)

    def scaled(self, kappa: float) -> Regularizer:
        """The regularizer kappa * h, no longer wrapped."""
        return self.h.scaled(kappa)


def restricted(h: Regularizer, x: Tensor, at: Tensor) -> Regularizer:
    """The term h as a function of the coordinates ``at``, the others being those of x; up to a constant."""
    if len(at) == len(x):
        return h
    return h.among(at, len(x)) or _Restricted(h, x, at)


class _Restricted(Wrapped):
    """The same where h has no form of its own on these coordinates: the whole vector is put together for it."""

    def __init__(self, h: Regularizer, x: Tensor, at: Tensor) -> None:
        super().__init__(h)
        self._x, self._at = x, at

    def _whole(self, u: Tensor) -> Tensor:
        return self._x.expand(*u.shape[:-1], -1).index_copy(-1, self._at, u)

    def _steps(self, step: Step) -> Step:
        if not isinstance(step, Tensor) or step.shape[-1] == 1:
            return step
        return torch.full_like(self._x, float(step.min())).index_copy_(0, self._at, step)

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        return give(self.h.prox(self._whole(v), self._steps(step))[..., self._at], out)

    def prox_slope(self, v: Tensor, step: Step) -> Tensor | None:
        found = self.h.prox_slope(self._whole(v), self._steps(step))
        return None if found is None else found[..., self._at]

    def value(self, x: Tensor) -> Tensor:
        return self.h.value(self._whole(x))


@dataclass(frozen=True)
class Ramped(Wrapped):
    """strength(r) * h in round r: sparsity that grows with the rounds. Made by ``h.ramped(strength)``.

    Values, stationarity and everything else that judges a model are those of h itself, so that objectives of different
    rounds can be compared; a schedule that ends at 1 ends with the problem that is reported.
    """

    h: Regularizer
    strength: Schedule

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", read(self.strength))
        super().__post_init__()

    def during(self, round: int) -> Regularizer:
        factor = self.strength(round)
        if factor not in self._kept:
            if len(self._kept) > 4:
                self._kept.clear()
            self._kept[factor] = self.h if factor == 1 else self.h.scaled(factor)
        return self._kept[factor]

    @cached_property
    def _kept(self) -> dict[float, Regularizer]:
        return {}

    def scaled(self, kappa: float) -> Ramped:
        """The same ramp of kappa * h."""
        return Ramped(self.h.scaled(kappa), self.strength)

    def on(self, where: Any) -> Any:
        """The same ramp of h on some coordinates."""
        return Ramped(self.h.on(where), self.strength)

    def resolve(self, layout: Layout) -> Ramped:
        """The same ramp of h on its coordinates."""
        return Ramped(self.h.resolve(layout), self.strength)

    def for_shape(self, shape: tuple[int, ...]) -> Ramped:
        """The same ramp of h for a parameter of the given shape."""
        return Ramped(self.h.for_shape(shape), self.strength)

    def ramped(self, strength: Schedule) -> NoReturn:
        """Refused: one strength is enough."""
        raise ValueError(f"{self.h} has a strength that changes already; give it one schedule")

    def __add__(self, other: Regularizer) -> Blocks:
        raise TypeError("terms with strengths of their own cannot be added: ramp the sum, (a + b).ramped(strength)")

    __radd__ = __add__


def settled(h: Regularizer) -> None:
    """Refuse a strength that changes, where one problem is solved to the end."""
    if isinstance(h, Ramped):
        raise ValueError(f"a solver solves one problem to the end, and the strength of {h.h} changes: leave ramped out")
