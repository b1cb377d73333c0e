"""How good a classifier is: every measure from counts of its margins in bins, per site and over all.

In each bin and class a site counts its samples and sums their margins, probabilities and squares. The bins' edges
include those of probabilities 0.005, 0.010, ..., so that thresholds there are exact. Brier score is exact; AUROC and
AUPRC are bracketed; calibration uses the sums within bins. With samples at hand every sample can be its own bin, and
nothing is rounded: the same functions then give the exact values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite._validation import Count, Inside, as_vector, refuse, wrong_arguments
from fedcomposite.estimators.crossvalidate import CrossValidation
from fedcomposite.estimators.curves import average_precision, grouped, integrated_error, recalibrated
from fedcomposite.estimators.errors import Errors, margin_edges
from fedcomposite.estimators.sites import Local, Sites
from fedcomposite.problems import Problem
from fedcomposite.problems.loss import Loss
from fedcomposite.problems.losses import Logistic
from fedcomposite.problems.requests import ALL, Request, Rows, Sums, residuals, scores
from fedcomposite.runtime.fit import check_given

Floats = npt.NDArray[np.float64]

_BINS = 1024
_ROUNDING = 1e-10  # variances of probabilities up to this may be rounding
_WIDEST = 2.0  # most that margins of a bin are taken to deviate
_NAMES = (
    *("samples", "positives", "auroc", "auroc_error", "auprc", "auprc_error", "brier"),
    *("calibration_slope", "calibration_intercept", "ici"),
)


def edges_of(bins: int = _BINS) -> Tensor:
    """Edges of the bins of margins: even in z / (1 + |z|), and those of probabilities in steps of 0.005."""
    place = torch.linspace(-1, 1, bins + 1, dtype=torch.float64)[1:-1]
    p = torch.arange(1, 200, dtype=torch.float64) / 200
    made: Tensor = torch.unique(torch.cat([place / (1 - place.abs()), torch.logit(p)]))
    return made


@dataclass(frozen=True)
class Quality:
    """The measures of one site, or of all; ``counts`` is ``(2, bins, 4)``, class 0 first."""

    counts: Tensor
    edges: Tensor

    @property
    def _n(self) -> tuple[Floats, Floats]:
        """Samples of class 0 and of class 1 in each bin, the largest margins first."""
        zeros, ones = self.counts[..., 0].numpy()[:, ::-1]
        return zeros, ones

    @property
    def samples(self) -> float:
        """How many, or their weight."""
        return float(self.counts[..., 0].sum())

    @property
    def positives(self) -> float:
        """How many are of class 1."""
        return float(self.counts[1, :, 0].sum())

    @property
    def auroc(self) -> float:
        """The area under the ROC curve; those in one bin count one half."""
        zeros, ones = self._n
        below = zeros.sum() - zeros.cumsum() + zeros / 2
        pairs = zeros.sum() * ones.sum()
        return float((ones * below).sum() / pairs) if pairs else math.nan

    @property
    def auroc_error(self) -> float:
        """Most that bins can have changed it: half the share of pairs that meet in one."""
        zeros, ones = self._n
        pairs = zeros.sum() * ones.sum()
        return float((zeros * ones).sum() / (2 * pairs)) if pairs else math.nan

    @property
    def auprc(self) -> float:
        """Average precision."""
        return average_precision(*self._n)[0]

    @property
    def auprc_error(self) -> float:
        """Most that bins can have changed it."""
        return average_precision(*self._n)[1]

    @property
    def brier(self) -> float:
        """The mean squared error of the probabilities, exact."""
        (_, _, _, squares), (ones, _, p, of_ones) = self.counts.sum(1).tolist()
        return (squares + of_ones - 2 * p + ones) / self.samples if self.samples else math.nan

    @property
    def _means(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Of the bins with samples: mean margin, mean probability, samples, positives."""
        both = self.counts.sum(0).numpy()
        some = both[:, 0] > 0
        n = both[some, 0]
        return both[some, 1] / n, both[some, 2] / n, n, self.counts[1, :, 0].numpy()[some]

    @property
    def _class_means(self) -> tuple[Floats, Floats, Floats]:
        """Margins that stand for those of each class in each bin: their mean, less and plus their deviation.

        So the sum of margins of class 1, on which the slope hangs, is exact however wide the bins are. The deviation
        follows from that of the probabilities, p (1 - p) times it. With them: samples and positives.
        """
        cells = self.counts.flatten(0, 1).numpy()
        ones = np.repeat([0.0, 1.0], self.counts.shape[1])[cells[:, 0] > 0]
        n, z, p, squares = cells[cells[:, 0] > 0].T
        z, p = z / n, p / n
        spread = np.maximum(squares / n - p**2, 0.0)
        off = np.sqrt(np.where(spread > _ROUNDING, spread, 0.0)) / np.maximum(p * (1 - p), _ROUNDING)
        off = np.minimum(off, _WIDEST)
        return np.concatenate([z - off, z + off]), np.tile(n / 2, 2), np.tile(ones * n / 2, 2)

    @property
    def calibration_slope(self) -> float:
        """The slope of a logistic regression of the outcome on the margin; 1 if calibrated."""
        return recalibrated(*self._class_means)[1]

    @property
    def calibration_intercept(self) -> float:
        """The intercept of one with slope 1, calibration in the large; 0 if calibrated."""
        return recalibrated(*self._class_means, slope=False)[0]

    @property
    def ici(self) -> float:
        """The integrated calibration index: the mean distance from probabilities to a smooth curve of outcomes."""
        _, p, n, ones = self._means
        return integrated_error(p, n, ones)

    def calibration(self, groups: Count = 10) -> pd.DataFrame:
        """The calibration curve in groups of about equal size: mean predicted and observed share."""
        refuse(wrong_arguments(Quality.calibration, {"groups": groups}))
        _, p, n, ones = self._means
        return grouped(n, n * p, ones, groups)

    def roc(self) -> pd.DataFrame:
        """False and true positive rates, one row per bin."""
        zeros, ones = (np.concatenate([[0.0], v.cumsum()]) / v.sum() for v in self._n)
        return pd.DataFrame({"false_positive_rate": zeros, "true_positive_rate": ones})

    def confusion(self, threshold: Inside = 0.5) -> dict[str, float]:
        """Samples by outcome and prediction, with the rates that follow.

        Between two edges of bins the lower one is taken; probabilities in steps of 0.005 are edges.
        """
        refuse(wrong_arguments(Quality.confusion, {"threshold": threshold}))
        z = math.log(threshold / (1 - threshold))
        first = int(torch.searchsorted(self.edges, torch.tensor(z + 1e-9, dtype=torch.float64), right=True))
        above = self.counts[:, first:, 0].sum(1)
        below = self.counts[:, :first, 0].sum(1)
        (fp, tp), (tn, fn) = above.tolist(), below.tolist()
        named = {"true_positives": tp, "false_positives": fp, "true_negatives": tn, "false_negatives": fn}
        rates = {"sensitivity": (tp, tp + fn), "specificity": (tn, tn + fp), "precision": (tp, tp + fp)}
        rates |= {"negative_predictive_value": (tn, tn + fn), "accuracy": (tp + tn, self.samples)}
        return named | {k: a / b if b else math.nan for k, (a, b) in rates.items()}

    def decision_curve(self, thresholds: Sequence[float] | None = None) -> pd.DataFrame:
        """Net benefit of the model, of treating everyone and of treating no one (Vickers & Elkin 2006)."""
        chosen = np.arange(1, 100) / 100 if thresholds is None else np.asarray(thresholds)
        seen = [self.confusion(t) for t in chosen]
        odds = chosen / (1 - chosen)
        tp, fp = (np.array([s[k] for s in seen]) / self.samples for k in ("true_positives", "false_positives"))
        share = self.positives / self.samples
        everyone = share - (1 - share) * odds
        return pd.DataFrame({"threshold": chosen, "model": tp - fp * odds, "everyone": everyone, "no one": 0.0})

    def summary(self) -> dict[str, float]:
        """The numbers in one line."""
        return {name: float(getattr(self, name)) for name in _NAMES}


