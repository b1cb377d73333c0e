"""Delimited text: from the bytes of a CSV file to a header and rows of cells.

The encoding is UTF-8, or what a byte order mark says; the separator is found from the header; quotes are checked.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedcomposite.data.faults import DataError, DataWarning, stop

SEPARATORS = (",", ";", "\t", "|")
_SAMPLE = 1 << 16  # characters that decide between separators
_DOTTED = re.compile(r'(?<![^;\n"])[+-]?\d+\.\d+(?![^;\n"])', re.ASCII)  # a whole cell between semicolons
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}", re.ASCII)
_DIGITS = b"0123456789+-.eE\n"
_PANDAS = tuple(map(int, pd.__version__.split(".")[:2]))
_NEAREST: dict[str, Any] = {"float_precision": "round_trip"} if _PANDAS < (3, 1) else {}  # since then the only way
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def decode(raw: bytes, source: str, encoding: str | None = None, fallback: str | None = None) -> str:
    """The text of a file, unpacked if it was packed with gzip; ``fallback`` is for what is not UTF-8."""
    if raw.startswith(b"\x1f\x8b"):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(source, f"damaged gzip: {error}", "pack it again") from None
    if raw.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise _unreadable(source, "it is a workbook or an archive", "export the table as CSV")
    marked = next((name for mark, name in _MARKS if raw.startswith(mark)), "utf-8")
    remedy = "save it as UTF-8 or give its encoding, such as 'cp1252'"
    try:
        text = raw.decode(encoding or marked).removeprefix("\ufeff")
    except LookupError:
        raise _unreadable(source, f"encoding = {encoding!r} is not known", "try 'cp1252' or 'utf-16'") from None
    except UnicodeError as error:
        if fallback is not None and encoding is None:
            message = f"{source}: not {marked} text, so it is read as {fallback}; give its encoding if that is wrong"
            warnings.warn(message, DataWarning, stacklevel=6)
            return decode(raw, source, fallback)
        start = error.start if isinstance(error, UnicodeDecodeError) else 0
        line = raw.count(b"\n", 0, start) + 1
        raise _unreadable(source, f"line {line} is not {encoding or marked} text", remedy) from None
    if "\0" in text:
        raise _unreadable(source, "it has NUL characters", remedy)
    if not text.strip():
        raise _unreadable(source, "it is empty", "give it a header and rows")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _unreadable(source: str, why: str, remedy: str) -> DataError:
    return stop(source, f"not a readable CSV file ({why})", remedy)


def separator(text: str, source: str) -> str:
    """The separator of a file: the one in its header, by which the rows have as many fields as the header."""
    sample = text[:_SAMPLE]
    fits, able = [], []
    for mark in SEPARATORS:
        reader = csv.reader(io.StringIO(sample), delimiter=mark, skipinitialspace=True)
        rows = [row for row in itertools.islice(reader, 100) if row]
        if len(sample) < len(text) and len(rows) > 1 and len(rows) < 100:
            rows.pop()  # cut in the middle
        if len(rows[0]) > 1:
            able.append(mark)
            if all(len(row) == len(rows[0]) for row in rows):
                fits.append(mark)
    if len(able) < 2:
        return able[0] if able else ","
    if len(fits) != 1:
        both = " and ".join(map(repr, able))
        raise stop(source, f"the separator is unclear, the header has {both}", "say separator = ...")
    return fits[0]


def rows(text: str, mark: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, each with the line it starts in."""
    reader = csv.reader(io.StringIO(text), delimiter=mark, skipinitialspace=True, strict=True)
    start = 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            why = f"{error}, in the row that starts in line {start}"
            raise _unreadable(source, why, "close every quote, and double one inside a quoted field") from None
        if row is None:
            return
        if len(row) > 1 or any(cell.strip() for cell in row):
            yield start, row
        start = reader.line_num + 1


def thousands(text: str) -> str | None:
    """A number such as 1.234, if all with a point are such: between semicolons, that may be a thousand."""
    first = None
    for found in _DOTTED.finditer(text):
        if _GROUPED.fullmatch(found[0]) is None:
            return None
        first = first or found[0]
    return first


def plain_numbers(text: str, mark: str, header: Sequence[str], positions: Sequence[int]) -> npt.NDArray[Any] | None:
    """The named columns of a file that holds a number in every cell and nothing else, ``(rows, columns)``; else None.

    Most files are such. This is fast, and gives the same numbers as reading cell by cell (each the float64 nearest to
    what is written), which finds out what the matter is with all others.
    """
    first, _, body = text.partition("\n")
    raw = body.encode()
    if mark not in SEPARATORS or not body.isascii() or raw.translate(None, _DIGITS + mark.encode()):
        return None
    if next(csv.reader([first], delimiter=mark, skipinitialspace=True), None) != header:
        return None  # blank lines before it, or a name of several lines
    codes = np.frombuffer(raw.rstrip(b"\n") + b"\n", np.uint8)
    ends, marks = np.flatnonzero(codes == ord("\n")), np.flatnonzero(codes == ord(mark))
    fields = np.diff(np.searchsorted(marks, ends), prepend=0) + 1
    if bool((fields != len(header)).any()) or len(header) < 2:
        return None
    try:
        frame = pd.read_csv(
            io.BytesIO(raw),
            sep=mark,
            header=None,
            usecols=list(positions),
            dtype=np.float64,
            na_filter=False,
            **_NEAREST,
        )
    except (ValueError, pd.errors.ParserError):
        return None
    return frame.to_numpy() if len(frame) == len(ends) else None
