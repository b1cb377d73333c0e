"""What can go wrong on the way from a model to a file, and how far apart two of its predictions may be."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedcomposite._faults import FailedError

_UNITS = 1e3  # units in the last place of the largest output that sums in another order may differ by
_UNITS_ONNX = 1e4  # another runtime also merges layers
_EIGHT_BITS = 0.25  # of the largest output; of a ResNet-18 and a transformer they explain 0.02 to 0.08


class ExportError(FailedError):
    """A file that could not be written, or does not give the model's predictions back; a module that is not pruned."""


@contextmanager
def full_precision() -> Iterator[None]:
    """Convolutions and products that round as float32 does: a GPU's convolutions are in TF32, ten bits, by default."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    _set_precision(False, "highest")
    try:
        yield
    finally:
        _set_precision(*before)


def _set_precision(tf32: bool, products: str) -> None:
    """By torch's older settings: beside the newer ones, ``fp32_precision``, it does not export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are newer ones
        torch.backends.cudnn.allow_tf32 = tf32
        if torch.get_float32_matmul_precision() != products:
            torch.set_float32_matmul_precision(products)


def rounding(outputs: Tensor, format: str = "state_dict") -> float:
    """The largest difference between predictions that rounding explains: 1000 eps max|outputs|, for ONNX 10000 eps.

    ``"int8"`` is for ONNX in eight bits: a quarter of max|outputs|.

    ``eps`` is that of the outputs' dtype, and the factor at most 1 %. The same model gives slightly different sums when
    its convolutions run in another memory layout or its layers are merged; another model differs by far more.
    """
    if format == "int8":
        return _EIGHT_BITS * float(outputs.abs().max())
    units = _UNITS_ONNX if format == "onnx" else _UNITS
    return min(units * torch.finfo(outputs.dtype).eps, 0.01) * float(outputs.abs().max())
