"""A live line on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fedcomposite.runtime.callbacks.base import Callback, View
from fedcomposite.runtime.history import Record

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

_WIDE = 100  # columns from which on there is room for a bar of its own
_BAR = 20


def on_a_terminal() -> bool:
    """Whether somebody may be looking at the error output."""
    return sys.stderr is not None and sys.stderr.isatty()


def summary(record: Record, room: int | None = None) -> str:
    """A record in half a line: as many of its numbers as there is room for, each of them whole."""
    sent = (record["bytes_up"] + record["bytes_down"]) / 1e6
    parts = [f"F {record['objective']:.6g}", f"‖G‖ {record['stationarity']:.1e}", f"nnz {record['nonzeros']}"]
    parts += [f"{sent:.3g} MB"]
    parts += [f"test {record['test_accuracy']:.4f}"] if "test_accuracy" in record else []
    parts += [f"ε {record['epsilon']:.3g}"] if "epsilon" in record else []
    while room is not None and parts and len("  ".join(parts)) > room:
        parts.pop()
    return "  ".join(parts)


def make_bar(console: Console, disable: bool = False) -> Bar:
    """A line per run: name, bar, round, time left, and numbers; on a narrow terminal the bar goes first."""
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    drawn = [BarColumn(bar_width=_BAR)] if console.width >= _WIDE else []
    name, seen = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[seen]}", markup=False)
    columns = (SpinnerColumn(), name, *drawn, MofNCompleteColumn(), TimeRemainingColumn(), seen)
    return Bar(*columns, console=console, disable=disable)


def short(label: str, console: Console) -> str:
    """A name that takes at most a third of the line."""
    most = max(8, console.width // 3)
    return label if len(label) <= most else label[: most - 1] + "…"


def room_beside(label: str, rounds: int, console: Console) -> int:
    """The characters that are left for numbers beside spinner, name, bar, round and time left."""
    bar = _BAR + 1 if console.width >= _WIDE else 0
    return console.width - len("⠋ ") - len(label) - 1 - bar - 2 * len(str(rounds)) - 2 - len("0:00:00 ")


class Progress(Callback):
    """Round, time left, objective, stationarity, nonzeros and bytes."""

    def __init__(self, label: str = "") -> None:
        self._label = label

    def begin(self, view: View) -> None:
        from rich.console import Console  # short runs in a script need not wait for it

        console = Console(stderr=True)
        name = short(self._label or type(view.algorithm).__name__, console)
        self._bar, self._room = make_bar(console), room_beside(name, view.rounds, console)
        self._task = self._bar.add_task(name, total=view.rounds, completed=view.round, seen="")
        self._bar.start()

    def __call__(self, view: View) -> None:
        self._bar.update(self._task, completed=view.round, seen=summary(view.record, self._room))

    def end(self, view: View) -> None:
        self._bar.stop()
