"""Figures without a window, and their files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_NO_DATE: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


def make(width: float, height: float, columns: int, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels side by side, in so many rows."""
    from fedcomposite.plots.shown import Shown  # brings matplotlib

    figure = Shown(width, height, dpi=120 if width > 10 else 200 if rows == 1 else 150)
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]


def finish(figure: Figure, path: str | Path | None) -> Figure:
    """Write the picture, if a path is given: whole or not at all, and the same bytes for the same curves."""
    from matplotlib import rc_context

    if path is None:
        return figure
    target = Path(path)
    kind = check_kind(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with rc_context({"svg.hashsalt": "fedcomposite"}):
            figure.savefig(scratch, format=kind, metadata=_NO_DATE.get(kind))
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
    return figure


def check_kind(path: str | Path) -> str:
    """The kind of picture that a file's suffix names; PNG without one, an error for a suffix that nothing can write."""
    from matplotlib.backend_bases import FigureCanvasBase

    kind = Path(path).suffix.removeprefix(".").lower() or "png"
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if kind not in known:
        raise ValueError(f"{path}: no picture is called .{kind} (known: {', '.join(known)})")
    return kind
