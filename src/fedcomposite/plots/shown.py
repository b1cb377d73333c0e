"""A figure that needs no window, and shows itself in notebooks."""

from __future__ import annotations

from io import BytesIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Shown(Figure):
    """A figure without a window.

    Notebooks know how to show Matplotlib's figures only once somebody has imported pyplot there, which nothing here
    does; so it brings its own picture.
    """

    def __init__(self, width: float, height: float, dpi: float) -> None:
        super().__init__(figsize=(width, height), dpi=dpi, layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        with BytesIO() as file:
            self.savefig(file, format="png", dpi=min(self.dpi, 100))  # for a screen; files have more
            return file.getvalue()
