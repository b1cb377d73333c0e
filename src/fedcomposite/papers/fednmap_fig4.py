"""Claims of the FedNMap paper about its Figure 4."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.fednmap_fig2 import given as measure
from fedcomposite.papers.fednmap_fig3 import draw_speedup, speedup
from fedcomposite.papers.verdicts import Claim

__all__ = ["claims", "draw", "measure"]


def claims(data: pd.DataFrame) -> list[Claim]:
    """Speedup in the number of local steps."""
    return speedup(data, "local_steps", "tau")


def draw(data: pd.DataFrame, path: Path) -> None:
    """Stationarity for each tau."""
    draw_speedup(data, "local_steps", "tau", path)
