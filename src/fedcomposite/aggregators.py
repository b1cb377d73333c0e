"""Robust means: what a server takes in place of the mean of the replies when some clients may lie.

A reply's tensors are seen as one vector. With honest and equal clients all of them are the mean. With clients that
differ they are not, and a method then rests where the robust mean of its replies does; see ``docs/robust.md``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, validate
from fedcomposite.registry import Registry, of_class

__all__ = [
    "REGISTRY",
    "Aggregator",
    "AnyAggregator",
    "CoordinateMedian",
    "GeometricMedian",
    "NormClipping",
    "OwnRule",
    "TrimmedMean",
    "build",
    "read",
]

T = TypeVar("T", bound=NamedTuple)
_STEPS, _CLOSE = 200, 1e-12  # of Weiszfeld's iteration


class Aggregator(ABC):
    """A rule from the vectors of m clients, ``(m, d)``, to one, ``(d,)``; subclasses are frozen dataclasses."""

    convex: ClassVar[bool] = False
    """Whether the result is a mean of the vectors with some weights, so that Hessians stay what they are."""

    def __post_init__(self) -> None:
        validate(self)

    @abstractmethod
    def rule(self, vectors: Tensor) -> Tensor:
        """The robust mean."""

    def check(self, clients: int) -> None:  # noqa: B027
        """Refuse a number of clients that is too small."""

    def combine(self, replies: T) -> T:
        """The robust mean of stacked replies: their tensors side by side are the vectors."""
        flat = torch.cat([t.reshape(len(t), -1) for t in replies], dim=1)
        parts = self.rule(flat).split_with_sizes([t[0].numel() for t in replies])
        mean: Any = (p.view(t.shape[1:]).to(t.dtype) for p, t in zip(parts, replies, strict=True))
        return type(replies)(*mean)


@final
@dataclass(frozen=True)
class CoordinateMedian(Aggregator):
    """The median of each coordinate; the mean of the middle two for an even number of clients."""

    def rule(self, vectors: Tensor) -> Tensor:
        """Sort, and take the middle."""
        m = len(vectors)
        return vectors.sort(dim=0).values[(m - 1) // 2 : m // 2 + 1].mean(0)


@final
@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """The mean of each coordinate without its ``trim`` smallest and largest values."""

    trim: Count

    def check(self, clients: int) -> None:
        """At least one client must be left."""
        if clients <= 2 * self.trim:
            raise ValueError(f"TrimmedMean: trim = {self.trim} leaves nothing of {clients} clients; the most is "
                             f"{(clients - 1) // 2}")  # fmt: skip

    def rule(self, vectors: Tensor) -> Tensor:
        """Sort, and leave out both ends."""
        self.check(len(vectors))
        return vectors.sort(dim=0).values[self.trim : len(vectors) - self.trim].mean(0)


@final
@dataclass(frozen=True)
class GeometricMedian(Aggregator):
    """The vector with the smallest sum of distances to the clients', by Weiszfeld's iteration."""

    convex: ClassVar[bool] = True

    def rule(self, vectors: Tensor) -> Tensor:
        """From the coordinates' medians, with distances bounded away from zero."""
        centre = CoordinateMedian().rule(vectors)
        distances = torch.linalg.vector_norm(vectors - centre, dim=1)
        least = 1e-9 * float(distances.median()) + torch.finfo(vectors.dtype).tiny
        for _ in range(_STEPS):
            weights = 1 / torch.linalg.vector_norm(vectors - centre, dim=1).clamp(min=least)
            new = (weights / weights.sum()) @ vectors
            moved = float(torch.linalg.vector_norm(new - centre))
            centre = new
            if moved <= _CLOSE * float(torch.linalg.vector_norm(centre)):
                break
        return centre


@final
@dataclass(frozen=True)
class NormClipping(Aggregator):
    """The mean after pulling far vectors back to a ball around the coordinates' medians (centred clipping).

    Parameters
    ----------
    radius : float, optional
        Of the ball; the median distance from its centre if left out.
    """

    radius: Positive | None = None

    def rule(self, vectors: Tensor) -> Tensor:
        """Clip the differences from the centre."""
        centre = CoordinateMedian().rule(vectors)
        apart = vectors - centre
        distances = torch.linalg.vector_norm(apart, dim=1)
        radius = distances.median() if self.radius is None else torch.full_like(distances[0], self.radius)
        factor = torch.where(distances > radius, radius / distances.clamp(min=torch.finfo(vectors.dtype).tiny), 1.0)
        return centre + (factor / len(vectors)) @ apart


@final
@dataclass(frozen=True, repr=False)
class OwnRule(Aggregator):
    """A function of the vectors ``(m, d)``. A checkpoint knows it by its name alone."""

    function: Callable[[Tensor], Tensor]

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    def rule(self, vectors: Tensor) -> Tensor:
        """What the function gives, which has to be one vector."""
        made = self.function(vectors)
        shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        if shape != tuple(vectors.shape[1:]):
            raise ValueError(
                f"aggregator {self} gives {shape} for vectors {tuple(vectors.shape)}, must be one of "
                f"{vectors.shape[1]} numbers"
            )
        return made


AnyAggregator = Aggregator | Callable[[Tensor], Tensor]
"""One of these, or a function from the vectors of m clients, ``(m, d)``, to one, ``(d,)``."""


def read(given: AnyAggregator | None) -> Aggregator | None:
    """An aggregator as it is, a function as one; what is neither is refused where it is checked."""
    own = callable(given) and not isinstance(given, Aggregator | type)
    return OwnRule(given) if own else given  # type: ignore[arg-type, return-value]


REGISTRY: Registry[type[Aggregator]] = Registry(
    "aggregator",
    {c.__name__: c for c in (CoordinateMedian, GeometricMedian, NormClipping, TrimmedMean)},
    group="fedcomposite.aggregators",
    accept=of_class(Aggregator),
)


def build(name: str, **fields: Any) -> Aggregator:
    """Make an aggregator by name, as ``[run] aggregator`` of an experiment does."""
    made: Aggregator = REGISTRY.build(name, fields)
    return made
