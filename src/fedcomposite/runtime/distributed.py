"""Clients spread over processes: ``torchrun --nproc-per-node 2 script.py``, one all-reduce per round.

Every process builds the whole problem, then places the samples of its own share of the clients, a run of consecutive
ones, on its device, and keeps only their states. In a round it works for those participants that are its own; the
weighted sums of the decoded replies, flattened into one tensor, are added up over the processes, and every process
applies the server's rule to the result. Cohorts, minibatches and coins are counted by the clients' numbers in the
federation, so the result is that of one process up to the order of additions. Evaluations are shared out alike.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fedcomposite.data.silos import Silos
from fedcomposite.problems import Counter, Evaluation, Problem, Smooth
from fedcomposite.problems.linear import Linear
from fedcomposite.problems.losses import Loss
from fedcomposite.problems.network import Network, spread
from fedcomposite.runtime import messages
from fedcomposite.runtime.messages import mean_buffers


class Span(NamedTuple):
    """Consecutive clients, or samples: those from ``start`` to before ``stop``."""

    start: int
    stop: int


class Meeting(NamedTuple):
    """What the processes agree on after a round."""

    mean: NamedTuple
    buffers: Tensor
    stop: bool


class Alone:
    """The one process of a run that has no others."""

    rank, size = 0, 1

    def span(self, n: int) -> Span:
        """The clients that this process has: all of them."""
        return Span(0, n)

    def share(self, problem: Problem, dtype: torch.dtype, device: torch.device) -> Smooth:
        """The functions of all clients."""
        return problem.smooth(dtype, device)

    def mean(
        self, decoded: NamedTuple, buffers: Tensor, weights: Tensor | None, place: tuple[int, int], stop: bool
    ) -> Meeting:
        """The weighted means of replies and buffers."""
        return Meeting(messages.mean(decoded, weights), mean_buffers(buffers, weights), stop)

    def merge(self, seen: Evaluation) -> Evaluation:
        """What was seen is all there is."""
        return seen

    def totals(self, counter: Counter, device: torch.device) -> Counter:
        """What the run has cost so far, as this process counts."""
        return dataclasses.replace(counter)

    def agree(self, stop: bool, device: torch.device) -> bool:
        """Whether to stop: as this process wants."""
        return stop

    def wait(self) -> None:
        """Return at once: there is no other process."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes of a run."""

    rank: int
    size: int

    def span(self, n: int, rank: int | None = None) -> Span:
        """The clients of n that a process, this one if left out, works for."""
        r = self.rank if rank is None else rank
        return Span(n * r // self.size, n * (r + 1) // self.size)

    def spans(self, n: int) -> list[Span]:
        """The clients of every process."""
        return [self.span(n, r) for r in range(self.size)]

    def share(self, problem: Problem, dtype: torch.dtype, device: torch.device) -> Smooth:
        """The functions of this process's clients, with their weights in the whole problem: parts of a sum."""
        return shard(problem, self, dtype, device)

    def mean(
        self, decoded: NamedTuple, buffers: Tensor, weights: Tensor | None, place: tuple[int, int], stop: bool
    ) -> Meeting:
        """The means over all participants, from those of this process: one all-reduce."""
        first, cohort = place
        everyone = torch.ones(cohort, device=buffers.device) if weights is None else weights
        mine = everyone[first : first + len(buffers)]
        sums = [torch.tensordot(mine.to(t.dtype), t, dims=1) for t in (*decoded, buffers)]
        *sums, stops = self.add([*sums, torch.full((1,), float(stop)).to(buffers)])
        mean = iter(t / cohort for t in sums[:-1])
        averaged = messages.each(decoded, lambda t: next(mean))
        return Meeting(averaged, sums[-1] / everyone.sum().to(sums[-1]), bool(stops > 0))

    def merge(self, seen: Evaluation) -> Evaluation:
        """The evaluation of the whole problem from those of the processes' shards."""
        return merge(self, seen)

    def add(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the processes, by one all-reduce of everything in one flat tensor."""
        flat = torch.cat([t.reshape(-1) for t in tensors])  # in the widest of the dtypes
        dist.all_reduce(flat)
        parts = flat.split_with_sizes([t.numel() for t in tensors])
        return [p.view(t.shape).to(t.dtype) for p, t in zip(parts, tensors, strict=True)]

    def totals(self, counter: Counter, device: torch.device) -> Counter:
        """Work and bytes of all processes."""
        total = torch.tensor(dataclasses.astuple(counter), dtype=torch.int64, device=device)
        dist.all_reduce(total)
        return Counter(*total.tolist())

    def agree(self, stop: bool, device: torch.device) -> bool:
        """Whether any process wants to stop."""
        wanted = torch.tensor([int(stop)], device=device)
        dist.all_reduce(wanted)
        return bool(wanted.item())

    def wait(self) -> None:
        """Go on when all processes are here."""
        dist.barrier()


def join(distributed: bool | None, device: torch.device) -> Group | Alone:
    """The group of processes that this one belongs to.

    ``None`` takes the group that the program has initialised, if there is one; ``True`` insists on a group, and
    initialises it as ``torchrun`` describes it; ``False`` ignores it.
    """
    if distributed is False or not dist.is_available():
        return Alone()
    if not dist.is_initialized():
        if distributed is None:
            return Alone()
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise ValueError(
                "distributed = True, but there is no process group; start the program with torchrun, "
                "or call torch.distributed.init_process_group first"
            )
        if device.type == "cuda" and device.index is None and torch.cuda.device_count():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        dist.init_process_group(_backend(device))
        atexit.register(_leave)
    return Group(dist.get_rank(), dist.get_world_size()) if dist.get_world_size() > 1 else Alone()


def _backend(device: torch.device) -> str:
    """NCCL between GPUs, which refuses two processes on one; gloo carries tensors of a shared GPU through the host."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if device.type == "cuda" and here <= torch.cuda.device_count() else "gloo"


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(problem: Problem, group: Group, dtype: torch.dtype, device: torch.device) -> Smooth:
    """The functions of this process's clients, with their weights in the whole problem: parts of a sum."""
    silos = problem.silos
    n = len(silos)
    if n < group.size:
        raise ValueError(f"{n} clients cannot be shared by {group.size} processes; start at most {n}")
    mine, weights = group.span(n), problem.weights
    if isinstance(problem.loss, Loss):
        return Linear(
            _part(silos, mine, None),
            problem.loss.adapt(silos),
            bias=problem.bias,
            weights=weights[slice(*mine)],
            dtype=dtype,
            device=device,
            measures=problem.measures,
        )
    assert problem.model is not None
    options, most = problem.options, problem.options.evaluation_samples
    if most is not None:  # as many samples of each client as in one process
        options = dataclasses.replace(options, evaluation_samples=-(-most // n) * (mine.stop - mine.start))
    return Network(
        _part(silos, mine, most),
        problem.model,
        problem.loss,
        options,
        weights=weights[slice(*mine)],
        dtype=dtype,
        device=device,
        measures=problem.measures,
    )


def _part(silos: Silos, mine: Span, most: int | None) -> Silos:
    """The silos of some consecutive clients; they are views, and keep their numbers. Held-out samples are shared."""
    first, last = silos.offsets[mine.start], silos.offsets[mine.stop]
    held: dict[str, Any] = {}
    shifts = {}
    for part, (X, y) in silos.held_out.items():
        seen = _seen(len(y), len(silos), mine, most)
        held[part] = (X[seen], y[seen]) if len(seen) else None
        if part in silos.held_margin_offsets:
            shifts[part] = silos.held_margin_offsets[part][seen]
    return dataclasses.replace(
        silos,
        features=silos.features[first:last],
        targets=silos.targets[first:last],
        offsets=tuple(o - first for o in silos.offsets[mine.start : mine.stop + 1]),
        names=silos.names[slice(*mine)],
        ids=silos.ids[slice(*mine)],
        weights=None if silos.weights is None else silos.weights[first:last],
        margin_offsets=None if silos.margin_offsets is None else silos.margin_offsets[first:last],
        held_margin_offsets=shifts,
        held_by={},
        **held,
    )


def _seen(total: int, n: int, mine: Span, most: int | None) -> Tensor:
    """The held-out samples, ``most`` of them, that the process of these clients of n evaluates."""
    count = total if most is None else min(total, most)
    return torch.from_numpy(spread(total, count)[count * mine.start // n : count * mine.stop // n])


def merge(group: Group, seen: Evaluation) -> Evaluation:
    """The evaluation of the whole problem from those of the processes' shards: rows of counts in their order."""
    loss, gradient = group.add([seen.loss, seen.gradient])
    each: list[dict[str, Tensor]] = [{} for _ in range(group.size)]
    dist.all_gather_object(each, {k: v.cpu() for k, v in seen.counts.items()})
    names = dict.fromkeys(name for counts in each for name in counts)
    counts = {name: torch.cat([one[name] for one in each if name in one]) for name in names}
    return Evaluation(loss, gradient, counts, seen.measures)
