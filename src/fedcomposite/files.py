"""Tensors in files that a crash cannot spoil (``durable``), and whose bytes depend on their content alone."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedcomposite.durable import one_at_a_time as one_at_a_time
from fedcomposite.durable import remove_scratch as remove_scratch
from fedcomposite.durable import replacing as replacing
from fedcomposite.durable import scratch_name as scratch_name
from fedcomposite.durable import write_atomic as write_atomic

DTYPES = {
    "I64": torch.int64, "F64": torch.float64, "F32": torch.float32, "I32": torch.int32, "BF16": torch.bfloat16,
    "F16": torch.float16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""What safetensors calls them; in a file the types with large items come first."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def _raw(flat: Tensor) -> Any:
    """The bytes of a vector, as a buffer; one without entries may have any stride, and then has no view as bytes."""
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file: the same content gives the same bytes (the library orders metadata at random).

    The numbers are copied once, where the library does it three times.
    """
    whole = {k: v.detach().cpu().contiguous().reshape(-1) for k, v in tensors.items()}
    rank = list(_CODES).index
    names = sorted(whole, key=lambda k: (rank(whole[k].dtype), k))
    start = header({name: (tensors[name].dtype, tensors[name].shape) for name in names}, metadata)
    return b"".join([start, *(_raw(whole[name]) for name in names)])


def header(forms: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The beginning of a safetensors file, whose tensors follow in this order."""
    said: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, (dtype, shape) in forms.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        said[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: IO[bytes], most: int) -> tuple[bytes, dict[str, Any]]:
    """The beginning of a safetensors file, and what it says in at most so many bytes; ValueError if it is none."""
    start = file.read(8)
    size = int.from_bytes(start, "little")
    text = file.read(size) if size <= most else b""
    said = json.loads(text) if len(start) == 8 and len(text) == size else None
    if not isinstance(said, dict):
        raise ValueError("not the beginning of a safetensors file")
    return start + text, said


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file; OSError if it is not there, or damaged."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return {k: file.get_tensor(k) for k in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(str(error)) from None


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """A digest of named tensors and texts, in whatever order they come."""
    found = hashlib.sha256()
    for key, value in sorted(metadata.items()):
        found.update(repr((key, value)).encode())
    for key, tensor in sorted(tensors.items()):
        found.update(repr((key, str(tensor.dtype), tuple(tensor.shape))).encode())
        content = _raw(tensor.detach().cpu().contiguous().view(-1))
        found.update(content)
    return found.hexdigest()
