"""How values are chosen: tried on a seed of their own, until the best of them lies inside of what was tried.

A search is a generator: it yields the points that it wants tried and receives what came of them, so that many searches
(methods, settings) are tried together, side by side, whoever carries out the runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fedcomposite._validation import UserError

K = TypeVar("K")
Point = dict[str, Any]
"""A value for each field that is chosen."""

TUNING = "tuning"
"""The folder of the runs that values were chosen by."""

EXTENSIONS = 2
"""How often a search goes on past an end of its grid, unless it is told."""


class TuningError(UserError):
    """No value of a grid can be run."""


class Attempt(NamedTuple):
    """A point that was tried."""

    point: Point
    score: float
    """What it came to, lower is better; inf where the run was lost."""
    refused: str = ""
    """Why it cannot be run at all, if so."""


class Chosen(NamedTuple):
    """The best point of a search."""

    point: Point
    score: float
    attempts: tuple[Attempt, ...]
    edges: tuple[str, ...]
    """Fields whose best value is still at an end of all that was tried: a better one may lie beyond."""

    @property
    def skipped(self) -> list[Attempt]:
        """The points that could not be run."""
        return [attempt for attempt in self.attempts if attempt.refused]

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the choice, a line each."""
        lines = [f"{told(a.point)} was skipped: {a.refused.splitlines()[0]}" for a in self.skipped]
        ends = {f: _shown(self.point[f]) for f in self.edges}
        return lines + [
            f"{f} = {v} is at an end of what was tried: a better one may lie beyond" for f, v in ends.items()
        ]


Search = Generator[list[Point], list[Attempt], Chosen]


def search(grid: Mapping[str, Sequence[Any]], extensions: int = EXTENSIONS) -> Search:
    """Every combination of a grid, then values past the ends where the best one lies.

    A number at an end is followed by the next one in the same ratio (difference, where a value is not positive), up
    to ``extensions`` times. A value beyond that is refused, or ends worse, is an end that was found.

    Examples
    --------
    >>> def tries(batch):  # the best step is 0.3
    ...     return [Attempt(point, (point["step"] - 0.3) ** 2) for _, point in batch]
    >>> made = settle({"FedAvg": search({"step": [0.1, 0.2]})}, tries)["FedAvg"]
    >>> made.point, made.edges, [a.point["step"] for a in made.attempts]
    ({'step': 0.2}, (), [0.1, 0.2, 0.4])
    """
    names = list(grid)
    tried: list[Attempt] = []
    wanted: list[Point] = [dict(zip(names, v, strict=True)) for v in itertools.product(*grid.values())]
    for left in range(extensions, -1, -1):
        tried += yield wanted
        best = min(tried, key=lambda a: a.score)
        if not math.isfinite(best.score):
            why = dict.fromkeys(a.refused.splitlines()[0] for a in tried if a.refused)
            raise TuningError(f"no value of {', '.join(names)} can be taken: {'; '.join(why) or 'every run was lost'}")
        beyond = {name: points for name in names if (points := _beside(name, best.point, tried))}
        if not beyond or not left:
            break
        wanted = [point for points in beyond.values() for point in points]
    return Chosen(best.point, best.score, tuple(tried), tuple(beyond))


def _beside(name: str, best: Point, tried: Sequence[Attempt]) -> list[Point]:
    """The points on either side of the best one, in one field, that were not tried yet; past an end a new value."""
    values = [a.point[name] for a in tried]
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return []
    ordered, value = sorted(set(values)), best[name]
    if len(ordered) < 2:
        return []
    at, known = ordered.index(value), [a.point for a in tried]
    low = ordered[at - 1] if at else _past(value, ordered[1])
    high = ordered[at + 1] if at + 1 < len(ordered) else _past(value, ordered[-2])
    points = [{**best, name: v} for v in (low, high) if v is not None]
    return [point for point in points if point not in known]


def _past(value: Any, neighbour: Any) -> Any:
    """The next value past an end: in the same ratio, or at the same distance; None if there is none."""
    made = value * value / neighbour if value > 0 and neighbour > 0 else 2 * value - neighbour
    if isinstance(value, int) and isinstance(neighbour, int):
        made = round(made)
    elif float(f"{made:.12g}") != value:
        made = float(f"{made:.12g}")  # 0.1 * 2 and the like, without the dust of rounding
    return None if made == value or value == 0 or made == 0 else made


def settle(searches: Mapping[K, Search], attempt: Callable[[list[tuple[K, Point]]], list[Attempt]]) -> dict[K, Chosen]:
    """Carry out searches together: what all of them want next is tried at a time."""
    found: dict[K, Chosen] = {}
    wanted = {key: next(one) for key, one in searches.items()}
    while wanted:
        asked = [(key, point) for key, points in wanted.items() for point in points]
        answers = iter(attempt(asked))
        mine = {key: [next(answers) for _ in points] for key, points in wanted.items()}
        wanted = {}
        for key, seen in mine.items():
            try:
                wanted[key] = searches[key].send(seen)
            except StopIteration as end:
                found[key] = end.value
            except TuningError as error:
                raise TuningError(f"{key}: {error}" if isinstance(key, str) else str(error)) from None
    return found


def score(last: Mapping[str, Any], status: str, criterion: str) -> float:
    """What a run came to by its last record, lower is better; inf if it was lost."""
    if criterion not in last:
        raise ValueError(f"criterion = {criterion!r} is not in the records (they have: {', '.join(last)})")
    value, highest = float(last[criterion]), "accuracy" in criterion or criterion in ("auc", "r2")
    lost = status == "diverged" or not math.isfinite(value)
    return math.inf if lost else -value if highest else value


def told(point: Mapping[str, Any]) -> str:
    """A point in a few words.

    >>> told({"step": 0.1, "local_steps": 5})
    'step = 0.1, local_steps = 5'
    """
    return ", ".join(f"{k} = {_shown(v)}" for k, v in point.items())


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
