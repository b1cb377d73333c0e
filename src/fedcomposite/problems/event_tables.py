"""Times to an event as counts on a grid of times, and sums over those at risk there: what curves and tests are made of.

A time counts at the next time of the grid, an entry at the one before: who enters between two times of the grid is at
risk at the second. On a grid with all times of the samples nothing changes; what leaves a site is never finer than the
grid. Weights count as given.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedcomposite.problems.concordance import pairs
from fedcomposite.problems.risk_sets import CAUSE, ENTRY, EVENT, STRATUM, TIME, RiskSets


class OnGrid(NamedTuple):
    """Places of samples on a grid with g times: ``start`` is the first at which one is at risk, ``stop`` the last."""

    start: Tensor
    stop: Tensor  # g where it is behind the grid
    size: int

    @classmethod
    def of(cls, b: Tensor, times: Tensor) -> OnGrid:
        """From prepared targets."""
        stop = torch.bucketize(b[:, TIME].contiguous(), times)
        start = torch.bucketize(b[:, ENTRY].contiguous(), times, right=True)
        return cls(torch.minimum(start, stop), stop, len(times))

    def at_risk(self, values: Tensor) -> Tensor:
        """Sums over those at risk at each time, ``(m, ...) -> (g, ...)``."""
        made = values.new_zeros(self.size + 2, *values.shape[1:])
        made.index_add_(0, self.start, values)
        made.index_add_(0, self.stop + 1, -values)
        return made.cumsum(0)[: self.size]

    def at_stop(self, values: Tensor) -> Tensor:
        """Sums over those whose time it is."""
        return values.new_zeros(self.size + 1, *values.shape[1:]).index_add_(0, self.stop, values)[: self.size]


def counted(b: Tensor, w: Tensor, times: Tensor, group: Tensor, groups: int, causes: int) -> Tensor:
    """Of every group and time: at risk, censored, and events of each cause, ``(groups, 2 + causes, g)``."""
    grid, cause = OnGrid.of(b, times), b[:, CAUSE]
    each = torch.stack([w, *(w * (cause == k) for k in range(causes + 1))], 1)
    made = []
    for k in range(groups):
        mine = each * (group == k).unsqueeze(1)
        made.append(torch.cat([grid.at_risk(mine[:, :1]), grid.at_stop(mine[:, 1:])], 1).T)
    return torch.stack(made)


def compared(b: Tensor, w: Tensor, group: Tensor, groups: int, least: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Events of each group, those expected if all had the same hazard, and the covariance of the difference.

    Samples are compared within their strata, at their own times: the sums of a log-rank test. Events with fewer than
    ``least`` samples at risk do not count.
    """
    observed, expected = (torch.zeros(groups, dtype=torch.float64) for _ in range(2))
    covariance = torch.zeros(groups, groups, dtype=torch.float64)
    member = torch.nn.functional.one_hot(group, groups).double() * w.unsqueeze(1)
    for stratum in torch.unique(b[:, STRATUM]):
        mine = b[:, STRATUM] == stratum
        own, at = b[mine], member[mine]
        grid = OnGrid.of(own, torch.unique(own[:, TIME]))
        n = grid.at_risk(at)
        d = grid.at_stop(at * own[:, EVENT : EVENT + 1]) * _enough(grid, at.sum(1), least).unsqueeze(1)
        total, events = n.sum(1), d.sum(1)
        share = n / total.clamp(min=1e-300).unsqueeze(1)
        observed += d.sum(0)
        expected += events @ share
        spread = torch.where(total > 1, events * (total - events) / (total - 1).clamp(min=1e-300), 0.0)
        covariance += torch.diag(spread @ share) - share.T @ (share * spread.unsqueeze(1))
    return observed, expected, covariance


def _enough(grid: OnGrid, w: Tensor, least: int) -> Tensor:
    """1 at the times of a grid at which so many samples are at risk."""
    return (grid.at_risk((w > 0).double()) > least - 0.5).double()


def concordance(b: Tensor, z: Tensor, w: Tensor, least: int = 1) -> Tensor:
    """Pairs in order, pairs of equal margins, and all pairs within strata, ``(3,)``.

    Pairs of an event with fewer than ``least`` samples at risk do not count.
    """
    time, event, entry, stratum = (b[:, k].numpy() for k in (TIME, EVENT, ENTRY, STRATUM))
    group = torch.unique(b[:, STRATUM], return_inverse=True)[1].numpy() if len(stratum) else None
    found = pairs(z.numpy(), time, event, entry, group, w.numpy())
    counted = torch.ones_like(w)
    for own in [b[:, STRATUM] == stratum for stratum in torch.unique(b[:, STRATUM])] if least > 1 else []:
        grid = OnGrid.of(b[own], torch.unique(b[own, TIME]))
        counted[own] = _enough(grid, w[own], least)[grid.stop]
    return torch.stack([torch.from_numpy(v) @ counted for v in found])


def step_values(times: Tensor, values: Tensor, at: Tensor, before: float) -> Tensor:
    """A step function that has ``values`` from ``times`` on, and ``before`` until the first."""
    place = torch.bucketize(at.contiguous(), times, right=True)
    return torch.cat([values.new_full((1,), before), values])[place]


def kaplan_meier(at_risk: Tensor, events: Tensor) -> Tensor:
    """The probability to be without an event after each time, ``(..., g)``."""
    share = torch.where(at_risk > 0, events / at_risk.clamp(min=1e-300), 0.0)
    return torch.cumprod(1 - share, -1)


