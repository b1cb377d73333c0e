"""What a method may ask of the composite term h."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor

from fedcomposite._validation import validate

if TYPE_CHECKING:
    from fedcomposite.regularizers.algebra import Blocks, Named, On

Step = float | Tensor
"""A prox step; a tensor has shape ``(..., 1)`` and holds one step per client.

A separable h, also on some coordinates only, takes a step per coordinate as well, ``(..., d)``.
"""

Layout = Sequence[tuple[str, int, int, tuple[int, ...]]]
"""Where a model's parameters lie in the flat vector: (name, start, stop, shape) of each."""

_BLOCK = 1 << 18  # elements per block and thread: a few temporaries of this size stay in a core's caches
_THREADS = 8  # threads up to which blocks grow, so that scratch stays small


class Regularizer(ABC):
    """A function h on R^d with a computable prox; ``x`` is ``(..., d)`` and every reduction is over ``dim=-1``.

    Subclasses are frozen dataclasses: their fields are validated from their annotations.
    """

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

    def coupling(self, dimension: int) -> Tensor:
        """The part that each coordinate belongs to, ``(d,)``: h is a sum of functions of one part each.

        A part is named by its first coordinate. Unless a subclass says more, h may couple all of them.
        """
        return torch.zeros(dimension, dtype=torch.int64)

    @overload
    def on(self, where: str | tuple[str, ...]) -> Named: ...
    @overload
    def on(self, where: Tensor | Iterable[bool]) -> On: ...
    def on(self, where: str | tuple[str, ...] | Tensor | Iterable[bool]) -> Named | On:
        """Restrict h to some coordinates; zero on the others.

        Parameters
        ----------
        where : mask or pattern
            A mask with one entry per coordinate, or one or more patterns of parameter names (``"*.weight"``), which a
            problem with named parameters turns into coordinates.
        """
        from fedcomposite.regularizers.algebra import Named, On

        if isinstance(where, str):
            return Named(self, (where,))
        entries: list[Any] = where.tolist() if isinstance(where, Tensor) else list(where)
        if any(isinstance(entry, str) for entry in entries):
            return Named(self, tuple(entries))
        return On.from_mask(self, entries)

    def for_shape(self, shape: tuple[int, ...]) -> Regularizer:
        """The term for a parameter of the given shape; itself, unless it asks for rows, columns or a matrix."""
        return self

    def resolve(self, layout: Layout) -> Regularizer:
        """The term with patterns of parameter names turned into coordinates."""
        return self

    def __add__(self, other: Regularizer) -> Blocks:
        from fedcomposite.regularizers.algebra import Blocks

        return Blocks.of(self, other) if isinstance(other, Regularizer) else NotImplemented

    def _check(self, step: Step) -> None:
        """Refuse steps outside [0, 1/rho): past it the prox is not the minimiser any formula returns."""
        if torch.compiler.is_compiling():
            return  # the caller has checked, and a compiled program cannot raise
        bounded = self.rho > 0 and self.weakly_convex
        if isinstance(step, Tensor):
            if not bounded and step.device.type != "cpu":
                return  # nothing else to refuse, and reading a device's tensor would stall it
            low, high = float(step.detach().min()), float(step.detach().max())
        else:
            low = high = step
        if not low >= 0:
            raise ValueError(f"prox of {self}: step = {low:g}, must be >= 0")
        if bounded and high * self.rho >= 1:
            raise ValueError(
                f"prox of {self}: step = {high:g}, must be below 1/rho = {1 / self.rho:g}; "
                "take a smaller step or a less concave regularizer"
            )


def give(result: Tensor, out: Tensor | None) -> Tensor:
    """The result, in ``out`` where there is one."""
    return result if out is None else out.copy_(result)


def positive(kappa: float) -> float:
    """A factor of h, refused unless positive: minus a regularizer has no prox."""
    if not 0 < kappa < math.inf:
        raise ValueError(f"scaled: kappa = {kappa!r}, must be a number > 0")
    return kappa


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
    """h(x) = sum_j phi(x_j): subclasses give phi's prox on a block, in place of memory traffic.

    A large vector is worked through in blocks that stay in cache, so a prox reads and writes memory once. That does not
    change a bit of the result.
    """

    one_operation: ClassVar[bool] = False
    """Whether the prox with one step for all is a single operation, which gains nothing from blocks."""

    def coupling(self, dimension: int) -> Tensor:
        """Every coordinate by itself."""
        return torch.arange(dimension)

    @abstractmethod
    def _prox(
        self,
        v: Tensor,
        step: Step,
        out: Tensor | None = None,
        one: Tensor | None = None,
        two: Tensor | None = None,
    ) -> Tensor:
        """The prox of phi at each entry of a block, in ``out``, which may be ``v``; ``one`` and ``two`` are scratch.

        Each may be None: the tensor is then a new one. Only ``out`` may change ``v``, in the last operation.
        """

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        """argmin_u h(u) + ||u - v||^2 / (2 step), entry by entry."""
        self._check(step)
        return self._blockwise(v, step, out)

    def _blockwise(self, v: Tensor, step: Step, out: Tensor | None) -> Tensor:
        """The prox block by block; a tensor of steps broadcasts against ``v``."""
        if isinstance(step, Tensor):
            step = step.to(v.dtype)
        followed = v.requires_grad or (isinstance(step, Tensor) and step.requires_grad)
        if followed and torch.is_grad_enabled():  # autograd follows new tensors only
            return give(self._prox(v, step), out)
        most = _BLOCK * min(torch.get_num_threads(), _THREADS)  # torch gives each thread the same part of every block
        if v.numel() <= most or v.device.type != "cpu" or (self.one_operation and not isinstance(step, Tensor)):
            return self._prox(v, step, out)
        sink = torch.empty_like(v) if out is None else out
        if any(t.dim() > 2 and not t.is_contiguous() for t in (v, sink)):  # rows cannot be seen without a copy
            return self._prox(v, step, out)
        if not isinstance(step, Tensor) and v.is_contiguous() and sink.is_contiguous():
            source, target = v.view(1, -1), sink.view(1, -1)
        else:
            source, target = v.view(-1, v.shape[-1]), sink.view(-1, v.shape[-1])
        steps = step.broadcast_to(v.shape).reshape(source.shape) if isinstance(step, Tensor) else None
        scratch = torch.empty(most, dtype=v.dtype), torch.empty(most, dtype=v.dtype)
        with torch.no_grad():
            for at in _blocks(source.shape, most):
                block = source[at]
                one, two = (room[: block.numel()].view(block.shape) for room in scratch)
                self._prox(block, step if steps is None else steps[at], target[at], one, two)
        return sink


def _blocks(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice, slice]]:
    """Cut a matrix into blocks of at most ``most`` entries: several rows, or equal pieces of a row."""
    rows, columns = shape
    wide = -(-columns // -(-columns // most))
    tall = max(1, most // wide)
    for i in range(0, rows, tall):
        yield from ((slice(i, i + tall), slice(j, j + wide)) for j in range(0, columns, wide))
