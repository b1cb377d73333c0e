"""One column of a table, read piece by piece: its numbers, a record of every cell that is none, and what that means.

What counts as a number is what this module says, not what some parser accepts: ``1.5``, ``-2e-3``, and ``1,5`` where
the comma is the decimal mark, with spaces around them. Underscores, thousands separators, hexadecimal numbers and other
digits than 0 to 9 are text.
"""

from __future__ import annotations

import contextlib
import numbers
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedcomposite.data.faults import Fault

Array = npt.NDArray[Any]
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
class OddCells:
    """Cells of one kind: how many, the first rows, and what the first one says."""

    sample: str
    rows: list[int] = field(default_factory=list)
    count: int = 0


def level(value: float | str) -> str:
    """A category's name: 1 and 1.0 are the same, whether they are written as numbers or as text."""
    if isinstance(value, str):
        text = value.strip()
        try:
            value = float(text)
        except ValueError:
            return text
        if not np.isfinite(value) or "_" in text:
            return text
    return str(int(value)) if value == int(value) else repr(float(value))


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
    texts : bool
        Whether the column may be one of texts, or have gaps; otherwise it has to be one of numbers.
    position : int
        Its place in the table, for messages.
    """

    def __init__(
        self,
        name: str,
        missing: Sequence[str],
        decimal: str | None,
        thousands: str | None = None,
        *,
        texts: bool = False,
        position: int = 0,
    ) -> None:
        self.name, self.decimal, self.position, self.length = name, decimal, position, 0
        self.texts, self.cells = texts, list[str]()
        self._grouped = None if thousands is None else re.compile(_GROUPS.format(_MARKS.get(thousands, thousands)))
        self.label = f"column {name!r}" if name else "the array"
        self.markers = MISSING | {marker.strip().casefold() for marker in missing}
        self.numeric = [float(m.strip()) for m in missing if _NUMBER.fullmatch(m.strip())]
        self.found: dict[str, OddCells] = {}
        self.dot: str | None = None
        self.grouped_only = True
        self._parts: list[Floats] = []

    def add(self, cells: Sequence[str]) -> None:
        """Take the next cells."""
        if self.texts:
            self.cells += [cell.strip() for cell in cells]
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
        return self._parts[0] if len(self._parts) == 1 else np.concatenate([np.empty(0), *self._parts])

    def note(self, kind: str, rows: Sequence[int], sample: str) -> None:
        """Record cells that are not ordinary numbers."""
        if len(rows):
            found = self.found.setdefault(kind, OddCells(sample))
            found.count += len(rows)
            found.rows += rows[: _FIRST - len(found.rows)]

    def _cell(self, text: str, row: int) -> float:
        if self._grouped is not None and (found := self._grouped.fullmatch(text)) is not None:
            text = re.sub(r"[^0-9+-]", "", found[1]) + (found[2] or "")
        folded = text.casefold()
        if _NUMBER.fullmatch(text) and not ("." in text and self.decimal == ","):
            if self.dot is None and "." in text:
                self.dot = text
            return float(text)
        if _COMMA.fullmatch(text) and self.decimal != ".":
            self.note("comma", [row], text)
            self.grouped_only = self.grouped_only and _GROUPED.fullmatch(text) is not None
            return float(text.replace(",", "."))
        if folded in self.markers:
            self.note("missing", [row], text)
            return np.nan
        if folded in _WORDS:
            self.note("word", [row], text)
            return _WORDS[folded]
        self.note("infinite" if folded.lstrip("+-") in ("inf", "infinity") else "text", [row], text)
        return np.nan

    def _check(self, values: Floats, cells: Sequence[str]) -> None:
        """Numbers that mark absence, are out of range or lose digits."""
        for marker in self.numeric:
            self.note("missing", (self.length + np.flatnonzero(values == marker)).tolist(), str(marker))
        with np.errstate(invalid="ignore"):
            large = np.flatnonzero(np.abs(values) >= EXACT).tolist()
        for i in large:
            if np.isinf(values[i]):
                self.note("large", [self.length + i], cells[i])
            elif cells[i].strip().lstrip("+-").isdigit() and int(cells[i]) != int(values[i]):
                self.note("inexact", [self.length + i], cells[i])

    def settled(self, source: str, lines: Sequence[int], text: bool, faults: list[Fault]) -> Array:
        """Numbers or texts; what is neither is a fault, as is a column of both unless it was said to be ``text``."""
        values, count = self.values, Counter({kind: found.count for kind, found in self.found.items()})
        if self.texts and self.numeric:
            values = np.where(np.isin(values, self.numeric), np.nan, values)
        spelled = count["text"] + count["infinite"] if self.cells else 0
        if not self.texts or not (text or spelled or count["inexact"]):
            faults += column_faults(self, source, lines)
            return values
        if spelled and not text and self.length > spelled + count["missing"] + count["word"]:
            faults.append(_mixed(self, source, lines))
        cells = self.cells or ["" if np.isnan(v) else level(v) for v in values]
        gone = [cell.casefold() in self.markers for cell in cells]
        named = [None if a else _named(c, v, text) for c, v, a in zip(cells, values, gone, strict=True)]
        return np.array(named, object)


def _named(cell: str, value: float, category: bool) -> str:
    """A cell as a level; of a category, numbers and truth values are written alike everywhere."""
    if not category or np.isnan(value):
        return cell
    return cell.casefold() if cell.casefold() in _WORDS else level(value)


def series_column(
    series: pd.Series[Any], name: str, missing: Sequence[str] = (), *, texts: bool = False, position: int = 0
) -> Column:
    """A column of pandas as numbers, with a record of what is none.

    With ``texts`` it may be one of texts, and those that spell numbers are numbers, as in a file.
    """
    column = Column(name, missing, ".", texts=texts, position=position)
    kind = series.dtype.kind if isinstance(series.dtype, np.dtype) else "O"
    values = series.to_numpy(np.float64) if kind in "biuf" else np.empty(0)
    lost = np.flatnonzero(np.abs(values) >= EXACT).tolist() if kind in "iu" else []
    lost = [row for row in lost if int(values[row]) != int(series.iloc[row])]
    if kind not in "biuf" or (texts and lost):
        cells = series.astype(object).where(series.notna(), None).to_numpy(object)
        if texts:
            column.add(["" if cell is None else str(cell) for cell in cells])
            return column
        values = np.array([_number(cell, column, row) for row, cell in enumerate(cells)], np.float64)
    else:
        column.note("missing", np.flatnonzero(np.isnan(values)).tolist(), "NaN")
        column.note("infinite", np.flatnonzero(np.isinf(values)).tolist(), "inf")
        column.note("inexact", lost, "")
    for marker in column.numeric:
        column.note("missing", np.flatnonzero(values == marker).tolist(), str(marker))
    column.extend(values)
    return column


def _number(cell: Any, column: Column, row: int) -> float:
    """An object as a float; a string is text even if it spells a number."""
    kind = "text"
    if cell is None or (isinstance(cell, str) and cell.strip().casefold() in column.markers):
        kind = "missing"
    elif isinstance(cell, numbers.Integral | np.bool_):
        whole = int(cell)
        if abs(whole) < 2**1024 and int(float(whole)) == whole:
            return float(whole)
        kind = "large" if abs(whole) >= 2**1024 else "inexact"
    elif isinstance(cell, numbers.Real | Decimal):
        if np.isfinite(value := float(cell)):
            return value
        kind = "infinite"
    column.note(kind, [row], "" if kind == "large" else str(cell))  # Python refuses to write huge numbers
    return np.nan


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


def _place(found: OddCells, lines: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """The first lines of some cells, if the file has lines, and how a message names them."""
    at = tuple(lines[row] for row in found.rows) if lines else ()
    more = ", ..." if found.count > len(at) else ""
    return at, f" (line{'s' if len(at) > 1 else ''} {', '.join(map(str, at))}{more})" if at else ""


def _mixed(column: Column, source: str, lines: Sequence[int]) -> Fault:
    found = column.found.get("text") or column.found["infinite"]
    at, where = _place(found, lines)
    what = f"{column.label} mixes numbers with {found.count} text(s), such as {shown(found.sample)}{where}"
    remedy = "put the texts in `missing`, the column in `one_hot` or `drop`, or mend them"
    return Fault(source, what, remedy, column.name, found.count, at)


def column_faults(column: Column, source: str, lines: Sequence[int]) -> list[Fault]:
    """What is wrong with a column of numbers; ``lines`` are those of the file where the rows start, if it has lines."""
    out = []

    def fault(kind: str, what: str, remedy: str, place: str = "data row {}") -> None:
        found = column.found[kind]
        at, where = _place(found, lines)
        place = place.format(found.rows[0])
        out.append(Fault(source, f"{what}, the first in {place}{where}", remedy, column.name or None, found.count, at))

    name = column.label
    count = {kind: found.count for kind, found in column.found.items()}
    if "missing" in count and not column.texts:
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
        fault("infinite", what, "impute or drop them before the run", f"row {{}}, column {column.position}")
    if "large" in count:
        fault("large", f"{name}: {count['large']} number(s) beyond 1.8e308, the largest float64", "rescale the column")
    if "inexact" in count:
        remedy = "drop it if it is an identifier, or rescale it"
        fault("inexact", f"{name}: {count['inexact']} whole number(s) beyond 2^53 would lose digits", remedy)
    words = count.get("word", 0)
    if words and words + sum(count.get(k, 0) for k in ("missing", "text", "infinite")) < column.length:
        fault("word", f"{name} mixes true and false with numbers", "write 1 and 0")
    return out
