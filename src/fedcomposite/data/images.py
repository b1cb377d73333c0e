"""Image data sets: bytes as published, ``(samples, channels, height, width)``, pooled, with the test split.

They stay ``uint8`` until they reach the device, where (pixel / 255 - mean) / std, with the constants of
:func:`normalization`, makes them small numbers. ``flatten=True`` gives ``float32`` vectors in [0, 1] instead, for
linear models.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedcomposite._validation import suggest
from fedcomposite.data.catalog import FILES
from fedcomposite.data.fetch import fetch
from fedcomposite.data.silos import DataError, Silos

Pixels = npt.NDArray[np.uint8]

NORMALIZATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def normalization(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over the training images, for pixels in [0, 1]."""
    if name not in NORMALIZATION:
        raise DataError(
            f"no normalization constants for {name!r}{suggest(name, NORMALIZATION)} (known: {', '.join(NORMALIZATION)})"
        )
    return NORMALIZATION[name]


def _silos(train: tuple[Pixels, Pixels], test: tuple[Pixels, Pixels], flatten: bool) -> Silos:
    def shaped(images: Pixels, labels: Pixels) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]:
        if flatten:
            return images.reshape(len(images), -1) / np.float32(255), labels.astype(np.int64)
        return images, labels.astype(np.int64)

    return Silos.from_arrays([shaped(*train)], names=["pooled"], test=shaped(*test))


def _idx(name: str, flatten: bool) -> Silos:
    """Four IDX files: a header of 16 bytes before the images, of 8 before the labels."""
    arrays = [np.frombuffer(content, np.uint8) for content in fetch(name, FILES[name])]
    train_images, train_labels, test_images, test_labels = arrays
    return _silos(
        (train_images[16:].reshape(-1, 1, 28, 28), train_labels[8:]),
        (test_images[16:].reshape(-1, 1, 28, 28), test_labels[8:]),
        flatten,
    )


def mnist(*, flatten: bool = False) -> Silos:
    """Handwritten digits (LeCun, Cortes & Burges): 60000 + 10000 images of 28 x 28, 10 classes."""
    return _idx("mnist", flatten)


def fashion_mnist(*, flatten: bool = False) -> Silos:
    """Clothing (Xiao, Rasul & Vollgraf 2017): 60000 + 10000 images of 28 x 28, 10 classes."""
    return _idx("fashion_mnist", flatten)


def cifar10(*, flatten: bool = False) -> Silos:
    """Colour photographs (Krizhevsky 2009): 50000 + 10000 images of 3 x 32 x 32, 10 classes."""
    # A record is one byte of label, then 1024 bytes each of red, green and blue.
    records = [np.frombuffer(content, np.uint8).reshape(-1, 3073) for content in fetch("cifar10", FILES["cifar10"])]
    train, test = np.concatenate(records[:-1]), records[-1]
    return _silos(
        (train[:, 1:].reshape(-1, 3, 32, 32), train[:, 0]), (test[:, 1:].reshape(-1, 3, 32, 32), test[:, 0]), flatten
    )
