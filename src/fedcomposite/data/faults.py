"""What is wrong with data: every fault of a file is found before one error reports them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcomposite._faults import UserError

SHOWN = 20  # faults that a message lists; the error's own list has all


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    source: str
    """The file or the client."""
    what: str
    remedy: str
    column: str | None = None
    count: int = 1
    """Values, rows or columns it concerns."""
    lines: tuple[int, ...] = ()
    """The first lines of the file where it is found, the header's being line 1."""

    @property
    def told(self) -> str:
        """What may be told to others: the column and how much it concerns, no value and no path."""
        return f"{f'column {self.column!r}' if self.column else 'the file'}: {self.count} problem(s); {self.remedy}"

    def __str__(self) -> str:
        return f"{self.source}: {self.what}; {self.remedy}"


class DataError(UserError):
    """Data that cannot be used: what, where and the remedy. ``faults`` lists each, for files with several."""

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)


def path_of(given: Any, what: str) -> Path:
    """A path; anything else is refused."""
    if not isinstance(given, str | Path):
        raise DataError(f"{what} = {given!r:.60}, must be a path")
    return Path(given)


def paths_of(given: Any, what: str) -> list[Path]:
    """One path, or several."""
    if isinstance(given, str | Path) or not isinstance(given, Iterable):
        return [path_of(given, what)]
    return [path_of(one, what) for one in given]


class DataWarning(UserWarning):
    """Data that can be used, but may not be what was meant."""


def stop(source: str, what: str, remedy: str) -> DataError:
    """The error for a single fault that leaves nothing else to look at."""
    fault = Fault(source, what, remedy)
    return DataError(str(fault), [fault])


def refuse(faults: Sequence[Fault]) -> None:
    """Raise one error for all faults, if there are any: one fault in one line, several in a line each."""
    if faults:
        raise DataError(_listed([str(fault) for fault in faults]), faults)


def refuse_all(errors: Sequence[DataError]) -> None:
    """Raise one error for several, if there are any."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        told = [line for error in errors for line in [str(f) for f in error.faults] or [str(error)]]
        raise DataError(_listed(told), [fault for error in errors for fault in error.faults])


def _listed(told: Sequence[str]) -> str:
    if len(told) == 1:
        return told[0]
    lines = [f"  {one}" for one in told[:SHOWN]]
    if len(told) > SHOWN:
        lines.append(f"  ... and {len(told) - SHOWN} more")
    return "\n".join([f"{len(told)} problems with the data:", *lines])