@dataclass(frozen=True)
class Report:
    """The quality of a model at each site, and over all."""

    overall: Any
    """:class:`Quality` of a logistic model, :class:`Errors` of a regression."""
    by_site: dict[str, Any]

    @property
    def table(self) -> pd.DataFrame:
        """One row per site and one for all."""
        rows = {**self.by_site, "all": self.overall}
        return pd.DataFrame({name: one.summary() for name, one in rows.items()}).T


def quality(
    problem: Problem,
    x: Any,
    *,
    part: Literal["train", "validation", "test"] = "train",
    choice: str | float = "min",
    exact: bool = False,
    bins: Count = _BINS,
    sites: Sites | None = None,
) -> Report:
    """Measure a logistic model or a regression on the samples it was made from, on a held-out part, or on new data.

    Parameters
    ----------
    problem : Problem
        With the loss ``"logistic"`` or that of a regression; for new data, one with the new silos and the same
        features.
    x : Tensor, array or CrossValidation
        The model. Of a cross-validation every sample is scored by the model of its fold, which has not seen it.
    part : {"train", "validation", "test"}
        Whose samples.
    choice : str or float
        The strength of a cross-validation's models; as in :meth:`CrossValidation.index`.
    exact : bool
        Every sample in its own bin; only for samples at hand.
    bins : int
        How many bins; of a logistic model 199 more begin at probabilities in steps of 0.005.
    sites : Sites, optional
        Who answers; one exchange, of which each site's counts are kept apart. For a regression two: the first asks for
        the mean and the spread of the targets, by which bins are laid.
    """
    folds = isinstance(x, CrossValidation)
    check_given(quality, {k: v for k, v in locals().items() if not (k == "x" and folds)})
    x = x if folds else as_vector(x).double()
    if not (isinstance(problem.loss, Logistic) or is_regression(problem)):
        raise ValueError(f"quality is measured of logistic models and regressions; {problem.loss} is none of them")
    if exact and sites is not None:
        raise ValueError("exact = True needs the samples, which sites keep")
    where = Local(problem) if sites is None else sites
    pairs = _models(x, choice)
    every = _every_margin(where, pairs, part) if exact and isinstance(where, Local) else None
    if isinstance(problem.loss, Loss) and not problem.loss.classifier:
        return _errors(problem.loss, where, pairs, part, every, bins)
    edges = edges_of(bins) if every is None else every
    asked: list[Request] = [scores(model, edges, part, rows) for model, rows in pairs]
    answers = [_summed(one) for one in where.each(asked)]
    each = {n: Quality(a, edges) for n, a in zip(where.names, answers, strict=True) if float(a[..., 0].sum()) > 0}
    if not each:
        raise ValueError(f"there are no samples in the part {part!r}")
    return Report(Quality(torch.stack(answers).sum(0), edges), each)


