"""Ways to deal pooled samples out to clients, from alike to very different.

===========  ========================================================================  ==========================
name         what each client gets                                                     options
===========  ========================================================================  ==========================
iid          a random equal share
dirichlet    class shares drawn from Dirichlet(alpha), class by class (label skew)     ``alpha=0.5``
shards       ``shards`` contiguous pieces of the samples sorted by label               ``shards=2``
kmeans       the samples nearest to one of k-means' centres (feature skew)
quantity     a random set whose size follows Dirichlet(alpha) (quantity skew)          ``alpha=0.5``
===========  ========================================================================  ==========================

All are deterministic in ``seed``, give every sample to exactly one client, and leave nobody with fewer than
``minimum`` samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcomposite._validation import suggest
from fedcomposite.data.silos import DataError, Silos

Groups = list[npt.NDArray[np.int64]]
Rng = np.random.Generator


def _labels(silos: Silos, name: str) -> npt.NDArray[Any]:
    if silos.classes is None:
        raise DataError(
            f"partition {name!r} needs class labels; these targets are continuous (use iid, kmeans or quantity)"
        )
    labels: npt.NDArray[Any] = silos.targets.numpy()
    return labels


def _positive(name: str, field: str, value: float) -> None:
    if not value > 0:
        raise DataError(f"partition {name!r}: {field} = {value}, must be > 0")


def iid(silos: Silos, clients: int, rng: Rng) -> Groups:
    """Random equal shares."""
    return list(np.array_split(rng.permutation(len(silos.targets)), clients))


def dirichlet(silos: Silos, clients: int, rng: Rng, *, alpha: float = 0.5) -> Groups:
    """Each class is dealt out in proportions drawn from Dirichlet(alpha): small alpha, strong label skew."""
    _positive("dirichlet", "alpha", alpha)
    labels = _labels(silos, "dirichlet")
    groups: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(rows)
        for group, part in zip(groups, np.split(rows, cuts.astype(int)), strict=True):
            group.append(part)
    return [np.concatenate(g) for g in groups]


def shards(silos: Silos, clients: int, rng: Rng, *, shards: int = 2) -> Groups:
    """Sort by label, cut into clients * shards pieces, deal ``shards`` random pieces to each client.

    One shard per client is the fully sorted, contiguous split, and then the pieces are dealt in order.
    """
    _positive("shards", "shards", shards)
    order = np.argsort(_labels(silos, "shards"), kind="stable")
    pieces = np.array_split(order, clients * shards)
    dealt = np.arange(clients) if shards == 1 else rng.permutation(clients * shards)
    return [np.concatenate([pieces[j] for j in mine]) for mine in np.split(dealt, clients)]


def kmeans(silos: Silos, clients: int, rng: Rng) -> Groups:
    """One cluster of the features per client (k-means, 10 restarts)."""
    from sklearn.cluster import KMeans

    X = silos.features.reshape(len(silos.features), -1).double().numpy()
    seed = int(rng.integers(2**31))
    found = KMeans(clients, n_init=10, random_state=seed).fit_predict(X)
    return [np.flatnonzero(found == i) for i in range(clients)]


def quantity(silos: Silos, clients: int, rng: Rng, *, alpha: float = 0.5) -> Groups:
    """Random samples, but silo sizes drawn from Dirichlet(alpha)."""
    _positive("quantity", "alpha", alpha)
    rows = rng.permutation(len(silos.targets))
    cuts = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(rows)
    return list(np.split(rows, cuts.astype(int)))


PARTITIONERS: dict[str, Callable[..., Groups]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "kmeans": kmeans,
    "quantity": quantity,
}


def _fill(groups: Groups, minimum: int) -> Groups:
    """Move samples from the largest groups until every group has ``minimum``."""
    groups = [g.astype(np.int64) for g in groups]
    for i in range(len(groups)):
        while len(groups[i]) < minimum:
            donor = max(range(len(groups)), key=lambda j: len(groups[j]))
            take = min(minimum - len(groups[i]), len(groups[donor]) - minimum)
            groups[i] = np.concatenate([groups[i], groups[donor][-take:]])
            groups[donor] = groups[donor][:-take]
    return groups


def partition(silos: Silos, name: str, *, clients: int, seed: int = 0, minimum: int = 1, **options: Any) -> Silos:
    """Pool the samples of ``silos`` and deal them out to ``clients`` anew."""
    if name not in PARTITIONERS:
        raise DataError(f"unknown partition {name!r}{suggest(name, PARTITIONERS)} (known: {', '.join(PARTITIONERS)})")
    if not 1 <= clients * max(1, minimum) <= len(silos.targets):
        raise DataError(
            f"partition {name!r}: cannot give {clients} clients at least {max(1, minimum)} "
            f"of {len(silos.targets)} samples each"
        )
    rule = PARTITIONERS[name]
    known = [p.name for p in inspect.signature(rule).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for given in options:
        if given not in known:
            raise DataError(
                f"partition {name!r} has no option {given!r}{suggest(given, known)} "
                f"(its options: {', '.join(known) or 'none'})"
            )
    groups = rule(silos, clients, np.random.default_rng(seed), **options)
    return silos.subset(_fill(groups, max(1, minimum)))
