"""Small real data sets that come with scikit-learn: no download, pooled, to be partitioned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn import datasets

from fedcomposite.data.silos import Seed, Share, Silos
from fedcomposite.data.tables import finish


def _load(reader: Callable[..., Any], standardize: bool, test: float, seed: int, binary: bool = False) -> Silos:
    """Read, hold out a share, standardize the features over the pooled training samples."""
    bunch = reader()
    X, y = np.asarray(bunch.data, float), np.asarray(bunch.target, float)
    if binary:
        y = 2 * y - 1
    silos = Silos.from_arrays([(X, y)], names=["pooled"], feature_names=[str(c) for c in bunch.feature_names])
    return finish(silos, standardize, test, seed)


def breast_cancer(*, standardize: bool = True, test: Share = 0.0, seed: Seed = 0) -> Silos:
    """Wisconsin diagnostic breast cancer: 569 samples, 30 features, benign (+1) or malignant (-1)."""
    return _load(datasets.load_breast_cancer, standardize, test, seed, binary=True)


def diabetes(*, standardize: bool = True, test: Share = 0.0, seed: Seed = 0) -> Silos:
    """Diabetes progression after a year: 442 patients, 10 features, regression."""
    return _load(datasets.load_diabetes, standardize, test, seed)


def digits(*, standardize: bool = True, test: Share = 0.0, seed: Seed = 0) -> Silos:
    """Handwritten digits: 1797 images of 8 x 8, 10 classes."""
    return _load(datasets.load_digits, standardize, test, seed)


def wine(*, standardize: bool = True, test: Share = 0.0, seed: Seed = 0) -> Silos:
    """Wine recognition: 178 samples, 13 features, 3 cultivars."""
    return _load(datasets.load_wine, standardize, test, seed)
