"""Claims of the FedNMap paper about its Figure 4."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import Claim
from fedcomposite.papers.fednmap_fig3 import draw_speedup, speedup


def claims(data: pd.DataFrame) -> list[Claim]:
    """Speedup in the number of local steps."""
    return speedup(data, "local_steps", "tau")


def draw(data: pd.DataFrame, path: Path) -> None:
    """Stationarity for each tau."""
    draw_speedup(data, "local_steps", "tau", path)
