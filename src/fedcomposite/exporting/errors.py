"""What can go wrong on the way from a model to a file, and how far apart two of its predictions may be."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcomposite._faults import FailedError

_UNITS = 1e3  # units in the last place of the largest output that sums in another order may differ by
_UNITS_ONNX = 1e4  # another runtime also merges layers


class ExportError(FailedError):
    """A file that could not be written, or that does not give the model's predictions back."""


class PruneError(ExportError):
    """A module that cannot be pruned, and why."""


def rounding(outputs: Tensor, format: str = "state_dict") -> float:
    """The largest difference between predictions that rounding explains: 1000 eps max|outputs|, for ONNX 10000 eps.

    ``eps`` is that of the outputs' dtype, and the factor at most 1 %. The same model gives slightly different sums when
    its convolutions run in another memory layout or its layers are merged; another model differs by far more.
    """
    units = _UNITS_ONNX if format == "onnx" else _UNITS
    return min(units * torch.finfo(outputs.dtype).eps, 0.01) * float(outputs.abs().max())
