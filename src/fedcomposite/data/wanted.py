"""What to read of a file and how it is written, checked before any file is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcomposite.data.faults import DataError

MARKERS = ("?",)
THOUSANDS = (".", ",", " ", "'")


@dataclass(frozen=True)
class Wanted:
    """The options of :meth:`fedcomposite.Silos.from_files`."""

    target: str
    drop: tuple[str, ...] = ()
    missing: tuple[str, ...] = MARKERS
    columns: Mapping[str, str] = field(default_factory=dict)
    """Common name = name in the file."""
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    thousands: str | None = None
    weight: str | None = None
    """The column that says what each sample counts."""
    offset: str | None = None
    """The column that is added to each sample's margin."""

    @property
    def roles(self) -> dict[str, str]:
        """The columns that are no features, by what they are."""
        found = {"target": self.target, "weight": self.weight, "offset": self.offset}
        return {role: name for role, name in found.items() if name}

    @property
    def own_target(self) -> str:
        """The target's name in a file that needs renaming."""
        return self.columns.get(self.target, self.target)


def wanted(*, target: Any, drop: Any, missing: Any, columns: Any, **style: str | None) -> Wanted:
    """The options of a caller or a configuration; all that do not fit are named in one error."""
    wrong: list[str] = []
    if not isinstance(target, str):
        wrong.append(f"target = {target!r} must be the name of a column")
    made = Wanted(
        str(target).strip(),
        _names("drop", drop, wrong),
        _names("missing", missing, wrong),
        _pairs(columns, wrong),
        **style,
    )
    own = list(made.columns.values())
    wrong += [f"drop = {name!r} is the target" for name in made.drop if name in (made.target, made.own_target)]
    for role, name in made.roles.items():
        if role != "target" and not isinstance(name, str):
            wrong.append(f"{role} = {name!r} must be the name of a column")
        elif role != "target" and name in made.drop:
            wrong.append(f"drop = {name!r} is the {role}")
    if len(set(map(str, made.roles.values()))) < len(made.roles):
        wrong.append("target, weight and offset must be different columns")
    wrong += [f"column {name!r} is both in columns and in drop" for name in own if name in made.drop]
    wrong += [f"columns gives {name!r} several names" for name in sorted({n for n in own if own.count(n) > 1})]
    mark = made.separator
    if made.decimal not in (None, ".", ","):
        wrong.append(f"decimal = {made.decimal!r} must be '.' or ','")
    if mark is not None and (len(mark) != 1 or mark in '"\r\n'):
        wrong.append(f"separator = {mark!r} must be one character")
    elif made.thousands is not None and (made.thousands not in THOUSANDS or made.thousands == made.decimal):
        wrong.append(
            f"thousands = {made.thousands!r} must be one of {', '.join(map(repr, THOUSANDS))}, not the decimal"
        )
    elif mark is not None and mark == made.decimal:
        wrong.append(f"separator and decimal are both {mark!r}")
    if wrong:
        raise DataError("; ".join(wrong))
    return made


def _names(option: str, given: Any, wrong: list[str]) -> tuple[str, ...]:
    """A list of names; a string is one name, not its letters."""
    many = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not all(isinstance(name, str) for name in many):
        wrong.append(f"{option} = {given!r} must be a name or a list of names")
        return ()
    return tuple(name.strip() for name in many)


def _pairs(given: Any, wrong: list[str]) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for pair in given.items() for name in pair):
        wrong.append(f"columns = {given!r} must map common names to names in the files")
        return {}
    return {common.strip(): own.strip() for common, own in given.items()}
