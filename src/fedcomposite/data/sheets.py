"""Sheets: tables as people have them, before preparation, with columns of numbers or of texts and with gaps.

The one reader of tables, for experiments and for the sites of a federation: of ``.csv`` and ``.parquet`` files and of
pandas. A file is read by name: columns are renamed (``columns``) and left out (``drop``). Nothing is guessed: what can
be read in two ways is a fault, and all faults of all files are reported in one error.

A sheet never leaves its site. What may leave it are answers to the queries of :mod:`fedcomposite.data.queries`.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedcomposite._validation import check_call, suggest
from fedcomposite.data import delimited
from fedcomposite.data.cells import EXACT, Column, decimal_faults, grouped_by_commas, level, series_column
from fedcomposite.data.chained import Drawing
from fedcomposite.data.faults import DataError, DataWarning, Fault, paths_of, refuse, stop

Array = npt.NDArray[Any]
Kind = Literal["number", "text", "date", "empty"]

KINDS = (".csv", ".parquet", ".npz")
MARKERS = ("?",)
THOUSANDS = (".", ",", " ", "'")
_DIGITS = 12  # of the largest number of a column, which a change of units keeps
_CHUNK = 10_000  # rows that are text at the same time
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([ T].*)?|\d{1,2}[./-]\d{1,2}[./-]\d{2,4}( .*)?", re.ASCII)
_UNNAMED = re.compile(r"Unnamed: \d+")
_FALLBACK = "cp1252"  # what spreadsheets of western Europe write, latin-1 and a little more


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
    time: str | None = None
    """The column of times to an event; the target is then the event."""
    entry: str | None = None
    """The column of times at which observation began."""
    strata: str | None = None
    """The column of groups with baselines of their own, as numbers."""

    @property
    def roles(self) -> dict[str, str]:
        """The columns that are no features, by what they are."""
        found = {"target": self.target, "weight": self.weight, "offset": self.offset}
        found |= {"time": self.time, "entry": self.entry, "strata": self.strata}
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
        wrong.append(f"{', '.join(made.roles)} must be different columns")
    if made.time is None and (made.entry or made.strata):
        wrong.append("entry and strata go with time, the column of times to an event")
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


class Origin(NamedTuple):
    """Of which column of the file a column is, as ``scale * value + shift``."""

    name: str
    scale: float = 1.0
    shift: float = 0.0

    @property
    def units(self) -> tuple[float, float]:
        """The straight line."""
        return self.scale, self.shift

    def in_file(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Numbers as the file would have them, without the digits that rounding changed."""
        own = (np.asarray(values, np.float64) - self.shift) / self.scale
        if self.units == (1.0, 0.0) or not own.size:
            return own
        largest = max(float(np.abs(own).max()), 1e-290)
        return np.round(own, _DIGITS - 1 - math.floor(math.log10(largest)))

    def keeps(self, values: npt.NDArray[np.float64], own: npt.NDArray[np.float64]) -> bool:
        """Whether numbers have the digits still that the file's ``own`` have."""
        off = np.abs((values - self.shift) / self.scale - own)
        return not bool((off > 10.0**-_DIGITS * np.nanmax(np.abs(own), initial=0.0)).any())


@dataclass(frozen=True)
class Sheet:
    """One site's table: per column float64 numbers (NaN: missing) or an object array of texts (None: missing)."""

    name: str
    columns: Mapping[str, Array]
    rows: int
    filled: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    """Of columns whose gaps a preparation has filled, or that are made from such: where."""
    drawing: Drawing | None = None
    """By what the site draws values for gaps, where it may."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Of columns that have another name or unit than in the file: what they are there."""

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

    def origin(self, name: str) -> Origin:
        """What a column is in the file."""
        return self.origins.get(name, Origin(name))

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


