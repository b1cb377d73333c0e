"""Which rows were behind the answers that a site has given, for each of its data sets, over all jobs there ever were.

The sets of rows behind all answers divide the rows into parts: two rows are in one part if no answer tells them apart.
From sums over such sets somebody gets the sum over a part by adding and subtracting, so that every part must have
``min_count`` rows, whatever the jobs were that asked. The parts of a data set, the ways in which its values were read,
and the numbers that it is divided by lie in ``state/rows/DATA.json``.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcomposite import rng
from fedcomposite.federation.site.ledger import Ledger
from fedcomposite.federation.site.policy import DataRefusalError, RefusalError
from fedcomposite.files import write_atomic
from fedcomposite.problems import Batches

Ints = npt.NDArray[np.int64]
_BLOCKS = 20
_READINGS = 200  # ways of reading a data set that are kept apart
_BENT = 10  # sets of knots of one column
_OFFSETS = 4  # of a logarithm of one column
_LEVELS = 20  # of one column, which few have, and of which somebody learns that they are there
_ODD = 2  # of either, beyond which there are few values, or none


class KeptRows(NamedTuple):
    """Rows of a data set that samples are made of, where some are left out."""

    places: Ints
    of: int
    """Rows of the data set."""


class RowSets:
    """The parts of one data set, none of which may have fewer than ``least`` rows."""

    def __init__(self, folder: Path, data: str, least: int, ledger: Ledger) -> None:
        self._path, self._least, self._ledger = folder / "rows" / f"{data[:32]}.json", least, ledger
        self._told = set[bytes]()  # by this process: parts only become finer, so that these stay told

    def _read(self, rows: int) -> dict[str, Any]:
        try:
            content = self._path.read_bytes() if self._path.exists() else None
            self._ledger.check(f"rows/{self._path.name}", content)
            if content is None:
                raise FileNotFoundError
            found = json.loads(content)
            if found["rows"] != rows:
                raise ValueError
            kept = {"parts": list(found["parts"]), "readings": list(found["readings"])}
            return {"rows": rows, **kept, "constants": dict(found["constants"])}
        except FileNotFoundError:
            return {"rows": rows, "parts": _run_lengths(np.zeros(rows)), "readings": [], "constants": {}}
        except RefusalError:
            raise
        except (ValueError, KeyError, TypeError, OSError):
            raise RefusalError("its book of rows cannot be read; the site's people have to look at it") from None

    def _write(self, book: Mapping[str, Any]) -> None:
        put_book(self._ledger, self._path, json.dumps(book).encode())

    def tell(self, counts: npt.NDArray[Any]) -> None:
        """Take down an answer in which row i counts ``counts[i]`` times; refuse one that makes a part too small.

        A part that is small already (of a data set that is small itself) may stay as it is.
        """
        known = hashlib.sha256(np.ascontiguousarray(counts).data).digest()
        if known in self._told:
            return
        book = self._read(len(counts))
        before = _expanded(book["parts"])
        _, kinds = np.unique(counts, return_inverse=True)
        _, after, sizes = np.unique(
            before * (kinds.max(initial=0) + 1) + kinds, return_inverse=True, return_counts=True
        )
        if len(sizes) == before.max(initial=0) + 1:  # the parts are what they were
            self._told.add(known)
            return
        divided = sizes[after] != np.bincount(before)[before]
        if bool((divided & (sizes[after] < self._least)).any()):
            raise DataRefusalError(
                f"with what was answered before, this would tell of fewer than min_count = {self._least} rows"
            )
        self._write({**book, "parts": _run_lengths(after)})
        self._told.add(known)

    def fill(self, values: Mapping[str, float | str], rows: int) -> None:
        """Take down what the gaps of columns are filled with that few rows have; refuse another filling.

        The difference of two fillings is a column that is zero beside those rows.
        """
        if self._least <= 1 or not values:
            return
        book = self._read(rows)
        known = {name: book["constants"].get(f"fillings of {name!r}", [value])[0] for name, value in values.items()}
        if other := [name for name, value in values.items() if not _alike(known[name], value)]:
            raise DataRefusalError(
                f"gaps that fewer than min_count = {self._least} rows have are filled otherwise than in an earlier "
                "job: fill them with the same constant, or mend the site's file",
                f"{', '.join(other)}, filled with {', '.join(str(known[name]) for name in other)} before",
            )
        after = {f"fillings of {name!r}": [value] for name, value in known.items()}
        if any(book["constants"].get(name) != value for name, value in after.items()):
            self._write({**book, "constants": {**book["constants"], **after}})

    def bend(self, constants: Mapping[str, Sequence[float]], rows: int, odd: Sequence[str] = ()) -> None:
        """Take down the constants of functions that are not straight lines, by column; refuse too many of them.

        A sum of them as a function of its knot, or of what is added before a logarithm, has a kink or a pole at every
        patient's value: some sums are a description, very many are the values. Of those that are ``odd`` somebody
        learns on which side of them the least or the largest value is: that happens twice.
        """
        if self._least <= 1 or not constants:
            return
        book = self._read(rows)
        known = {name: list(book["constants"].get(name, [])) for name in constants}
        new = {name: list(given) for name, given in constants.items() if list(given) not in known[name]}
        for name in new:
            most = {"offsets": _OFFSETS, "levels": _LEVELS}.get(name.split()[0], _BENT)
            if len(known[name]) >= most:
                raise RefusalError(f"the {name} were chosen in {most} ways already, and more would tell its values")
            if len(book["constants"].get(f"odd {name}", [])) >= _ODD:
                raise RefusalError(f"some of the {name} lay beyond its values, or nearly, and more would tell these")
        if new:
            after = {name: [*known[name], given] for name, given in new.items()}
            after |= {
                f"odd {name}": [*book["constants"].get(f"odd {name}", []), new[name]] for name in new if name in odd
            }
            self._write({**book, "constants": {**book["constants"], **after}})

    def read_as(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take down how some columns are read, by numbers for their values; refuse one that differs for a few rows.

        Whoever says which values are missing, or what a level is called, changes these rows alone: the difference to
        an answer from before is about them.
        """
        book = self._read(len(next(iter(values.values()))))
        now = {name: _run_lengths(each) for name, each in values.items()}
        if now in book["readings"]:
            return
        if len(book["readings"]) >= _READINGS:
            raise RefusalError(f"its data set was read in {_READINGS} ways already")
        for other in book["readings"]:
            for name in now.keys() & other.keys():
                changed = int((_expanded(now[name]) != _expanded(other[name])).sum())
                if 0 < changed < self._least:
                    raise DataRefusalError(
                        f"fewer than min_count = {self._least} values of a column are read otherwise than in an "
                        "earlier job; mark values as missing, and name levels, in the site.toml"
                    )
        self._write({**book, "readings": [*book["readings"], now]})


