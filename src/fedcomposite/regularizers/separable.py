"""Coordinate-wise regularizers: zero, l1, squared l2, elastic net, positive part, MCP, SCAD, l0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

import annotated_types as at
import torch
from torch import Tensor

from fedcomposite._validation import Positive, ZeroOrMore
from fedcomposite.regularizers.base import Separable, Step


def within(v: Tensor, bound: Step) -> Step:
    """A bound that v's dtype can hold: beyond its largest number all bounds are alike."""
    return bound if isinstance(bound, Tensor) else min(bound, torch.finfo(v.dtype).max)


def clip(v: Tensor, bound: Step) -> Tensor:
    """The entries of v brought into [-bound, bound]."""
    bound = within(v, bound)
    return torch.clamp(v, -bound, bound)  # type: ignore[arg-type]  # numbers or tensors


def soft(v: Tensor, threshold: Step) -> Tensor:
    """Soft-thresholding sign(v) (|v| - threshold)_+; of one threshold in one operation."""
    if isinstance(threshold, Tensor):
        return v - clip(v, threshold)
    return torch.nn.functional.softshrink(v, float(within(v, threshold)))


def firm(v: Tensor, peak: Step, start: Step, width: Step, slope: Step) -> Tensor:
    """Soft-thresholding that is taken back beyond ``start``: soft(v, peak) + slope * clip(soft(v, start), width).

    With slope * width = peak this is the prox of MCP (start = peak) and of SCAD: zero, a shifted line, a steeper one,
    and v itself.
    """
    shrunk = soft(v, peak)
    excess = clip(shrunk if start is peak else soft(v, start), width)
    if isinstance(slope, Tensor):
        return torch.addcmul(shrunk, excess, slope)
    return torch.add(shrunk, excess, alpha=slope)


def half_squares(x: Tensor, factor: float) -> Tensor:
    """(factor/2) ||x||^2, also where the squares alone would overflow."""
    plain = factor / 2 * x.square().sum(-1)
    return torch.where(plain < math.inf, plain, (math.sqrt(factor / 2) * x).square().sum(-1))


