"""Silos made of silos: held-out parts, standardised features, weights by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedcomposite.data.cells import spread_of
from fedcomposite.data.faults import DataError
from fedcomposite.data.sparse import SparseRows, dense, tensors_only
from fedcomposite.data.splitting import stratified

if TYPE_CHECKING:
    from fedcomposite.data.silos import HeldOut, Silos


def split(silos: Silos, shares: dict[HeldOut, float], seed: int, stratify: bool) -> Silos:
    """See :meth:`fedcomposite.Silos.split`."""
    wrong = [f"{part} = {share!r}" for part, share in shares.items() if not isinstance(share, int | float | np.number)]
    wrong += [] if isinstance(seed, int | np.integer) and seed >= 0 else [f"seed = {seed!r}"]
    if wrong:
        raise DataError(f"split: {', '.join(wrong)}; shares must be numbers between 0 and 1, a seed an integer >= 0")
    if sum(shares.values()) >= 1:
        raise DataError(
            f"split: {' and '.join(f'{k} = {v}' for k, v in shares.items() if v)} leave nothing to train on"
        )
    for part, share in shares.items():
        if not (0 < share < 1 or (share == 0 and sum(shares.values()) > 0)):
            raise DataError(f"split: {part} = {share}, must be between 0 and 1")
        if share > 0 and part in silos.held_out:
            raise DataError(f"split: these silos have {part} data already")
    generator = np.random.default_rng(seed)
    keep: list[npt.NDArray[np.int64]] = []
    out: dict[HeldOut, list[npt.NDArray[np.int64]]] = {part: [] for part, share in shares.items() if share > 0}
    for i in range(len(silos)):
        mine = slice(silos.offsets[i], silos.offsets[i + 1])
        order = stratified(silos.targets[mine].numpy(), seed, silos.ids[i]) if stratify else None
        rows = silos.offsets[i] + (generator.permutation(int(silos.sizes[i])) if order is None else order)
        size = len(rows)
        for part, held in out.items():
            cut = min(len(rows) - 1, round(shares[part] * size))
            held.append(rows[:cut])
            rows = rows[cut:]
        keep.append(rows)
    parts: dict[str, Any] = {}
    owners, shifts = dict(silos.held_by), dict(silos.held_margin_offsets)
    for part, held in out.items():
        chosen = np.sort(np.concatenate(held))
        if len(chosen) == 0:
            most = silos.sizes.max()
            raise DataError(f"split: {part} = {shares[part]} of silos with at most {most} samples holds out none")
        owners[part] = torch.from_numpy(np.searchsorted(silos.offsets, chosen, side="right") - 1)
        parts[part] = silos.features[chosen], silos.targets[chosen]
        if silos.margin_offsets is not None:
            shifts[part] = silos.margin_offsets[chosen]
    kept = silos.subset(keep, silos.names)
    return replace(kept, **parts, ids=silos.ids, held_by=owners, held_margin_offsets=shifts)


def chosen(silos: Silos, clients: Sequence[int | str], names: Sequence[str]) -> Silos:
    """Some clients with their samples, names and numbers; of held-out samples theirs, where their owner is known."""
    strange = [c for c in clients if c not in silos.names and not (_whole(c) and 0 <= int(c) < len(silos))]
    if strange:
        raise DataError(
            f"subset: no client {strange[0]!r}; these are {', '.join(silos.names[:9])}{', ...' * (len(silos) > 9)}, "
            f"or 0 to {len(silos) - 1}"
        )
    places = [silos.names.index(c) if isinstance(c, str) else int(c) for c in clients]
    if len(set(places)) < len(places):
        raise DataError(f"subset: client {silos.names[max(places, key=places.count)]!r} is given twice")
    kept = silos.subset(
        [np.arange(*silos.offsets[i : i + 2]) for i in places], names or [silos.names[i] for i in places]
    )
    parts: dict[str, Any] = {}
    owners, shifts = {}, dict(silos.held_margin_offsets)
    for part, owner in silos.held_by.items():
        X, y = silos.held_out[part]
        mine = np.flatnonzero(np.isin(owner.numpy(), places))
        parts[part] = (X[mine], y[mine]) if len(mine) else None
        owners[part] = torch.tensor([places.index(i) for i in owner[mine].tolist()], dtype=torch.int64)
        if part in shifts:
            shifts[part] = shifts[part][mine]
        if not len(mine):
            del owners[part]
            shifts.pop(part, None)
    ids = tuple(silos.ids[i] for i in places)
    return replace(kept, **parts, ids=ids, held_by=owners, held_margin_offsets=shifts)


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def standardized(silos: Silos) -> Silos:
    """See :meth:`fedcomposite.Silos.standardize`."""
    held: dict[str, Any]
    if isinstance(own := silos.features, SparseRows):
        held = {k: (v.standardized(own), b) for k, (v, b) in silos.held_out.items() if isinstance(v, SparseRows)}
        return replace(silos, features=own.standardized(own), **held)
    X = tensors_only(own, "standardize").double()
    mean, sd = X.mean(0), X.std(0, correction=0)
    varies = torch.from_numpy(spread_of(mean.numpy(), sd.numpy()) > 0)
    mean, sd = torch.where(varies, mean, 0.0), torch.where(varies, sd, 1.0)
    held = {k: ((dense(v).double() - mean) / sd, b) for k, (v, b) in silos.held_out.items()}
    return replace(silos, features=(X - mean) / sd, **held)


def weighted(silos: Silos, weights: Literal["balanced"] | Mapping[float, float]) -> Silos:
    """See :meth:`fedcomposite.Silos.class_weighted`."""
    labels, at, counts = torch.unique(silos.targets, return_inverse=True, return_counts=True)
    if silos.classes is None:
        raise DataError("class_weighted: the targets are not classes")
    if weights == "balanced":
        each = len(silos.targets) / (len(labels) * counts.double())
    elif isinstance(weights, Mapping) and {float(v) for v in labels} <= {float(v) for v in weights}:
        given = {float(k): float(v) for k, v in weights.items()}
        each = torch.tensor([given[float(v)] for v in labels], dtype=torch.float64)
    else:
        shown = ", ".join(f"{float(v):g}" for v in labels[:10])
        raise DataError(
            f"class_weighted: weights = {weights!r:.60}, must be 'balanced' or have a number for each of {shown}"
        )
    return replace(silos, weights=each[at] * (1.0 if silos.weights is None else silos.weights))
