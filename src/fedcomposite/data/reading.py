"""The one reader of files, for experiments and for the sites of a federation: csv, parquet and npz, one per client.

A table is read by name: columns are renamed (``columns``), left out (``drop``), and put into the order of the first
file. Nothing is guessed: what cannot be read as numbers in one way only is a fault, and all faults of all files are
reported in one error.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedcomposite._validation import suggest
from fedcomposite.data import delimited
from fedcomposite.data.cells import EXACT, Column, column_faults, decimal_faults
from fedcomposite.data.faults import DataError, DataWarning, Fault, paths_of, refuse, stop
from fedcomposite.data.frames import series_column
from fedcomposite.data.wanted import MARKERS, Wanted

KINDS = (".csv", ".parquet", ".npz")
_CHUNK = 10_000  # rows that are text at the same time
_UNNAMED = re.compile(r"Unnamed: \d+")


class Table(NamedTuple):
    """A file's numbers."""

    features: npt.NDArray[Any]
    targets: npt.NDArray[Any]
    names: tuple[str, ...]  # of the features; none for arrays
    weights: npt.NDArray[Any] | None = None
    offsets: npt.NDArray[Any] | None = None


class Kept(NamedTuple):
    """A column that is read."""

    position: int
    name: str  # after renaming


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
    kinds = sorted({path.suffix.casefold() for path in paths})
    for path in paths:
        if path.suffix.casefold() not in KINDS:
            raise stop(str(path), "not a .csv, .parquet, .npz or .svm file", "save it as one of these")
    if len(kinds) != 1:
        raise DataError(f"files must be all .parquet, all .csv or all .npz, these are {', '.join(kinds) or 'none'}")
    return kinds[0]


def read_files(paths: Sequence[Path], kind: str, wanted: Wanted) -> list[Table]:
    """Read one file per client, with the columns in the order of the first."""
    faults: list[Fault] = []
    tables: dict[int, Table] = {}
    headers: list[list[str]] = []
    for i, path in enumerate(paths):
        try:
            if not path.is_file():
                raise stop(str(path), "no such file", "check the path")
            if kind == ".npz":
                tables[i] = _arrays(path, wanted)
                continue
            names, table = (_csv if kind == ".csv" else _parquet)(path, wanted, faults)
        except DataError as error:
            faults += error.faults
            continue
        headers.append(names)
        if table is not None:
            tables[i] = table
    if len(headers) == len(paths):
        faults += _absent(headers, wanted)
    first = next(iter(tables.values()), None)
    for i, table in tables.items():
        if first is not None:
            tables[i] = _arranged(table, first.names, str(paths[i]), faults)
    refuse(faults)
    return list(tables.values())


def _absent(headers: Sequence[Sequence[str]], wanted: Wanted) -> list[Fault]:
    """Names in ``drop`` and ``columns`` that no file has."""
    seen = list(dict.fromkeys(itertools.chain.from_iterable(headers)))
    remedy = f"the columns are {_some(seen)}"
    out = [
        Fault(f"drop = {name!r}", f"no file has this column{suggest(name, seen)}", remedy, name)
        for name in wanted.drop
        if name not in seen
    ]
    return out + [
        Fault(f"columns: {common} = {own!r}", f"no column {own!r}{suggest(own, seen)}", remedy, own)
        for common, own in wanted.columns.items()
        if own not in seen
    ]


def _arranged(table: Table, names: tuple[str, ...], source: str, faults: list[Fault]) -> Table:
    """A table in the order of the first file's columns."""
    if table.names == names:
        return table
    differ = sorted(set(table.names) ^ set(names))
    if differ:
        what = f"columns differ from the first file's: {_some(differ)}"
        faults.append(Fault(source, what, "rename them with `columns` or put them in `drop`", count=len(differ)))
        return table
    return table._replace(features=table.features[:, [table.names.index(name) for name in names]], names=names)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")


