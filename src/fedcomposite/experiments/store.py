"""Run folders: what a run leaves on disk, and how it is read back.

=====================  =====================================================================================
config.toml            the experiment, with every choice resolved
history.jsonl          one record per line, appended as the run goes
checkpoint.safetensors the state to resume from
model.safetensors      the solution: tensor ``x``, a network's ``buffers``; coordinate names or layout in the metadata
coefficients.csv       the nonzero coefficients by name (linear models)
summary.json           status, last record, versions
plot.png               the curves
=====================  =====================================================================================
"""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fedcomposite._version import __version__
from fedcomposite.exporting import serialise
from fedcomposite.problems import Problem
from fedcomposite.runtime.checkpoint import write_atomic
from fedcomposite.runtime.history import Record, Run


class StoreError(ValueError):
    """A run folder that cannot be used, and why."""


class RunFolder:
    """One run on disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def config(self) -> Path:
        """The resolved experiment."""
        return self.path / "config.toml"

    @property
    def checkpoint(self) -> Path:
        """The state to resume from."""
        return self.path / "checkpoint.safetensors"

    @property
    def finished(self) -> bool:
        """Whether the run came to an end of its own (also by divergence)."""
        try:
            return bool(self.summary()["status"] != "interrupted")
        except StoreError:
            return False

    def create(self, overwrite: bool = False) -> None:
        """Make the folder; refuse one that holds something, unless told to overwrite a run."""
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path}: is a file; give another folder with --out")
        if self.path.is_dir() and any(self.path.iterdir()):
            if not overwrite:
                raise StoreError(f"{self.path}: already holds files; use --resume, --overwrite or another --out")
            if not self.config.exists():
                raise StoreError(f"{self.path}: is not a run folder (no config.toml), so it is not overwritten")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be created ({error.strerror})") from None
        for pattern in ("history.jsonl", "checkpoint.safetensors*", "summary.json", "model.safetensors", "plot.png"):
            for old in self.path.glob(pattern):
                old.unlink()

    def history(self) -> list[Record]:
        """The records so far; a last line cut short by a crash is left out."""
        file = self.path / "history.jsonl"
        if not file.is_file():
            raise StoreError(f"{self.path}: no history.jsonl, so this is not a run folder")
        records = []
        lines = file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            try:
                records.append(Record(json.loads(line)))
            except json.JSONDecodeError:
                if number < len(lines):
                    raise StoreError(f"{file}: line {number} is not JSON; the file is damaged") from None
        if not records:
            raise StoreError(f"{file}: no records yet")
        return records

    def summary(self) -> dict[str, Any]:
        """What summary.json says."""
        file = self.path / "summary.json"
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            raise StoreError(f"{file}: missing or unreadable") from None
        return content

    def finish(self, run: Run, problem: Problem, label: str) -> None:
        """Write the model, the coefficient table, the plot and the summary (last: it marks a finished run)."""
        from fedcomposite.experiments.plots import draw_histories  # brings matplotlib

        tensors = {"x": run.solution.detach().cpu()}
        metadata = {"format": "pt"}
        if problem.model is None:
            metadata["coordinates"] = json.dumps(problem.coordinate_names)
            coefficients(problem, run.solution).to_csv(self.path / "coefficients.csv", index=False)
        else:
            metadata["layout"] = json.dumps([tuple(slot) for slot in problem.layout])
            if run.buffers is not None and run.buffers.numel():
                tensors["buffers"] = run.buffers.detach().cpu()
        write_atomic(self.path / "model.safetensors", serialise(tensors, metadata))
        draw_histories({label: [run.history]}, self.path / "plot.png", title=label)
        summary = {
            "status": run.status,
            "message": run.message,
            "rounds": run.rounds,
            "label": label,
            "last": run.history[-1],
            "initial_stationarity": run.history[0]["stationarity"],
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"fedcomposite": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }
        write_atomic(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())


def coefficients(problem: Problem, x: torch.Tensor) -> pd.DataFrame:
    """The nonzero coefficients with their names, largest first."""
    frame = pd.DataFrame({"name": problem.coordinate_names, "coefficient": x.detach().cpu().double().numpy()})
    frame = frame[frame["coefficient"] != 0]
    return frame.reindex(frame["coefficient"].abs().sort_values(ascending=False).index).reset_index(drop=True)
