"""The log of answers: what the parties have said, in the order of the exchanges, so that an analysis can go on.

An analysis is a function of its problem and of the answers it gets. Done again with the same answers it asks the same,
so that whoever has them can do it again up to the exchange at which it was killed, and go on from there with the same
bits. One file holds them: for each exchange its length, a digest, and JSON with a block of safetensors behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from fedcomposite._faults import UserError
from fedcomposite.data.queries import Query, parse_answer, write_answer
from fedcomposite.runtime.protocol import Request

_HEADER = struct.Struct("<QQ32s")  # bytes of text, bytes of arrays, digest of both
_SYNCED = 1.0  # seconds between writes that wait for the disk


class ResumeError(UserError):
    """What cannot be gone on with, and why."""


class AnswerLog:
    """Answers of one analysis, in a file.

    Parameters
    ----------
    path : path
        The file; it is made if it is not there.
    identity : str
        What the analysis is: a log of another one is refused.
    most : int, optional
        Bytes after which nothing more is written: for parties whose answers can as well be computed again.
    """

    def __init__(self, path: str | Path, identity: str = "", most: int | None = None) -> None:
        self.path, self._most, self._synced = Path(path), most, time.monotonic()
        self._known = self._read(hashlib.sha256(identity.encode()).hexdigest())
        self._file = self.path.open("ab")
        self.recalled = 0
        """Exchanges that were answered from the log."""

    def _read(self, identity: str) -> list[tuple[dict[str, Any], bytes]]:
        """The whole entries of the file; a half one at its end, of a process that was killed, is cut off."""
        if not self.path.exists():
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # sites' sums are in it
            with os.fdopen(descriptor, "wb") as file:
                file.write(_framed({"identity": identity}, b""))
        content, at, found = self.path.read_bytes(), 0, []
        while at + _HEADER.size <= len(content):
            words, arrays, digest = _HEADER.unpack_from(content, at)
            start = at + _HEADER.size
            end = start + words + arrays
            body = content[start:end]
            if len(body) < words + arrays or hashlib.sha256(body).digest() != digest:
                break
            found.append((json.loads(body[:words]), body[words:]))
            at = end
        if not found or found[0][0].get("identity") != identity:
            raise ResumeError(
                f"{self.path}: these answers are of another analysis (data, settings or version differ); "
                "begin anew with another folder"
            )
        if at < len(content):
            os.truncate(self.path, at)
        return found[:0:-1]  # the next one is the last

    def recall(self, requests: Sequence[Any]) -> tuple[list[Any], float, tuple[int, int]] | None:
        """What was answered to these requests, after how many seconds and bytes; None where the log ends."""
        if not self._known:
            return None
        head, block = self._known.pop()
        if head["asked"] != _digest(requests):
            raise ResumeError(
                f"{self.path}: exchange {self.recalled + 1} asked something else before: the analysis, its data or the "
                "version are not the same; begin anew with another folder"
            )
        self.recalled += 1
        up, down = head["bytes"]
        return _answers(head["answers"], load(block) if block else {}), float(head["seconds"]), (up, down)

    def append(self, requests: Sequence[Any], answers: Sequence[Any], seconds: float, sent: tuple[int, int]) -> None:
        """Write an exchange down; a process that is killed afterwards has it."""
        if self._most is not None and self._file.tell() > self._most:
            return
        arrays: dict[str, torch.Tensor] = {}
        said = [_written(answer, arrays) for answer in answers]
        head = {"asked": _digest(requests), "seconds": seconds, "bytes": sent, "answers": said}
        self._file.write(_framed(head, save(arrays) if arrays else b""))
        self._file.flush()
        if time.monotonic() - self._synced > _SYNCED:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Close the file, which stays."""
        self._file.close()

    def remove(self) -> None:
        """The analysis is done: its result is somewhere else, and single answers need not be kept."""
        self.close()
        self.path.unlink(missing_ok=True)


def _framed(head: Mapping[str, Any], block: bytes) -> bytes:
    text = json.dumps(head).encode()
    return _HEADER.pack(len(text), len(block), hashlib.sha256(text + block).digest()) + text + block


def _digest(requests: Sequence[Any]) -> str:
    """What was asked, to the last bit."""
    made = hashlib.sha256()
    for one in requests:
        if isinstance(one, Query):
            made.update(one.model_dump_json().encode())
            continue
        if not isinstance(one, Request):
            raise TypeError(f"a {type(one).__name__} is not written to a log of answers: methods have checkpoints")
        words = [one.name, dict(one.numbers), asdict(one.rows), one.part, one.by_site]
        shapes = {key: [str(value.dtype), list(value.shape)] for key, value in one.arrays.items()}
        made.update(json.dumps([*words, shapes]).encode())
        for value in one.arrays.values():
            made.update(np.ascontiguousarray(value.detach().cpu().numpy()).tobytes())
    return made.hexdigest()


def _written(answer: Any, arrays: dict[str, torch.Tensor]) -> Any:
    """An answer as JSON; tensors go to ``arrays``, in whose place their names stand."""
    match answer:
        case list():
            return [_written(one, arrays) for one in answer]
        case dict() if all(isinstance(v, torch.Tensor) for v in answer.values()):
            place = str(len(arrays))
            arrays |= {f"{place}.{key}": value.detach().cpu().contiguous() for key, value in answer.items()}
            return {"sums": place, "keys": list(answer)}
        case dict():
            return {"table": write_answer(answer)}
    raise TypeError(f"an answer of type {type(answer).__name__} cannot be written down")


def _answers(said: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    """The answers that :func:`_written` has written."""
    if isinstance(said, list):
        return [_answers(one, arrays) for one in said]
    if "table" in said:
        return parse_answer(said["table"])
    return {key: arrays[f"{said['sums']}.{key}"] for key in said["keys"]}
