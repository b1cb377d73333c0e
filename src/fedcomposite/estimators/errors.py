"""How good a regression is: every measure from sums over samples, and from sums in bins of its margins.

R2, errors and the deviance follow from sums alone and are exact, and so is the calibration of a linear model. Bins are
for the curve of predicted and observed means, and for the calibration slope of counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite.estimators.curves import grouped, rate_slope
from fedcomposite.problems.loss import Loss
from fedcomposite.problems.losses import Absolute, LeastSquares, Poisson, Quantile
from fedcomposite.problems.requests import RESIDUALS, Sums

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


@dataclass(frozen=True)
class Errors:
    """The measures of one site, or of all; ``counts`` is ``(1, bins, 5)``: weight, margins, squares, means, targets."""

    sums: Tensor
    """Those of :data:`RESIDUALS`."""
    counts: Tensor
    loss: Loss

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
        """The slope of a regression of targets on predictions, for counts of one on margins; 1 if calibrated."""
        if isinstance(self.loss, Poisson):
            if not self._sum("targets") > 0 or len(self.counts[0]) < 2:
                return math.nan
            n, z, squares, *_ = self._bins
            z, off = z / n, np.sqrt(np.maximum(squares / n - (z / n) ** 2, 0.0))
            wanted = self._sum("margins") / self._sum("targets")
            return rate_slope(np.concatenate([z - off, z + off]), np.tile(n, 2), wanted)
        spread = self._spread("mean_squares", "means")
        return (self._sum("products") - self._sum("targets") * self.predicted) / spread if spread > 0 else math.nan

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

    @property
    def _bins(self) -> Floats:
        """The sums in bins with samples."""
        cells: Floats = self.counts[0].numpy()
        return cells[cells[:, 0] > 0].T

    def calibration(self, groups: int = 10) -> pd.DataFrame:
        """The calibration curve in groups of about equal size: mean predicted and observed."""
        n, _, _, means, targets = self._bins
        return grouped(n, means, targets, groups)

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
