"""Metrics as additive counts: what is added up over samples, clients and parties, and what the sums mean.

A metric is defined once, by two small functions: the counts of each client's samples, and the value that belongs to a
sum of counts. Whoever holds some of the clients (a simulator, a process of a group, a site) makes the rows of its own;
rows of several parties are put one below the other, and
:func:`fedcomposite.problems.measures.summarise` turns all of them into entries of a record.

What a metric sees
------------------
===========  =======================================================  ======================================
problem      ``outputs``                                              ``targets``
===========  =======================================================  ======================================
binary       margins ``(N,)``, or two outputs ``(N, 2)``              0 or 1
multiclass   one output per class, ``(N, C)``                         the class's number, 0, ..., C - 1
labels       one output per class, ``(N, ..., C)``                    class numbers ``(N, ...)``, < 0: none
regression   predictions ``(N,)`` (exp of the margin for poisson)     numbers
survival     margins ``(N,)``                                         time, event, entry, stratum, ``(N, 5)``
===========  =======================================================  ======================================

:func:`predicted`, :func:`margin` and :func:`probabilities` read the outputs of classifiers in either form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from fedcomposite._validation import Count, validate
from fedcomposite.problems.concordance import pairs
from fedcomposite.registry import Registry

Kind = Literal["binary", "multiclass", "labels", "regression", "survival"]

CLASSIFIERS: tuple[Kind, ...] = ("binary", "multiclass")
ANY: tuple[Kind, ...] = ("binary", "multiclass", "labels", "regression", "survival")
"""What a metric fits unless it says otherwise; it is then measured with any loss, of a model's raw outputs, too."""


class Metric(ABC):
    """Additive counts of samples, and the value of a sum of them.

    Subclasses are frozen dataclasses; their fields, if any, are options.
    """

    name: ClassVar[str]
    """Its name in records: ``test_<name>``, ``client_<name>_min``, ..."""
    fits: ClassVar[tuple[Kind, ...]] = ANY
    """The problems that it is for."""
    needs_probabilities: ClassVar[bool] = False
    """Whether it reads outputs as logarithms of odds, which those of a hinge loss are not."""
    larger_is_better: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate(self)

    @abstractmethod
    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        """The counts of n clients, ``(n, k)`` in float64; ``owner`` is each sample's client. No sample gives zeros."""

    @abstractmethod
    def value(self, counts: Tensor) -> Tensor:
        """The values ``(...)`` that belong to sums of counts ``(..., k)``; NaN where they are not defined."""

    def details(self, counts: Tensor) -> dict[str, float]:
        """Further numbers about the value of one sum ``(k,)``, for a record: ``<part>_<name>_<key>``."""
        return {}

    def exact(self, outputs: Tensor, targets: Tensor) -> float:
        """The value of samples that are all at hand."""
        return float(self.value(self.counts(outputs, targets, torch.zeros(len(targets), dtype=torch.long), 1)[0]))


def per_client(values: Tensor | Sequence[Tensor | float], owner: Tensor, n: int) -> Tensor:
    """Sums ``(n, k)`` of values of the samples, ``(N, k)`` or k columns ``(N,)``, over each client's; in float64.

    A number in place of a column is that of every sample.
    """
    columns = values.unbind(1) if isinstance(values, Tensor) else values
    if n == 1:
        row = [_sum(c) if isinstance(c, Tensor) else c * len(owner) for c in columns]
        return torch.tensor([row], dtype=torch.float64)
    whole = [c.double() if isinstance(c, Tensor) else torch.full(owner.shape, c, dtype=torch.float64) for c in columns]
    if owner.device.type == "cpu":
        return torch.stack([torch.bincount(owner, c, minlength=n) for c in whole], 1).double()
    table = torch.zeros(n, len(whole), dtype=torch.float64, device=owner.device)
    each = torch.stack([c.to(owner.device) for c in whole], 1)
    return table.index_put_((owner,), each, accumulate=True)  # sorts, and so adds in a fixed order


def _sum(values: Tensor) -> float:
    return float(values.count_nonzero() if values.dtype == torch.bool else values.sum(dtype=torch.float64))


def predicted(outputs: Tensor) -> Tensor:
    """The predicted class: the largest output, the first of equals; of a margin its sign, where zero counts as 1."""
    return (outputs >= 0).long() if outputs.ndim == 1 else outputs.argmax(-1)


def margin(outputs: Tensor) -> Tensor:
    """The margin of class 1 against class 0."""
    return outputs if outputs.ndim == 1 else outputs[:, 1] - outputs[:, 0]


