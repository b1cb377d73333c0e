"""How a method's curve looks: the same colour, dashes and marker in every picture, and no two alike in one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6BB1")
DASHES: tuple[Any, ...] = (
    "-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (9, 3)), (0, (3, 1, 1, 1)), (0, (1, 4)),
)  # fmt: skip
MARKERS: tuple[Any, ...] = (
    *("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h"),
    *("d", "8", "H", "+", "x", "1", "2", "3", "4", "|", "_"),
    *((n, style, turn) for turn in (0, 23) for style in (1, 2, 0) for n in (7, 9, 5, 6, 8, 4, 3)),
)

_SHADES = (0.0, -0.35, 0.4, -0.55, 0.6, -0.2, 0.2, -0.7)
"""How far the colours of a row of places are from those of the first, towards black (negative) or white."""

_ASSIGNED = (
    *("FedNMap", "FedAvg", "Scaffold", "FedMid", "FedDA", "Zhang", "ProximalGradient", "FedCanon"),
    *("FedCanonII", "FedProx", "Scaffnew", "FedDR", "FastFedDA", "FedMLS", "FedMSPP", "FedADMM"),
    *("ProxScaffnew", "FedDyn", "FedPD", "FedSplit", "FedDC", "FedAvgM", "ScaffoldM", "Mime"),
    *("MimeLite", "STEM", "GradSkip", "TAMUNA", "EControlDA", "ProxNewton", "ChordNewton"),
    *("FedCEF", "ProxCSL", "SDANE", "AccSDANE", "SketchNewton"),
)
"""Methods whose looks are given by their place here, those that are often compared in colours of their own; a method
that is not named here gets one from its name. Append only: a published figure keeps its colours."""


class Look(NamedTuple):
    """Keyword arguments of ``Axes.plot``."""

    color: str
    linestyle: Any
    marker: Any


def looks(labels: Iterable[str], methods: Mapping[str, str] | None = None) -> dict[str, Look]:
    """A look for each label, that of the method which it belongs to (by ``methods``, or the label itself).

    Every method has a colour and a marker of its own, also one that is not of this package; up to 64 of them. Several
    curves of one method share its colour and differ in dashes, eight of them.

    Examples
    --------
    >>> looks(["FedAvg"])["FedAvg"] == looks(["Scaffold", "FedAvg"])["FedAvg"]
    True
    """
    names = list(labels)
    plain = {label: (methods or {}).get(label, label).partition(" (")[0] for label in names}  # "FedAvg (2)": FedAvg
    taken: set[int] = set()
    homes: dict[str, int] = {}
    for name in sorted(dict.fromkeys(plain.values()), key=lambda name: _slot(name)[1]):  # those with a place come first
        homes[name] = _free(_slot(name)[0], taken)
    found: dict[str, Look] = {}
    seen = dict.fromkeys(homes, 0)
    for label in names:
        home, before = homes[plain[label]], seen[plain[label]]
        seen[plain[label]] += 1
        if before and before % len(DASHES) == 0:  # its colour has no dashes left
            home = homes[plain[label]] = _free(home, taken)
        dash = (home // len(COLORS) + before) % len(DASHES)
        marker = MARKERS[(home + 3 * (before % len(DASHES))) % len(MARKERS)]
        found[label] = Look(_shade(home), DASHES[dash], marker)
    return found


def swept(labels: Iterable[str]) -> dict[str, str]:
    """For ``methods`` of a figure whose curves are values of a number and not methods: the strongest looks first.

    Examples
    --------
    >>> looks(["tau = 1", "tau = 2"], swept(["tau = 1", "tau = 2"]))["tau = 2"].color
    '#D55E00'
    """
    return dict(zip(dict.fromkeys(labels), _ASSIGNED, strict=False))


def _free(slot: int, taken: set[int]) -> int:
    """The next place that nobody has, which is taken then."""
    most = len(COLORS) * len(DASHES)
    found = next((s for s in ((slot + i) % most for i in range(most)) if s not in taken), slot)
    taken.add(found)
    return found


def _shade(slot: int) -> str:
    """The colour of a place: those of the first row as they are, of others towards black or white."""
    color, row = COLORS[slot % len(COLORS)], slot // len(COLORS)
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    amount = _SHADES[row] if any(parts) else 0.1 * row
    end = 255 if amount > 0 else 0
    return "#" + "".join(f"{round(p + abs(amount) * (end - p)):02X}" for p in parts)


def _slot(name: str) -> tuple[int, bool]:
    """A place in the grid of colours and dashes, and whether it was drawn from the name."""
    if name in _ASSIGNED:
        return _ASSIGNED.index(name), False
    drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    rest = len(COLORS) * len(DASHES) // 2
    return rest + drawn % rest, True
