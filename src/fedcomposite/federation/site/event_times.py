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
import torch
from torch import Tensor

from fedcomposite.data.arrays import NO_ENTRY
from fedcomposite.data.queries import enough
from fedcomposite.federation.site.policy import Limits, RefusalError
from fedcomposite.problems.risk_sets import ENTRY, EVENT, TIME
from fedcomposite.runtime.protocol import Request, Silo, Sums, answer

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
        raise RefusalError(f"{events} events are behind a sum, fewer than {least} (min_events, or min_class of a fold)")
    if 0 < left < limits.min_class:
        raise RefusalError(f"{left} events are left out of a sum, fewer than min_class = {limits.min_class}")
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
            raise RefusalError(f"a group has fewer samples here than min_samples = {limits.min_samples}")
    if request.name in ("concordance", "horizon") and not enough(
        own.margins(request.arrays["x"]).double().numpy(), limits.min_count
    ):
        raise RefusalError(f"a model that tells fewer than min_count = {limits.min_count} samples from the others")


def coarse(limits: Limits, silo: Silo, request: Request) -> Silo:
    """The site with the times that an answer may depend on."""
    if request.name not in TIMED:
        return silo
    least = limits.min_samples if request.name in ("schoenfeld", "risk_sums") else limits.min_count
    parts = {name: (X, rounded(b, least), t) for name, (X, b, t) in silo.parts.items()}
    return replace(silo, b=rounded(silo.b, least), parts=parts, ranked=[])


def lattice(times: Tensor) -> float:
    """A round step of which at most a hundred lead to the last time: 1, 2 or 5 times a power of ten."""
    last = float(times.abs().max())
    if not last > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(last / _STEPS))
    return next(k * power for k in (1.0, 2.0, 5.0, 10.0, 20.0) if last / (k * power) <= _STEPS)


def rounded(b: Tensor, least: int) -> Tensor:
    """Prepared targets with times up to a lattice, joined until ``least`` samples leave at each; as given for 1."""
    if not len(b) or least <= 1:
        return b
    step, made = lattice(b[:, TIME]), b.clone()
    up = torch.ceil(b[:, TIME] / step - 1e-9) * step
    times, place, counts = (v.numpy() for v in torch.unique(up, return_inverse=True, return_counts=True))
    ends, waiting = np.zeros(len(times), int), 0
    groups: list[list[int]] = [[]]
    for i, count in enumerate(counts.tolist()):
        groups[-1].append(i)
        waiting += count
        if waiting >= least:
            groups.append([])
            waiting = 0
    if groups[-1] and len(groups) > 1:
        last = groups.pop()
        groups[-1] += last
    for group in groups:
        ends[group] = group[-1] if group else 0
    made[:, TIME] = torch.from_numpy(times[ends[place]])
    late = b[:, ENTRY] > NO_ENTRY
    made[late, ENTRY] = torch.floor(b[late, ENTRY] / step + 1e-9) * step
    same = made[:, ENTRY] >= made[:, TIME]
    made[same, ENTRY] = made[same, TIME] - step
    return made


def tell_horizon(
    limits: Limits, silo: Silo, request: Request, sums: Sums, joined: Callable[[Tensor, int, Tensor], Tensor]
) -> None:
    """Bins of margins and groups of predictions with few samples are joined with their neighbours."""
    own = coarse(limits, silo, request)
    alike = replace(own, importance=torch.ones_like(own.importance), kept={})
    part = alike.of_part(request.part)
    bins = torch.bucketize(part.margins(request.arrays["x"]).contiguous(), request.arrays["edges"], right=True)
    inside = (part.weights(request.rows) > 0).double()
    numbers = torch.bincount(bins, inside, len(request.arrays["edges"]) + 1)
    sums["scores"] = joined(sums["scores"].unsqueeze(0), limits.min_count, numbers.unsqueeze(0))[0]
    plain = answer(alike, request)["groups"][:, 0]
    sums["groups"] = joined(sums["groups"].unsqueeze(0), limits.min_count, plain.unsqueeze(0))[0]
