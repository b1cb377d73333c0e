"""Patients who are in a table twice: values of an identifier, or whole rows, that occur again."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcomposite.data.sheets import Sheet

_ROWS = 20  # fewer tell nothing about what a column is
_NAMED = re.compile(
    r"(patient|subject|person|case|study|record|pat|subj)[\W_]*(id|nr|no|num|number|key|code)$|^(id|mrn|pid|uid|key)$"
    r"|[\W_](id|mrn|uid)$",
    re.IGNORECASE,
)
_FILLED = 0.9  # of the whole numbers between the ends; draws that fill so many have most values more than once
_CHANCE = 0.5  # pairs of equal rows that columns without relation would have


def of_identifier(sheet: Sheet, name: str, common: int) -> int:
    """How many values of a column occur again, where it identifies rows; 0 where it does not.

    It does if most of its values are different, none is ``common`` (so many rows have it), and they are texts, or whole
    numbers that are nearly in a row or have the name of an identifier. A measurement has equal values by chance.
    """
    values = sheet[name][~sheet.missing(name)]
    if len(values) < _ROWS:
        return 0
    plain = values.dtype == np.float64
    found, counts = np.unique(values if plain else values.astype(np.str_), return_counts=True)
    if len(found) < len(values) / 2 or counts.max() >= max(common, 3):
        return 0
    if plain:
        whole = bool((found == np.round(found)).all())
        in_a_row = found[-1] - found[0] < len(found) / _FILLED
        if not (whole and (in_a_row or _NAMED.search(name))):
            return 0
    return len(values) - len(found)


def of_rows(sheet: Sheet) -> int:
    """How many rows are another one entirely, where chance does not explain it; 0 where it does.

    Chance is what columns that have nothing to do with each other would give: in a table of a few categories equal rows
    are nothing odd.
    """
    if sheet.rows < _ROWS:
        return 0
    codes = np.stack([_codes(sheet[name], sheet.missing(name)) for name in sheet.columns], axis=1)
    again = sheet.rows - len(np.unique(codes, axis=0))
    agreeing = [float((np.bincount(column) / sheet.rows) @ (np.bincount(column) / sheet.rows)) for column in codes.T]
    expected = sheet.rows * (sheet.rows - 1) / 2 * float(np.prod([a - 1 / sheet.rows for a in agreeing]))
    return again if expected < _CHANCE else 0


def _codes(values: npt.NDArray[Any], missing: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """A number for each different value, 0 for a gap."""
    out = np.zeros(len(values), np.int64)
    there = values[~missing]
    listed = there if there.dtype == np.float64 else there.astype(np.str_)
    out[~missing] = 1 + np.unique(listed, return_inverse=True)[1]
    return out
