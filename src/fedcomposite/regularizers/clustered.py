"""The clustered lasso: entries of a group that become equal to one another, and to zero (She 2010)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcomposite._validation import Count, ZeroOrMore
from fedcomposite.regularizers.base import Step
from fedcomposite.regularizers.group import Grouped, Groups, Weights
from fedcomposite.regularizers.separable import soft


@dataclass(frozen=True)
class ClusteredLasso(Grouped):
    """h(x) = sum_g w_g [lam sum_{i<k in g} |x_i - x_k| + l1 sum_{i in g} |x_i|]: few values in every group.

    Sorted, the first sum is linear, so that its prox is a monotone regression: entries that would change places become
    their mean. The prox of the whole soft-thresholds that at l1 * step.

    Parameters
    ----------
    lam : float
        Strength of the differences.
    groups : int, tuple of int, "rows" or "columns"
        As in :class:`GroupLasso`.
    l1 : float
        Strength of the sizes.
    weights : {"equal", "sqrt"} or tuple of float
        w_g: 1 (the default), the square root of the group's size, or a number per group.
    shape : tuple of int, optional
        As in :class:`GroupLasso`.

    Examples
    --------
    >>> ClusteredLasso(0.5, groups=4).prox(torch.tensor([0.0, 5.0, 0.4, 5.2]), 1.0)
    tensor([1.2000, 4.1000, 1.2000, 4.1000])
    """

    coefficients: ClassVar[tuple[str, ...]] = ("lam", "l1")
    lam: ZeroOrMore
    groups: Groups
    l1: ZeroOrMore = 0.0
    weights: Weights = "equal"
    shape: tuple[Count, ...] | None = None

    def _value(self, x: Tensor, weight: Step) -> Tensor:
        apart = (weight * (x.unsqueeze(-1) - x.unsqueeze(-2)).abs().sum(-1)).sum((-2, -1)) / 2
        return self.lam * apart + self.l1 * (weight * x.abs()).sum((-2, -1))

    def _formula(self, v: Tensor, weight: Step, step: Step, plain: bool) -> Tensor:
        return soft(_monotone(v, torch.zeros_like(v), self.lam * weight * step), self.l1 * weight * step)

    def _carried_out(self, v: Tensor, step: Step, out: Tensor | None) -> Tensor:
        return super(Grouped, self)._carried_out(v, step, out)  # no squares that could vanish

    def _subgradient(self, x: Tensor, weight: Step) -> Tensor:
        return weight * (self.lam * (x.unsqueeze(-1) - x.unsqueeze(-2)).sign().sum(-1) + self.l1 * x.sign())

    def _residual(self, x: Tensor, gradient: Tensor, weight: Step) -> Tensor:
        """Signs between clusters are given; what cannot be met within one is the prox, there, of what is left."""
        rest = _monotone(-gradient - self._subgradient(x, weight), x, self.lam * weight)
        return torch.where(x == 0, soft(rest, self.l1 * weight), rest)


def _monotone(v: Tensor, of: Tensor, by: Step) -> Tensor:
    """The prox of by * sum |u_i - u_k| over pairs of a group that have the same value in ``of``, ``(..., m, s)``.

    In falling order each is moved by ``by`` towards every other one of its cluster, and gets the mean of a stretch: the
    largest over ends of the least over beginnings, which is the monotone regression.
    """
    order = v.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, of.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    w, kind = v.gather(-1, order), of.gather(-1, order)
    same = kind.unsqueeze(-1) == kind.unsqueeze(-2)
    later = same.triu(1).sum(-1)
    earlier = same.tril(-1).sum(-1)
    w = w - by * (later - earlier).to(v)
    s = v.shape[-1]
    upper = torch.ones(s, s, dtype=torch.bool, device=v.device).triu()
    count = torch.arange(s, device=v.device).unsqueeze(0) - torch.arange(s, device=v.device).unsqueeze(1) + 1
    sums = torch.where(upper, w.unsqueeze(-2), 0.0).cumsum(-1)  # [a, b]: from a to b
    means = torch.where(upper & same, sums / count.clamp(min=1), -torch.inf)
    ends = means.flip(-1).cummax(-1).values.flip(-1)  # [a, r]: over ends from r on
    level = torch.where(upper & same, ends, torch.inf).amin(-2)
    return torch.empty_like(v).scatter(-1, order, level)
