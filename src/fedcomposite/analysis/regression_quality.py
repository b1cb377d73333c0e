"""How good a regression is: every measure from sums over samples, and from sums in bins of its margins.

All of them follow from sums alone and are exact. Bins are for the curve of predicted and observed means. The
calibration slope of counts is found by Newton's method, from sums at each slope that it tries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite.analysis.curves import grouped, rate_slope
from fedcomposite.problems.loss import Loss
from fedcomposite.problems.losses import Absolute, LeastSquares, Poisson, Quantile
from fedcomposite.results import Result
from fedcomposite.runtime.driver import Driver
from fedcomposite.runtime.protocol import RESIDUALS, Rows, Sums, rates

Floats = npt.NDArray[np.float64]

_ROUNDING = 1e-12  # of a sum of squares; what is left below this of it is nothing


def margin_edges(loss: Loss, sums: Tensor, bins: int) -> Tensor:
    """Edges of bins of margins, around the mean of the targets and as wide as they are spread."""
    told = dict(zip(RESIDUALS, sums.tolist(), strict=True))
    mean = told["targets"] / told["weight"]
    if isinstance(loss, Poisson):
        middle, width = math.log(mean) if mean > 0 else 0.0, 1.0
    else:
        middle, width = mean, math.sqrt(max(told["target_squares"] / told["weight"] - mean**2, 0.0)) or 1.0
    place = torch.linspace(-1, 1, bins + 1, dtype=torch.float64)[1:-1]
    made: Tensor = torch.unique(middle + width * place / (1 - place.abs()))
    return made


@dataclass(frozen=True, repr=False)
class Errors(Result):
    """The measures of one site, or of all; ``counts`` is ``(1, bins, 3)``: weight, means, targets."""

    sums: Tensor
    """Those of :data:`RESIDUALS`."""
    counts: Tensor
    loss: Loss
    rate_slope: float = math.nan
    """The calibration slope of counts; see :func:`calibrated`."""

    @classmethod
    def told(cls, answers: list[Sums], loss: Loss) -> Errors:
        """From a site's answers, one for each of several models; absolute errors that it keeps are unknown."""
        sums = torch.stack([one["sums"] for one in answers]).sum(0)
        absolute, squares = RESIDUALS.index("absolute"), RESIDUALS.index("squares")
        if float(sums[absolute]) == 0 < float(sums[squares]):
            sums[absolute] = math.nan
        return cls(sums, torch.stack([one["counts"] for one in answers]).sum(0), loss)

    @classmethod
    def all(cls, each: list[Errors]) -> Errors:
        """Of all sites."""
        sums, counts = (torch.stack([getattr(one, name) for one in each]).sum(0) for name in ("sums", "counts"))
        return cls(sums, counts, each[0].loss)

    def _sum(self, name: str) -> float:
        return float(self.sums[RESIDUALS.index(name)])

    @property
    def samples(self) -> float:
        """How many, or their weight."""
        return self._sum("weight")

    @property
    def mean(self) -> float:
        """The mean of the targets."""
        return self._sum("targets") / self.samples

    @property
    def predicted(self) -> float:
        """The mean of what was predicted."""
        return self._sum("means") / self.samples

    @property
    def r2(self) -> float:
        """1 - (squared errors) / (squared deviations from the mean of these samples)."""
        spread = self._spread("target_squares", "targets")
        return 1 - self._sum("squares") / spread if spread > 0 else math.nan

    @property
    def rmse(self) -> float:
        """The root of the mean squared error."""
        return math.sqrt(self._sum("squares") / self.samples)

    @property
    def mae(self) -> float:
        """The mean absolute error; NaN where a site keeps it."""
        return self._sum("absolute") / self.samples

    @property
    def mean_loss(self) -> float:
        """The mean loss."""
        return self._sum("deviance") / (2 * self.samples)

    @property
    def deviance(self) -> float:
        """The mean deviance."""
        return self._sum("deviance") / self.samples

    @property
    def deviance_explained(self) -> float:
        """1 - deviance / that of one rate for all, times each sample's exposure (the offset)."""
        total = self._sum("targets")
        if not total > 0:
            return math.nan
        rate = math.log(total / self._sum("exposure"))
        null = 2 * (total - self._sum("shifted") - total * rate - self._sum("lowest"))
        return 1 - self._sum("deviance") / null if null > _ROUNDING * total else math.nan

    @property
    def calibration_slope(self) -> float:
        """The slope of a regression of targets on predictions, of counts on a'x beside the offset; 1 if calibrated."""
        if isinstance(self.loss, Poisson):
            return self.rate_slope
        spread = self._spread("mean_squares", "means")
        return (self._sum("products") - self._sum("targets") * self.predicted) / spread if spread > 0 else math.nan

    @property
    def mean_linear(self) -> float:
        """The mean of a'x over what was counted."""
        total = self._sum("targets")
        return (self._sum("margins") - self._sum("shifted")) / total if total > 0 else math.nan

    @property
    def calibration_intercept(self) -> float:
        """Calibration in the large: mean target less mean prediction, of counts log(ratio); 0 if calibrated."""
        if not isinstance(self.loss, Poisson):
            return self.mean - self.predicted
        return math.log(self.mean / self.predicted) if self.mean > 0 < self.predicted else math.nan

    def _spread(self, squares: str, total: str) -> float:
        """Squared deviations from the mean; 0 if there is nothing but rounding."""
        made = self._sum(squares) - self._sum(total) ** 2 / self.samples
        return made if made > _ROUNDING * self._sum(squares) else 0.0

    def calibration(self, groups: int = 10) -> pd.DataFrame:
        """The calibration curve in groups of about equal size: mean predicted and observed."""
        cells: Floats = self.counts[0].numpy()
        n, means, targets = cells[cells[:, 0] > 0].T
        order = np.argsort(means / n, kind="stable")
        return grouped(n[order], means[order], targets[order], groups)

    def untold(self, names: Sequence[str] | None = None) -> str:
        """What cannot be told for the width of its bounds: nothing, since there are none."""
        return ""

    def summary(self) -> dict[str, float]:
        """The numbers in one line: those that mean something for this loss."""
        names = ["samples", "mean", "predicted", "r2", "rmse", "mae"]
        if isinstance(self.loss, Poisson):
            names += ["deviance", "deviance_explained"]
        elif not isinstance(self.loss, LeastSquares):
            names += ["mean_loss"]
        if not isinstance(self.loss, Absolute | Quantile):  # their predictions are no means
            names += ["calibration_slope", "calibration_intercept"]
        return {name: float(getattr(self, name)) for name in names}

    def to_frame(self) -> pd.DataFrame:
        """:meth:`summary` as a table of one row."""
        return pd.DataFrame([self.summary()])

    def _line(self) -> str:
        return f"{self.samples:g} samples: " + (f"R2 {self.r2:.4g}, RMSE {self.rmse:.4g}" if self.samples else "none")


