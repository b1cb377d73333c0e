"""Who is protected: one sample (a patient of a hospital), or one client as a whole (a phone)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, final

import annotated_types as at

from fedcomposite._validation import Positive, Probability, validate
from fedcomposite.privacy.accounting import Query, compose
from fedcomposite.privacy.budgets import StudyBudget
from fedcomposite.registry import make

Delta = Annotated[float, at.Gt(0), at.Lt(1)]


@final
@dataclass(frozen=True)
class SampleLevel:
    """Hide whether any one sample is among a client's.

    Every gradient that a method asks for is a query of its own: of samples that take part with probability ``rate``,
    the gradients are clipped, added up, noised, and divided by the expected number of samples. What a method makes of
    them costs nothing more.

    Parameters
    ----------
    clip : float
        Largest norm of one sample's gradient.
    noise : float
        Standard deviation of the noise, in units of ``clip``: the noise multiplier.
    rate : float
        Probability with which a sample takes part in a query (Poisson sampling); it stands in for ``batch_size``.
    delta : float
        Delta at which epsilon is told.
    share : float
        Share of the noise's variance that each client adds: 1/n under secure aggregation of n clients, whose sum then
        has the whole. For methods whose replies are linear in what the clients compute.
    hessian_clip : float, optional
        Largest Frobenius norm of one sample's Hessian; curvature of the loss times ``clip**2`` if left out.
    loss_clip : float
        Largest loss of one sample that is told, where losses are asked for.
    """

    clip: Positive
    noise: Positive
    rate: Probability = 1.0
    delta: Delta = 1e-5
    share: Probability = 1.0
    hessian_clip: Positive | None = None
    loss_clip: Positive = 4.0

    def __post_init__(self) -> None:
        validate(self)

    def query(self, parties: int = 1) -> Query:
        """One query as an accountant sees it, when only sums over so many clients are seen."""
        return Query(self.noise * math.sqrt(min(1.0, self.share * parties)), self.rate)

    def epsilon(self, queries: int, parties: int = 1) -> float:
        """What so many queries cost.

        >>> round(SampleLevel(clip=1.0, noise=20.0).epsilon(100), 2)
        1.99
        """
        return compose({self.query(parties): queries}, self.delta)


@final
@dataclass(frozen=True)
class ClientLevel:
    """Hide whether any one client takes part: replies are clipped, and their mean is noised.

    Clipped is the change that a client's data make to its reply. The server adds the noise, so it is trusted; cohorts
    are drawn from a seed that it knows, so rounds that a client sits out cost it nothing, and those with it the whole.

    Parameters
    ----------
    clip : float
        Largest norm of the change of a reply, all its vectors together.
    noise : float
        Standard deviation of the noise on the sum of replies, in units of ``clip``.
    delta : float
        Delta at which epsilon is told.
    """

    clip: Positive
    noise: Positive
    delta: Delta = 1e-5

    def __post_init__(self) -> None:
        validate(self)

    def query(self, parties: int = 1) -> Query:
        """One round as an accountant sees it."""
        return Query(self.noise)

    def epsilon(self, queries: int, parties: int = 1) -> float:
        """What so many rounds cost a client that takes part in all of them."""
        return compose({self.query(): queries}, self.delta)


Privacy = SampleLevel | ClientLevel
"""Of the rounds of a method."""
_LEVELS: dict[str, type[Any]] = {"sample": SampleLevel, "client": ClientLevel, "study": StudyBudget}


def build(fields: Mapping[str, Any]) -> Privacy | StudyBudget:
    """Make a level from ``[privacy]`` of an experiment: ``level`` and its fields."""
    level = fields.get("level", "sample")
    if level not in _LEVELS:
        raise ValueError(f"level = {level!r}, must be 'sample' or 'client' for a run, 'study' for an analysis")
    made: Privacy | StudyBudget = make(_LEVELS[level], {k: v for k, v in fields.items() if k != "level"})
    return made
