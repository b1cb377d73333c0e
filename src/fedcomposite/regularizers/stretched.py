"""A separable regularizer in other units of its coordinates."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcomposite.regularizers.algebra import Blocks, On
from fedcomposite.regularizers.base import Boxed, Regularizer, Step


@dataclass(frozen=True)
class Stretched(Boxed):
    """h(D u) as a function of u, for a separable h and a diagonal D: h after the change of variables x = D u.

    Its prox is that of h in the metric of D: prox_h(D v, step D^2) / D, a step per coordinate.
    """

    h: Regularizer
    factors: Tensor = field(compare=False)  # the diagonal of D; powers of two do not round

    def __post_init__(self) -> None:
        d = len(self.factors)
        if torch.unique(self.h.coupling(d)).numel() != d:
            raise ValueError(f"{self.h} couples coordinates, and only a separable h has a prox in another metric")

    @property
    def rho(self) -> float:
        """That of h times the largest square in D."""
        return self.h.rho * float(self.factors.max()) ** 2 if self.h.rho else 0.0

    def value(self, x: Tensor) -> Tensor:
        """The value of h at D u."""
        return self.h.value(self._factors(x) * x)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The prox of h with a step per coordinate."""
        D = self._factors(v)
        return self.h.prox(D * v, step * D.square()) / D

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """D times that of h."""
        D = self._factors(x)
        low, high = _ends(self.h, D * x)
        return D * low, D * high

    def scaled(self, kappa: float) -> Stretched:
        """The multiple of h in the same units."""
        return replace(self, h=self.h.scaled(kappa))

    def coupling(self, dimension: int) -> Tensor:
        return torch.arange(dimension)

    def acts_on(self, dimension: int) -> Tensor:
        return self.h.acts_on(dimension)

    def _factors(self, like: Tensor) -> Tensor:
        return self.factors.to(like)


def _ends(h: Regularizer, x: Tensor) -> tuple[Tensor, Tensor]:
    """The ends of the subdifferential at each entry; zero where h does not act."""
    if isinstance(h, Boxed):
        return h.interval(x)
    ends = torch.zeros_like(x), torch.zeros_like(x)
    for part in (h,) if isinstance(h, On) else h._placed() if isinstance(h, Blocks) else ():
        for whole, own in zip(ends, _ends(part.h, part._take(x)), strict=True):
            part._put(whole, own)
    return ends
