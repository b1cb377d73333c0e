"""Trained models as files, and as networks that their zeros make smaller or faster."""

from fedcomposite.exporting.errors import ExportError, PruneError, rounding
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
    "PruneError",
    "Pruned",
    "export",
    "fit",
    "original_scale",
    "prune",
    "read_csr",
    "rounding",
    "sparse_layers",
]
