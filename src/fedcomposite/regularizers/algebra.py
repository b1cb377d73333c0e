"""Regularizers made of others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcomposite.regularizers.base import Regularizer, Step


@dataclass(frozen=True)
class On(Regularizer):
    """h on some coordinates, zero on the rest: regularize the weights, leave intercepts alone.

    ``runs`` are the half-open ranges of regularized coordinates of a vector of length ``dimension``.
    Made by ``h.on(mask)``.
    """

    h: Regularizer
    runs: tuple[tuple[int, int], ...]
    dimension: int

    @staticmethod
    def from_mask(h: Regularizer, mask: Tensor | Iterable[bool]) -> On:
        """Find the runs of true entries of ``mask``."""
        flags = [bool(b) for b in (mask.tolist() if isinstance(mask, Tensor) else mask)]
        edges = [j for j in range(len(flags) + 1) if (flags[j - 1] if j else False) != (j < len(flags) and flags[j])]
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
        result = v.clone() if out is None else (out if out is v else out.copy_(v))
        self._put(result, self.h.prox(self._take(v), step))
        return result

    def subgradient(self, x: Tensor) -> Tensor:
        """A subgradient of h where it acts, zero elsewhere."""
        result = torch.zeros_like(x)
        self._put(result, self.h.subgradient(self._take(x)))
        return result

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Root of the sum of the squared distances on the two sets of coordinates."""
        rest = gradient.clone()
        self._put(rest, torch.zeros_like(self._take(x)))
        inside = self.h.optimality(self._take(x), self._take(gradient))
        return torch.hypot(inside, rest.norm(dim=-1))

    def scaled(self, kappa: float) -> On:
        """Kappa h on the same coordinates."""
        return replace(self, h=self.h.scaled(kappa))

    def _take(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.dimension:
            raise ValueError(f"{self.h} was set on vectors of length {self.dimension}, got {x.shape[-1]}")
        parts = [x[..., a:b] for a, b in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1) if parts else x[..., :0]

    def _put(self, x: Tensor, values: Tensor) -> None:
        at = 0
        for a, b in self.runs:
            x[..., a:b] = values[..., at : at + b - a]
            at += b - a
