"""LIBSVM files: ``target index:value index:value ...`` in every line, indices from 1. They stay sparse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcomposite.data.faults import DataError, Fault, refuse, stop
from fedcomposite.data.reading import Table, kind_of, read_files
from fedcomposite.data.wanted import MARKERS, Wanted, wanted

SUFFIXES = (".svm", ".svmlight", ".libsvm")


def is_svmlight(paths: Sequence[Path]) -> bool:
    """Whether these are such files, by their names."""
    return bool(paths) and all(path.suffix.casefold() in SUFFIXES for path in paths)


def read_all(paths: Sequence[Path], kind: str | None, features: int | None, given: dict[str, Any]) -> list[Table]:
    """Read files of any kind, with the options of :meth:`fedcomposite.Silos.from_files`."""
    if kind is None and is_svmlight(paths):
        if given["target"] is not None:
            raise DataError(f"target = {given['target']!r}: an .svm file has its targets in front; leave it out")
        return _read(paths, features, wanted(**{**given, "target": ""}))
    if kind is None and any(is_svmlight([path]) for path in paths):
        raise DataError("files must be all of one kind: some of these are of LIBSVM, others are not")
    if features is not None:
        raise DataError(f"features = {features}: only for .svm files; others name theirs")
    return read_files(paths, kind or kind_of(paths), wanted(**given))


def _read(paths: Sequence[Path], features: int | None, options: Wanted) -> list[Table]:
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
            found.append(_one(path, features))
        except DataError as error:
            faults += error.faults
    refuse(faults)
    width = features or max(X.shape[1] for X, _ in found)
    for X, _ in found:
        X.resize(X.shape[0], width)
    return [Table(X, y, ()) for X, y in found]


def _one(path: Path, features: int | None) -> tuple[Any, Any]:
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
