"""Data: silos, data sets, partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from fedcomposite._validation import check_call, suggest
from fedcomposite.data import images, tabular
from fedcomposite.data.catalog import FILES
from fedcomposite.data.databases import read_sql
from fedcomposite.data.describing import describe
from fedcomposite.data.fetch import Progress, fetch
from fedcomposite.data.fitted import FittedRecipe
from fedcomposite.data.images import normalization
from fedcomposite.data.messy import messy_consortium
from fedcomposite.data.partition import PARTITIONERS, partition
from fedcomposite.data.pictures import class_names
from fedcomposite.data.recipe import Recipe
from fedcomposite.data.silos import DataError, Silos
from fedcomposite.data.stories import stories
from fedcomposite.data.survivors import survival, survivor_files, survivor_tables
from fedcomposite.data.synthetic import synthetic
from fedcomposite.registry import Registry, callable_only

__all__ = [
    "DATASETS",
    "PARTITIONERS",
    "DataError",
    "FittedRecipe",
    "Recipe",
    "Silos",
    "class_names",
    "describe",
    "download",
    "frames",
    "load",
    "messy_consortium",
    "normalization",
    "partition",
    "read_sql",
    "survivor_files",
    "synthetic",
]


def _mapped(*, folder: str, in_memory: bool = False, verify: bool = False) -> Silos:
    """Silos that ``silos.save(folder)`` wrote; features stay in their files unless ``in_memory``."""
    silos = Silos.open(folder, verify=verify)
    return silos.dense() if in_memory else silos


def _image_folders(
    *,
    folders: tuple[str, ...],
    test: str | None = None,
    size: tuple[int, ...] | None = None,
    channels: int | None = None,
) -> Silos:
    """PNG and JPEG images as bytes: a folder per client, with a folder per class in it."""
    options: dict[str, Any] = {"test": test, "size": size, "channels": channels}
    return Silos.from_folders(folders, **options)


DATASETS: Registry[Callable[..., Silos]] = Registry(
    "data set",
    {
        "synthetic": synthetic,
        "survival": survival,
        "stories": stories,
        "breast_cancer": tabular.breast_cancer,
        "diabetes": tabular.diabetes,
        "digits": tabular.digits,
        "wine": tabular.wine,
        "wisconsin": tabular.wisconsin,
        "heart_disease": tabular.heart_disease,
        "ilea_schools": tabular.ilea_schools,
        "a9a": tabular.a9a,
        "w8a": tabular.w8a,
        "mushrooms": tabular.mushrooms,
        "mnist": images.mnist,
        "fashion_mnist": images.fashion_mnist,
        "cifar10": images.cifar10,
        "mapped": _mapped,
        "image_folders": _image_folders,
    },
    group="fedcomposite.datasets",
    accept=callable_only,
)
"""Functions that return silos; their keyword-only parameters, with annotations, are the options."""


OWN = ("mapped", "image_folders")
"""Names of data sets that are folders of one's own."""

FRAMES: dict[str, Callable[[], dict[str, pd.DataFrame]]] = {
    "heart_disease": tabular.heart_frames,
    "survival": survivor_tables,
}
"""Data sets that also come as tables with gaps, for a recipe."""


def frames(name: str) -> dict[str, pd.DataFrame]:
    """The tables of a data set as they were published, one per site, gaps and all: what a recipe takes.

    Examples
    --------
    >>> {site: len(frame) for site, frame in frames("heart_disease").items()}
    {'cleveland': 303, 'hungary': 294, 'switzerland': 123, 'longbeach': 200}
    """
    known = DATASETS.canonical(name) if name in DATASETS else name
    if known not in FRAMES:
        raise DataError(f"no tables of {name!r}{suggest(name, FRAMES)} (there are: {', '.join(FRAMES)})")
    return FRAMES[known]()


def load(name: str | Callable[..., Silos], **options: Any) -> Silos:
    """Load a data set by name, with the options of its function: ``load("synthetic", clients=30, alpha=1.0)``.

    A function of your own does in place of a name: its options are its keyword-only parameters.
    A data set that is not split between clients comes as one silo; deal it out with ``.partition(...)``.
    Files that are not at hand are downloaded once, see :mod:`fedcomposite.data.fetch`.

    Examples
    --------
    >>> load("heart_disease").names
    ('cleveland', 'hungary', 'switzerland', 'longbeach')
    >>> load("digits").partition("dirichlet", clients=5, alpha=0.5)
    Silos(5 clients, ... samples each, 64 features)
    """
    function = name if callable(name) else DATASETS.lookup(name, DataError)
    made = function(**check_call(getattr(name, "__name__", str(name)), function, options, DataError))
    if not isinstance(made, Silos):
        raise DataError(f"{getattr(name, '__name__', name)} gives a {type(made).__name__}, must be Silos")
    return made


def download(name: str, *, progress: Progress | None = None) -> None:
    """Get the files of a data set ahead of time, as for a machine that will be offline.

    ``progress(url, received, total)`` is called as bytes arrive; without it a bar is drawn on a terminal.
    """
    DATASETS.lookup(name, DataError)
    known = DATASETS.canonical(name)
    fetch(known, FILES.get(known, ()), progress)
