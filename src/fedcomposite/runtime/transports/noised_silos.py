"""Silos at hand that answer under a budget, with the noise of counters: for studies of what noise costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcomposite.privacy import BudgetError, Counters, Source, StudyBudget
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import Cox
from fedcomposite.runtime.noised_sums import Normal, cost, noised
from fedcomposite.runtime.protocol import Request
from fedcomposite.runtime.transports.silo_answers import SiloTransport, added


def check_study(problem: Problem) -> None:
    """Refuse what a budget does not protect: samples that count more than others."""
    if problem.silos.weights is not None or problem.weighting != "samples":
        raise BudgetError("a study under a budget counts samples alike: weights='samples', and no weights of samples")
    if isinstance(problem.loss, Cox) and problem.silos.targets.shape[1] > 2:
        raise BudgetError("a study under a budget has no late entries and no strata of times to an event")


class NoisedSilos(SiloTransport):
    """The silos of a problem under a budget, which is charged before they answer.

    ``source`` gives the noise: one number for each of (silo, exchange, request, place). With shares of noise only sums
    are told.
    """

    def __init__(self, problem: Problem, budget: StudyBudget, source: Source | None = None) -> None:
        check_study(problem)
        super().__init__(problem)
        self._budget, self._bias, self._source = budget, problem.bias, source or Counters(0)
        self._exchange, self.centre = 0, None
        self.by_site = budget.share == 1

    def ask(self, requests: Sequence[Request]) -> list[Any]:
        """The noised sums over silos; for a request by site the list of them."""
        self._budget.charge(cost(requests, self.silos[0].loss))
        self._exchange += 1
        with self.running():
            each = [
                noised(silo, requests, self._budget, self._bias, self._normal(silo.id, self._exchange))
                for silo in self.silos
            ]
        self.counter.bytes_down += len(self.silos) * sum(r.nbytes for r in requests)
        self.counter.bytes_up += sum(v.nbytes for one in each for sums in one for v in sums.values())
        made = [list(one) for one in zip(*each, strict=True)]
        return [one if request.by_site else added(one) for request, one in zip(requests, made, strict=True)]

    def recalled(self, requests: Sequence[Request]) -> None:
        """What was answered before is spent, and its noise is not used again."""
        self._budget.charge(cost(requests, self.silos[0].loss))
        self._exchange += 1

    def _normal(self, id: int, exchange: int) -> Normal:
        return noise_of(self._source, id, exchange)


def noise_of(source: Source, id: int, exchange: int) -> Normal:
    """Normal numbers for the answers of one party in one exchange, one after another."""
    asked = iter(range(1 << 31))

    def normal(count: int) -> npt.NDArray[np.float64]:
        drawn: npt.NDArray[np.float64] = source.normal(np.array([id], np.uint64), exchange, next(asked), count)[0]
        return drawn

    return normal
