"""Silos from data sets, one per client: everything is read once, and all that is wrong is told in one error.

``make`` is the class that is made of them, :class:`fedcomposite.Silos`, which calls these functions.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite.data.arrays import checked_columns, names_of, texts
from fedcomposite.data.faults import DataError, Fault, paths_of, refuse
from fedcomposite.data.items import Items, as_array, chosen_columns, items
from fedcomposite.data.pictures import Channels, ImageFolder, check_size, class_names, folder_faults
from fedcomposite.data.saved import ArrayFile, new_folder, write_index

Array = npt.NDArray[Any]
Columns = str | Sequence[str] | None

_REMEDIES = {
    "shape": "make all items alike, images with size=(height, width)",
    "type": "store all items alike",
    "target": "make all targets alike; number classes 0, 1, ...",
    "value": "impute or drop them before the run",
    "unreadable": "mend or leave out the item",
}


class Faults:
    """What is wrong with items, each kind of a party's once, with the first item and how many there are."""

    def __init__(self) -> None:
        self.others: list[Fault] = []
        self._found: dict[tuple[str, str], tuple[str, int]] = {}

    def note(self, who: str, kind: str, what: str) -> None:
        """Count a fault of an item; of each kind the first one is told in full."""
        first, count = self._found.get((who, kind), (what, 0))
        self._found[who, kind] = first, count + 1

    def refuse(self) -> None:
        """Raise one error for all of them, if there are any."""
        listed = list(self.others)
        for (who, kind), (first, count) in self._found.items():
            more = f" (and {count - 1} more items)" if count > 1 else ""
            listed.append(Fault(who, first + more, _REMEDIES[kind], count=count))
        refuse(listed)

    def __bool__(self) -> bool:
        return bool(self.others or self._found)


class MemoryRows:
    """Rows that are kept in memory."""

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._rows, self._at = np.empty(shape, dtype), 0

    def write(self, rows: Array) -> None:
        """Put rows behind those that are there."""
        self._rows[self._at : self._at + len(rows)] = rows
        self._at += len(rows)

    def close(self) -> Tensor:
        """All rows that were written, as a tensor over the same memory."""
        return torch.from_numpy(self._rows)


class Collector:
    """The items of a part (training, test, ...), written as they are read; of two parts, items must be alike."""

    def __init__(self, name: str, size: int, folder: Path | None, faults: Faults, kinds: dict[str, Any]) -> None:
        self._name, self._size, self._folder, self._faults, self._kinds = name, size, folder, faults, kinds
        self._sinks: dict[str, MemoryRows | ArrayFile] = {}

    def add(self, who: str, source: Items) -> None:
        """Read a party's items."""
        for i in range(len(source)):
            try:
                x, y = source[i]
                arrays = {"features": as_array(x), "targets": _target(y)}
            except Exception as error:  # whatever somebody's data set raises
                told = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
                self._faults.note(who, "unreadable", f"{source.label(i)}: {told.splitlines()[0] if told else 'error'}")
                continue
            arrays["features"] = np.atleast_1d(arrays["features"])
            if self._alike(who, source.label(i), arrays) and not self._faults:
                for name, array in arrays.items():
                    self._sink(name, array).write(array[None])

    def _alike(self, who: str, label: str, arrays: Mapping[str, Array]) -> bool:
        """Whether an item is like the first one."""
        good = True
        for name, array in arrays.items():
            first = self._kinds.setdefault(name, (array.shape, array.dtype))
            what, shape = ("", "shape") if name == "features" else ("the target of ", "target")
            if array.shape != first[0]:
                told = f"{what}{label} has shape {array.shape}, that of the first {first[0]}"
            elif array.dtype != first[1]:
                told, shape = f"{what}{label} is {array.dtype}, the first {first[1]}", "target" if what else "type"
            elif array.dtype.kind == "f" and not np.isfinite(array).all():
                told, shape = f"{what}{label} has values that are NaN or infinite", "value"
            else:
                continue
            self._faults.note(who, shape, told)
            good = False
        return good

    def _sink(self, name: str, like: Array) -> MemoryRows | ArrayFile:
        if name not in self._sinks:
            shape = (self._size, *like.shape)
            path = None if self._folder is None else self._folder / f"{self._name}{name}.npy"
            self._sinks[name] = MemoryRows(like.dtype, shape) if path is None else ArrayFile(path, like.dtype, shape)
        return self._sinks[name]

    def close(self) -> dict[str, Any]:
        """Tensors by name, or what is told of their files."""
        return {f"{self._name}{name}": sink.close() for name, sink in self._sinks.items()}


def _target(y: Any) -> Array:
    array = as_array(y, np.int64)
    return array.astype(np.int64) if array.dtype.kind in "iu" else array


