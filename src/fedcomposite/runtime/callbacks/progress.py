"""A live line on a terminal, or in a notebook."""

from __future__ import annotations

import html
import importlib
import sys
import time
from typing import TYPE_CHECKING, Any

from fedcomposite.runtime.callbacks.base import Callback, View
from fedcomposite.runtime.history import Record

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

_WIDE = 100  # columns from which on there is room for a bar of its own
_BAR = 20
_EVERY = 0.25  # seconds between two updates in a notebook, at least


def in_a_kernel() -> bool:
    """Whether this is a notebook's process; nothing is imported to find out."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def somebody_watches() -> bool:
    """Whether somebody may be looking: at the error output on a terminal, or at a notebook."""
    return (sys.stderr is not None and sys.stderr.isatty()) or in_a_kernel()


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


class _TerminalLine:
    """The line of one run on the error output."""

    def __init__(self, label: str, rounds: int, done: int) -> None:
        from rich.console import Console  # short runs in a script need not wait for it

        console = Console(stderr=True, force_jupyter=False)
        name = short(label, console)
        self._bar, self._room = make_bar(console), room_beside(name, rounds, console)
        self._task = self._bar.add_task(name, total=rounds, completed=done, seen="")
        self._bar.start()

    def update(self, done: int, record: Record) -> None:
        self._bar.update(self._task, completed=done, seen=summary(record, self._room))

    def stop(self) -> None:
        self._bar.stop()


class _NotebookLine:
    """The line of one run below the cell that runs: one display, updated in place; what it shows at the end stays."""

    def __init__(self, label: str, rounds: int, done: int) -> None:
        self._label, self._rounds, self._first, self._done = label, rounds, done, done
        self._record: Record | None = None
        self._began = self._shown = time.monotonic()
        display: Any = importlib.import_module("IPython.display").display
        self._display = display(self._content(), raw=True, display_id=True)

    def update(self, done: int, record: Record) -> None:
        self._done, self._record, now = done, record, time.monotonic()
        if now - self._shown >= _EVERY:
            self._shown = now
            self._display.update(self._content(), raw=True)

    def stop(self) -> None:
        self._display.update(self._content(ended=True), raw=True)

    def _content(self, ended: bool = False) -> dict[str, str]:
        took, steps = time.monotonic() - self._began, self._done - self._first
        clock = f"in {_on_a_clock(took)}" if ended else "-:--"
        if steps and not ended:
            clock = f"{_on_a_clock(took * (self._rounds - self._done) / steps)} left"
        words = [f"{self._done}/{self._rounds}", clock, *([summary(self._record)] if self._record else [])]
        full, said = _BAR * self._done // max(1, self._rounds), html.escape("  ".join(words))
        bar = f'<progress value="{self._done}" max="{max(1, self._rounds)}"></progress>'
        line = f'<div style="font-family: monospace">{html.escape(self._label)} {bar} {said}</div>'
        drawn = "#" * full + "." * (_BAR - full)
        return {"text/plain": "  ".join([self._label, f"[{drawn}]", *words]), "text/html": line}


def _on_a_clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


class Progress(Callback):
    """Round, time left, objective, stationarity, nonzeros and bytes: a live line on a terminal, or in a notebook."""

    def __init__(self, label: str = "") -> None:
        self._label = label

    def begin(self, view: View) -> None:
        line = _NotebookLine if in_a_kernel() else _TerminalLine
        self._line = line(self._label or type(view.algorithm).__name__, view.rounds, view.round)

    def __call__(self, view: View) -> None:
        self._line.update(view.round, view.record)

    def end(self, view: View) -> None:
        self._line.stop()