def calibrated(
    measured: Sequence[Errors], names: Sequence[str], driver: Driver, pairs: Sequence[tuple[Tensor, Rows]], part: str
) -> list[Errors]:
    """The same with the calibration slope of counts: first that of all, then those of the named sites.

    All take their steps in the same exchanges. A slope at which a site does not tell its sums is not known.
    """
    if not isinstance(measured[0].loss, Poisson):
        return list(measured)
    tasks = [rate_slope(one.mean_linear) for one in measured]
    tried = {i: next(task) for i, task in enumerate(tasks)}
    found: dict[int, float] = {}
    while tried:
        slopes = torch.tensor(list(tried.values()), dtype=torch.float64)
        answers = driver.each([rates(x, slopes, part, rows) for x, rows in pairs])
        sums = {n: torch.stack([one["sums"] for one in a]).sum(0) for n, a in zip(driver.names, answers, strict=True)}
        own = [torch.stack([sums[name] for name in names]).sum(0), *(sums[name] for name in names)]
        for k, i in enumerate(list(tried)):
            weight, total, first, second = own[i][k].tolist()
            whole = abs(weight - measured[i].samples) <= 1e-9 * measured[i].samples and total > 0
            mean = first / total if whole else math.nan
            try:
                tried[i] = tasks[i].send((mean, second / total - mean**2 if whole else math.nan))
            except StopIteration as stop:
                found[i] = stop.value
                del tried[i]
    return [replace(one, rate_slope=found[i]) for i, one in enumerate(measured)]
