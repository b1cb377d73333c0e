"""Checkpoints: the whole state of a run in one safetensors file, replaced atomically."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcomposite import files
from fedcomposite.problems import Counter
from fedcomposite.runtime.history import Best, Record
from fedcomposite.runtime.identity import CheckpointError as CheckpointError
from fedcomposite.runtime.identity import Identity, differences

_FORMAT = "checkpoint 2"


class Snapshot(NamedTuple):
    """What a run needs to go on as if it had never stopped."""

    round: int
    server: NamedTuple
    clients: NamedTuple
    counter: Counter
    seconds: float
    history: list[Record]
    buffers: Tensor
    best: Best | None = None


def save(path: Path, snapshot: Snapshot, identity: Identity) -> None:
    """Write a snapshot."""
    tensors = {f"server.{k}": v for k, v in snapshot.server._asdict().items()}
    tensors |= {f"clients.{k}": v for k, v in snapshot.clients._asdict().items()}
    tensors["buffers"] = snapshot.buffers
    best = snapshot.best
    if best is not None:
        tensors |= {"best.solution": best.solution, "best.buffers": best.buffers}
    columns = list(dict.fromkeys(k for record in snapshot.history for k in record))
    whole = [c for c in columns if all(isinstance(r.get(c, 0), int) for r in snapshot.history)]
    table = [[float(r.get(c, "nan")) for c in columns] for r in snapshot.history]
    tensors["history"] = torch.tensor(table, dtype=torch.float64).reshape(len(table), len(columns))
    metadata = {
        "fedcomposite": _FORMAT,
        "identity": json.dumps(identity),
        "round": str(snapshot.round),
        "work": json.dumps(dataclasses.asdict(snapshot.counter)),
        "seconds": repr(snapshot.seconds),
        "columns": json.dumps(columns),
        "integers": json.dumps(whole),
    }
    if best is not None:
        metadata["best"] = json.dumps([best.round, best.metric, best.value])
    metadata["digest"] = files.digest(tensors, metadata)
    files.write_atomic(path, files.pack(tensors, metadata))


def identity_of(path: Path) -> Identity:
    """Whose checkpoint this is."""
    found: Identity = json.loads(_read(path)[1]["identity"])
    return found


def verify(path: Path, identity: Identity) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The content of a checkpoint, after making sure that it is whole and this run's."""
    tensors, metadata = _read(path)
    if other := differences(json.loads(metadata["identity"]), identity):
        raise CheckpointError(
            f"{path}: belongs to a run with other data, method or settings: {'; '.join(other)}; "
            "resume with the same or start anew"
        )
    return tensors, metadata


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a checkpoint that is not damaged."""
    try:
        tensors, metadata = files.read(path)
    except OSError as error:
        raise CheckpointError(f"{path}: not a readable checkpoint ({error})") from None
    if not metadata.get("fedcomposite", "").startswith("checkpoint"):
        raise CheckpointError(f"{path}: a safetensors file, but not a fedcomposite checkpoint")
    if metadata["fedcomposite"] != _FORMAT:
        raise CheckpointError(f"{path}: a checkpoint of another version of fedcomposite; start anew")
    said = metadata.pop("digest", "")
    if files.digest(tensors, metadata) != said:
        raise CheckpointError(f"{path}: damaged (its content does not match its digest); start anew")
    return tensors, metadata


class Restored(NamedTuple):
    """What a checkpoint gives back to the driver; the clients' states are read by their transport."""

    round: int
    server: Any
    counter: Counter
    seconds: float
    history: list[Record]
    buffers: Tensor
    best: Best | None


def load(path: Path, server: Any, identity: Identity) -> Restored:
    """Read a checkpoint back, in the shape of a fresh ``server`` state; refuse another run's."""
    tensors, metadata = verify(path, identity)
    columns, whole = json.loads(metadata["columns"]), set(json.loads(metadata["integers"]))
    history = [
        Record({c: int(v) if c in whole else v for c, v in zip(columns, row, strict=True) if v == v or c not in whole})
        for row in tensors["history"].tolist()
    ]
    device = server[0].device
    kept = [tensors[k].to(device) for k in ("best.solution", "best.buffers")] if "best" in metadata else []
    return Restored(
        int(metadata["round"]),
        type(server)(*(tensors[f"server.{k}"].to(v.device) for k, v in server._asdict().items())),
        Counter(**json.loads(metadata["work"])),
        float(metadata["seconds"]),
        history,
        tensors["buffers"].to(device),
        Best(*json.loads(metadata["best"]), *kept) if kept else None,
    )
