"""A site's own data: a csv, parquet or npz file and the map of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedcomposite._validation import suggest
from fedcomposite.data import DataError, Silos
from fedcomposite.data.silos import ArrayLike

Floats = npt.NDArray[np.float64]
KINDS = (".csv", ".parquet", ".npz")


def load(
    path: Path,
    *,
    name: str,
    target: str,
    columns: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    missing: Sequence[str] = ("?",),
    test: Path | None = None,
) -> Silos:
    """The site's samples as one silo.

    Parameters
    ----------
    path : Path
        A table with a header (``.csv``, or ``.parquet`` where pyarrow is installed), or an ``.npz`` file with the
        samples as the array ``X`` and the targets as the array named ``target``.
    name : str
        The site.
    target : str
        The column to predict, after renaming.
    columns : mapping, optional
        ``{"common name": "name in this file"}`` for columns that are called otherwise here.
    drop : sequence of str
        Columns to leave out, by their names in this file.
    missing : sequence of str
        Markers of absent values, which are reported and never guessed.
    test : Path, optional
        A file of the same kind with held-out samples.
    """
    read = _arrays if path.suffix.casefold() == ".npz" else _table
    X, y, names = read(path, target, columns or {}, drop, missing)
    held = None
    if test is not None:
        other, wanted, found = read(test, target, columns or {}, drop, missing)
        if found != names:
            raise DataError(f"{test}: its columns are not those of {path.name}, in the same order")
        held = other, wanted
    return Silos.from_arrays([(X, y)], names=[name], feature_names=names, test=held)


def _arrays(
    path: Path, target: str, columns: Mapping[str, str], drop: Sequence[str], missing: Sequence[str]
) -> tuple[ArrayLike, ArrayLike, list[str]]:
    silos = Silos.from_files([path], target=columns.get(target, target))
    return silos.features, silos.targets, []


def _table(
    path: Path, target: str, columns: Mapping[str, str], drop: Sequence[str], missing: Sequence[str]
) -> tuple[Floats, Floats, list[str]]:
    frame = _read(path, missing)
    shown = ", ".join(map(str, frame.columns))
    for own in [*columns.values(), *drop]:
        if own not in frame:
            raise DataError(f"{path}: no column {own!r}{suggest(own, map(str, frame.columns))} (it has: {shown})")
    frame = frame.drop(columns=list(drop)).rename(columns={own: common for common, own in columns.items()})
    if frame.columns.duplicated().any():
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DataError(f"{path}: two columns are called {twice!r} after renaming")
    if target not in frame:
        raise DataError(f"{path}: no column {target!r}{suggest(target, map(str, frame.columns))} (it has: {shown})")
    if frame.empty:
        raise DataError(f"{path}: no rows below the header")
    for column in frame.columns:
        if not pd.api.types.is_numeric_dtype(frame[column]):
            raise DataError(f"{path}: column {column!r} is not numeric; encode it or drop it")
        if absent := int(frame[column].isna().sum()):
            raise DataError(f"{path}: column {column!r} has {absent} missing value(s); impute or drop them")
    names = [str(c) for c in frame.columns if c != target]
    return frame[names].to_numpy(np.float64), frame[target].to_numpy(np.float64), names


def _read(path: Path, missing: Sequence[str]) -> pd.DataFrame:
    kind = path.suffix.casefold()
    if kind not in KINDS:
        raise DataError(f"{path}: not a {', '.join(KINDS)} file")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        if kind == ".csv":
            return pd.read_csv(path, na_values=list(missing), skipinitialspace=True)
        return pd.read_parquet(path)
    except ImportError:
        raise DataError(
            f"{path}: reading parquet needs pyarrow: pip install 'fedcomposite[parquet]', or save a .csv"
        ) from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable {kind} file ({error})") from None
