"""Whose move it is when something goes wrong; light, so that the command line knows it at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """What a user can set right: wording, values, files. The command line shows its message alone and ends with 2."""


class FailedError(RuntimeError):
    """What went wrong in the world: a client, a disk, a network. The command line shows its message and ends with 1."""


class MissingPackageError(UserError, ImportError):
    """A package that an extra brings is not installed; the message says how to get it."""


def first_line(error: Exception) -> str:
    """What an error of torch or of a module says in its first line, or its kind."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def suggest(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` when a known name is close, and ``""`` otherwise."""
    known = list(known)
    folded = {k.casefold(): k for k in known}
    close = difflib.get_close_matches(str(name).casefold(), list(folded), n=1, cutoff=0.6)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""
