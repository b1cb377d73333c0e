"""Convergence curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from fedcomposite.plots.canvas import finish, make
from fedcomposite.plots.looks import looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Histories = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]
Curve = npt.NDArray[np.float64]

Axis = Literal["rounds", "bytes", "gradients", "proxes", "seconds"]
AXES: dict[str, tuple[str, tuple[str, ...], float]] = {
    "rounds": ("round", ("round",), 1.0),
    "bytes": ("MB sent, both ways", ("bytes_up", "bytes_down"), 1e-6),
    "gradients": ("gradients, all clients", ("gradient_evaluations",), 1.0),
    "proxes": ("proxes of h", ("prox_evaluations",), 1.0),
    "seconds": ("seconds", ("seconds",), 1.0),
}
"""What may lie on the x axis: its label, the keys of a record that are added up, and their unit."""


def draw_histories(
    histories: Histories,
    path: str | Path | None = None,
    title: str = "",
    *,
    x: Axis = "rounds",
    reference: float | None = None,
    methods: Mapping[str, str] | None = None,
) -> Figure:
    """Relative stationarity, objective gap, nonzeros and test accuracy, if any.

    Curves are means over seeds, bands their range.

    Parameters
    ----------
    histories : mapping
        For each label the histories of one or more seeds.
    path : path, optional
        A picture to write; its suffix says of which kind.
    title : str
        A title.
    x : {"rounds", "bytes", "gradients", "proxes", "seconds"}
        What the curves are drawn against; with several seeds, its mean at the rounds which they share.
    reference : float, optional
        The optimal value that the objective's gap is measured to; the lowest value seen in any run if left out.
    methods : mapping, optional
        The method behind a label, whose looks it gets; the label itself if left out.
    """
    from matplotlib.ticker import MaxNLocator

    records = [r for runs in histories.values() for run in runs for r in run]
    judged = all("test_accuracy" in r for r in records)
    figure, panels = make(17 if judged else 13, 4.2, 4 if judged else 3)
    best = min(r["objective"] for r in records) if reference is None else reference
    gap = "objective − lowest seen" if reference is None else f"objective − {reference:.8g}"
    caption, keys, unit = AXES[x]
    chosen = looks(histories, methods)
    for i, (label, runs) in enumerate(histories.items()):
        across = unit * np.sum([_column(runs, key) for key in keys], axis=0).mean(0)
        stationarity = _column(runs, "stationarity")
        first = stationarity[:, :1]
        style: dict[str, Any] = {
            **chosen[label]._asdict(), "label": label, "markersize": 4, "linewidth": 1.6,
            "markevery": (i % 5 * max(1, len(across) // 50), max(1, len(across) // 10)),
        }  # fmt: skip
        _curve(panels[0], across, stationarity / np.where(first > 0, first, 1.0), style, log=True)
        _curve(panels[1], across, _column(runs, "objective") - best, style, log=True)
        _curve(panels[2], across, _column(runs, "nonzeros"), style, log=False)
        for axes in panels[3:]:
            _curve(axes, across, _column(runs, "test_accuracy"), style, log=False)
    for axes, name in zip(panels, ("stationarity / initial", gap, "nonzeros", "test accuracy"), strict=False):
        axes.set(xlabel=caption, ylabel=name)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[2].set_ylim(bottom=0)
    panels[2].yaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = panels[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
    if title:
        figure.suptitle(title)
    return finish(figure, path)


def _column(runs: Sequence[Sequence[Mapping[str, Any]]], key: str) -> Curve:
    """Values of all seeds at the rounds they share, ``(seeds, rounds)``."""
    shared = sorted(set.intersection(*({r["round"] for r in run} for run in runs)))
    table = [{r["round"]: r[key] for r in run} for run in runs]
    return np.asarray([[t[r] for r in shared] for t in table], float)


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
