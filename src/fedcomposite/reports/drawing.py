"""Pictures as inline SVG: axes with ticks, lines, points and bars, in colours that most people tell apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from fedcomposite.plots.looks import COLORS

__all__ = ["COLORS", "Axes", "ticks"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 44
Points = Sequence[tuple[float, float]]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two.

    Examples
    --------
    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    size = 10 ** math.floor(math.log10((high - low) / most))
    step = next(size * k for k in (1, 2, 5, 10) if (high - low) / (size * k) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


class Axes:
    """One picture, in the units of its data; a logarithmic axis takes the numbers themselves."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        labels: tuple[str, str],
        size: tuple[int, int] = (560, 340),
        logarithmic: tuple[bool, bool] = (False, False),
        left: int = _LEFT,
        right: int = _RIGHT,
    ) -> None:
        self._log, (self.width, self.height), self._left, self._right = logarithmic, size, left, right
        self._x, self._y = self._span(x, 0), self._span(y, 1)
        self.parts: list[str] = []
        self._labels, self._marks = labels, 0

    def _span(self, ends: tuple[float, float], axis: int) -> tuple[float, float]:
        low, high = (self._value(v, axis) for v in ends)
        return (low, high) if low != high else (low - 0.5, high + 0.5)

    def _value(self, v: float, axis: int) -> float:
        return math.log10(v) if self._log[axis] else v

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is, in pixels."""
        (x0, x1), (y0, y1) = self._x, self._y
        across = (self._value(x, 0) - x0) / (x1 - x0)
        up = (self._value(y, 1) - y0) / (y1 - y0)
        inner = self.width - self._left - self._right, self.height - _TOP - _BOTTOM
        return self._left + across * inner[0], self.height - _BOTTOM - up * inner[1]

    def line(self, points: Points, color: str, *, title: str = "", kind: str = "", dashed: bool = False) -> None:
        """A line through points; its title is what a pointer over it shows."""
        where = " ".join(f"{a:.1f},{b:.1f}" for a, b in (self.at(*p) for p in points))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        named = f' class="{kind}" data-name="{escape(title)}"' if kind else ""
        self.parts.append(
            f'<polyline{named} points="{where}" fill="none" stroke="{color}" stroke-width="1.8"{dash}>'
            f"<title>{escape(title)}</title></polyline>"
        )

    def dots(self, points: Points, color: str, titles: Sequence[str] = (), radius: float = 3.0) -> None:
        """A dot at each point."""
        for i, point in enumerate(points):
            a, b = self.at(*point)
            said = f"<title>{escape(titles[i])}</title>" if titles else ""
            self.parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{radius}" fill="{color}">{said}</circle>')

    def bar(self, start: tuple[float, float], end: tuple[float, float], color: str, width: float = 1.4) -> None:
        """A straight line."""
        (a, b), (c, d) = self.at(*start), self.at(*end)
        place = f'x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}"'
        self.parts.append(f'<line {place} stroke="{color}" stroke-width="{width}"/>')

    def mark(self, x: float, label: str, color: str = "#666") -> None:
        """A vertical dashed line with a word at its head, on the side where there is room."""
        a, base, head = self.at(x, self._end(1))[0], self.height - _BOTTOM, _TOP + 10 + 13 * self._marks
        side, anchor = (3, "start") if a < self.width / 2 else (-3, "end")
        place = f'x="{a + side:.1f}" y="{head}" text-anchor="{anchor}"'
        self.parts.append(
            f'<line x1="{a:.1f}" y1="{_TOP}" x2="{a:.1f}" y2="{base}" stroke="{color}" stroke-dasharray="3 3"/>'
            f'<text {place} font-size="11" fill="{color}">{escape(label)}</text>'
        )
        self._marks += 1  # the next word stands lower

    def names(self, ends: Sequence[tuple[str, float, str]]) -> None:
        """Names at the right end of lines (each with its last value and a colour), none over another."""
        gap, base, right = 13.0, self.height - _BOTTOM, self.width - self._right
        rows = sorted((self.at(self._end(0), y)[1], name, color) for name, y, color in ends)
        heights: list[float] = []
        for b, _, _ in rows:
            heights.append(max(b, heights[-1] + gap if heights else 0.0))
        below = base + gap
        for i in reversed(range(len(heights))):
            below = heights[i] = min(heights[i], below - gap)
        for b, (end, name, color) in zip(heights, rows, strict=True):
            place = f'x1="{right}" y1="{end:.1f}" x2="{right + 12}" y2="{b:.1f}"'
            self.parts.append(
                f'<line {place} stroke="{color}" stroke-width="1.4"/>'
                f'<text x="{right + 15}" y="{b + 4:.1f}" font-size="11">{escape(name)}</text>'
            )

    def _end(self, axis: int) -> float:
        low = (self._x, self._y)[axis][0]
        return 10**low if self._log[axis] else low

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", color: str = "#222") -> None:
        """Words at a point."""
        a, b = self.at(x, y)
        place = f'x="{a:.1f}" y="{b + 4:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text {place} font-size="12" fill="{color}">{escape(words)}</text>')

    def left_text(self, y: float, words: str) -> None:
        """Words to the left of the axes."""
        b = self.at(self._end(0), y)[1]
        self.parts.append(
            f'<text x="{self._left - 8}" y="{b + 4:.1f}" text-anchor="end" font-size="12">{escape(words)}</text>'
        )

    def legend(self, names: Sequence[str], colors: Sequence[str], *, top: bool = False) -> None:
        """Names in their colours, in the lower or the upper right corner."""
        for i, (name, color) in enumerate(zip(names, colors, strict=True)):
            y = _TOP + 14 + 16 * i if top else self.height - _BOTTOM - 10 - 16 * (len(names) - 1 - i)
            right = self.width - self._right
            self.parts.append(
                f'<rect x="{right - 12}" y="{y - 9}" width="10" height="10" fill="{color}"/>'
                f'<text x="{right - 17}" y="{y}" text-anchor="end" font-size="12">{escape(name)}</text>'
            )

    def _axis(self, axis: int) -> list[tuple[float, str]]:
        """Places of ticks, and what stands there."""
        low, high = sorted((self._x, self._y)[axis])
        if not self._log[axis]:
            return [(v, f"{v:g}") for v in ticks(low, high)]
        whole = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
        if len(whole) >= 2:
            step = max(1, len(whole) // 6)
            return [(10.0**k, f"1e{k}" if abs(k) > 2 else f"{10.0**k:g}") for k in whole[::step]]
        return [(10**v, f"{10**v:.2g}") for v in ticks(low, high, 4)]

    def svg(self, title: str, *, numbers: tuple[bool, bool] = (True, True)) -> str:
        """The picture; ``title`` is what a reader who cannot see it is told."""
        frame, (right, base) = [], (self.width - self._right, self.height - _BOTTOM)
        for v, label in self._axis(0) if numbers[0] else []:
            a = self.at(v, self._end(1))[0]
            frame.append(f'<line x1="{a:.1f}" y1="{_TOP}" x2="{a:.1f}" y2="{base}" stroke="#eee"/>')
            frame.append(f'<text x="{a:.1f}" y="{base + 16}" text-anchor="middle" font-size="11">{label}</text>')
        for v, label in self._axis(1) if numbers[1] else []:
            b = self.at(self._end(0), v)[1]
            frame.append(f'<line x1="{self._left}" y1="{b:.1f}" x2="{right}" y2="{b:.1f}" stroke="#eee"/>')
            frame.append(f'<text x="{self._left - 6}" y="{b + 4:.1f}" text-anchor="end" font-size="11">{label}</text>')
        box = f'x="{self._left}" y="{_TOP}" width="{right - self._left}" height="{base - _TOP}"'
        frame.append(f'<rect {box} fill="none" stroke="#999"/>')
        middle = (self._left + right) / 2
        words = self._labels
        frame.append(
            f'<text x="{middle}" y="{self.height - 8}" text-anchor="middle" font-size="12">{escape(words[0])}</text>'
        )
        if words[1]:
            turned = f'transform="translate(14 {(_TOP + base) / 2}) rotate(-90)"'
            frame.append(f'<text {turned} text-anchor="middle" font-size="12">{escape(words[1])}</text>')
        view = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        style = 'font-family="sans-serif" role="img"'
        body = "".join([*frame, *self.parts])
        return f'<svg xmlns="http://www.w3.org/2000/svg" {view} {style} aria-label="{escape(title)}">{body}</svg>'
