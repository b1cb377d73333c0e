"""The clients' states: rows that cost nothing until a client takes part, in memory or in a file.

A client that has never taken part is in the initial state, which is held once. Room for all n rows is reserved when the
first row is written, but the operating system provides a page of it when something is first written there, so what a
run occupies grows with the clients that took part. On a GPU the whole room is allocated.

Rows that would exceed the memory limit (half of the memory that is available at that moment, unless a limit is given)
are kept in a file that is mapped into memory: pages that are used stay there as long as there is room, and the system
writes the others out. The file loses its name as soon as it is mapped, so nothing is left behind, even by a crash.

In a checkpoint, states of up to 128 MiB are part of the checkpoint itself. Larger ones, and those of several processes,
are written beside it, row by row and only for clients that took part, in one safetensors file per process. Its
name contains the digest of the run and the round. It is complete on disk before the checkpoint that refers to it
replaces the former one, and only then are the files of the former one removed: a crash leaves the old state or the new.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedcomposite import files
from fedcomposite.runtime import messages
from fedcomposite.runtime.checkpoint import CheckpointError

_SMALL = 1 << 27  # bytes of all rows up to which they are handed out as tensors and saved in the checkpoint itself
_BLOCK = 1 << 24  # bytes that are read or written at a time
_UNKNOWN = b"0" * 64  # in place of a digest, while it is computed


class Beside(NamedTuple):
    """What a checkpoint holds in place of states that are written beside it."""

    files: Tensor  # how many files


class ClientStates:
    """The states of n clients; ``take`` and ``put`` cost as much as the rows they move.

    Parameters
    ----------
    initial : NamedTuple
        The state of a client that has not taken part.
    n : int
        Number of clients.
    folder : path, optional
        Where the file lies that holds what is too large for memory; the system's temporary folder if left out.
    limit : int, optional
        Bytes of states from which they go there; half of the memory available at the first write if left out.
    """

    def __init__(
        self, initial: NamedTuple, n: int, *, folder: str | Path | None = None, limit: float | None = None
    ) -> None:
        if limit is not None and not limit >= 0:
            raise ValueError(f"memory_limit = {limit!r}, must be a number of bytes >= 0")
        self._initial, self.n, self._limit = initial, n, limit
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._rows: Any = None  # a tuple of tensors (n, ...), once something was written
        self._touched = np.zeros(n, bool)
        self._complete = False  # every row of it is valid
        self._borrowed = False  # somebody else may hold these tensors, so they must not be written
        self.spilled = False

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        where = f"in a file below {self._folder}" if self.spilled else "in memory"
        return f"ClientStates({self.n} clients, {self.nbytes / 2**20:.1f} MiB if all take part, {where})"

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, once every client has taken part."""
        return self.n * messages.nbytes(self._initial)

    @property
    def small(self) -> bool:
        """Whether all rows together are a matter of 128 MiB at most."""
        return self.nbytes <= _SMALL

    def take(self, rows: Any = None) -> Any:
        """The states of some clients (their numbers), as a new tuple of tensors ``(m, ...)``; of all, without copying.

        They are on the device of the initial state, wherever the rows are kept.
        """
        if rows is None:
            return self.everyone()
        which = self._numbers(rows)
        if self._rows is None:
            return messages.stack(self._initial, len(which))
        at = self._index(which)
        found = messages.take(self._rows, at)
        if self.spilled:
            found = type(found)(*(t.to(i.device) for t, i in zip(found, self._initial, strict=True)))
        if self._complete or self._touched[which].all():
            return found
        old = torch.from_numpy(self._touched[which])

        def choose(row: Tensor, first: Tensor) -> Tensor:
            return torch.where(old.to(row.device).view(-1, *(1,) * first.ndim), row, first)

        return type(found)(*map(choose, found, self._initial))

    def put(self, rows: Any, new: Any) -> None:
        """Write the states of some clients; ``rows=None`` replaces everyone's, without copying."""
        if not self._initial:
            return
        if rows is None:
            self._rows, self._complete, self._borrowed, self.spilled = new, True, True, False
            return
        which = self._numbers(rows)
        self._reserve()
        if self.spilled and not self._complete:
            self._check_disk(int((~self._touched[which]).sum()))
        at = self._index(which)
        messages.put(self._rows, at, messages.each(new, lambda t: t.to(at.device)))
        self._touched[which] = True

    def everyone(self) -> Any:
        """The states of all clients, ``(n, ...)``; this makes the rows of those who have not taken part as well."""
        if self._rows is None:
            return messages.stack(self._initial, self.n)
        if not self._complete:
            missing = np.flatnonzero(~self._touched)
            if self.spilled:
                self._check_disk(len(missing))
            at = self._index(missing)
            for row, first in zip(self._rows, self._initial, strict=True):
                row[at] = first.to(row)
            self._complete = True
        return self._rows

    def _numbers(self, rows: Any) -> Any:
        which = np.asarray(rows, np.int64)
        if len(which) and not (which.min() >= 0 and which.max() < self.n):
            raise IndexError(f"clients are numbered from 0 to {self.n - 1}, asked for {which.min()} to {which.max()}")
        return which

    def _index(self, which: Any) -> Tensor:
        return torch.from_numpy(which).to(next((t.device for t in self._rows), "cpu"))

    def _reserve(self) -> None:
        """Make the room of all rows, unless there is one that may be written."""
        if self._rows is not None and not self._borrowed:
            return
        before = self._rows
        device = self._initial[0].device
        limit = available_memory(device) / 2 if self._limit is None else self._limit
        self.spilled = self.nbytes > limit
        if self.spilled:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._rows = messages.each(self._initial, self._mapped if self.spilled else self._room)
        self._borrowed = False
        if before is not None:
            if self.spilled:
                self._check_disk(self.n)
            for row, held in zip(self._rows, before, strict=True):
                row.copy_(held)

    def _room(self, first: Tensor) -> Tensor:
        return first.new_empty(self.n, *first.shape)

    def _mapped(self, first: Tensor) -> Tensor:
        size = self.n * first.numel()
        if not size:
            return torch.empty(self.n, *first.shape, dtype=first.dtype)
        handle, name = tempfile.mkstemp(prefix="fedcomposite-", suffix=".states", dir=self._folder)
        try:
            os.ftruncate(handle, size * first.element_size())  # sparse: no block is used before it is written
            flat = torch.from_file(name, shared=True, size=size, dtype=first.dtype)
        finally:
            os.close(handle)
            os.unlink(name)
        return flat.view(self.n, *first.shape)

    def _check_disk(self, rows: int) -> None:
        """Refuse rows that the disk has no room for: a mapped page without a block would kill the process."""
        need, free = rows * messages.nbytes(self._initial), shutil.disk_usage(self._folder).free
        if need > free:
            raise OSError(
                f"{self._folder} has {free / 2**20:.0f} MiB free, the states of {rows} more clients take "
                f"{need / 2**20:.0f} MiB; choose another folder with state_dir"
            )

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, path: Path, name: str, first: int = 0, part: tuple[int, int] = (0, 1)) -> Any:
        """What a checkpoint at ``path`` holds of the states: they themselves, or a sign that they lie beside it.

        ``name`` is particular to the run and the round, ``first`` the number in the federation of the first client
        here, and ``part`` says which of how many processes this is.
        """
        if not self._initial or (self.small and part[1] == 1):
            return self.everyone()
        if self._rows is None:
            which = np.arange(0)
        else:
            which = np.arange(self.n) if self._complete else np.flatnonzero(self._touched)
        forms = {f"clients.{k}": (t.dtype, (len(which), *t.shape)) for k, t in self._initial._asdict().items()}
        header = files.header({"rows": (torch.int64, which.shape), **forms}, {"digest": _UNKNOWN.decode()})
        with files.replacing(_beside(path, name, part)) as file:
            digest = hashlib.sha256()
            for piece in itertools.chain([header, (which + first).astype(np.int64).tobytes()], self._blocks(which)):
                file.write(piece)
                digest.update(piece)
            file.seek(header.index(_UNKNOWN))
            file.write(digest.hexdigest().encode())
        return Beside(torch.tensor([part[1]]))

    def _blocks(self, which: Any) -> Iterator[Any]:
        """The bytes of some rows, a block at a time."""
        for t in self._rows or ():
            per = max(1, _BLOCK // max(1, t[0].nbytes))
            for a in range(0, len(which), per):
                block = t[self._index(which[a : a + per])].cpu()
                yield memoryview(block.reshape(-1).view(torch.uint8).numpy())

    def load(self, path: Path, name: str, first: int = 0) -> None:
        """Take the states back from a checkpoint that has been found to be this run's."""
        if not self._initial:
            return
        with safe_open(str(path), framework="pt", device="cpu") as file:
            if "clients.files" not in file.keys():  # noqa: SIM118
                mine = slice(first, first + self.n)
                self.put(None, self._like(lambda k, t: file.get_slice(f"clients.{k}")[mine].to(t.device)))
                return
            count = int(file.get_tensor("clients.files"))
        for part in range(count):
            where = _beside(path, name, (part, count))
            try:
                _verify(where)
                with safe_open(str(where), framework="pt", device="cpu") as file:
                    self._fill(file, first)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path}: the clients' states beside it, {where.name}, cannot be read ({error})"
                ) from None

    def _fill(self, file: Any, first: int) -> None:
        rows = file.get_tensor("rows").numpy() - first
        a, b = np.searchsorted(rows, [0, self.n])
        per = max(1, _BLOCK // max(1, messages.nbytes(self._initial)))
        for start in range(int(a), int(b), per):
            block = slice(start, min(start + per, int(b)))
            self.put(rows[block], self._like(lambda k, t, block=block: file.get_slice(f"clients.{k}")[block]))

    def _like(self, make: Any) -> Any:
        return type(self._initial)(*(make(k, t) for k, t in zip(self._initial._fields, self._initial, strict=True)))


def _beside(path: Path, name: str, part: tuple[int, int]) -> Path:
    return path.with_name(f"{path.name}.{name}.{part[0] + 1}-of-{part[1]}.clients")


def _verify(path: Path) -> None:
    """Refuse a file whose content does not match its digest."""
    with path.open("rb") as file:
        try:
            header, content = files.read_header(file, path.stat().st_size)
            said = str(content["__metadata__"]["digest"]).encode()
        except (ValueError, KeyError, TypeError):
            raise SafetensorError("it is damaged") from None
        found = hashlib.sha256(header.replace(said, _UNKNOWN, 1))
        while block := file.read(_BLOCK):
            found.update(block)
    if found.hexdigest().encode() != said:
        raise SafetensorError("it is damaged: its content does not match its digest")


def tidy(path: Path, name: str) -> None:
    """Remove the states beside a checkpoint that it does not refer to any more."""
    start, keep = f"{path.name}.", f"{path.name}.{name}."
    for old in path.parent.iterdir():
        if old.name.startswith(start) and old.name.endswith(".clients") and not old.name.startswith(keep):
            old.unlink(missing_ok=True)


def available_memory(device: torch.device) -> float:
    """Bytes that may still be used: of a GPU, or of the machine, or of the container that this process runs in."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    found = [math.inf]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found += [1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")]
    except OSError:  # not Linux: the memory that is there
        if hasattr(os, "sysconf"):
            found.append(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    try:
        most, used = (Path(f"/sys/fs/cgroup/memory.{k}").read_text() for k in ("max", "current"))
        found.append(math.inf if most.strip() == "max" else float(int(most) - int(used)))
    except OSError:  # no container, or an old kernel
        pass
    return min(found)
