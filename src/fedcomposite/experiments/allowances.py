"""What a run may spend, the same for all that are compared: rounds, bytes, gradients, proxes or seconds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from fedcomposite._validation import UserError, suggest
from fedcomposite.algorithms import AnyAlgorithm
from fedcomposite.plots import AXES
from fedcomposite.problems import Problem
from fedcomposite.runtime import DivergenceWarning, Record, Run, simulate
from fedcomposite.runtime.callbacks import Callback, View

POINTS = 100
"""Records of a run, about."""
_MOST = 1_000_000


class Allowance(NamedTuple):
    """An amount of something that runs spend."""

    unit: str
    amount: float

    @classmethod
    def of(cls, given: object) -> Self:
        """Read ``200`` (rounds) or ``{"bytes": 1e6}``.

        >>> Allowance.of({"bytes": 1e6}), Allowance.of(50)
        (Allowance(unit='bytes', amount=1000000.0), Allowance(unit='rounds', amount=50))
        """
        table = {"rounds": given} if isinstance(given, int) and not isinstance(given, bool) else given
        if not isinstance(table, Mapping) or len(table) != 1:
            raise UserError(f"budget = {given!r}, must be a number of rounds, or one of {{{', '.join(AXES)}: amount}}")
        [(unit, amount)] = table.items()
        if unit not in AXES:
            raise UserError(
                f"budget: nothing is counted in {unit!r}{suggest(str(unit), AXES)} (known: {', '.join(AXES)})"
            )
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < math.inf:
            raise UserError(f"budget: {unit} = {amount!r}, must be a positive number")
        if unit == "rounds" and amount != int(amount):
            raise UserError(f"budget: rounds = {amount!r}, must be a whole number")
        return cls(unit, amount)

    def spent(self, record: Mapping[str, Any]) -> float:
        """What a run had spent at a record."""
        return float(sum(record[key] for key in AXES[self.unit][1]))

    def within(self, history: Sequence[Record]) -> list[Record]:
        """The records that were paid for; the model before the first round is free."""
        return [r for i, r in enumerate(history) if i == 0 or self.spent(r) <= self.amount]

    def __str__(self) -> str:
        return f"{self.amount:g} {self.unit}"


class BudgetEnd(Callback):
    """Ends a run whose allowance is spent."""

    def __init__(self, allowance: Allowance) -> None:
        self.allowance = allowance

    def __call__(self, view: View) -> None:
        if self.allowance.spent(view.record) >= self.allowance.amount:
            view.stop(f"{self.allowance} are spent")


def spend(problem: Problem, method: AnyAlgorithm, allowance: Allowance, settings: Mapping[str, Any]) -> Run:
    """A run with as many rounds as an allowance pays for, and about a hundred records of it.

    What a round costs is measured on a few; a run whose rounds turn out to be cheaper is done again with more.
    """
    rounds = int(allowance.amount) if allowance.unit == "rounds" else _rounds(problem, method, allowance, settings)
    stop = [*settings.get("callbacks", ()), BudgetEnd(allowance)]
    while True:
        every = settings.get("evaluate_every") or max(1, rounds // POINTS)
        chosen = {**settings, "rounds": rounds, "evaluate_every": every, "callbacks": stop}
        run = _quietly(problem, method, chosen)
        short = run.status == "completed" and allowance.spent(run.history[-1]) < 0.98 * allowance.amount
        if not short or allowance.unit == "rounds" or rounds >= _MOST:
            return run
        rounds = min(_MOST, math.ceil(1.1 * rounds * allowance.amount / max(allowance.spent(run.history[-1]), 1e-9)))


def _rounds(problem: Problem, method: AnyAlgorithm, allowance: Allowance, settings: Mapping[str, Any]) -> int:
    probe = _quietly(
        problem, method, {**settings, "rounds": 3 * method.exchanges, "evaluate_every": 1, "callbacks": ()}
    )
    each = allowance.spent(probe.history[-1]) / max(1, probe.rounds)
    if each <= 0:
        raise UserError(f"{type(method).__name__} spends no {allowance.unit} in a round: take another budget")
    return min(_MOST, max(1, math.ceil(allowance.amount / each)))


def _quietly(problem: Problem, method: AnyAlgorithm, settings: Mapping[str, Any]) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)  # the status says it
        return simulate(problem, method, progress=False, **settings)
