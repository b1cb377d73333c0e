"""A party's own log as a file that does not grow without end: old parts are numbered, the oldest are removed.

The audit log is no such file: nothing of it is ever removed, see ``audit``.
"""

from __future__ import annotations

import os
from datetime import datetime
from logging import INFO, Formatter, LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any

from fedcomposite._faults import UserError

_LINE = 300  # characters of somebody else's text that are shown


def clean(line: object, most: int = _LINE) -> str:
    """Somebody else's text, fit to be printed: one short line without control characters."""
    text = str(line)[: 4 * most]
    printable = "".join(c if c.isprintable() else " " for c in text)
    joined = " ".join(printable.split())
    return joined if len(joined) <= most else joined[: most - 3] + "..."


class _Private(RotatingFileHandler):
    """A file that only its owner may read."""

    def _open(self) -> IO[Any]:  # type: ignore[override]
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8")


class Rotating:
    """Takes down one line per call, with date and time; ``keep`` older parts lie beside the file."""

    def __init__(self, path: Path, megabytes: float = 5.0, keep: int = 5) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handler = _Private(path, maxBytes=max(1, int(megabytes * 1e6)), backupCount=keep)
        except OSError as error:
            raise UserError(f"--log {path}: cannot be written ({error.strerror})") from None
        self._handler.setFormatter(Formatter("%(message)s"))

    def __call__(self, line: str) -> None:
        """Write a line with its time."""
        text = f"{datetime.now():%Y-%m-%d %H:%M:%S} {' '.join(line.splitlines())}"
        self._handler.handle(LogRecord("fedcomposite", INFO, "", 0, text, None, None))

    def close(self) -> None:
        """Let the file go."""
        self._handler.close()
