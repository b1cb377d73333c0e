"""How a method's curve looks: the same colour, dashes and marker in every picture, and no two alike in one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6BB1")
DASHES: tuple[Any, ...] = (
    "-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (9, 3)), (0, (3, 1, 1, 1)), (0, (1, 4)),
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")

_ASSIGNED = (
    *("FedNMap", "FedAvg", "Scaffold", "FedMid", "FedDA", "Zhang", "ProximalGradient", "FedCanon"),
    *("FedCanonII", "FedProx", "Scaffnew", "FedDR", "FastFedDA", "FedMLS", "FedMSPP", "FedADMM"),
    *("ProxScaffnew", "FedDyn", "FedPD", "FedSplit", "FedDC", "FedAvgM", "ScaffoldM", "Mime"),
    *("MimeLite", "STEM", "GradSkip", "TAMUNA", "EControlDA", "ProxNewton", "ChordNewton"),
)
"""Methods whose looks are given by their place here, those that are often compared in colours of their own; a method
that is not named here gets one from its name. Append only: a published figure keeps its colours."""


class Look(NamedTuple):
    """Keyword arguments of ``Axes.plot``."""

    color: str
    linestyle: Any
    marker: str


def looks(labels: Iterable[str], methods: Mapping[str, str] | None = None) -> dict[str, Look]:
    """A look for each label, that of the method which it belongs to (by ``methods``, or the label itself).

    Several curves of one method share its colour as long as there are dashes left; up to 64 curves differ in colour or
    dashes.

    Examples
    --------
    >>> looks(["FedAvg"])["FedAvg"] == looks(["Scaffold", "FedAvg"])["FedAvg"]
    True
    """
    names = list(labels)
    found: dict[str, Look] = {}
    taken: set[int] = set()
    home = {label: _slot((methods or {}).get(label, label)) for label in names}
    for label in sorted(names, key=lambda label: home[label][1]):  # methods with a place of their own choose first
        first, _ = home[label]
        color, dash = first % len(COLORS), first // len(COLORS)
        nearby = [
            (color + i) % len(COLORS) + (dash + j) % len(DASHES) * len(COLORS)
            for i in range(len(COLORS))
            for j in range(len(DASHES))
        ]
        slot = next((s for s in nearby if s not in taken), first)
        taken.add(slot)
        color, dash = slot % len(COLORS), slot // len(COLORS)
        found[label] = Look(COLORS[color], DASHES[dash], MARKERS[(color + 3 * dash) % len(MARKERS)])
    return {label: found[label] for label in names}


def _slot(name: str) -> tuple[int, bool]:
    """A place in the grid of colours and dashes, and whether it was drawn from the name."""
    plain = name.partition(" (")[0]  # "FedAvg (2)" is the second FedAvg
    if plain in _ASSIGNED:
        return _ASSIGNED.index(plain), False
    drawn = int.from_bytes(hashlib.sha256(plain.encode()).digest()[:4], "big")
    rest = len(COLORS) * len(DASHES) // 2
    return rest + drawn % rest, True
