"""What results have in common: one line when they are printed, a table when one is wanted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape

import pandas as pd


class Result(ABC):
    """The base of results, whose arrays would fill pages where they are printed."""

    @abstractmethod
    def to_frame(self) -> pd.DataFrame:
        """The main table."""

    @abstractmethod
    def _line(self) -> str:
        """What it found, in a line."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._line()})"

    def _repr_html_(self) -> str:
        """The line and the table, as a notebook shows them; of long ones as many rows as of any other DataFrame."""
        table = self.to_frame().to_html(max_rows=pd.get_option("display.max_rows"))
        return f"<p>{escape(repr(self))}</p>\n{table}"


def counted(number: int, what: str) -> str:
    """A number of things: "1 site", "2 sites".

    >>> counted(1, "site"), counted(2, "site")
    ('1 site', '2 sites')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"
