"""What a theorem is, and the sentences for conditions that many share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcomposite.theory.measured import Constants

Floats = npt.NDArray[np.float64]
Bounded = Literal["stationarity", "objective", "distance"]


class Correction(NamedTuple):
    """A constant of a theorem that its own proof does not give."""

    what: str
    """What the constant multiplies."""
    printed: float
    derivable: float
    """What the proof gives, which :meth:`Theorem.bound` takes."""
    note: str


class Theorem(ABC):
    """What a paper guarantees for a method."""

    paper: ClassVar[str]
    bounds: ClassVar[Bounded | None] = None
    """What :meth:`bound` limits: the mean of ||G_s||^2 over the models so far, F - min F, or ||x - x*||^2."""
    chooses: ClassVar[tuple[str, ...]]
    """The fields that :meth:`steps` takes from the constants."""

    @abstractmethod
    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """The fields of the method with the largest steps that the theorem allows."""

    @abstractmethod
    def violations(self, method: Any, c: Constants) -> list[str]:
        """A sentence for every condition that does not hold."""

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """The theorem's right-hand side after each number of rounds, with constants that the proof gives."""
        raise ValueError(f"{self}: the bound is stated up to an unnamed constant factor, so it has no number")

    def corrections(self, method: Any, c: Constants) -> list[Correction]:
        """The constants that the paper prints otherwise than its proof gives them, for a method's own steps."""
        return []

    def measured_at(self, method: Any) -> float | None:
        """The step s of the prox-gradient mapping that the theorem bounds."""
        return None

    def __str__(self) -> str:
        return self.paper


def above(what: str, value: float, limit: float, formula: str) -> list[str]:
    """A sentence if value > limit, with room for rounding."""
    return [f"{what} = {value:.3g} is above {formula} = {limit:.3g}"] if value > limit * (1 + 1e-9) else []


def below(what: str, value: float, limit: float, formula: str) -> list[str]:
    """A sentence if value < limit, with room for rounding."""
    return [f"{what} = {value:.3g} is below {formula} = {limit:.3g}"] if value < limit * (1 - 1e-9) else []


def everyone(c: Constants) -> list[str]:
    """A sentence if some clients sit out."""
    few = c.participants < c.n
    return [f"only {c.participants} of {c.n} clients take part in a round, the theorem needs all"] if few else []


def convex(c: Constants) -> list[str]:
    """A sentence if h is only weakly convex."""
    return [f"the regularizer is weakly convex (rho = {c.rho:.3g}), the theorem needs a convex one"] if c.rho else []


def smooth_only(c: Constants) -> list[str]:
    """A sentence if the losses are not smooth."""
    return ["the loss has no smoothness constant, and the theorem needs one"] if c.L is None else []


def curved(c: Constants) -> list[str]:
    """A sentence if no strong convexity is known."""
    return [] if c.mu else ["mu = 0: no strong convexity is known, the theorem needs some"]


def positive_mu(theorem: Theorem, c: Constants) -> float:
    """Return mu, which the theorem cannot do without."""
    if not c.mu:
        raise ValueError(f"{theorem} needs mu > 0; give mu")
    return c.mu
