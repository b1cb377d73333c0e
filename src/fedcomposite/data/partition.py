"""Ways to deal pooled samples out to clients, from alike to very different.

=============  ======================================================================  ===================
name           what each client gets                                                   options
=============  ======================================================================  ===================
iid            a random equal share
dirichlet      class shares drawn from Dirichlet(alpha), class by class (label skew)   ``alpha=0.5``
half_by_label  an equal share of a random half; of the rest, the samples of label
               number l go to client l mod clients (Zhang et al., MNIST, 10 clients)
sorted         one contiguous piece of the samples sorted by label
shards         ``shards`` random pieces of the samples sorted by label                 ``shards=2``
kmeans         the samples nearest to one of k-means' centres (feature skew)
quantity       a random set whose size follows Dirichlet(alpha) (quantity skew)        ``alpha=0.5``
=============  ======================================================================  ===================

All are deterministic in ``seed``, give every sample to exactly one client, and leave nobody with fewer than
``minimum`` samples. dirichlet and quantity draw again until that holds, which is how flwr-datasets'
DirichletPartitioner does it, so that the split has the Dirichlet law given the minimum. When 100 draws did not do
(small alpha with many clients: flwr-datasets gives up after 11), and in the other partitions at once, random samples
of the largest silo are moved to those that are too small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, check_call
from fedcomposite.data.silos import DataError, Seed, Silos
from fedcomposite.data.sparse import Features, SparseRows, tensors_only
from fedcomposite.registry import Registry, callable_only

Ints = npt.NDArray[np.int64]
Groups = list[Ints]
Rng = np.random.Generator

DRAWS = 100


def _labels(silos: Silos, name: str) -> Ints:
    """Class numbers 0, 1, ... of the samples."""
    classes = silos.classes
    if classes is None:
        raise DataError(
            f"partition {name!r} needs class labels; these targets are continuous (use iid, kmeans or quantity)"
        )
    return np.searchsorted(classes, silos.targets.numpy()).astype(np.int64)


def _shares(pools: Groups, clients: int, minimum: int, alpha: float, rng: Rng) -> Groups:
    """Deal each pool out in proportions from Dirichlet(alpha), drawn anew while a client gets too little."""
    sizes = np.array([len(pool) for pool in pools])
    for _ in range(DRAWS):
        shares = rng.dirichlet(np.full(clients, alpha), len(pools))
        cuts = (np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
        ends = np.column_stack([np.zeros_like(sizes), cuts, sizes])
        if np.diff(ends, axis=1).sum(0).min() >= minimum:
            break
    pieces = [np.split(rng.permutation(pool), cut) for pool, cut in zip(pools, cuts, strict=True)]
    return [np.concatenate(mine) for mine in zip(*pieces, strict=True)]


def iid(silos: Silos, clients: int, minimum: int, rng: Rng) -> Groups:
    """Random equal shares."""
    return list(np.array_split(rng.permutation(len(silos.targets)), clients))


def dirichlet(silos: Silos, clients: int, minimum: int, rng: Rng, *, alpha: Positive = 0.5) -> Groups:
    """Each class is dealt out in proportions drawn from Dirichlet(alpha): small alpha, strong label skew."""
    labels = _labels(silos, "dirichlet")
    pools = [np.flatnonzero(labels == label) for label in range(labels.max() + 1)]
    return _shares(pools, clients, minimum, alpha, rng)


def half_by_label(silos: Silos, clients: int, minimum: int, rng: Rng) -> Groups:
    """Half of the samples at random in equal shares, the other half by label."""
    labels = _labels(silos, "half_by_label")
    rows = rng.permutation(len(labels))
    half = len(rows) // 2
    rest = rows[half:]
    alike = np.array_split(rows[:half], clients)
    return [np.concatenate([share, rest[labels[rest] % clients == i]]) for i, share in enumerate(alike)]


def by_order(silos: Silos, clients: int, minimum: int, rng: Rng) -> Groups:
    """Sort by label and cut into equal pieces, the first labels to the first client."""
    return list(np.array_split(np.argsort(_labels(silos, "sorted"), kind="stable"), clients))


def shards(silos: Silos, clients: int, minimum: int, rng: Rng, *, shards: Count = 2) -> Groups:
    """Sort by label, cut into clients * shards pieces, deal ``shards`` random pieces to each client."""
    pieces = np.array_split(np.argsort(_labels(silos, "shards"), kind="stable"), clients * shards)
    dealt = rng.permutation(len(pieces)).reshape(clients, shards)
    return [np.concatenate([pieces[j] for j in mine]) for mine in dealt]


def kmeans(silos: Silos, clients: int, minimum: int, rng: Rng) -> Groups:
    """One cluster of the features per client (k-means, 10 restarts)."""
    from sklearn.cluster import KMeans

    seed = int(rng.integers(2**31))
    found = KMeans(clients, n_init=10, random_state=seed).fit_predict(_rows(silos.features, "kmeans"))
    return [np.flatnonzero(found == i) for i in range(clients)]


def _rows(features: Features, name: str) -> Any:
    """Samples as the rows of a matrix, dense or sparse."""
    if not isinstance(features, SparseRows):
        return tensors_only(features, f"partition {name!r}").flatten(1).double().numpy()
    if features.mean is not None:
        raise DataError(f"partition {name!r}: deal sparse samples out before they are standardised")
    return features.csr()


def quantity(silos: Silos, clients: int, minimum: int, rng: Rng, *, alpha: Positive = 0.5) -> Groups:
    """Random samples, but silo sizes drawn from Dirichlet(alpha)."""
    return _shares([np.arange(len(silos.targets))], clients, minimum, alpha, rng)


PARTITIONERS: Registry[Callable[..., Groups]] = Registry(
    "partition",
    {
        "iid": iid,
        "dirichlet": dirichlet,
        "half_by_label": half_by_label,
        "sorted": by_order,
        "shards": shards,
        "kmeans": kmeans,
        "quantity": quantity,
    },
    group="fedcomposite.partitions",
    accept=callable_only,
)
"""Functions of (silos, clients, minimum, rng) that return the samples of each client; further options are keyword-only
parameters with annotations."""


def _whole(groups: Any, clients: int, samples: int, what: str) -> Groups:
    """What a rule gives, which has to be every sample once."""
    if not (isinstance(groups, Sequence) and len(groups) == clients):
        given = len(groups) if isinstance(groups, Sequence) else type(groups).__name__
        raise DataError(f"{what} gives {given}, must be a list of {clients} clients' samples, by their numbers")
    made = [np.asarray(group, np.int64) for group in groups]
    dealt = np.concatenate([group.ravel() for group in made])
    if not np.array_equal(np.sort(dealt), np.arange(samples)):
        raise DataError(f"{what} has to give each of the {samples} samples, 0 to {samples - 1}, to one client")
    return made


def _fill(groups: Groups, minimum: int, rng: Rng) -> Groups:
    """Move random samples from the largest groups until every group has ``minimum``."""
    for i in range(len(groups)):
        while len(groups[i]) < minimum:
            donor = max(range(len(groups)), key=lambda j: len(groups[j]))
            take = min(minimum - len(groups[i]), len(groups[donor]) - minimum)
            moved, groups[donor] = np.split(rng.permutation(groups[donor]), [take])
            groups[i] = np.concatenate([groups[i], moved])
    return groups


def partition(
    silos: Silos,
    name: str | Callable[..., Groups],
    *,
    clients: Count,
    seed: Seed = 0,
    minimum: Count = 1,
    **options: Any,
) -> Silos:
    """Pool the samples of ``silos`` and deal them out to ``clients`` anew, by a rule's name or one of your own.

    Held-out data stay held out, and each of their samples is counted as that client's whose samples are like it: the
    client of a training sample of the same label, drawn at random; after ``kmeans`` the one with the nearest mean.
    """
    if not isinstance(silos, Silos):
        raise DataError(f"silos = {silos!r:.60}, must be Silos; make them with Silos.from_arrays([(X, y), ...])")
    rule = name if callable(name) else PARTITIONERS.lookup(name, DataError)
    what = f"partition {getattr(name, '__name__', name)!r}"
    check_call(what, partition, {"clients": clients, "seed": seed, "minimum": minimum}, DataError)
    options = check_call(what, rule, options, DataError)
    if clients * minimum > len(silos.targets):
        raise DataError(
            f"{what}: cannot give {clients} clients at least {minimum} of {len(silos.targets)} samples each"
        )
    rng = np.random.default_rng(seed)
    groups = _fill(
        _whole(rule(silos, clients, minimum, rng, **options), clients, len(silos.targets), what), minimum, rng
    )
    theirs = np.random.default_rng([seed, 1])  # of their own, so that training samples are dealt with or without them
    owners = {part: torch.from_numpy(_owners(silos, pair, groups, rule is kmeans, theirs))
              for part, pair in silos.held_out.items()}  # fmt: skip
    return replace(silos.subset(groups), held_by=owners)


def _owners(silos: Silos, held: tuple[Features, Tensor], groups: Groups, nearest: bool, rng: Rng) -> Ints:
    """The client of each held-out sample."""
    features, targets = held
    if nearest:
        from sklearn.metrics import pairwise_distances_argmin

        means = np.stack([np.asarray(_rows(silos.features, "kmeans")[g].mean(0)).ravel() for g in groups])
        return np.asarray(pairwise_distances_argmin(_rows(features, "kmeans"), means), np.int64)
    client = np.empty(len(silos.targets), np.int64)
    for i, group in enumerate(groups):
        client[group] = i
    found = rng.choice(client, len(targets))
    if (classes := silos.classes) is not None:
        for label in classes:
            wanted = np.flatnonzero(targets.numpy() == label)
            found[wanted] = rng.choice(client[silos.targets.numpy() == label], len(wanted))
    return found
