"""Files of numbers, one per client: tables (csv, parquet), arrays (npz) and LIBSVM's sparse ones.

Columns of tables are put into the order of the first file. LIBSVM files have ``target index:value index:value ...`` in
every line, indices from 1, and stay sparse. All that is wrong with all files is reported in one error.
"""

from __future__ import annotations

import itertools
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcomposite._validation import suggest
from fedcomposite.data.arrays import NO_ENTRY
from fedcomposite.data.faults import DataError, Fault, refuse, stop
from fedcomposite.data.sheets import MARKERS, Sheet, Wanted, kind_of, read_sheet, some, wanted

SVMLIGHT = (".svm", ".svmlight", ".libsvm")


class Table(NamedTuple):
    """A file's numbers."""

    features: npt.NDArray[Any]
    targets: npt.NDArray[Any]
    names: tuple[str, ...]  # of the features; none for arrays
    weights: npt.NDArray[Any] | None = None
    offsets: npt.NDArray[Any] | None = None


def is_svmlight(paths: Sequence[Path]) -> bool:
    """Whether these are such files, by their names."""
    return bool(paths) and all(path.suffix.casefold() in SVMLIGHT for path in paths)


def read_all(paths: Sequence[Path], kind: str | None, features: int | None, given: dict[str, Any]) -> list[Table]:
    """Read files of any kind, with the options of :meth:`fedcomposite.Silos.from_files`."""
    if kind is None and is_svmlight(paths):
        if given["target"] is not None:
            raise DataError(f"target = {given['target']!r}: an .svm file has its targets in front; leave it out")
        return _svmlight(paths, features, wanted(**{**given, "target": ""}))
    if kind is None and any(is_svmlight([path]) for path in paths):
        raise DataError("files must be all of one kind: some of these are of LIBSVM, others are not")
    if features is not None:
        raise DataError(f"features = {features}: only for .svm files; others name theirs")
    return _tables(paths, kind or kind_of(paths), wanted(**given))


def _tables(paths: Sequence[Path], kind: str, options: Wanted) -> list[Table]:
    """Read a table or arrays per client, with the columns in the order of the first."""
    faults: list[Fault] = []
    tables: dict[int, Table] = {}
    headers: list[list[str]] = []
    for i, path in enumerate(paths):
        before = len(faults)
        try:
            if kind == ".npz":
                tables[i] = _arrays(path, options)
                continue
            header, sheet = read_sheet(path, path.stem, options, faults, kind=kind, numbers=True)
        except DataError as error:
            faults += error.faults
            continue
        headers.append(header)
        if len(faults) == before:
            tables[i] = _table(sheet, options)
    if len(headers) == len(paths):
        faults += _absent(headers, options)
    first = next(iter(tables.values()), None)
    for i, table in tables.items():
        if first is not None:
            tables[i] = _arranged(table, first.names, str(paths[i]), faults)
    refuse(faults)
    return list(tables.values())


def _table(sheet: Sheet, options: Wanted) -> Table:
    special = {role: sheet[name] for role, name in options.roles.items()}
    names = tuple(name for name in sheet.columns if name not in options.roles.values())
    features = np.stack([sheet[name] for name in names], 1)
    return Table(features, _targets(special), names, special.get("weight"), special.get("offset"))