def listed(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """The paths; a single one is one file, and one that is given twice is warned about."""
    found = paths_of(paths, "file")
    for path, times in Counter(path.resolve() for path in found).items():
        if times > 1:
            message = f"{path}: the same file is given {times} times, so its samples count {times} times"
            warnings.warn(message, DataWarning, stacklevel=3)
    return found


def labels_of(files: Sequence[Path]) -> list[str]:
    """A name for each client: that of its file, or of its folder where files have the same name; no two alike."""
    places = [path.resolve() for path in files]
    for made in (
        [p.stem for p in files],
        [p.parent.name for p in places],
        [f"{p.parent.name}-{p.stem}" for p in places],
    ):
        if len(set(made)) == len(made) and all(made):
            return made
    return [f"{path.stem} {i}" for i, path in enumerate(files, start=1)]


def kind_of(paths: Sequence[Path]) -> str:
    """What the names of the files say they are: all of one kind."""
    kinds = sorted({_suffix(path) for path in paths})
    for path in paths:
        if _suffix(path) not in KINDS:
            raise stop(str(path), "not a .csv, .parquet, .npz or .svm file", "save it as one of these")
    if len(kinds) != 1:
        raise DataError(f"files must be all .parquet, all .csv or all .npz, these are {', '.join(kinds) or 'none'}")
    return kinds[0]


def _suffix(path: Path) -> str:
    """What a file is, or the files of a folder are."""
    return kind_of(parts_of(path)) if path.is_dir() else path.suffix.casefold()


def parts_of(folder: Path) -> list[Path]:
    """The .csv or .parquet files of a folder, by their names: one table."""
    found = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix.casefold() in KINDS[:2])
    if not found:
        raise stop(str(folder), "no .csv or .parquet files in this folder", "check the path")
    return found


def some(names: Sequence[str]) -> str:
    """Names for a message, the first twenty of many."""
    return ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")


def _select(
    names: Sequence[str], source: str, options: Wanted, faults: list[Fault], *, named: bool = True
) -> dict[int, str]:
    """The places of the columns to read, and their common names; all but the first must have one if ``named``."""
    common = {own: name for name, own in options.columns.items()}
    kept = {i: common.get(name, name) for i, name in enumerate(names) if name not in options.drop}
    for name, times in Counter(kept.values()).items():
        if times > 1:
            after = " after renaming" if name in options.columns else ""
            what = f"{'two' if times == 2 else times} columns are called {name!r}{after}"
            faults.append(Fault(source, what, "rename or drop one", name, times))
    for position, name in list(kept.items())[1:]:
        if named and _UNNAMED.fullmatch(name):
            what = f"column number {position + 1} has no name"
            faults.append(Fault(source, what, f"name it in the header{_or_drop(name, options)}", name))
    absent = {role: name for role, name in options.roles.items() if name not in kept.values()}
    for role, name in absent.items():
        what = f"no column {name!r}{suggest(name, names)} (it has: {some(names)})"
        remedy = "name the column to predict" if role == "target" else f"name the column of the {role}s"
        faults.append(Fault(source, what, remedy, name))
    if options.roles and not absent and len(kept) == len(options.roles):
        faults.append(_without_features(source))
    return kept


def _or_drop(name: str, options: Wanted) -> str:
    return f" or drop it as {name!r}" if options.target else ""


def _without_features(source: str) -> Fault:
    return Fault(source, "no features left beside the target", "keep at least one column")


class _Columns(NamedTuple):
    """What a file holds, before anything is made of it."""

    header: list[str]
    columns: list[Column]
    lines: list[int]
    """Where the rows start; none for a plain file, or one that has no lines."""


def _csv(path: Path, options: Wanted, numbers: bool, faults: list[Fault]) -> _Columns:
    """The columns of a file of text; where only numbers are wanted, nobody may guess an encoding or a mark."""
    source = str(path)
    try:
        text = delimited.decode(path.read_bytes(), source, options.encoding, None if numbers else _FALLBACK)
    except OSError as error:
        raise stop(source, f"not a readable CSV file ({error.strerror})", "check its permissions") from None
    found: list[Fault] = []
    made = _csv_columns(text, source, options, numbers, found)
    if not numbers and options.thousands is None and (name := grouped_by_commas(made.columns)) is not None:
        sample = next(c for c in made.columns if c.name == name).found["comma"].sample
        message = f"{source}: {sample!r} in column {name!r} is read as thousands, as the file has decimal points"
        warnings.warn(f"{message}; say thousands = ',', or decimal = ',' if that is wrong", DataWarning, stacklevel=5)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataWarning)  # they were given
            made = _csv_columns(text, source, replace(options, thousands=","), numbers, found)
    faults += found
    return made


