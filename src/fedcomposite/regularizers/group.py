"""Regularizers that act on groups of coordinates: group lasso and sparse group lasso."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, ZeroOrMore
from fedcomposite.regularizers.base import ORDINARY, Regularizer, Step, ordinary, power_of_two
from fedcomposite.regularizers.memory import give, in_blocks
from fedcomposite.regularizers.separable import soft

Groups = Count | tuple[Count, ...] | Literal["rows", "columns"]
"""One size for all groups, a size for each, or the rows or columns of a matrix."""

Weights = Literal["sqrt", "equal"] | tuple[ZeroOrMore, ...]
"""The square root of each group's size, 1 for all, or a number for each."""


def as_matrix(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a parameter: a convolution's ``(out, in, h, w)`` is seen as ``(out, in * h * w)``."""
    if len(shape) < 2:
        raise ValueError(f"{name} needs a matrix, got a parameter of shape {tuple(shape)}")
    return shape[0], torch.Size(shape[1:]).numel()


class Grouped(Regularizer):
    """h(x) = sum_g phi_g(x_g) over consecutive groups; subclasses give phi_g for groups of one size at a time.

    A vector is seen as parts ``(..., m, s)``: m groups of size s.
    """

    groups: Groups
    weights: Weights
    shape: tuple[Count, ...] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if isinstance(self.groups, str):
            if isinstance(self.weights, tuple):
                raise ValueError(f"{name}: weights by group need groups given by their sizes, not {self.groups!r}")
            if self.shape is not None:
                as_matrix(name, self.shape)
        elif self.shape is not None:
            raise ValueError(f"{name}: shape belongs to groups = 'rows' or 'columns', these are {self.groups!r}")
        elif self.groups == ():
            raise ValueError(f"{name}: groups is empty")
        elif isinstance(self.groups, tuple) and isinstance(self.weights, tuple):
            self._same_count(len(self.groups))

    @abstractmethod
    def _value(self, x: Tensor, weight: Step) -> Tensor:
        """Sum of phi over a part's groups."""

    @abstractmethod
    def _formula(self, v: Tensor, weight: Step, step: Step, plain: bool) -> Tensor:
        """The prox of phi on each group of a part; ``plain`` if their squares are safe as they are."""

    @abstractmethod
    def _subgradient(self, x: Tensor, weight: Step) -> Tensor:
        """A subgradient of phi on each group of a part."""

    @abstractmethod
    def _residual(self, x: Tensor, gradient: Tensor, weight: Step) -> Tensor:
        """The shortest vector from the subdifferential of phi to ``-gradient``, on each group of a part."""

    def value(self, x: Tensor) -> Tensor:
        parts = [self._value(part, weight) for part, weight in self._parts(x)]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    @property
    def grain(self) -> int:
        """The size of the groups, where they are alike."""
        return self.groups if isinstance(self.groups, int) and isinstance(self.weights, str) else 0

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The prox, group by group."""
        return self._prox(v, step, plain=False)

    def _prox(self, v: Tensor, step: Step, plain: bool) -> Tensor:
        steps = step.unsqueeze(-1) if isinstance(step, Tensor) else step
        return self._join([self._formula(part, weight, steps, plain) for part, weight in self._parts(v)], v)

    def _carried_out(self, v: Tensor, step: Step, out: Tensor | None) -> Tensor:
        # A group whose squares vanish is set to zero, rightly, unless the threshold is as small as that.
        least = getattr(self, self.coefficients[-1]) * (min(self.weights) if isinstance(self.weights, tuple) else 1.0)
        if not ordinary(v) or not least * float(step.min() if isinstance(step, Tensor) else step) > ORDINARY:
            return super()._carried_out(v, step, out)
        prox = partial(self._prox, plain=True)
        return in_blocks(prox, v, step, out, self.grain) if self.grain else give(prox(v, step), out)

    def subgradient(self, x: Tensor) -> Tensor:
        """A subgradient, group by group; zero on zero groups."""
        return self._join([self._subgradient(part, weight) for part, weight in self._parts(x)], x)

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Root of the sum of the groups' squared distances."""
        pairs = zip(self._parts(x), self._parts(gradient), strict=True)
        residual = self._join([self._residual(a, b, weight) for (a, weight), (b, _) in pairs], x)
        distance: Tensor = torch.linalg.vector_norm(residual, dim=-1)
        return distance

    def for_shape(self, shape: tuple[int, ...]) -> Self:
        """Rows or columns of a parameter of that shape; sizes of groups do not depend on it."""
        if not isinstance(self.groups, str) or self.shape is not None:
            return self
        return replace(self, shape=tuple(shape))  # type: ignore[type-var]

    def among(self, coordinates: Tensor, dimension: int) -> Regularizer | None:
        return self if self.grain else None  # one rule for all groups

    def coupling(self, dimension: int) -> Tensor:
        labels = torch.arange(dimension)
        for members, _ in self._parts(torch.arange(dimension)):
            labels[members] = members.amin(-1, keepdim=True).expand_as(members)
        return labels

    def _parts(self, x: Tensor) -> list[tuple[Tensor, Step]]:
        """The parts of x, views where it can be, and their groups' weights."""
        name, d, groups = type(self).__name__, x.shape[-1], self.groups
        if isinstance(groups, tuple):
            if sum(groups) != d:
                raise ValueError(f"{name}: the groups have {sum(groups)} coordinates in all, the vector has {d}")
            parts = [x[..., index.to(x.device)] for _, index in self._places]
            return [(part, self._weight(part, which)) for part, (which, _) in zip(parts, self._places, strict=True)]
        if isinstance(groups, int):
            if d % groups:
                raise ValueError(f"{name}: groups of {groups} do not divide a vector of length {d}")
            whole = x.reshape(*x.shape[:-1], d // groups, groups)
        else:
            if self.shape is None:
                raise ValueError(
                    f"{name}: groups = {groups!r} needs the shape of a matrix: give shape=(rows, columns), "
                    "or name the parameters, .on('*.weight')"
                )
            rows, columns = as_matrix(name, self.shape)
            if rows * columns != d:
                raise ValueError(f"{name}: shape {self.shape} has {rows * columns} entries, the vector has {d}")
            whole = x.reshape(*x.shape[:-1], rows, columns)
            whole = whole if groups == "rows" else whole.transpose(-1, -2)
        return [(whole, self._weight(whole, None))]

    def _join(self, parts: list[Tensor], like: Tensor) -> Tensor:
        """The vector of the parts."""
        if isinstance(self.groups, tuple):
            result = torch.empty_like(like)
            for part, (_, index) in zip(parts, self._places, strict=True):
                result[..., index.to(like.device)] = part
            return result
        return (parts[0].transpose(-1, -2) if self.groups == "columns" else parts[0]).flatten(-2)

    @cached_property
    def _places(self) -> list[tuple[Tensor, Tensor]]:
        """Numbers ``(m,)`` and coordinates ``(m, s)`` of the groups of each size: few sizes make few parts."""
        assert isinstance(self.groups, tuple)
        sizes = torch.tensor(self.groups)
        starts = sizes.cumsum(0) - sizes
        which = [(sizes == size).nonzero().squeeze(1) for size in sorted(set(self.groups))]
        return [(w, starts[w].unsqueeze(1) + torch.arange(int(sizes[w[0]]))) for w in which]

    def _weight(self, part: Tensor, which: Tensor | None) -> Step:
        """One weight for a part, or one per group, ``(m, 1)``; ``which`` are the numbers of its groups, if not all."""
        if self.weights == "equal":
            return 1.0
        if self.weights == "sqrt":
            return math.sqrt(part.shape[-1])
        weights = torch.tensor(self.weights, dtype=part.dtype, device=part.device)
        if which is None:
            self._same_count(part.shape[-2])
            return weights.unsqueeze(-1)
        return weights[which.to(part.device)].unsqueeze(-1)

    def _same_count(self, groups: int) -> None:
        if groups != len(self.weights):
            raise ValueError(f"{type(self).__name__}: {groups} groups, but {len(self.weights)} weights")


def _length(x: Tensor) -> Tensor:
    """Norm of each group, ``(..., m, 1)``."""
    power = power_of_two(x)
    size: Tensor = torch.linalg.vector_norm(x / power, dim=-1, keepdim=True)
    return size * power


def _unit(x: Tensor) -> Tensor:
    """Direction x / ||x|| of each group, zero at zero."""
    u = x / power_of_two(x)
    size: Tensor = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    return u / size.masked_fill(size == 0, 1.0)


def _shrink(v: Tensor, by: Step, plain: bool = False) -> Tensor:
    """(1 - by/||v||)_+ v on each group."""
    power = None if plain else power_of_two(v)
    size: Tensor = torch.linalg.vector_norm(v if power is None else v / power, dim=-1, keepdim=True)
    left = (size - (by if power is None else by / power)).clamp(min=0)
    return v * (left / size.masked_fill(size == 0, 1.0))


@dataclass(frozen=True)
class GroupLasso(Grouped):
    """h(x) = lam sum_g w_g ||x_g||_2: whole groups are zero or not (Yuan & Lin 2006).

    The prox shortens each group by lam * step * w_g.

    Parameters
    ----------
    lam : float
        Strength.
    groups : int, tuple of int, "rows" or "columns"
        The size of all groups, the size of each, or the rows or columns of a matrix.
    weights : {"sqrt", "equal"} or tuple of float
        w_g: the square root of the group's size (the default), 1, or a number per group.
    shape : tuple of int, optional
        The matrix whose rows or columns are the groups; with named parameters it is taken from each of them.

    Examples
    --------
    >>> GroupLasso(1.0, groups=2, weights="equal").prox(torch.tensor([3.0, 4.0, 0.3, 0.4]), 1.0)
    tensor([2.4000, 3.2000, 0.0000, 0.0000])
    """

    lam: ZeroOrMore
    groups: Groups
    weights: Weights = "sqrt"
    shape: tuple[Count, ...] | None = None

    def _value(self, x: Tensor, weight: Step) -> Tensor:
        return self.lam * (weight * _length(x)).sum((-2, -1))

    def _formula(self, v: Tensor, weight: Step, step: Step, plain: bool) -> Tensor:
        return _shrink(v, self.lam * step * weight, plain)

    def _subgradient(self, x: Tensor, weight: Step) -> Tensor:
        return self.lam * weight * _unit(x)

    def _residual(self, x: Tensor, gradient: Tensor, weight: Step) -> Tensor:
        bound = self.lam * weight
        return torch.where(_length(x) > 0, -gradient - bound * _unit(x), _shrink(-gradient, bound))


@dataclass(frozen=True)
class SparseGroupLasso(Grouped):
    """h(x) = l1 ||x||_1 + l2 sum_g w_g ||x_g||_2: few groups, and few entries in each (Simon et al. 2013).

    The prox soft-thresholds at l1 * step, then shortens each group by l2 * step * w_g.

    Parameters
    ----------
    l1, l2 : float
        Strengths of the two terms.
    groups : int, tuple of int, "rows" or "columns"
        As in :class:`GroupLasso`.
    weights : {"sqrt", "equal"} or tuple of float
        As in :class:`GroupLasso`.
    shape : tuple of int, optional
        As in :class:`GroupLasso`.
    """

    coefficients: ClassVar[tuple[str, ...]] = ("l1", "l2")
    l1: ZeroOrMore
    l2: ZeroOrMore
    groups: Groups
    weights: Weights = "sqrt"
    shape: tuple[Count, ...] | None = None

    def _value(self, x: Tensor, weight: Step) -> Tensor:
        return self.l1 * x.abs().sum((-2, -1)) + self.l2 * (weight * _length(x)).sum((-2, -1))

    def _formula(self, v: Tensor, weight: Step, step: Step, plain: bool) -> Tensor:
        return _shrink(soft(v, self.l1 * step), self.l2 * step * weight, plain)

    def _subgradient(self, x: Tensor, weight: Step) -> Tensor:
        return self.l1 * x.sign() + self.l2 * weight * _unit(x)

    def _residual(self, x: Tensor, gradient: Tensor, weight: Step) -> Tensor:
        bound = self.l2 * weight
        rest = -gradient - bound * _unit(x)
        inside = torch.where(x == 0, soft(rest, self.l1), rest - self.l1 * x.sign())
        return torch.where(_length(x) > 0, inside, _shrink(soft(-gradient, self.l1), bound))