def _targets(special: dict[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The target; of times to an event the columns time, event, entry and stratum, as far as they are there."""
    event = special["target"]
    if "time" not in special:
        return event
    columns = [special["time"], event]
    if "entry" in special or "strata" in special:
        columns.append(special.get("entry", np.full(len(event), NO_ENTRY)))
    return np.stack([*columns, *([special["strata"]] if "strata" in special else [])], axis=1).astype(float)


def _absent(headers: Sequence[Sequence[str]], options: Wanted) -> list[Fault]:
    """Names in ``drop`` and ``columns`` that no file has."""
    seen = list(dict.fromkeys(itertools.chain.from_iterable(headers)))
    remedy = f"the columns are {some(seen)}"
    out = [
        Fault(f"drop = {name!r}", f"no file has this column{suggest(name, seen)}", remedy, name)
        for name in options.drop
        if name not in seen
    ]
    return out + [
        Fault(f"columns: {common} = {own!r}", f"no column {own!r}{suggest(own, seen)}", remedy, own)
        for common, own in options.columns.items()
        if own not in seen
    ]


def _arranged(table: Table, names: tuple[str, ...], source: str, faults: list[Fault]) -> Table:
    """A table in the order of the first file's columns."""
    if table.names == names:
        return table
    differ = sorted(set(table.names) ^ set(names))
    if differ:
        what = f"columns differ from the first file's: {some(differ)}"
        faults.append(Fault(source, what, "rename them with `columns` or put them in `drop`", count=len(differ)))
        return table
    return table._replace(features=table.features[:, [table.names.index(name) for name in names]], names=names)


def _arrays(path: Path, options: Wanted) -> Table:
    """The arrays ``X`` and the target of an ``.npz`` file."""
    source = str(path)
    given: dict[str, Any] = {
        "drop": options.drop,
        "separator": options.separator,
        "decimal": options.decimal,
        "encoding": options.encoding,
        "thousands": options.thousands,
    }
    given |= {"missing": options.missing if options.missing != MARKERS else ()}
    given |= {"columns": set(options.columns) - {options.target}}
    for option, value in given.items():
        if value:
            raise stop(source, f".npz files take no option {option!r}", "they have no columns to name")
    target = options.own_target
    if "X" in (target, options.weight, options.offset):
        raise stop(source, "target = 'X' is the array of the features", "name the array of the targets")
    if not path.is_file():
        raise stop(source, "no such file", "check the path")
    try:
        with path.open("rb") as stream:
            start = stream.read(6)
            if not start.startswith(b"PK"):
                single = ": it holds a single array (.npy)" if start == b"\x93NUMPY" else ": it is not a zip archive"
                raise stop(source, f"not a readable .npz file{single}", "write it with numpy.savez(path, X=..., ...)")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                roles = {"X": "X", **options.roles, "target": target}
                for name in roles.values():
                    if name not in file:
                        raise stop(source, f"no array {name!r} (it has: {some(list(file))})", "name the arrays so")
                found = {role: _array(file, name, source) for role, name in roles.items()}
                return Table(found["X"], _targets(found), (), found.get("weight"), found.get("offset"))
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


def _svmlight(paths: Sequence[Path], features: int | None, options: Wanted) -> list[Table]:
    """The files, with as many features as the largest index of any says, or ``features``."""
    given = {k: v for k, v in vars(options).items() if k not in ("target", "missing")}
    given["missing"] = options.missing if options.missing != MARKERS else ()
    for option, value in given.items():
        if value:
            raise DataError(f"{option} = {value!r}: files of LIBSVM have no named columns; leave it out")
    faults: list[Fault] = []
    found: list[tuple[Any, Any]] = []
    for path in paths:
        try:
            found.append(_svmlight_file(path, features))
        except DataError as error:
            faults += error.faults
    refuse(faults)
    width = features or max(X.shape[1] for X, _ in found)
    for X, _ in found:
        X.resize(X.shape[0], width)
    return [Table(X, y, ()) for X, y in found]


def _svmlight_file(path: Path, features: int | None) -> tuple[Any, Any]:
    from sklearn.datasets import load_svmlight_file

    source = str(path)
    if not path.is_file():
        raise stop(source, "no such file", "check the path")
    try:
        X, y = load_svmlight_file(source, n_features=features, dtype=np.float64, zero_based=False)
    except (ValueError, OSError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise stop(source, f"not a readable file of LIBSVM ({reason})", "write lines as '1 3:0.5 7:2'") from None
    if X.shape[0] == 0:
        raise stop(source, "an empty silo: it has no samples", "leave it out or give it data")
    return X, y
