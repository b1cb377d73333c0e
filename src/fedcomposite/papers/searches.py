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

    A trial's score is ``score`` of its rows, the lower the better; nan loses to everything. A partial study leaves out
    the searches whose trials are not all there.

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

    def attempt(asked: list[tuple[str, Point]]) -> list[Attempt]:
        cells = [{**wanted[label].fixed, **point} for label, point in asked]
        found = study.measured(function, cells)
        if any(study.key(function, cell) not in found for cell in cells):
            raise _MissingError
        scores = [float(score(found[study.key(function, cell)])) for cell in cells]
        return [Attempt(point, math.inf if math.isnan(s) else s) for (_, point), s in zip(asked, scores, strict=True)]

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
