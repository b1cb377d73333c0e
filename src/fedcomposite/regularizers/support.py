"""The constraint that some coordinates are zero: what trains the surviving weights of a sparse model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedcomposite.regularizers.base import Boxed, Step
from fedcomposite.regularizers.indicators import Indicator


@dataclass(frozen=True, eq=False)
class Support(Indicator, Boxed):
    """h(x) = 0 if x is zero wherever ``kept`` is false, infinity if not; the prox sets those entries to zero.

    ``kept`` is a mask, one entry per coordinate. Made by :meth:`fedcomposite.Problem.on_support`.
    """

    kept: Tensor

    def __post_init__(self) -> None:
        if self.kept.dtype != torch.bool or self.kept.ndim != 1:
            raise ValueError(f"Support: kept is {self.kept.dtype} {tuple(self.kept.shape)}, must be a mask (d,)")

    def __repr__(self) -> str:
        return f"Support({int(self.kept.sum())} of {len(self.kept)} coordinates)"

    def contains(self, x: Tensor) -> Tensor:
        """Whether all other entries are zero."""
        return ((x == 0) | self._mask(x)).all(dim=-1)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The kept entries; not a number for the others where v is infinite."""
        return torch.where(self._mask(v), v, torch.sub(torch.zeros_like(v), v, alpha=0))

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """{0} where x is free, everything where it must be zero and is."""
        wide = torch.zeros_like(x).masked_fill(~self._mask(x), torch.inf)
        outside = ~self._mask(x) & (x != 0)
        return torch.where(outside, wide, -wide), torch.where(outside, -wide, wide)

    def coupling(self, dimension: int) -> Tensor:
        return torch.arange(dimension)

    def _mask(self, like: Tensor) -> Tensor:
        """``kept`` on the device of a vector, kept there for the next call."""
        if like.shape[-1] != len(self.kept):
            raise ValueError(f"{self} is for vectors of length {len(self.kept)}, got {like.shape[-1]}")
        if like.device not in self._masks:
            self._masks[like.device] = self.kept.to(like.device)
        return self._masks[like.device]

    @cached_property
    def _masks(self) -> dict[torch.device, Tensor]:
        return {}
