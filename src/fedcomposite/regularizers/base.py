"""What a method may ask of the composite term h."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from fedcomposite._validation import UserError, validate
from fedcomposite.regularizers.memory import LITTLE, give, in_blocks

if TYPE_CHECKING:
    from fedcomposite.regularizers.algebra import Blocks, Named, On
    from fedcomposite.regularizers.wrapped import Ramped
    from fedcomposite.schedules import Schedule

Step = float | Tensor
"""A prox step; a tensor has shape ``(..., 1)`` and holds one step per client.

A separable h, also on some coordinates only, takes a step per coordinate as well, ``(..., d)``.
"""

Layout = Sequence[tuple[str, int, int, tuple[int, ...]]]
"""Where a model's parameters lie in the flat vector: (name, start, stop, shape) of each."""

_ROUNDING = 4 * torch.finfo(torch.float64).eps
ORDINARY = 2.0**-40
_LARGEST = torch.finfo(torch.float64).max


class StepError(UserError):
    """A step at which a prox is not defined."""


class Regularizer(ABC):
    """A function h on R^d with a computable prox; ``x`` is ``(..., d)`` and every reduction is over ``dim=-1``.

    Subclasses are frozen dataclasses: their fields are validated from their annotations.
    """

    coefficients: ClassVar[tuple[str, ...]] = ("lam",)
    """The fields that are multiplied to multiply h."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    def rho(self) -> float:
        """Weak-convexity modulus: h + (rho/2)||x||^2 is convex; the prox is single-valued for steps below 1/rho.

        Infinite where no modulus exists; the prox is then a global minimiser for every step, but it jumps.
        """
        return 0.0

    @property
    def weakly_convex(self) -> bool:
        """Whether rho is finite; if not, the guarantees of the methods do not apply, though they can be run."""
        return self.rho < math.inf

    @property
    def grain(self) -> int:
        """How many consecutive coordinates the prox sees together, all such groups alike; 0 if the whole vector."""
        return 0

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """h(x), of shape ``(...)``."""

    @abstractmethod
    def subgradient(self, x: Tensor) -> Tensor:
        """One element of the subdifferential of h at x (zero where zero is one)."""

    def descent(self, x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """What local steps without a prox follow in a round from x on: of y and the gradient there, g + h'(y)."""
        return lambda y, g: g + self.subgradient(y)

    def nearest(self, x: Tensor) -> Tensor:
        """Where a server without a prox leaves x: there, unless h wants some entries to be zero whatever it takes."""
        return x

    @abstractmethod
    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Distance from ``-gradient`` to the subdifferential of h at x: zero exactly at stationary points of f + h."""

    @abstractmethod
    def formula(self, v: Tensor, step: Step) -> Tensor:
        """argmin_u h(u) + ||u - v||^2 / (2 step) as a pure formula: a new tensor, of v's shape and dtype.

        The step is a number or a tensor of v's dtype, and has been checked. This is what a compiler is given.
        """

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        """argmin_u h(u) + ||u - v||^2 / (2 step).

        Parameters
        ----------
        v : Tensor
            One vector, or several in rows ``(..., d)``.
        step : float or Tensor
            One step for all, or one per vector, ``(..., 1)``, of any dtype: the result has that of v.
        out : Tensor, optional
            Where the result goes; it may be v itself.
        """
        step = self._taken(step, v)
        followed = v.requires_grad or (isinstance(step, Tensor) and step.requires_grad)
        if followed and torch.is_grad_enabled():  # autograd follows new tensors only
            return give(self.formula(v, step), out)
        return self._carried_out(v, step, out)

    def prox_slope(self, v: Tensor, step: Step) -> Tensor | None:
        """The derivative of each entry's prox, where h is separable and a formula is at hand; None where none is."""
        return None

    def scaled(self, kappa: float) -> Regularizer:
        """The regularizer kappa * h, kappa > 0."""
        if not (isinstance(kappa, int | float | np.number) and 0 < kappa < math.inf):  # minus a regularizer has no prox
            raise ValueError(f"scaled: kappa = {kappa!r}, must be a number > 0")
        return replace(self, **{name: kappa * getattr(self, name) for name in self.coefficients})  # type: ignore[type-var]

    def coupling(self, dimension: int) -> Tensor:
        """The part that each coordinate belongs to, ``(d,)``: h is a sum of functions of one part each.

        A part is named by its first coordinate. Unless a subclass says more, h may couple all of them.
        """
        return torch.zeros(dimension, dtype=torch.int64)

    def acts_on(self, dimension: int) -> Tensor:
        """Mask of the coordinates that h depends on, ``(d,)``; all of them unless it was restricted to some."""
        return torch.ones(dimension, dtype=torch.bool)

    def among(self, coordinates: Tensor, dimension: int) -> Regularizer | None:
        """The term as a function of some of ``dimension`` coordinates, up to a constant; None where it has no such form
        of its own.

        Every part of h has either all of its coordinates among these, or none.
        """
        return None

    @overload
    def on(self, where: str | tuple[str, ...]) -> Named: ...
    @overload
    def on(self, where: Tensor | Iterable[bool] | Iterable[int]) -> On: ...
    def on(self, where: str | tuple[str, ...] | Tensor | Iterable[bool] | Iterable[int]) -> Named | On:
        """Restrict h to some coordinates; zero on the others.

        Parameters
        ----------
        where : mask, coordinates or pattern
            A mask with one entry per coordinate, the numbers of some coordinates, or one or more patterns of parameter
            names (``"*.weight"``), which a problem with named parameters turns into coordinates.
        """
        from fedcomposite.regularizers.algebra import Named, On

        if isinstance(where, str):
            return Named(self, (where,))
        if not isinstance(where, Iterable):
            raise ValueError(f"on: {where!r}, must be a mask, a list of coordinates or patterns of names")
        entries: list[Any] = where.tolist() if isinstance(where, Tensor) else list(where)
        if any(isinstance(entry, str) for entry in entries):
            return Named(self, tuple(entries))
        return On.at(self, entries, coordinates=isinstance(where, range))

    def for_shape(self, shape: tuple[int, ...]) -> Regularizer:
        """The term for a parameter of the given shape; itself, unless it asks for rows, columns or a matrix."""
        return self

    def resolve(self, layout: Layout) -> Regularizer:
        """The term with patterns of parameter names turned into coordinates."""
        return self

    def ramped(self, strength: Schedule) -> Ramped:
        """strength(r) * h in round r; models are judged by h itself.

        Parameters
        ----------
        strength : Schedule
            A factor for every round, one of :mod:`fedcomposite.schedules`: ``Ramp(0.01, 1.0, rounds=100)``.
        """
        from fedcomposite.regularizers.wrapped import Ramped

        return Ramped(self, strength)

    def during(self, round: int) -> Regularizer:
        """The term of a round, counted from 0; itself, unless its strength changes (:meth:`ramped`)."""
        return self

    def recorded(self, round: int) -> Regularizer:
        """The term of a round as a recorded program takes it: the same object for all rounds that need no new one."""
        return self.during(round)

    def turn(self, round: int) -> None:  # noqa: B027  # most have no such tensors
        """Bring the tensors of what :meth:`recorded` gives to a round; nothing where it has none."""

    def __add__(self, other: Regularizer) -> Blocks:
        from fedcomposite.regularizers.algebra import Blocks

        return Blocks.of(self, other) if isinstance(other, Regularizer) else NotImplemented

    def check_step(self, step: Step) -> None:
        """Refuse steps outside [0, 1/rho): past it the prox is not the minimiser any formula returns."""
        bounded = 0 < self.rho < math.inf
        if isinstance(step, Tensor):
            if step.numel() == 0 or (not bounded and step.device.type != "cpu"):
                return  # nothing else to refuse, and reading a device's tensor would stall it
            low = float(step.detach().min())
            high = float(step.detach().max()) if bounded else low
        else:
            low = high = float(step)
        if not low >= 0:
            raise StepError(f"prox of {self}: step = {low:g}, must be >= 0")
        if bounded and high * self.rho >= 1 - _ROUNDING:
            raise StepError(
                f"prox of {self}: step = {high:g}, must be below 1/rho = {1 / self.rho:g}; "
                "take a smaller step or a less concave regularizer"
            )

    def _taken(self, step: Step, v: Tensor) -> Step:
        """The step as a formula takes it: checked, and in v's dtype without rounding past the limits."""
        self.check_step(step)
        if not isinstance(step, Tensor):
            return min(float(step), _LARGEST)  # zero times infinity is not a number
        if 0 < self.rho < math.inf:
            return step.to(v).clamp(max=(1 - 4 * torch.finfo(v.dtype).eps) / self.rho)
        return step if step.dtype == v.dtype else step.to(v).clamp(max=torch.finfo(v.dtype).max)

    def _carried_out(self, v: Tensor, step: Step, out: Tensor | None) -> Tensor:
        """The formula's result, in ``out`` where there is one; at the speed of memory where blocks are alike."""
        if v.numel() <= LITTLE or not self.grain:
            return give(self.formula(v, step), out)
        return in_blocks(self.formula, v, step, out, self.grain)


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two up to the largest entry of each vector, ``(..., 1)``; 1 for a zero or non-finite vector.

    Dividing by it does not round, and squares of the result neither overflow nor vanish.
    """
    if x.shape[-1] == 0:
        return x.new_ones((*x.shape[:-1], 1))
    x = x.detach()
    largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    power = largest / (2 * torch.frexp(largest).mantissa)
    tiny = torch.finfo(x.dtype).tiny  # its inverse is a number, too
    return torch.where((largest > 0) & (largest < math.inf), power.clamp(tiny, 1 / tiny), 1.0)


def ordinary(x: Tensor) -> bool:
    """Whether the size of the entries is such that their squares are safe without a power of two, to the same bits.

    A device's tensor is not looked at, since that would stall it.
    """
    if x.device.type != "cpu" or x.numel() == 0:
        return False
    smallest, largest = (float(t) for t in torch.aminmax(x))
    return ORDINARY < max(-smallest, largest) < 1 / ORDINARY


class Boxed(Regularizer):
    """A regularizer whose subdifferential is a box: one interval per coordinate."""

    @abstractmethod
    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper ends of the subdifferential at each entry; lower > upper outside the domain of h."""

    def subgradient(self, x: Tensor) -> Tensor:
        """The element of the subdifferential nearest to zero."""
        low, high = self.interval(x)
        return torch.zeros_like(x).clamp(low, high)

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Distance from ``-gradient`` to the box; infinite outside the domain of h."""
        low, high = self.interval(x)
        outside = low > high
        distance: Tensor = torch.linalg.vector_norm((-gradient) - (-gradient).clamp(low, high), dim=-1)
        return distance.masked_fill(outside.any(dim=-1), torch.inf)


class Separable(Boxed):
    """h(x) = sum_j phi(x_j): subclasses give the prox of phi at each entry as a formula."""

    @property
    def grain(self) -> int:
        return 1

    def coupling(self, dimension: int) -> Tensor:
        return torch.arange(dimension)

    def among(self, coordinates: Tensor, dimension: int) -> Regularizer | None:
        return self if self.grain == 1 else None  # one rule for all entries
