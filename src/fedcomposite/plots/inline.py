"""Pictures inside a page: Matplotlib's SVG with words that stay words, and what a pointer over a part of it shows."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from fedcomposite.plots.canvas import make

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_DRAWN = (f"{_SVG}use", f"{_SVG}path")
_SILENT = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_GAP = 14  # pixels from one line of words to the next


def plain(text: str) -> str:
    """Words that Matplotlib neither reads as a formula nor leaves out of a legend."""
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")


class Picture:
    """One picture of so many pixels; ``axes`` are Matplotlib's, for all that is not here."""

    def __init__(
        self, size: tuple[int, int], labels: tuple[str, str], *, log_x: bool = False, log_y: bool = False
    ) -> None:
        self.size, self._marks, self._shown = size, 0, dict[str, tuple[str, Sequence[str]]]()
        self.figure, (self.axes,) = make(size[0] / 72, size[1] / 72, 1)
        self.axes.set_xlabel(labels[0], fontsize=12)
        self.axes.set_ylabel(plain(labels[1]), fontsize=12)
        self.axes.set_xscale("log" if log_x else "linear")
        self.axes.set_yscale("log" if log_y else "linear")
        self.axes.tick_params(which="both", bottom=False, left=False, labelsize=11, pad=7)
        self.axes.grid(color="#eee")
        self.axes.set_axisbelow(True)
        self.axes.spines[:].set_color("#999")

    @classmethod
    def of(cls, figure: Figure) -> Picture:
        """A figure that is drawn already."""
        made = cls.__new__(cls)
        width, height = (int(72 * inches) for inches in figure.get_size_inches())
        made.figure, made.size, made._shown = figure, (width, height), {}
        return made

    def _named(self, kind: str, titles: Sequence[str]) -> str:
        name = f"part {len(self._shown)}"
        self._shown[name] = kind, titles
        return name

    def line(self, points: Points, color: str, title: str, *, kind: str = "", dashed: bool = False) -> None:
        """A line through points; its title is what a pointer over it shows, its kind a class for scripts."""
        dashes: Any = (0, (4, 3)) if dashed else "-"
        style: dict[str, Any] = {"color": color, "linewidth": 1.8, "linestyle": dashes, "clip_on": False}
        (drawn,) = self.axes.plot(*zip(*points, strict=True), label=plain(title), **style)
        drawn.set_gid(self._named(kind, [title]))

    def dots(self, points: Points, color: str, titles: Sequence[str], size: float = 28.0) -> None:
        """A dot at each point, with what a pointer over it shows."""
        x, y = zip(*points, strict=True)
        drawn = self.axes.scatter(x, y, s=size, color=color, linewidths=0, zorder=3, clip_on=False)
        drawn.set_gid(self._named("", titles))

    def mark(self, x: float, label: str) -> None:
        """A vertical dashed line with a word at its head, on the side where there is room."""
        self.axes.axvline(x, color="#666", linewidth=1, linestyle=(0, (3, 3)))
        left = self.axes.transAxes.inverted().transform(self.axes.transData.transform((x, 1.0)))[0] < 0.5
        down = -4 - _GAP * self._marks
        self.axes.annotate(
            plain(label), (x, 1), (3 if left else -3, down), xycoords=("data", "axes fraction"),
            textcoords="offset points", color="#666", fontsize=11, ha="left" if left else "right", va="top",
        )  # fmt: skip
        self._marks += 1  # the next word stands lower

    def ends(self, names: Sequence[tuple[str, float, str]]) -> None:
        """Names at the right end of lines, each with its last value and a colour, none over another."""
        low, high = self.axes.get_ylim()
        gap = _GAP / (self.size[1] - 70)  # of the height of the axes, about
        rows = sorted(((value - low) / (high - low), name, color) for name, value, color in names)
        heights: list[float] = []
        for height, _, _ in rows:
            heights.append(max(height, heights[-1] + gap if heights else 0.0))
        above = 1 + gap / 2
        for i in reversed(range(len(heights))):
            above = heights[i] = min(heights[i], above - gap)
        for at, (end, name, color) in zip(heights, rows, strict=True):
            self.axes.annotate(
                plain(name), (1, end), (1.03, at), xycoords="axes fraction", va="center", fontsize=11,
                arrowprops={"arrowstyle": "-", "color": color, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)},
            )  # fmt: skip

    def svg(self, title: str) -> str:
        """The picture; ``title`` is what a reader who cannot see it is told."""
        from matplotlib import rc_context

        ElementTree.register_namespace("", _SVG[1:-1])
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedcomposite"}), StringIO() as file:
            self.figure.savefig(file, format="svg", transparent=True, metadata=_SILENT)
            root = ElementTree.fromstring(file.getvalue())
        root.attrib |= {"width": str(self.size[0]), "height": str(self.size[1]), "role": "img", "aria-label": title}
        for group in root.iter(f"{_SVG}g"):
            kind, titles = self._shown.get(group.attrib.pop("id", ""), ("", ()))  # ids would occur in every picture
            parts = [
                part for part in group.iter() if part.tag in (f"{_SVG}use", f"{_SVG}path") and "id" not in part.attrib
            ]
            for part, words in zip(parts, titles, strict=bool(titles)):
                part.attrib |= {"class": kind, "data-name": words} if kind else {}
                ElementTree.SubElement(part, f"{_SVG}title").text = words
        for part in root.iter():
            if _LINK in part.attrib:
                part.set("href", part.attrib.pop(_LINK))
        return ElementTree.tostring(root, encoding="unicode")
