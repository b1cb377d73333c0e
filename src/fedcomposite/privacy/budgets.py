"""A budget for a whole study: how many noised requests there are, what is clipped, and what a request costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, final

import annotated_types as at

from fedcomposite._faults import UserError
from fedcomposite._validation import Count, Inside, Natural, Positive, Probability, validate
from fedcomposite.privacy.accounting import Query, compose, noise_for

Columns = Mapping[str, Sequence[float] | Sequence[str]]
_Cells = Annotated[int, at.Ge(2), at.Le(1000)]


class BudgetError(UserError):
    """A study has no budget left for a request."""


@final
@dataclass(frozen=True)
class StudyBudget:
    """Hide whether any one sample is among a site's, in all that a study asks: one (epsilon, delta) for the whole.

    Each request is a vector of sums to which a sample adds a bounded piece, with Gaussian noise in proportion to the
    bound: one query for the accountant, the same for each of them. So ``requests`` says how the budget is divided.
    Those of the parts of one division (the folds of a cross-validation) are one, since a sample is in one part.

    Parameters
    ----------
    epsilon, delta : float
        The budget.
    requests : int
        How many requests it is for; what is left over is for later. A table with description and recipe is one; a fit
        is ``steps`` + 1, a path the same; folds are one more; quality is one, curves are one.
    row_clip : float
        Largest norm of a sample's features, the intercept's 1 not counted; longer ones are shortened.
    slope_clip : float
        Largest derivative of a sample's loss by its margin, of losses that have no bound of their own: the largest
        residual of a linear regression. Those of logistic models are below 1.
    loss_clip : float
        Largest loss of a sample.
    steps : int
        Newton steps of a private fit; a linear regression needs none.
    share : float
        Share of the noise's variance that each site adds: 1/n under secure sums of n sites, whose sum has the whole.
    columns : dict
        What a description and a recipe may look at: for numbers where they lie, ``[20, 100]``; for categories their
        levels, ``["f", "m"]``. What lies outside counts at the nearest bound, a level that is none of them as another.
    cells : int
        Into which the range of a column of numbers is divided.

    Examples
    --------
    >>> budget = StudyBudget(epsilon=3.0, requests=9)
    >>> round(budget.noise, 2), round(budget.cost(9), 2)
    (4.17, 3.0)
    """

    epsilon: Positive
    delta: Inside = 1e-5
    requests: Count = 9
    row_clip: Positive = 4.0
    slope_clip: Positive = 1.0
    loss_clip: Positive = 4.0
    steps: Natural = 4
    share: Probability = 1.0
    columns: Any = field(default_factory=dict)
    cells: _Cells = 16
    book: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        validate(self)
        for name, given in self.columns.items():
            if not (_bounds(given) or _levels(given)):
                raise ValueError(
                    f"columns: {name!r} is {given!r:.60}, must be two rising numbers or some texts, each once"
                )

    @cached_property
    def noise(self) -> float:
        """The noise of a request, in units of the most that a sample adds to it."""
        return noise_for(epsilon=self.epsilon, delta=self.delta, queries=self.requests)

    def query(self, parties: int = 1) -> Query:
        """One request as an accountant sees it, when only sums over so many sites are seen."""
        return Query(self.noise * math.sqrt(min(1.0, self.share * parties)))

    def cost(self, requests: int, parties: int = 1) -> float:
        """Epsilon of so many requests."""
        return compose({self.query(parties): requests}, self.delta)

    @property
    def spent(self) -> int:
        """Requests so far, of data at hand; a site has a ledger."""
        return self.book[0]

    def charge(self, requests: int) -> None:
        """Take requests down before they are answered; refuses those that the budget is not for."""
        if self.spent + requests > self.requests:
            raise BudgetError(
                f"{self.spent} of {self.requests} requests are spent, and {requests} more are asked for: the budget of "
                f"epsilon = {self.epsilon:g} does not last"
            )
        self.book[0] += requests


def _bounds(given: Any) -> bool:
    numbers = isinstance(given, Sequence) and all(isinstance(v, int | float) and math.isfinite(v) for v in given)
    return numbers and len(given) == 2 and given[0] < given[1]


def _levels(given: Any) -> bool:
    texts = not isinstance(given, str) and isinstance(given, Sequence) and all(isinstance(v, str) for v in given)
    return texts and 0 < len(given) == len(set(given))
