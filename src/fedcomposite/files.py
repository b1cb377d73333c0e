"""Files that a crash cannot spoil, and whose bytes depend on their content alone."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialise
from torch import Tensor


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


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file: the same content gives the same bytes (the library orders metadata at random)."""
    whole = {k: v.detach().cpu().contiguous().clone() for k, v in sorted(tensors.items())}
    raw = serialise(whole)
    size = int.from_bytes(raw[:8], "little")
    notes = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    header = notes | json.loads(raw[8 : 8 + size])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + raw[8 + size :]


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """A digest of named tensors and texts, in whatever order they come."""
    found = hashlib.sha256()
    for key, value in sorted(metadata.items()):
        found.update(repr((key, value)).encode())
    for key, tensor in sorted(tensors.items()):
        found.update(repr((key, str(tensor.dtype), tuple(tensor.shape))).encode())
        content: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        found.update(content)
    return found.hexdigest()
