"""What parties send each other, as bytes, and back, with nothing taken on trust.

A message holds one text (an order, an introduction, a report's numbers, a refusal) and its vectors in one block of
safetensors, a format that can hold nothing but named arrays. As bytes the texts are JSON in front and the blocks lie
behind, copied once. Whatever carries a message between machines (``engines``) sees these bytes alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as deserialise
from torch import Tensor

from fedcomposite import files
from fedcomposite.federation.logs import clean as clean
from fedcomposite.runtime import sparse_messages
from fedcomposite.runtime.messages import all_finite

Vectors = dict[str, Tensor]
Content = dict[str, str | bytes]
"""A message: texts, and blocks of bytes, by their names."""

KINDS = ("order", "introduction", "report", "secure", "answers", "refusal", "waiting")
"""The texts that a message may carry."""
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_HEADER = 1 << 16  # more than the names of any method's vectors need
_FRONT = 64 << 20  # bytes of a message's texts, at most
_WHOLE = 2**53  # integers up to this are exact as floating-point numbers


class WireError(ValueError):
    """A message that cannot be used, and why, in one line."""


class Form(NamedTuple):
    """What a vector must look like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: bool = True
    """If not, any vector that is at most as long will do: some methods send another part in every exchange."""
    required: bool = True
    """If not, it may be left out."""


def form(vectors: Mapping[str, Tensor]) -> dict[str, Form]:
    """The forms of some vectors."""
    return {k: Form(tuple(v.shape), v.dtype) for k, v in vectors.items()}


def named(prefix: str, data: NamedTuple) -> Vectors:
    """The tensors of a tuple as ``prefix.field``."""
    return {f"{prefix}.{k}": v for k, v in data._asdict().items()}


def tuple_of(kind: type[Any], prefix: str, vectors: Mapping[str, Tensor]) -> Any:
    """The tuple whose tensors are ``prefix.field``."""
    return kind(**{field: vectors[f"{prefix}.{field}"] for field in kind._fields})


def content(
    *, vectors: Mapping[str, Tensor] | bytes | None = None, report: Mapping[str, float] | None = None, **text: str
) -> Content:
    """A message: at most one text by its name, or a report's numbers, and vectors, or the bytes of :func:`block`."""
    parts: Content = dict(text)
    if report is not None:
        parts["report"] = json.dumps(dict(report))
    if vectors is not None:
        parts["vectors"] = vectors if isinstance(vectors, bytes) else block(vectors)
    return parts


def block(vectors: Mapping[str, Tensor]) -> bytes:
    """Vectors as they travel, to be used in several messages: those with many zeros without them."""
    return files.pack(sparse_messages.encode(vectors))


def encode(message: Content) -> bytes:
    """The bytes of a message."""
    blocks = {k: v for k, v in message.items() if isinstance(v, bytes)}
    texts = {k: v for k, v in message.items() if k not in blocks}
    front = json.dumps([texts, {k: len(v) for k, v in blocks.items()}]).encode()
    return b"".join([len(front).to_bytes(8, "big"), front, *blocks.values()])


def decode(payload: bytes | memoryview) -> Content:
    """The message in some bytes."""
    size = int.from_bytes(payload[:8], "big")
    if len(payload) < 8 or size > min(_FRONT, len(payload) - 8):
        raise WireError("not a message of this package")
    at = 8 + size
    try:
        texts, lengths = json.loads(bytes(payload[8:at]))
        made: Content = {str(k): v for k, v in texts.items()}
        if not all(isinstance(v, str) for v in made.values()) or made.keys() & lengths.keys():
            raise ValueError
        for name, length in lengths.items():
            if type(length) is not int or not 0 <= length <= len(payload) - at:
                raise ValueError
            made[name] = bytes(payload[at : at + length])
            at += length
        if at != len(payload):
            raise ValueError
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise WireError("not a message of this package") from None
    return made


def kind(message: Content) -> str:
    """What a message is: one of :data:`KINDS`."""
    found = sorted(set(message) - {"vectors"})
    if len(found) != 1 or found[0] not in KINDS:
        raise WireError(f"a message with {clean(', '.join(found), 60) or 'no text'}")
    return found[0]


def text(message: Content, key: str) -> str:
    """The text that a message must carry."""
    value = message.get(key)
    if kind(message) != key or not isinstance(value, str):
        raise WireError(f"no {key} in the message")
    return value


def numbers(message: Content) -> dict[str, float]:
    """The numbers of a report."""
    said = text(message, "report")
    if len(said) > _HEADER:
        raise WireError(f"a report of {len(said)} characters")
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        raise WireError("the report cannot be read") from None
    if not isinstance(found, dict) or any(type(v) not in (int, float) for v in found.values()):
        raise WireError("the report holds more than numbers")
    if large := [k for k, v in found.items() if isinstance(v, int) and abs(v) > _WHOLE]:
        raise WireError(f"the number {clean(large[0], 60)!r} in its report is beyond 2^53")
    return found