class Cuts:
    """Sets of samples that sums in bins were told of: those below the ends of groups of bins.

    Moving an edge, or a model, past one patient makes two such sets that differ by that patient. So a set is told only
    if in each class it differs from every earlier one in no sample or in ``least``; they lie in ``state/rows/*.npy``.
    """

    def __init__(self, path: Path, least: int, ledger: Ledger) -> None:
        self._path, self._least, self._ledger = path, least, ledger

    def apart(self, places: Ints, classes: Ints, ends: list[int]) -> list[bool]:
        """Which of the sets of samples in bins up to some ends may be told; those are taken down."""
        width = -(-len(places) // 8)
        try:
            found = self._path.read_bytes() if self._path.exists() else None
            self._ledger.check(f"rows/{self._path.name}", found)
            known = np.zeros((0, width), np.uint8) if found is None else np.load(io.BytesIO(found), allow_pickle=False)
        except RefusalError:
            raise
        except (ValueError, OSError, EOFError):
            raise RefusalError("its book of rows cannot be read; the site's people have to look at it") from None
        kinds = [np.packbits(classes == one) for one in np.unique(classes)]
        sets = np.stack([np.packbits((places >= 0) & (places <= end)) for end in ends])
        told = []
        for one in sets:
            sizes = [_BITS[(known ^ one) & kind].sum(1) for kind in kinds]
            told.append(not any(bool(((size > 0) & (size < self._least)).any()) for size in sizes))
        after = np.unique(np.concatenate([known, sets[told]]), axis=0)
        if len(after) > _CUTS:
            raise DataRefusalError("its scores were told for so many models that more would single patients out")
        if len(after) > len(known):
            content = io.BytesIO()
            np.save(content, after)
            put_book(self._ledger, self._path, content.getvalue())
        return told


class Tables:
    """Names of what was told of some samples, as digests of tables of scores, over all jobs there ever were."""

    def __init__(self, path: Path, ledger: Ledger) -> None:
        self._path, self._ledger = path, ledger

    def known(self) -> list[str]:
        """Those that were taken down, in their order."""
        try:
            content = self._path.read_bytes() if self._path.exists() else None
            self._ledger.check(f"rows/{self._path.name}", content)
            return [] if content is None else list(json.loads(content))
        except RefusalError:
            raise
        except (ValueError, TypeError, OSError):
            raise RefusalError("its book of rows cannot be read; the site's people have to look at it") from None

    def tell(self, table: str, most: int, what: str) -> int:
        """Take a table down; refuse one more than ``most``. One that was told before is no further one.

        Returns its number; ``what`` they are is for the refusal.
        """
        known = self.known()
        if table in known:
            return known.index(table)
        if len(known) >= most:
            raise RefusalError(f"over this site's {what} = {most} of its data, in all jobs together")
        put_book(self._ledger, self._path, json.dumps([*known, table]).encode())
        return len(known)


def put_book(ledger: Ledger, path: Path, content: bytes) -> None:
    """Write a book that the ledger knows."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    ledger.vouch(f"rows/{path.name}", content)
    write_atomic(path, content)


_CUTS = 20_000
_BITS = np.array([bin(octet).count("1") for octet in range(256)], np.int64)


def _alike(one: float | str, other: float | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return math.isclose(one, other, rel_tol=1e-14)  # as a mean is in a secure sum and in a plain one


def _run_lengths(values: npt.NDArray[Any]) -> list[list[int]]:
    """Values and how often each is repeated."""
    whole = np.asarray(values, np.int64)
    starts = np.flatnonzero(np.diff(whole, prepend=whole[:1] - 1)) if len(whole) else np.zeros(0, np.int64)
    lengths = np.diff(starts, append=len(whole))
    return [whole[starts].tolist(), lengths.tolist()]


def _expanded(runs: list[list[int]]) -> Ints:
    made: Ints = np.repeat(np.asarray(runs[0], np.int64), np.asarray(runs[1], np.int64))
    return made


def small_blocks(secret: int, rows: int, least: int) -> Ints:
    """The small block of each row: a random division into blocks of at least ``least`` rows, or one of all."""
    place = np.random.Generator(np.random.Philox(key=secret)).permutation(rows)
    made: Ints = place % max(1, rows // max(1, least))
    return made


def blocks(secret: int, rows: int, least: int) -> Ints:
    """The block of each row: small blocks together, so that there are at most 20.

    Sums over many halves give the sum over each block. The larger blocks are, the less that is, also to somebody who
    knows much about the patients; and 20 are enough for folds, halves and bootstrap weights.
    """
    small = small_blocks(secret, rows, least)
    count = int(small.max(initial=0)) + 1
    made: Ints = small % max(1, count // -(-count // _BLOCKS))
    return made


def folds_of_blocks(secret: int, block: Ints, strata: Ints, folds: int) -> Ints:
    """The fold of each block: all have as many blocks, give or take one, and about as many of the larger class.

    Blocks are few and unlike, so that those which were dealt out like cards left folds of small sites without events.
    """
    sums = np.bincount(block, weights=strata)
    order = np.random.Generator(np.random.Philox(key=secret)).permutation(len(sums))
    have, made = np.zeros((2, folds)), np.zeros(len(sums), np.int64)
    for one in order[np.argsort(-sums[order], kind="stable")].tolist():
        fold = int(np.lexsort((have[1], have[0]))[0])
        made[one] = fold
        have[:, fold] += 1, sums[one]
    return made


@dataclass(frozen=True)
class BlockBatches(Batches):
    """Minibatches of whole blocks: a row is drawn, and all of its small block counts, as much as any other block.

    So a minibatch has the mean that it would have of rows, and no two of them differ by fewer than a block.
    """

    block: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # of each row
    least: int = 1
    repeats: bool = True
    """Whether rows are repeated so that all count alike, six times each or more. Otherwise a few are left out."""

    @cached_property
    def members(self) -> Ints:
        """The rows of each block, in lists of one length."""
        order = np.argsort(self.block, kind="stable")
        each = np.split(order, np.cumsum(np.bincount(self.block))[:-1])
        if not self.repeats:
            shortest = min(len(rows) for rows in each)
            return np.stack([rows[:shortest] for rows in each])
        length = math.lcm(*{len(rows) for rows in each})
        made: Ints = np.stack([np.tile(rows, length // len(rows)) for rows in each])
        return made

    def draw(self, ids: rng.Ints, sizes: rng.Ints, round: int, steps: range) -> rng.Ints:
        assert self.size is not None
        rule = rng.batches if self.sampling == "replacement" else rng.epochs
        drawn = rule(self.seed, ids, sizes, round, steps, -(-self.size // self.least)).astype(np.int64)
        return self.members[self.block[drawn]].reshape(*drawn.shape[:2], -1).astype(np.uint64)
