"""Times to an event at a site: what it looks at before it tells a sum, and how coarse times are that leave it.

The term of one event names the features of those at risk with it, so that few events, and events with few at risk, are
not told of. Answers that depend on when something happened (curves, baselines, horizons, functions of time that the
asker chooses) are made from rounded times: up to a lattice of at most a hundred round steps, and then together with the
next ones until enough samples leave at the same time. Whatever grid is asked for, no step is about fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite.data.queries import enough
from fedcomposite.federation.site.policy import DataRefusalError, Limits, RefusalError
from fedcomposite.problems.risk_sets import CAUSE, ENTRY, EVENT, TIME
from fedcomposite.runtime.protocol import Request, Rows, Silo, Sums, group_of, horizon_numbers

QUESTIONS = ("timetable", "logrank", "schoenfeld", "risk_sums", "concordance", "horizon")
"""Those about times to an event."""
TIMED = ("timetable", "schoenfeld", "risk_sums", "horizon")
"""Those whose answers depend on a time that the asker chooses."""
DRAWN = ("fold", "half", "bootstrap")
"""Parts of the rows that a secret makes."""
_STEPS = 100  # of the lattice, at most
_MOST = 1000  # times of a grid


def check(limits: Limits, own: Silo, request: Request) -> None:
    """Refuse sums over few events, or over all but a few; groups of few; grids that do not rise."""
    if not len(own.b):
        return
    inside = own.weights(request.rows) > 0
    events = int((own.b[inside, EVENT] > 0).sum())
    left = int((own.b[:, EVENT] > 0).sum()) - events
    least = limits.min_class if request.rows.held and request.rows.kind == "fold" else limits.min_events
    if bool(inside.any()) and events < least:
        raise DataRefusalError(
            f"few events are behind a sum: fewer than {least} (min_events, or min_class of a fold)", f"{events} events"
        )
    if 0 < left < limits.min_class:
        raise DataRefusalError(
            f"few events are left out of a sum: fewer than min_class = {limits.min_class}", f"{left} events"
        )
    times = request.arrays.get("times", torch.zeros(0))
    if len(times) > _MOST or not bool((times.diff() > 0).all() & torch.isfinite(times).all()):
        raise RefusalError(f"a grid of times must rise and have at most {_MOST}")
    if request.name in TIMED and request.rows.kind == "bootstrap" and limits.min_count > 1:
        raise RefusalError("sums over time are told of folds and halves, not of samples that count several times")
    edges = request.arrays.get("edges", torch.zeros(0))
    if not bool((edges.diff() > 0).all()):
        raise RefusalError("the edges of groups must rise")
    if request.name in ("timetable", "logrank") and len(edges):
        group = torch.bucketize(own.linear(request.arrays["x"])[inside].contiguous(), edges, right=True)
        counts = torch.bincount(group, minlength=len(edges) + 1)
        if int(counts[counts > 0].min()) < limits.min_samples:
            raise DataRefusalError(f"a group has fewer samples here than min_samples = {limits.min_samples}")
        _check_causes(limits, own.b[inside], group)
    elif request.name == "timetable":
        _check_causes(limits, own.b[inside], torch.zeros(int(inside.sum()), dtype=torch.long))
    if request.name in ("concordance", "horizon") and not enough(
        own.margins(request.arrays["x"]).double().numpy(), limits.min_count
    ):
        raise DataRefusalError(f"a model that tells fewer than min_count = {limits.min_count} samples from the others")


def _check_causes(limits: Limits, b: Tensor, group: Tensor) -> None:
    """Refuse counts of events of which a group has few, of any cause."""
    kinds = b[:, CAUSE].long() + (int(b[:, CAUSE].max()) + 1) * group if len(b) else group
    counts = torch.bincount(kinds[b[:, CAUSE] > 0])
    if len(counts) and int(counts[counts > 0].min()) < limits.min_count:
        raise DataRefusalError(f"a group, or a cause, has fewer events here than min_count = {limits.min_count}")


def coarse(limits: Limits, silo: Silo, request: Request, divisions: Sequence[Rows] = ()) -> Silo:
    """The site with the times that an answer may depend on.

    They are joined step by step, for all, then for what tells features, then for groups and for parts of the rows: what
    is told of the few is never between two times of what is told of all, so that no difference is about fewer. Sums
    over some parts of a division are told beside those of earlier ones: enough of what these have in common leave.
    """
    if request.name not in TIMED or limits.min_count <= 1:
        return silo
    least = max(limits.min_samples if request.name in ("schoenfeld", "risk_sums") else 0, limits.min_count)

    def joined(own: Silo) -> Tensor:
        made = rounded(rounded(own.b, limits.min_count, limits.min_count), least, limits.min_count)
        if request.name == "timetable":
            made = rounded(made, least, limits.min_count, group_of(own, request))
        common = torch.zeros(len(made), dtype=torch.long)
        for one in divisions:
            common = torch.unique(torch.stack([common, part_of(own, one)]), dim=1, return_inverse=True)[1]
            made = rounded(made, least, limits.min_count, common)
        return made

    parts = dict(silo.parts)
    if request.part in parts:
        X, _, offset = parts[request.part]
        parts[request.part] = X, joined(silo.of_part(request.part)), offset
    return replace(silo, b=joined(silo), parts=parts, ranked=[])


def part_of(own: Silo, rows: Rows) -> Tensor:
    """The fold of each sample, or the half: sums over all other folds and over all samples tell of it as well."""
    place = torch.zeros(len(own.b), dtype=torch.long)
    for k, one in enumerate(rows.division):
        place[own.weights(one) > 0] = k
    return place


def divisions(limits: Limits, divide: Callable[[Rows], list[Rows]], request: Request) -> list[Rows]:
    """The divisions that the times of an answer are joined for: that of its rows, after those of earlier answers."""
    rows = request.rows
    if request.name not in TIMED or request.name == "horizon" or rows.kind not in DRAWN or limits.min_count <= 1:
        return []
    return divide(rows)


def check_horizon(
    limits: Limits,
    silo: Silo,
    request: Request,
    apart: Callable[..., list[bool]],
    hold: Callable[[Rows, Tensor], None],
) -> None:
    """Refuse a horizon of a fold until which few more, or fewer, of any fold left than until an earlier answer's.

    Of all rows enough leave at each time; of those of a fold it may be one.
    """
    inside = silo.weights(request.rows) > 0
    if request.name != "horizon" or request.part != "train" or bool(inside.all()) or not bool(inside.any()):
        return
    early, rows = coarse(limits, silo, request).b[:, TIME] <= request.numbers["at"], request.rows
    classes = (silo.b[:, EVENT] > 0).long().numpy()
    for one in rows.division:
        part = f"{one.kind} {one.number} of {one.of}, {one.seed}, {one.held}"
        places = (~(early & (silo.weights(one) > 0))).long().numpy()
        if not all(apart(f"horizons of {part}", places, classes, [0])):
            raise DataRefusalError(
                f"until another horizon, which an earlier answer was about, there are fewer than min_count = "
                f"{limits.min_count} more or fewer events, or samples without, in a fold: take that one"
            )
    if rows.kind in DRAWN and limits.min_count > 1:
        hold(rows, early)


def check_groups(silo: Silo, request: Request, apart: Callable[..., list[bool]]) -> None:
    """Refuse groups that differ from those of an earlier answer by few samples: the difference is about these."""
    edges = request.arrays.get("edges", torch.zeros(0))
    if request.name not in ("timetable", "logrank") or not len(edges):
        return
    own = silo.of_part(request.part)
    inside = own.weights(request.rows) > 0
    group, classes = group_of(own, request), (own.b[:, EVENT] > 0).long().numpy()
    for places in (group, len(edges) - group):  # a group, and all others
        told = apart(f"{request.part} groups", places.where(inside, -1).numpy(), classes, list(range(len(edges))))
        if not all(told):
            raise DataRefusalError(
                "groups that differ from those of an earlier answer by fewer than min_count samples with an event, or "
                "without"
            )


def lattice(times: Tensor) -> float:
    """A round step of which at most a hundred lead to the last time: 1, 2 or 5 times a power of ten."""
    last = float(times.abs().max())
    if not last > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(last / _STEPS))
    return next(k * power for k in (1.0, 2.0, 5.0, 10.0, 20.0) if last / (k * power) <= _STEPS)


def rounded(b: Tensor, least: int, events: int = 1, group: Tensor | None = None) -> Tensor:
    """Prepared targets with times up to a lattice, joined until enough leave at each; as given for ``least`` = 1.

    At each time none or at least so many samples of every group leave, and none or ``events`` of them by an event of
    each cause. Entries are rounded down in the same way, and further until never a few alone are at risk: who enters
    by himself would be the difference of the sums before and behind.
    """
    if not len(b) or least <= 1:
        return b
    step, made = lattice(b[:, TIME]), b.clone()
    group = torch.zeros(len(b), dtype=torch.long) if group is None else torch.unique(group, return_inverse=True)[1]
    up = torch.ceil(b[:, TIME] / step - 1e-9) * step
    down = torch.floor(b[:, ENTRY] / step + 1e-9) * step
    times, place = torch.unique(up, return_inverse=True)
    made[:, TIME] = times[torch.from_numpy(_ends(_counted(place, group, b[:, CAUSE].long()), least, events))[place]]
    since, place = torch.unique(-torch.where(down >= up, up - step, down), return_inverse=True)
    made[:, ENTRY] = -since[torch.from_numpy(_ends(_counted(place, group), least, 1))[place]]
    return _with_enough_at_risk(made, group, least)


def _counted(place: Tensor, group: Tensor, cause: Tensor | None = None) -> npt.NDArray[np.int64]:
    """How many samples of each group and cause are at each place, ``(places, groups, causes)``."""
    cause = torch.zeros_like(group) if cause is None else cause
    shape = int(place.max()) + 1, int(group.max()) + 1, int(cause.max()) + 1
    cells = (place * shape[1] + group) * shape[2] + cause
    return torch.bincount(cells, minlength=math.prod(shape)).view(shape).numpy()


def _with_enough_at_risk(b: Tensor, group: Tensor, least: int) -> Tensor:
    """Later entries joined with earlier ones, until of every group none or enough are at risk at any time."""
    while True:
        ends, place = torch.unique(b[:, [ENTRY, TIME]].T, return_inverse=True)
        come, gone = (torch.zeros(len(ends), int(group.max()) + 1).index_put_(
            (one, group), torch.ones(len(group)), accumulate=True).cumsum(0) for one in place)  # fmt: skip
        few = ((come > gone) & (come - gone < least)).any(1).nonzero()
        entry = b[:, ENTRY]
        later = entry > ends[few[0, 0]] if len(few) else torch.zeros_like(entry, dtype=torch.bool)
        if not bool(later.any()):
            return b
        joined = entry.masked_fill(later, -math.inf).max()
        b[:, ENTRY] = torch.where(entry == entry[later].min(), joined, entry)


def _ends(counts: npt.NDArray[np.int64], least: int, events: int) -> npt.NDArray[np.int64]:
    """The last time of each time's cell, from how many are censored and have events of each cause.

    ``counts`` are ``(times, groups, 1 + K)``. A cell goes on until it has enough of each group, or none; what is left
    behind the last one is joined with those before it.
    """

    def enough(cell: list[int]) -> bool:
        total = counts[cell].sum(0)
        every, happened = total.sum(1), total[:, 1:]
        many = ((every == 0) | (every >= least)).all() & ((happened == 0) | (happened >= events)).all()
        return bool(many and every.any())

    cells: list[list[int]] = [[]]
    for i in range(len(counts)):
        cells[-1].append(i)
        if enough(cells[-1]):
            cells.append([])
    while len(cells) > 1 and not enough(cells[-1]):
        last = cells.pop()
        cells[-1] += last
    return np.concatenate([np.full(len(cell), cell[-1]) for cell in cells if cell])


def tell_horizon(
    limits: Limits,
    silo: Silo,
    asked: Sequence[Request],
    answers: Sequence[Sums],
    joined: Callable[[Tensor, int, Tensor], Tensor],
) -> None:
    """Bins of margins, groups of predictions: joined until each has none or enough with an event, and without.

    Those of all folds of a division are told as one: a fold alone has events for a bin or two.
    """
    own = coarse(limits, silo, asked[0])
    numbers = [horizon_numbers(own, one) for one in asked]
    bins, groups = (torch.stack([one[i] for one in numbers]).sum(0) for i in (0, 1))
    sums, every = answers[0], {key: torch.stack([one[key] for one in answers]).sum(0) for key in ("scores", "groups")}
    for one in answers[1:]:
        one["scores"].zero_()
        one["groups"].zero_()
    sums["scores"] = joined(every["scores"].T.unsqueeze(2), limits.min_count, bins[:2])[:, :, 0].T
    sums["groups"] = joined(every["groups"].expand(3, -1, -1), limits.min_count, groups)[2]
    sums["groups"][:, 2:] *= groups[:2].sum(1) >= limits.min_count