def between(x: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Subdifferential of an even function with slope ``slope(|x|) >= 0``, which makes a kink at zero."""
    signed = slope.copysign(x)
    zero = x == 0
    return torch.where(zero, -slope, signed), torch.where(zero, slope, signed)


@dataclass(frozen=True)
class Zero(Separable):
    """h(x) = 0: the smooth case."""

    coefficients: ClassVar[tuple[str, ...]] = ()

    def value(self, x: Tensor) -> Tensor:
        """0."""
        return x.new_zeros(x.shape[:-1])

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """A copy of v."""
        return v.clone()

    def _carried_out(self, v: Tensor, step: Step, out: Tensor | None) -> Tensor:
        return v.clone() if out is None else v if out is v else out.copy_(v)

    def prox_slope(self, v: Tensor, step: Step) -> Tensor:
        return torch.ones_like(v)

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """{0}."""
        return torch.zeros_like(x), torch.zeros_like(x)

    def acts_on(self, dimension: int) -> Tensor:
        """False everywhere: zero depends on no coordinate."""
        return torch.zeros(dimension, dtype=torch.bool)


@dataclass(frozen=True)
class L1(Separable):
    """h(x) = lam sum_j w_j |x_j|; the prox is soft-thresholding at lam * step * w_j (Tibshirani 1996).

    ``weights`` are the w_j, one per coordinate (the adaptive lasso, Zou 2006); all 1 if left out.

    Examples
    --------
    >>> L1(1.0).prox(torch.tensor([3.0, -0.5, -2.0]), 0.5)
    tensor([ 2.5000, -0.0000, -1.5000])
    """

    lam: ZeroOrMore
    weights: tuple[ZeroOrMore, ...] | None = None

    def value(self, x: Tensor) -> Tensor:
        """The weighted sum of absolute values, times lam."""
        size = x.abs() if self.weights is None else x.abs() * self._weights(x)
        return self.lam * size.sum(-1)

    @property
    def grain(self) -> int:
        """Each coordinate by itself; with weights they are not alike."""
        return 1 if self.weights is None else 0

    def among(self, coordinates: Tensor, dimension: int) -> L1:
        if self.weights is None:
            return self
        return L1(self.lam, tuple(self.weights[i] for i in coordinates.tolist()))

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """Soft-thresholding; a weight acts like a step of its own."""
        return soft(v, self.lam * (step if self.weights is None else step * self._weights(v)))

    def _carried_out(self, v: Tensor, step: Step, out: Tensor | None) -> Tensor:
        if self.weights is None:
            return super()._carried_out(v, step, out)
        return L1(self.lam)._carried_out(v, step * self._weights(v), out)

    def prox_slope(self, v: Tensor, step: Step) -> Tensor:
        return (v.abs() > self.lam * (step if self.weights is None else step * self._weights(v))).to(v.dtype)

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """At zero lam w_j [-1, 1], elsewhere lam w_j sign(x_j)."""
        slope = torch.full_like(x, self.lam)
        return between(x, slope if self.weights is None else slope * self._weights(x))

    @cached_property
    def _placed(self) -> dict[tuple[torch.dtype, torch.device], Tensor]:
        return {}

    def _weights(self, like: Tensor) -> Tensor:
        """The weights as a tensor, kept for the next call."""
        assert self.weights is not None
        if like.shape[-1] != len(self.weights):
            raise ValueError(f"L1 has {len(self.weights)} weights, the vector has {like.shape[-1]} coordinates")
        place = like.dtype, like.device
        if place not in self._placed:
            self._placed[place] = torch.tensor(self.weights, dtype=like.dtype, device=like.device)
        return self._placed[place]


@dataclass(frozen=True)
class L2Squared(Separable):
    """h(x) = (lam/2) ||x||^2 (ridge); the prox divides by 1 + lam * step."""

    lam: ZeroOrMore

    def value(self, x: Tensor) -> Tensor:
        """Half the sum of squares, times lam."""
        return half_squares(x, self.lam)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """Division by 1 + lam * step."""
        return v / (1 + self.lam * step)

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """{lam x}."""
        return self.lam * x, self.lam * x


@dataclass(frozen=True)
class PositivePart(Separable):
    """h(x) = lam sum_j max(x_j, 0), the ReLU as a regularizer: it pushes positive entries to zero, no further.

    The prox subtracts lam * step from entries above it, sets those in [0, lam * step] to zero and keeps the rest.
    """

    lam: ZeroOrMore

    def value(self, x: Tensor) -> Tensor:
        """The sum of the positive entries, times lam."""
        return self.lam * x.clamp(min=0).sum(-1)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """Entries minus what of them lies in [0, lam * step]."""
        threshold = within(v, self.lam * step)
        if isinstance(threshold, Tensor):
            return v - torch.minimum(v.clamp(min=0), threshold)
        return v - v.clamp(0, threshold)

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[0, lam] at zero, {lam} above, {0} below."""
        return self.lam * (x > 0).to(x), self.lam * (x >= 0).to(x)


@dataclass(frozen=True)
class ElasticNet(Separable):
    """h(x) = sum_j l1 |x_j| + (l2/2) x_j^2 (Zou & Hastie 2005); l2 multiplies *half* the squared norm."""

    coefficients: ClassVar[tuple[str, ...]] = ("l1", "l2")
    l1: ZeroOrMore
    l2: ZeroOrMore

    def value(self, x: Tensor) -> Tensor:
        """The two terms, summed over the entries."""
        return self.l1 * x.abs().sum(-1) + half_squares(x, self.l2)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """Soft-thresholding at l1 * step, then division by 1 + l2 * step."""
        return soft(v, self.l1 * step) / (1 + self.l2 * step)

    def prox_slope(self, v: Tensor, step: Step) -> Tensor:
        return (v.abs() > self.l1 * step) / (1 + self.l2 * step)

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[-l1, l1] at zero, l1 sign(x) + l2 x elsewhere."""
        return between(x, self.l1 + self.l2 * x.abs())


@dataclass(frozen=True)
class MCP(Separable):
    """Minimax concave penalty h = kappa sum_j phi(x_j): l1 near zero, flat beyond theta lam (C.-H. Zhang 2010).

        phi(u) = lam |u| - u^2 / (2 theta)   for |u| <= theta lam,     theta lam^2 / 2 beyond.

    Weakly convex with rho = kappa / theta. With s = kappa * step < theta the prox is firm thresholding:
    0 up to s lam, then (|v| - s lam) / (1 - s/theta) up to theta lam, then v.
    """

    coefficients: ClassVar[tuple[str, ...]] = ("kappa",)
    lam: ZeroOrMore
    theta: Positive
    kappa: Positive = 1.0

    @property
    def rho(self) -> float:
        """Equal to kappa / theta."""
        return self.kappa / self.theta

    def value(self, x: Tensor) -> Tensor:
        """The sum of phi over the entries, times kappa."""
        u = x.abs().clamp(max=self.theta * self.lam)
        return self.kappa * (self.lam * u - u.square() / (2 * self.theta)).sum(-1)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """Firm thresholding."""
        s = self.kappa * step
        peak = s * self.lam
        return firm(v, peak, peak, (self.theta - s) * self.lam, s / (self.theta - s))

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """At zero kappa [-lam, lam], elsewhere kappa (lam - |x|/theta)_+ sign(x)."""
        slope = self.kappa * (self.lam - x.abs() / self.theta).clamp(min=0)
        return between(x, slope)


@dataclass(frozen=True)
class SCAD(Separable):
    """Smoothly clipped absolute deviation h = kappa sum_j phi(x_j): l1 up to lam, flat beyond a lam (Fan & Li 2001).

        phi(u) = lam |u|                                       for |u| <= lam,
                 (2 a lam |u| - u^2 - lam^2) / (2 (a - 1))     for lam < |u| <= a lam,
                 lam^2 (a + 1) / 2                             beyond.

    Weakly convex with rho = kappa / (a - 1). With s = kappa * step < a - 1 the prox is soft-thresholding at s lam up to
    lam (1 + s), then ((a - 1) |v| - s a lam) / (a - 1 - s) up to a lam, then v. Writing it for s = 1 and scaling lam,
    as often seen, is wrong for every other s.
    """

    coefficients: ClassVar[tuple[str, ...]] = ("kappa",)
    lam: ZeroOrMore
    a: Annotated[float, at.Gt(2)] = 3.7
    kappa: Positive = 1.0

    @property
    def rho(self) -> float:
        """Equal to kappa / (a - 1)."""
        return self.kappa / (self.a - 1)

    def value(self, x: Tensor) -> Tensor:
        """The sum of phi over the entries, times kappa."""
        u = x.abs().clamp(max=self.a * self.lam)
        bend = (u - self.lam).clamp(min=0)  # phi is lam |u| minus a parabola that starts at lam
        return self.kappa * (self.lam * u - bend.square() / (2 * (self.a - 1))).sum(-1)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The three lines of the class's text."""
        s, left = self.kappa * step, self.a - 1 - self.kappa * step
        return firm(v, s * self.lam, (1 + s) * self.lam, left * self.lam, s / left)

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """At zero kappa [-lam, lam]; the slope falls linearly from lam at |x| = lam to 0 at a lam, times kappa."""
        slope = ((self.a * self.lam - x.abs()) / (self.a - 1)).clamp(0, self.lam)
        return between(x, self.kappa * slope)


@dataclass(frozen=True)
class L0(Separable):
    """h(x) = lam times the number of nonzero entries; the prox is hard-thresholding at sqrt(2 lam step).

    Not weakly convex (it jumps at zero), so rho is infinite. The prox is a global minimiser for every step; where v is
    exactly on the threshold there are two, and it is the zero one.
    """

    lam: ZeroOrMore

    @property
    def rho(self) -> float:
        """Infinite."""
        return math.inf

    def value(self, x: Tensor) -> Tensor:
        """The number of nonzeros, times lam."""
        return self.lam * (x != 0).sum(-1).to(x.dtype)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """Hard-thresholding; what is not a number stays."""
        if isinstance(step, Tensor):
            return torch.where(v.abs() <= (2 * self.lam * step).sqrt().clamp(max=torch.finfo(v.dtype).max), 0.0, v)
        return torch.hardshrink(v, float(within(v, math.sqrt(2 * self.lam * step))))

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The whole line at zero, {0} elsewhere."""
        free = torch.zeros_like(x).masked_fill(x == 0, torch.inf if self.lam > 0 else 0.0)
        return -free, free

    def subgradient(self, x: Tensor) -> Tensor:
        """Refused: it is zero wherever x is not, so a subgradient step never sees this regularizer."""
        raise TypeError(
            "L0 has no useful subgradient: it is flat wherever it is smooth; use a method with a prox, "
            "for example FedNMap, Zhang, FedCanon or ProximalGradient"
        )
