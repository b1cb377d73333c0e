"""Counts and refusals that say nothing exact: they have noise, by a secret and by what is asked.

A question has the same noise whenever it is asked, and any other one has noise of its own: equal answers to different
questions would say that nobody is between them. The ledger counts questions, so that little averages out.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NOISED_METRICS = ("accuracy", "balanced_accuracy", "f1", "brier", "auc", "calibration_error")
"""Metrics that count samples at a model, or add up what is no straight line in their outcomes."""
SHIFT = 1.0
"""The standard deviation of the noise of a sum of probabilities over a class: what a patient adds is 0 to 1."""
_SHAPE, _SPREAD = 3.0, 0.2  # of the margin's slack; its density is flat zero where it begins


def generator(seed: int) -> np.random.Generator:
    """Random numbers of one question."""
    return np.random.Generator(np.random.Philox(key=seed))


def slack(draw: np.random.Generator) -> float:
    """By what factor, at least 1, a margin may be larger than the largest one that is allowed."""
    return 1.0 + float(draw.gamma(_SHAPE, _SPREAD))


def noised(values: Tensor, scale: float, draw: np.random.Generator) -> Tensor:
    """Counts with whole numbers of Laplace noise, none below zero; a scale of 0 leaves them as they are."""
    if scale <= 0:
        return values
    noise = np.rint(draw.laplace(0.0, scale, tuple(values.shape)))
    return (values + torch.as_tensor(noise).to(values)).clamp(min=0.0)


def deviation(least: int) -> float:
    """The standard deviation of the noise of tallies of scores."""
    return least / 2


def metric_counts(name: str, row: Tensor, scale: float, draw: np.random.Generator) -> Tensor:
    """The counts of a metric, with noise on those that depend on a model; sums that are no counts stay as they are."""
    if name in ("accuracy", "balanced_accuracy", "f1"):
        hits, of = row.chunk(2, -1)
        if name == "f1":
            of = noised(of, scale, draw)
        return torch.cat([noised(hits, scale, draw).minimum(of / 2 if name == "f1" else of), of], -1)
    if name == "brier":
        total, of = row.chunk(2, -1)
        return torch.cat([noised(total, scale, draw).minimum(2 * of), of], -1)
    return noised(row, scale, draw) if name in ("auc", "calibration_error") else row
