"""Records as lines of a file."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path

from fedcomposite._validation import validate
from fedcomposite.files import write_atomic
from fedcomposite.runtime.callbacks.base import Callback, View
from fedcomposite.runtime.history import Record


@dataclass(frozen=True)
class JsonLines(Callback):
    """One JSON object per record, appended as the run goes.

    A resumed run begins with the records of its checkpoint: the file is replaced by these as a whole, so that a crash
    leaves the old lines or the new.
    """

    path: str

    def __post_init__(self) -> None:
        validate(self)

    def begin(self, view: View) -> None:
        """Write the past, if there is one."""
        write_atomic(Path(self.path), "".join(map(self._line, view.history)).encode())

    def __call__(self, view: View) -> None:
        _append(Path(self.path), self._line(view.record))

    @staticmethod
    def _line(record: Record) -> str:
        return json.dumps(record) + "\n"


@dataclass(frozen=True)
class Csv(Callback):
    """A table with a row per record, appended as the run goes; its columns are those of the first record."""

    path: str

    def __post_init__(self) -> None:
        validate(self)

    def begin(self, view: View) -> None:
        """Write the past, if there is one."""
        history = view.history
        text = self._rows(history, history[0], header=True) if history else ""
        write_atomic(Path(self.path), text.encode())

    def __call__(self, view: View) -> None:
        history = view.history
        _append(Path(self.path), self._rows(history[-1:], history[0], header=len(history) == 1))

    @staticmethod
    def _rows(records: list[Record], first: Record, *, header: bool) -> str:
        text = io.StringIO()
        table = csv.DictWriter(text, list(first), extrasaction="ignore", lineterminator="\n")
        if header:
            table.writeheader()
        table.writerows(records)
        return text.getvalue()


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
