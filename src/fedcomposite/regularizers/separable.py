"""Coordinate-wise regularizers: zero, l1, elastic net, MCP, SCAD."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import annotated_types as at
import torch
from torch import Tensor

from fedcomposite._validation import NonNegative, Positive
from fedcomposite.regularizers.base import Separable, Step


def soft(v: Tensor, threshold: Step) -> Tensor:
    """Soft-thresholding sign(v) (|v| - threshold)_+, written as the residual of a clamp."""
    if isinstance(threshold, Tensor):
        return v - torch.minimum(torch.maximum(v, -threshold), threshold)
    return v - v.clamp(-threshold, threshold)


def _between(x: Tensor, slope: Tensor, at_zero: float) -> tuple[Tensor, Tensor]:
    """Subdifferential of an even function with slope ``slope(|x|)`` away from a kink of ``at_zero`` at zero."""
    signed = slope.copysign(x)
    zero = x == 0
    return signed.masked_fill(zero, -at_zero), signed.masked_fill(zero, at_zero)


@dataclass(frozen=True)
class Zero(Separable):
    """h(x) = 0: the smooth case."""

    def value(self, x: Tensor) -> Tensor:
        """0."""
        return x.new_zeros(x.shape[:-1])

    def _prox(self, v: Tensor, step: Step) -> Tensor:
        return v

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """{0}."""
        return torch.zeros_like(x), torch.zeros_like(x)

    def scaled(self, kappa: float) -> Zero:
        """0, whatever kappa."""
        return self


@dataclass(frozen=True)
class L1(Separable):
    """h(x) = lam sum_j |x_j|; the prox is soft-thresholding at lam * step (Tibshirani 1996)."""

    lam: NonNegative

    def value(self, x: Tensor) -> Tensor:
        """Lam times the sum of absolute values."""
        return self.lam * x.abs().sum(-1)

    def _prox(self, v: Tensor, step: Step) -> Tensor:
        return soft(v, self.lam * step)

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[-lam, lam] at zero, lam sign(x) elsewhere."""
        return _between(x, torch.full_like(x, self.lam), self.lam)

    def scaled(self, kappa: float) -> L1:
        """Kappa times h, by scaling lam."""
        return replace(self, lam=kappa * self.lam)


@dataclass(frozen=True)
class ElasticNet(Separable):
    """h(x) = sum_j l1 |x_j| + (l2/2) x_j^2 (Zou & Hastie 2005); l2 multiplies *half* the squared norm."""

    l1: NonNegative
    l2: NonNegative

    def value(self, x: Tensor) -> Tensor:
        """L1 ||x||_1 + (l2/2) ||x||^2."""
        return self.l1 * x.abs().sum(-1) + self.l2 / 2 * x.square().sum(-1)

    def _prox(self, v: Tensor, step: Step) -> Tensor:
        return soft(v, self.l1 * step) / (1 + self.l2 * step)

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[-l1, l1] at zero, l1 sign(x) + l2 x elsewhere."""
        return _between(x, self.l1 + self.l2 * x.abs(), self.l1)

    def scaled(self, kappa: float) -> ElasticNet:
        """Kappa times h, by scaling both coefficients."""
        return replace(self, l1=kappa * self.l1, l2=kappa * self.l2)


@dataclass(frozen=True)
class MCP(Separable):
    """Minimax concave penalty (C.-H. Zhang 2010): h = kappa sum_j phi(x_j) with

        phi(u) = lam |u| - u^2 / (2 theta)   for |u| <= theta lam,     theta lam^2 / 2 beyond.

    Weakly convex with rho = kappa / theta. With s = kappa * step < theta the prox is firm thresholding:
    0 up to s lam, then (|v| - s lam) / (1 - s/theta) up to theta lam, then v.
    """

    lam: NonNegative
    theta: Positive
    kappa: Positive = 1.0

    @property
    def rho(self) -> float:
        """Kappa / theta."""
        return self.kappa / self.theta

    def value(self, x: Tensor) -> Tensor:
        """Kappa sum_j phi(x_j)."""
        u = x.abs().clamp(max=self.theta * self.lam)
        return self.kappa * (self.lam * u - u.square() / (2 * self.theta)).sum(-1)

    def _prox(self, v: Tensor, step: Step) -> Tensor:
        s = self.kappa * step
        # The shrunk line crosses the identity exactly at theta lam, so the smaller of the two is the prox.
        size = v.abs()
        return torch.minimum(size, (size - s * self.lam).clamp_(min=0).div_(1 - s / self.theta)).copysign_(v)

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Kappa [-lam, lam] at zero, kappa (lam - |x|/theta)_+ sign(x) elsewhere."""
        slope = self.kappa * (self.lam - x.abs() / self.theta).clamp(min=0)
        return _between(x, slope, self.kappa * self.lam)

    def scaled(self, kappa: float) -> MCP:
        """Kappa times h."""
        return replace(self, kappa=kappa * self.kappa)


@dataclass(frozen=True)
class SCAD(Separable):
    """Smoothly clipped absolute deviation (Fan & Li 2001): h = kappa sum_j phi(x_j) with

        phi(u) = lam |u|                                       for |u| <= lam,
                 (2 a lam |u| - u^2 - lam^2) / (2 (a - 1))     for lam < |u| <= a lam,
                 lam^2 (a + 1) / 2                             beyond.

    Weakly convex with rho = kappa / (a - 1). With s = kappa * step < a - 1 the prox is soft-thresholding at s lam up to
    lam (1 + s), then ((a - 1) |v| - s a lam) / (a - 1 - s) up to a lam, then v. Writing it for s = 1 and scaling lam,
    as often seen, is wrong for every other s.
    """

    lam: NonNegative
    a: Annotated[float, at.Gt(2)] = 3.7
    kappa: Positive = 1.0

    @property
    def rho(self) -> float:
        """Kappa / (a - 1)."""
        return self.kappa / (self.a - 1)

    def value(self, x: Tensor) -> Tensor:
        """Kappa sum_j phi(x_j)."""
        u = x.abs().clamp(max=self.a * self.lam)
        bend = (u - self.lam).clamp(min=0)  # phi is lam |u| minus a parabola that starts at lam
        return self.kappa * (self.lam * u - bend.square() / (2 * (self.a - 1))).sum(-1)

    def _prox(self, v: Tensor, step: Step) -> Tensor:
        s, b = self.kappa * step, self.a - 1
        # Lines of slopes 1, b/(b-s) > 1 and 1 meet at lam (1 + s) and a lam: max(first, min(second, third)).
        size = v.abs()
        middle = (size * b - s * self.a * self.lam).div_(b - s)
        low = (size - s * self.lam).clamp_(min=0)
        return torch.maximum(low, torch.minimum(middle, size, out=middle), out=low).copysign_(v)

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Kappa [-lam, lam] at zero; the slope falls linearly from lam at |x| = lam to 0 at a lam."""
        slope = ((self.a * self.lam - x.abs()) / (self.a - 1)).clamp(0, self.lam)
        return _between(x, self.kappa * slope, self.kappa * self.lam)

    def scaled(self, kappa: float) -> SCAD:
        """Kappa times h."""
        return replace(self, kappa=kappa * self.kappa)
