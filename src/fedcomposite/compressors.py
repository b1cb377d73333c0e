"""Compressors: what a client keeps of a vector before sending it.

A compressor C is delta-contractive, E ||C(x) - x||^2 <= (1 - delta) ||x||^2; those here keep k of d entries as they
are, so delta = k/d. A compressed vector is its kept values and their int32 indices; one that is kept whole needs no
indices. As everywhere, vectors are ``(..., d)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedcomposite._validation import Probability, validate
from fedcomposite.registry import Registry, of_class

__all__ = ["Compressor", "Identity", "KeepLargest", "KeepRandom", "build", "dense"]

Uniform = Callable[[int], Tensor]
"""Gives ``count`` private random numbers in (0, 1) along the last axis."""


class Compressor(ABC):
    """Keeps some entries of a vector; subclasses are frozen dataclasses."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    def table(self) -> dict[str, Any]:
        """The compressor as a configuration's table."""
        return {"name": type(self).__name__, **vars(self)}

    @abstractmethod
    def kept(self, size: int) -> int:
        """How many of ``size`` entries are kept."""

    @abstractmethod
    def compress(self, x: Tensor, uniform: Uniform) -> tuple[Tensor, Tensor]:
        """Kept values and their indices, both ``(..., k)``; without indices when everything is kept."""


def dense(values: Tensor, indices: Tensor, size: int) -> Tensor:
    """The vector of length ``size`` that a compressed one stands for: zero where nothing was kept."""
    if not indices.shape[-1]:
        return values
    return values.new_zeros((*values.shape[:-1], size)).scatter(-1, indices.long(), values)


@dataclass(frozen=True)
class Identity(Compressor):
    """C(x) = x: no compression."""

    def kept(self, size: int) -> int:
        return size

    def compress(self, x: Tensor, uniform: Uniform) -> tuple[Tensor, Tensor]:
        return x, torch.empty((*x.shape[:-1], 0), dtype=torch.int32, device=x.device)


@dataclass(frozen=True)
class KeepLargest(Compressor):
    """C(x) keeps the k = ratio d entries of largest magnitude, at least one."""

    ratio: Probability

    def kept(self, size: int) -> int:
        """Ratio d, rounded, and at least 1."""
        return max(1, round(self.ratio * size))

    def compress(self, x: Tensor, uniform: Uniform) -> tuple[Tensor, Tensor]:
        """The entries of largest magnitude."""
        return _largest(x, x.abs(), self.kept(x.shape[-1]))


@dataclass(frozen=True)
class KeepRandom(Compressor):
    """C(x) keeps k = ratio d entries at random, at least one; unscaled, since a scaling by d/k does not contract."""

    ratio: Probability

    def kept(self, size: int) -> int:
        """Ratio d, rounded, and at least 1."""
        return max(1, round(self.ratio * size))

    def compress(self, x: Tensor, uniform: Uniform) -> tuple[Tensor, Tensor]:
        """The entries that drew the largest numbers."""
        return _largest(x, uniform(x.shape[-1]), self.kept(x.shape[-1]))


def _largest(x: Tensor, score: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k entries of x with the largest scores."""
    if k == x.shape[-1]:
        return Identity().compress(x, lambda count: score)
    indices = score.topk(k, dim=-1).indices
    return x.gather(-1, indices), indices.int()


REGISTRY: Registry[type[Compressor]] = Registry(
    "compressor",
    {c.__name__: c for c in (Identity, KeepLargest, KeepRandom)},
    group="fedcomposite.compressors",
    accept=of_class(Compressor),
)


def build(name: str, **fields: Any) -> Compressor:
    """Make a compressor by name, as ``compressor`` of ``[algorithm]`` in an experiment does."""
    made: Compressor = REGISTRY.build(name, fields)
    return made