def probabilities(outputs: Tensor) -> Tensor:
    """The classes' probabilities ``(N, C)`` in float64."""
    z = outputs.double()
    return torch.stack([torch.sigmoid(-z), torch.sigmoid(z)], -1) if z.ndim == 1 else torch.softmax(z, -1)


def _indicators(labels: Tensor, outputs: Tensor) -> Tensor:
    """Which class each label is, ``(N, C)``."""
    classes = 2 if outputs.ndim == 1 else outputs.shape[-1]
    return labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)


def _mean_over(values: Tensor, there: Tensor) -> Tensor:
    """The mean of the values that are there, over the last axis; NaN where there are none."""
    return torch.where(there, values, 0.0).sum(-1) / there.sum(-1)


# -- classification ---------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Accuracy(Metric):
    """The share of samples whose class is predicted; of samples with several labels each, the mean of their shares."""

    name = "accuracy"
    fits = (*CLASSIFIERS, "labels")

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        hits = predicted(outputs) == targets
        if targets.ndim > 1:
            there = (targets >= 0).flatten(1)
            hits = (hits.flatten(1) & there).sum(1).double() / there.sum(1).clamp(min=1)
        return per_client([hits, 1.0], owner, n)

    def value(self, counts: Tensor) -> Tensor:
        return counts[..., 0] / counts[..., 1]


@final
@dataclass(frozen=True)
class BalancedAccuracy(Metric):
    """The mean over the classes of the share of their samples that are predicted; empty classes are left out."""

    name = "balanced_accuracy"
    fits = CLASSIFIERS

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        """Hits of each class, then its samples."""
        true = _indicators(targets, outputs)
        hits = true & (predicted(outputs) == targets).unsqueeze(-1)
        return per_client(torch.cat([hits, true], -1), owner, n)

    def value(self, counts: Tensor) -> Tensor:
        hits, samples = counts.chunk(2, -1)
        return _mean_over(hits / samples, samples > 0)


@final
@dataclass(frozen=True)
class F1(Metric):
    """The mean over the classes of 2 TP / (2 TP + FP + FN); classes neither found nor predicted are left out."""

    name = "f1"
    fits = CLASSIFIERS

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        """Hits of each class, then twice its hits and its errors of both kinds."""
        true, guessed = _indicators(targets, outputs), _indicators(predicted(outputs), outputs)
        return per_client(torch.cat([true & guessed, true.long() + guessed.long()], -1), owner, n)

    def value(self, counts: Tensor) -> Tensor:
        """The mean of the classes' scores (macro average)."""
        hits, both = counts.chunk(2, -1)
        return _mean_over(2 * hits / both, both > 0)


@final
@dataclass(frozen=True)
class AUC(Metric):
    """The probability that a sample of class 1 has a larger margin than one of class 0; equal ones count one half.

    Over silos it comes from counts in bins, even in z / (1 + |z|) of the margin z. Within a bin all margins count as
    equal, so that it is off by at most half the share of pairs that meet in one bin: ``<part>_auc_error``.
    :func:`exact_auc` needs the samples.
    """

    bins: Count = 1024

    name = "auc"
    fits = ("binary",)

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        """Samples of class 1 in each bin, then those of class 0."""
        z = margin(outputs).double()
        place = torch.where(z.isinf(), z.sign(), z / (1 + z.abs()))
        at = ((place + 1) * (self.bins / 2)).long().clamp(0, self.bins - 1)
        column = torch.where(targets > 0, at, at + self.bins)
        table = torch.bincount(owner * (2 * self.bins) + column, minlength=2 * self.bins * n).double().view(n, -1)
        table[owner[z.isnan()]] = torch.nan
        return table

    def value(self, counts: Tensor) -> Tensor:
        """The share of pairs in order, half of those in one bin among them."""
        ones, zeros = counts.chunk(2, -1)
        below = zeros.cumsum(-1) - zeros / 2
        return (ones * below).sum(-1) / (ones.sum(-1) * zeros.sum(-1))

    def details(self, counts: Tensor) -> dict[str, float]:
        """The bound on the difference from the exact value."""
        return {"error": float(self.error(counts))}

    def error(self, counts: Tensor) -> Tensor:
        """Half the share of pairs that meet in one bin."""
        ones, zeros = counts.chunk(2, -1)
        return (ones * zeros).sum(-1) / (2 * ones.sum(-1) * zeros.sum(-1))

    def exact(self, outputs: Tensor, targets: Tensor) -> float:
        return exact_auc(margin(outputs), targets)


