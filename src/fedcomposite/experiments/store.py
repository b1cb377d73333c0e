"""Run folders: what a run leaves on disk, and how it is read back.

=====================  =====================================================================================
config.toml            the experiment, with every choice resolved
history.jsonl          one record per line, appended as the run goes
checkpoint.safetensors the state to resume from; answers.log, that of an analysis, which goes when it is done
model.safetensors      the solution: tensor ``x``, a network's ``buffers``; in the metadata coordinate names or layout,
                       and what a sample looks like, so that the model can be made again where the data are not
best.safetensors       the best model by a metric, with the callback ``BestModel``; its round in the metadata
coefficients.csv       the nonzero coefficients by name (linear models)
recipe.json            how the features were made, where a recipe made them
summary.json           status, last record, versions
plot.png               the curves
=====================  =====================================================================================
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import tomllib
import unicodedata
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fedcomposite import files
from fedcomposite._validation import UserError
from fedcomposite._version import __version__
from fedcomposite.data import Silos
from fedcomposite.data.fitted import FittedRecipe
from fedcomposite.exporting import original_scale
from fedcomposite.files import write_atomic
from fedcomposite.locks import NAME as LOCK
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import Cox
from fedcomposite.runtime.history import Record, Run

_DRAWN = 64  # samples that stand in for a run's
_LONGEST = 60  # letters of a label in a folder's name
_SCRATCH = re.compile(r"\..+\.\d+\.tmp")  # what a process leaves that is killed while it replaces a file


class StoreError(UserError):
    """A run folder that cannot be used, and why."""


def leftovers(folder: Path) -> list[Path]:
    """Files that killed processes left half-written. Who has the lock on the folder may remove them."""
    return [p for p in folder.iterdir() if _SCRATCH.fullmatch(p.name)] if folder.is_dir() else []


def folder_names(labels: Sequence[str]) -> list[str]:
    """A folder name for each label, different ones also where case does not count.

    A label of letters, digits and inner hyphens is its own name; any other gets a digest of itself.

    Examples
    --------
    >>> folder_names(["FedAvg", "a-b", "a b"])
    ['FedAvg', 'a-b', 'a-b-c8687a08']
    """
    found: list[str] = []
    taken: set[str] = set()
    for label in labels:
        name = "".join(c if c.isalnum() else "-" for c in label).strip("-")
        plain = name == label == unicodedata.normalize("NFC", label) and 0 < len(name) <= _LONGEST
        if not plain or name.casefold() in taken:
            digest = hashlib.sha256(label.encode()).hexdigest()[:8]
            name = f"{name[:_LONGEST] or 'run'}-{digest}"
        if name.casefold() in taken:
            raise StoreError(f"label {label!r}: gives the same folder as another; choose another label")
        taken.add(name.casefold())
        found.append(name)
    return found


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
    def answers(self) -> Path:
        """What the parties of an analysis have answered, while it lasts."""
        return self.path / "answers.log"

    @property
    def finished(self) -> bool:
        """Whether the run came to an end of its own (also by divergence)."""
        try:
            return bool(self.summary()["status"] != "interrupted")
        except StoreError:
            return False

    @property
    def method(self) -> str | None:
        """The class name of the method, if the folder says it."""
        try:
            return str(tomllib.loads(self.config.read_text(encoding="utf-8"))["algorithm"]["name"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def check_new(self, overwrite: bool = False, *, instead: str = "--resume, --overwrite or another --out") -> None:
        """Refuse a folder that holds something, unless it is a run to be overwritten. Changes nothing.

        ``instead`` are the options that the command has for that case.
        """
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path}: is a file; give another folder with --out")
        held = {p for p in self.path.iterdir() if p.name != LOCK} if self.path.is_dir() else set()
        if held - set(leftovers(self.path)):
            if not overwrite:
                raise StoreError(f"{self.path}: already holds files; use {instead}")
            if not self.config.exists() and not self.answers.exists():
                raise StoreError(f"{self.path}: is not a run folder (no config.toml), so it is not overwritten")
            if any(self.path.glob("*/seed-*/config.toml")):
                raise StoreError(f"{self.path}: is a comparison, so it is not overwritten by a single run")

    def create(self) -> None:
        """Make the folder; refuse one that holds something."""
        self.check_new()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be created ({error.strerror})") from None

    def remove(self, *patterns: str) -> None:
        """Delete the folder's files of these names."""
        for pattern in patterns:
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
            raise StoreError(self._why_no_summary(file)) from None
        return content

    def _why_no_summary(self, file: Path) -> str:
        if not self.path.is_dir():
            return f"{self.path}: there is no such folder; give the folder of a run"
        if file.is_file():
            return f"{file}: unreadable; make the run again"
        what = "the run has not finished" if self.config.is_file() else "this is not the folder of a run"
        return f"{self.path}: {what} (summary.json is missing or unreadable)"

    def finish(self, run: Run, problem: Problem, label: str, *, draw: bool = True) -> None:
        """Write the model, the coefficient table, the plot and the summary (last: it marks a finished run)."""
        from fedcomposite.plots import draw_histories  # brings matplotlib

        self.keep_model(problem, run.solution, run.buffers)
        if run.best is not None:
            chosen = {"round": str(run.best.round), "metric": run.best.metric, "value": repr(run.best.value)}
            self._write("best.safetensors", problem, run.best.solution, run.best.buffers, chosen)
        if draw:
            methods = {label: self.method or label}
            draw_histories({label: [run.history]}, self.path / "plot.png", title=label, methods=methods)
        summary = {
            "status": run.status,
            "message": run.message,
            "rounds": run.rounds,
            "label": label,
            "last": run.history[-1],
            "initial_stationarity": run.history[0]["stationarity"],
            "identity": run.identity,
        }
        if run.best is not None:
            summary["best"] = {"round": run.best.round, "metric": run.best.metric, "value": run.best.value}
        if run.certificate is not None:
            summary["certificate"] = {"kind": run.certificate.kind, "value": run.certificate.value}
        self.conclude(summary)

    def keep_model(self, problem: Problem, x: torch.Tensor, buffers: torch.Tensor | None = None) -> None:
        """Write the model, a linear one's coefficient table, and the recipe that made its features."""
        if problem.model is None:
            table = coefficients(problem, x).to_csv(index=False)
            write_atomic(self.path / "coefficients.csv", table.encode())
        if problem.silos.recipe is not None:
            problem.silos.recipe.write(self.path / "recipe.json")
        self._write("model.safetensors", problem, x, buffers, {})

    def _write(
        self, name: str, problem: Problem, x: torch.Tensor, buffers: torch.Tensor | None, about: dict[str, str]
    ) -> None:
        """Write a model's file: its vectors, what their entries are, and what else there is to say about it."""
        tensors, metadata = {"x": x}, {"format": "pt", "samples": _look(problem.silos), **about}
        if problem.model is None:
            metadata["coordinates"] = json.dumps(problem.coordinate_names)
        else:
            metadata["layout"] = json.dumps([tuple(slot) for slot in problem.layout])
            if buffers is not None and buffers.numel():
                tensors["buffers"] = buffers
        if problem.silos.recipe is not None:
            metadata["recipe"] = problem.silos.recipe.text
        write_atomic(self.path / name, files.pack(tensors, metadata))

    def stand_in(self) -> Silos | None:
        """Drawn samples that look like the run's: what it takes to make its model again, wherever its data are.

        A federation's are at its sites. None for a folder of an earlier version, which does not say how samples look.
        """
        file = self.path / "model.safetensors"
        try:
            said = files.read(file)[1].get("samples")
        except OSError as error:
            raise StoreError(f"{file}: not a readable model ({error})") from None
        if said is None:
            return None
        look, recipe = json.loads(said), self.path / "recipe.json"
        dtype, labels = getattr(torch, look["dtype"]), look["labels"] or [1.0]
        shape, source = (_DRAWN, *look["shape"]), torch.Generator().manual_seed(0)
        if dtype.is_floating_point:
            features = torch.randn(shape, generator=source, dtype=dtype)
        else:  # pixels; other whole numbers may be indices into a table that has two entries at least
            features = torch.randint(256 if dtype == torch.uint8 else 2, shape, generator=source).to(dtype)
        targets = torch.tensor(labels, dtype=torch.float64).repeat(-(-_DRAWN // len(labels)))
        if "targets" in look:
            targets = targets.to(getattr(torch, look["target_dtype"])).view(-1, *(1 for _ in look["targets"]))
            targets = targets.repeat(1, *look["targets"])
        rows = torch.arange(len(targets)) % _DRAWN
        fitted = FittedRecipe.read(recipe) if recipe.is_file() else None
        names = tuple(look["names"])
        return Silos(features[rows], targets, (0, len(targets)), feature_names=names, recipe=fitted)

    def conclude(self, summary: dict[str, Any]) -> None:
        """Write the summary, with the time and the versions: the run is finished."""
        versions = {"fedcomposite": __version__, "torch": torch.__version__, "python": platform.python_version()}
        made = {**summary, "finished": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions}
        write_atomic(self.path / "summary.json", (json.dumps(made, indent=2) + "\n").encode())


def _look(silos: Silos) -> str:
    """Shape and type of a sample, names of its features, and the classes: nothing of the samples themselves."""
    targets = silos.targets
    several = targets.ndim > 1 and not targets.is_floating_point()  # labels of tokens, or of pixels
    classes = torch.unique(targets[targets >= 0]).tolist() if several else silos.classes
    labels = [] if classes is None else [float(label) for label in classes]
    dtype = str(silos.features.dtype).removeprefix("torch.")
    shape, names = list(silos.features.shape[1:]), list(silos.feature_names)
    look = {"shape": shape, "dtype": dtype, "names": names, "labels": labels}
    if targets.ndim > 1:
        look |= {"targets": list(targets.shape[1:]), "target_dtype": str(targets.dtype).removeprefix("torch.")}
    return json.dumps(look)


def coefficients(problem: Problem, x: torch.Tensor) -> pd.DataFrame:
    """The nonzero coefficients with their names, largest first; with a recipe also ``original``, per unit of a column.

    The intercept on the original scale is there even if the model has none, but not where a baseline takes it up.
    """
    frame = pd.DataFrame({"name": problem.coordinate_names, "coefficient": x.detach().cpu().double().numpy()})
    if (original := original_scale(problem, x.detach())) is not None:
        frame["original"] = original[0]
    frame = frame[frame["coefficient"] != 0]
    if original is not None and not problem.bias and not isinstance(problem.loss, Cox):
        shift = pd.DataFrame({"name": "(intercept)", "coefficient": 0.0, "original": original[1].reshape(-1)})
        frame = pd.concat([frame, shift], ignore_index=True)
    return frame.reindex(frame["coefficient"].abs().sort_values(ascending=False).index).reset_index(drop=True)


class Journal:
    """The history of a run under way, written as records come; use it as ``on_record``.

    Nothing on disk changes before the first record: a run that is refused leaves its folder as it was. Then the
    experiment is written, and of a ``fresh`` run the old one is removed. A resumed run hands in its old records again;
    from the first one on that is not on disk, the file is replaced as a whole, so that a crash at any time leaves the
    records of before or a part of those of now, never none.
    """

    def __init__(
        self, folder: RunFolder, config: str, fresh: bool = False, watch: Callable[[Record], None] | None = None
    ) -> None:
        self._folder, self._config, self._fresh, self._watch = folder, config, fresh, watch
        self._path = folder.path / "history.jsonl"
        there = self._path.is_file() and not fresh
        self._known = self._path.read_text(encoding="utf-8").splitlines() if there else []
        self._lines: list[str] | None = []  # records so far, as long as they are those on disk

    def __call__(self, record: Record) -> None:
        """Append a record to the file as a line."""
        line = json.dumps(record)
        if self._lines is None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        else:
            if not self._lines:
                self._begin()
            self._lines.append(line)
            count = len(self._lines)
            if self._known[count - 1 : count] != [line]:
                self._replace()
            if count == 1 and self._fresh:
                self._folder.remove("model.safetensors", "best.safetensors", "coefficients.csv", "plot.png")
        if self._watch is not None:
            self._watch(record)

    def close(self) -> None:
        """At the end of a run: what is on disk are its records and no others."""
        if self._lines and len(self._lines) < len(self._known):
            self._replace()

    def _begin(self) -> None:
        """The run is accepted."""
        folder = self._folder
        for old in leftovers(folder.path):
            old.unlink()
        if self._fresh:
            folder.remove("summary.json", "recipe.json", "checkpoint.safetensors*", "analysis.json", "report*")
        if not folder.config.is_file() or folder.config.read_text(encoding="utf-8") != self._config:
            folder.remove("summary.json")  # it belongs to the experiment as it was
            write_atomic(folder.config, self._config.encode())

    def _replace(self) -> None:
        assert self._lines is not None
        self._folder.remove("summary.json")  # the run is not at its end any more
        write_atomic(self._path, "".join(f"{line}\n" for line in self._lines).encode())
        self._lines = None
