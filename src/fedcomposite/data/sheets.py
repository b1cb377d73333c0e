"""Sheets: tables as people have them, before preparation, with columns of numbers or of texts and with gaps.

A sheet never leaves its site. What may leave it are answers to the queries of :mod:`fedcomposite.data.queries`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedcomposite._validation import check_call, suggest
from fedcomposite.data.cells import Column, column_faults, decimal_faults, grouped_by_commas, shown
from fedcomposite.data.faults import DataError, DataWarning, Fault, refuse, stop
from fedcomposite.data.frames import names_of
from fedcomposite.data.reading import csv_columns, kind_of, labels_of, listed, parquet_frame
from fedcomposite.data.wanted import MARKERS, Wanted, wanted

Array = npt.NDArray[Any]
Kind = Literal["number", "text", "date", "empty"]

_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([ T].*)?|\d{1,2}[./-]\d{1,2}[./-]\d{2,4}( .*)?", re.ASCII)
_UNNAMED = re.compile(r"Unnamed: \d+")
_FALLBACK = "cp1252"  # what spreadsheets of western Europe write, latin-1 and a little more


@dataclass(frozen=True)
class Sheet:
    """One site's table: per column float64 numbers (NaN: missing) or an object array of texts (None: missing)."""

    name: str
    columns: Mapping[str, Array]
    rows: int
    filled: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    """Of columns whose gaps a preparation has filled, or that are made from such: where."""

    def __post_init__(self) -> None:
        for name, values in self.columns.items():
            if values.shape != (self.rows,) or not (values.dtype == np.float64 or values.dtype == object):
                raise DataError(f"{self.name}: column {name!r} is not {self.rows} numbers or texts")

    def __getitem__(self, name: str) -> Array:
        """A column's values."""
        if name not in self.columns:
            known = ", ".join(self.columns)
            raise DataError(f"{self.name}: no column {name!r}{suggest(name, self.columns)} (it has: {known})")
        return self.columns[name]

    def having(self, columns: Mapping[str, Array], made_from: Mapping[str, Sequence[str]] | None = None) -> Sheet:
        """The sheet with these columns in place of its own; new ones are filled where those they are made from are."""
        new = {name: [self.filled[s] for s in of if s in self.filled] for name, of in (made_from or {}).items()}
        filled = {name: np.any(each, axis=0) for name, each in new.items() if each}
        return replace(self, columns=columns, filled={**self.filled, **filled})

    def own(self, name: str) -> npt.NDArray[np.bool_]:
        """Where a column has what the site's file says, not what a gap was filled with."""
        filled = self.filled.get(name)
        return np.ones(self.rows, bool) if filled is None else ~filled

    def taking(self, rows: npt.NDArray[np.bool_]) -> Sheet:
        """The sheet with the marked rows only."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        filled = {name: where[rows] for name, where in self.filled.items()}
        return replace(self, columns=columns, rows=int(rows.sum()), filled=filled)

    def kind(self, name: str) -> Kind:
        """What a column holds."""
        values = self[name]
        if values.dtype == np.float64:
            return "empty" if bool(np.isnan(values).all()) else "number"
        there = [text for text in values if text is not None]
        if not there:
            return "empty"
        return "date" if all(_DATE.fullmatch(text) for text in there) else "text"

    def missing(self, name: str) -> npt.NDArray[np.bool_]:
        """Where a column has no value."""
        values = self[name]
        if values.dtype == np.float64:
            return np.isnan(values)
        return np.array([text is None for text in values], bool)

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """A column of numbers; one that is empty counts as such."""
        values = self[name]
        if values.dtype == np.float64:
            return values
        if all(text is None for text in values):
            return np.full(self.rows, np.nan)
        raise DataError(f"{self.name}: column {name!r} is text; put it in `one_hot` or `drop`")

    def texts(self, name: str) -> Array:
        """A column's values as levels."""
        values = self[name]
        if values.dtype == object:
            return values
        found, at = np.unique(values, return_inverse=True)  # NaN are alike
        named = np.array([None if np.isnan(v) else level(v) for v in found], object)
        out: Array = named[at]
        return out


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


def _named(cell: str, value: float, category: bool) -> str:
    """A cell as a level; of a category, numbers and truth values are written alike everywhere."""
    if not category or np.isnan(value):
        return cell
    return cell.casefold() if cell.casefold() in ("true", "false") else level(value)


