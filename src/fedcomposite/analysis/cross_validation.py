"""Cross-validation: the paths of all folds side by side, in the exchanges that the slowest one takes."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite._validation import Count, Inside, Natural, Positive, ZeroOrMore, renamed
from fedcomposite.analysis.newton import Fit
from fedcomposite.analysis.paths import (
    Floats,
    Path,
    Several,
    Share,
    beginning,
    blended,
    check_path,
    collected,
    divided,
    falling,
    followed,
    relaxed,
)
from fedcomposite.analysis.refitting import refit
from fedcomposite.privacy import StudyBudget
from fedcomposite.problems import Problem
from fedcomposite.problems.metrics import exact_auc
from fedcomposite.results import Result, counted
from fedcomposite.runtime.driver import Driver, driving
from fedcomposite.runtime.protocol import Rows, Silo, Sums, folds_of, losses, silos_of
from fedcomposite.runtime.transports.silo_answers import SiloTransport

Score = Literal["deviance", "auc", "error"]

_BINS = 1024


@dataclass(frozen=True, repr=False)
class CrossValidation(Result):
    """What a cross-validation found; arrays have one entry per strength."""

    path: Path
    """On all samples."""
    scoring: Score
    mean: Floats
    """The score on samples held out, averaged over the folds by their weight."""
    se: Floats
    """Its standard error: that of the folds' mean."""
    mean_error: Floats
    """Most that the mean can be off: 0, unless it is an AUC from bins (see :func:`cross_validate`)."""
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
    driver: Driver
    gamma: float = 1.0
    """The best share of the regularized coefficients, whose models these are."""
    by_gamma: pd.DataFrame | None = None
    """Of several shares: a row per ``gamma`` and ``lambda`` with ``mean`` and ``se``."""

    @property
    def score(self) -> Score:
        """What ``scoring`` was called in the last version."""
        warnings.warn("score is now scoring; the old name goes with the next version", DeprecationWarning, 2)
        return self.scoring

    @property
    def lambdas(self) -> Floats:
        """The strengths."""
        return self.path.lambdas

    @property
    def _sign(self) -> float:
        return -1.0 if self.scoring == "auc" else 1.0

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
        """One row per strength: score, standard error, most that the score is off, nonzeros on all samples."""
        columns = {"lambda": self.lambdas, "mean": self.mean, "se": self.se, "mean_error": self.mean_error}
        return pd.DataFrame({**columns, "nonzeros": self.path.nonzeros})

    def to_frame(self) -> pd.DataFrame:
        return self.scores

    def _line(self) -> str:
        said = f"{self.scoring} of {counted(len(self.rows), 'fold')} at {counted(len(self.lambdas), 'strength')}: "
        if np.isnan(self.mean).all():
            said += "no fold has one"
        else:
            said += f"best {self.mean[self.index_min]:.4g}, "
            said += f"lambda_min = {self.lambda_min:.4g}, lambda_1se = {self.lambda_1se:.4g}"
        return said + f", {counted(self.exchanges, 'exchange')}"

    def index(self, choice: str | float = "1se") -> int:
        """The place of a choice: ``"min"``, ``"1se"``, ``"aic"``, ``"bic"``, ``"ebic"`` or a strength."""
        if choice in ("min", "1se"):
            return self.index_min if choice == "min" else self.index_1se
        if isinstance(choice, str) and choice not in ("aic", "bic", "ebic"):
            raise ValueError(f"choice = {choice!r}, must be 'min', '1se', 'aic', 'bic', 'ebic' or a number")
        return self.path.index(choice)

    def solution(self, choice: str | float = "1se") -> Tensor:
        """The model of a choice, on all samples."""
        return self.path.solutions[self.index(choice)]

    def refit(self, choice: str | float = "1se") -> Tensor:
        """The model of a choice once more without the regularizer, on the coordinates that it kept."""
        return refit(self.path.problem, self.solution(choice), driver=self.driver)


