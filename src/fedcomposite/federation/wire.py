"""Tuples of tensors as Flower records, and back, with nothing taken on trust."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

Vectors = dict[str, Tensor]

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_HEADER = 4096  # more than NumPy's header of an array


class WireError(ValueError):
    """A message that cannot be used, and why, in one line."""


class Form(NamedTuple):
    """What a vector must look like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: bool = True
    """If not, any vector that is at most as long will do: some methods send another part in every exchange."""


def form(vectors: Mapping[str, Tensor]) -> dict[str, Form]:
    """The forms of some vectors."""
    return {k: Form(tuple(v.shape), v.dtype) for k, v in vectors.items()}


def named(prefix: str, data: NamedTuple) -> Vectors:
    """The tensors of a tuple as ``prefix.field``."""
    return {f"{prefix}.{k}": v for k, v in data._asdict().items()}


def tuple_of(kind: type[Any], prefix: str, vectors: Mapping[str, Tensor]) -> Any:
    """The tuple whose tensors are ``prefix.field``."""
    return kind(**{field: vectors[f"{prefix}.{field}"] for field in kind._fields})


def pack(vectors: Mapping[str, Tensor]) -> ArrayRecord:
    """Vectors as a record; no pickle is involved."""
    return ArrayRecord({k: Array(v.detach().cpu().contiguous().numpy()) for k, v in vectors.items()})


def unpack(record: Any, expected: Mapping[str, Form]) -> Vectors:
    """Vectors out of a record: exactly the expected names, shapes and dtypes, and finite numbers.

    Sizes are checked on what was declared and on the bytes present before anything is decoded.
    """
    if not isinstance(record, ArrayRecord):
        raise WireError("no vectors in the message")
    names, wanted = set(record), set(expected)
    if missing := sorted(wanted - names):
        raise WireError(f"vector {missing[0]!r} is missing")
    if extra := sorted(names - wanted):
        raise WireError(f"vector {extra[0]!r} was not asked for")
    return {name: _decode(name, record[name], form) for name, form in expected.items()}


def _decode(name: str, array: Array, form: Form) -> Tensor:
    shape, dtype = tuple(array.shape), DTYPES.get(array.dtype)
    if shape != form.shape and (form.exact or len(shape) != 1 or shape > form.shape):
        raise WireError(f"vector {name!r} has shape {shape}, expected {'' if form.exact else 'at most '}{form.shape}")
    if dtype != form.dtype:
        raise WireError(f"vector {name!r} has dtype {array.dtype}, expected {str(form.dtype).removeprefix('torch.')}")
    most = int(np.prod(form.shape)) * form.dtype.itemsize + _HEADER
    if len(array.data) > most:
        raise WireError(f"vector {name!r} weighs {len(array.data)} bytes, at most {most} were expected")
    try:
        decoded = array.numpy()
    except (ValueError, TypeError, OSError, EOFError) as error:
        raise WireError(f"vector {name!r} cannot be decoded ({type(error).__name__})") from None
    if decoded.shape != shape or DTYPES.get(str(decoded.dtype)) != form.dtype:
        raise WireError(f"vector {name!r} is not what its label says: {decoded.dtype} {decoded.shape}")
    tensor = torch.from_numpy(decoded if decoded.flags.writeable else decoded.copy())
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise WireError(f"vector {name!r} has NaN or infinite entries")
    return tensor


def nbytes(record: RecordDict) -> int:
    """Bytes of the vectors in a message."""
    return sum(len(a.data) for r in record.array_records.values() for a in r.values())


def text(record: RecordDict, key: str) -> str:
    """A string that a message must carry."""
    part = record.get(key)
    value = part.get("json") if isinstance(part, ConfigRecord) and list(part) == ["json"] else None
    if not isinstance(value, str):
        raise WireError(f"no {key!r} in the message")
    return value


def numbers(record: RecordDict, key: str) -> dict[str, float]:
    """Scalars that a message must carry."""
    part = record.get(key)
    if not isinstance(part, MetricRecord) or any(isinstance(v, list) for v in part.values()):
        raise WireError(f"no {key!r} in the message")
    return {k: v for k, v in part.items() if not isinstance(v, list)}


def content(**parts: str | Mapping[str, float] | Vectors) -> RecordDict:
    """A message's content: strings, scalars and vectors by name."""
    made: dict[str, Any] = {}
    for key, value in parts.items():
        if isinstance(value, str):
            made[key] = ConfigRecord({"json": value})
        elif all(isinstance(v, Tensor) for v in value.values()):
            made[key] = pack(value)  # type: ignore[arg-type]
        else:
            made[key] = MetricRecord(dict(value))  # type: ignore[arg-type]
    return RecordDict(made)
