"""Tuning that is the same for every method: a grid over its step and its own number, an optimum that lies inside.

The searches are those of :mod:`fedcomposite.experiments.tuning`; here they try cells of a study, all side by side.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from fedcomposite.experiments.tuning import Attempt, Chosen, Point, search, settle
from fedcomposite.papers.measuring import Study


class _MissingError(Exception):
    """A trial of a partial study was not made."""


class Tunable(NamedTuple):
    """The numbers of one method on one problem that are to be chosen."""

    fixed: dict[str, Any]
    """The rest of the cell."""
    grid: Mapping[str, Sequence[float]]
    """Values of each number, ascending by a common factor."""


def tuned(
    study: Study,
    function: Callable[[dict[str, Any]], pd.DataFrame],
    wanted: Mapping[str, Tunable],
    score: Callable[[pd.DataFrame], float],
    *,
    extensions: int = 4,
) -> tuple[dict[str, dict[str, float]], pd.DataFrame]:
    """The best numbers of every search, and a table of all trials with ``inside``: whether the best lies inside.

    A trial's score is ``score`` of its rows, the lower the better; nan loses to everything. Scores that ``tuning.csv``
    has of an earlier call stand where the rows themselves are not there. A partial study leaves out the searches whose
    trials are not all there.

    Parameters
    ----------
    study : Study
        Measures the cells, and keeps them.
    function : function
        From a cell to its rows, as for :meth:`Study.each`.
    wanted : mapping of str to Tunable
        By a label.
    score : function
        From a trial's rows to its score.
    extensions : int
        How often a grid may grow past an end.
    """
    names = sorted({name for one in wanted.values() for name in one.grid})
    before = _scores(study.noted("tuning"))

    def attempt(asked: list[tuple[str, Point]]) -> list[Attempt]:
        cells = {_named(*one): {**wanted[one[0]].fixed, **one[1]} for one in asked}
        known = {name for name, cell in cells.items() if name in before and not study.has(function, cell)}
        found = study.measured(function, [cell for name, cell in cells.items() if name not in known])
        scores = {name: before[name] for name in known}
        for name, cell in cells.items():
            if name not in known:
                if (key := study.key(function, cell)) not in found:
                    raise _MissingError
                scores[name] = float(score(found[key]))
        each = [(point, scores[_named(label, point)]) for label, point in asked]
        return [Attempt(point, math.inf if math.isnan(s) else s) for point, s in each]

    made: dict[str, Chosen] = {}
    labels = list(wanted)
    for together in [[label] for label in labels] if study.partial else [labels]:
        with contextlib.suppress(_MissingError):
            made |= settle({label: search(wanted[label].grid, extensions) for label in together}, attempt)
    rows = [
        {"search": label, **a.point, "score": a.score, "chosen": a.point == one.point, "inside": not one.edges}
        for label, one in made.items()
        for a in one.attempts
    ]
    order = ["search", *names, "score", "chosen", "inside"]
    return {label: dict(one.point) for label, one in made.items()}, pd.DataFrame(rows, columns=order)


def _named(label: str, point: Mapping[str, Any]) -> tuple[Any, ...]:
    """A trial's name, with its numbers as ``tuning.csv`` rounds them."""
    return label, *sorted((name, f"{value:.7g}") for name, value in point.items())


def _scores(trials: pd.DataFrame) -> dict[tuple[Any, ...], float]:
    """The scores of trials that were kept."""
    numbers = [str(name) for name in trials if name not in ("search", "score", "chosen", "inside")]
    return {
        _named(one["search"], {k: one[k] for k in numbers if not math.isnan(one[k])}): float(one["score"])
        for one in trials.to_dict("records")
    }
