"""Cross-validation: the paths of all folds side by side, in the exchanges that the slowest one takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite._validation import Count, Inside, Natural, Positive, ZeroOrMore
from fedcomposite.estimators.newton import deadline_of
from fedcomposite.estimators.paths import (
    Floats,
    Path,
    Several,
    along,
    beginning,
    check_path,
    collected,
    falling,
    nearest,
)
from fedcomposite.estimators.refitting import refit
from fedcomposite.estimators.sites import Local, Sites, together
from fedcomposite.problems import Problem
from fedcomposite.problems.metrics import AUC
from fedcomposite.problems.requests import Rows, Sums, folds_of, losses, silos_of

Score = Literal["deviance", "auc", "error"]

_BINS = 1024


@dataclass(frozen=True)
class CrossValidation:
    """What a cross-validation found; arrays have one entry per strength."""

    path: Path
    """On all samples."""
    score: Score
    mean: Floats
    """The score on samples held out, averaged over the folds by their weight."""
    se: Floats
    """Its standard error: that of the folds' mean."""
    each: Floats
    """The score of every fold, ``(folds, k)``; NaN where a fold has none."""
    fold_weights: Floats
    models: Tensor
    """The folds' models, ``(folds, k, d)``."""
    rows: tuple[Rows, ...]
    """Which samples each fold's models were made from."""
    exchanges: int
    bytes_up: int
    bytes_down: int
    sites: Sites

    @property
    def lambdas(self) -> Floats:
        """The strengths."""
        return self.path.lambdas

    @property
    def _sign(self) -> float:
        return -1.0 if self.score == "auc" else 1.0

    @property
    def index_min(self) -> int:
        """The place of the best score, the strongest one of equals."""
        return int(np.nanargmin(self._sign * self.mean))

    @property
    def index_1se(self) -> int:
        """The place of the strongest regularizer whose score is within a standard error of the best."""
        best = self.index_min
        allowed = self._sign * self.mean <= self._sign * self.mean[best] + self.se[best]
        return int(np.flatnonzero(allowed)[0])

    @property
    def lambda_min(self) -> float:
        """The strength with the best score."""
        return float(self.lambdas[self.index_min])

    @property
    def lambda_1se(self) -> float:
        """The largest strength whose score is within a standard error of the best."""
        return float(self.lambdas[self.index_1se])

    @property
    def scores(self) -> pd.DataFrame:
        """One row per strength: score, standard error, nonzeros of the model on all samples."""
        columns = {"lambda": self.lambdas, "mean": self.mean, "se": self.se, "nonzeros": self.path.nonzeros}
        return pd.DataFrame(columns)

    def index(self, choice: str | float = "min") -> int:
        """The place of a choice: ``"min"``, ``"1se"``, ``"aic"``, ``"bic"``, ``"ebic"`` or a strength."""
        if choice in ("aic", "bic", "ebic"):
            return int(np.argmin(getattr(self.path, str(choice))))
        if isinstance(choice, str):
            if choice not in ("min", "1se"):
                raise ValueError(f"choice = {choice!r}, must be 'min', '1se', 'aic', 'bic', 'ebic' or a number")
            return self.index_min if choice == "min" else self.index_1se
        return nearest(self.lambdas, choice)

    def solution(self, choice: str | float = "min") -> Tensor:
        """The model of a choice, on all samples."""
        return self.path.solutions[self.index(choice)]

    def refit(self, choice: str | float = "min") -> Tensor:
        """The model of a choice once more without the regularizer, on the coordinates that it kept."""
        return refit(self.path.problem, self.solution(choice), sites=self.sites)


