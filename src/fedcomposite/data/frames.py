"""Tables of pandas as numbers."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedcomposite.data.cells import EXACT, Column, column_faults
from fedcomposite.data.faults import DataError, Fault, refuse


def names_of(frame: pd.DataFrame, what: str) -> list[str]:
    """The names of a table's columns, each of which may occur once."""
    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"{what}: a {type(frame).__name__} is no table; give a DataFrame")
    names = [str(c) for c in frame.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    refuse([Fault(what, f"two columns are called {name!r}", "rename or drop one", name, 2) for name in twice])
    return names


def aligned(frame: pd.DataFrame, names: Sequence[str], what: str) -> pd.DataFrame:
    """A table with its columns in the order of ``names``."""
    own = names_of(frame, what)
    differ = sorted(set(own) ^ set(names))
    if differ:
        listed = ", ".join(differ[:10])
        raise DataError(f"{what}: columns differ from the first client's: {listed}; rename them or leave them out")
    return frame.iloc[:, [own.index(name) for name in names]]


def check_rows(X: pd.DataFrame, y: pd.Series[Any], what: str) -> None:
    """Refuse targets that are among the features, or whose rows have the features' labels in another order."""
    if y.name is not None and y.name in X.columns and y.equals(X[y.name]):
        raise DataError(f"{what}: the targets are also the column {str(y.name)!r} of the features; drop it there")
    if len(X) == len(y) and not X.index.equals(y.index) and set(X.index) == set(y.index):
        raise DataError(
            f"{what}: features and targets have the same row labels in another order; "
            "align them with y.loc[X.index], or drop the labels with reset_index(drop=True)"
        )


def frame_values(frame: pd.DataFrame | pd.Series[Any], what: str) -> npt.NDArray[Any]:
    """The numbers of a table or a column: of numeric types as pandas joins them, otherwise as float64."""
    several = isinstance(frame, pd.DataFrame)
    types = frame.dtypes if isinstance(frame, pd.DataFrame) else [frame.dtype]
    kinds = {t.kind if isinstance(t, np.dtype) else "O" for t in types}
    if len(kinds) < 2 and kinds <= set("biufc"):
        return frame.to_numpy()
    read = checked_columns(frame, what)
    return np.stack([c.values for c in read], axis=1) if several else read[0].values


def checked_columns(frame: pd.DataFrame | pd.Series[Any], what: str) -> list[Column]:
    """The columns of a table, read one by one; all that is wrong with them is refused."""
    several = isinstance(frame, pd.DataFrame)
    columns = [frame.iloc[:, j] for j in range(frame.shape[1])] if isinstance(frame, pd.DataFrame) else [frame]
    read = [series_column(c, str(c.name) if several else "") for c in columns]
    refuse([fault for j, c in enumerate(read) for fault in column_faults(c, what, j, ())])
    return read


def series_column(series: pd.Series[Any], name: str, missing: Sequence[str] = ()) -> Column:
    """A column of any type as numbers, with a record of what is none."""
    column = Column(name, missing, ".")
    kind = series.dtype.kind if isinstance(series.dtype, np.dtype) else "O"
    if kind in "fb":
        values = series.to_numpy(np.float64)
        for row in np.flatnonzero(np.isnan(values)):
            column.note("missing", int(row), "NaN")
        for row in np.flatnonzero(np.isinf(values)):
            column.note("infinite", int(row), str(values[row]))
    elif kind in "iu":
        whole = series.to_numpy()
        values = whole.astype(np.float64)
        for row in np.flatnonzero(np.abs(values) >= EXACT):
            if int(values[row]) != int(whole[row]):
                column.note("inexact", int(row), str(whole[row]))
    else:
        cells = series.astype(object).where(series.notna(), None).to_numpy(object)
        values = np.array([_number(cell, column, row) for row, cell in enumerate(cells)], np.float64)
    for marker in column.numeric:
        for row in np.flatnonzero(values == marker):
            column.note("missing", int(row), str(marker))
    column.extend(values)
    return column


def _number(cell: Any, column: Column, row: int) -> float:
    """An object as a float; a string is text even if it spells a number."""
    if cell is None or (isinstance(cell, str) and cell.strip().casefold() in column.markers):
        column.note("missing", row, str(cell))
    elif isinstance(cell, numbers.Integral | np.bool_):
        whole = int(cell)
        if abs(whole) <= EXACT:
            return float(whole)
        if abs(whole) >= 2**1024:
            column.note("large", row, "")
        elif int(float(whole)) != whole:
            column.note("inexact", row, str(whole))
        else:
            return float(whole)
    elif isinstance(cell, numbers.Real | Decimal):
        value = float(cell)
        if not np.isnan(value) and not np.isinf(value):
            return value
        column.note("infinite", row, str(cell))
    else:
        column.note("text", row, str(cell))
    return np.nan
