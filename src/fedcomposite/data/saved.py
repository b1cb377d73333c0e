"""Silos as a folder: a ``.npy`` file per array, which can be mapped into memory, and an index.

======================  =============================================================================================
``features.npy``        everyone's samples, one client after another
``targets.npy``         their targets
``weights.npy`` ...     what else there is by sample
``test-features.npy``   held-out samples, and so on
``silos.json``          where each client begins, names, and the SHA-256 of every array's bytes; written last
======================  =============================================================================================

Nothing in it is pickled: reading a folder runs no code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite.data.faults import DataError, path_of
from fedcomposite.data.mapped import MappedRows
from fedcomposite.data.sparse import Features, SparseRows
from fedcomposite.files import write_atomic

if TYPE_CHECKING:
    from fedcomposite.data.silos import Silos

Array = npt.NDArray[Any]

INDEX = "silos.json"
FORMAT = 1
_PIECE = 1 << 24  # bytes of a file that are copied at a time
_PARTS = ("validation", "test")


class ArrayFile:
    """A ``.npy`` file that is written row by row, and the digest of its bytes."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._dtype, self._shape, self._rows = dtype.newbyteorder("="), shape, 0
        self._digest = hashlib.sha256()
        try:
            self._file: BinaryIO = path.open("xb")
        except FileExistsError:
            raise DataError(f"{path} is there: another process writes this folder; give each its own") from None
        head = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, head)

    def write(self, rows: Array) -> None:
        """Append rows to the file, and to its checksum."""
        content = np.ascontiguousarray(rows, self._dtype).tobytes()
        self._digest.update(content)
        self._file.write(content)
        self._rows += len(rows)

    def close(self) -> dict[str, Any]:
        """What ``silos.json`` says of the file."""
        self._file.close()
        return {"dtype": self._dtype.str, "shape": list(self._shape), "sha256": self._digest.hexdigest()}


def new_folder(path: str | Path) -> Path:
    """An empty folder, made if it is not there; one with content is left alone."""
    folder = path_of(path, "folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} is there and not empty; give another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save(silos: Silos, path: str | Path) -> None:
    """See :meth:`fedcomposite.Silos.save`."""
    if silos.recipe is not None:
        raise DataError("save: these silos were made by a recipe, which a folder cannot carry; save the run instead")
    arrays: dict[str, Features | None] = {
        "features": silos.features, "targets": silos.targets, "weights": silos.weights,
        "margin_offsets": silos.margin_offsets,
    }  # fmt: skip
    for part, (X, y) in silos.held_out.items():
        arrays |= {f"{part}-features": X, f"{part}-targets": y, f"{part}-held_by": silos.held_by.get(part)}
        arrays[f"{part}-margin_offsets"] = silos.held_margin_offsets.get(part)
    there = {name: rows for name, rows in arrays.items() if rows is not None}
    if any(isinstance(rows, SparseRows) for rows in there.values()):
        raise DataError("save: sparse samples are kept in .svm files; make them dense with silos.dense() to save them")
    folder = new_folder(path)
    written = {name: _copied(folder / f"{name}.npy", rows) for name, rows in there.items()}
    write_index(folder, written, silos.offsets, silos.names, silos.feature_names, silos.ids)


def write_index(
    folder: Path,
    arrays: Mapping[str, Any],
    offsets: Iterable[int],
    names: Iterable[str],
    feature_names: Iterable[str],
    ids: Iterable[int] = (),
) -> None:
    """Write ``silos.json``, which makes a folder of arrays one of silos."""
    content = {
        "format": FORMAT, "offsets": list(offsets), "names": list(names), "feature_names": list(feature_names),
        "ids": list(ids), "arrays": dict(arrays),
    }  # fmt: skip
    write_atomic(folder / INDEX, json.dumps(content, indent=1).encode())


def _copied(path: Path, rows: Features) -> dict[str, Any]:
    """Write an array, piece by piece."""
    assert not isinstance(rows, SparseRows)
    sample = rows[:1].read() if isinstance(rows, MappedRows) else rows[:1]
    file = ArrayFile(path, sample.numpy().dtype, tuple(rows.shape))
    per = max(1, _PIECE // max(1, sample.nbytes))
    for a in range(0, len(rows), per):
        piece = rows[a : a + per]
        file.write((piece.read() if isinstance(piece, MappedRows) else piece).numpy())
    return file.close()


def read(path: str | Path, *, verify: bool) -> dict[str, Any]:
    """The fields of the silos in a folder; see :meth:`fedcomposite.Silos.open`."""
    folder = path_of(path, "folder")
    index = _index(folder)
    described = index["arrays"]
    fields: dict[str, Any] = {k: tuple(index[k]) for k in ("offsets", "names", "feature_names", "ids")}
    fields |= {"features": _mapped(folder, "features", described, verify), "held_by": {}, "held_margin_offsets": {}}
    for name in ("targets", "weights", "margin_offsets"):
        if name in described:
            fields[name] = _loaded(folder, name, described, verify)
    for part in _PARTS:
        if f"{part}-features" not in described:
            continue
        fields[part] = (
            _mapped(folder, f"{part}-features", described, verify),
            _loaded(folder, f"{part}-targets", described, verify),
        )
        for name in ("held_by", "margin_offsets"):
            if f"{part}-{name}" in described:
                kept = fields["held_by" if name == "held_by" else "held_margin_offsets"]
                kept[part] = _loaded(folder, f"{part}-{name}", described, verify)
    return fields


def _index(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / INDEX).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{folder} has no {INDEX}: no silos were saved there, or not to the end") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / INDEX} cannot be read ({str(error).splitlines()[0]})") from None
    keys = {"offsets", "names", "feature_names", "ids", "arrays"}
    if not isinstance(content, dict) or content.get("format") != FORMAT or not keys <= set(content):
        raise DataError(f"{folder / INDEX} is not of the kind that this version writes (format {FORMAT})")
    if not {"features", "targets"} <= set(content["arrays"]):
        raise DataError(f"{folder / INDEX} names no features or no targets; write the folder again")
    return content


def _mapped(folder: Path, name: str, described: Mapping[str, Any], verify: bool) -> MappedRows:
    """Rows of an array's file, whose kind and size are as they were when it was written."""
    path = folder / f"{name}.npy"
    rows = MappedRows(path.absolute(), str(described[name]["sha256"]))
    try:
        found = rows.opened
    except FileNotFoundError:
        raise DataError(f"{path} is missing; write the folder again") from None
    except (OSError, ValueError) as error:
        why = "" if "pickle" in str(error) else f" ({str(error).splitlines()[0]})"  # NumPy's advice is to unpickle it
        raise DataError(f"{path} is not an array of numbers{why}; write the folder again") from None
    told = described[name]["dtype"], tuple(described[name]["shape"])
    if (found.dtype.str, found.shape) != told:
        raise DataError(f"{path} holds {found.dtype.str} {found.shape}, {INDEX} says {told[0]} {told[1]}")
    if verify:
        rows.verify()
    return rows


def _loaded(folder: Path, name: str, described: Mapping[str, Any], verify: bool) -> Tensor:
    rows: Tensor = _mapped(folder, name, described, verify).read()
    return rows.clone(memory_format=torch.contiguous_format)