def exact_auc(scores: Any, targets: Any, weights: Any = None) -> float:
    """The area under the ROC curve of scores for targets 0 (or -1) and 1; NaN where one class is missing.

    ``weights`` say how much each sample counts; 1 if left out.

    >>> exact_auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
    0.75
    """
    z = torch.as_tensor(scores, dtype=torch.float64).detach().cpu()
    positive = torch.as_tensor(targets).detach().cpu() > 0
    if bool(z.isnan().any()):
        return float("nan")
    values, level = torch.unique(z, return_inverse=True)
    w = torch.ones_like(z) if weights is None else torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    ones, zeros = (torch.bincount(level[of], w[of], len(values)).double() for of in (positive, ~positive))
    return float((ones * (zeros.cumsum(0) - zeros / 2)).sum() / (ones.sum() * zeros.sum()))


@final
@dataclass(frozen=True)
class LogLoss(Metric):
    """The mean of -log of the probability given to the true class."""

    name = "log_loss"
    fits = CLASSIFIERS
    needs_probabilities = True
    larger_is_better = False

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        z = outputs.double()
        if z.ndim == 1:
            losses = -logsigmoid(torch.where(targets > 0, z, -z))
        else:
            losses = -(log_softmax(z, -1).gather(-1, targets.long().unsqueeze(-1)).squeeze(-1))
        return per_client([losses, 1.0], owner, n)

    def value(self, counts: Tensor) -> Tensor:
        return counts[..., 0] / counts[..., 1]


@final
@dataclass(frozen=True)
class Brier(Metric):
    """The mean squared error of the probabilities: of class 1 for two classes, summed over the classes for more."""

    name = "brier"
    fits = CLASSIFIERS
    needs_probabilities = True
    larger_is_better = False

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        p = probabilities(outputs)
        squares = (p - _indicators(targets, outputs).double()).square().sum(-1)
        squares = squares / 2 if p.shape[-1] == 2 else squares
        return per_client([squares, 1.0], owner, n)

    def value(self, counts: Tensor) -> Tensor:
        return counts[..., 0] / counts[..., 1]


@final
@dataclass(frozen=True)
class Calibration(Metric):
    """Expected calibration error: |predicted - observed| share, averaged over bins of the predicted probability.

    For two classes it is about the probability of class 1; for more about that of the predicted class.
    """

    bins: Count = 15

    name = "calibration_error"
    fits = CLASSIFIERS
    needs_probabilities = True
    larger_is_better = False

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        """Samples in each bin, then their predicted probabilities, then how often it was so."""
        p = probabilities(outputs)
        said, so = (p[:, 1], targets > 0) if p.shape[-1] == 2 else (p.amax(-1), predicted(outputs) == targets)
        edges = torch.linspace(0, 1, self.bins + 1, dtype=torch.float64, device=p.device)[1:-1]
        inside = _indicators(torch.bucketize(said.contiguous(), edges), said.new_empty(0, self.bins))
        parts = [inside, torch.where(inside, said.unsqueeze(-1), 0.0), inside & so.unsqueeze(-1)]
        return per_client(torch.cat([v.double() for v in parts], -1), owner, n)

    def value(self, counts: Tensor) -> Tensor:
        samples, said, so = counts.chunk(3, -1)
        return (said - so).abs().sum(-1) / samples.sum(-1)

    def table(self, counts: Tensor) -> pd.DataFrame:
        """The reliability table of one sum: for each bin its samples, mean predicted and observed share."""
        samples, said, so = counts.double().cpu().chunk(3, -1)
        edges = torch.linspace(0, 1, self.bins + 1, dtype=torch.float64)
        columns = {"from": edges[:-1], "to": edges[1:], "samples": samples}
        columns |= {"predicted": said / samples, "observed": so / samples}
        return pd.DataFrame({k: v.numpy() for k, v in columns.items()})


# -- several labels per sample: pixels, tokens ------------------------------------------------------------------------


