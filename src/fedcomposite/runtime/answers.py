"""The log of answers: what the parties have said, in the order of the exchanges, so that an analysis can go on.

An analysis is a function of its problem and of the answers it gets. Done again with the same answers it asks the same,
so that whoever has them can do it again up to the exchange at which it was killed, and go on from there with the same
bits. One file holds them: for each exchange its length, a digest, and JSON with a block of safetensors behind; before
the first one, what the analysis is.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import load

from fedcomposite._faults import UserError
from fedcomposite.data.queries import Query, parse_answer, write_answer
from fedcomposite.files import pack, remove_scratch, scratch_name
from fedcomposite.runtime.identity import Identity, differences
from fedcomposite.runtime.protocol import Introduce, Request

AT_HAND = 256 << 20
"""Bytes after which answers of data at hand are computed again rather than written down."""
_HEADER = struct.Struct("<QQ32s")  # bytes of text, bytes of arrays, digest of both
_LONGEST = 1 << 40  # of what a header may announce: more is no log
_SYNCED = 1.0  # seconds between writes that wait for the disk


class ResumeError(UserError):
    """What cannot be gone on with, and why."""


class AnswerLog:
    """Answers of one analysis, in a file that only its owner may read: sites' sums are in it.

    Parameters
    ----------
    path : path
        The file. It is made, or replaced, when there is something to write: what is refused before leaves it alone.
    identity : mapping of str to str
        What the analysis is: a log of another one is refused.
    resume : bool
        Whether to go on from a log that is there; otherwise it is replaced.
    most : int, optional
        Bytes after which nothing more is written: for parties whose answers can as well be computed again.
    """

    def __init__(
        self, path: str | Path, identity: Mapping[str, str], *, resume: bool = True, most: int | None = None
    ) -> None:
        self.path, self._most, self._synced = Path(path), most, time.monotonic()
        self._file: BinaryIO | None = None
        self._identity, self._at, self._end = dict(identity), 0, 0
        self.known = 0
        """Exchanges that the log had when it was opened."""
        self.recalled = 0
        """Those of them that were asked for again."""
        if self.path.exists():
            kept = identity_of(self.path)  # no other file is replaced
            if resume and (other := differences(kept, identity)):
                raise ResumeError(
                    f"{self.path}: belongs to an analysis with other data or settings: {'; '.join(other)}; "
                    "resume with the same or start anew"
                )
            if resume:
                self._open()

    def begin(self) -> BinaryIO:
        """Make the file, if it is not there yet: from here on the analysis can be gone on with."""
        if self._file is None:
            _create(self.path, _framed({"identity": self._identity}, b""))
            self._file = self._open()
        return self._file

    def _open(self) -> BinaryIO:
        """Open the file, and find the end of its last whole entry.

        A half one behind it, of a process that was killed, is cut off.
        """
        file = self._file = self.path.open("r+b")
        _entry(file)
        self._at = self._end = file.tell()
        while _entry(file) is not None:
            self._end, self.known = file.tell(), self.known + 1
        if self._end < os.fstat(file.fileno()).st_size:
            file.truncate(self._end)
        return file

    def recall(self, requests: Sequence[Any]) -> tuple[list[Any], float, tuple[int, int]] | None:
        """What was answered to these requests, after how many seconds and bytes; None where the log ends."""
        if self._at == self._end:
            return None
        file = self.begin()
        file.seek(self._at)
        found = _entry(file)
        assert found is not None  # it was whole before
        head, block = found
        if head["asked"] != _digest(requests):
            raise ResumeError(
                f"{self.path}: exchange {self.recalled + 1} asked something else before: the analysis, its data or the "
                "version are not the same; start anew"
            )
        self._at, self.recalled = file.tell(), self.recalled + 1
        up, down = head["bytes"]
        said = _answers(head["answers"], load(block) if block else {})
        return settled(said), float(head["seconds"]), (up, down)

    def append(self, requests: Sequence[Any], answers: Sequence[Any], seconds: float, sent: tuple[int, int]) -> None:
        """Write an exchange down; a process that is killed afterwards has it."""
        if self._most is not None and self._end > self._most:
            return
        arrays: dict[str, torch.Tensor] = {}
        said = [_written(answer, arrays) for answer in answers]
        head = {"asked": _digest(requests), "seconds": seconds, "bytes": sent, "answers": said}
        file = self.begin()
        file.seek(self._end)
        file.write(_framed(head, pack(arrays) if arrays else b""))
        file.flush()
        self._at = self._end = file.tell()
        if time.monotonic() - self._synced > _SYNCED:
            os.fsync(file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Close the file, which stays."""
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        """The analysis is done: its result is somewhere else, and single answers need not be kept."""
        self.close()
        if self._file is not None:
            self.path.unlink(missing_ok=True)