def _csv_columns(text: str, source: str, options: Wanted, numbers: bool, faults: list[Fault]) -> _Columns:
    mark = options.separator or delimited.separator(text, source)
    rows = delimited.rows(text, mark, source)
    _, header = next(rows)
    names = [name.strip() or f"Unnamed: {i}" for i, name in enumerate(header)]
    if empty := [i for i, name in enumerate(header) if not name.strip()]:
        rows = iter(held := list(rows))
        empty = [i for i in empty if i > 0 and not any(cell.strip() for _, row in held for cell in row[i : i + 1])]
    if empty:
        message = f"{source}: {len(empty)} column(s) have neither a name nor values, so they are left out"
        warnings.warn(message, DataWarning, stacklevel=6)
        options = replace(options, drop=(*options.drop, *(names[i] for i in empty)))
    before = len(faults)
    unclear = mark == ";" and options.decimal is None and options.thousands is None
    if unclear and (sample := delimited.thousands(text)) is not None:
        what = f"the decimal mark is unclear: {sample!r} may be a thousand or a fraction"
        faults.append(Fault(source, what, "say decimal = ',' or '.'"))
    kept = _select(names, source, options, faults)
    style = options.missing, options.decimal, options.thousands
    columns = [Column(name, *style, texts=not numbers, position=position) for position, name in kept.items()]
    if len(faults) == before and options.thousands is None and _take_plain(text, mark, header, columns):
        return _Columns(names, columns, [])
    lines: list[int] = []
    odd: dict[str, list[tuple[int, int]]] = {"longer": [], "shorter": []}
    while chunk := list(itertools.islice(rows, _CHUNK)):
        good = [(line, row) for line, row in chunk if len(row) == len(names)]
        if len(good) < len(chunk):
            for line, row in chunk:
                if len(row) != len(names):
                    odd["longer" if len(row) > len(names) else "shorter"].append((line, len(row)))
        if good:
            lines += [line for line, _ in good]
            cells = list(zip(*(row for _, row in good), strict=True))
            for column in columns:
                column.add(cells[column.position])
    faults += [_odd_rows(source, word, found, len(names)) for word, found in odd.items() if found]
    if not lines and not any(odd.values()):
        faults.append(Fault(source, "an empty silo: it has no rows below the header", "leave it out or give it data"))
    return _Columns(names, columns, lines)


def _take_plain(text: str, mark: str, header: list[str], columns: Sequence[Column]) -> bool:
    """Whether a file is so plain that its columns could be taken as they are."""
    if columns[0].decimal == ",":
        return False
    values = delimited.plain_numbers(text, mark, header, [column.position for column in columns])
    markers = columns[0].numeric
    if values is None or not bool((np.abs(values) < EXACT).all()) or bool(np.isin(values, markers).any()):
        return False
    for j, column in enumerate(columns):
        column.extend(values[:, j])
    return True


def _odd_rows(source: str, word: str, found: Sequence[tuple[int, int]], width: int) -> Fault:
    at = tuple(line for line, _ in found[:3])
    place = f"line{'s' if len(at) > 1 else ''} {', '.join(map(str, at))}{', ...' if len(found) > len(at) else ''}"
    what = f"{len(found)} row(s) are {word} than the header, {found[0][1]} instead of {width} fields ({place})"
    remedy = "name every column, and quote cells that hold the separator" if word == "longer" else "complete them"
    return Fault(source, what, remedy, count=len(found), lines=at)


def _parquet_frame(path: Path, options: Wanted) -> pd.DataFrame:
    """The table of a ``.parquet`` file."""
    source = str(path)
    for option in ("separator", "decimal", "encoding", "thousands"):
        if getattr(options, option) is not None:
            raise stop(source, f".parquet files take no option {option!r}", "leave it out")
    try:
        frame = pd.read_parquet(path)
    except ImportError:
        remedy = "pip install 'fedcomposite[parquet]', or save a .csv"
        raise stop(source, "reading parquet needs pyarrow", remedy) from None
    except Exception as error:  # pyarrow's errors have no common class
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise stop(source, f"not a readable .parquet file ({reason})", "save it again") from None
    return frame.set_axis([str(name).strip() or f"Unnamed: {i}" for i, name in enumerate(frame.columns)], axis=1)


