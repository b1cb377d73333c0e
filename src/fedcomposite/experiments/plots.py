"""Pictures: convergence curves and what the silos hold. Every function returns a matplotlib Figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedcomposite.runtime.history import Record

if TYPE_CHECKING:
    from fedcomposite.data.silos import Silos

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6BB1")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

Histories = Mapping[str, Sequence[Sequence[Record]]]
Curve = npt.NDArray[np.float64]


def _figure(width: float, height: float, columns: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(1, columns, i + 1) for i in range(columns)]


def _finish(figure: Figure, path: str | Path | None) -> Figure:
    if path is not None:
        figure.savefig(path)
    return figure


def _column(runs: Sequence[Sequence[Record]], key: str) -> tuple[Curve, Curve]:
    """Values of all seeds at the rounds they share, ``(seeds, rounds)``, and those rounds."""
    shared = sorted(set.intersection(*({r["round"] for r in run} for run in runs)))
    table = [{r["round"]: r[key] for r in run} for run in runs]
    return np.asarray(shared, float), np.asarray([[t[r] for r in shared] for t in table], float)


def draw_histories(histories: Histories, path: str | Path | None = None, title: str = "") -> Figure:
    """Relative stationarity, objective gap, nonzeros and test accuracy, if any, against rounds.

    Curves are means over seeds, bands their range.
    The gap is measured to the lowest objective seen in any of the runs.
    """
    judged = all("test_accuracy" in r for runs in histories.values() for run in runs for r in run)
    figure, (left, middle, right, *last) = _figure(17 if judged else 13, 4.2, 4 if judged else 3)
    best = min(r["objective"] for runs in histories.values() for run in runs for r in run)
    for i, (label, runs) in enumerate(histories.items()):
        look: dict[str, Any] = {
            "color": COLORS[i % len(COLORS)], "linestyle": STYLES[i % len(STYLES)], "label": label,
            "marker": MARKERS[i % len(MARKERS)], "markersize": 4, "linewidth": 1.6,
        }  # fmt: skip
        rounds, stationarity = _column(runs, "stationarity")
        first = stationarity[:, :1]
        relative = stationarity / np.where(first > 0, first, 1.0)
        look["markevery"] = (i % 5 * max(1, len(rounds) // 50), max(1, len(rounds) // 10))
        _curve(left, rounds, relative, look, log=True)
        _curve(middle, rounds, _column(runs, "objective")[1] - best, look, log=True)
        _curve(right, rounds, _column(runs, "nonzeros")[1], look, log=False)
        for axes in last:
            _curve(axes, rounds, _column(runs, "test_accuracy")[1], look, log=False)
    names = ("stationarity / initial", "objective − lowest seen", "nonzeros", "test accuracy")
    for axes, name in zip((left, middle, right, *last), names, strict=False):
        axes.set(xlabel="round", ylabel=name)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = left.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
    if title:
        figure.suptitle(title)
    return _finish(figure, path)


def _curve(axes: Axes, x: Curve, y: Curve, look: dict[str, Any], log: bool) -> None:
    if log:
        y = np.where(y > 1e-16, y, np.nan)  # below rounding there is nothing to see
        axes.set_yscale("log")
        center = np.exp(np.log(y).mean(0))
    else:
        center = y.mean(0)
    axes.plot(x, center, **look)
    if len(y) > 1:
        axes.fill_between(x, y.min(0), y.max(0), color=look["color"], alpha=0.15, linewidth=0)


def draw_silos(silos: Silos, path: str | Path | None = None) -> Figure:
    """Class counts per client as stacked bars (sizes only, for regression)."""
    n, classes = len(silos), silos.classes
    figure, (axes,) = _figure(min(16, max(6, 0.28 * n + 2)), 4, 1)
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
    return _finish(figure, path)
