"""How good a classifier is: every measure from counts of its margins in bins, per site and over all.

In each bin and class a site counts its samples and sums their margins, probabilities and products of both. The bins'
edges include those of probabilities 0.005, 0.010, ..., so that thresholds there are exact. The Brier score is exact;
every other measure has bounds that hold wherever samples are in their bins, and in the ranges of bins that a site has
joined to keep its minimum counts. A measure whose bounds are further off than :data:`WIDEST` allows is not told. With
samples at hand every sample can be its own bin, and nothing is rounded: the same functions then give the exact values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite._validation import Count, Inside, Positive, as_vector, refuse, wrong_arguments
from fedcomposite.analysis.calibration_bounds import CalibrationBounds
from fedcomposite.analysis.cross_validation import CrossValidation
from fedcomposite.analysis.curves import grouped, integrated_error
from fedcomposite.analysis.noised_scores import DEVIATIONS, NoisedCells, calibrated_lines, tally_edges
from fedcomposite.analysis.regression_quality import Errors, calibrated, margin_edges
from fedcomposite.analysis.score_bins import NOTHING, Cells, Pair
from fedcomposite.analysis.survival_quality import SurvivalQuality, survival_quality
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import Cox, Logistic, Loss
from fedcomposite.results import Result, counted
from fedcomposite.runtime.driver import Driver, driver_of
from fedcomposite.runtime.fit import check_given
from fedcomposite.runtime.protocol import ALL, Request, Rows, Sums, residuals, scores, tallies
from fedcomposite.runtime.transports.silo_answers import SiloTransport

Floats = npt.NDArray[np.float64]

_BINS = 1024
_BOUNDED = ("auroc", "auprc", "calibration_slope", "calibration_intercept")
_RATES = ("sensitivity", "specificity", "precision", "negative_predictive_value", "accuracy")

WIDEST = {
    **dict.fromkeys(("auroc", "auprc", *_RATES, "net_benefit"), 0.05),
    **dict.fromkeys(("calibration_slope", "calibration_intercept"), 0.1),
}
"""The most that a measure may be off to be told; for a slope above 1 this times the slope."""

ONLY_SUMS = "not told one by one: secure sums are of all sites"
"""Why a report has no rows by site."""

_WORDS = {"auroc": "AUROC", "auprc": "AUPRC"}


def told(name: str, value: float, bounds: Pair) -> float:
    """A measure, or NaN where its bounds are too far from it for it to mean something."""
    most = WIDEST[name] * (max(1.0, abs(value)) if name == "calibration_slope" else 1.0)
    return value if error(value, bounds) <= most else math.nan


def error(value: float, bounds: Pair) -> float:
    """Most that a measure can be off."""
    return max(value - bounds[0], bounds[1] - value)


def said(name: str, bounds: Pair) -> str:
    """What is known of a number: between two bounds, at least one, or at most the other."""
    low, high = bounds
    name = _WORDS.get(name, name.replace("_", " "))
    if math.isfinite(low) and math.isfinite(high):
        return f"{name} between {low:.2f} and {high:.2f}"
    end = f"at least {low:.2f}" if math.isfinite(low) else f"at most {high:.2f}" if math.isfinite(high) else "unbounded"
    return f"{name} {end}"


def edges_of(bins: int = _BINS) -> Tensor:
    """Edges of the bins of margins: even in z / (1 + |z|), and those of probabilities in steps of 0.005."""
    place = torch.linspace(-1, 1, bins + 1, dtype=torch.float64)[1:-1]
    p = torch.arange(1, 200, dtype=torch.float64) / 200
    made: Tensor = torch.unique(torch.cat([place / (1 - place.abs()), torch.logit(p)]))
    return made


@dataclass(frozen=True, repr=False)
class Quality(Result):
    """The measures of one site, or of all; of each ``NAME_error`` is the most that it can be off."""

    cells: Cells
    squares: float
    """The sum of squared probabilities."""
    line: Pair | None = None
    """The calibration's slope and intercept, where they are known without bounds."""

    @classmethod
    def told(cls, answers: Sequence[Sums], edges: Tensor, unit: bool) -> Quality:
        """From the answers to :func:`scores` of a site, or of all in a secure sum, one for each of several models.

        ``unit``: samples count one each.
        """
        squares = sum(float(one["squares"].sum()) for one in answers)
        if "ranges" in answers[0]:
            return cls(Cells.summed([one["ranges"] for one in answers], edges, unit), squares)
        return cls(Cells.told([one["counts"] for one in answers], edges, unit), squares)

    @classmethod
    def all(cls, each: Sequence[Quality]) -> Quality:
        """Of all sites."""
        return cls(type(each[0].cells).all([one.cells for one in each]), sum(one.squares for one in each))

    @property
    def samples(self) -> float:
        """How many, or their weight."""
        return float(self.cells.column("weight").sum())

    @property
    def positives(self) -> float:
        """How many are of class 1."""
        return float((self.cells.column("weight") * (self.cells.column("class") == 1)).sum())

    @cached_property
    def _calibration(self) -> CalibrationBounds:
        return CalibrationBounds(self.cells)

    def _measured(self, name: str) -> tuple[float, Pair]:
        match name:
            case "auroc":
                return self.cells.auroc
            case "auprc":
                return self.cells.auprc
            case _ if self.line is not None:
                value = self.line[name == "calibration_intercept"]
                return value, NOTHING if math.isnan(value) else (value, value)
            case "calibration_slope":
                return self._calibration.slope
        return self._calibration.intercept

    def bounds(self, name: Literal["auroc", "auprc", "calibration_slope", "calibration_intercept"]) -> Pair:
        """Between which numbers a measure certainly is."""
        return self._measured(name)[1]

    @property
    def auroc(self) -> float:
        """The area under the ROC curve; pairs whose order is not known count one half."""
        return self._measured("auroc")[0]

    @property
    def auroc_error(self) -> float:
        """Most that it can be off."""
        return error(*self._measured("auroc"))

    @property
    def auprc(self) -> float:
        """Average precision."""
        return self._measured("auprc")[0]

    @property
    def auprc_error(self) -> float:
        """Most that it can be off."""
        return error(*self._measured("auprc"))

    @property
    def brier(self) -> float:
        """The mean squared error of the probabilities, exact but for :attr:`brier_error`."""
        of_ones = float((self.cells.column("p") * (self.cells.column("class") == 1)).sum())
        return (self.squares - 2 * of_ones + self.positives) / self.samples if self.samples else math.nan

    @property
    def brier_error(self) -> float:
        """Most that it can be off, but in one of 15,000 cases: sites put noise on sums of p that could be about few."""
        shifted = self.cells.shifted if isinstance(self.cells, NoisedCells) else 0.0
        return 2 * DEVIATIONS * math.sqrt(shifted) / self.samples if self.samples else math.nan

    @property
    def calibration_slope(self) -> float:
        """The slope of a logistic regression of the outcome on the margin; 1 if calibrated.

        The margin is all of it, what an offset adds among the rest: the slope is that of the probabilities that are
        told. Of counts it is that of a'x beside the offset, which is an exposure there. Sites tell sums by bins of the
        margin, in which a'x and the offset are no longer apart.
        """
        return self._measured("calibration_slope")[0]

    @property
    def calibration_slope_error(self) -> float:
        """Most that it can be off."""
        return error(*self._measured("calibration_slope"))

    @property
    def calibration_intercept(self) -> float:
        """The intercept of one with slope 1, calibration in the large; 0 if calibrated."""
        return self._measured("calibration_intercept")[0]

    @property
    def calibration_intercept_error(self) -> float:
        """Most that it can be off."""
        return error(*self._measured("calibration_intercept"))

    @cached_property
    def _means(self) -> tuple[Floats, Floats, Floats]:
        """Of samples in the same bins, by rising probability: its mean, samples, positives."""
        ranges, place = np.unique(self.cells.table[:, 1:3], axis=0, return_inverse=True)
        ones = self.cells.column("weight") * (self.cells.column("class") == 1)
        columns = (self.cells.column("p"), self.cells.column("weight"), ones)
        p, n, ones = (np.bincount(place.ravel(), v, len(ranges)).astype(np.float64) for v in columns)
        order = np.argsort(p / n, kind="stable")
        return (p / n)[order], n[order], ones[order]

    @cached_property
    def ici(self) -> float:
        """The integrated calibration index: the mean distance from probabilities to a smooth curve of outcomes.

        It is that of probabilities rounded to the means of their bins, which are at most 0.005 wide; NaN where bins
        were joined: no useful bound is known for it.
        """
        return integrated_error(*self._means) if self.cells.plain else math.nan

    def calibration(self, groups: Count = 10) -> pd.DataFrame:
        """The calibration curve in groups of about equal size: mean predicted and observed share."""
        refuse(wrong_arguments(Quality.calibration, {"groups": groups}))
        p, n, ones = self._means
        return grouped(n, n * p, ones, groups)

    def roc(self) -> pd.DataFrame:
        """False and true positive rates, one row per bin; half of a range of joined bins is at either end of it."""
        zeros, ones = (np.concatenate([[0.0], v[::-1].cumsum()]) / v.sum() for v in self.cells.halves)
        return pd.DataFrame({"false_positive_rate": zeros, "true_positive_rate": ones})

    def confusion(self, threshold: Inside = 0.5) -> dict[str, float]:
        """Samples by outcome and prediction, with the rates that follow; of each ``NAME_error`` is the most it is off.

        Probabilities in steps of 0.005 are edges of bins; with others, some of a bin may be on either side.
        """
        return {k: v for name, (x, b) in self.rates(threshold).items() for k, v in _with_error(name, x, b).items()}

    def rates(self, threshold: Inside = 0.5) -> dict[str, tuple[float, Pair]]:
        """The entries of :meth:`confusion` with their bounds."""
        refuse(wrong_arguments(Quality.confusion, {"threshold": threshold}))
        z = math.log(threshold / (1 - threshold))
        (fp, fps), (tp, tps) = (self.cells.above(kind, z) for kind in (0, 1))
        ones, zeros = self.positives, self.samples - self.positives
        tn, tns, fn, fns = zeros - fp, (zeros - fps[1], zeros - fps[0]), ones - tp, (ones - tps[1], ones - tps[0])
        named = {"true_positives": (tp, tps), "false_positives": (fp, fps)}
        named |= {"true_negatives": (tn, tns), "false_negatives": (fn, fns)}
        named |= {"sensitivity": _share(tp, tps, fn, fns), "specificity": _share(tn, tns, fp, fps)}
        named |= {"precision": _share(tp, tps, fp, fps), "negative_predictive_value": _share(tn, tns, fn, fns)}
        right, wrong = (tps[0] + tns[0], tps[1] + tns[1]), (fps[0] + fns[0], fps[1] + fns[1])
        return named | {"accuracy": _share(tp + tn, right, fp + fn, wrong)}

    def decision_curve(self, thresholds: Sequence[float] | None = None) -> pd.DataFrame:
        """Net benefit of the model, of treating everyone and of treating no one (Vickers & Elkin 2006).

        ``model_error`` is the most that the model's can be off.
        """
        chosen = np.arange(1, 100) / 100 if thresholds is None else np.asarray(thresholds)
        seen = [self.rates(t) for t in chosen]
        odds = chosen / (1 - chosen)
        tp, fp = (np.array([[s[k][0], *s[k][1]] for s in seen]).T for k in ("true_positives", "false_positives"))
        value, low, high = (tp[i] / self.samples - fp[j] / self.samples * odds for i, j in ((0, 0), (1, 2), (2, 1)))
        share = self.positives / self.samples
        everyone = share - (1 - share) * odds
        off = np.maximum(value - low, high - value)
        columns = {"threshold": chosen, "model": value, "model_error": off, "everyone": everyone, "no one": 0.0}
        return pd.DataFrame(columns)

    def summary(self, threshold: float | None = None) -> dict[str, float]:
        """The numbers in one line; NaN where bounds are too wide (:data:`WIDEST`).

        With a threshold, sensitivity and specificity there are among them.
        """
        made = {"samples": self.samples, "positives": self.positives}
        bounded = self._bounded(threshold)
        for name, (value, bounds) in bounded.items():
            made |= _with_error(name, told(name, value, bounds), bounds, error(value, bounds))
        first = ("samples", "positives", "auroc", "auroc_error", "auprc", "auprc_error")
        brier = self.brier if not self.brier_error > WIDEST["auroc"] else math.nan
        return {**{k: made.pop(k) for k in first}, "brier": brier, **made, "ici": self.ici}

    def to_frame(self) -> pd.DataFrame:
        """:meth:`summary` as a table of one row."""
        return pd.DataFrame([self.summary()])

    def _line(self) -> str:
        value, bounds = self._measured("auroc")
        area = said("auroc", bounds) if math.isnan(told("auroc", value, bounds)) else f"AUROC {value:.3f}"
        area = "no AUROC" if math.isnan(value) else area
        return f"{self.samples:g} samples, {self.positives:g} positive: {area}, Brier score {self.brier:.4g}"

    def _bounded(self, threshold: float | None) -> dict[str, tuple[float, Pair]]:
        made = {name: self._measured(name) for name in _BOUNDED}
        if threshold is not None:
            rates = self.rates(threshold)
            made |= {"sensitivity": rates["sensitivity"], "specificity": rates["specificity"]}
        return made

    def untold(self, threshold: float | None = None, names: Sequence[str] | None = None) -> str:
        """What :meth:`summary` does not tell, of some measures or of all, and why; empty if it tells all."""
        bounded = self._bounded(threshold).items()
        wide = [
            said(k, b) for k, (v, b) in bounded if not math.isnan(v) and math.isnan(told(k, v, b)) and _asked(k, names)
        ]
        made = [f"{', '.join(wide)}: too wide to tell"] if wide else []
        if self.line is not None and math.isnan(self.line[0]) and _asked("calibration_slope", names):
            made.append("no calibration slope: its margins would be beyond a site's max_margin, or outcomes separated")
        if self.brier_error > 0 and _asked("brier", names):
            made.append(f"Brier score \u00b1 {self.brier_error:.2g}")
        made += ["no ICI"] if not self.cells.plain and _asked("ici", names) else []
        noised = isinstance(self.cells, NoisedCells)
        why = "counts of scores have noise" if noised else "bins were joined to keep minimum counts"
        return "; ".join(made) + ("" if self.cells.plain or not made else f", since {why}")


