"""Charts that are not curves over rounds: grouped bars, and points with fitted lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from fedcomposite.plots.canvas import finish, make
from fedcomposite.plots.looks import COLORS, looks
from fedcomposite.plots.panels import WIDTHS, Width

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Bars = Mapping[str, Mapping[str, tuple[float, float]]]
"""For each group the value and the spread of each series; a nan is left out."""


class Scatter(NamedTuple):
    """Points of several labels in one panel."""

    points: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[Any]]]
    """For each label x, y and the spread of y: a number for each, or those below and those above."""
    x: str
    y: str
    title: str = ""
    lines: Mapping[str, tuple[float, float]] = {}
    """For a label the slope and the intercept of log y against log x, drawn as a line."""
    log: bool = True


def draw_bars(
    panels: Mapping[str, Bars],
    path: str | Path | None = None,
    *,
    y: str = "",
    log: bool | None = None,
    width: Width | float = "page",
    methods: Mapping[str, str] | None = None,
    caption: str = "",
) -> Figure:
    """Grouped bars, a panel for each title; whiskers are the spread.

    Unless ``log`` says it, a panel has a logarithmic axis where its values differ by a factor of ten.
    ``methods`` gives series the colours of methods; others are coloured in order.
    """
    inches = WIDTHS[width] if isinstance(width, str) else float(width)
    figure, axes = make(inches, 2.9, len(panels))
    series = list(dict.fromkeys(s for bars in panels.values() for group in bars.values() for s in group))
    chosen = looks(series, methods) if methods is not None else None
    for place, (title, bars) in zip(axes, panels.items(), strict=True):
        wide = 0.8 / max(1, len(series))
        for i, name in enumerate(series):
            at = np.arange(len(bars)) + (i - (len(series) - 1) / 2) * wide
            values = np.asarray([group.get(name, (math.nan, 0.0)) for group in bars.values()], float)
            color = chosen[name].color if chosen is not None else COLORS[i % len(COLORS)]
            error = values[:, 1] if (values[:, 1] > 0).any() else None
            hatch = "//" if chosen is not None and chosen[name].linestyle != "-" else None
            place.bar(at, values[:, 0], wide, yerr=error, label=name, color=color, hatch=hatch, error_kw={"lw": 0.6})
        place.set_xticks(range(len(bars)), list(bars), fontsize=6, rotation=20 if sum(map(len, bars)) > 20 else 0)
        heights = [v for group in bars.values() for v, _ in group.values() if v > 0]
        wide_range = bool(heights) and max(heights) > 10 * min(heights)
        place.set_yscale("log" if (wide_range if log is None else log) else "linear")
        dress(place, "", y, title)
        place.grid(False, axis="x")
    if len(series) > 1:
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="outside lower center", ncols=min(6, len(names)), frameon=False, fontsize=7,
            title=caption or None, title_fontproperties={"size": 6},
        )  # fmt: skip
    return finish(figure, path)


def draw_scatter(
    panels: Sequence[Scatter],
    path: str | Path | None = None,
    *,
    width: Width | float = "page",
    columns: int | None = None,
    methods: Mapping[str, str] | None = None,
    caption: str = "",
) -> Figure:
    """Points with the spread of each, and fitted lines; panels side by side, or so many in a row."""
    inches = WIDTHS[width] if isinstance(width, str) else float(width)
    across = columns or len(panels)
    rows = -(-len(panels) // across)
    figure, axes = make(inches, 2.2 * rows + 0.5, across, rows)
    labels = list(dict.fromkeys(label for panel in panels for label in panel.points))
    chosen = looks(labels, methods)
    for place in axes[len(panels) :]:
        place.set_visible(False)
    for place, panel in zip(axes, panels, strict=False):
        for label, (x, y, spread) in panel.points.items():
            look = chosen[label]
            fit = panel.lines.get(label)
            style: dict[str, Any] = {"color": look.color, "marker": look.marker, "markersize": 4, "label": label}
            dashes = "none" if fit else look.linestyle
            place.errorbar(x, y, yerr=spread, linestyle=dashes, linewidth=1.0, elinewidth=0.6, **style)
            if fit:
                ends = np.asarray([min(x), max(x)], float)
                place.plot(ends, np.exp(fit[1]) * ends ** fit[0], color=look.color, linewidth=0.9)
        if panel.log:
            place.set_xscale("log")
            place.set_yscale("log")
        dress(place, panel.x, panel.y, panel.title)
    shown = {text: line for place in axes for line, text in zip(*place.get_legend_handles_labels(), strict=True)}
    if len(shown) > 1:
        options: dict[str, Any] = {"ncols": min(5, len(shown)), "frameon": False, "fontsize": 7}
        options |= {"title": caption or None, "title_fontproperties": {"size": 6}}
        figure.legend(list(shown.values()), list(shown), loc="outside lower center", **options)
    return finish(figure, path)


def draw_steps(
    lines: Mapping[str, tuple[Any, Any]],
    path: str | Path | None = None,
    *,
    x: str = "",
    y: str = "",
    methods: Mapping[str, str] | None = None,
    width: Width | float = "page",
    log_x: bool = True,
    log_y: bool = False,
) -> Figure:
    """Steps of y against x, a line for each label: profiles, and what was reached by a cost."""
    inches = WIDTHS[width] if isinstance(width, str) else float(width)
    figure, (place,) = make(inches, max(2.9, 0.4 * inches), 1)
    ends = [float(v) for xs, _ in lines.values() for v in xs if math.isfinite(v)]
    for label, look in looks(lines, methods).items():
        across, up = (np.asarray(v, float) for v in lines[label])
        if len(across) and not log_y:  # a share stays what it is to the right end
            across, up = np.append(across, 1.5 * max(ends)), np.append(up, up[-1])
        every = max(1, len(across) // 8)
        style: dict[str, Any] = {**look._asdict(), "markersize": 4, "linewidth": 1.2, "markevery": every}
        place.step(across, up, where="post", label=label, **style)
    if log_x:
        place.set_xscale("log")
    if log_y:
        place.set_yscale("log")
    else:
        place.set_ylim(0, 1.05)
    dress(place, x, y, "")
    if len(lines) > 1:
        figure.legend(loc="outside lower center", ncols=min(6, len(lines)), frameon=False, fontsize=7)
    return finish(figure, path)


def dress(axes: Any, x: str, y: str, title: str) -> None:
    """Names, sizes of letters and lines that all charts share."""
    axes.set_xlabel(x, fontsize=7)
    axes.set_ylabel(y, fontsize=7)
    axes.set_title(title, fontsize=8)
    axes.tick_params(which="both", labelsize=6)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


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


def draw_forests(
    sites: pd.DataFrame, combined: pd.DataFrame, path: str | Path | None = None, *, ratio: str = ""
) -> Figure:
    """A panel per row of ``combined``: each site's estimate with its interval, the mean, and where a further site lies.

    The tables are those of :class:`fedcomposite.analysis.SiteEffects`. With a ``ratio`` the axes are its numbers.
    """
    columns = min(3, max(1, len(combined)))
    rows = -(-max(1, len(combined)) // columns)
    names = list(dict.fromkeys(sites["site"]))
    figure, axes = make(3.4 * columns + 0.6, rows * (0.9 + 0.24 * (len(names) + 2)), columns, rows)
    for place in axes[len(combined) :]:
        place.set_visible(False)
    for i, (place, (name, row)) in enumerate(zip(axes, combined.iterrows(), strict=False)):
        _forest(place, sites[sites["name"] == name].set_index("site").loc[names], row, i % columns == 0)
        place.set_title(str(name), fontsize=9)
        place.set_xlabel(ratio or "coefficient", fontsize=8)
        if ratio:
            place.set_xticks(*_ratio_ticks(*place.get_xlim()))
    return finish(figure, path)


def _ratio_ticks(lowest: float, highest: float) -> tuple[list[float], list[str]]:
    """Where ratios stand on an axis of their logarithms, three or more with 1 among them, and what they are called."""
    low, high = math.exp(lowest), math.exp(highest)
    ticks = [m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    for step in (m * 10.0**-e for e in range(7) for m in (1, 0.5, 0.25)):
        if len(ticks) > 2:
            break
        ticks = [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return np.log(ticks).tolist(), [f"{t:.6g}" for t in ticks]


def draw_effects(table: pd.DataFrame, path: str | Path | None = None) -> Figure:
    """A panel per column of :class:`fedcomposite.analysis.EffectCurves`: a curve with its band for each ``given``."""
    names = list(dict.fromkeys(table["column"]))
    columns = min(3, max(1, len(names)))
    rows = -(-max(1, len(names)) // columns)
    figure, axes = make(3.4 * columns + 0.6, 2.6 * rows, columns, rows)
    ratio = next((c.removesuffix("_ratio") for c in map(str, table) if c.endswith("_ratio")), "")
    for place in axes[len(names) :]:
        place.set_visible(False)
    for place, name in zip(axes, names, strict=False):
        own = table[table["column"] == name]
        place.axhline(0.0, color="#999", linewidth=0.8)
        for i, (given, curve) in enumerate(own.groupby("given", sort=False)):
            middle, low, high = (curve[c].to_numpy(float) for c in ("estimate", "lower", "upper"))
            color, at = COLORS[i % len(COLORS)], curve["value"].to_numpy(float)
            place.plot(at, middle, color=color, linewidth=1.6, label=str(given) or None)
            place.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
        if ratio:  # at margins, which are drawn
            place.set_yticks(*_ratio_ticks(*place.get_ylim()))
        if own["given"].iloc[0]:
            place.legend(frameon=False, fontsize=7)
        place.set_xlabel(str(name), fontsize=9)
        beside = f"{own['reference'].iloc[0]:.4g}"
        place.set_ylabel(f"{ratio} ratio to {beside}" if ratio else f"difference to {beside}", fontsize=8)
    return finish(figure, path)


def _forest(place: Axes, sites: pd.DataFrame, row: pd.Series[Any], named: bool) -> None:
    """One coefficient: boxes whose areas are weights, a diamond, and a line for a further site."""
    heights = range(len(sites))
    place.axvline(0.0, color="#999", linewidth=0.8)
    known = sites["se"].to_numpy(float)
    weight = 1 / (known**2 + (0.0 if math.isnan(row["tau2"]) else row["tau2"]))
    weight /= np.nan_to_num(weight).max() or 1.0
    for at, (lower, upper, middle, w) in enumerate(
        zip(sites["lower"], sites["upper"], sites["estimate"], weight, strict=True)
    ):
        if math.isnan(middle):
            place.annotate(
                "not determined", (0.02, at), xycoords=("axes fraction", "data"), fontsize=7, va="center", color="#777"
            )
            continue
        place.hlines(at, lower, upper, color=COLORS[0], linewidth=1.2)
        place.plot([middle], [at], "s", color=COLORS[0], markersize=2.5 + 4 * math.sqrt(w))
    last = len(sites)
    if not math.isnan(row["estimate"]):
        ends = row["lower"], row["estimate"], row["upper"], row["estimate"]
        place.fill(ends, [last, last - 0.28, last, last + 0.28], color="black")
        place.hlines(last + 1, row["predict_lower"], row["predict_upper"], color="black", linewidth=1.2, linestyle=":")
    whole = [*sites["lower"].dropna(), *sites["upper"].dropna(), *row[["lower", "upper"]].dropna(), 0.0]
    low, high = np.quantile(whole, [0.02, 0.98]) if len(whole) > 20 else (min(whole), max(whole))
    room = 0.08 * max(high - low, 1e-12)
    place.set_xlim(low - room, high + room)
    labels = [*map(str, sites.index), "mean", "a further site"]
    place.set_yticks([*heights, last, last + 1], labels if named else [""] * len(labels), fontsize=8)
    place.set_ylim(last + 1.6, -0.6)
    place.tick_params(axis="x", labelsize=8)
    note = "" if math.isnan(row["i2"]) else f"I² {row['i2']:.0f} %"
    place.annotate(note, (0.99, 0.02), xycoords="axes fraction", fontsize=7, ha="right", va="bottom", color="#555")
