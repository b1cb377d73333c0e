"""Draw test accuracy and zeros of a comparison: ``python docs/make_curves.py runs/NAME docs/images/NAME.png``."""

import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedcomposite.experiments.runner import collect
from fedcomposite.plots import looks


def draw(source, picture):
    figure = Figure(figsize=(9, 3.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = {"test_accuracy": "test accuracy", "sparsity": "share of exact zeros"}
    histories, methods = collect([source])
    chosen = looks(histories, methods)
    for place, (key, label) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, 2, place)
        for method, runs in histories.items():
            for run in runs:
                look = chosen[method]._asdict()
                axes.plot([r["round"] for r in run], [r[key] for r in run], label=method, markersize=4, **look)
        axes.set(xlabel="round", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
