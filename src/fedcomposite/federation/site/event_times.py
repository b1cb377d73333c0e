"""Times to an event at a site: what it looks at before it tells a sum, and how coarse times are that leave it.

The term of one event names the features of those at risk with it, so that few events, and events with few at risk, are
not told of. Answers that depend on when something happened (curves, baselines, horizons, functions of time that the
asker chooses) are made from rounded times: up to a lattice of at most a hundred round steps, and then together with the
next ones until enough samples leave at the same time. Whatever grid is asked for, no step is about fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite.data.arrays import NO_ENTRY
from fedcomposite.data.queries import enough
from fedcomposite.federation.site.policy import DataRefusalError, Limits, RefusalError
from fedcomposite.problems.risk_sets import CAUSE, ENTRY, EVENT, TIME
from fedcomposite.runtime.protocol import Request, Silo, Sums, group_of, horizon_numbers

QUESTIONS = ("timetable", "logrank", "schoenfeld", "risk_sums", "concordance", "horizon")
"""Those about times to an event."""
TIMED = ("timetable", "schoenfeld", "risk_sums", "horizon")
"""Those whose answers depend on a time that the asker chooses."""
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


def coarse(limits: Limits, silo: Silo, request: Request) -> Silo:
    """The site with the times that an answer may depend on."""
    if request.name not in TIMED:
        return silo
    least = limits.min_samples if request.name in ("schoenfeld", "risk_sums") else limits.min_count
    least, events = (least, limits.min_count) if limits.min_count > 1 else (1, 1)
    parts = {name: (X, rounded(b, least, events), t) for name, (X, b, t) in silo.parts.items()}
    if request.name == "timetable" and request.part in parts:
        X, b, t = silo.parts[request.part]
        parts[request.part] = X, rounded(b, least, events, group_of(silo.of_part(request.part), request)), t
    group = group_of(silo, request) if request.name == "timetable" and request.part == "train" else None
    return replace(silo, b=rounded(silo.b, least, events, group), parts=parts, ranked=[])


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

    Of every group at least so many samples leave at each of its times, and none or ``events`` of them by an event of
    each cause.
    """
    if not len(b) or least <= 1:
        return b
    step, made = lattice(b[:, TIME]), b.clone()
    up = torch.ceil(b[:, TIME] / step - 1e-9) * step
    for mine in [torch.ones(len(b), dtype=torch.bool)] if group is None else [group == k for k in torch.unique(group)]:
        times, place = torch.unique(up[mine], return_inverse=True)
        causes = torch.nn.functional.one_hot(b[mine, CAUSE].long())
        counts = torch.zeros(len(times), causes.shape[1], dtype=torch.long).index_add_(0, place, causes)
        made[mine, TIME] = times[torch.from_numpy(_ends(counts.numpy(), least, events))[place]]
    late = b[:, ENTRY] > NO_ENTRY
    made[late, ENTRY] = torch.floor(b[late, ENTRY] / step + 1e-9) * step
    same = made[:, ENTRY] >= made[:, TIME]
    made[same, ENTRY] = made[same, TIME] - step
    return made


def _ends(counts: npt.NDArray[np.int64], least: int, events: int) -> npt.NDArray[np.int64]:
    """The last time of each time's cell, from how many are censored and have events of each cause, ``(times, 1 + K)``.

    A cell goes on until it has enough; what is left behind the last one is joined with those before it.
    """

    def enough(cell: list[int]) -> bool:
        total = counts[cell].sum(0)
        return bool(total.sum() >= least and ((total[1:] == 0) | (total[1:] >= events)).all())

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
    limits: Limits, silo: Silo, request: Request, sums: Sums, joined: Callable[[Tensor, int, Tensor], Tensor]
) -> None:
    """Bins of margins, groups of predictions: joined until each has none or enough with an event, and without."""
    bins, groups = horizon_numbers(coarse(limits, silo, request), request)
    sums["scores"] = joined(sums["scores"].T.unsqueeze(2), limits.min_count, bins[:2])[:, :, 0].T
    sums["groups"] = joined(sums["groups"].expand(3, -1, -1), limits.min_count, groups)[2]
    sums["groups"][:, 2:] *= groups[:2].sum(1) >= limits.min_count
