"""What is given in memory for each client, arrays, tables or sparse matrices, as tensors.

What is not a plain number, or would change on the way, is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy import sparse
from torch import Tensor
from torch.utils.data import Dataset

from fedcomposite.data.cells import EXACT, Column, column_faults, series_column, shown
from fedcomposite.data.faults import DataError, Fault, refuse, refuse_all
from fedcomposite.data.sparse import Features, SparseRows, is_sparse, joined, sparse_rows

ArrayLike = Tensor | npt.ArrayLike
NO_ENTRY = -1e30
"""In a column of entries: observation began before anything could happen."""
Array = npt.NDArray[Any]

_WIDER = {"u2": "i4", "u4": "i8", "u8": "i8"}  # torch stores these unsigned types but does not compute with them


def texts(option: str, given: Sequence[str]) -> tuple[str, ...]:
    """A list of names; a single string would be read letter by letter."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise DataError(f"{option} = {given!r} must be a list of names")
    return tuple(str(name) for name in given)


def clients(arrays: Any) -> list[Any]:
    """What was given for each client."""
    wrong = isinstance(arrays, Dataset | Tensor | np.ndarray | pd.DataFrame | dict | str)
    wrong |= not isinstance(arrays, Iterable)
    if wrong or (isinstance(arrays, tuple) and len(arrays) == 2 and not isinstance(arrays[0], tuple | list)):
        kind = "one pair" if isinstance(arrays, tuple) else f"a {type(arrays).__name__}"
        raise DataError(f"from_arrays wants a list with a pair of arrays (X, y) per client, not {kind}")
    return list(arrays)


def pair(one: Any, who: str) -> tuple[Any, Any]:
    """A client's features and targets."""
    if not isinstance(one, tuple | list) or len(one) != 2:
        many = f" of {len(one)}" if isinstance(one, tuple | list) else ""
        raise DataError(
            f"{who}: from_arrays wants a pair of arrays (X, y) per client, this is a {type(one).__name__}{many}"
        )
    X, y = one
    if isinstance(X, pd.DataFrame) and isinstance(y, pd.Series):
        check_rows(X, y, who)
    return X, y


def as_tensor(values: Any, what: str, truth: torch.dtype = torch.float64) -> Tensor:
    """A tensor of real numbers with the values of an array, a table, a list or a tensor.

    Parameters
    ----------
    values : array-like
        Numbers. Booleans become 0 and 1 of the type ``truth``.
    what : str
        Whose values these are, for messages: ``"client 3, features"``.
    """
    if isinstance(values, Tensor):
        out = _plain(values.detach(), what)
    elif sparse.issparse(values):
        raise DataError(f"{what}: a sparse matrix; make it dense with .toarray()")
    else:
        array = _numeric(values, what)
        try:
            out = torch.from_numpy(array if array.flags.writeable else array.copy())
        except TypeError:
            raise DataError(f"{what}: numbers of type {array.dtype} are not supported; cast them to float64") from None
    if out.dtype == torch.bool:
        return out.to(truth)
    _check_digits(out, what)
    return out


def as_targets(values: Any, what: str) -> Tensor:
    """A tensor of targets; events and times in a structured array, as scikit-survival's ``Surv``, are columns."""
    structured = isinstance(values, np.ndarray) and values.dtype.names is not None
    return as_tensor(_times(values, what) if structured else values, what, torch.int64)


def check_finite(values: Tensor, what: str) -> None:
    """Refuse NaN and infinite values."""
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        bad = torch.nonzero(~torch.isfinite(values))
        row, *rest = bad[0].tolist()
        column = f", column {rest[0]}" if rest else ""
        raise DataError(
            f"{what}: {len(bad)} value(s) are NaN or infinite, the first in row {row}{column}; "
            "impute or drop them before the run"
        )


def _from_objects(array: Array, what: str) -> Array:
    """Python's numbers, whatever their kind, as float64; anything else is counted and refused."""
    if array.dtype.kind in "biufc":
        return array
    if array.dtype.kind in "US":
        column = Column(what, (), ".")
        column.add([str(cell) for cell in array.ravel()])
        texts, size = column.found.get("text"), array.size
        if texts is None:
            raise DataError(f"{what}: numbers stored as text; convert them, for example with .astype(float)")
        raise DataError(
            f"{what}: {texts.count} of {size} values are text, not numbers, such as {shown(texts.sample)}; "
            "encode text columns first"
        )
    if array.dtype.kind != "O":
        raise DataError(f"{what}: values of type {array.dtype} are not numbers; convert them first")
    table = pd.DataFrame(array, dtype=object) if array.ndim == 2 else pd.Series(array.ravel(), dtype=object)
    return frame_values(table, what).reshape(array.shape)


