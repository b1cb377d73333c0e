"""Convergence curves of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcomposite.plots.panels import AXES, Axis, Band, Histories, Panel, Width, draw_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    band : {"sd", "range"}
        What is shaded: one standard deviation over seeds, or their range.
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
    made = [Panel(histories, y, x, reference=reference, name=sampled if y == "stationarity" else "") for y in panels]
    return draw_panels(made, path, title, width=width, band=band, methods=methods)