def identity_of(path: Path) -> Identity:
    """What the analysis of a log is."""
    try:
        with path.open("rb") as file:
            found = _entry(file)
    except OSError as error:
        raise ResumeError(f"{path}: cannot be read ({error.strerror})") from None
    if found is None or not isinstance(found[0].get("identity"), dict):
        raise ResumeError(f"{path}: not a log of answers; give another file")
    identity: Identity = found[0]["identity"]
    return identity


def _create(path: Path, content: bytes) -> None:
    """Write the beginning of a log, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_name(path)
    scratch.unlink(missing_ok=True)
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    remove_scratch(path)


def _framed(head: Mapping[str, Any], block: bytes) -> bytes:
    text = json.dumps(head).encode()
    return _HEADER.pack(len(text), len(block), hashlib.sha256(text + block).digest()) + text + block


def _entry(file: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next entry of a log; None at its end, or where it is not whole."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    words, arrays, digest = _HEADER.unpack(header)
    if words + arrays > _LONGEST or words + arrays > os.fstat(file.fileno()).st_size:
        return None
    body = file.read(words + arrays)
    if len(body) < words + arrays or hashlib.sha256(body).digest() != digest:
        return None
    return json.loads(body[:words]), body[words:]


def _digest(requests: Sequence[Any]) -> str:
    """What was asked, to the last bit."""
    made = hashlib.sha256()
    for one in requests:
        if isinstance(one, Query | Introduce):
            made.update(one.model_dump_json().encode() if isinstance(one, Query) else b"introduction")
            continue
        if not isinstance(one, Request):
            raise TypeError(f"a {type(one).__name__} is not written to a log of answers: methods have checkpoints")
        shapes = [(key, str(value.dtype), *value.shape) for key, value in one.arrays.items()]
        made.update(repr((one.name, dict(one.numbers), one.rows, one.part, one.by_site, shapes)).encode())
        for value in one.arrays.values():
            made.update(np.ascontiguousarray(value.detach().cpu().numpy()).data)
    return made.hexdigest()


def settled(answer: Any) -> Any:
    """An answer in memory of its own, row by row: how numbers lie in memory can change the last bits of a product."""
    match answer:
        case list():
            return [settled(one) for one in answer]
        case dict():
            return {key: settled(value) for key, value in answer.items()}
        case torch.Tensor():
            return answer.detach().clone(memory_format=torch.contiguous_format)
    return answer


def _written(answer: Any, arrays: dict[str, torch.Tensor]) -> Any:
    """An answer as JSON; tensors go to ``arrays``, in whose place their names stand."""
    match answer:
        case str():
            return answer
        case list():
            return [_written(one, arrays) for one in answer]
        case dict() if all(isinstance(v, torch.Tensor) for v in answer.values()):
            place = str(len(arrays))
            arrays |= {f"{place}.{key}": value for key, value in answer.items()}
            return {"sums": place, "keys": list(answer)}
        case dict():
            return {"table": write_answer(answer)}
    raise TypeError(f"an answer of type {type(answer).__name__} cannot be written down")


def _answers(said: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    """The answers that :func:`_written` has written."""
    if isinstance(said, str):
        return said
    if isinstance(said, list):
        return [_answers(one, arrays) for one in said]
    if "table" in said:
        return parse_answer(said["table"])
    return {key: arrays[f"{said['sums']}.{key}"] for key in said["keys"]}