def _numeric(values: Any, what: str) -> Array:
    """A contiguous array of a type that torch may know."""
    if isinstance(values, pd.DataFrame | pd.Series):
        array = frame_values(values, what)
    else:
        try:
            array = np.ma.asarray(values) if np.ma.isMaskedArray(values) else np.asarray(values)
        except (ValueError, TypeError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{what}: not an array of numbers ({reason}); give rows of equal length") from None
    if isinstance(array, np.ma.MaskedArray):
        if absent := int(np.ma.getmaskarray(array).sum()):
            raise DataError(f"{what}: {absent} value(s) are masked, that is missing; impute or drop them")
        array = array.data
    array = _from_objects(array, what)
    if array.dtype.kind == "c":
        raise DataError(
            f"{what}: numbers of type {array.dtype} are not supported; give real and imaginary parts as two features"
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise DataError(f"{what}: whole numbers beyond 2^63; rescale them or cast them to float64")
        array = array.astype(_WIDER[f"u{array.dtype.itemsize}"])
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))


def _times(array: Array, what: str) -> Array:
    """Events and times of a structured array as columns: time, event."""
    kinds = {array.dtype[name].kind: name for name in array.dtype.names or ()}
    if len(array.dtype.names or ()) != 2 or "b" not in kinds or not set(kinds) <= set("biuf"):
        raise DataError(f"{what}: a structured array needs two fields, an event that is true or false and a time")
    (time,) = (name for kind, name in kinds.items() if kind != "b")
    made: Array = np.ma.stack([array[time].astype(float), array[kinds["b"]].astype(float)], axis=1)
    return made if np.ma.isMaskedArray(array) else np.asarray(made)


def _plain(values: Tensor, what: str) -> Tensor:
    if values.layout != torch.strided:
        raise DataError(f"{what}: a sparse tensor; make it dense with .to_dense()")
    if values.is_complex():
        raise DataError(
            f"{what}: numbers of type {str(values.dtype).removeprefix('torch.')} are not supported; "
            "give real and imaginary parts as two features"
        )
    wider = {torch.uint16: torch.int32, torch.uint32: torch.int64}
    if values.dtype == torch.uint64:
        raise DataError(f"{what}: numbers of type uint64 are not supported; cast them to int64 or float64")
    return values.cpu().to(wider.get(values.dtype, values.dtype))


def _check_digits(values: Tensor, what: str) -> None:
    """Whole numbers that a 64-bit float cannot hold: computing with them would change them."""
    if values.dtype != torch.int64:
        return
    large = values[(values > EXACT) | (values < -EXACT)]
    lost = int((large.double().long() != large).sum())
    if lost:
        raise DataError(
            f"{what}: {lost} whole number(s) beyond 2^53 would lose digits as float64; "
            "drop the column if it is an identifier, or rescale it"
        )


def common_type(parts: Sequence[Tensor], labels: Sequence[str]) -> list[Tensor]:
    """The clients' tensors with one type that changes no value.

    Bytes of images stand for 0 to 1, floating-point images for what they are: mixed, one of them would be read wrong.
    """
    kinds = {p.dtype for p in parts}
    if len(kinds) == 1:
        return list(parts)
    if torch.uint8 in kinds and parts[0].ndim > 2:
        other = next(i for i, p in enumerate(parts) if p.dtype != parts[0].dtype)
        names = [str(parts[i].dtype).removeprefix("torch.") for i in (0, other)]
        raise DataError(
            f"{labels[other]}: images of type {names[1]}, {labels[0]}'s are {names[0]}; store all of them alike"
        )
    floating = {d for d in kinds if d.is_floating_point}
    target = torch.float64 if floating and kinds - floating else parts[0].dtype
    for p in parts:
        target = torch.promote_types(target, p.dtype)
    return [p.to(target) for p in parts]


def check_offsets(offsets: Tensor | None, count: int, part: str) -> None:
    """Refuse offsets that are not finite, or not one per sample."""
    if offsets is not None and (offsets.shape != (count,) or not bool(torch.isfinite(offsets).all())):
        raise DataError(f"margin offsets must be finite, one for each of the {count} {part} samples")


def check_weights(weights: Tensor, offsets: Sequence[int], names: Sequence[str]) -> None:
    """Refuse weights of samples that are negative, or that leave a client with nothing."""
    if weights.shape != (offsets[-1],):
        raise DataError(f"weights have shape {tuple(weights.shape)}, expected ({offsets[-1]},): one per sample")
    for i, (a, b) in enumerate(itertools.pairwise(offsets)):
        own = weights[a:b]
        if not bool((own >= 0).all() & torch.isfinite(own).all()) or not float(own.sum()) > 0:
            raise DataError(f"{names[i]}: weights must be finite, >= 0 and not all 0")


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


