"""Regularizers made of others: on some coordinates, on named parameters, and sums over disjoint blocks."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fedcomposite.regularizers.base import Layout, Regularizer, Step
from fedcomposite.regularizers.memory import give

Runs = tuple[tuple[int, int], ...]
_MANY = 64  # runs from which on one operation on all coordinates beats one for each run


@dataclass(frozen=True)
class On(Regularizer):
    """h on some coordinates, zero on the rest: regularize the weights, leave intercepts alone.

    ``runs`` are the half-open ranges of regularized coordinates; h sees them as one vector. ``dimension`` is the length
    of the whole vector, None for any that has these coordinates. Made by ``h.on(mask)`` or ``h.on(coordinates)``.
    """

    h: Regularizer
    runs: Runs
    dimension: int | None = None

    @staticmethod
    def at(h: Regularizer, where: Iterable[Any], coordinates: bool = False) -> On:
        """Find the runs of a mask, or of the numbers of some coordinates."""
        entries = list(where)
        if coordinates or not set(entries) <= {0, 1}:
            return On(h, _runs(_coordinates(h, entries)))
        if entries and not any(isinstance(e, bool | np.bool_) for e in entries) and len(set(entries)) == len(entries):
            low, high = int(min(entries)), int(max(entries)) + 1
            raise ValueError(
                f"{h}.on({[int(e) for e in entries]}) may mean a mask or coordinates: write "
                f"{[bool(e) for e in entries]} for the mask, range({low}, {high}) for the coordinates"
            )
        flags = [j for j, entry in enumerate(entries) if entry]
        if not flags:
            raise ValueError(f"{h}.on: the mask is false everywhere; use Zero() for no regularizer")
        return On(h, _runs(flags), len(entries))

    def __str__(self) -> str:
        where = "..." if len(self.runs) > 1 else "range({}, {})".format(*self.runs[0])
        return f"{self.h}.on({where})"

    @property
    def rho(self) -> float:
        """That of h (the rest is flat)."""
        return self.h.rho

    def value(self, x: Tensor) -> Tensor:
        """The value of h at the regularized coordinates."""
        return self.h.value(self._take(x))

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The prox of h where it acts, the identity elsewhere."""
        self._fits(v)
        if self.h.grain == 1:  # one rule for all coordinates: one kernel, one pass over memory
            at = torch.arange(v.shape[-1], device=v.device)
            inside = torch.zeros_like(at, dtype=torch.bool)
            for a, b in self.runs:
                inside = inside | ((at >= a) & (at < b))
            return torch.where(inside, self.h.formula(v, step), v)
        return self._put(v.clone(), self.h.formula(self._take(v), self._own(step, v)))

    def _carried_out(self, v: Tensor, step: Step, out: Tensor | None) -> Tensor:
        self._fits(v)
        grain = self.h.grain
        if grain == 1 and len(self.runs) > _MANY:  # coordinates all over the vector
            return give(torch.where(self._mask(v), self.h._carried_out(v, step, None), v), out)
        gaps = self._gaps(v.shape[-1])
        if grain == 1 and 2 * sum(b - a for a, b in gaps) < v.shape[-1]:  # the whole vector, and the rest as it was
            rest = [v[..., a:b].clone() for a, b in gaps]  # out may be v
            return _filled(self.h._carried_out(v, step, out), gaps, rest)
        result = torch.empty_like(v) if out is None else out
        if result is not v:
            _filled(result, gaps, [v[..., a:b] for a, b in gaps])
        if len(self.runs) == 1 or (grain > 0 and all((b - a) % grain == 0 for a, b in self.runs)):
            each = _per_coordinate(step, v)
            for a, b in self.runs:
                self.h._carried_out(v[..., a:b], step[..., a:b] if each else step, result[..., a:b])  # type: ignore[index]
            return result
        return self._put(result, self.h._carried_out(self._take(v), self._own(step, v), None))

    def _own(self, step: Step, v: Tensor) -> Step:
        """The steps of the regularized coordinates, where each has its own."""
        return self._take(step) if isinstance(step, Tensor) and _per_coordinate(step, v) else step

    def _mask(self, like: Tensor) -> Tensor:
        """True where h acts, kept for the next call."""
        place = like.shape[-1], like.device
        if place not in self._masks:
            mask = np.zeros(like.shape[-1], dtype=bool)
            for a, b in self.runs:
                mask[a:b] = True
            self._masks[place] = torch.from_numpy(mask).to(like.device)
        return self._masks[place]

    @cached_property
    def _masks(self) -> dict[tuple[int, torch.device], Tensor]:
        return {}

    def _gaps(self, length: int) -> Runs:
        """The ranges of coordinates that h leaves alone."""
        edges = [0, *(edge for run in self.runs for edge in run), length]
        return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)

    def subgradient(self, x: Tensor) -> Tensor:
        """A subgradient of h where it acts, zero elsewhere."""
        if self.h.grain == 1:
            self._fits(x)
            return torch.where(self._mask(x), self.h.subgradient(x), 0.0)
        return self._put(torch.zeros_like(x), self.h.subgradient(self._take(x)))

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Root of the sum of the squared distances on the two sets of coordinates."""
        own = self.h.optimality(self._take(x), self._take(gradient))
        gaps = [gradient[..., a:b] for a, b in self._gaps(gradient.shape[-1])]
        if not gaps:
            return own
        rest: Tensor = torch.linalg.vector_norm(gaps[0] if len(gaps) == 1 else torch.cat(gaps, dim=-1), dim=-1)
        return torch.hypot(own, rest)

    def prox_slope(self, v: Tensor, step: Step) -> Tensor | None:
        own = self.h.prox_slope(self._take(v), self._own(step, v))
        return None if own is None else self._put(torch.ones_like(v), own)

    def scaled(self, kappa: float) -> On:
        return replace(self, h=self.h.scaled(kappa))

    def among(self, coordinates: Tensor, dimension: int) -> Regularizer | None:
        mask = self._mask(coordinates.new_empty(dimension))
        if not bool(mask[coordinates].all()):
            return None
        inside = coordinates - self.runs[0][0] if len(self.runs) == 1 else (mask.cumsum(0) - 1)[coordinates]
        return self.h if len(inside) == (count := int(mask.sum())) else self.h.among(inside, count)

    def coupling(self, dimension: int) -> Tensor:
        """The parts of h where it acts; the rest by itself."""
        labels = torch.arange(dimension)
        inside = self._take(labels)
        self._put(labels, inside[self.h.coupling(len(inside))])
        return labels

    def acts_on(self, dimension: int) -> Tensor:
        """Those of h among its coordinates."""
        mask = torch.zeros(dimension, dtype=torch.bool)
        self._put(mask, self.h.acts_on(len(self._take(mask))))
        return mask

    def _fits(self, x: Tensor) -> None:
        d = x.shape[-1]
        if self.dimension is not None and d != self.dimension:
            raise ValueError(f"{self.h} was set on vectors of length {self.dimension}, got {d}")
        if d < self.runs[-1][1]:
            raise ValueError(f"{self.h} was set on coordinate {self.runs[-1][1] - 1}, the vector has {d}")

    def _take(self, x: Tensor) -> Tensor:
        self._fits(x)
        parts = [x[..., a:b] for a, b in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _put(self, x: Tensor, values: Tensor) -> Tensor:
        """The vector x with ``values`` at the regularized coordinates, in place."""
        return _filled(x, self.runs, torch.split(values, [b - a for a, b in self.runs], dim=-1))


def _filled(x: Tensor, runs: Runs, pieces: Sequence[Tensor]) -> Tensor:
    """The vector x with a piece in each range, in place."""
    for (a, b), piece in zip(runs, pieces, strict=True):
        x[..., a:b] = piece
    return x


def _per_coordinate(step: Step, v: Tensor) -> bool:
    return isinstance(step, Tensor) and step.dim() > 0 and step.shape[-1] == v.shape[-1] > 1


def _coordinates(h: Regularizer, entries: list[Any]) -> list[int]:
    """The numbers of some coordinates in rising order, each once."""
    if not all(isinstance(e, numbers.Integral) and e >= 0 for e in entries):  # type: ignore[operator]
        raise ValueError(f"{h}.on: a mask holds true and false, a list of coordinates integers from 0 on")
    found = sorted({int(e) for e in entries})
    if len(found) < len(entries):
        raise ValueError(f"{h}.on: a coordinate is named twice")
    return found


def _runs(coordinates: list[int]) -> Runs:
    """The half-open ranges that rising coordinates make up."""
    starts = [j for i, j in enumerate(coordinates) if i == 0 or coordinates[i - 1] != j - 1]
    stops = [j + 1 for i, j in enumerate(coordinates) if j + 1 not in coordinates[i + 1 : i + 2]]
    return tuple(zip(starts, stops, strict=True))


@dataclass(frozen=True)
class Blocks(Regularizer):
    """h(x) = sum_b h_b(x_b) over disjoint sets of coordinates, zero on the rest. Made by ``a.on(...) + b.on(...)``.

    The prox is that of each term on its own coordinates. That of a sum over the *same* coordinates is not made of its
    terms' in general, so terms that overlap are refused.

    ``unit`` is what the largest strength among the terms is divided by where one number is to stand for all of them,
    as along a path.
    """

    parts: tuple[Regularizer, ...]
    unit: float = 1.0

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
        lengths = [part.dimension for part in placed if part.dimension is not None]
        if len(set(lengths)) > 1:
            raise ValueError(f"terms of different lengths were added: {', '.join(map(str, lengths))}")
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
        return torch.stack([part.value(x) for part in self.parts]).sum(0)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The prox of each term where it acts, the identity elsewhere."""
        for part in self.parts:
            v = part.formula(v, step)
        return v

    def _carried_out(self, v: Tensor, step: Step, out: Tensor | None) -> Tensor:
        result = v.clone() if out is None else (out if out is v else out.copy_(v))
        for part in self.parts:
            part._carried_out(result, step, result)
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
        return replace(self, parts=tuple(part.scaled(kappa) for part in self.parts))

    def coupling(self, dimension: int) -> Tensor:
        """The parts of each term where it acts; the rest by itself."""
        labels = torch.arange(dimension)
        for part in self._placed():
            part._put(labels, part._take(part.coupling(dimension)))
        return labels

    def acts_on(self, dimension: int) -> Tensor:
        return torch.stack([part.acts_on(dimension) for part in self._placed()]).any(0)

    def resolve(self, layout: Layout) -> Blocks:
        """Every term on its coordinates."""
        return replace(Blocks.of(*(part.resolve(layout) for part in self.parts)), unit=self.unit)

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
        return replace(self, h=self.h.scaled(kappa))

    def value(self, x: Tensor) -> Tensor:
        self.refuse()

    def formula(self, v: Tensor, step: Step) -> Tensor:
        self.refuse()

    def subgradient(self, x: Tensor) -> Tensor:
        self.refuse()

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Say what is missing."""
        names = " or ".join(map(repr, self.patterns))
        raise TypeError(
            f"{self.h} is set on parameters named {names}, whose coordinates are not known yet: "
            "give it to a problem with a model, or call .resolve(layout)"
        )
