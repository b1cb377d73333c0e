"""Draw test accuracy and zeros of a comparison: ``python docs/make_curves.py runs/NAME docs/images/NAME.png``."""

import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedcomposite.experiments.plots import COLORS, MARKERS, STYLES
from fedcomposite.experiments.runner import collect


def draw(source, picture):
    figure = Figure(figsize=(9, 3.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = {"test_accuracy": "test accuracy", "sparsity": "share of exact zeros"}
    for place, (key, label) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, 2, place)
        for i, (method, runs) in enumerate(collect([source]).items()):
            look = {"color": COLORS[i], "linestyle": STYLES[i], "marker": MARKERS[i], "markersize": 4}
            for run in runs:
                axes.plot([r["round"] for r in run], [r[key] for r in run], label=method, **look)
        axes.set(xlabel="round", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