@renamed(score="scoring")
def cross_validate(
    problem: Problem,
    *,
    folds: Literal["sites"] | Several = 10,
    seed: Natural = 0,
    scoring: Score = "deviance",
    count: Several = 100,
    ratio: Inside | None = None,
    lambdas: Sequence[float] | None = None,
    gamma: Share | Sequence[Share] = 1.0,
    tolerance: ZeroOrMore = 1e-8,
    rounds: Count = 100,
    segments: Count | None = None,
    seconds: Positive | None = None,
    privacy: StudyBudget | None = None,
    driver: Driver | None = None,
    checkpoint: str | pathlib.Path | None = None,
    resume: bool = False,
    on_exchange: Callable[[Driver], None] | None = None,
) -> CrossValidation:
    """Choose the strength of a regularizer by how models do on samples that they have not seen.

    The path on all samples and those of all folds take their exchanges together. Strengths are those of all samples.

    Parameters
    ----------
    problem : Problem
        As in :func:`fedcomposite.path`.
    folds : int or "sites"
        How many folds: each site deals its samples out, class by class; or every site is left out once, which sites
        allow in secure sums only by ``left_out = true``.
    seed : int
        Of the folds.
    scoring : {"deviance", "auc", "error"}
        Twice the loss above that of a model that fits every sample (mean squared error, for least squares); the area
        under the ROC curve; the share of wrong classes, or the mean absolute error. The area is exact for samples at
        hand. Sites tell 1024 bins, joined where a fold has few samples; what this can have changed is ``mean_error``.
    gamma : float or sequence of float
        As in :func:`fedcomposite.path`; of several the one with the best score is taken, as glmnet's ``gamma.min``.
    count, ratio, lambdas, tolerance, rounds, segments, seconds, privacy, driver, checkpoint, resume, on_exchange
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
    if scoring == "auc" and "binary" not in problem.loss.kinds:
        raise ValueError(f"score = 'auc' is for two classes; with {problem.loss} take 'deviance' or 'error'")
    with driving(cross_validate, locals()) as driver:
        at_hand = driver.transport.silos if isinstance(driver.transport, SiloTransport) else None
        samples = math.inf if at_hand is None else sum(len(silo.X) for silo in at_hand)
        if folds != "sites" and folds > samples:
            raise ValueError(f"folds = {folds}, and there are {samples} samples: a fold needs at least one")
        parts = _parts(driver.ids, folds, seed)
        start = beginning(problem, tolerance, rounds, driver, driver.deadline(seconds))
        strengths = falling(problem, start, count, ratio, lambdas)
        plans = [start.plan, *(dataclasses.replace(start.plan, rows=rows) for rows in parts)]
        along = divided(problem.regularizer, strengths, segments, seconds)
        found = followed(driver, problem.regularizer, along, start, plans)
        done = min(map(len, found))
        strengths, (whole, *each) = strengths[:done], [fits[:done] for fits in found]
        shares = [float(g) for g in np.atleast_1d(np.asarray(gamma, float))]
        free = relaxed(driver, problem.regularizer, [whole, *each], plans) if min(shares) < 1 else None
        tried = [_blend(each, None if free is None else free[1:], g) for g in shares]
        exact = at_hand if driver.copies == 1 else None
        every = [_tested(driver, exact, models, parts, scoring) for models in tried]
        sign = -1.0 if scoring == "auc" else 1.0
        best = int(np.argmin([np.nanmin(sign * _summary(table, w)[0]) for table, _, w in every]))
        models, (table, off, weights) = tried[best], every[best]
        if free is not None and shares[best] < 1:
            whole = blended(driver, whole, free[0], shares[best], start.plan)
        mean, se = _summary(table, weights)
        mean_error, _ = _summary(off, weights)
        path = dataclasses.replace(collected(problem, strengths, start, whole, driver), gamma=shares[best])
        sent = driver.exchanges, driver.bytes_up, driver.bytes_down
        seen = _by_gamma(shares, strengths, every) if len(shares) > 1 else None
        made = path, scoring, mean, se, mean_error, table, weights, models, parts, *sent, driver
        return CrossValidation(*made, gamma=shares[best], by_gamma=seen)


def _blend(each: Sequence[Sequence[Fit]], free: Sequence[Sequence[Fit]] | None, gamma: float) -> Tensor:
    """The folds' models, ``(folds, k, d)``."""
    models = torch.stack([torch.stack([one.x for one in fits]) for fits in each])
    if free is None or gamma == 1:
        return models
    return gamma * models + (1 - gamma) * torch.stack([torch.stack([one.x for one in fits]) for fits in free])


