"""Risk sets: who is still at risk at each event, and the sums over them that Cox's partial likelihood is made of.

A sample is at risk at the time t if it entered before t and left at t or later, entry < t <= time. Within a client and
a stratum samples are put in the order of their times, the latest first, so that the sum over those at risk at t is a
cumulative sum, and what all events add to a sample is one from the other end: loss and gradient take O(m p), whoever
entered late included. All clients of a block are worked on at once, each group (a stratum of a client) in a row of its
own: no sum is ever the difference of two groups' sums. Numbers are float64, whatever the features are.

Exponentials are taken relative to the largest margin. Where all at risk at an event are far below it their sum would
vanish, or be the rounding of what entered late: such events are summed up again, relative to the largest margin among
those that are left, so that margins may be any number apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite.problems.sparse_products import Stack

TIME, EVENT, ENTRY, STRATUM, CAUSE = range(5)
"""Columns of prepared targets; EVENT is 1 for the cause that a model is of, CAUSE the number of any."""

_CHUNK = 1 << 22  # elements of the sorted columns that are worked on at a time
_BELOW, _BELOW_LATE = 300.0, 10.0  # by how much margins at risk may be below the largest, without and with late entries


@dataclass(frozen=True)
class _Rows:
    """Groups of similar size, padded to the longest, ``(r, l)`` each; padding has no weight."""

    at: Tensor  # places among the samples, the latest first
    client: Tensor  # (r,)
    there: Tensor  # 1, and 0 on padding
    event: Tensor  # 1 where something happened
    first: Tensor  # where the samples with the same time begin
    last: Tensor  # and end
    entered: Tensor | None  # the order of entries, the latest first; None if all were there from the start
    late: Tensor | None  # how many entered at the sample's time or later
    before: Tensor | None  # where the times up to the sample's entry begin


class _Sums(NamedTuple):
    """What the samples of some rows are to the others at a model, ``(r, l)`` each, for some or all of the events."""

    z: Tensor
    weight: Tensor
    top: Tensor  # (r, 1), the largest margin, which is taken off before exponentials
    size: Tensor  # weight times exp(z - top); 0 of those that are at risk at none of the events
    risk: Tensor  # sum of the sizes at risk, at an event; in Efron's way less a share of the tied ones
    event: Tensor  # 1 where an event counts
    counted: Tensor  # its weight
    share: Tensor | None  # Efron's share of the tied events that is taken off


@dataclass(frozen=True)
class RiskSets:
    """The risk sets of n clients with m samples each, padding included."""

    shape: tuple[int, int]
    parts: tuple[_Rows, ...]
    places: Tensor  # (n * m,), where each sample is among the parts, one after another
    efron: bool
    least: int
    """Events with fewer samples at risk do not count."""

    @classmethod
    def of(cls, b: Tensor, efron: bool = False, least: int = 1) -> RiskSets:
        """From prepared targets ``(n, m, 5)``."""
        n, m = b.shape[:2]
        table = b.double().cpu().numpy().reshape(n * m, -1)
        ranks = np.unique(table[:, [TIME, ENTRY]], return_inverse=True)[1].reshape(-1, 2)
        strata = np.unique(table[:, STRATUM], return_inverse=True)[1].reshape(-1)
        client = np.repeat(np.arange(n), m)
        kinds, group = np.unique(client * (int(strata.max(initial=0)) + 1) + strata, return_inverse=True)
        sorting = _Sorting(group.reshape(-1), ranks[:, 0], ranks[:, 1], len(kinds))
        parts, found = list[_Rows](), []
        for rows in sorting.levels():
            fields, at = sorting.padded(rows, table[:, EVENT], client, bool(np.isfinite(table[:, ENTRY]).any()))
            found.append(at)
            parts.append(_Rows(*(None if v is None else torch.from_numpy(v).to(b.device) for v in fields)))  # type: ignore[arg-type]
        places, start = np.empty(n * m, np.int64), 0
        for part, inside in zip(parts, found, strict=True):
            at = part.at.cpu().numpy()
            places[at[inside]] = start + np.flatnonzero(inside)
            start += at.size
        return cls((n, m), tuple(parts), torch.from_numpy(places).to(b.device), efron, least)

    # -- what a partial likelihood is made of -------------------------------------------------------------------------

    def terms(self, z: Tensor, w: Tensor) -> Tensor:
        """What each sample adds to minus the logarithm of the partial likelihood, ``(n, m)``.

        Weights count relative to their mean over the client's samples that have some, so that their unit does not
        matter, and weights that are all alike are as none.
        """
        unit = _unit(w)
        made = [_added(_terms(part, s, unit) for s in self._sums(part, z, w)) for part in self.parts]
        return self._back(made).to(z.dtype)

    def together(self, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of the terms ``(n,)`` and :meth:`slopes`, in one pass."""
        unit, made = _unit(w), []
        total = torch.zeros(self.shape[0], dtype=torch.float64, device=z.device)
        for part in self.parts:
            sums = self._sums(part, z, w)
            total.index_add_(0, part.client, _added(_terms(part, s, unit).sum(1) for s in sums))
            made.append(_added(self._slopes(part, s) for s in sums))
        return total.to(z.dtype), self._back(made).to(z.dtype)

    def saturated(self, w: Tensor) -> Tensor:
        """Minus the logarithm of the largest partial likelihood that risk sets of any margins have, ``(n,)``."""
        unit = _unit(w)
        total = torch.zeros(self.shape[0], dtype=torch.float64, device=w.device)
        for part in self.parts:
            for s in self._sums(part, torch.zeros_like(w), w):
                tied = _tied(part, s.weight * s.event)
                logs = torch.where(s.counted > 0, tied if s.share is None else (1 - s.share) * tied, 1.0).log()
                total.index_add_(0, part.client, (s.counted * (logs + unit[part.client].unsqueeze(1))).sum(1))
        return total

    def slopes(self, z: Tensor, w: Tensor) -> Tensor:
        """The derivative of the sum of the terms in each margin, ``(n, m)``."""
        made = [_added(self._slopes(part, s) for s in self._sums(part, z, w)) for part in self.parts]
        return self._back(made).to(z.dtype)

    def hessians(self, X: Tensor | Stack, z: Tensor, w: Tensor, at: Tensor, factor: Tensor | None = None) -> Tensor:
        """The second derivatives of the sum of the terms in the coefficients ``at``, ``(n, k, k)``.

        They are covariances over the risk sets, which no constant changes: features are taken about the means of their
        groups, so that nothing is lost where these are large. ``factor`` ``(n, m)`` is what each event's covariance is
        multiplied by; alike for events at the same time.
        """
        n, k = self.shape[0], len(at)
        columns = _columns(X, at)
        out = torch.zeros(n, k, k, dtype=torch.float64, device=z.device)
        for part, s in self._all(z, w):
            if factor is not None:
                s = s._replace(counted=s.counted * factor.reshape(-1)[part.at])
            bent = s.size * self._hazard(part, s)
            for r, client in enumerate(part.client.tolist()):
                Z = _centred(part, s, r, columns)
                means, weight = self._means(part, s, r, Z)
                out[client] += Z.T @ (Z * bent[r].unsqueeze(1)) - means.T @ (means * weight.unsqueeze(1))
        return out.to(z.dtype)

    def residuals(self, X: Tensor, z: Tensor, w: Tensor) -> Tensor:
        """What each sample adds to the gradient, all events at which it was at risk among it: ``(n, m, p)``.

        These are the score residuals, of which sandwich errors are made; their sum is the gradient.
        """
        n, m = self.shape
        columns = _columns(X, torch.arange(X.shape[2], device=X.device))
        out = torch.zeros(n * m, X.shape[2], dtype=torch.float64, device=z.device)
        for part, s in self._all(z, w):
            hazard = self._hazard(part, s)
            for r in range(len(part.client)):
                Z = _centred(part, s, r, columns)
                seen = self._seen(part, s, r, Z)
                own = Z * (s.size[r] * hazard[r] - s.weight[r] * s.event[r]).unsqueeze(1) + seen
                out.index_add_(0, part.at[r], own * part.there[r].unsqueeze(1))
        return out.view(n, m, -1)

    def schoenfeld(self, X: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """The places of all events among the samples, and their features less the means at risk, ``(e, p)``."""
        columns = _columns(X, torch.arange(X.shape[2], device=X.device))
        places, found = [], []
        for part, s in self._all(z, w):
            for r in range(len(part.client)):
                Z = _centred(part, s, r, columns)
                event = (s.counted[r] > 0).nonzero().squeeze(1)
                places.append(part.at[r][event])
                found.append(Z[event] - self._own_means(part, s, r, self._at_events(part, s, r, Z, event), event))
        return torch.cat(places), torch.cat(found)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _all(self, z: Tensor, w: Tensor) -> Iterator[tuple[_Rows, _Sums]]:
        for part in self.parts:
            for s in self._sums(part, z, w):
                yield part, s

    def _sums(self, part: _Rows, z: Tensor, w: Tensor) -> list[_Sums]:
        """One for all events, as a rule; another for those at which all at risk are far below the largest margin."""
        weight = w.reshape(-1)[part.at].double() * part.there
        own = z.reshape(-1)[part.at].double()
        own = torch.where(own.isfinite(), own, math.nan)
        reach = torch.where(weight > 0, own + weight.log(), -math.inf)
        event = part.event * (weight > 0)
        if self.least > 1:
            event = event * (self._at_risk(part, (weight > 0).double()) > self.least - 0.5)
        below = _BELOW if part.entered is None else _BELOW_LATE
        made, top = list[_Sums](), reach.amax(1, keepdim=True)
        while True:
            top = torch.where(top.isfinite(), top, 0.0)
            size = torch.where((reach > top) | (weight == 0), 0.0, weight * torch.exp(own - top))
            risk = self._at_risk(part, size)
            left = event * (risk < math.exp(-below))
            more = z.device.type == "cpu" and bool(left.any())  # elsewhere a look at numbers would be waited for
            made.append(self._of(part, own, weight, top, size, risk, event - left if more else event))
            if not more:
                return made
            event, rows = left, left.any(1, keepdim=True)
            # whose size is at least exp(-below) by more than rounding was at risk at none of the events that are left
            top = reach.masked_fill((reach >= top - below + 1) | ~rows, -math.inf).amax(1, keepdim=True)

    def _of(
        self, part: _Rows, z: Tensor, weight: Tensor, top: Tensor, size: Tensor, risk: Tensor, event: Tensor
    ) -> _Sums:
        """The sums for some events."""
        least = math.exp(-2 * _BELOW)  # what is left behind a difference may be rounding
        risk, share, counted = torch.maximum(risk, size).clamp(min=least), None, weight * event
        if self.efron:
            events = (counted > 0).double()
            number = _tied(part, events)
            share = torch.where(events > 0, (events.cumsum(1) - _up_to(events, part.first) - 1) / number, 0.0)
            counted = torch.where(events > 0, _tied(part, counted) / number, 0.0)
            risk = risk - share * _tied(part, size * events)
        return _Sums(z, weight, top, size, risk, event, counted, share)

    def _slopes(self, part: _Rows, s: _Sums) -> Tensor:
        return s.size * self._hazard(part, s) - s.weight * s.event

    def _at_risk(self, part: _Rows, values: Tensor) -> Tensor:
        """Sums over those at risk at each sample's time, along axis 1 of ``(r, l)``."""
        made = values.cumsum(1).gather(1, part.last)
        if part.entered is None:
            return made
        assert part.late is not None
        return made - _up_to(values.gather(1, part.entered), part.late)

    def _hazard(self, part: _Rows, s: _Sums) -> Tensor:
        """The baseline's cumulated hazard while each sample was at risk, in units of exp(-top)."""
        each = s.counted / torch.where(s.counted > 0, s.risk, 1.0)
        made = self._while_there(part, each)
        if s.share is not None:  # an event is at risk to a part of those that are tied with it
            own = ((s.weight * s.event) > 0).double()
            made = made - own * _tied(part, s.share * each)
        return made

    def _while_there(self, part: _Rows, each: Tensor) -> Tensor:
        """Sums over the events at which a sample was at risk."""
        later = torch.nn.functional.pad(each.flip(1).cumsum(1).flip(1), (0, 1))
        made = later.gather(1, part.first)
        return made if part.before is None else made - later.gather(1, part.before)

    def _means(self, part: _Rows, s: _Sums, r: int, Z: Tensor) -> tuple[Tensor, Tensor]:
        """Means of columns at risk at the events of one row, and the weights of these events."""
        if self.efron:
            event = (s.counted[r] > 0).nonzero().squeeze(1)
            return self._at_events(part, s, r, Z, event), s.counted[r][event]
        tied = _tied(part, s.counted)[r]  # one for each time is enough
        event = ((tied > 0) & (part.last[r] == torch.arange(len(tied), device=tied.device))).nonzero().squeeze(1)
        return self._at_events(part, s, r, Z, event), tied[event]

    def _at_events(self, part: _Rows, s: _Sums, r: int, Z: Tensor, event: Tensor) -> Tensor:
        """Means of columns ``(l, k)`` over those at risk at some events of one row, ``(e, k)``, columns by blocks."""
        made = Z.new_empty(Z.shape[1], len(event))
        size, last = s.size[r], part.last[r][event]
        tied = ((s.weight[r] * s.event[r]) > 0).double()
        for c in _blocks(*Z.shape):
            sized = Z[:, c].T.contiguous() * size  # columns in one piece, along which sums run
            sums = sized.cumsum(1)[:, last]
            if part.entered is not None:
                assert part.late is not None
                since = torch.nn.functional.pad(sized[:, part.entered[r]].cumsum(1), (1, 0))
                sums -= since[:, part.late[r][event]]
            if s.share is not None:
                own = torch.nn.functional.pad((sized * tied).cumsum(1), (1, 0))
                sums -= s.share[r][event] * (own[:, last + 1] - own[:, part.first[r][event]])
            made[c] = sums / s.risk[r][event]
        return made.T

    def _own_means(self, part: _Rows, s: _Sums, r: int, means: Tensor, event: Tensor) -> Tensor:
        """The means that events are compared with: in Efron's way, that over all events of the same time."""
        if s.share is None:
            return means
        spread = means.new_zeros(part.at.shape[1], means.shape[1] + 1)
        spread[event] = torch.cat([means, torch.ones_like(means[:, :1])], 1)
        tied = _tied_rows(part, r, spread)[event]
        return tied[:, :-1] / tied[:, -1:]

    def _seen(self, part: _Rows, s: _Sums, r: int, Z: Tensor) -> Tensor:
        """What the means at risk add to each sample's residual, with its sign: ``(l, k)``."""
        made = torch.zeros_like(Z)
        event = (s.counted[r] > 0).nonzero().squeeze(1)
        means = self._at_events(part, s, r, Z, event)
        compared = self._own_means(part, s, r, means, event)
        each = s.counted[r][event] / s.risk[r][event]
        for c in _blocks(*Z.shape):
            drift = torch.zeros_like(Z[:, c])
            drift[event] = means[:, c] * each.unsqueeze(1)
            later = torch.nn.functional.pad(drift.flip(0).cumsum(0).flip(0), (0, 0, 0, 1))
            hazard = later[part.first[r]]
            if part.before is not None:
                hazard = hazard - later[part.before[r]]
            if s.share is not None:
                tied = ((s.weight[r] * s.event[r]) > 0).double().unsqueeze(1)
                partly = torch.zeros_like(drift)
                partly[event] = drift[event] * s.share[r][event].unsqueeze(1)
                hazard = hazard - tied * _tied_rows(part, r, partly)
            own = torch.zeros_like(drift)
            own[event] = s.weight[r][event].unsqueeze(1) * compared[:, c]
            made[:, c] = own - s.size[r].unsqueeze(1) * hazard
        return made

    def _back(self, made: list[Tensor]) -> Tensor:
        """Numbers of rows as those of samples, ``(n, m)``."""
        flat = torch.cat([one.reshape(-1) for one in made]) if len(made) > 1 else made[0].reshape(-1)
        return flat[self.places].view(self.shape)


def _unit(w: Tensor) -> Tensor:
    """The logarithm of what makes the mean of each client's weights one, ``(n,)``."""
    return ((w > 0).sum(1) / w.double().sum(1)).log().nan_to_num(0.0, 0.0, 0.0)


def _terms(part: _Rows, s: _Sums, unit: Tensor) -> Tensor:
    """What the samples of some rows add to minus the logarithm of the partial likelihood."""
    logs = torch.where(s.counted > 0, s.risk, 1.0).log() + s.top + unit[part.client].unsqueeze(1)
    return s.counted * logs - s.weight * s.event * s.z


def _columns(X: Tensor | Stack, at: Tensor) -> Tensor:
    """Columns of all samples in float64, ``(n * m, k)``."""
    dense = X.columns(at) if isinstance(X, Stack) else X.index_select(2, at)
    return dense.double().flatten(0, 1)


def _centred(part: _Rows, s: _Sums, r: int, columns: Tensor) -> Tensor:
    """Those of one row, about their weighted means."""
    Z = columns[part.at[r]]
    return Z - s.weight[r] @ Z / s.weight[r].sum().clamp(min=1e-300)


def _up_to(values: Tensor, count: Tensor) -> Tensor:
    """Sums of the first so many values of each row."""
    return torch.nn.functional.pad(values.cumsum(1), (1, 0)).gather(1, count)


def _tied(part: _Rows, values: Tensor) -> Tensor:
    """Sums over the samples with the same time."""
    return torch.zeros_like(values).scatter_add(1, part.first, values).gather(1, part.first)


def _tied_rows(part: _Rows, r: int, values: Tensor) -> Tensor:
    """The same for columns ``(l, k)`` of one row."""
    return torch.zeros_like(values).index_add_(0, part.first[r], values)[part.first[r]]


def _added(values: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, values)


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    per = max(1, _CHUNK // max(rows, 1))
    for a in range(0, columns, per):
        yield slice(a, min(a + per, columns))


@dataclass(frozen=True)
class _Sorting:
    """Samples by group and by falling time, and entries alike; times and entries are ranks among all of both."""

    group: npt.NDArray[np.int64]
    time: npt.NDArray[np.int64]
    entry: npt.NDArray[np.int64]
    groups: int

    def levels(self) -> list[npt.NDArray[np.int64]]:
        """Groups of similar size: padding is at most half of all."""
        sizes = np.bincount(self.group, minlength=self.groups)
        if self.groups * sizes.max() <= 1.5 * sizes.sum():
            return [np.arange(self.groups)]
        level = np.ceil(2 * np.log2(sizes))
        return [np.flatnonzero(level == v) for v in np.unique(level)]

    def padded(
        self, rows: npt.NDArray[np.int64], event: npt.NDArray[np.float64], client: npt.NDArray[np.int64], entries: bool
    ) -> tuple[list[npt.NDArray[np.generic] | None], npt.NDArray[np.bool_]]:
        """The fields of :class:`_Rows` for some groups, and which of their places are no padding."""
        ranks = int(max(self.time.max(initial=0), self.entry.max(initial=0))) + 1
        by_time, by_entry = (self.group * ranks + (ranks - 1 - v) for v in (self.time, self.entry))
        order, entered = np.argsort(by_time, kind="stable"), np.argsort(by_entry, kind="stable")
        keys, late_keys = by_time[order], by_entry[entered]
        sizes = np.bincount(self.group, minlength=self.groups)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        longest = int(sizes[rows].max())
        inside = np.arange(longest)[None, :] < sizes[rows][:, None]
        flat = starts[rows][:, None] + np.where(inside, np.arange(longest)[None, :], 0)
        at, start = order[flat], starts[rows][:, None]
        first = np.searchsorted(keys, keys[flat], side="left") - start
        last = np.searchsorted(keys, keys[flat], side="right") - 1 - start
        place = np.broadcast_to(np.arange(longest), at.shape)
        first, last = np.where(inside, first, place), np.where(inside, last, place)
        fields: list[npt.NDArray[np.generic] | None] = [
            at,
            client[order[starts[rows]]],
            inside.astype(float),
            event[at] * inside,
            first,
            last,
        ]
        if not entries:
            return [*fields, None, None, None], inside
        within = np.empty(len(order), np.int64)
        within[order] = np.arange(len(order))
        when = np.where(inside, within[entered[flat]] - start, place)
        late = np.searchsorted(late_keys, keys[flat], side="right") - start
        before = np.searchsorted(keys, by_entry[at], side="left") - start
        return [*fields, when, np.where(inside, late, 0), np.where(inside, before, longest)], inside