def steps(events: Tensor, sizes: Tensor) -> Tensor:
    """By how much Breslow's cumulated baseline hazard rises at each time."""
    return torch.where(events > 0, events / sizes.clamp(min=1e-300), 0.0)


def schoenfeld(sets: RiskSets, X: Tensor, z: Tensor, w: Tensor, g: Tensor) -> dict[str, Tensor]:
    """The sums of a test of proportional hazards, for a function g of time, known at each sample's ``(m,)``.

    Over events: their number, sums of g and of its square; of residuals, and of these times g; of covariances at risk
    times g and its square.
    """
    everything = torch.arange(X.shape[1])
    place, residual = sets.schoenfeld(X[None], z[None], w[None])
    value, weight = g[place], w[place]
    covariances = [sets.hessians(X[None], z[None], w[None], everything, factor[None])[0] for factor in (g, g * g)]
    return {
        "events": torch.stack([weight.sum(), weight @ value, weight @ value.square()]),
        "total": weight @ residual,
        "residuals": (weight * value) @ residual,
        "covariances": torch.stack(covariances),
    }


def risk_sums(b: Tensor, X: Tensor, z: Tensor, w: Tensor, times: Tensor, working: Tensor | None) -> dict[str, Tensor]:
    """At each time of a grid: events, and over those at risk the sums of exp(z), of it times x, and times x x'.

    Also the sums over events of margins and of features. Without ``working``, the coordinates of which products are
    wanted, there are events and sums of exp(z) only: what a baseline hazard is made of.
    """
    grid, size = OnGrid.of(b, times), w * z.exp()
    happened = w * b[:, EVENT] * (grid.stop < grid.size)
    made = {"events": grid.at_stop(w * b[:, EVENT]), "sizes": grid.at_risk(size)}
    if working is None:
        return made
    made |= {"margins": (happened @ z).view(1), "features": happened @ X, "firsts": grid.at_risk(X * size.unsqueeze(1))}
    at = working.nonzero().squeeze(1)
    i, j = torch.triu_indices(len(at), len(at))
    Z = X[:, at]
    seconds = X.new_zeros(grid.size + 2, len(i))
    for places, sign in ((grid.start, 1.0), (grid.stop + 1, -1.0)):
        order = torch.argsort(places)
        for rows in torch.split(order, torch.bincount(places, minlength=grid.size + 2).tolist()):
            if len(rows) and len(at):
                product = Z[rows].T @ (Z[rows] * size[rows].unsqueeze(1))
                seconds[int(places[rows[0]])] += sign * product[i, j]
    return made | {"seconds": seconds.cumsum(0)[: grid.size]}


class Horizon(NamedTuple):
    """What of a site is known at a time: weights by the censoring of those like them, and predicted probabilities."""

    case: Tensor
    """Of samples with an event until then, 1 over the chance not to be censored by then."""
    control: Tensor
    """Of samples that went on without, 1 over the chance not to be censored until then."""
    survival: Tensor
    """Predicted."""

    @classmethod
    def of(cls, b: Tensor, z: Tensor, w: Tensor, at: float, censoring: tuple[Tensor, Tensor], hazard: float) -> Horizon:
        """``censoring`` are times and the curve of those without censoring, ``hazard`` the baseline's until then."""
        when = torch.tensor([at], dtype=torch.float64)
        early = (b[:, TIME] <= at) & (b[:, EVENT] > 0)
        chance = step_values(*censoring, b[:, TIME], 1.0)
        until = float(step_values(*censoring, when, 1.0))
        case = torch.where(early & (chance > 0), w / chance.clamp(min=1e-300), 0.0)
        control = torch.where((b[:, TIME] > at) & (torch.tensor(until) > 0), w / max(until, 1e-300), 0.0)
        return cls(case, control, torch.exp(-hazard * z.exp()))

    def numbers(self, z: Tensor, w: Tensor, edges: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Samples with an event, without, and all, ``(3, ...)``, in bins of margins, and in groups of predictions."""
        kinds = torch.stack([self.case > 0, self.control > 0, w > 0]).double()
        bins = torch.bucketize(z.contiguous(), edges, right=True)
        place = torch.bucketize((1 - self.survival).contiguous(), groups, right=True)
        return tuple(  # type: ignore[return-value]
            torch.stack([torch.bincount(at, kind, len(ends) + 1) for kind in kinds])
            for at, ends in ((bins, edges), (place, groups))
        )

    def sums(self, z: Tensor, w: Tensor, edges: Tensor, groups: Tensor) -> dict[str, Tensor]:
        """Weights in bins of margins; squared errors; and in groups of predicted probability what was and was not."""
        bins = torch.bucketize(z.contiguous(), edges, right=True)
        scores = torch.zeros(len(edges) + 1, 2, dtype=torch.float64)
        scores.index_add_(0, bins, torch.stack([self.case, self.control], 1))
        died = 1 - self.survival
        error = self.case * self.survival.square() + self.control * died.square()
        place = torch.bucketize(died.contiguous(), groups, right=True)
        table = torch.zeros(len(groups) + 1, 4, dtype=torch.float64)
        table.index_add_(0, place, torch.stack([w, w * died, self.case, self.control], 1))
        return {"scores": scores, "error": torch.stack([error.sum(), w.sum()]), "groups": table}
