"""Files that a crash cannot spoil, and whose bytes depend on their content alone."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CODES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_RANK = {dtype: i for i, dtype in enumerate(_CODES)}  # in a file the types with large items come first


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    What killed writers of this file left behind is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_name(path)
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    remove_scratch(path)


@contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Wait until no other process of this user is at ``what``, any name that they share, then keep them waiting.

    The lock is the kernel's, on a file in the system's temporary folder, and ends with its process.
    """
    name = f"fedcomposite-{os.getuid()}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.lock"
    file = os.open(Path(tempfile.gettempdir(), name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def scratch_name(path: Path) -> Path:
    """Where this process writes a file before it gets its name."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def remove_scratch(path: Path) -> None:
    """Remove the unfinished copies of a file whose writers are gone."""
    start = f".{path.name}."
    for old in path.parent.glob(f"{start}*.tmp"):
        owner = old.name[len(start) : -len(".tmp")]
        if owner.isdigit() and int(owner) != os.getpid() and not _alive(int(owner)):
            old.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _raw(flat: Tensor) -> Any:
    """The bytes of a vector, as a buffer; one without entries may have any stride, and then has no view as bytes."""
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file: the same content gives the same bytes (the library orders metadata at random).

    The numbers are copied once, where the library does it three times.
    """
    whole = {k: v.detach().cpu().contiguous().reshape(-1) for k, v in tensors.items()}
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    names, at = sorted(whole, key=lambda k: (_RANK[whole[k].dtype], k)), 0
    for name in names:
        size, shape = whole[name].nbytes, list(tensors[name].shape)
        header[name] = {"dtype": _CODES[whole[name].dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    blocks = [_raw(whole[name]) for name in names]
    return b"".join([len(text).to_bytes(8, "little"), text, *blocks])


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
