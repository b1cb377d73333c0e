"""Regularizers made of others: on some coordinates, on named parameters, and sums over disjoint blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor

from fedcomposite.regularizers.base import Layout, Regularizer, Separable, Step
from fedcomposite.regularizers.separable import L1

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class On(Regularizer):
    """h on some coordinates, zero on the rest: regularize the weights, leave intercepts alone.

    ``runs`` are the half-open ranges of regularized coordinates of a vector of length ``dimension``; h sees them as one
    vector. Made by ``h.on(mask)``.
    """

    h: Regularizer
    runs: Runs
    dimension: int

    @staticmethod
    def from_mask(h: Regularizer, mask: Iterable[bool]) -> On:
        """Find the runs of true entries of ``mask``."""
        flags = [bool(b) for b in mask]
        edges = [j for j in range(len(flags) + 1) if (flags[j - 1] if j else False) != (j < len(flags) and flags[j])]
        if not edges:
            raise ValueError(f"{h}.on: the mask is false everywhere; use Zero() for no regularizer")
        return On(h, tuple(zip(edges[::2], edges[1::2], strict=True)), len(flags))

    @property
    def rho(self) -> float:
        """That of h (the rest is flat)."""
        return self.h.rho

    def value(self, x: Tensor) -> Tensor:
        """H of the regularized coordinates."""
        return self.h.value(self._take(x))

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        """The prox of h where it acts, the identity elsewhere."""
        self._fits(v)
        # One rule for all coordinates can be applied where they lie; others see the regularized ones side by side.
        alike = isinstance(self.h, Separable) and not (isinstance(self.h, L1) and self.h.weights is not None)
        if alike and torch.compiler.is_compiling():
            at = torch.arange(self.dimension, device=v.device)
            inside = torch.stack([(at >= a) & (at < b) for a, b in self.runs]).any(0)
            return torch.where(inside, self.h.prox(v, step), v)  # one kernel, one pass over memory
        if alike and 2 * self._rest < self.dimension:  # the whole vector at once, and then the rest as it was
            rest = [v[..., a:b] if out is None else v[..., a:b].clone() for a, b in self._gaps]  # out may be v
            result = self.h.prox(v, step, out)
            for (a, b), values in zip(self._gaps, rest, strict=True):
                result[..., a:b] = values
            return result
        result = v.clone() if out is None else (out if out is v else out.copy_(v))
        source = v if out is None else result
        each = isinstance(step, Tensor) and step.shape[-1] == self.dimension  # a step per coordinate
        if alike or len(self.runs) == 1:
            for a, b in self.runs:
                part = result[..., a:b]
                own = step[..., a:b] if isinstance(step, Tensor) and each else step
                self.h.prox(part if source is result else source[..., a:b], own, out=part)
        else:
            own = self._take(step) if isinstance(step, Tensor) and each else step
            self._put(result, self.h.prox(self._take(source), own))
        return result

    @cached_property
    def _gaps(self) -> Runs:
        """The ranges of coordinates that h leaves alone."""
        edges = [0, *(edge for run in self.runs for edge in run), self.dimension]
        return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)

    @cached_property
    def _rest(self) -> int:
        """How many coordinates h leaves alone."""
        return sum(b - a for a, b in self._gaps)

    def subgradient(self, x: Tensor) -> Tensor:
        """A subgradient of h where it acts, zero elsewhere."""
        result = torch.zeros_like(x)
        self._put(result, self.h.subgradient(self._take(x)))
        return result

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Root of the sum of the squared distances on the two sets of coordinates."""
        return Blocks((self,)).optimality(x, gradient)

    def scaled(self, kappa: float) -> On:
        """Kappa h on the same coordinates."""
        return replace(self, h=self.h.scaled(kappa))

    def coupling(self, dimension: int) -> Tensor:
        """The parts of h where it acts; the rest by itself."""
        labels = torch.arange(dimension)
        inside = self._take(labels)
        self._put(labels, inside[self.h.coupling(len(inside))])
        return labels

    def _fits(self, x: Tensor) -> None:
        if x.shape[-1] != self.dimension:
            raise ValueError(f"{self.h} was set on vectors of length {self.dimension}, got {x.shape[-1]}")

    def _take(self, x: Tensor) -> Tensor:
        self._fits(x)
        parts = [x[..., a:b] for a, b in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _put(self, x: Tensor, values: Tensor) -> None:
        at = 0
        for a, b in self.runs:
            x[..., a:b] = values[..., at : at + b - a]
            at += b - a


@dataclass(frozen=True)
class Blocks(Regularizer):
    """h(x) = sum_b h_b(x_b) over disjoint sets of coordinates, zero on the rest. Made by ``a.on(...) + b.on(...)``.

    The prox is that of each term on its own coordinates. That of a sum over the *same* coordinates is not made of its
    terms' in general, so terms that overlap are refused.
    """

    parts: tuple[Regularizer, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.parts:
            raise ValueError("Blocks: parts is empty; use Zero() for no regularizer")
        for part in self.parts:
            if not isinstance(part, On | Named):
                raise TypeError(
                    f"{part} acts on all coordinates, and only terms on disjoint coordinates can be added: "
                    "say where each acts, a.on(mask) + b.on(mask)"
                )
        placed = [part for part in self.parts if isinstance(part, On)]
        if len({part.dimension for part in placed}) > 1:
            raise ValueError(f"terms of different lengths were added: {', '.join(str(p.dimension) for p in placed)}")
        runs = sorted((a, b, str(part.h)) for part in placed for a, b in part.runs)
        for (_, stop, one), (start, _, two) in pairwise(runs):
            if start < stop:
                raise ValueError(f"{one} and {two} both act on coordinate {start}; terms must not overlap")

    @staticmethod
    def of(*terms: Regularizer) -> Blocks:
        """The sum of terms, some of which may be sums themselves."""
        return Blocks(tuple(p for t in terms for p in (t.parts if isinstance(t, Blocks) else (t,))))

    @property
    def rho(self) -> float:
        """The largest of the terms'."""
        return max(part.rho for part in self.parts)

    def value(self, x: Tensor) -> Tensor:
        """Sum of the terms."""
        return torch.stack([part.value(x) for part in self.parts]).sum(0)

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        """The prox of each term where it acts, the identity elsewhere."""
        result = v.clone() if out is None else (out if out is v else out.copy_(v))
        for part in self.parts:
            part.prox(result, step, out=result)
        return result

    def subgradient(self, x: Tensor) -> Tensor:
        """A subgradient of each term where it acts, zero elsewhere."""
        return torch.stack([part.subgradient(x) for part in self.parts]).sum(0)

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Root of the sum of the squared distances on the terms' coordinates and on the rest."""
        rest = gradient.clone()
        distances = []
        for part in self._placed():
            part._put(rest, torch.zeros_like(part._take(x)))
            distances.append(part.h.optimality(part._take(x), part._take(gradient)))
        total: Tensor = torch.linalg.vector_norm(torch.stack([*distances, rest.norm(dim=-1)]), dim=0)
        return total

    def scaled(self, kappa: float) -> Blocks:
        """Kappa times each term."""
        return Blocks(tuple(part.scaled(kappa) for part in self.parts))

    def coupling(self, dimension: int) -> Tensor:
        """The parts of each term where it acts; the rest by itself."""
        labels = torch.arange(dimension)
        for part in self._placed():
            part._put(labels, part._take(part.coupling(dimension)))
        return labels

    def resolve(self, layout: Layout) -> Blocks:
        """Every term on its coordinates."""
        return Blocks.of(*(part.resolve(layout) for part in self.parts))

    def _placed(self) -> list[On]:
        for part in self.parts:
            if isinstance(part, Named):
                part.refuse()
        return [part for part in self.parts if isinstance(part, On)]


@dataclass(frozen=True)
class Named(Regularizer):
    """h on the parameters whose names match a pattern (``"*.weight"``). Made by ``h.on("*.weight")``.

    It has no values of its own until :meth:`resolve` gives the patterns their coordinates; problems whose parameters
    have names do that. A term that looks at a parameter's shape (rows, a matrix) then acts on each matching parameter
    by itself, any other on all of their coordinates as one vector, as with a mask.
    """

    h: Regularizer
    patterns: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.patterns:
            raise ValueError("Named: patterns is empty")

    @property
    def rho(self) -> float:
        """That of h."""
        return self.h.rho

    def resolve(self, layout: Layout) -> Regularizer:
        """The term on its coordinates.

        Parameters
        ----------
        layout : sequence of (name, start, stop, shape)
            Every parameter of the model: coordinates ``start`` to ``stop`` hold its entries, row by row.
        """
        found = [entry for entry in layout if any(fnmatchcase(entry[0], p) for p in self.patterns)]
        for pattern in self.patterns:
            if not any(fnmatchcase(entry[0], pattern) for entry in found):
                names = ", ".join(entry[0] for entry in layout)
                raise ValueError(f"no parameter matches {pattern!r} (the parameters: {names})")
        dimension = max(entry[2] for entry in layout)
        terms = []
        for name, _, _, shape in found:
            try:
                terms.append(self.h.for_shape(tuple(shape)))
            except ValueError as error:
                raise ValueError(f"parameter {name!r}: {error}") from None
        if all(term is self.h for term in terms):
            return On(self.h, tuple((a, b) for _, a, b, _ in sorted(found, key=lambda e: e[1])), dimension)
        return Blocks(tuple(On(t, ((a, b),), dimension) for t, (_, a, b, _) in zip(terms, found, strict=True)))

    def scaled(self, kappa: float) -> Named:
        """Kappa h on the same parameters."""
        return replace(self, h=self.h.scaled(kappa))

    def value(self, x: Tensor) -> Tensor:
        """Refused until resolved."""
        self.refuse()

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        """Refused until resolved."""
        self.refuse()

    def subgradient(self, x: Tensor) -> Tensor:
        """Refused until resolved."""
        self.refuse()

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Refused until resolved."""
        self.refuse()

    def refuse(self) -> NoReturn:
        """Say what is missing."""
        names = " or ".join(map(repr, self.patterns))
        raise TypeError(
            f"{self.h} is set on parameters named {names}, whose coordinates are not known yet: "
            "give it to a problem with a model, or call .resolve(layout)"
        )