def cross_validate(
    problem: Problem,
    *,
    folds: Literal["sites"] | Several = 10,
    seed: Natural = 0,
    score: Score = "deviance",
    count: Several = 100,
    ratio: Inside | None = None,
    lambdas: Sequence[float] | None = None,
    tolerance: ZeroOrMore = 1e-8,
    rounds: Count = 100,
    seconds: Positive | None = None,
    sites: Sites | None = None,
) -> CrossValidation:
    """Choose the strength of a regularizer by how models do on samples that they have not seen.

    The path on all samples and those of all folds take their exchanges together. Strengths are those of all samples.

    Parameters
    ----------
    problem : Problem
        As in :func:`fedcomposite.path`.
    folds : int or "sites"
        How many folds: each site deals its samples out, class by class; or every site is left out once.
    seed : int
        Of the folds.
    score : {"deviance", "auc", "error"}
        Twice the loss above that of a model that fits every sample (mean squared error, for least squares); the area
        under the ROC curve from histograms of 1024 bins; the share of wrong classes, or the mean absolute error.
    count, ratio, lambdas, tolerance, rounds, seconds, sites
        As in :func:`fedcomposite.path`; after so many seconds the strengths that all folds have done are scored.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=5, features=6, samples=40)
    >>> problem = fc.Problem(silos, regularizer=fc.regularizers.L1(1.0), bias=True, weights="samples")
    >>> cv = fc.cross_validate(problem, folds=5, count=20)
    >>> bool(cv.lambda_min <= cv.lambda_1se), cv.each.shape
    (True, (5, 20))
    """
    check_path(cross_validate, locals())
    if score == "auc" and "binary" not in problem.loss.kinds:
        raise ValueError(f"score = 'auc' is for two classes; with {problem.loss} take 'deviance' or 'error'")
    sites = Local(problem) if sites is None else sites
    samples = sum(len(silo.X) for silo in sites.silos) if isinstance(sites, Local) else math.inf
    if folds != "sites" and folds > samples:
        raise ValueError(f"folds = {folds}, and there are {samples} samples: a fold needs at least one")
    parts = _parts(sites.ids, folds, seed)
    start = beginning(problem, tolerance, rounds, sites, deadline_of(seconds))
    strengths = falling(problem, start, count, ratio, lambdas)
    plans = [start.plan, *(dataclasses.replace(start.plan, rows=rows) for rows in parts)]
    found = together([along(problem.regularizer, strengths, start, plan) for plan in plans], sites)
    done = min(map(len, found))
    strengths, (whole, *each) = strengths[:done], [fits[:done] for fits in found]
    models = torch.stack([torch.stack([one.x for one in fits]) for fits in each])
    bins, errors = _BINS if score == "auc" else 0, score == "error"
    held = [losses(x, rows.others, bins, errors) for x, rows in zip(models, parts, strict=True)]
    table, weights = _scored(sites.ask(held), score)
    mean, se = _summary(table, weights)
    path = collected(problem, strengths, start, whole, sites)
    sent = sites.exchanges, sites.bytes_up, sites.bytes_down
    return CrossValidation(path, score, mean, se, table, weights, models, parts, *sent, sites)


def _parts(ids: list[int], folds: int | str, seed: int) -> tuple[Rows, ...]:
    n = len(ids)
    if folds == "sites":
        if n < 3:
            raise ValueError(
                f"folds = 'sites' leaves one site out at a time, and there are {n}: take a number of folds"
            )
        return tuple(Rows("site", id) for id in ids)
    return tuple(Rows("fold", k, int(folds), seed=seed) for k in range(int(folds)))


def _scored(held: list[Sums], score: Score) -> tuple[Floats, Floats]:
    """The folds' scores, and their weights."""
    weights = np.array([float(sums["weight"][0]) for sums in held])
    if score == "auc":
        table = np.stack([AUC(_BINS).value(sums["histogram"]).numpy() for sums in held])
        return table, np.array([float(sums["weight"][1]) for sums in held])
    empty = weights == 0
    table = np.stack(
        [sums[score].numpy() / w if w > 0 else sums[score].numpy() for sums, w in zip(held, weights, strict=True)]
    )
    table[empty] = math.nan
    return table, weights


def _summary(table: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """The weighted mean over folds, and the standard error of such a mean, as in glmnet."""
    there = ~np.isnan(table)
    w = np.where(there, weights[:, None], 0.0)
    values = np.where(there, table, 0.0)
    total = w.sum(0)
    mean = (w * values).sum(0) / total
    spread = (w * (values - mean) ** 2).sum(0) / total
    return mean, np.sqrt(spread / np.maximum(there.sum(0) - 1, 1))


def fold_of_samples(problem: Problem, folds: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """The fold of every training sample, in the order of the silos: for an analysis of pooled data with the same folds.

    Only whoever holds the samples can say this; no analysis over sites needs it.
    """
    return np.concatenate([folds_of(seed, s.id, s.strata, folds) for s in silos_of(problem) if len(s.X)])
