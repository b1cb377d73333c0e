"""Small real data sets that come with scikit-learn: no download, pooled, to be partitioned."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedcomposite.data.silos import Seed, Share, Silos
from fedcomposite.data.tables import finish


def _load(name: str, standardize: bool, test: float, validation: float, seed: int, binary: bool = False) -> Silos:
    """Read, hold out a share, standardize the features over the pooled training samples."""
    from sklearn import datasets  # slow to load, and many runs do without it

    bunch: Any = getattr(datasets, f"load_{name}")()
    X, y = np.asarray(bunch.data, float), np.asarray(bunch.target, float)
    if binary:
        y = 2 * y - 1
    silos = Silos.from_arrays([(X, y)], names=["pooled"], feature_names=[str(c) for c in bunch.feature_names])
    return finish(silos, standardize, test, validation, seed)


def breast_cancer(*, standardize: bool = True, test: Share = 0.0, validation: Share = 0.0, seed: Seed = 0) -> Silos:
    """Wisconsin diagnostic breast cancer: 569 samples, 30 features, benign (+1) or malignant (-1)."""
    return _load("breast_cancer", standardize, test, validation, seed, binary=True)


def diabetes(*, standardize: bool = True, test: Share = 0.0, validation: Share = 0.0, seed: Seed = 0) -> Silos:
    """Diabetes progression after a year: 442 patients, 10 features, regression."""
    return _load("diabetes", standardize, test, validation, seed)


def digits(*, standardize: bool = True, test: Share = 0.0, validation: Share = 0.0, seed: Seed = 0) -> Silos:
    """Handwritten digits: 1797 images of 8 x 8, 10 classes."""
    return _load("digits", standardize, test, validation, seed)


def wine(*, standardize: bool = True, test: Share = 0.0, validation: Share = 0.0, seed: Seed = 0) -> Silos:
    """Wine recognition: 178 samples, 13 features, 3 cultivars."""
    return _load("wine", standardize, test, validation, seed)