def _asked(name: str, names: Sequence[str] | None) -> bool:
    return names is None or name in names


def _with_error(name: str, value: float, bounds: Pair, off: float | None = None) -> dict[str, float]:
    return {name: value, f"{name}_error": error(value, bounds) if off is None else off}


def _share(part: float, parts: Pair, rest: float, rests: Pair) -> tuple[float, Pair]:
    """A part over the whole, which grows with the part and falls with the rest; NaN where the whole is nothing."""
    if not part + rest > 0:
        return math.nan, (math.nan, math.nan)
    low = parts[0] / (parts[0] + rests[1]) if parts[0] + rests[1] > 0 else 1.0
    high = parts[1] / (parts[1] + rests[0]) if parts[1] + rests[0] > 0 else 0.0
    return part / (part + rest), (min(low, high), max(low, high))  # they may differ by rounding alone


@dataclass(frozen=True, repr=False)
class Report(Result):
    """The quality of a model at each site, and over all."""

    overall: Any
    """:class:`Quality` of a logistic model, :class:`Errors` of a regression, :class:`SurvivalQuality` of times."""
    by_site: dict[str, Any]
    reason: str = ""
    """Why there are no sites, where only sums are known."""

    @property
    def rows(self) -> dict[str, Any]:
        """Those of the sites, and that of all."""
        return {**self.by_site, "all": self.overall}

    @property
    def table(self) -> pd.DataFrame:
        """One row per site and one for all; NaN is what cannot be told, for which :attr:`notes` say why."""
        return pd.DataFrame({name: one.summary() for name, one in self.rows.items()}).T

    @property
    def notes(self) -> dict[str, str]:
        """What cannot be told of a site, or of all, and why; those of whom all is told are left out."""
        return self.why()

    def why(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """The notes about some measures."""
        made = {name: note for name, one in self.rows.items() if (note := one.untold(names=names))}
        return made | ({"sites": self.reason} if self.reason else {})

    def to_frame(self) -> pd.DataFrame:
        return self.table

    def _line(self) -> str:
        return f"{'all sites' if self.reason else counted(len(self.by_site), 'site')}: {self.overall!r}"


def quality(
    problem: Problem,
    x: Any,
    *,
    part: Literal["train", "validation", "test"] = "train",
    choice: str | float = "1se",
    exact: bool = False,
    bins: Count = _BINS,
    horizon: Positive | None = None,
    driver: Driver | None = None,
) -> Report:
    """Measure a logistic model, a regression or a Cox model on the samples it was made from, held-out or new ones.

    Parameters
    ----------
    problem : Problem
        With the loss ``"logistic"``, ``"cox"`` or that of a regression; for new data, one with the new silos and the
        same features.
    x : Tensor, array, Run, estimator or CrossValidation
        The model, or what has one. Of a cross-validation every sample is scored by the model of its fold, which has
        not seen it.
    part : {"train", "validation", "test"}
        Whose samples.
    choice : str or float
        The strength of a cross-validation's models; as in :meth:`CrossValidation.index`.
    exact : bool
        Every sample in its own bin; only for samples at hand, of which it is also done where bins leave a measure open.
    bins : int
        How many bins; of a logistic model 199 more begin at probabilities in steps of 0.005.
    horizon : float, optional
        Of a Cox model, the time at which it is looked at who has had the event: AUROC, Brier score and calibration by
        then; without one there is the concordance index only.
    driver : Driver, optional
        Who answers; one exchange, of which each site's counts are kept apart, unless only sums are known. Where sites
        put noise on counts, about eight, since the calibration's line is found by Newton's method. For a regression
        two: the first asks for the mean and the spread of the targets, by which bins are laid. The calibration slope of
        a model of counts takes one more for each of about five steps of Newton's method.
    """
    folds = isinstance(x, CrossValidation)
    check_given(quality, {k: v for k, v in locals().items() if not (k == "x" and folds)})
    x = x if folds else as_vector(x).double()
    if not (isinstance(problem.loss, Logistic | Cox) or is_regression(problem)):
        raise ValueError(f"quality is measured of logistic models, Cox models and regressions; {problem.loss} is none")
    if horizon is not None and not isinstance(problem.loss, Cox):
        raise ValueError("horizon is a time to an event; this model has none")
    if exact and driver is not None:
        raise ValueError("exact = True needs the samples, which sites keep")
    driver = driver_of(problem, driver)
    pairs = _models(x, choice)
    every = _every_margin(driver.transport, pairs, part) if exact else None
    if isinstance(problem.loss, Cox):
        return _of_times(driver, pairs, part, horizon, bins)
    if isinstance(problem.loss, Loss) and not problem.loss.classifier:
        return _errors(problem.loss, driver, pairs, part, every, bins)
    unit = part != "train" or problem.silos.weights is None
    if driver.noised:
        each = noised_quality(driver, pairs, part, unit)
        if not each:
            raise ValueError(f"there are no samples in the part {part!r}, or no site tells of them")
        overall = each.pop("all")
        return Report(overall, each if driver.by_site else {}, "" if driver.by_site else ONLY_SUMS)
    edges = with_points(edges_of(bins), constants(problem, [x for x, _ in pairs])) if every is None else every
    asked: list[Request] = [scores(model, edges, part, rows) for model, rows in pairs]
    every_site = {name: Quality.told(one, edges, unit) for name, one in driver.told(asked).items()}
    each = {name: one for name, one in every_site.items() if one.samples > 0}
    if not each:
        raise ValueError(f"there are no samples in the part {part!r}")
    if not driver.by_site and "all" in each:
        return Report(each["all"], {}, ONLY_SUMS)
    made = Report(Quality.all(list(each.values())), each)
    if made.notes and every is None and isinstance(driver.transport, SiloTransport):
        return quality(problem, x, part=part, choice=choice, exact=True)  # no bins are needed where samples are at hand
    return made


def noised_quality(
    driver: Driver, pairs: Sequence[tuple[Tensor, Rows]], part: str, unit: bool, threshold: float = 0.5
) -> dict[str, Quality]:
    """Of sites that put noise on counts, those that tell something and ``all``; from about six exchanges.

    ``threshold`` is a probability at which rates are known best; new samples of the files that stay at the sites are of
    class 1 from there on.
    """
    edges = torch.zeros(1, dtype=torch.float64)

    def counts(sums: Mapping[str, Floats]) -> list[Request]:
        nonlocal edges
        edges = tally_edges(sums["all"], threshold) if sums else edges
        return [replace(tallies(x, edges, part, rows), numbers={"threshold": threshold}) for x, rows in pairs]

    first, lines, told = calibrated_lines(driver, pairs, part, counts)
    if not first:
        return {}
    cells = {name: NoisedCells.told_with_noise(one, edges, unit) for name, one in told.items() if name in first}
    cells = {name: one for name, one in cells.items() if one.totals[:, 0].sum() > 0}
    cells |= {"all": NoisedCells.all(list(cells.values()))} if "all" not in cells else {}
    return {name: Quality(one, float(one.totals[:, 2].sum()), lines[name]) for name, one in cells.items()}


def with_points(edges: Tensor, margins: Tensor) -> Tensor:
    """Edges with a bin for each of some margins and no other."""
    made: Tensor = torch.unique(
        torch.cat([edges, margins, torch.nextafter(margins, torch.full_like(margins, math.inf))])
    )
    return made


def constants(problem: Problem, models: Sequence[Tensor]) -> Tensor:
    """Margins of models that have no coefficient but an intercept: without offsets all samples are ties then."""
    made = [x[-1] if problem.bias else x.new_zeros(()) for x in models if not bool(x[: len(x) - problem.bias].any())]
    return torch.stack(made) if made else torch.zeros(0, dtype=torch.float64)


def is_regression(problem: Problem) -> bool:
    """Whether it is a linear model of numbers."""
    return isinstance(problem.loss, Loss) and problem.loss.by_sample and not problem.loss.classifier


def _of_times(driver: Driver, pairs: list[tuple[Tensor, Rows]], part: str, at: float | None, bins: int) -> Report:
    """The quality of a Cox model; samples at hand have a bin for every margin."""
    at_hand = driver.transport.silos if isinstance(driver.transport, SiloTransport) else None
    edges = edges_of(bins) if at_hand is None else _every_margin(driver.transport, pairs, part)
    told = survival_quality(driver, pairs, part, at, edges, at_hand)
    each = {name: one for name, one in told.items() if one.samples > 0}
    if not each:
        raise ValueError(f"there are no samples in the part {part!r}, or no site tells of them")
    if not driver.by_site and "all" in each:
        return Report(each["all"], {}, ONLY_SUMS)
    return Report(SurvivalQuality.all(list(each.values())), each)


def _errors(
    loss: Loss, driver: Driver, pairs: list[tuple[Tensor, Rows]], part: str, edges: Tensor | None, bins: int
) -> Report:
    """The quality of a regression."""
    none = torch.zeros(0, dtype=torch.float64)
    if driver.budgeted:
        edges = none  # there is one sum of all samples
    else:
        [about] = driver.ask([residuals(pairs[0][0], none, part)])
        if not float(about["sums"][0]) > 0:
            raise ValueError(f"there are no samples in the part {part!r}, or no site tells of them")
        edges = margin_edges(loss, about["sums"], bins) if edges is None else edges
    answers = driver.told([residuals(model, edges, part, rows) for model, rows in pairs])
    each = {name: Errors.told(one, loss) for name, one in answers.items()}
    known = {name: one for name, one in each.items() if one.samples > 0}
    single = known if driver.by_site or "all" not in known else {}
    overall, *alone = calibrated([Errors.all(list(known.values())), *single.values()], [*known], driver, pairs, part)
    return Report(overall, dict(zip(single, alone, strict=True)), "" if single else ONLY_SUMS)


def _models(x: Tensor | CrossValidation, choice: str | float) -> list[tuple[Tensor, Rows]]:
    if isinstance(x, Tensor):
        return [(x, ALL)]
    return [(models[x.index(choice)], rows.others) for models, rows in zip(x.models, x.rows, strict=True)]


def _every_margin(at_hand: SiloTransport, pairs: list[tuple[Tensor, Rows]], part: str) -> Tensor:
    """Edges with every margin in a bin of its own."""
    found = [silo.of_part(part).margins(model) for silo in at_hand.silos for model, _ in pairs]
    return with_points(edges_of(1), torch.cat(found))
