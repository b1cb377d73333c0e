"""How good a model of times to an event is: pairs in order, and at a horizon who has had the event by then.

Every measure follows from sums over samples. Pairs are those of one site and stratum. At a horizon t samples with an
event by then are compared with those that went on without: weighted by one over the chance not to be censored at their
time, which each site takes from its own Kaplan-Meier curve of censoring (Graf et al. 1999; Uno et al. 2007), and
predicted with the site's own baseline. A site that was not among those that the model was made from, and new samples of
nobody, have the baseline of all the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite.problems.event_tables import steps
from fedcomposite.results import Result
from fedcomposite.runtime.driver import Driver
from fedcomposite.runtime.protocol import Request, Rows, Silo, Sums, concordance, horizon, risk_sums

Floats = npt.NDArray[np.float64]

GROUPS = np.arange(1, 20) / 20
"""Edges of groups of predicted probability in which calibration is told."""


@dataclass(frozen=True, repr=False)
class SurvivalQuality(Result):
    """The measures of one site, or of all."""

    pairs: Tensor
    """Those in order, of equal margins, and all, ``(3,)``."""
    counts: Tensor
    """Weight of the samples, their number, and weight of the events, ``(3,)``."""
    horizon: float = math.nan
    """The time that the other measures are about; NaN if none was asked for."""
    scores: Tensor | None = None
    """Weights of those with and without an event by then in bins of margins, ``(bins, 2)``."""
    error: Tensor | None = None
    """Sum of the weighted squared errors, and weight of the samples."""
    groups: Tensor | None = None
    """In groups of predicted probability: samples, predictions, weights of those with and without an event."""

    @classmethod
    def told(cls, answers: list[Sums], models: int, at: float) -> SurvivalQuality:
        """From answers, first the pairs of several models, then what they are at the horizon."""
        first, second = answers[:models], answers[models:]
        made = {key: torch.stack([one[key] for one in first]).sum(0) for key in ("pairs", "counts")}
        if not second:
            return cls(made["pairs"], made["counts"])
        more = {key: torch.stack([one[key] for one in second]).sum(0) for key in ("scores", "error", "groups")}
        return cls(made["pairs"], made["counts"], at, **more)

    @classmethod
    def all(cls, each: Sequence[SurvivalQuality]) -> SurvivalQuality:
        """Of all sites."""
        names = ["pairs", "counts"] if each[0].scores is None else ["pairs", "counts", "scores", "error", "groups"]
        sums = {name: torch.stack([getattr(one, name) for one in each]).sum(0) for name in names}
        return cls(horizon=each[0].horizon, **sums)

    @property
    def samples(self) -> float:
        """How many, or their weight."""
        return float(self.counts[0])

    @property
    def events(self) -> float:
        """How many events, or their weight."""
        return float(self.counts[2])

    @property
    def c_index(self) -> float:
        """Harrell's concordance index: the share of pairs in order; equal margins count one half."""
        right, tied, every = self.pairs.tolist()
        return (right + tied / 2) / every if every > 0 else math.nan

    @property
    def auroc(self) -> float:
        """The area under the ROC curve of events by the horizon (cumulative cases, dynamic controls)."""
        if self.scores is None:
            return math.nan
        cases, controls = self.scores.numpy().T
        both = cases.sum() * controls.sum()
        return float(cases @ (controls.cumsum() - controls / 2) / both) if both > 0 else math.nan

    @property
    def brier(self) -> float:
        """The mean squared error of the predicted probability, by the weights of censoring."""
        return float(self.error[0] / self.error[1]) if self.error is not None and self.error[1] > 0 else math.nan

    @property
    def predicted(self) -> float:
        """The mean predicted probability of an event by the horizon."""
        return float(self.groups[:, 1].sum() / self.groups[:, 0].sum()) if self.groups is not None else math.nan

    @property
    def observed(self) -> float:
        """The share of those with an event by the horizon, by the weights of censoring."""
        if self.groups is None:
            return math.nan
        cases, controls = self.groups[:, 2:].sum(0).tolist()
        return cases / (cases + controls) if cases + controls > 0 else math.nan

    def calibration(self, groups: int = 10) -> pd.DataFrame:
        """Predicted and observed shares of events by the horizon, in about so many groups of alike predictions."""
        if self.groups is None:
            return pd.DataFrame({"samples": [], "predicted": [], "observed": []})
        cells = self.groups.numpy()
        place = np.minimum(
            (np.cumsum(cells[:, 0]) - cells[:, 0] / 2) / max(cells[:, 0].sum(), 1e-300) * groups, groups - 1
        )
        sums = np.zeros((groups, 4))
        np.add.at(sums, place.astype(int), cells)
        sums = sums[(sums[:, 0] > 0) & (sums[:, 2:].sum(1) > 0)]
        share = sums[:, 2] / sums[:, 2:].sum(1)
        return pd.DataFrame({"samples": sums[:, 0], "predicted": sums[:, 1] / sums[:, 0], "observed": share})

    def untold(self, names: Sequence[str] | None = None) -> str:
        """What cannot be told for the width of its bounds: nothing, since there are none."""
        return ""

    def summary(self) -> dict[str, float]:
        """The numbers in one line."""
        made = {name: float(getattr(self, name)) for name in ("samples", "events", "c_index")}
        if self.scores is not None:
            names = ("horizon", "auroc", "brier", "predicted", "observed")
            made |= {name: float(getattr(self, name)) for name in names}
        return made

    def to_frame(self) -> pd.DataFrame:
        """:meth:`summary` as a table of one row."""
        return pd.DataFrame([self.summary()])

    def _line(self) -> str:
        said = f"{self.samples:g} samples, {self.events:g} events: C-index {self.c_index:.4g}"
        return said if self.scores is None else f"{said}, AUROC {self.auroc:.4g} at {self.horizon:g}"


def survival_quality(
    driver: Driver,
    pairs: Sequence[tuple[Tensor, Rows]],
    part: str,
    at: float | None,
    edges: Tensor,
    silos: Sequence[Silo] | None,
) -> dict[str, SurvivalQuality]:
    """The quality at each site that tells it, of models each with its rows; ``silos`` are those at hand, if any are."""
    asked: list[Request] = [concordance(x, part, rows) for x, rows in pairs]
    if at is not None:
        hazards = [_common(driver, x, rows, at, silos) if _elsewhere(rows, part) else -1.0 for x, rows in pairs]
        groups = torch.from_numpy(GROUPS)
        asked += [
            horizon(x, at, edges, groups, hazard, part, rows) for (x, rows), hazard in zip(pairs, hazards, strict=True)
        ]
    told = driver.told(asked)
    return {name: SurvivalQuality.told(one, len(pairs), math.nan if at is None else at) for name, one in told.items()}


def _elsewhere(rows: Rows, part: str) -> bool:
    """Whether samples may be of a site without any that the model was made from."""
    return part != "train" or (rows.kind == "site" and rows.held)


def _common(driver: Driver, x: Tensor, rows: Rows, at: float, silos: Sequence[Silo] | None) -> float:
    """The baseline hazard until a time of all sites that the model was made from, on a grid of up to hundred steps."""
    if silos is None:
        grid = at * torch.arange(1, 101, dtype=torch.float64) / 100
    else:
        times = torch.cat([silo.b[:, 0] for silo in silos])
        grid = torch.unique(torch.cat([times[times < at], torch.tensor([at], dtype=torch.float64)]))
    made_from = rows.others if rows.held else rows
    [sums] = driver.ask([risk_sums(x, grid, rows=made_from)])
    return float(steps(sums["events"], sums["sizes"]).sum())
