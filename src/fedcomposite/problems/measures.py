"""Which metrics are measured of a problem's models, and how rows of counts become entries of a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, final

import torch
from torch import Tensor

from fedcomposite.problems.metrics import ANY, METRICS, Accuracy, Kind, Metric, per_client

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")

Counts = dict[str, Tensor]
"""Rows of counts by ``"part/metric"``, ``(m, k)`` each. ``"part/samples"`` ``(m, 2)`` says how many samples each row
saw, and how many there are. The training part has a row per client, a held-out part one row of each party that has it.
"""


@final
@dataclass(frozen=True)
class MeanLoss(Metric):
    """The mean of the samples' losses, which take the place of outputs."""

    name = "loss"
    larger_is_better = False

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        return per_client([outputs, 1.0], owner, n)

    def value(self, counts: Tensor) -> Tensor:
        return counts[..., 0] / counts[..., 1]


@dataclass(frozen=True)
class CountRows:
    """Samples of some rows of counts: whose each one is, and how many each row sees and has."""

    owner: Tensor  # (N,), the row of each sample
    samples: Tensor  # (m, 2), seen and held

    @classmethod
    def of(cls, seen: Sequence[int], held: Sequence[int], device: torch.device) -> CountRows:
        """Rows of consecutive samples."""
        samples = torch.tensor([list(seen), list(held)], dtype=torch.float64).T.contiguous()
        owner = torch.arange(len(seen)).repeat_interleave(torch.tensor(seen))
        return cls(owner.to(device), samples)


class ScoringLoss(Protocol):
    """What a loss says about its model's outputs."""

    @property
    def classifier(self) -> bool:
        """Whether outputs stand for classes, so that accuracy is measured and not the loss."""

    @property
    def probabilistic(self) -> bool:
        """Whether outputs are logarithms of odds."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of problems that its metrics are for."""


@dataclass(frozen=True)
class Measures:
    """What is measured of a problem's models."""

    metrics: tuple[Metric, ...] = ()
    loss: bool = False
    """Whether the loss is measured on held-out parts, as it is where there is no accuracy."""
    clients: bool = False
    """Whether a record has the least, mean and largest value over the clients."""

    @classmethod
    def of(cls, loss: ScoringLoss, asked: Sequence[str | Metric] = (), *, clients: bool = False) -> Measures:
        """Accuracy for classifiers and the loss on held-out parts otherwise, and the metrics asked for."""
        return cls(_chosen(loss, asked), loss=not loss.classifier, clients=clients or bool(asked))

    def count(self, part: Part, outputs: Tensor, targets: Tensor, rows: CountRows) -> Counts:
        """The counts of one part of the data."""
        n = len(rows.samples)
        made = {f"{part}/{m.name}": m.counts(outputs, targets, rows.owner, n) for m in self.metrics}
        return {f"{part}/samples": rows.samples} | made

    def summarise(self, counts: Mapping[str, Tensor]) -> dict[str, float | int]:
        """Entries of a record; see :func:`summarise`."""
        metrics = (*self.metrics, MeanLoss()) if self.loss else self.metrics
        return summarise(metrics, counts, clients=self.clients)

    def widths(self, outputs: int) -> dict[str, int]:
        """How many counts each metric has, by name, for a model with so many outputs per sample (1: a margin)."""
        none = torch.zeros(0, dtype=torch.long)
        empty = torch.zeros(0) if outputs == 1 else torch.zeros(0, outputs)
        found = {m.name: m.counts(empty, none, none, 1).shape[1] for m in self.metrics}
        return {"samples": 2} | found | ({"loss": 2} if self.loss else {})


def summarise(
    metrics: Iterable[Metric], counts: Mapping[str, Tensor], *, clients: bool = False
) -> dict[str, float | int]:
    """Entries of a record from rows of counts, whoever made them: ``train_accuracy``, ``test_auc``, ...

    A row that saw some of its samples only stands for all of them. With ``clients`` there are also
    ``evaluated_samples`` and ``client_<name>_min``, ``_mean`` and ``_max`` over the clients' training samples; clients
    for whom a metric is not defined are left out.
    """
    chosen, made = tuple(metrics), dict[str, float | int]()
    if clients and "train/samples" in counts:
        made["evaluated_samples"] = int(counts["train/samples"][:, 0].sum())
    for part in PARTS:
        for metric in chosen:
            if (rows := counts.get(f"{part}/{metric.name}")) is None:
                continue
            table = rows.cpu()
            total = _whole(table, counts.get(f"{part}/samples")).sum(0) if len(table) > 1 else table[0]
            made[f"{part}_{metric.name}"] = float(metric.value(total))
            made |= {f"{part}_{metric.name}_{k}": v for k, v in metric.details(total).items()}
            if clients and part == "train":
                each = metric.value(table)
                there = each[~each.isnan()]
                least, most = (float(there.min()), float(there.max())) if len(there) else (torch.nan, torch.nan)
                among = {"min": least, "mean": float(there.mean()), "max": most}
                made |= {f"client_{metric.name}_{k}": v for k, v in among.items()}
    return made


def _whole(table: Tensor, samples: Tensor | None) -> Tensor:
    """Counts as if every row had seen all of its samples."""
    if samples is None:
        return table
    seen, held = samples.cpu().unbind(1)
    return table if torch.equal(seen, held) else table / seen.unsqueeze(1) * held.unsqueeze(1)


def _chosen(loss: ScoringLoss, asked: Sequence[str | Metric]) -> tuple[Metric, ...]:
    """The metrics of a problem, or one line about what does not fit."""
    if isinstance(asked, str) or not isinstance(asked, Sequence):
        raise ValueError(f"metrics = {asked!r}, must be a list of names or metrics, such as ['auc', 'log_loss']")
    chosen: list[Metric] = [Accuracy()] if loss.classifier else []
    for one in asked:
        if isinstance(one, type):
            raise ValueError(f"metrics: {one.__name__} is a class: make one of it, {one.__name__}()")
        metric = METRICS[one]() if isinstance(one, str) else one
        if not isinstance(metric, Metric):
            raise ValueError(f"unknown metric {one!r} (known: {', '.join(sorted(METRICS))})")
        if tuple(metric.fits) != ANY and not set(metric.fits) & set(loss.kinds):
            fitting, here = " and ".join(metric.fits), " or ".join(loss.kinds) or "other"
            raise ValueError(f"the metric {metric.name!r} is for {fitting} problems; with this loss it is {here}")
        if metric.needs_probabilities and not loss.probabilistic:
            raise ValueError(f"the metric {metric.name!r} needs probabilities, which {loss} does not give")
        if any(m.name == metric.name and m != metric for m in chosen) or metric.name in ("loss", "samples"):
            raise ValueError(f"the name {metric.name!r} of a metric is taken: give it another name")
        if metric not in chosen:
            chosen.append(metric)
    return tuple(chosen)