def _select(names: Sequence[str], source: str, wanted: Wanted, faults: list[Fault]) -> list[Kept]:
    """The columns to read, under their common names."""
    common = {own: name for name, own in wanted.columns.items()}
    kept = [Kept(i, common.get(name, name)) for i, name in enumerate(names) if name not in wanted.drop]
    for name, times in Counter(column.name for column in kept).items():
        if times > 1:
            after = " after renaming" if name in wanted.columns else ""
            what = f"{'two' if times == 2 else times} columns are called {name!r}{after}"
            faults.append(Fault(source, what, "rename or drop one", name, times))
    for position, name in kept[1:]:
        if _UNNAMED.fullmatch(name):
            what = f"column number {position + 1} has no name"
            remedy = f"name it in the header or drop it as {name!r}" if wanted.target else "name it in the header"
            faults.append(Fault(source, what, remedy, name))
    absent = {role: name for role, name in wanted.roles.items() if not any(column.name == name for column in kept)}
    for role, name in absent.items():
        what = f"no column {name!r}{suggest(name, names)} (it has: {_some(names)})"
        remedy = "name the column to predict" if role == "target" else f"name the column of the {role}s"
        faults.append(Fault(source, what, remedy, name))
    if not absent and len(kept) == len(wanted.roles):
        faults.append(_without_features(source))
    return kept


def _without_features(source: str) -> Fault:
    return Fault(source, "no features left beside the target", "keep at least one column")


def _table(
    columns: Sequence[Column],
    kept: Sequence[Kept],
    source: str,
    lines: Sequence[int],
    wanted: Wanted,
    faults: list[Fault],
) -> Table | None:
    """The table of the columns that were read, unless something was wrong with it."""
    before = len(faults)
    pairs = list(zip(columns, kept, strict=True))
    if pairs and pairs[0][1].position == 0 and _UNNAMED.fullmatch(pairs[0][1].name):
        index, pairs = pairs[0], pairs[1:]
        if _counts_rows(index[0]):
            message = f"{source}: the first column has no name and numbers the rows, so it is left out"
            warnings.warn(message, DataWarning, stacklevel=5)
        else:
            what = "the first column has no name and does not number the rows"
            faults.append(Fault(source, what, f"name it in the header or drop it as {index[1].name!r}", index[1].name))
        if len(pairs) == len(wanted.roles):
            faults.append(_without_features(source))
    faults += decimal_faults([column for column, _ in pairs], source)
    for column, (position, _) in pairs:
        faults += column_faults(column, source, position, lines)
    values = {name: column.values for column, (_, name) in pairs}
    special = {role: values.pop(name, None) for role, name in wanted.roles.items()}
    targets = special["target"]
    if len(faults) > before or targets is None or not values:
        return None
    features = np.stack(list(values.values()), 1)
    return Table(features, targets, tuple(values), special.get("weight"), special.get("offset"))


def _counts_rows(column: Column) -> bool:
    rows = np.arange(column.length)
    return not column.found and (np.array_equal(column.values, rows) or np.array_equal(column.values, rows + 1))


def _csv(path: Path, wanted: Wanted, faults: list[Fault]) -> tuple[list[str], Table | None]:
    """A header and its table; the table is None where something is wrong with it."""
    before = len(faults)
    names, columns, kept, lines = csv_columns(path, wanted, faults)
    table = _table(columns, kept, str(path), lines, wanted, faults)
    return names, table if len(faults) == before else None


def csv_columns(
    path: Path, wanted: Wanted, faults: list[Fault], make: type[Column] = Column, fallback: str | None = None
) -> tuple[list[str], list[Column], list[Kept], list[int]]:
    """The header, the columns that are kept, and the lines of the rows (none of a plain file)."""
    source = str(path)
    try:
        text = delimited.decode(path.read_bytes(), source, wanted.encoding, fallback)
    except OSError as error:
        raise stop(source, f"not a readable CSV file ({error.strerror})", "check its permissions") from None
    mark = wanted.separator or delimited.separator(text, source)
    rows = delimited.rows(text, mark, source)
    _, header = next(rows)
    names = [name.strip() or f"Unnamed: {i}" for i, name in enumerate(header)]
    if empty := [i for i, name in enumerate(header) if not name.strip()]:
        rows = iter(held := list(rows))
        empty = [i for i in empty if i > 0 and not any(cell.strip() for _, row in held for cell in row[i : i + 1])]
    if empty:
        message = f"{source}: {len(empty)} column(s) have neither a name nor values, so they are left out"
        warnings.warn(message, DataWarning, stacklevel=5)
        wanted = dataclasses.replace(wanted, drop=(*wanted.drop, *(names[i] for i in empty)))
    before = len(faults)
    unclear = mark == ";" and wanted.decimal is None and wanted.thousands is None
    if unclear and (sample := delimited.thousands(text)) is not None:
        what = f"the decimal mark is unclear: {sample!r} may be a thousand or a fraction"
        faults.append(Fault(source, what, "say decimal = ',' or '.'"))
    kept = _select(names, source, wanted, faults)
    columns = [make(column.name, wanted.missing, wanted.decimal, wanted.thousands) for column in kept]
    if len(faults) == before and wanted.thousands is None and _take_plain(text, mark, header, columns, kept):
        return names, columns, kept, []
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
            for column, (position, _) in zip(columns, kept, strict=True):
                column.add(cells[position])
    faults += [_odd_rows(source, word, found, len(names)) for word, found in odd.items() if found]
    if not lines and not any(odd.values()):
        faults.append(Fault(source, "an empty silo: it has no rows below the header", "leave it out or give it data"))
    return names, columns, kept, lines