def _tested(
    driver: Driver, at_hand: Sequence[Silo] | None, models: Tensor, parts: tuple[Rows, ...], scoring: Score
) -> tuple[Floats, Floats, Floats]:
    """The folds' scores, the most that these are off, and the folds' weights."""
    if scoring == "auc" and at_hand is not None:
        return _exact_auc(at_hand, models, parts)
    bins, errors = _BINS if scoring == "auc" else 0, scoring == "error"
    held = [losses(x, rows.others, bins, errors) for x, rows in zip(models, parts, strict=True)]
    return _scored(driver.ask(held), scoring)


def _by_gamma(
    shares: Sequence[float], strengths: Floats, every: Sequence[tuple[Floats, Floats, Floats]]
) -> pd.DataFrame:
    found = []
    for g, (table, _, weights) in zip(shares, every, strict=True):
        mean, se = _summary(table, weights)
        found.append(pd.DataFrame({"gamma": g, "lambda": strengths, "mean": mean, "se": se}))
    return pd.concat(found, ignore_index=True)


def _parts(ids: list[int], folds: int | str, seed: int) -> tuple[Rows, ...]:
    n = len(ids)
    if folds == "sites":
        if n < 3:
            raise ValueError(
                f"folds = 'sites' leaves one site out at a time, and there are {n}: take a number of folds"
            )
        return tuple(Rows("site", id) for id in ids)
    return tuple(Rows("fold", k, int(folds), seed=seed) for k in range(int(folds)))


def _scored(held: list[Sums], score: Score) -> tuple[Floats, Floats, Floats]:
    """The folds' scores, the most that these are off, and the folds' weights."""
    if score == "auc":
        both = [_auc(sums["histogram"].numpy()) for sums in held]
        weights = np.array([float(sums["weight"][1]) for sums in held])
        return np.stack([value for value, _ in both]), np.stack([off for _, off in both]), weights
    weights = np.array([float(sums["weight"][0]) for sums in held])
    empty = weights == 0
    table = np.stack(
        [sums[score].numpy() / w if w > 0 else sums[score].numpy() for sums, w in zip(held, weights, strict=True)]
    )
    table[empty] = math.nan
    return table, np.zeros_like(table), weights


def _auc(placed: Floats) -> tuple[Floats, Floats]:
    """AUC and the most that it is off, from weights ``(models, ends, classes, bins)``, class 1 first."""
    (ones_low, zeros_low), (ones_high, zeros_high) = placed.transpose(1, 2, 0, 3)
    with np.errstate(invalid="ignore"):
        pairs = ones_low.sum(-1) * zeros_low.sum(-1)
        low = (ones_low[:, 1:] * zeros_high.cumsum(-1)[:, :-1]).sum(-1) / pairs
        high = (ones_high * zeros_low.cumsum(-1)).sum(-1) / pairs
        ones, zeros = (ones_low + ones_high) / 2, (zeros_low + zeros_high) / 2
        value = (ones * (zeros.cumsum(-1) - zeros / 2)).sum(-1) / pairs
    return value, np.maximum(value - low, high - value)


def _exact_auc(silos: Sequence[Silo], models: Tensor, parts: tuple[Rows, ...]) -> tuple[Floats, Floats, Floats]:
    """The folds' AUC from the samples themselves."""
    table, weights = np.full(models.shape[:2], math.nan), np.zeros(len(parts))
    for fold, (along_path, rows) in enumerate(zip(models, parts, strict=True)):
        held = [(silo, silo.weights(rows.others)) for silo in silos if len(silo.X)]
        inside = [weight > 0 for _, weight in held]
        w = torch.cat([weight[some] for (_, weight), some in zip(held, inside, strict=True)])
        labels = torch.cat([silo.labels(silo.b)[some] for (silo, _), some in zip(held, inside, strict=True)])
        weights[fold] = float(w.sum())
        for k, x in enumerate(along_path):
            z = torch.cat([silo.margins(x)[some] for (silo, _), some in zip(held, inside, strict=True)])
            table[fold, k] = exact_auc(z, labels, w)
    return table, np.zeros_like(table), weights


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
