"""What the commands share: where they print, tables, and how a mistake becomes a line and an exit code."""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedcomposite._faults import FailedError as FailedError
from fedcomposite._faults import UserError

if TYPE_CHECKING:
    import pandas as pd

_WIDTH = None if sys.stdout.isatty() else 120  # a log or a pipe has no width of its own
out, err = Console(width=_WIDTH), Console(stderr=True)

DEBUG = "FEDCOMPOSITE_DEBUG"


def complain(line: str) -> None:
    """Print one line about what went wrong."""
    err.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get(DEBUG, "").casefold() not in ("", "0", "false", "no")


@contextmanager
def reporting(mistakes: tuple[type[Exception], ...] = (), failures: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """One clear line for what went wrong, and the exit code that says whose move it is."""
    wrong: tuple[type[Exception], ...] = (UserError, *mistakes)
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        _trace()
        err.print("stopped", style="red")
        raise SystemExit(1) from None
    except wrong as error:
        _trace()
        for line in str(error).splitlines():
            complain(f"error: {line}")
        raise SystemExit(2) from None
    except (*_failures(), *failures) as error:
        _trace()
        complain(f"failed: {error or type(error).__name__}")
        raise SystemExit(1) from None
    except Exception as error:
        _trace()
        said = f"internal error: {' '.join(f'{type(error).__name__}: {error}'.split())}"
        complain(said if debugging() else f"{said}; run again with --debug and report what it shows")
        raise SystemExit(1) from None


def _failures() -> tuple[type[Exception], ...]:
    """What goes wrong in the world; PyTorch's own only where it was loaded, since it takes long to load."""
    torch: Any = sys.modules.get("torch")
    return (FailedError, OSError, MemoryError, *([] if torch is None else [torch.OutOfMemoryError]))


def _trace() -> None:
    """Print the traceback, if wanted, with what an error was made from."""
    error = sys.exc_info()[1]
    if error is None or not debugging():
        return
    link: BaseException | None = error
    while link is not None:
        link.__suppress_context__ = False
        link = link.__cause__ or link.__context__
    err.print("".join(traceback.format_exception(error)), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings as one line each."""
    before = warnings.showwarning
    warnings.showwarning = _show_warning
    try:
        yield
    finally:
        warnings.showwarning = before


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    err.print(f"warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_frame(frame: pd.DataFrame, caption: str = "", digits: int = 4) -> None:
    """Print a table, with a caption below it."""
    import pandas as pd

    table = Table(caption=escape(caption) or None, caption_justify="left")
    for column in frame.columns:
        numeric = pd.api.types.is_numeric_dtype(frame[column])
        table.add_column(escape(str(column)), justify="right" if numeric else "left", overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*(_shown(v, digits) for v in row))
    out.print(table)


def _shown(value: Any, digits: int) -> str:
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.{digits}g}"
    return escape(str(value))


def written(path: Any) -> None:
    """Say that something was written."""
    out.print(f"written: {escape(str(path))}")


def first_sentence(thing: Any) -> str:
    """What a docstring says first: up to the end of its first sentence, or of its first paragraph."""
    text, _, more = (thing.__doc__ or "").strip().partition("\n\n")
    paragraph = " ".join(text.split())
    sentence = re.split(r"(?<=[^A-Z])\. (?=[A-Z])", paragraph)[0]  # not after an initial
    if sentence == paragraph and more and not sentence.endswith("."):  # a formula was to follow
        sentence = sentence.rpartition(": ")[0] or sentence
    return sentence.rstrip(".:")