def from_datasets(
    make: Any,
    datasets: Any,
    *,
    features: Columns = None,
    target: str | None = None,
    test: Any = None,
    validation: Any = None,
    names: Sequence[str] = (),
    feature_names: Sequence[str] = (),
    save_to: str | Path | None = None,
) -> Any:
    """See :meth:`fedcomposite.Silos.from_datasets`."""
    several = isinstance(datasets, list | tuple)
    given = list(datasets) if several else [datasets]
    labels = texts("names", names) or (tuple(f"client {i}" for i in range(len(given))) if several else ("pooled",))
    if not given:
        raise DataError("no data sets were given; give one per client")
    faults = Faults()
    if len(labels) != len(given):
        faults.others.append(Fault("names", f"{len(labels)} names for {len(given)} clients", "give one per client"))
        labels = tuple(f"client {i}" for i in range(len(given)))
    held = {part: one for part, one in (("test", test), ("validation", validation)) if one is not None}
    parties = [*zip(labels, given, strict=True), *((f"{part} data", one) for part, one in held.items())]
    if any(isinstance(one, pd.DataFrame) for _, one in parties):
        pairs = _frames(parties, features, target, faults)
        n = len(given)
        made = make.from_arrays(pairs[:n], names=labels, **dict(zip(held, pairs[n:], strict=True)))
        return made if save_to is None else made.save(save_to)
    read: list[Items | None] = []
    for who, one in parties:
        try:
            read.append(items(one, who, features, target))
            if not len(one):
                faults.others.append(Fault(who, "an empty data set", "leave it out or give it data"))
        except DataError as error:
            faults.others += error.faults
            read.append(None)
    return _collected(make, [who for who, _ in parties], read, list(held), feature_names, faults, save_to)


def _collected(
    make: Any,
    who: list[str],
    read: list[Items | None],
    held: list[str],
    feature_names: Sequence[str],
    faults: Faults,
    save_to: str | Path | None,
) -> Any:
    """Read all items, first those of the clients, then those of held-out parts."""
    n = len(read) - len(held)
    folder = None if save_to is None else new_folder(save_to)
    sizes = [0 if source is None else len(source) for source in read]
    columns = tuple(texts("feature_names", feature_names)) or next((s.columns for s in read if s is not None), ())
    kinds: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for prefix, at in (("", slice(0, n)), *((f"{part}-", slice(n + i, n + i + 1)) for i, part in enumerate(held))):
        collector = Collector(prefix, sum(sizes[at]), folder, faults, kinds)
        for name, source in zip(who[at], read[at], strict=True):
            if source is not None:
                collector.add(name, source)
        parts |= collector.close()
    width = kinds["features"][0][0] if "features" in kinds else len(columns)
    if columns and len(columns) != width:
        told = f"{len(columns)} feature names for {width} features"
        faults.others.append(Fault("feature_names", told, "give one per feature"))
    if faults and folder is not None:
        shutil.rmtree(folder)
    faults.refuse()
    offsets = tuple(np.cumsum([0, *sizes[:n]]).tolist())
    if folder is not None:
        write_index(folder, parts, offsets, who[:n], columns)
        return make.open(folder)
    outside: dict[str, Any] = {part: (parts[f"{part}-features"], parts[f"{part}-targets"]) for part in held}
    return make(parts["features"], parts["targets"], offsets, tuple(who[:n]), columns, **outside)


def _frames(
    parties: Sequence[tuple[str, Any]], features: Columns, target: str | None, faults: Faults
) -> list[tuple[pd.DataFrame, Any]]:
    """Features and targets of tables, whose columns are the same; all that is wrong is refused."""
    pairs: list[tuple[pd.DataFrame, Any]] = []
    first: list[str] | None = None
    for who, frame in parties:
        try:
            if not isinstance(frame, pd.DataFrame):
                raise DataError("", [Fault(who, f"a {type(frame).__name__} among tables", "give tables to all")])
            wanted, predicted = chosen_columns(names_of(frame, who), who, features, target)
            first = first or wanted
            if differ := sorted(set(wanted) ^ set(first)):
                listed = ", ".join(differ[:10])
                raise DataError("", [Fault(who, f"columns differ from the first's: {listed}", "rename or drop them")])
            if not len(frame):
                raise DataError("", [Fault(who, "an empty data set", "leave it out or give it data")])
            named = frame.set_axis([str(c) for c in frame.columns], axis=1)
            for table in (named[wanted], named[predicted]):
                checked_columns(table, who)
            pairs.append((named[wanted], named[predicted]))
        except DataError as error:
            faults.others += error.faults or [Fault(who, str(error), "mend the table")]
    faults.refuse()
    return pairs


def from_folders(
    make: Any,
    folders: str | Path | Sequence[str | Path],
    *,
    test: str | Path | None = None,
    validation: str | Path | None = None,
    names: Sequence[str] = (),
    size: tuple[int, int] | None = None,
    channels: Channels | None = None,
    save_to: str | Path | None = None,
) -> Any:
    """See :meth:`fedcomposite.Silos.from_folders`."""
    check_size(size, channels)
    given = paths_of(folders, "folder")
    held = {part: Path(p) for part, p in (("test", test), ("validation", validation)) if p is not None}
    labels = texts("names", names) or tuple(path.name for path in given)
    sources = [*given, *held.values()]
    refuse([fault for path in sources for fault in folder_faults(path, path.name)])
    classes = class_names(sources)
    read = {path: ImageFolder(path, classes, size, channels) for path in sources}
    outside: dict[str, Any] = {part: read[path] for part, path in held.items()}
    return from_datasets(make, [read[path] for path in given], names=labels, save_to=save_to, **outside)
