"""Data: silos, data sets, partitions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fedcomposite._validation import suggest
from fedcomposite.data import embedded
from fedcomposite.data.partition import PARTITIONERS, partition
from fedcomposite.data.silos import DataError, Silos
from fedcomposite.data.synthetic import synthetic

__all__ = ["DATASETS", "PARTITIONERS", "DataError", "Silos", "load", "partition", "synthetic"]

DATASETS: dict[str, Callable[..., Silos]] = {
    "synthetic": synthetic,
    "breast_cancer": embedded.breast_cancer,
    "diabetes": embedded.diabetes,
    "digits": embedded.digits,
    "wine": embedded.wine,
}


def load(name: str, **options: Any) -> Silos:
    """Load a data set by name, with the options of its function: ``load("synthetic", clients=30, alpha=1.0)``.

    A data set that is not split between clients comes as one silo; deal it out with ``.partition(...)``.
    """
    if name not in DATASETS:
        raise DataError(f"unknown data set {name!r}{suggest(name, DATASETS)} (known: {', '.join(sorted(DATASETS))})")
    known = list(inspect.signature(DATASETS[name]).parameters)
    for given in options:
        if given not in known:
            raise DataError(
                f"data set {name!r} has no option {given!r}{suggest(given, known)} (its options: {', '.join(known)})"
            )
    return DATASETS[name](**options)