class _Cells(Column):
    """A column that keeps its texts, for the case that they are no numbers."""

    def __init__(self, name: str, missing: Sequence[str], decimal: str | None, thousands: str | None = None) -> None:
        super().__init__(name, missing, decimal, thousands)
        self.cells: list[str] = []

    def add(self, cells: Sequence[str]) -> None:
        self.cells += [cell.strip() for cell in cells]
        super().add(cells)

    def settled(self, source: str, position: int, lines: Sequence[int], text: bool, faults: list[Fault]) -> Array:
        """Numbers or texts; a column of both is a fault, unless it was said to be ``text``."""
        values, count = self.values, {kind: found.count for kind, found in self.found.items()}
        values = np.where(np.isin(values, self.numeric), np.nan, values) if self.numeric else values
        others = {kind: count.get(kind, 0) for kind in ("text", "infinite", "inexact", "word")}
        texts = others["text"] + others["infinite"]
        if text or texts or others["inexact"]:
            cells = self.cells or ["" if np.isnan(v) else level(v) for v in values]
            gone = [cell.casefold() in self.markers for cell in cells]
            numbers = len(cells) - sum(gone) - texts - others["word"]
            if texts and numbers and not text:
                faults.append(self._mixed(source, lines, texts))
            named = [None if a else _named(c, v, text) for c, v, a in zip(cells, values, gone, strict=True)]
            return np.array(named, object)
        faults += column_faults(self, source, position, lines, gaps=True)
        return values

    def _mixed(self, source: str, lines: Sequence[int], texts: int) -> Fault:
        found = self.found.get("text") or self.found["infinite"]
        at = tuple(lines[row] for row in found.rows) if lines else ()
        where = f" (line{'s' if len(at) > 1 else ''} {', '.join(map(str, at))})" if at else ""
        what = f"{self.label} mixes numbers with {texts} text(s), such as {shown(found.sample)}{where}"
        remedy = "put the texts in `missing`, the column in `one_hot` or `drop`, or mend them"
        return Fault(source, what, remedy, self.name, texts, at)


def read_sheets(
    paths: str | Path | Iterable[str | Path],
    *,
    names: Sequence[str] = (),
    text: Iterable[str] = (),
    styles: Mapping[str, Mapping[str, str | None]] | None = None,
    missing: Sequence[str] = MARKERS,
    separator: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
    thousands: str | None = None,
) -> list[Sheet]:
    """Read one ``.csv`` or ``.parquet`` file per site; all that is wrong with all of them is told in one error.

    Parameters
    ----------
    paths : path or list of paths
        The files; a site is called as its file is, without the suffix.
    names : list of str
        Other names for the sites.
    text : list of str
        Columns, by their names in the files, that are categories even where they look like numbers.
    styles : dict
        Per site, what is special about its file: ``separator``, ``decimal``, ``encoding``, ``thousands``.
    missing : list of str
        Markers of absent values besides the usual ones.
    separator, decimal, encoding, thousands : str, optional
        The same for all files.
    """
    style = {"separator": separator, "decimal": decimal, "encoding": encoding, "thousands": thousands}
    files = listed(paths)
    if not files:
        raise DataError("no files were given")
    if (kind := kind_of(files)) == ".npz":
        raise stop(str(files[0]), ".npz files hold arrays, not tables", "give .csv or .parquet files")
    labels = list(names) or labels_of(files)
    if len(labels) != len(files) or len(set(labels)) != len(labels):
        raise DataError(f"names = {labels}: give every one of the {len(files)} files its own")
    faults: list[Fault] = []
    sheets = []
    for path, label in zip(files, labels, strict=True):
        own = style | {**(styles or {}).get(label, {})}
        options = wanted(target="", drop=(), missing=missing, columns=None, **own)
        try:
            if not path.is_file():
                raise stop(str(path), "no such file", "check the path")
            read = _csv if kind == ".csv" else _parquet
            sheets.append(read(path, label, options, frozenset(text), faults))
        except DataError as error:
            faults += error.faults
    refuse(faults)
    return sheets


def _csv(path: Path, label: str, options: Wanted, text: frozenset[str], faults: list[Fault]) -> Sheet:
    source = str(path)
    first: list[Fault] = []
    _, columns, kept, lines = csv_columns(path, options, first, _Cells, _FALLBACK)
    if options.thousands is None and (name := grouped_by_commas(columns)) is not None:
        sample = next(c for c in columns if c.name == name).found["comma"].sample
        message = f"{source}: {sample!r} in column {name!r} is read as thousands, as the file has decimal points"
        warnings.warn(f"{message}; say thousands = ',', or decimal = ',' if that is wrong", DataWarning, stacklevel=5)
        first = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataWarning)  # they were given
            _, columns, kept, lines = csv_columns(path, replace(options, thousands=","), first, _Cells, _FALLBACK)
    faults += first
    return _sheet(label, source, columns, [k.position for k in kept], lines, text, faults)


