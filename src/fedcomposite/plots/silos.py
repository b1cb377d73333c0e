"""What the silos hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedcomposite.plots.canvas import finish, make
from fedcomposite.plots.looks import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Holdings(Protocol):
    """What is drawn of silos."""

    @property
    def sizes(self) -> Any: ...
    @property
    def classes(self) -> Any: ...
    @property
    def names(self) -> Sequence[str]: ...
    def summary(self) -> Any: ...


def draw_silos(silos: Holdings, path: str | Path | None = None) -> Figure:
    """Class counts per client as stacked bars (sizes only, for regression)."""
    n, classes = len(silos.sizes), silos.classes
    figure, (axes,) = make(min(16, max(6, 0.28 * n + 2)), 4, 1)
    at = np.arange(n)
    if classes is None:
        axes.bar(at, silos.sizes, color=COLORS[0])
    else:
        table = silos.summary()
        bottom = np.zeros(n)
        for j, label in enumerate(classes):
            counts = table[f"class {label:g}"].to_numpy(float)
            axes.bar(at, counts, bottom=bottom, color=COLORS[j % len(COLORS)], label=f"{label:g}", width=0.85)
            bottom += counts
        axes.legend(title="class", frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    axes.set(xlabel="client", ylabel="samples", xlim=(-0.7, n - 0.3))
    axes.set_title(str(silos), pad=12)
    if n <= 12:
        axes.set_xticks(at, silos.names, rotation=30, ha="right")
    axes.spines[["top", "right"]].set_visible(False)
    return finish(figure, path)