def _overlaps(outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
    """Of each class the labels that are hit, predicted and true, ``(n, 3 C)``; labels below 0 count for nothing."""
    true, guessed = _a_row_each(targets), _a_row_each(predicted(outputs) if len(outputs) else targets)
    parts: list[Tensor] = []
    for c in range(outputs.shape[-1]):
        a, b = (guessed == c) & (true >= 0), true == c
        parts += [(a & b).sum(1), a.sum(1), b.sum(1)]
    return per_client([p.double() for p in parts], owner, n)


def _a_row_each(labels: Tensor) -> Tensor:
    """The labels of each sample as a row."""
    return labels.flatten(1) if labels.ndim > 1 else labels.unsqueeze(-1)


@final
@dataclass(frozen=True)
class IoU(Metric):
    """The mean over classes of the labels hit, as a share of those predicted or true; classes without any are left out.

    Counted over all labels of all samples, as segmentation benchmarks do.
    """

    name = "iou"
    fits = ("labels",)

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        """Hits, predicted and true labels of each class."""
        return _overlaps(outputs, targets, owner, n)

    def value(self, counts: Tensor) -> Tensor:
        hits, guessed, true = (counts[..., k::3] for k in range(3))
        union = guessed + true - hits
        return _mean_over(hits / union, union > 0)


@final
@dataclass(frozen=True)
class Dice(Metric):
    """The mean over classes of 2 hits / (predicted + true labels); classes without any are left out."""

    name = "dice"
    fits = ("labels",)

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        """Hits, predicted and true labels of each class."""
        return _overlaps(outputs, targets, owner, n)

    def value(self, counts: Tensor) -> Tensor:
        hits, guessed, true = (counts[..., k::3] for k in range(3))
        return _mean_over(2 * hits / (guessed + true), guessed + true > 0)


@final
@dataclass(frozen=True)
class Perplexity(Metric):
    """exp of the mean negative log-likelihood of a label, over all labels of all samples."""

    name = "perplexity"
    fits = ("labels",)
    needs_probabilities = True
    larger_is_better = False

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        """The labels' negative log-likelihoods, and their number."""
        there = _a_row_each(targets >= 0)
        if not len(outputs):
            return per_client([there.sum(1)] * 2, owner, n)
        said = log_softmax(outputs.double(), -1).flatten(1, -2)
        lost = -said.gather(-1, _a_row_each(targets).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return per_client([torch.where(there, lost, 0.0).sum(1), there.sum(1).double()], owner, n)

    def value(self, counts: Tensor) -> Tensor:
        return (counts[..., 0] / counts[..., 1]).exp()


# -- regression -------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class R2(Metric):
    """1 - (sum of squared residuals) / (sum of squared deviations of the targets from their mean).

    Sums of squares lose digits where the mean of the targets is far larger than their deviation. Targets that are equal
    to rounding give 1 if they are met and 0 otherwise; a single sample gives NaN.
    """

    name = "r2"
    fits = ("regression",)

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        """Samples, sum of targets, of their squares, of squared residuals."""
        y = targets.double()
        return per_client([1.0, y, y.square(), (outputs.double() - y).square()], owner, n)

    def value(self, counts: Tensor) -> Tensor:
        samples, total, squares, residual = counts.unbind(-1)
        spread = squares - total.square() / samples
        constant = spread <= 1e-14 * squares
        ratio = torch.where(constant, (residual > 0).double(), residual / torch.where(constant, 1.0, spread))
        return torch.where(samples > 1, 1 - ratio, torch.nan)


@final
@dataclass(frozen=True)
class MAE(Metric):
    """The mean absolute error."""

    name = "mae"
    fits = ("regression",)
    larger_is_better = False

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        errors = (outputs.double() - targets.double()).abs()
        return per_client([errors, 1.0], owner, n)

    def value(self, counts: Tensor) -> Tensor:
        return counts[..., 0] / counts[..., 1]


# -- times to an event ------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class CIndex(Metric):
    """The share of pairs in which who has the event first has the larger margin; equal margins count one half.

    A pair is an event and a sample of the same client and stratum that was at risk then and had none (Harrell's
    concordance index). Pairs of different clients would need their times and margins in one place.
    """

    name = "c_index"
    fits = ("survival",)

    def counts(self, outputs: Tensor, targets: Tensor, owner: Tensor, n: int) -> Tensor:
        """Pairs in order, pairs of equals, and all pairs."""
        if not len(outputs):
            return torch.zeros(n, 3, dtype=torch.float64)
        b, who = targets.double().cpu().numpy(), owner.cpu().numpy()
        group = np.unique(np.stack([who, b[:, 3]], 1), axis=0, return_inverse=True)[1].reshape(-1)
        found = pairs(outputs.double().cpu().numpy(), b[:, 0], b[:, 1], b[:, 2], group)
        return torch.from_numpy(np.stack([np.bincount(who, v, n) for v in found], 1))

    def value(self, counts: Tensor) -> Tensor:
        right, tied, every = counts.unbind(-1)
        return (right + tied / 2) / every


def _accept(name: str, thing: Any) -> type[Metric]:
    if not (isinstance(thing, type) and issubclass(thing, Metric)) or thing.name != name:
        raise TypeError("it must be a Metric whose name is that of the entry point")
    return thing


METRICS: Registry[type[Metric]] = Registry(
    "metric",
    {
        m.name: m
        for m in (
            Accuracy,
            BalancedAccuracy,
            F1,
            AUC,
            LogLoss,
            Brier,
            Calibration,
            IoU,
            Dice,
            Perplexity,
            R2,
            MAE,
            CIndex,
        )
    },
    group="fedcomposite.metrics",
    accept=_accept,
)
