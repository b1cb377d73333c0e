"""A site's memory between rounds: one safetensors file per job and round, replaced atomically.

The file ``JOB/ROUND.safetensors`` is the state *after* that round, ``JOB/-1.safetensors`` the start. A round begins
from the state that the server names (the last round of this site that was counted) and leaves a new one beside it.
So a round that is asked for twice is computed twice from the same state, and a reply that came too late to be
counted is forgotten. Both files are kept, older ones are removed.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

from fedcomposite import files

_JOB = re.compile("(?!rows$)[0-9a-z-]{1,64}")  # "rows" has the books of rows


class LostStateError(ValueError):
    """The state that a round needs is not there."""


class StateStore:
    """The client states of one site, below one folder.

    A job that was used within the last ``days`` is never forgotten. Of the older ones the newest stay, as long as there
    are at most ``keep`` jobs in all; so a job that the coordinator still works on keeps its state, however many others
    there are.
    """

    def __init__(self, folder: Path, keep: int = 3, days: float = 30.0) -> None:
        self.folder, self._keep, self._days = folder, keep, days

    def _path(self, job: str, round: int) -> Path:
        if not _JOB.fullmatch(job):
            raise LostStateError(f"{job!r} is not a job's name")
        return self.folder / job / f"{round}.safetensors"

    def rounds(self, job: str) -> list[int]:
        """The rounds after which there is a state."""
        return sorted(int(p.stem) for p in self._path(job, 0).parent.glob("*.safetensors"))

    def save(self, job: str, round: int, before: int, state: Any) -> None:
        """Keep the state after a round, and the one ``before`` it; forget the others of this job and old jobs."""
        path = self._path(job, round)
        fresh = not path.parent.is_dir()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        metadata = {"fedcomposite": "state 1", "job": job, "round": str(round)}
        files.write_atomic(path, files.pack(state._asdict(), metadata))
        for other in path.parent.glob("*.safetensors"):
            if int(other.stem) not in (round, before):
                other.unlink(missing_ok=True)
        if fresh:
            self._tidy()

    def _jobs(self) -> list[Path]:
        every = self.folder.iterdir() if self.folder.is_dir() else []
        found = [p for p in every if _JOB.fullmatch(p.name) and any(p.glob("*.safetensors"))]
        return sorted(found, key=lambda p: p.stat().st_mtime)

    def _tidy(self) -> None:
        oldest = time.time() - 86400 * self._days
        for job in self._jobs()[: -self._keep]:
            if job.stat().st_mtime < oldest:
                shutil.rmtree(job, ignore_errors=True)

    def load(self, job: str, round: int, like: Any) -> Any:
        """The state after a round, in the form of ``like``."""
        path = self._path(job, round)
        if not like:
            return like
        try:
            tensors, metadata = files.read(path)
        except OSError:
            raise LostStateError(
                f"the state after round {round + 1} of job {job} is not here; start the job anew"
            ) from None
        if (metadata.get("job"), metadata.get("round")) != (job, str(round)):
            raise LostStateError(f"{path.name} is the state of another job or round")
        wanted = {k: (tuple(v.shape), v.dtype) for k, v in like._asdict().items()}
        if wanted != {k: (tuple(v.shape), v.dtype) for k, v in tensors.items()}:
            raise LostStateError(f"{path.name} has other vectors than this method's state")
        return type(like)(**{k: tensors[k].to(getattr(like, k).device) for k in like._fields})

    def forget(self) -> None:
        """Remove every state; the site's ledger and its secret stay."""
        for job in self._jobs():
            shutil.rmtree(job, ignore_errors=True)
