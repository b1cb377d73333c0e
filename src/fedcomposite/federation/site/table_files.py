"""A site's tables: the file that experiments' recipes prepare, and the file of patients that a model is to score.

What is scored is written at the site, beside the columns of its file; nobody else sees it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedcomposite.data import DataError, FittedRecipe, Recipe
from fedcomposite.data.databases import StoredTable, shown
from fedcomposite.data.faults import refuse
from fedcomposite.data.sheets import Sheet, parts_of
from fedcomposite.data.spec import each_name
from fedcomposite.data.steps import Local, unknown
from fedcomposite.files import write_atomic
from fedcomposite.problems.losses import Loss
from fedcomposite.problems.predictions import beside, predicted

Floats = npt.NDArray[np.float64]
Marks = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TableFile:
    """A site's file, and what the site itself does to it."""

    name: str
    path: Path | StoredTable
    """Where it lies."""
    local: Local = field(default_factory=Local)
    """Names, levels, units and dropped columns of site.toml."""
    style: Mapping[str, Any] | None = None
    weight: str | None = None
    offset: str | None = None
    """Columns, by their common names, of what samples count and of what is added to their margins."""

    def sheet(self, recipe: Recipe) -> Sheet:
        """The table, read as the recipe's categories need it; refused if site.toml names columns that it has not."""
        file = self.read(recipe)
        made = self.local.apply(file)
        faults = [
            fault
            for common, own in self.local.rename.items()
            for fault in unknown(f"{self.name}: [data.columns] {common} = {own!r}", [own], file.columns)
        ]
        faults += unknown(f"{self.name}: drop", self.local.drop, file.columns)
        faults += unknown(f"{self.name}: units", self.local.units, made.columns)
        refuse([*faults, *unknown(f"{self.name}: recode", self.local.recode, made.columns)])
        return made

    def check(self) -> None:
        """Refuse columns that the file has not, before anything is begun with it.

        A file that cannot be read until a recipe says how is left for then.
        """
        try:
            self.read(Recipe())
        except DataError:
            return
        self.sheet(Recipe())

    def read(self, recipe: Recipe) -> Sheet:
        """The table as the file has it."""
        text = each_name([*recipe.one_hot_columns, *self.local.recode], self.local.rename)
        if isinstance(self.path, StoredTable):
            (made,) = recipe.sheets([self.path.frame], names=[self.name], text=text)
        else:
            (made,) = recipe.sheets([self.path], names=[self.name], text=text, **(self.style or {}))
        return made

    def rows(self) -> list[bytes]:
        """Its rows, in a form in which equal ones are equal: lines of a text, otherwise what their cells are."""
        if isinstance(self.path, StoredTable):
            return self.path.frame.to_csv(index=False).encode().splitlines()
        content = b"\n".join(part.read_bytes() for part in self._parts(self.path))
        if b"\0" not in content:
            return content.splitlines()
        sheet = self.read(Recipe())
        return [repr(cells).encode() for cells in zip(*(sheet.columns[name] for name in sheet.columns), strict=True)]

    @property
    def where(self) -> str:
        """How messages name it."""
        return shown(self.path.database) if isinstance(self.path, StoredTable) else str(self.path)

    @property
    def digest(self) -> str:
        """Of the file, or of the rows."""
        if isinstance(self.path, StoredTable):
            return hashlib.sha256(self.path.frame.to_csv(index=False).encode()).hexdigest()
        return hashlib.sha256(b"".join(part.read_bytes() for part in self._parts(self.path))).hexdigest()

    @staticmethod
    def _parts(path: Path) -> list[Path]:
        return parts_of(path) if path.is_dir() else [path]


def reading(file: Sheet, local: Local) -> dict[str, Marks]:
    """What somebody's names of levels and marks of absence change in each column: 0 where a value stays as it is."""
    made = local.model_copy(update={"units": {}, "drop": []}).apply(file)
    common = {own: name for name, own in local.rename.items()}
    found: dict[str, Marks] = {}
    for own in file.columns:
        name = common.get(own, own)
        marked = (made.missing(name) & ~file.missing(own)).astype(np.int64)
        if name in local.recode:
            before, after = file.texts(own), made.texts(name)
            renamed = np.array([a is not None and a != b for a, b in zip(after, before, strict=True)], bool)
            marked = np.where(renamed, marks_of(after.tolist()), marked)
        found[own] = marked
    return found


def marks_of(values: Sequence[Any]) -> Marks:
    """A number for each value, the same for equal ones; not 0 or 1."""
    known = {value: zlib.crc32(repr(value).encode()) + 2 for value in set(values)}
    return np.array([known[value] for value in values], np.int64)


@dataclass(frozen=True)
class Patients:
    """Rows to be scored."""

    file: Sheet
    """As the site has them."""
    X: Floats
    outcomes: Floats
    """Targets, NaN where there is none; of times to an event a row for each."""
    offset: Floats | None

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """The rows whose outcome is known."""
        return np.asarray(~np.isnan(self.outcomes.reshape(len(self.outcomes), -1)).any(1))


@dataclass(frozen=True)
class Newcomers:
    """The patients that a site lets models score: those of ``[data] new``, or of its own file."""

    source: TableFile
    folder: Path
    """Where scored files are written."""
    target: str | None = None
    """The column of outcomes, where no recipe says it."""
    offset: str | None = None
    times: tuple[str, ...] = ()
    """The columns of times, and if there is one of entries, where no recipe says them."""

    def patients(self, learned: FittedRecipe | None, names: Sequence[str]) -> Patients:
        """The rows with the features of a model; every row, also one without an outcome."""
        recipe = Recipe() if learned is None else Recipe(**learned.recipe.model_dump())
        file = self.source.read(recipe)
        sheet = self.source.local.apply(file)
        if learned is None:
            X = np.stack([sheet.numbers(name) for name in names], axis=1)
            if gaps := int(np.isnan(X).any(1).sum()):
                raise DataError(f"{self.source.where}: {gaps} row(s) with gaps, which a recipe would fill")
            y = self._outcomes(sheet)
        else:
            X, y = learned.all_rows(sheet)
            X = X[:, [learned.features.index(name) for name in names]]
        outcomes = np.full(len(X), np.nan) if y is None else y
        return Patients(file, X, outcomes, None if self.offset is None else sheet.numbers(self.offset))

    def _outcomes(self, sheet: Sheet) -> Floats | None:
        if self.target is None or not {self.target, *self.times} <= set(sheet.columns):
            return None
        event, times = sheet.numbers(self.target), [sheet.numbers(name) for name in self.times]
        return np.stack([times[0], event, *times[1:]], axis=1) if times else event

    def write(
        self,
        job: str,
        patients: Patients,
        x: torch.Tensor,
        bias: bool,
        loss: Loss,
        threshold: float,
        hazard: float | None = None,
    ) -> Path:
        """The file with margins and predictions, by the baseline's ``hazard``; for the site's own people."""
        weights, intercept = x[: len(x) - bias], float(x[-1]) if bias else 0.0
        margins = torch.from_numpy(patients.X) @ weights + intercept
        if patients.offset is not None:
            margins = margins + torch.from_numpy(patients.offset)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = self.folder / f"{job}.csv"
        table = beside(patients.file.columns, predicted(margins, loss, threshold, hazard))
        write_atomic(made, table.to_csv(index=False).encode())
        return made

    def at(self, path: Path) -> Newcomers:
        """The same with another file."""
        source = self.source
        style = {"missing": ["?"]} if isinstance(source.path, StoredTable) else source.style
        return dataclasses.replace(self, source=dataclasses.replace(source, path=path, style=style))