class StackedArrays(NamedTuple):
    """Features and targets of everyone, each of one type, and the names of the columns where tables have some."""

    features: list[Features]
    targets: list[Tensor]
    columns: tuple[str, ...]


def gather(given: Sequence[tuple[str, Any]]) -> StackedArrays:
    """The pairs (X, y) of named parties; columns of tables are put into the order of the first.

    What is wrong with any of them is told in one error.
    """
    found: dict[int, tuple[Features, Tensor]] = {}
    order: list[str] | None = None
    wrong: list[DataError] = []
    pairs = [pair(one, who) for who, one in given]
    for i, (who, _) in enumerate(given):
        X, y = pairs[i]
        try:
            if isinstance(X, pd.DataFrame):
                order = names_of(X, who) if order is None else order
                X = aligned(X, order, who)
            found[i] = _checked(X, y, who, found.get(0))
        except DataError as error:
            wrong.append(error)
    refuse_all(wrong)
    parts = list(found.values())
    labels = [who for who, _ in given]
    plain = [X for X, _ in parts if isinstance(X, Tensor)]
    features: list[Features] = [X for X, _ in parts]
    if plain:
        features = list(common_type(plain, labels))
    return StackedArrays(features, common_type([y for _, y in parts], labels), tuple(order or ()))


def pooled(features: Sequence[Features]) -> Features:
    """Everyone's samples, one party after another, in memory of their own."""
    compressed = [X for X in features if isinstance(X, SparseRows)]
    return joined(compressed) if compressed else torch.cat([X for X in features if isinstance(X, Tensor)])


def _checked(X: Any, y: Any, who: str, before: tuple[Features, Tensor] | None) -> tuple[Features, Tensor]:
    features: Features
    first = None if before is None else before[0]
    features = sparse_rows(X, f"{who}, features") if is_sparse(X) else as_tensor(X, f"{who}, features")
    targets = as_targets(y, f"{who}, targets")
    if features.ndim < 2:
        raise DataError(f"{who}: features have shape {tuple(features.shape)}, expected (samples, features)")
    if targets.ndim == 0 or len(targets) != len(features) or targets.shape[1:] == (1,):
        raise DataError(
            f"{who}: targets have shape {tuple(targets.shape)}, expected ({len(features)},) to match the features"
        )
    if before is not None and targets.shape[1:] != before[1].shape[1:]:
        raise DataError(
            f"{who} has targets of shape {tuple(targets.shape[1:])}, the first client {tuple(before[1].shape[1:])}; "
            "all must have as many for each sample"
        )
    if len(features) == 0:
        raise DataError(f"{who} is an empty silo: it has no samples; leave it out or give it data")
    if 0 in features.shape:
        raise DataError(f"{who} has no features: their shape is {tuple(features.shape)}; keep at least one")
    if first is not None and features.shape[1:] != first.shape[1:]:
        raise DataError(
            f"{who} has samples of shape {tuple(features.shape[1:])}, the first client {tuple(first.shape[1:])}; "
            "all must have the same features in the same order"
        )
    if first is not None and isinstance(first, SparseRows) != isinstance(features, SparseRows):
        kinds = ("sparse", "dense") if isinstance(features, SparseRows) else ("dense", "sparse")
        raise DataError(f"{who} has {kinds[0]} features, the first client {kinds[1]} ones; give all of them alike")
    if isinstance(features, Tensor):
        check_finite(features, f"{who}, features")
    check_finite(targets, f"{who}, targets")
    return features, targets


def check_parts(given: Any, there: Sequence[str]) -> None:
    """Refuse offsets of held-out samples that are not there."""
    strange = sorted(map(str, set(given) - set(there))) if isinstance(given, Mapping) else [repr(given)]
    if strange:
        raise DataError(
            f"held_margin_offsets: {', '.join(strange)}; give {{'test': ...}} for the parts that are held out"
        )


def per_sample(option: str, given: Iterable[ArrayLike], sizes: Sequence[int]) -> Tensor:
    """A number for every sample, from an array per client."""
    if not isinstance(given, Iterable):
        raise DataError(f"{option} = {given!r:.60}, must be an array per client, as long as its targets")
    each = [as_tensor(w, f"{option} of client {i}").double() for i, w in enumerate(given)]
    if [tuple(w.shape) for w in each] != [(size,) for size in sizes]:
        raise DataError(
            f"{option}: give an array per client, as long as its targets; got {len(each)} for {len(sizes)} clients"
        )
    return torch.cat(each)
