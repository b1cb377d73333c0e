"""The 2:4 pattern of accelerators: at most two nonzeros in every four consecutive entries.

The regularizer is that of Kübler et al., "A Proximal Operator for Inducing 2:4-Sparsity", Transactions on Machine
Learning Research, 2025. Its prox is solved here as follows.

Write s = lam * step and scale by it, so that the prox is min over w >= 0 of ||w - z||^2 / 2 + e3(w), where z are the
four absolute values in falling order (times s) and e1, e2, e3 the elementary symmetric functions. A minimiser is in the
same order, and has at most two, three or four nonzeros.

* Two: (z1, z2, 0, 0), which costs no e3.
* Three: given u = w3, the other two minimise a quadratic: w1 + w2 = (z1 + z2)/(1 + u), w1 - w2 = (z1 - z2)/(1 - u). So
  u is where u - z3 + w1 w2 goes from - to +. As a function of u this is convex up to the u* with
  ((1 - u*)/(1 + u*))^2 = (z1 - z2)/(z1 + z2) and concave after it: Newton's method from u* is monotone.
* Four: w_i = z_i - e2 + w_i e1 - w_i^2 for each i, so w_i = a +- t_i with a = (e1 - 1)/2, t_i = sqrt(z_i + b) and one
  number b for all. A minimum has plus signs, except perhaps for i = 4 (the Hessian is diag(+-2 t_i) plus one positive
  and one negative term of rank one), so let t_4 have a sign. The sums of w_i and w_i^2 give
  e1 = 2 - t_1 - t_2 - t_3 - t_4 and
  e1^2 = 4 t_4^2 + 2 sum_i z_i - 4 z_4 - 1: one equation for t_4, or for e1/2 where that last constant is negative. The
  difference of its sides is concave: Newton's method from the right is monotone to the largest root, the minimum.

The Hessian is linear in w, so the set where it is positive semidefinite is convex, and the objective is convex on it.
Hence there is at most one minimum of each kind, and the best of the three candidates is the global one. At a minimum
with three or four nonzeros the Hessian's minors bound its entries, which are single w_i or sums of two, by 1; then
z1 = w1 + e2(others) is at most 2, so a larger block keeps two entries, whatever its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcomposite._validation import ZeroOrMore
from fedcomposite.regularizers.base import Boxed, Step
from fedcomposite.regularizers.separable import between

_LARGE = 8.0  # above 2 a block has at most two nonzeros; see the module's text
_SMALL = 2.0**-40  # below it z may be too small for its dtype
_NEWTON = 60  # most iterations; a handful are taken unless a root is nearly double


def _others(w: Tensor, x: Tensor | None = None) -> Tensor:
    """e2 of the other three entries, for each of four; with x, one factor of each product is taken from it."""
    a, b, c, _ = w.unbind(-1)
    _, q, r, d = (w if x is None else x).unbind(-1)
    return torch.stack([b * (r + d) + c * d, a * (r + d) + c * d, d * (a + b) + a * q, r * (a + b) + a * q], dim=-1)


def _triples(w: Tensor) -> Tensor:
    """e3: the sum of the products of three of four entries."""
    a, b, c, d = w.unbind(-1)
    return a * b * (c + d) + c * d * (a + b)


def _newton(x: Tensor, low: Tensor, high: Tensor, function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """The root that Newton's method approaches from one side.

    An entry stops where the function changes sign, which is rounding, and where it no longer rises: no root is ahead.
    """
    tolerance = 2 * torch.finfo(x.dtype).eps
    f, slope = function(x)
    side, moving = f.sign(), torch.ones_like(x, dtype=torch.bool)
    for _ in range(_NEWTON):
        moving &= (slope > 0) & (f * side > 0)
        moved = torch.where(moving, (x - f / slope).clamp(low, high), x)
        moving &= (moved - x).abs() > tolerance  # an entry stops on its own, whatever its neighbours do
        x = moved
        if not bool(moving.any()):
            break
        f, slope = function(x)
    return x


def _refined(w: Tensor, z: Tensor) -> Tensor:
    """Small entries, found as differences of numbers near 1/2, to the precision of z, from w_i = z_i - e2(others).

    Where all are small this contracts: a second time makes up for entries that are lost in the rounding of 1/2.
    """
    once = (z - _others(w.clamp(min=0))).clamp(min=0)
    return torch.where(z[..., :1] < 0.1, (z - _others(once)).clamp(min=0), once)


def _three(z: Tensor) -> Tensor:
    """The candidate with three nonzeros."""
    z1, z2, z3, _ = z.unbind(-1)
    plus, minus = z1 + z2, z1 - z2
    tiny = torch.finfo(z.dtype).tiny

    def halves(u: Tensor) -> tuple[Tensor, Tensor]:
        return plus / (1 + u), minus / (1 - u).clamp(min=tiny)

    def condition(u: Tensor) -> tuple[Tensor, Tensor]:
        p, m = halves(u)
        return u - z3 + (p.square() - m.square()) / 4, 1 - (
            p.square() / (1 + u) + m * (m / (1 - u).clamp(min=tiny))
        ) / 2

    t = (minus / plus.clamp(min=tiny)).sqrt()
    largest = z2 / z1.clamp(min=tiny)  # beyond it the second entry would be negative
    u = _newton((1 - t) / (1 + t), torch.zeros_like(z3), largest, condition)
    p, m = halves(u)
    none = torch.zeros_like(u)
    return _refined(torch.stack([(p + m) / 2, (p - m) / 2, u, none], -1), torch.stack([z1, z2, z3, none], -1))


def _four(z: Tensor) -> Tensor:
    """The candidate with four nonzeros."""
    z4 = z[..., 3:]
    constant = (2 * z.sum(-1, keepdim=True) - 4 * z4 - 1) / 4
    swap = constant < 0  # the variable is e1/2, and t4 is its square root; otherwise the other way round
    offset = torch.cat([z[..., :3] - z4 - constant.clamp(max=0), constant.abs()], dim=-1)
    tiny = torch.finfo(z.dtype).tiny
    count = z.new_tensor([1.0, 1.0, 1.0, 1.0]).where(swap, z.new_tensor([1.0, 1.0, 1.0, 2.0]))
    own = torch.where(swap, 2.0, 1.0)

    def condition(x: Tensor) -> tuple[Tensor, Tensor]:
        root = (x.square() + offset).sqrt()
        f = own * x + (count * root).sum(-1, keepdim=True) - 2
        return f, own + (count * x / root.clamp(min=tiny)).sum(-1, keepdim=True)

    low = torch.where(swap, 0.0, -torch.inf).to(z)
    x = _newton(torch.full_like(z4, 0.5), low, torch.full_like(z4, 0.5), condition)
    root = (x.square() + offset).sqrt()
    last = root[..., 3:]
    half, t4 = torch.where(swap, x, last), torch.where(swap, last, x)
    return _refined(torch.cat([root[..., :3], t4], dim=-1) + half - 0.5, z)


def _small(size: Tensor, s: Tensor | float) -> Tensor:
    """The solution where s times the entries is far below 1: |v_i| - s e2(others), without scaling by s."""
    once = (size - _others(2 * (s * size), size / 2)).clamp(min=0)  # halves, so that sums of two do not overflow
    return (size - _others(2 * (s * once), once / 2)).clamp(min=0)


def _shrink(v: Tensor, s: Tensor | float) -> Tensor:
    """argmin_u s e3(|u|) + ||u - v||^2 / 2 for each block ``(m, 4)``; s is a number or ``(m, 1)``."""
    size, order = v.abs().sort(dim=-1, descending=True)
    z = s * size
    largest = z[..., :1]
    large = ~(largest <= _LARGE)
    z = torch.where(large, 0.0, z)
    two = z.clone()
    two[..., 2:] = 0
    candidates = torch.stack([_four(z), _three(z), two])
    cost = (candidates - z).square().sum(-1) / 2 + _triples(candidates)
    # A root with an entry at or below zero is no minimum of its kind. An entry just above zero saves less than the
    # costs are rounded by, so of candidates that cost the same the one with the entry is taken.
    cost[0].masked_fill_(candidates[0, :, 3] <= 0, torch.inf)
    cost[1].masked_fill_(candidates[1, :, 2] <= 0, torch.inf)
    slack = 8 * torch.finfo(v.dtype).eps * torch.arange(3, dtype=v.dtype, device=v.device)
    best = (cost * (1 + slack.unsqueeze(1))).nan_to_num(nan=torch.inf, posinf=torch.inf).argmin(0)
    kept = size.clone()
    kept[..., 2:] = 0
    chosen = candidates.gather(0, best[None, :, None].expand(1, *z.shape))[0]
    # Two kept entries are v's own; dividing by s again would round them.
    w = torch.where((best == 2).unsqueeze(-1) | large, kept, chosen / s)
    w = torch.where(largest < _SMALL, _small(size, s), w)
    w = torch.where(size[..., :1] < torch.inf, w, torch.nan)
    return torch.empty_like(v).scatter(-1, order, w).copysign(v)


@dataclass(frozen=True)
class Sparsity2to4(Boxed):
    """h(x) = lam sum over blocks of four (|abc| + |abd| + |acd| + |bcd|): zero exactly on 2:4 sparse vectors.

    The prox is a global minimiser for every step, found block by block; see the module's text. Between its kinks h is a
    cubic, with curvature as low as -lam times the size of x: it is not weakly convex on the whole space, rho is
    infinite, and the prox jumps where a block goes from two nonzeros to more. On the box max_j |x_j| <= r the modulus
    is (sqrt(13) - 1) lam r, attained at blocks (r, r, r, 0).

    The blocks are consecutive: with a layer's weight seen as ``(out, in)`` they run along the inputs.
    """

    lam: ZeroOrMore

    @property
    def rho(self) -> float:
        return math.inf

    def value(self, x: Tensor) -> Tensor:
        """The sum of the products of triples, times lam."""
        w = self._blocks(x).abs()
        plain = self.lam * _triples(w).sum(-1)
        # Where a product of two overflows, and a third is small: lam first, and small entries before large ones.
        d, c, b, a = (math.cbrt(self.lam) * w).sort(dim=-1).values.unbind(-1)
        return torch.where(plain.isfinite(), plain, ((c + d) * b * a + d * c * (a + b)).sum(-1))

    @property
    def grain(self) -> int:
        return 4

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The best of three candidates for each block."""
        blocks = self._blocks(v)
        s = self.lam * step
        if isinstance(s, Tensor):
            s = (s if s.dim() else s.reshape(1)).unsqueeze(-1).expand(*blocks.shape[:-1], 1).reshape(-1, 1)
        most = v.abs()
        return _shrink(blocks.reshape(-1, 4), s).reshape(v.shape).clamp(-most, most)  # rounding of the smallest numbers

    def interval(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What e2 of the block's other entries times lam is, times sign(x_j), or times [-1, 1] at zero."""
        return between(x, self.lam * _others(self._blocks(x).abs()).flatten(-2))

    def coupling(self, dimension: int) -> Tensor:
        return torch.arange(dimension) // 4 * 4

    def for_shape(self, shape: tuple[int, ...]) -> Sparsity2to4:
        """Itself, if no block would cross from one row of the parameter to the next."""
        row = torch.Size(shape[1:]).numel() if len(shape) > 1 else shape[0]
        if row % 4:
            raise ValueError(f"Sparsity2to4: rows of a parameter of shape {tuple(shape)} are not a multiple of 4 long")
        return self

    @staticmethod
    def _blocks(x: Tensor) -> Tensor:
        if x.shape[-1] % 4:
            raise ValueError(f"Sparsity2to4: a vector of length {x.shape[-1]} is not a whole number of blocks of 4")
        return x.reshape(*x.shape[:-1], x.shape[-1] // 4, 4)
