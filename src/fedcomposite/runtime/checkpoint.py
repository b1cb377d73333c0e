"""Checkpoints: the whole state of a run in one safetensors file, replaced atomically."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from fedcomposite.problems import Counter, Problem
from fedcomposite.runtime.history import Record

T = TypeVar("T", bound=NamedTuple)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why."""


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


class Snapshot(NamedTuple):
    """What a run needs to go on as if it had never stopped."""

    round: int
    server: NamedTuple
    clients: NamedTuple
    counter: Counter
    bytes_up: int
    bytes_down: int
    seconds: float
    history: list[Record]
    buffers: Tensor


def fingerprint(problem: Problem, x0: Tensor, **settings: Any) -> str:
    """A digest of everything that determines a run's numbers: data, problem, method, settings."""
    digest = hashlib.sha256()
    for tensor in (problem.silos.features, problem.silos.targets, x0.cpu()):
        digest.update(str(tensor.dtype).encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    described = [
        problem.silos.offsets,
        problem.silos.ids,
        problem.loss,
        problem.regularizer,
        problem.bias,
        problem.weighting,
        problem.described,
    ]
    digest.update(repr((described, sorted(settings.items()))).encode())
    return digest.hexdigest()


def save(path: Path, snapshot: Snapshot, identity: str) -> None:
    """Write a snapshot."""
    tensors = {f"server.{k}": v for k, v in snapshot.server._asdict().items()}
    tensors |= {f"clients.{k}": v for k, v in snapshot.clients._asdict().items()}
    tensors["buffers"] = snapshot.buffers
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    columns = list(dict.fromkeys(k for record in snapshot.history for k in record))
    whole = [c for c in columns if all(isinstance(r.get(c, 0), int) for r in snapshot.history)]
    table = [[float(r.get(c, "nan")) for c in columns] for r in snapshot.history]
    tensors["history"] = torch.tensor(table, dtype=torch.float64).reshape(len(table), len(columns))
    metadata = {
        "fedcomposite": "checkpoint 1",
        "identity": identity,
        "round": str(snapshot.round),
        "work": json.dumps(
            [snapshot.counter.gradients, snapshot.counter.proxes, snapshot.bytes_up, snapshot.bytes_down]
        ),
        "seconds": repr(snapshot.seconds),
        "columns": json.dumps(columns),
        "integers": json.dumps(whole),
    }
    write_atomic(path, serialise(tensors, metadata))


def load(path: Path, server: T, client: Any, identity: str) -> Snapshot:
    """Read a snapshot back, in the shapes of a fresh ``server`` and ``client`` state; refuse another run's."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, Tensor] = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable checkpoint ({error})") from None
    if metadata.get("fedcomposite") != "checkpoint 1":
        raise CheckpointError(f"{path}: a safetensors file, but not a fedcomposite checkpoint")
    if metadata["identity"] != identity:
        raise CheckpointError(
            f"{path}: belongs to a run with other data, method or settings; resume with the same or start anew"
        )

    def restore(prefix: str, like: Any) -> Any:
        return type(like)(*(tensors[f"{prefix}.{k}"].to(v.device) for k, v in like._asdict().items()))

    columns, whole = json.loads(metadata["columns"]), set(json.loads(metadata["integers"]))
    history = [
        Record({c: int(v) if c in whole else v for c, v in zip(columns, row, strict=True) if v == v or c not in whole})
        for row in tensors["history"].tolist()
    ]
    gradients, proxes, up, down = json.loads(metadata["work"])
    return Snapshot(
        int(metadata["round"]),
        restore("server", server),
        restore("clients", client),
        Counter(gradients, proxes),
        up,
        down,
        float(metadata["seconds"]),
        history,
        tensors["buffers"].to(server[0].device),
    )