def _parquet(path: Path, label: str, options: Wanted, text: frozenset[str], faults: list[Fault]) -> Sheet:
    return sheet_of(parquet_frame(path, options), label, text=text, missing=options.missing, source=str(path))


def _sheet(
    label: str,
    source: str,
    columns: Sequence[Column],
    positions: Sequence[int],
    lines: Sequence[int],
    text: Iterable[str],
    faults: list[Fault],
) -> Sheet:
    """The columns as a sheet; one without a name that numbers the rows is left out."""
    if columns and _UNNAMED.fullmatch(columns[0].name):
        rows = np.arange(columns[0].length)
        if np.array_equal(columns[0].values, rows) or np.array_equal(columns[0].values, rows + 1):
            message = f"{source}: the first column has no name and numbers the rows, so it is left out"
            warnings.warn(message, DataWarning, stacklevel=5)
            columns, positions = columns[1:], positions[1:]
        else:
            what = "the first column has no name and does not number the rows"
            faults.append(Fault(source, what, "name it in the header", columns[0].name))
    faults += decimal_faults(columns, source)
    made = {
        c.name: c.settled(source, position, lines, c.name in set(text), faults)
        for c, position in zip(columns, positions, strict=True)
        if isinstance(c, _Cells)
    }
    return Sheet(label, made, columns[0].length if columns else 0)


def sheet_of(
    frame: pd.DataFrame,
    label: str,
    *,
    text: Iterable[str] = (),
    missing: Sequence[str] = MARKERS,
    source: str | None = None,
) -> Sheet:
    """A table of pandas as a sheet: texts that spell numbers are numbers, as they are in a file."""
    where = source or label
    faults: list[Fault] = []
    columns: list[Column] = []
    for j, name in enumerate(names_of(frame, where)):
        series = frame.iloc[:, j]
        column = _Cells(name, missing, ".")
        if isinstance(series.dtype, np.dtype) and series.dtype.kind in "biuf":
            values = series.to_numpy(np.float64)
            if unbounded := int(np.isinf(values).sum()):
                what = f"column {name!r}: {unbounded} value(s) are infinite"
                faults.append(Fault(where, what, "mend or drop them", name, unbounded))
            column.extend(values)
        else:
            column.add(["" if absent else str(v) for v, absent in zip(series, series.isna(), strict=True)])
        columns.append(column)
    if len(frame) == 0:
        faults.append(Fault(where, "an empty silo: it has no rows", "leave it out or give it data"))
    made = _sheet(label, where, columns, range(len(columns)), (), text, faults)
    refuse(faults)
    return made


Source = str | Path | pd.DataFrame | Sheet


def unused(options: Iterable[str]) -> None:
    """Refuse what is said about files where there are none."""
    if given := ", ".join(options):
        raise DataError(f"{given}: for files only; tables by name have all that they need")


def sheets_of(
    given: Mapping[str, pd.DataFrame] | Iterable[Source] | Source,
    *,
    names: Sequence[str] = (),
    text: Iterable[str] = (),
    **options: Any,
) -> list[Sheet]:
    """Sheets from whatever a caller has: files, tables by the names of their sites, or sheets."""
    if isinstance(given, Mapping):
        unused([*options, *(["names"] if names else [])])
        return [sheet_of(frame, str(name), text=text) for name, frame in given.items()]
    many: list[Any] = [given]
    if not isinstance(given, str | Path | pd.DataFrame | Sheet) and isinstance(given, Iterable):
        many = list(given)
    strange = [one for one in many if not isinstance(one, str | Path | pd.DataFrame | Sheet)]
    if strange:
        raise DataError(f"a {type(strange[0]).__name__} is no table; give a file or a DataFrame per site")
    if not any(isinstance(one, pd.DataFrame | Sheet) for one in many):
        return read_sheets(many, names=names, text=text, **check_call("files", read_sheets, options, DataError))
    unused(options)
    labels = list(names) or [f"client {i}" for i in range(len(many))]
    if len(labels) != len(many) or len(set(labels)) != len(labels):
        raise DataError(f"names = {labels}: give every one of the {len(many)} tables its own")
    return [
        one if isinstance(one, Sheet) else sheet_of(one, label, text=text)
        for one, label in zip(many, labels, strict=True)
    ]
