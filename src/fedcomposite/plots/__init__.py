"""Every picture. Functions return a matplotlib Figure, and write a file of any kind its suffix names: .png, .pdf, .svg.

This room imports nothing of the package: it draws what it is given, records as mappings and silos by their attributes.
"""

from fedcomposite.plots.canvas import check_kind
from fedcomposite.plots.charts import Scatter, draw_bars, draw_scatter, draw_silos, draw_steps
from fedcomposite.plots.looks import Look, looks
from fedcomposite.plots.panels import AXES, Axis, Band, Panel, Width, draw_histories, draw_panels

__all__ = [
    "AXES", "Axis", "Band", "Look", "Panel", "Scatter", "Width", "check_kind", "draw_bars", "draw_histories",
    "draw_panels", "draw_scatter", "draw_silos", "draw_steps", "looks",
]  # fmt: skip
