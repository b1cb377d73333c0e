"""Which method for which problem, and why in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from fedcomposite import theory
from fedcomposite.algorithms import FedNMap, ProxNewton, ProxScaffnew, SketchNewton
from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.problems import Loss, Problem
from fedcomposite.problems.smoothed import KINKED
from fedcomposite.regularizers.wrapped import settled

AUTO = "auto"
"""The name of a method that is to be chosen."""
Curvature = Literal["auto", "never"]
"""Whether clients may send Hessians; "never" allows no more than products of theirs with a few directions."""
SKETCHES = 2000
"""Coordinates up to which a server works with such products."""
HESSIANS = 4000
"""Coordinates up to which Newton steps are taken with an h that couples all of them."""


class Choice(NamedTuple):
    """A method and the reason for it."""

    algorithm: AnyAlgorithm
    why: str


def check_auto(fields: Mapping[str, Any]) -> None:
    """Refuse fields of a method that is to be chosen."""
    if extra := sorted(set(fields) - {"local_steps"}):
        raise ValueError(f"name = 'auto' chooses {extra[0]!r} itself; it takes local_steps only")


def newton_fits(problem: Problem, *, kinks: bool = False) -> bool:
    """Whether Newton steps can solve a problem in which every client takes part; with ``kinks``, behind a barrier."""
    h, loss = problem.regularizer, problem.loss
    if not (isinstance(loss, Loss) and h.weakly_convex):
        return False
    if not (loss.twice if loss.smooth else kinks and isinstance(loss, KINKED)):
        return False
    coupled = not bool(h.coupling(problem.dimension).any()) and problem.dimension > 1
    return not coupled or problem.dimension <= HESSIANS


def choose(
    problem: Problem,
    *,
    participation: float = 1.0,
    local_steps: int = 10,
    L: float | None = None,
    constants: theory.Constants | None = None,
    curvature: Curvature = "auto",
) -> Choice:
    """The method that needs the fewest rounds, with steps from the problem's constants.

    Parameters
    ----------
    problem : Problem
        What to solve.
    participation : float
        Share of the clients in a round.
    local_steps : int
        Local steps of a first-order method.
    L : float, optional
        A smoothness constant to use in place of the measured one; a network has no other.
    constants : Constants, optional
        The problem's constants where its data are not here; measured if left out.
    curvature : str
        "never": no Hessian may leave a client.
    """
    h, everyone = problem.regularizer, participation >= 1
    settled(h)
    linear = isinstance(problem.loss, Loss)
    never, many = curvature == "never", problem.dimension > SKETCHES
    if everyone and newton_fits(problem) and never and not many:
        return Choice(SketchNewton(), "the model is linear, its loss smooth, and no Hessian may leave a client")
    if everyone and newton_fits(problem) and not never:
        return Choice(ProxNewton(), "the model is linear, its loss smooth, and every client takes part")
    if linear and (L is None or not problem.loss.smooth):
        known = theory.constants(problem, participation=participation) if constants is None else constants
        if not problem.loss.smooth:
            return Choice(theory.auto("FedMLS", known, local_steps), f"{problem.loss} has kinks")
        L = (known.need("scale")[0] if known.L is None else known.L) * known.amplification
    if L is None:
        raise ValueError("the smoothness of a network is unknown; give L, or call solve, which tries steps")
    rho = h.rho if h.weakly_convex else 0.0
    if not everyone:
        return Choice(FedNMap.auto_partial(L, rho, local_steps), "only some clients take part in a round")
    made = FedNMap.auto(L, rho, local_steps)
    if not linear:
        return Choice(made, "a network offers gradients only")
    if not h.weakly_convex:
        return Choice(made, "h is not weakly convex")
    if isinstance(problem.loss, Loss) and not problem.loss.twice:
        return Choice(made, f"{problem.loss} has no second derivative")
    if never:
        why = f"no Hessian may leave a client, and {problem.dimension} coordinates are too many for sketches"
        return Choice(ProxScaffnew.auto(L, rho, local_steps), why)
    why = f"h couples all {problem.dimension} coordinates, too many for Hessians"
    return Choice(ProxScaffnew.auto(L, rho, local_steps), why)
