"""How strong a term h is, and the same with its strength multiplied: as a whole, or by a factor for every feature."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from fedcomposite._validation import suggest
from fedcomposite.regularizers.algebra import Blocks, Named, On
from fedcomposite.regularizers.base import Regularizer
from fedcomposite.regularizers.clustered import ClusteredLasso
from fedcomposite.regularizers.group import GroupLasso
from fedcomposite.regularizers.separable import L1, MCP, SCAD, ElasticNet, Zero
from fedcomposite.regularizers.wrapped import Ramped, settled

Floats = npt.NDArray[np.float64]
PenaltyFactor = Mapping[str, float] | Mapping[int, float] | Sequence[float] | Floats
"""What each feature's term is multiplied by: a number for each, or for some of them by name or place."""


def strength(h: Regularizer) -> float:
    """The number that a path calls lambda: lam, l1 + l2 of an elastic net, the largest of several terms."""
    settled(h)
    match h:
        case MCP() | SCAD():
            return h.kappa * h.lam
        case ElasticNet():
            return h.l1 + h.l2
        case On():
            return strength(h.h)
        case Blocks():
            return max(strength(part) for part in h.parts) / h.unit
    if not h.coefficients:
        raise ValueError(f"{h} has no strength to vary; take one that has, for example L1(1.0)")
    return float(max(getattr(h, name) for name in h.coefficients))


def varied(h: Regularizer, factor: float) -> Regularizer:
    """The term h with its strength multiplied.

    That is ``factor * h``, except for MCP and SCAD: their lam is multiplied, and their concavity stays as it is.
    """
    match h:
        case MCP() | SCAD():
            return dataclasses.replace(h, lam=factor * h.lam)
        case On():
            return dataclasses.replace(h, h=varied(h.h, factor))
        case Blocks():
            return dataclasses.replace(h, parts=tuple(varied(part, factor) for part in h.parts))
    return h.scaled(factor)


def factors_of(given: PenaltyFactor, names: Sequence[str], features: int, sources: Mapping[str, str]) -> Floats:
    """A factor per feature, ``(features,)``.

    Parameters
    ----------
    given : mapping or sequence
        Factors by the features' names or places, 1 for the others; or one for each feature.
    names : sequence of str
        Of the features; empty if they have none.
    features : int
        How many there are.
    sources : mapping
        The column that each feature is made from, whose name stands for all of its features.
    """
    if not isinstance(given, Mapping):
        try:
            found = np.array(given, float)
        except (TypeError, ValueError):
            found = np.zeros(0)
        if found.shape != (features,) or not ((found >= 0) & (found < np.inf)).all():
            raise ValueError(f"penalty_factor: give {features} numbers >= 0, one per feature, or a mapping of names")
        return found
    found, columns = np.ones(features), set(sources.values())
    for key, factor in sorted(given.items(), key=lambda one: one[0] not in columns):  # a feature's own wins
        number = isinstance(factor, int | float | np.number) and not isinstance(factor, bool)
        if not (number and 0 <= factor < np.inf):
            raise ValueError(f"penalty_factor: {key!r} = {factor!r}, must be a number >= 0")
        found[places_of(key, names, features, sources)] = factor
    return found


def places_of(
    key: object, names: Sequence[str], features: int, sources: Mapping[str, str], what: str = "penalty_factor"
) -> list[int]:
    """The features that a place, a name or a column stands for: "age" for the terms of its spline, too."""
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        if not -features <= key < features:
            raise ValueError(f"{what}: {key!r} is none of the numbers of features, 0 to {features - 1}")
        return [int(key) % features]
    found = [j for j, name in enumerate(names) if key in (name, sources.get(name))]
    if not found:
        known = ", ".join(names[:20]) or "none has a name"
        raise ValueError(f"{what}: there is no feature {key!r}{suggest(key, names)} (features: {known})")
    return found


def factored(h: Regularizer, factors: Floats, dimension: int) -> Regularizer:
    """The term h with a factor for each coordinate; those with the factor 0, and all after the factors, are left alone.

    Its strength stays that of h: L1 gets weights, any other separable term becomes :class:`Blocks` whose unit is the
    largest factor.
    """
    if isinstance(h, Ramped):
        return Ramped(factored(h.h, factors, dimension), h.strength)
    if isinstance(h, Zero) or (factors == 1).all():
        return h
    if isinstance(h, On | Named | Blocks):
        raise ValueError(f"penalty_factor: {h} says itself where it acts; multiply its terms, or give one for all")
    levels, whole = np.unique(factors[factors > 0]), np.zeros(dimension)
    whole[: len(factors)] = factors
    if not len(levels):
        return Zero()
    if isinstance(h, L1):
        own = np.ones(len(factors)) if h.weights is None else np.array(h.weights, float)
        if len(own) != len(factors):
            raise ValueError(f"penalty_factor: {len(factors)} coordinates, and {h} has {len(own)} weights")
        kept: list[bool] = (whole > 0).tolist()
        return L1(h.lam, tuple((own * factors)[factors > 0].tolist())).on(kept)
    if len(levels) > 1 and len(torch.unique(h.coupling(len(factors)))) < len(factors):
        raise ValueError(f"penalty_factor is for terms on each coordinate by itself; {h} couples them")
    parts = tuple(varied(h, float(f)).on((whole == f).tolist()) for f in levels)
    return Blocks(parts, float(levels[-1]))


Deviations = Literal["l1", "group", "fused"]


def sharing(h: Regularizer, core: int, block: int, dimension: int, kind: Deviations, ratio: float) -> Blocks:
    """The term h on the ``core`` coordinates of a model that sites share, and one on what each site's own differ by.

    These are the coordinates from ``core`` to ``dimension``, in blocks of ``block``: what the sites have beside one
    coordinate of the core. With the strength lam of h,

        l1      ratio lam sum_j sum_i |d_ij|                            single coefficients of single sites
        group   ratio lam sqrt(block) sum_j ||d_j||                     sites differ in few features
        fused   ratio lam / 2 sum_j [sum_i |d_ij| + sum_{i<k} |d_ij - d_kj| / block]    sites fall into few classes

    so that one site that differs in one feature costs about as much in each. Along a path they vary together.
    """
    if isinstance(h, Ramped):
        raise ValueError("deviations: a strength that changes with the rounds is for the whole of h; leave ramped out")
    if not strength(h) > 0:
        raise ValueError(f"deviations: {h} has no strength that theirs could be a share of; take for example L1(1.0)")
    own, lam = h if isinstance(h, On | Blocks) else h.on(range(core)), ratio * strength(h)
    terms: dict[str, Regularizer] = {
        "l1": L1(lam), "group": GroupLasso(lam, block), "fused": ClusteredLasso(lam / (2 * block), block, l1=lam / 2),
    }  # fmt: skip
    parts = Blocks.of(own, terms[kind].on(range(core, dimension)))
    return dataclasses.replace(parts, unit=strength(parts) / strength(h))
