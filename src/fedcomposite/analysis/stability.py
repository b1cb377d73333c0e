"""Stability selection: the features that models on random halves of the data agree on.

Every subsample has a path that ends once q features have entered; a feature is stable if it is among them in a share of
``threshold`` or more of the subsamples. With features that are exchangeable where they do not matter, the expected
number of stable features among those is at most

    q^2 / ((2 threshold - 1) p)        (Meinshausen & Bühlmann 2010, theorem 1).

Halves come in pairs that leave nothing out (Shah & Samworth 2013).
"""

from __future__ import annotations

import copy
import math
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import annotated_types as at
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite._validation import Count, Inside, Natural, Positive, ZeroOrMore
from fedcomposite.analysis.newton import Fit, FitPlan, fit
from fedcomposite.analysis.paths import Several, Start, beginning, check_path, falling
from fedcomposite.analysis.strengths import regularized
from fedcomposite.problems import Problem
from fedcomposite.regularizers import Regularizer
from fedcomposite.regularizers.factors import strength, varied
from fedcomposite.results import Result
from fedcomposite.runtime.driver import Driver, driving
from fedcomposite.runtime.protocol import Rows, Task


@dataclass(frozen=True, repr=False)
class Stability(Result):
    """How often each coordinate was selected."""

    names: tuple[str, ...]
    share: npt.NDArray[np.float64]
    """Of the subsamples."""
    threshold: float
    q: int
    candidates: int
    """Regularized coordinates, p in the bound."""
    draws: int
    exchanges: int

    @property
    def bound(self) -> float:
        """Most stable coordinates that do not matter, in expectation."""
        return self.q**2 / ((2 * self.threshold - 1) * self.candidates)

    @property
    def selected(self) -> tuple[str, ...]:
        """The stable coordinates."""
        return tuple(n for n, s in zip(self.names, self.share, strict=True) if s >= self.threshold)

    @property
    def table(self) -> pd.DataFrame:
        """One row per regularized coordinate, the most stable first."""
        made = pd.DataFrame({"share": self.share, "stable": self.share >= self.threshold}, index=list(self.names))
        return made.sort_values("share", ascending=False, kind="stable")

    def to_frame(self) -> pd.DataFrame:
        return self.table

    def _line(self) -> str:
        said = f"{len(self.selected)} of {self.candidates} coordinates in at least {self.threshold:.0%} of "
        return said + f"{self.draws} halves, of which at most {self.bound:.3g} do not matter, in expectation"


def stability(
    problem: Problem,
    *,
    draws: Several = 100,
    errors: Positive = 1.0,
    threshold: Annotated[float, at.Gt(0.5), at.Le(1)] = 0.75,
    over: Literal["samples", "sites"] = "samples",
    seed: Natural = 0,
    count: Several = 50,
    ratio: Inside = 0.01,
    tolerance: ZeroOrMore = 1e-5,
    rounds: Count = 100,
    driver: Driver | None = None,
    checkpoint: str | pathlib.Path | None = None,
    resume: bool = False,
    on_exchange: Callable[[Driver], None] | None = None,
) -> Stability:
    """Find the features that are selected again and again on random halves of the data.

    Parameters
    ----------
    problem : Problem
        A linear model with a smooth loss and a regularizer that sets coordinates to zero.
    draws : int
        How many subsamples, an even number.
    errors : float
        Most features that do not matter among those selected, in expectation; q follows from it.
    threshold : float
        The share of subsamples from which on a feature is stable, above 1/2.
    over : {"samples", "sites"}
        Halves of every site's samples, or of the sites.
    seed, count, ratio, tolerance, rounds, driver, checkpoint, resume, on_exchange
        Of the halves; of the paths, as in :func:`fedcomposite.path`.
    """
    odd = isinstance(draws, int) and draws % 2 == 1
    check_path(stability, locals(), *([f"draws = {draws}, must be even: halves come in pairs"] if odd else []))
    if over == "sites" and driver is None:  # halves are of the numbers 0, 1, ..., and a subset's silos keep their own
        problem = copy.copy(problem)
        problem.silos = replace(problem.silos, ids=tuple(range(len(problem.silos))))
    with driving(stability, locals()) as driver:
        n = len(driver.ids)
        if over == "sites" and not driver.by_site:
            raise ValueError(
                "over = 'sites' asks for sums over some sites, which secure sums do not tell; take 'samples'"
            )
        if over == "sites" and n < 4:
            raise ValueError(f"over = 'sites', must be 'samples', or 'sites' where there are four or more (here {n})")
        kind: Literal["half", "sites"] = "half" if over == "samples" else "sites"
        h, d = problem.regularizer, problem.dimension
        acted_on = regularized(h, d)
        p = int(acted_on.sum())
        q = max(1, math.floor(math.sqrt(errors * (2 * threshold - 1) * p)))
        start = beginning(problem, tolerance, rounds, driver)
        lambdas = 2 * falling(problem, start, count, ratio, None)  # a half may begin earlier
        plans = [replace(start.plan, rows=Rows(kind, k // 2, n, held=bool(k % 2), seed=seed)) for k in range(draws)]
        tasks = [first(q, h, lambdas.tolist(), start, plan, acted_on) for plan in plans]
        share = torch.stack(driver.run(tasks)).double().mean(0)
        names = tuple(name for name, on in zip(problem.coordinate_names, acted_on.tolist(), strict=True) if on)
        return Stability(names, share[acted_on].numpy(), threshold, q, p, draws, driver.exchanges)


def first(q: int, h: Regularizer, lambdas: list[float], start: Start, plan: FitPlan, acted_on: Tensor) -> Task[Tensor]:
    """Mask of the first q coordinates that enter along a path; where several enter at once, the largest."""
    own = strength(h)
    chosen = torch.zeros_like(acted_on)
    at: Tensor | Fit = start.without_features
    for lam in lambdas:
        at = yield from fit(varied(h, lam / own), at, plan)
        new = (at.x != 0) & acted_on & ~chosen
        room = q - int(chosen.sum())
        entering = at.x.abs().masked_fill(~new, 0.0).topk(min(room, int(new.sum()))).indices
        chosen[entering] = True
        if int(chosen.sum()) >= q:
            break
    return chosen
