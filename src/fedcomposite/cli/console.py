"""What the commands share: where they print, tables, and how a mistake becomes a line and an exit code."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedcomposite._faults import FailedError as FailedError
from fedcomposite._faults import UserError
from fedcomposite._version import SCHEMA

if TYPE_CHECKING:
    import pandas as pd

_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120  # a log or a pipe has no width of its own
out, err = Console(width=_WIDTH), Console(stderr=True)

JSON = "--json"
AsJson = Annotated[bool, typer.Option(JSON, help="Print JSON, for machines.")]

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


def print_frame(
    frame: pd.DataFrame, caption: str = "", digits: int = 4, drop: Sequence[str] = (), more: str = JSON
) -> None:
    """Print a table, with a caption below it.

    A number or a name is never broken: what does not fit goes, first the columns named in ``drop``, then those on the
    right, and a line below says which, and where they are to be had (``more``). Only prose is wrapped.
    """
    cells = {str(name): [_shown(v, digits) for v in frame[name]] for name in frame.columns}
    kept, gone = _fitting({name: _least(name, column) for name, column in cells.items()}, drop)
    widths = _spread(kept, {name: max([len(name), *map(len, cells[name])]) for name in kept})
    table = Table(caption=escape(caption) or None, caption_justify="left", width=_across(widths))
    for name, width in widths.items():
        right = frame[name].dtype.kind in "iuf"
        table.add_column(escape(name), justify="right" if right else "left", overflow="fold", width=width)
    for row in zip(*(cells[name] for name in kept), strict=True):
        table.add_row(*map(escape, row))
    out.print(table, crop=_measured())
    if gone:
        said = f"no room for {', '.join(gone)} in {out.width} columns: take a wider terminal{more and f', or {more}'}"
        out.print(said, markup=False, highlight=False)


def print_notes(notes: Mapping[str, str]) -> None:
    """Lines beneath a table: why a row, which is named first, does not tell all."""
    for name, note in notes.items():
        if note:
            out.print(f"{name}: {note}" if name else note, markup=False, highlight=False, soft_wrap=True)


_NUMBER = re.compile(r"[-+±–.,/%() 0-9eEinfa]*")
_WORD = 24  # a word of prose that is longer may be broken, if it has no digits: a path


def _measured() -> bool:
    """Whether there is a width to keep to; a log or a pipe has none of its own."""
    return out.is_terminal or _WIDTH is None


def _least(name: str, cells: Sequence[str]) -> int:
    """The fewest characters in which a column can be shown: of numbers and names the longest, of prose its words."""
    longest = max([len(name), *map(len, cells)])
    if longest <= _WORD and all(_NUMBER.fullmatch(cell) or " " not in cell for cell in cells):
        return longest
    words = [word for cell in (name, *cells) for word in cell.split()]
    return max([len(w) if any(c.isdigit() for c in w) else min(len(w), _WORD) for w in words if len(w) <= 2 * _WORD],
               default=_WORD)  # fmt: skip


def _fitting(least: dict[str, int], drop: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """The columns for which there is room, with their least widths, and those for which there is none."""
    kept = dict(least)
    order = [*(name for name in drop if name in kept), *(n for n in reversed(list(kept)) if n not in drop)]
    gone = []
    while _measured() and len(kept) > 1 and _across(kept) > out.width:
        gone.append(order.pop(0))
        del kept[gone[-1]]
    return kept, [name for name in least if name in gone]


def _across(widths: dict[str, int]) -> int:
    """How wide a table is, with its lines."""
    return sum(widths.values()) + 3 * len(widths) + 1


def _spread(least: dict[str, int], whole: dict[str, int]) -> dict[str, int]:
    """Widths: what is left of the room goes to the columns that want more, first to those that want little."""
    widths, waiting = dict(least), sorted(least, key=lambda name: whole[name] - least[name])
    spare = max(0, out.width - _across(least))
    while waiting:
        name = waiting.pop(0)
        more = min(whole[name] - least[name], spare // (len(waiting) + 1))
        widths[name], spare = least[name] + more, spare - more
    return widths


def _shown(value: Any, digits: int) -> str:
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) < 1e6 and value == round(value) else f"{value:.{digits}g}"
    return str(value)


def show_frame(frame: pd.DataFrame, as_json: bool, caption: str = "", drop: Sequence[str] = ()) -> None:
    """A listing: a table for people, or a list of objects for machines."""
    if as_json:
        print_json(rows(frame))
    else:
        print_frame(frame, caption, drop=drop)


@contextmanager
def results(as_json: bool) -> Iterator[dict[str, Any]]:
    """What a command found: told as it goes for people, or as one object at the end for machines."""
    found: dict[str, Any] = {}
    before, out.quiet = out.quiet, as_json or out.quiet
    try:
        yield found
    finally:
        out.quiet = before
        if as_json and found:
            print_json({"schema": SCHEMA, **found})


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as objects; what is not there is null."""
    made: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return made


def print_json(value: Any) -> None:
    """Print for machines: one JSON value; a number that JSON does not have is null."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False, default=str))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    return sentence.rstrip(".:").replace("``", "")
