"""Data sets as others make them, item by item: map-style ones of torch, tables of Hugging Face, lists of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd
from torch import Tensor

from fedcomposite._validation import suggest
from fedcomposite.data.faults import DataError, stop
from fedcomposite.data.pictures import is_picture, picture

Array = npt.NDArray[Any]

_BATCH = 64  # rows of a table that are read at a time
_WIDER = {"u2": "i4", "u4": "i8", "u8": "i8"}  # types that torch does not compute with


class Items(Protocol):
    """Samples by number, each with its target."""

    columns: tuple[str, ...]
    """Names of the features, where there are any."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> tuple[Any, Any]: ...

    def label(self, i: int) -> str:
        """What item i is called."""


class MapItems:
    """Anything with a length whose items are pairs (x, y), or dictionaries of which some keys are taken."""

    columns: tuple[str, ...] = ()

    def __init__(self, dataset: Any, features: str | Sequence[str] | None, target: str | None) -> None:
        self._dataset, self._features, self._target = dataset, features, target

    def __len__(self) -> int:
        return len(self._dataset)

    def label(self, i: int) -> str:
        """What item i is called."""
        own = getattr(self._dataset, "label", None)
        return str(own(i)) if callable(own) else f"item {i}"

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        item = self._dataset[i]
        if isinstance(item, Mapping):
            if self._features is None or self._target is None:
                raise ValueError(f"a dictionary with {', '.join(map(str, item))}; say features= and target=")
            keys = [self._features] if isinstance(self._features, str) else list(self._features)
            if absent := [key for key in (*keys, self._target) if key not in item]:
                raise ValueError(f"no {absent[0]!r} among {', '.join(map(str, item))}")
            return _joined([item[key] for key in keys]), item[self._target]
        if not isinstance(item, tuple | list) or len(item) != 2:
            many = f" of {len(item)}" if isinstance(item, tuple | list) else ""
            raise ValueError(f"a {type(item).__name__}{many}, not a pair (x, y)")
        if not (self._features is None or isinstance(self._features, str)):
            raise ValueError(f"a pair, which has no {', '.join(self._features)}; leave features out")
        return item[0], item[1]


class TableItems:
    """Rows of a table of Hugging Face: one column of images, or columns of numbers or arrays, one behind the other."""

    def __init__(self, dataset: Any, features: Sequence[str], target: str) -> None:
        self._size, self._features, self._target = len(dataset), list(features), target
        wanted = [*self._features, target]
        pictures = [c for c in wanted if type(dataset.features[c]).__name__ == "Image"]
        numbers = [c for c in wanted if c not in pictures]
        self._views = [dataset.with_format("numpy", columns=numbers)] if numbers else []
        self._views += [dataset.with_format(None, columns=pictures)] if pictures else []
        self._first, self._rows = -1, dict[str, Any]()
        self.columns = tuple(self._features) if all(self._scalar(dataset, c) for c in self._features) else ()

    @staticmethod
    def _scalar(dataset: Any, column: str) -> bool:
        return type(dataset.features[column]).__name__ in ("Value", "ClassLabel")

    def __len__(self) -> int:
        return self._size

    def label(self, i: int) -> str:
        """What item i is called."""
        return f"item {i}"

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        if not self._first <= i < self._first + _BATCH or self._first < 0:
            self._first = i - i % _BATCH
            span = slice(self._first, min(self._size, self._first + _BATCH))
            self._rows = {name: column for view in self._views for name, column in view[span].items()}
        at = i - self._first
        values = [self._rows[c][at] for c in self._features]
        if self.columns:
            return np.asarray(values), self._rows[self._target][at]
        return _joined(values), self._rows[self._target][at]


def _joined(values: Sequence[Any]) -> Any:
    """One value as it is; several arrays one behind the other, flat."""
    if len(values) == 1:
        return values[0]
    arrays = [as_array(v).reshape(-1) for v in values]
    whole = {a.dtype.kind in "iu" for a in arrays}
    if len(whole) > 1:
        raise ValueError("integers beside other numbers; give all of them as one type")
    return np.concatenate(arrays)


def items(dataset: Any, who: str, features: str | Sequence[str] | None, target: str | None) -> Items:
    """A data set of any of these kinds, item by item; or an error that says why not."""
    if isinstance(dataset, str | Path):
        raise stop(who, f"{str(dataset)!r} is a path", "read images with from_folders, tables with from_files")
    if isinstance(dataset, Mapping):
        raise stop(who, f"a {type(dataset).__name__} of {', '.join(map(str, dataset))}", "give one of its parts")
    if isinstance(dataset, tuple | Tensor | np.ndarray | pd.Series):
        raise stop(who, f"a {type(dataset).__name__} is no data set", "give arrays to from_arrays, as pairs (X, y)")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        kind = type(dataset).__name__
        raise stop(who, f"a {kind} cannot be read by number", "give a map-style data set: __len__ and __getitem__")
    if hasattr(dataset, "column_names") and hasattr(dataset, "with_format"):
        return TableItems(dataset, *chosen_columns(list(dataset.column_names), who, features, target))
    return MapItems(dataset, features, target)


def chosen_columns(
    names: Sequence[str], who: str, features: str | Sequence[str] | None, target: str | None
) -> tuple[list[str], str]:
    """Columns of the features and the target of a table with these columns."""
    if target is None:
        raise stop(who, f"a table with columns {', '.join(names)}", "say which one to predict: target=")
    if not (features is None or isinstance(features, Iterable)):
        raise stop(who, f"features = {features!r} are no columns", f"there are {', '.join(names)}")
    wanted = [features] if isinstance(features, str) else list(features or (n for n in names if n != target))
    for name in (target, *wanted):
        if name not in names:
            raise stop(who, f"no column {name!r}{suggest(str(name), names)}", f"there are {', '.join(names)}")
    if target in wanted:
        raise stop(who, f"the target {target!r} is among the features", "leave it out there")
    if not wanted:
        raise stop(who, "no columns beside the target", "keep at least one feature")
    return wanted, target


def as_array(value: Any, truth: type = np.float64) -> Array:
    """An item's numbers; bytes for an image, and ``truth`` for booleans."""
    if is_picture(value):
        return picture(value)
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind == "b":
        return array.astype(truth)
    if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
        shown = "text" if array.dtype.kind in "US" else f"of type {array.dtype}"
        raise DataError(f"{shown}, not numbers")
    wider = _WIDER.get(f"{array.dtype.kind}{array.dtype.itemsize}")
    return array.astype(wider or array.dtype.newbyteorder("="), copy=False)
