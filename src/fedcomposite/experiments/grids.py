"""Grids in experiment files: ``step = {grid = [0.1, 0.5]}`` stands for one experiment with each value.

A grid in a method's table makes one method of it for each value, told apart by its label. A grid anywhere else (data,
partition, regularizer, problem, model, run) makes one *setting* for each value, and every method is run in every
setting. Several grids make all combinations, the last one running fastest. Values may be whole tables:
``data = {grid = [{name = "a9a"}, {name = "w8a"}]}``.

``step = {tune = [0.1, 0.5]}`` in a method's table chooses the value: every combination is run with the seed of
``[trials]``, and the one that ends best there is run with the seeds of the experiment. Seeds that a choice was made on
are refused among those it is reported on.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

Path = tuple[str | int, ...]
Word = Literal["grid", "tune"]
METHODS = ("algorithm", "algorithms")
FILLER: dict[str, Any] = {"data": {"name": "synthetic"}, "run": {"rounds": 0}}
"""What stands in for a section that is needed and is wrong, while the others are looked at."""
_WORDS: tuple[Word, ...] = ("grid", "tune")


class Setting(NamedTuple):
    """One combination of the values outside the methods."""

    point: dict[str, Any]
    """The value of each grid, by its field."""
    content: dict[str, Any]
    """The experiment without these grids."""


class Variant(NamedTuple):
    """One combination of the values in a method's table."""

    base: str
    """The label of the table that it was made from."""
    point: dict[str, Any]
    spec: dict[str, Any]


def single(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The experiment with its methods' grids written out, and a line for each value that is not a single one there.

    The first of several values stands in the experiment, so that it can be looked at all the same.
    """
    mended, lines = mend(content)
    several = without_grids(mended)
    places = [".".join(map(str, path)) for word in _WORDS for path, _ in find(several, word)]
    lines += [f"{place} has several values, which makes several runs: use `compare`" for place in places]
    if places:
        several = settings(several)[0].content
        several |= {k: _firsts(several[k]) for k in METHODS if k in several}
    return several, lines


def mend(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The experiment without the grids that are none, and a line for each of them.

    Of a grid with values these stay; one without any goes.
    """
    made: dict[str, Any] = copy.deepcopy(dict(content))
    lines: list[str] = []
    gone: list[Path] = []
    for word in _WORDS:
        for path, table in list(_tables(made, word)):
            values, where = table[word], ".".join(map(str, path)) or word
            if not isinstance(values, list) or not values:
                lines.append(f"{where}: {word} = {values!r}, must be a list of values")
                gone.append(path)
                continue
            if len(table) > 1:
                lines.append(f"{where}: {{{word} = [...]}} stands alone, but {_others(table, word)} is with it")
            if len(rest := [v for i, v in enumerate(values) if v not in values[:i]]) < len(values):
                lines.append(f"{where}: {word} = {values!r} has a value twice")
            if outside := word == "tune" and path[0] not in METHODS:
                lines.append(f"{where}: only the fields of a method can be tuned")
            _put(made, path, rest[0] if outside else {word: rest})
    for *above, last in reversed(gone):
        place: Any = made
        for part in above:
            place = place[part]
        del place[last]
    return {**{k: v for k, v in FILLER.items() if (k,) in gone}, **made}, lines


def _tables(content: Any, word: Word, path: Path = ()) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Every table with this word in it, sound or not, with its place."""
    if isinstance(content, Mapping) and word in content and path:
        yield path, content
    elif isinstance(content, Mapping | list):
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            yield from _tables(value, word, (*path, key))


def _firsts(content: Any) -> Any:
    """The content with the first value of everything that is to be tuned."""
    if isinstance(content, Mapping):
        return _firsts(content["tune"][0]) if "tune" in content else {k: _firsts(v) for k, v in content.items()}
    return [_firsts(v) for v in content] if isinstance(content, list) else content


def find(content: Any, word: Word, path: Path = ()) -> Iterator[tuple[Path, list[Any]]]:
    """Every grid (or choice to tune) with its place, in the order of the file; :func:`mend` has left no wrong ones."""
    return ((at, table[word]) for at, table in _tables(content, word, path))


def settings(content: Mapping[str, Any]) -> list[Setting]:
    """All combinations of the grids outside the methods; one setting without a point if there is none."""
    rest = {k: v for k, v in content.items() if k not in METHODS}
    names = _names([path for path, _ in find(rest, "grid")])
    return [Setting(point, made) for point, made in _product(content, list(find(rest, "grid")), names)]


def variants(content: Mapping[str, Any], word: Word = "grid") -> list[Variant]:
    """The methods of an experiment, one for each combination of the values in its table."""
    specs = content.get("algorithms") or ([content["algorithm"]] if "algorithm" in content else [])
    if not isinstance(specs, list) or not all(isinstance(s, Mapping) for s in specs):
        return []  # the check of the sections says what is wrong
    made = []
    for spec in specs:
        found = list(find(spec, word))
        names = _names([path for path, _ in found])
        base = str(spec.get("label", spec.get("name")))
        for point, one in _product(spec, found, names):
            made.append(Variant(base, point, labelled(one, base, point)))
    return made


def tunable(spec: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values to choose from of each field of a method's table that says ``tune``."""
    found = list(find(spec, "tune"))
    return dict(zip(_names([path for path, _ in found]), (values for _, values in found), strict=True))


def with_values(spec: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """A method's table with values in place of what is to be tuned."""
    made = copy.deepcopy(dict(spec))
    found = list(find(spec, "tune"))
    for (path, _), name in zip(found, _names([path for path, _ in found]), strict=True):
        _put(made, path, copy.deepcopy(point[name]))
    return made


def labelled(spec: dict[str, Any], base: str, point: Mapping[str, Any]) -> dict[str, Any]:
    """A method's table with a label that tells its values."""
    return {**spec, "label": f"{base} ({', '.join(f'{k}={shown(v)}' for k, v in point.items())})"} if point else spec


def without_grids(content: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment with its methods' grids written out."""
    if next(find({k: v for k, v in content.items() if k in METHODS}, "grid"), None) is None:
        return dict(content)
    rest = {k: v for k, v in content.items() if k not in METHODS}
    return {**rest, "algorithms": [v.spec for v in variants(content)]}


def shown(value: Any) -> str:
    """A value of a grid in a few letters; a table by its name."""
    if isinstance(value, Mapping):
        rest = [f"{shown(v)}" for k, v in value.items() if k != "name"]
        return " ".join([*([str(value["name"])] if "name" in value else []), *rest])
    if isinstance(value, list):
        return " + ".join(shown(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _product(
    content: Any, found: list[tuple[Path, list[Any]]], names: list[str]
) -> Iterator[tuple[dict[str, Any], Any]]:
    for values in itertools.product(*(v for _, v in found)):
        made = copy.deepcopy(dict(content))
        for (path, _), value in zip(found, values, strict=True):
            _put(made, path, copy.deepcopy(value))
        yield dict(zip(names, values, strict=True)), made


def _put(content: Any, path: Path, value: Any) -> None:
    for part in path[:-1]:
        content = content[part]
    content[path[-1]] = value


def _names(paths: list[Path]) -> list[str]:
    """The last part of each path, with as much before it as tells it apart."""
    parts = [[str(p) for p in path] for path in paths]
    return [
        next(
            name
            for k in range(1, len(own) + 1)
            if (name := ".".join(own[-k:])) and sum(other[-k:] == own[-k:] for other in parts) == 1
        )
        for own in parts
    ]


def _others(content: Mapping[str, Any], word: str) -> str:
    return ", ".join(k for k in content if k != word)
