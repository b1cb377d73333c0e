"""Tables of pandas as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedcomposite.data.cells import Column, column_faults, series_column
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
    read = [series_column(c, str(c.name) if several else "", position=j) for j, c in enumerate(columns)]
    refuse([fault for c in read for fault in column_faults(c, what, ())])
    return read