def _take_plain(text: str, mark: str, header: list[str], columns: Sequence[Column], kept: Sequence[Kept]) -> bool:
    """Whether a file is so plain that its columns could be taken as they are."""
    if columns[0].decimal == ",":
        return False
    values = delimited.plain_numbers(text, mark, header, [column.position for column in kept])
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


def _parquet(path: Path, wanted: Wanted, faults: list[Fault]) -> tuple[list[str], Table | None]:
    source, before = str(path), len(faults)
    frame = parquet_frame(path, wanted)
    names = [str(name) for name in frame.columns]
    kept = _select(names, source, wanted, faults)
    if frame.empty:
        faults.append(Fault(source, "an empty silo: it has no rows", "leave it out or give it data"))
    columns = [series_column(frame.iloc[:, column.position], column.name, wanted.missing) for column in kept]
    table = _table(columns, kept, source, (), wanted, faults)
    return names, table if len(faults) == before else None


def parquet_frame(path: Path, wanted: Wanted) -> pd.DataFrame:
    """The table of a ``.parquet`` file; a column without a name gets one."""
    source = str(path)
    for option in ("separator", "decimal", "encoding", "thousands"):
        if getattr(wanted, option) is not None:
            raise stop(source, f".parquet files take no option {option!r}", "leave it out")
    try:
        frame = pd.read_parquet(path)
    except ImportError:
        remedy = "pip install 'fedcomposite[parquet]', or save a .csv"
        raise stop(source, "reading parquet needs pyarrow", remedy) from None
    except Exception as error:  # pyarrow's errors have no common class
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise stop(source, f"not a readable .parquet file ({reason})", "save it again") from None
    frame.columns = pd.Index([str(name).strip() or f"Unnamed: {i}" for i, name in enumerate(frame.columns)])
    return frame


def _arrays(path: Path, wanted: Wanted) -> Table:
    """The arrays ``X`` and the target of an ``.npz`` file."""
    source = str(path)
    given: dict[str, Any] = {
        "drop": wanted.drop,
        "separator": wanted.separator,
        "decimal": wanted.decimal,
        "encoding": wanted.encoding,
        "thousands": wanted.thousands,
    }
    given |= {"missing": wanted.missing if wanted.missing != MARKERS else ()}
    given |= {"columns": set(wanted.columns) - {wanted.target}}
    for option, value in given.items():
        if value:
            raise stop(source, f".npz files take no option {option!r}", "they have no columns to name")
    target = wanted.own_target
    if "X" in (target, wanted.weight, wanted.offset):
        raise stop(source, "target = 'X' is the array of the features", "name the array of the targets")
    try:
        with path.open("rb") as stream:
            start = stream.read(6)
            if not start.startswith(b"PK"):
                single = ": it holds a single array (.npy)" if start == b"\x93NUMPY" else ": it is not a zip archive"
                raise stop(source, f"not a readable .npz file{single}", "write it with numpy.savez(path, X=..., ...)")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                roles = {"X": "X", **wanted.roles, "target": target}
                for name in roles.values():
                    if name not in file:
                        raise stop(source, f"no array {name!r} (it has: {_some(list(file))})", "name the arrays so")
                found = {role: _array(file, name, source) for role, name in roles.items()}
                return Table(found["X"], found["target"], (), found.get("weight"), found.get("offset"))
    except (OSError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise stop(source, f"not a readable .npz file ({error})", "write it again") from None


def _array(file: Any, name: str, source: str) -> npt.NDArray[Any]:
    try:
        found: npt.NDArray[Any] = file[name]
    except ValueError as error:
        if "allow_pickle" in str(error):
            what, remedy = f"array {name!r} holds Python objects, not numbers", "save it after .astype(float)"
        else:
            what, remedy = f"array {name!r} is damaged ({error})", "write the file again"
        raise stop(source, what, remedy) from None
    return found
