"""ONNX graphs in eight bits: weights as int8, a scale per output channel.

What flows between layers is rounded to eight bits as well. Convolutions want its range ahead (their kernels are fast
only then), which samples tell: the least and the largest number of each activation. Linear layers take the range of
each batch as it comes, which needs no samples and is closer.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

CALIBRATED = 256
"""Samples that ranges are read off, at most."""

_BATCH = 32


def needs_samples(module: nn.Module) -> bool:
    """Whether a module's graph in eight bits needs samples of its data."""
    return any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())


def quantize(path: Path, module: nn.Module, inputs: Tensor) -> None:
    """Replace the graph in a file by one in eight bits; the inputs are those that ranges are read off."""
    onnx, tools = importlib.import_module("onnx"), importlib.import_module("onnxruntime.quantization")
    root, level = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.ERROR)  # it recommends what is done here
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made.onnx"
            if needs_samples(module):
                merged = Path(folder) / "merged.onnx"  # batch norms into their convolutions
                tools.quant_pre_process(path, merged, skip_symbolic_shape=True)
                name = onnx.load(path).graph.input[0].name
                tools.quantize_static(
                    merged, made, _Reader(name, inputs), per_channel=True, activation_type=tools.QuantType.QUInt8
                )
            else:
                graph = onnx.load(path)
                del graph.graph.value_info[:]  # shapes of weights that are transposed on the way
                tools.quantize_dynamic(graph, made, op_types_to_quantize=["MatMul", "Gemm"], per_channel=True)
            path.write_bytes(made.read_bytes())
    finally:
        root.setLevel(level)


class _Reader:
    """Inputs in batches, as onnxruntime asks for them."""

    def __init__(self, name: str, inputs: Tensor) -> None:
        self._batches: Iterator[Tensor] = iter(torch.split(inputs, _BATCH))
        self._name = name

    def get_next(self) -> dict[str, object] | None:
        """The next batch by the graph's name for it, or None."""
        batch = next(self._batches, None)
        return None if batch is None else {self._name: batch.numpy()}