def is_regression(problem: Problem) -> bool:
    """Whether it is a linear model of numbers."""
    return isinstance(problem.loss, Loss) and not problem.loss.classifier


def _errors(
    loss: Loss, sites: Sites, pairs: list[tuple[Tensor, Rows]], part: str, edges: Tensor | None, bins: int
) -> Report:
    """The quality of a regression."""
    none = torch.zeros(0, dtype=torch.float64)
    [about] = sites.ask([residuals(pairs[0][0], none, part)])
    if not float(about["sums"][0]) > 0:
        raise ValueError(f"there are no samples in the part {part!r}, or no site tells of them")
    edges = margin_edges(loss, about["sums"], bins) if edges is None else edges
    told = sites.each([residuals(model, edges, part, rows) for model, rows in pairs])
    each = {name: Errors.told(one, loss) for name, one in zip(sites.names, told, strict=True)}
    known = {name: one for name, one in each.items() if one.samples > 0}
    return Report(Errors.all(list(known.values())), known)


def _models(x: Tensor | CrossValidation, choice: str | float) -> list[tuple[Tensor, Rows]]:
    if isinstance(x, Tensor):
        return [(x, ALL)]
    return [(models[x.index(choice)], rows.others) for models, rows in zip(x.models, x.rows, strict=True)]


def _summed(sums: list[Sums]) -> Tensor:
    return torch.stack([one["counts"] for one in sums]).sum(0)


def _every_margin(sites: Local, pairs: list[tuple[Tensor, Rows]], part: str) -> Tensor:
    """Edges with every margin in a bin of its own."""
    found = [silo.of_part(part).margins(model) for silo in sites.silos for model, _ in pairs]
    made: Tensor = torch.unique(torch.cat([*found, edges_of(1)]))
    return made