def nbytes(message: Content) -> int:
    """Bytes of a message's vectors."""
    block = message.get("vectors", b"")
    return len(block) if isinstance(block, bytes) else 0


def weight(message: Content) -> int:
    """Bytes and characters of all that a message holds."""
    return sum(map(len, message.values()))


def digest(message: Content) -> str:
    """A digest of all that a message holds."""
    found = hashlib.sha256()
    for key, value in sorted(message.items()):
        raw = value if isinstance(value, bytes) else repr(value).encode()
        found.update(f"{key} {type(value).__name__} {len(raw)}:".encode())
        found.update(raw)
    return found.hexdigest()


def unpack(message: Content, expected: Mapping[str, Form]) -> Vectors:
    """A message's vectors: exactly the expected names, shapes and dtypes, and finite numbers.

    What is declared and what is there are compared before anything is decoded.
    """
    block = message.get("vectors")
    if not isinstance(block, bytes):
        raise WireError("no vectors in the message")
    declared = _declared(block)
    coded = _without_zeros(declared, expected)
    if missing := sorted(k for k, form in expected.items() if form.required and k not in declared | coded):
        raise WireError(f"vector {missing[0]!r} is missing")
    if extra := sorted(set(declared) - set(expected)):
        raise WireError(f"vector {clean(extra[0], 60)!r} was not asked for")
    for name, found in declared.items():
        _compare(name, found, expected[name])
    size = sum(math.prod(f.shape) * f.dtype.itemsize for f in declared.values()) + sum(coded.values())
    if len(block) > size + _HEADER:
        raise WireError(f"the vectors weigh {len(block)} bytes, {size} were expected")
    try:
        vectors: Vectors = deserialise(block)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, OverflowError):
        raise WireError("the vectors cannot be decoded") from None
    for name in coded:
        _fill(vectors, name, expected[name])
    for name, tensor in vectors.items():
        if tensor.is_floating_point() and not all_finite(tensor):
            raise WireError(f"vector {name!r} has NaN or infinite entries")
    return vectors


def _without_zeros(declared: dict[str, Form], expected: Mapping[str, Form]) -> dict[str, int]:
    """The vectors that travel without their zeros, with their bytes; what stands for them is no longer declared."""
    found: dict[str, int] = {}
    for name, wanted in expected.items():
        if f"{name}{sparse_messages.SHAPE}" not in declared or name in declared:
            continue
        parts = {k.removeprefix(name): declared.pop(k) for k in list(declared) if k.startswith(f"{name}/")}
        found[name] = sum(math.prod(f.shape) * f.dtype.itemsize for f in parts.values())
        forms = {k: (f.shape, f.dtype) for k, f in parts.items()}
        if not sparse_messages.fits(forms, wanted.dtype, math.prod(wanted.shape)):
            raise WireError(f"vector {name!r} cannot be put together from what stands for it")
    return found


def _fill(vectors: Vectors, name: str, wanted: Form) -> None:
    """Put a vector in the place of its numbers and their places."""
    parts = {k.removeprefix(name): vectors.pop(k) for k in list(vectors) if k.startswith(f"{name}/")}
    shape = tuple(parts[sparse_messages.SHAPE].tolist())
    if any(n < 0 for n in shape):
        raise WireError(f"vector {name!r} has a negative length")
    _compare(name, Form(shape, wanted.dtype), wanted)
    try:
        vectors[name] = sparse_messages.decode(parts, shape)
    except ValueError as error:
        raise WireError(f"vector {name!r}: {error}") from None


def _declared(block: bytes) -> dict[str, Form]:
    """The forms that a block of safetensors declares in its header."""
    try:
        header = files.read_header(io.BytesIO(block), _HEADER)[1]
        return {
            str(k): Form(tuple(_extent(n) for n in v["shape"]), files.DTYPES[v["dtype"]])
            for k, v in header.items()
            if k != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WireError("the vectors cannot be decoded: an unknown type or a broken header") from None


def _extent(n: Any) -> int:
    if type(n) is not int or not 0 <= n <= _WHOLE:
        raise ValueError(f"{n!r} in a shape")
    return n


def _compare(name: str, found: Form, wanted: Form) -> None:
    short = len(found.shape) == 1 and len(wanted.shape) == 1 and found.shape[0] <= wanted.shape[0]
    if found.shape != wanted.shape and (wanted.exact or not short):
        most = "" if wanted.exact else "at most "
        raise WireError(f"vector {name!r} has shape {found.shape}, expected {most}{wanted.shape}")
    if found.dtype != wanted.dtype:
        kinds = [str(f.dtype).removeprefix("torch.") for f in (found, wanted)]
        raise WireError(f"vector {name!r} has dtype {kinds[0]}, expected {kinds[1]}")
