"""How the data of a reproduction are made: the runs of its experiment, or cells of its own, kept on disk."""

from __future__ import annotations

import io
import multiprocessing
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedcomposite.analysis import solve
from fedcomposite.experiments import Sweep, comparison, grids
from fedcomposite.experiments.comparison import Entry
from fedcomposite.experiments.workers import problem_of
from fedcomposite.files import write_atomic
from fedcomposite.papers.base import RECORD, Paper, digest_of, read_state, split

Say = Callable[[str], None]
_POINTS = 60
_FIELDS = ("local_steps", "step", "server_step")


@dataclass(frozen=True)
class Study:
    """One reproduction under way."""

    paper: Paper
    folder: Path
    content: Mapping[str, Any]
    """The experiment, in its reduced form or in full."""
    device: str = "cpu"
    jobs: int = 1
    partial: bool = False
    """Take the runs that are done, and do none."""
    say: Say = print

    @property
    def settings(self) -> dict[str, Any]:
        """The table ``[settings]``."""
        return split(self.content)[1]

    @property
    def runs(self) -> Path:
        """Where the runs lie."""
        return self.folder / "runs"

    def sweep(self, part: str = "", **changes: Any) -> pd.DataFrame:
        """Do the experiment's runs; one row per record, with the values of the grids, method, class and seed.

        Where ``[paper] reference = true``, ``suboptimality`` is the objective minus that of :func:`fedcomposite.solve`
        at 1e-12, a value for each problem, and ``reference`` that value.

        Parameters
        ----------
        part : str
            A name, where a reproduction has several sweeps.
        **changes
            Sections that replace those of the TOML.
        """
        content = {**split(self.content)[0], **changes}
        gpu = {"mode": "record"} if self.device.startswith("cuda") else {}  # many short runs: compiling does not pay
        content["run"] = {**gpu, **content["run"], "device": self.device}
        sweep, place = Sweep(content, self.paper.name), self.runs / part if part else self.runs
        if self.partial:
            entries = comparison.finished(sweep, place)
        else:
            sweep.check()
            entries = comparison.carry_out(sweep, place, jobs=self.jobs, begin=self._begin, draw=False)
        found = pd.concat([self._rows(e) for e in entries], ignore_index=True) if entries else pd.DataFrame()
        return found if not part or not len(found) else found.assign(part=part, run=f"{part}: " + found["run"])

    def each(
        self,
        function: Callable[[dict[str, Any]], pd.DataFrame],
        cells: Sequence[dict[str, Any]],
        *,
        alone: bool = False,
    ) -> pd.DataFrame:
        """Rows of ``function(cell)`` for every cell, with its numbers and words; a cell that is done is not repeated.

        The function is one of a module, so that it can be called in another process. ``alone`` does one cell at a time,
        whatever the number of jobs, as clocks need it.
        """
        found = self.measured(function, cells, alone=alone)
        done = [
            found[k].assign(**{name: v for name, v in cell.items() if not isinstance(v, Mapping | list)})
            for cell in cells
            if (k := self.key(function, cell)) in found
        ]
        return pd.concat(done, ignore_index=True) if done else pd.DataFrame()

    def measured(
        self,
        function: Callable[[dict[str, Any]], pd.DataFrame],
        cells: Sequence[dict[str, Any]],
        *,
        alone: bool = False,
    ) -> dict[str, pd.DataFrame]:
        """The rows of :meth:`each` as they are, by the :meth:`key` of their cell."""
        places = {self.key(function, cell): cell for cell in cells}
        todo = {k: c for k, c in places.items() if not self._cell(k).is_file()}
        if not self.partial:
            self.runs.mkdir(parents=True, exist_ok=True)
            if self.jobs > 1 and len(todo) > 1 and not alone:
                context = multiprocessing.get_context("spawn")
                with ProcessPoolExecutor(self.jobs, mp_context=context, initializer=_one_thread) as pool:
                    made = {pool.submit(function, cell): key for key, cell in todo.items()}
                    for done in as_completed(made):
                        self._keep(made[done], done.result(), todo[made[done]])
            else:
                for key, cell in todo.items():
                    self._keep(key, function(cell), cell)
        return {k: pd.read_csv(self._cell(k)) for k in places if self._cell(k).is_file()}

    @staticmethod
    def key(function: Callable[[dict[str, Any]], pd.DataFrame], cell: Mapping[str, Any]) -> str:
        """What a cell's rows are kept under, whatever the device that made them."""
        return digest_of({"cell": {k: v for k, v in cell.items() if k != "device"}, "of": function.__qualname__})

    def note(self, name: str, table: pd.DataFrame) -> None:
        """Keep a table beside data.csv, such as the trials of a tuning."""
        if not self.partial:
            write_atomic(self.folder / f"{name}.csv", table.to_csv(index=False, float_format="%.7g").encode())

    def noted(self, name: str) -> pd.DataFrame:
        """A table that :meth:`note` kept in an earlier call with these settings; empty if there is none."""
        file = self.folder / f"{name}.csv"
        same = read_state(self.folder).get("experiment") == digest_of(self.content)
        return pd.read_csv(file) if same and file.is_file() else pd.DataFrame()

    def has(self, function: Callable[[dict[str, Any]], pd.DataFrame], cell: Mapping[str, Any]) -> bool:
        """Whether a cell's rows are there."""
        return self._cell(self.key(function, cell)).is_file()

    def _cell(self, key: str) -> Path:
        return self.runs / f"cell-{key}.csv"

    def _keep(self, key: str, rows: pd.DataFrame, cell: Mapping[str, Any]) -> None:
        write_atomic(self._cell(key), rows.to_csv(index=False).encode())
        self.say(f"{self.paper.name}: {', '.join(f'{k}={grids.shown(v)}' for k, v in cell.items())}")

    def _begin(self, label: str, seed: int) -> None:
        self.say(f"{self.paper.name}: {label}, seed {seed}")

    def _rows(self, entry: Entry) -> pd.DataFrame:
        """The records of a run, thinned evenly to what a figure can show."""
        (spec,) = entry.config.specs
        own = entry.config.labels[0]
        table = pd.DataFrame(entry.folder.history())
        if self.paper.card.get("reference") and not self.partial:
            table["reference"] = self._reference(entry)
            table["suboptimality"] = table["objective"] - table["reference"]
        more = tuple(self.paper.card.get("columns", ()))
        kept = [c for c in (*RECORD, "reference", *more) if c in table]
        most = int(self.paper.card.get("points", _POINTS))
        if len(table) > most:
            table = table.iloc[np.unique(np.linspace(0, len(table) - 1, most).round().astype(int))]
        resolved = tomllib.loads(entry.folder.config.read_text(encoding="utf-8"))["algorithm"]  # steps as numbers
        head: dict[str, Any] = {k: resolved[k] for k in _FIELDS if isinstance(resolved.get(k), int | float)}
        head |= {k: grids.shown(v) if isinstance(v, Mapping | list) else v for k, v in entry.point.items()}
        head["method"] = re.sub(r" \([^()]*=[^()]*\)$", "", own) if "label" in spec else entry.config.methods[own]
        head |= {"class": entry.config.methods[own], "seed": entry.seed}
        head |= {"status": entry.folder.summary()["status"], "run": f"{entry.label}, seed {entry.seed}"}
        return table[kept].assign(**{k: v for k, v in head.items() if k not in kept})

    def _reference(self, entry: Entry) -> float:
        """The optimal value of a run's problem, kept on disk."""
        sections = {"seed", "data", "partition", "problem", "regularizer"}
        place = self.runs / f"reference-{digest_of(entry.config.model_dump(include=sections))}.txt"
        if not place.is_file():
            problem = problem_of(entry.config)
            run = solve(problem, tolerance=1e-12)
            write_atomic(place, f"{problem.objective(run.solution)!r}\n".encode())
        return float(io.StringIO(place.read_text()).read())


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
