"""Which columns were behind the answers about a data set: no combination of them may be that of a few rows alone.

Sums of products tell, for every combination v of columns, the sum of v_i x_i over the rows. Where v is zero but for a
few rows, that is about these: an intercept less all levels of a category but one, a level less its product with another
one, a column less itself with gaps filled otherwise. An asker chooses columns in one job after another, so that a basis
of all there ever were lies in ``state/rows/DATA.columns.npy``.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcomposite.federation.site.ledger import Ledger
from fedcomposite.federation.site.policy import DataRefusalError, RefusalError
from fedcomposite.federation.site.row_sets import KeptRows, put_book

Floats = npt.NDArray[np.float64]
_NEARLY = 0.99  # of a combination's squares that few rows have: the others hide nothing then
_MOST = 0.9  # of them that one row has: what the others add has a third of a column's deviation then
_FAR = 5.0  # deviations of a leverage, as normal columns have it
_FEW = (
    "a level that few have (of those with an outcome, where it is in products) and the others are compared with, or a "
    "product of levels"
)
_HEAVY = (
    "take the logarithm of a column with a value far from all others, or knots of a spline that lie further from its "
    "ends"
)
_NEW = 1e-10  # of a column's norm: what is left of it beside others; rounding leaves less


class ColumnSpans:
    """The columns of one data set, no combination of which may be that of fewer than ``least`` rows."""

    def __init__(
        self, folder: Path, data: str, least: int, ledger: Ledger, kind: str = "columns", nearly: float = _NEARLY
    ) -> None:
        self._nearly, self._heavy = nearly, kind == "columns"
        self._path, self._least, self._ledger = folder / "rows" / f"{data[:32]}.{kind}.npy", least, ledger
        self._told, self._refused = set[bytes](), dict[bytes, DataRefusalError]()

    def tell(self, columns: npt.NDArray[Any], kept: KeptRows | None) -> None:
        """Take down the columns of an answer; refuse those that make a combination of few rows."""
        if self._least <= 1:
            return
        every = np.asarray(columns, np.float64)
        if kept is not None:
            every = np.zeros((kept.of, every.shape[1]))
            every[kept.places] = columns
        known = hashlib.sha256(np.ascontiguousarray(every).data).digest()
        if known in self._told:
            return
        if known in self._refused:  # for good: the basis only grows
            raise self._refused[known].with_traceback(None)
        before = self._read(len(every))
        after = spanned(before, every)
        if after.shape[1] > before.shape[1]:
            if few := few_rows(after, self._least - 1, self._nearly):
                self._refuse(known, few, f"be that of fewer than min_count = {self._least} rows alone: {_FEW}")
            if self._heavy and (one := heaviest(after)):
                self._refuse(known, one, f"have most of its weight on one row: {_HEAVY}")
            content = io.BytesIO()
            np.save(content, after)
            put_book(self._ledger, self._path, content.getvalue())
        self._told.add(known)

    def _refuse(self, known: bytes, rows: list[int], what: str) -> None:
        said = f"with what was answered before, a combination of columns would {what}"
        self._refused[known] = DataRefusalError(said, f"rows {', '.join(str(i + 1) for i in sorted(rows))}")
        raise self._refused[known]

    def _read(self, rows: int) -> Floats:
        try:
            content = self._path.read_bytes() if self._path.exists() else None
            self._ledger.check(f"rows/{self._path.name}", content)
            if content is None:
                return np.full((rows, 1), rows**-0.5)
            found: Floats = np.load(io.BytesIO(content), allow_pickle=False)
            if len(found) != rows:
                raise ValueError
        except RefusalError:
            raise
        except (ValueError, OSError, EOFError):
            raise RefusalError("its book of columns cannot be read; the site's people have to look at it") from None
        return found


def spanned(basis: Floats, columns: Floats) -> Floats:
    """An orthonormal basis of more columns, which begins with the given one."""
    norms = np.linalg.norm(columns, axis=0)
    left = columns[:, norms > 0] / norms[norms > 0]
    for _ in range(2):  # once leaves what rounding leaves of the first time
        left = left - basis @ (basis.T @ left)
    new, sizes, _ = np.linalg.svd(left, full_matrices=False)
    return np.concatenate([basis, new[:, sizes > _NEW]], axis=1)


def heaviest(basis: Floats) -> list[int]:
    """The row that has most of the squares of some combination, and more than chance gives any by so many columns.

    With a share s of the squares the sum of v_j times a column has the row's value and, of the others, sqrt(1 / s - 1)
    deviations of the column.
    """
    leverage, own = np.einsum("ij,ij->i", basis, basis), basis.shape[1] / len(basis)
    chance = own + _FAR * (2 * own * max(0.0, 1 - own) / len(basis)) ** 0.5
    worst = int(leverage.argmax())
    return [worst] if leverage[worst] >= max(_MOST, chance) else []


def few_rows(basis: Floats, most: int, nearly: float = _NEARLY) -> list[int]:
    """At most ``most`` rows beside which some combination of the columns is zero, or nearly; none if there are none.

    If v is zero but on k rows, it is its own projection P v. So the largest of its entries, v_i, is at most the sum of
    the |P_ij| of these rows times it: they add up to 1 or more, and the leverage P_ii, which is the sum of the squares
    of all P_ij, is at least 1 / k. Without that row the same holds for the k - 1 others. So all such sets are found by
    going through the rows of which that is so, and these are few.

    Examples
    --------
    >>> basis = np.linalg.qr(np.c_[np.ones(9), np.arange(9) > 1])[0]
    >>> few_rows(basis, 1), sorted(few_rows(basis, 2))
    ([], [0, 1])
    """
    seen = set[frozenset[int]]()

    def among(left: Floats, out: frozenset[int]) -> list[int]:
        leverage = np.einsum("ij,ij->i", left, left)
        if leverage.max(initial=0.0) >= nearly:
            return [*out, int(leverage.argmax())]
        others = min(most - len(out), len(left)) - 1
        if others <= 0:
            return []
        for i in np.flatnonzero(leverage >= nearly**2 / (others + 1)).tolist():
            without, h = out | {i}, leverage[i]
            if without in seen:
                continue
            seen.add(without)
            row, with_others = left[i], np.abs(left @ left[i])
            with_others[i] = 0.0
            if h + np.partition(with_others, -others)[-others:].sum() < nearly:
                continue
            rest = left + ((1 - h) ** -0.5 - 1) / h * np.outer(left @ row, row)  # orthonormal without the row
            rest[i] = 0.0
            if found := among(rest, without):
                return found
        return []

    return among(basis, frozenset())
