"""Text as numbers: one column of a table, read piece by piece, with a record of every cell that is not a number.

What counts as a number is what this module says, not what some parser accepts: ``1.5``, ``-2e-3``, and ``1,5`` where
the comma is the decimal mark, with spaces around them. Underscores, thousands separators, hexadecimal numbers and other
digits than 0 to 9 are text.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedcomposite.data.faults import Fault

Floats = npt.NDArray[np.float64]

MISSING = frozenset(("", "?", "-", "--", ".", "na", "n/a", "#n/a", "#na", "<na>", "nan", "null", "none"))
"""Markers of absent values that are always known, whatever their case."""
EXACT = 2**53  # from here on a 64-bit float skips whole numbers

_ULPS = 4  # of a mean: what the same number becomes by two ways of computing it
_PLAIN = b"0123456789+-.eE \t"  # a column of these characters is left to float(), which is fast and exact
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?", re.ASCII)
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}", re.ASCII)  # a thousand, or one and some thousandths?
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(([ ,.'’\u00a0\u202f])\d{3})+([.,]\d*)?", re.ASCII)
_GROUPS = r"([+-]?\d{{1,3}}(?:[{0}]\d{{3}})+)([.,]\d*)?"
_MARKS = {" ": " \u00a0\u202f", "'": "'’"}
_WORDS = {"true": 1.0, "false": 0.0}
_FIRST = 3  # places that a message names


def spread_of(mean: npt.ArrayLike, sd: npt.ArrayLike) -> Floats:
    """Deviations, 0 where a column is constant up to rounding: within some units of the last digit of its mean.

    >>> spread_of([0.3, 1000.0, 0.0], [4e-17, 1e-4, 0.0]).tolist()
    [0.0, 0.0001, 0.0]
    """
    given = np.asarray(sd, np.float64)
    return np.where(given <= _ULPS * np.finfo(np.float64).eps * np.abs(mean), 0.0, given)


@dataclass
class Found:
    """Cells of one kind: how many, the first rows, and what the first one says."""

    sample: str
    rows: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, row: int) -> None:
        """Count a cell."""
        self.count += 1
        if len(self.rows) < _FIRST:
            self.rows.append(row)


class Column:
    """A column of text that becomes numbers.

    Parameters
    ----------
    name : str
        Its name, for messages; none for an array's values.
    missing : collection of str
        Markers of absent values besides :data:`MISSING`; a number among them marks that number.
    decimal : {".", ",", None}
        The decimal mark; None accepts a comma for the time being, see :func:`decimal_faults`.
    thousands : str, optional
        What stands between groups of three digits, where that was said; a space is also a narrow or a hard one.
    """

    def __init__(self, name: str, missing: Sequence[str], decimal: str | None, thousands: str | None = None) -> None:
        self.name, self.decimal, self.length = name, decimal, 0
        self._grouped = None if thousands is None else re.compile(_GROUPS.format(_MARKS.get(thousands, thousands)))
        self.label = f"column {name!r}" if name else "the array"
        self.markers = MISSING | {marker.strip().casefold() for marker in missing}
        self.numeric = [float(m.strip()) for m in missing if _NUMBER.fullmatch(m.strip())]
        self.found: dict[str, Found] = {}
        self.dot: str | None = None
        self.grouped_only = True
        self._parts: list[Floats] = []

    def add(self, cells: Sequence[str]) -> None:
        """Take the next cells."""
        joined = "".join(cells)
        values = None
        plain = self._grouped is None and joined.isascii() and not joined.encode().translate(None, _PLAIN)
        if plain and not (self.decimal == "," and "." in joined):
            with contextlib.suppress(ValueError):  # an empty cell, or something like "1-2"
                values = np.fromiter(map(float, cells), np.float64, len(cells))
        if values is None:
            values = np.array([self._cell(cell.strip(), self.length + i) for i, cell in enumerate(cells)], np.float64)
        elif self.dot is None and "." in joined:
            self.dot = next(cell for cell in cells if "." in cell)
        self._check(values, cells)
        self.extend(values)

    def extend(self, values: Floats) -> None:
        """Take numbers that were read elsewhere."""
        self._parts.append(values)
        self.length += len(values)

    @property
    def values(self) -> Floats:
        """The numbers; NaN where there is none."""
        return np.concatenate(self._parts) if self._parts else np.empty(0)

    def note(self, kind: str, row: int, sample: str) -> None:
        """Record a cell that is not an ordinary number."""
        self.found.setdefault(kind, Found(sample)).add(row)

    def _cell(self, text: str, row: int) -> float:
        if self._grouped is not None and (found := self._grouped.fullmatch(text)) is not None:
            text = re.sub(r"[^0-9+-]", "", found[1]) + (found[2] or "")
        folded = text.casefold()
        if _NUMBER.fullmatch(text) and not ("." in text and self.decimal == ","):
            if self.dot is None and "." in text:
                self.dot = text
            return float(text)
        if _COMMA.fullmatch(text) and self.decimal != ".":
            self.note("comma", row, text)
            self.grouped_only = self.grouped_only and _GROUPED.fullmatch(text) is not None
            return float(text.replace(",", "."))
        if folded in self.markers:
            self.note("missing", row, text)
            return np.nan
        if folded in _WORDS:
            self.note("word", row, text)
            return _WORDS[folded]
        self.note("infinite" if folded.lstrip("+-") in ("inf", "infinity") else "text", row, text)
        return np.nan

    def _check(self, values: Floats, cells: Sequence[str]) -> None:
        """Numbers that mark absence, are out of range or lose digits."""
        for marker in self.numeric:
            for i in np.flatnonzero(values == marker).tolist():
                self.note("missing", self.length + i, cells[i])
        with np.errstate(invalid="ignore"):
            large = np.flatnonzero(np.abs(values) >= EXACT).tolist()
        for i in large:
            if np.isinf(values[i]):
                self.note("large", self.length + i, cells[i])
            elif cells[i].strip().lstrip("+-").isdigit() and int(cells[i]) != int(values[i]):
                self.note("inexact", self.length + i, cells[i])


def decimal_faults(columns: Sequence[Column], source: str) -> list[Fault]:
    """Whether the commas in the numbers of a file can only be decimal marks; otherwise nobody may guess."""
    commas = [c for c in columns if c.decimal is None and "comma" in c.found]
    if not commas:
        return []
    sample = commas[0].found["comma"].sample
    dots = [c for c in columns if c.dot is not None]
    if dots:
        clash = f"{dots[0].dot!r} in column {dots[0].name!r}"
    elif all(c.grouped_only for c in commas):
        clash = "which may be a thousand or a fraction"
    else:
        return []
    what = f"the decimal mark is unclear: {sample!r} in column {commas[0].name!r}, {clash}"
    return [Fault(source, what, "say decimal = ',' or '.'", count=sum(c.found["comma"].count for c in commas))]


def grouped_by_commas(columns: Sequence[Column]) -> str | None:
    """The column whose commas can but part thousands: the file has decimal points, three digits follow every comma."""
    commas = [c for c in columns if c.decimal is None and "comma" in c.found]
    if commas and all(c.grouped_only for c in commas) and any(c.dot is not None for c in columns):
        return commas[0].name
    return None


def shown(text: str) -> str:
    """A cell in quotes, cut where it is long."""
    return repr(text if len(text) <= 30 else text[:27] + "...")


def column_faults(
    column: Column, source: str, position: int, lines: Sequence[int], *, gaps: bool = False
) -> list[Fault]:
    """What is wrong with a column; ``lines`` are the lines of the file where the rows start, if it has lines.

    With ``gaps`` missing values are not.
    """
    out = []

    def fault(kind: str, what: str, remedy: str, place: str = "data row {}") -> None:
        found = column.found[kind]
        at = tuple(lines[row] for row in found.rows) if lines else ()
        more = ", ..." if found.count > len(at) else ""
        where = f" (line{'s' if len(at) > 1 else ''} {', '.join(map(str, at))}{more})" if at else ""
        place = place.format(found.rows[0])
        out.append(Fault(source, f"{what}, the first in {place}{where}", remedy, column.name or None, found.count, at))

    name = column.label
    count = {kind: found.count for kind, found in column.found.items()}
    if "missing" in count and not gaps:
        remedy = "impute or drop them before the run"
        fault("missing", f"{name} has {count['missing']} missing value(s)", remedy)
    if "text" in count:
        sample = column.found["text"].sample
        what = f"{name} is not numeric: {count['text']} of {column.length} values, such as {shown(sample)}"
        grouped = _THOUSANDS.fullmatch(sample) is not None
        remedy = "write numbers without thousands separators" if grouped else "encode it as numbers or put it in `drop`"
        fault("text", what, remedy)
    if "infinite" in count:
        what = f"{name}: {count['infinite']} value(s) are NaN or infinite"
        fault("infinite", what, "impute or drop them before the run", f"row {{}}, column {position}")
    if "large" in count:
        fault("large", f"{name}: {count['large']} number(s) beyond 1.8e308, the largest float64", "rescale the column")
    if "inexact" in count:
        remedy = "drop it if it is an identifier, or rescale it"
        fault("inexact", f"{name}: {count['inexact']} whole number(s) beyond 2^53 would lose digits", remedy)
    words = count.get("word", 0)
    if words and words + sum(count.get(k, 0) for k in ("missing", "text", "infinite")) < column.length:
        fault("word", f"{name} mixes true and false with numbers", "write 1 and 0")
    return out