def _frame(frame: pd.DataFrame, source: str, options: Wanted, numbers: bool, faults: list[Fault]) -> _Columns:
    """The columns of a table of pandas."""
    names = [str(name) for name in frame.columns]
    kept = _select(names, source, options, faults, named=numbers)
    if len(frame) == 0:
        faults.append(Fault(source, "an empty silo: it has no rows", "leave it out or give it data"))
    made = [series_column(frame.iloc[:, i], n, options.missing, texts=not numbers, position=i) for i, n in kept.items()]
    return _Columns(names, made, [])


def read_sheet(
    path: Path,
    label: str,
    options: Wanted,
    faults: list[Fault],
    *,
    kind: str,
    text: Iterable[str] = (),
    numbers: bool = False,
) -> tuple[list[str], Sheet]:
    """The header of a file and its table, all that is wrong with it put to ``faults``.

    With ``numbers`` every cell must be one; otherwise there may be gaps, and columns of texts.
    """
    source = str(path)
    if path.is_dir():
        each = [read_sheet(part, label, options, faults, kind=kind, text=text, numbers=numbers)
                for part in parts_of(path)]  # fmt: skip
        return each[0][0], _stacked(source, label, each, faults)
    if not path.is_file():
        raise stop(source, "no such file", "check the path")
    if kind == ".parquet":
        found = _frame(_parquet_frame(path, options), source, options, numbers, faults)
    else:
        found = _csv(path, options, numbers, faults)
    return found.header, _sheet(label, source, found, options, text, faults)


def _stacked(source: str, label: str, each: Sequence[tuple[list[str], Sheet]], faults: list[Fault]) -> Sheet:
    """The rows of several files with the same columns, one file after another."""
    first, *others = [sheet for _, sheet in each]
    for part, other in zip(parts_of(Path(source))[1:], others, strict=True):
        if {*other.columns} != {*first.columns}:
            odd = sorted({*other.columns} ^ {*first.columns})
            faults.append(
                Fault(str(part), f"other columns than the folder's first file: {some(odd)}", "make them alike")
            )
    names = [name for name in first.columns if all(name in other.columns for other in others)]
    columns: dict[str, Array] = {}
    for name in names:
        parts = [first, *others]
        numbers = all(part.kind(name) in ("number", "empty") for part in parts)
        columns[name] = np.concatenate([part.numbers(name) if numbers else part.texts(name) for part in parts])
    return Sheet(label, columns, sum(sheet.rows for _, sheet in each))


def _sheet(
    label: str, source: str, found: _Columns, options: Wanted, text: Iterable[str], faults: list[Fault]
) -> Sheet:
    """The columns as a sheet; one without a name that numbers the rows is left out."""
    columns = list(found.columns)
    if columns and columns[0].position == 0 and _UNNAMED.fullmatch(columns[0].name):
        index = columns.pop(0)
        rows = np.arange(index.length)
        if not index.found and any(np.array_equal(index.values, rows + first) for first in (0, 1)):
            message = f"{source}: the first column has no name and numbers the rows, so it is left out"
            warnings.warn(message, DataWarning, stacklevel=5)
        else:
            what = "the first column has no name and does not number the rows"
            faults.append(Fault(source, what, f"name it in the header{_or_drop(index.name, options)}", index.name))
        if options.roles and len(columns) == len(options.roles):
            faults.append(_without_features(source))
    faults += decimal_faults(columns, source)
    chosen = frozenset(text)
    made = {c.name: c.settled(source, found.lines, c.name in chosen, faults) for c in columns}
    return Sheet(label, made, found.columns[0].length if found.columns else 0)


class Style(TypedDict, total=False):
    """How files are written, as :func:`read_sheets` takes it."""

    styles: Mapping[str, Mapping[str, str | None]] | None
    missing: Sequence[str]
    separator: str | None
    decimal: str | None
    encoding: str | None
    thousands: str | None


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
            sheets.append(read_sheet(path, label, options, faults, kind=kind, text=text)[1])
        except DataError as error:
            faults += error.faults
    refuse(faults)
    return sheets


def sheet_of(frame: pd.DataFrame, label: str, *, text: Iterable[str] = ()) -> Sheet:
    """A table of pandas as a sheet: texts that spell numbers are numbers, as they are in a file."""
    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"{label}: a {type(frame).__name__} is no table; give a DataFrame")
    faults: list[Fault] = []
    found = _frame(frame, label, Wanted(""), False, faults)
    made = _sheet(label, label, found, Wanted(""), text, faults)
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
    **options: Unpack[Style],
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
