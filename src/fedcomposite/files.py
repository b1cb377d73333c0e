"""Files that a crash cannot spoil, and whose bytes depend on their content alone."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {
    "I64": torch.int64, "F64": torch.float64, "F32": torch.float32, "I32": torch.int32, "BF16": torch.bfloat16,
    "F16": torch.float16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""What safetensors calls them; in a file the types with large items come first."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    What killed writers of this file left behind is removed.
    """
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of the one at ``path`` when it is whole and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_name(path)
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
        _sync_folder(path.parent)
    finally:
        scratch.unlink(missing_ok=True)
    remove_scratch(path)


def _sync_folder(folder: Path) -> None:
    """Have a folder's list of names on the disk: a file that took another's place stays there after a power cut."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:  # of a kind of system on which folders cannot be opened
        return
    try:
        os.fsync(opened)
    except OSError:  # nor synced
        pass
    finally:
        os.close(opened)


def one_at_a_time(what: str) -> AbstractContextManager[Any]:
    """Wait until no other process of this user is at ``what``, any name that they share, then keep them waiting.

    The lock is the kernel's, on a file in the system's temporary folder, and ends with its process.
    """
    name = f"fedcomposite-{os.getuid()}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.lock"
    return FileLock(Path(tempfile.gettempdir(), name), mode=0o600)


def scratch_name(path: Path) -> Path:
    """Where a file is written before it takes its place."""
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
