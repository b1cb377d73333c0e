"""A module as an ONNX graph that takes batches of any size, and its outputs by onnxruntime."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from fedcomposite.exporting.errors import ExportError
from fedcomposite.exporting.quantizing import quantize

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def write_onnx(module: nn.Module, inputs: Tensor, path: Path, calibration: Tensor | None = None) -> Tensor:
    """Write a file, and give back what it makes of the inputs, half of which it sees as a batch of their own.

    A module whose code fixes the size of a batch (``len(x)`` does) is refused. With inputs for ``calibration`` the
    graph is one in eight bits (:mod:`fedcomposite.exporting.quantizing`).
    """
    missing = [m for m in PACKAGES if importlib.util.find_spec(m) is None]
    if missing:
        raise ExportError(
            f"format = 'onnx' needs the packages {', '.join(missing)}; "
            "install 'fedcomposite[onnx]' or take 'safetensors'"
        )
    batch = torch.export.Dim("batch")
    example = inputs if len(inputs) > 1 else torch.cat([inputs, inputs])  # a batch of one would be taken as fixed
    try:
        with _quiet():
            torch.onnx.export(
                module, (example,), path, dynamo=True, external_data=False, verbose=False, dynamic_shapes=({0: batch},)
            )
    except torch.onnx.OnnxExporterError as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ExportError(f"the module cannot be written as an ONNX graph: {reason}") from error
    if calibration is not None:
        quantize(path, module, calibration)
    session = importlib.import_module("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    source = session.get_inputs()[0]
    if isinstance(source.shape[0], int):
        raise ExportError(
            f"the ONNX graph would take batches of {source.shape[0]} only, because the module's code fixes their size; "
            "write x.shape[0] or -1 there, not len(x)"
        )
    parts = [p for p in inputs.tensor_split(2) if len(p)]
    return torch.cat([torch.from_numpy(session.run(None, {source.name: p.numpy()})[0]) for p in parts])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says about itself: packages that are not there, its own old names."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
