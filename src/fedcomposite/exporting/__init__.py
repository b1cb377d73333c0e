"""Trained models as files, and as networks that their zeros make smaller or faster."""

import warnings
from typing import Any

from fedcomposite.exporting.errors import ExportError, rounding
from fedcomposite.exporting.planning import Kept, Layer
from fedcomposite.exporting.pruning import Pruned, fit, prune
from fedcomposite.exporting.sparse_layers import Converted, CSRLinear, sparse_layers
from fedcomposite.exporting.writing import Exported, Format, export, original_scale, read_csr

__all__ = [
    "CSRLinear",
    "Converted",
    "ExportError",
    "Exported",
    "Format",
    "Kept",
    "Layer",
    "Pruned",
    "export",
    "fit",
    "original_scale",
    "prune",
    "read_csr",
    "rounding",
    "sparse_layers",
]


def __getattr__(name: str) -> Any:
    if name != "PruneError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("PruneError is now ExportError", DeprecationWarning, stacklevel=2)
    return ExportError
