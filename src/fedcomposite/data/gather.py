"""What is given for each client, checked and brought to one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from fedcomposite.data.arrays import ArrayLike, as_tensor, check_finite, common_type, pair
from fedcomposite.data.faults import DataError, refuse_all
from fedcomposite.data.frames import aligned, names_of
from fedcomposite.data.sparse import Features, SparseRows, is_sparse, joined, sparse_rows


class Gathered(NamedTuple):
    """Features and targets of everyone, each of one type, and the names of the columns where tables have some."""

    features: list[Features]
    targets: list[Tensor]
    columns: tuple[str, ...]


def gather(given: Sequence[tuple[str, Any]]) -> Gathered:
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
    return Gathered(features, common_type([y for _, y in parts], labels), tuple(order or ()))


def pooled(features: Sequence[Features]) -> Features:
    """Everyone's samples, one party after another, in memory of their own."""
    compressed = [X for X in features if isinstance(X, SparseRows)]
    return joined(compressed) if compressed else torch.cat([X for X in features if isinstance(X, Tensor)])


def _checked(X: Any, y: Any, who: str, before: tuple[Features, Tensor] | None) -> tuple[Features, Tensor]:
    features: Features
    first = None if before is None else before[0]
    features = sparse_rows(X, f"{who}, features") if is_sparse(X) else as_tensor(X, f"{who}, features")
    targets = as_tensor(y, f"{who}, targets", torch.int64)
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
