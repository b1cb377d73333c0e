"""A live line on a terminal."""

from __future__ import annotations

import sys

from fedcomposite.runtime.callbacks.base import Callback, View
from fedcomposite.runtime.history import Record


def on_a_terminal() -> bool:
    """Whether somebody may be looking at the error output."""
    return sys.stderr is not None and sys.stderr.isatty()


def summary(record: Record) -> str:
    """A record in half a line."""
    sent = (record["bytes_up"] + record["bytes_down"]) / 1e6
    shown = f"F {record['objective']:.6g}  ‖G‖ {record['stationarity']:.1e}  nnz {record['nonzeros']}  {sent:.3g} MB"
    return shown + (f"  test {record['test_accuracy']:.4f}" if "test_accuracy" in record else "")


class Progress(Callback):
    """Round, objective, stationarity, nonzeros, bytes and time left."""

    def __init__(self, label: str = "") -> None:
        self._label = label

    def begin(self, view: View) -> None:
        """Show the bar."""
        from rich.console import Console  # short runs in a script need not wait for it
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
            TextColumn("{task.fields[seen]}"), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Bar(*columns, console=Console(stderr=True))
        name = self._label or type(view.algorithm).__name__
        self._task = self._bar.add_task(name, total=view.rounds, completed=view.round, seen="")
        self._bar.start()

    def __call__(self, view: View) -> None:
        """Move it."""
        self._bar.update(self._task, completed=view.round, seen=summary(view.record))

    def end(self, view: View) -> None:
        """Take it away."""
        self._bar.stop()
