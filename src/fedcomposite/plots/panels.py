"""Panels of curves: what is drawn against what, means over seeds and their bands, at the width of a column or page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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

Band = Literal["sd", "range", "seeds"]
BANDS = {
    "sd": "bands: one standard deviation over seeds",
    "range": "bands: range over seeds",
    "seeds": "lines: medians; thin lines: seeds",
}
Width = Literal["column", "page", "screen"]
WIDTHS = {"column": 3.4, "page": 7.0, "screen": 13.0}
"""Inches: a column or the page of a paper in two columns, and a screen."""

FLOOR = 1e-16
LOGARITHMIC = ("stationarity", "suboptimality")
NAMES = {
    "stationarity": "stationarity / initial",
    "test_accuracy": "test accuracy",
    "train_accuracy": "training accuracy",
}


class Panel(NamedTuple):
    """One panel: the runs of each label, and what is drawn of their records."""

    histories: Histories
    y: str = "stationarity"
    """A key of the records, or "suboptimality": the objective minus ``reference``. Stationarity is drawn relative to
    its first value."""
    x: Axis = "rounds"
    title: str = ""
    reference: float | None = None
    """The optimal value."""
    log_x: bool = False
    log_y: bool | None = None
    """Whether y has a logarithmic axis; stationarity and suboptimality have one if left out."""
    name: str = ""
    """What is written at the y axis."""
    zoom: bool = False
    """Whether the y axis leaves the first record out, as of accuracies that all start at chance."""

    @property
    def logarithmic(self) -> bool:
        """Whether the y axis is logarithmic."""
        return self.y in LOGARITHMIC if self.log_y is None else self.log_y


def draw_panels(
    panels: Sequence[Panel],
    path: str | Path | None = None,
    title: str = "",
    *,
    width: Width | float = "page",
    columns: int | None = None,
    band: Band = "sd",
    methods: Mapping[str, str] | None = None,
    caption: str = "",
) -> Figure:
    """Draw panels side by side, with one legend and a caption that names the bands.

    Parameters
    ----------
    panels : sequence of Panel
        What to draw.
    path : path, optional
        A picture to write; its suffix says of which kind (.pdf, .png, .svg).
    title : str
        A title.
    width : {"column", "page", "screen"} or float
        The width of the figure; a number is in inches.
    columns : int, optional
        Panels in a row; all of them if left out, two at most in a column.
    band : {"sd", "range", "seeds"}
        What is shaded around the mean over seeds; on a logarithmic axis mean and deviation are those of the logarithm.
        "seeds" draws every seed beside the median: where some converge and others do not, a mean is like none of them.
    methods : mapping, optional
        The method behind a label, whose looks it gets; the label itself if left out.
    caption : str
        More words for the caption.
    """
    inches = WIDTHS[width] if isinstance(width, str) else float(width)
    across = columns or min(len(panels), 2 if width == "column" else 4)
    rows = math.ceil(len(panels) / across)
    labels = list(dict.fromkeys(label for panel in panels for label in panel.histories))
    small = inches < WIDTHS["screen"]
    height = rows * (min(0.8 * inches / across, 4.2) + 0.2) + 0.13 * math.ceil(len(labels) / 4) + 0.3 * bool(title)
    figure, axes = make(inches, max(height, 1.9), across, rows)
    chosen = looks(labels, methods)
    for place, panel in zip(axes, panels, strict=False):
        _draw(place, panel, chosen, labels, band, small)
    for place in axes[len(panels) :]:
        place.set_visible(False)
    shown = {text: line for place in axes for line, text in zip(*place.get_legend_handles_labels(), strict=True)}
    size = 7 if small else 10
    seeds = max((len(runs) for panel in panels for runs in panel.histories.values()), default=1)
    told = [caption] if caption else []
    middle = "lines: geometric means; " if band != "seeds" and all(p.logarithmic for p in panels) else ""
    told += [f"{middle}{BANDS[band]} ({seeds})"] if seeds > 1 else []
    if len(shown) > 1:
        figure.legend(
            [shown[k] for k in labels if k in shown],
            [k for k in labels if k in shown],
            loc="outside lower center",
            ncols=min(6 if inches > 6 else 3, len(shown)),
            frameon=False,
            fontsize=size,
            title="; ".join(told) or None,
            title_fontproperties={"size": size - 1},
        )
    elif told:
        figure.supxlabel("; ".join(told), fontsize=size - 1, color="0.35")
    if title:
        figure.suptitle(title, fontsize=9 if small else None)
    return finish(figure, path)


def _draw(axes: Axes, panel: Panel, chosen: Any, labels: list[str], band: Band, small: bool) -> None:
    """The curves of one panel."""
    from matplotlib.ticker import MaxNLocator

    caption, keys, unit = AXES[panel.x]
    seen: list[float] = []
    for label, runs in panel.histories.items():
        across = unit * np.sum([column(runs, key) for key in keys], axis=0).mean(0)
        y, shift = values(runs, panel), labels.index(label)
        every = max(1, len(across) // 8)
        style: dict[str, Any] = {
            **chosen[label]._asdict(), "label": label, "markersize": 3 if small else 4,
            "linewidth": 1.1 if small else 1.6, "markevery": (shift % 5 * max(1, every // 5), every),
        }  # fmt: skip
        _curve(axes, across, y, style, band, log=panel.logarithmic)
        seen += [v for v in y[:, 1:].flatten().tolist() if math.isfinite(v)]
    name = panel.name or NAMES.get(panel.y, panel.y)
    if panel.y == "suboptimality" and panel.reference is not None and not panel.name:
        name = f"objective − {panel.reference:.8g}"
    size = 7 if small else 10
    axes.set_xlabel(caption, fontsize=size)
    axes.set_ylabel(name, fontsize=size)
    axes.tick_params(which="both", labelsize=size - 1)
    if panel.title:
        axes.set_title(panel.title, fontsize=size + 1)
    if panel.log_x:
        axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.zoom and len(set(seen)) > 1:
        margin = 0.05 * (max(seen) - min(seen))
        axes.set_ylim(min(seen) - margin, max(seen) + margin)
    if panel.y == "nonzeros":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def values(runs: Sequence[Sequence[Mapping[str, Any]]], panel: Panel) -> Curve:
    """What a panel shows of the runs, ``(seeds, rounds)``."""
    if panel.y == "suboptimality":
        if panel.reference is None:
            raise ValueError("suboptimality needs a reference: the optimal value, as fedcomposite.solve finds it")
        return column(runs, "objective") - panel.reference
    found = column(runs, panel.y)
    if panel.y != "stationarity":
        return found
    first = found[:, :1]
    return found / np.where(first > 0, first, 1.0)


def column(runs: Sequence[Sequence[Mapping[str, Any]]], key: str) -> Curve:
    """Values of all seeds at the rounds they share, ``(seeds, rounds)``."""
    shared = sorted(set.intersection(*({r["round"] for r in run} for run in runs)))
    table = [{r["round"]: r[key] for r in run} for run in runs]
    return np.asarray([[t[r] for r in shared] for t in table], float)


def _curve(axes: Axes, x: Curve, y: Curve, look: dict[str, Any], band: Band, log: bool) -> None:
    """The mean over seeds with its band, on a logarithmic axis those of the logarithm; or the median and all seeds."""
    if log:
        seen = (y > FLOOR).any(0)  # below rounding there is nothing to see
        y = np.log(np.where(seen, np.maximum(y, FLOOR), np.nan))
        axes.set_yscale("log")
    if band == "seeds":
        every, middle = (np.exp(v) if log else v for v in (y, np.median(y, 0)))
        axes.plot(x, middle, **look)
        axes.plot(x, every.T, color=look["color"], alpha=0.35, linewidth=0.4)
        return
    center = y.mean(0)
    spread = y.std(0, ddof=1) if band == "sd" and len(y) > 1 else 0.0
    low, high = (center - spread, center + spread) if band == "sd" else (y.min(0), y.max(0))
    if log:
        center, low, high = np.exp(center), np.exp(low), np.exp(high)
    axes.plot(x, center, **look)
    if len(y) > 1:
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


__all__ = ["AXES", "Axis", "draw_histories"]


def draw_histories(
    histories: Histories,
    path: str | Path | None = None,
    title: str = "",
    *,
    x: Axis = "rounds",
    reference: float | None = None,
    methods: Mapping[str, str] | None = None,
    panels: Sequence[str] | None = None,
    width: Width | float = "screen",
    band: Band = "sd",
    log_x: bool = False,
) -> Figure:
    """Relative stationarity, the objective (its gap, if ``reference`` is given), nonzeros and test accuracy, if any.

    Curves are means over seeds; the caption says what the bands are. Stationarity is the norm of the prox-gradient
    mapping with the *full* gradient at the model of each record, also of runs with minibatches. Networks are measured
    on a sample of the data, whose gradient does not vanish where the full one does: theirs is drawn if asked for,
    and the axis says on how many samples it was measured.

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
        The optimal value that the objective's gap is measured to. Without one the objective itself is drawn: a gap to
        the lowest value seen would fall to zero whether a run has converged or not.
    methods : mapping, optional
        The method behind a label, whose looks it gets; the label itself if left out.
    panels : sequence of str, optional
        What to draw instead: keys of the records, "suboptimality".
    width : {"column", "page", "screen"} or float
        The width of the figure; a number is in inches.
    band : {"sd", "range", "seeds"}
        What is shaded: one standard deviation over seeds, or their range; or every seed is drawn beside the median.
    log_x : bool
        Whether x has a logarithmic axis; the model before the first round has no place on it.
    """
    records = [r for runs in histories.values() for run in runs for r in run]
    measured = {r["evaluated_samples"] for r in records if "evaluated_samples" in r}
    if panels is None:
        judged = all("test_accuracy" in r for r in records)
        panels = [] if measured else ["stationarity"]
        panels += ["objective" if reference is None else "suboptimality", "nonzeros"]
        panels += ["test_accuracy"] if judged else []
    known = set.intersection(*(set(r) for r in records)) | {"suboptimality"}
    for y in panels:
        if y not in known:
            raise ValueError(f"panel {y!r}: not in the records (known: {', '.join(sorted(known))})")
    sampled = f"stationarity on {'–'.join(str(m) for m in sorted(measured))} samples / initial" if measured else ""
    names = {"stationarity": sampled}
    made = [Panel(histories, y, x, reference=reference, log_x=log_x, name=names.get(y, "")) for y in panels]
    return draw_panels(made, path, title, width=width, band=band, methods=methods)
