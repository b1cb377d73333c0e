"""Claims of Zhang, Hu & Johansson about their Figure 2."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedcomposite.papers.base import Claim, classes, first_at, histories, judged, last, only, relative, told
from fedcomposite.plots import Panel, draw_panels

METHODS = ["Zhang", "FedDA", "FedMid", "FastFedDA"]


def claims(data: pd.DataFrame) -> list[Claim]:
    """What the text says about the two panels; stationarity is relative to the start."""
    data = data.assign(relative=relative(data))
    ends = last(data)

    def end(method: str, tau: int) -> pd.Series:
        return only(ends, method=method, local_steps=tau)["relative"]

    def rounds(method: str, tau: int, target: float) -> float:
        """Mean over seeds; nan where a seed does not get there."""
        rows = only(data, method=method, local_steps=tau)
        return float(first_at(rows, rows["relative"], target).mean(skipna=False))

    fewer = {t: (rounds("Zhang, small step", 1, t), rounds("Zhang", 10, t)) for t in (0.01, 0.005)}
    worst = max(METHODS, key=lambda m: end(m, 1).mean())
    return [
        Claim(
            "tau = 1: FedDA and Zhang converge to machine precision",
            f"relative stationarity ends at {told(end('FedDA', 1))} and {told(end('Zhang', 1))}",
            judged(max(end("FedDA", 1).max(), end("Zhang", 1).max()) < 1e-10),
        ),
        Claim(
            "tau = 1: with the same steps FedDA and Zhang converge at exactly the same rate",
            f"rounds to 1e-3: FedDA {rounds('FedDA', 1, 1e-3):.0f}, Zhang {rounds('Zhang', 1, 1e-3):.0f}",
            judged(abs(rounds("FedDA", 1, 1e-3) / rounds("Zhang", 1, 1e-3) - 1) < 0.05),
        ),
        Claim(
            "tau = 1: FedMid is worst (curse of primal averaging)",
            f"ends: {', '.join(f'{m} {told(end(m, 1))}' for m in METHODS)}",
            judged(worst == "FedMid"),
        ),
        Claim(
            "Fast-FedDA converges slowly because its steps decay",
            f"ends at {told(end('FastFedDA', 1))} (tau = 1) and {told(end('FastFedDA', 10))} (tau = 10)",
            judged(min(end("FastFedDA", 1).min(), end("FastFedDA", 10).min()) > 1e-6),
        ),
        Claim(
            "tau = 10: Zhang still converges exactly (below 1e-10)",
            f"ends at {told(end('Zhang', 10))}",
            judged(end("Zhang", 10).max() < 1e-10),
        ),
        Claim(
            "tau = 10: FedDA stalls in a neighbourhood (above 1e-3), and FedMid is worse",
            f"FedDA ends at {told(end('FedDA', 10))}, FedMid at {told(end('FedMid', 10))}",
            judged(end("FedDA", 10).min() > 1e-3 and end("FedMid", 10).mean() > end("FedDA", 10).mean()),
        ),
        Claim(
            "with the same eta and eta_g, ten local steps need about a tenth of the rounds of one",
            "; ".join(
                f"rounds to {t:g}: {one:.0f} with tau = 1, {ten:.0f} with tau = 10, a factor of {one / ten:.1f}"
                for t, (one, ten) in fewer.items()
            ),
            judged(all(5 < one / ten < 20 for one, ten in fewer.values())),
        ),
    ]


def draw(data: pd.DataFrame, path: Path) -> None:
    """Relative stationarity against rounds, a panel for each tau."""
    panels = [
        Panel(histories(data, method=METHODS, local_steps=tau), title=f"tau = {tau}", name="relative stationarity")
        for tau in (1, 10)
    ]
    draw_panels(panels, path, methods=classes(data), band="range")
