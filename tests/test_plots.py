"""Pictures: looks that stay, axes, kinds of files."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

import fedcomposite as fc
from fedcomposite import plots
from fedcomposite.algorithms import REGISTRY
from fedcomposite.plots import draw_histories, looks


def history(scale=1.0, rounds=5):
    return [
        {
            "round": r, "objective": 2.0 + scale / (r + 1), "stationarity": scale / (r + 1), "nonzeros": 3,
            "bytes_up": 1000 * r, "bytes_down": 3000 * r, "gradient_evaluations": 7 * r, "prox_evaluations": 5 * r,
            "seconds": 0.5 * r,
        }
        for r in range(rounds)
    ]  # fmt: skip


@pytest.mark.slow
def test_a_fresh_notebook_shows_a_run():
    """Nothing has imported pyplot there, so nobody has told the notebook how to show a Matplotlib figure."""
    code = (
        "import sys, fedcomposite as fc\n"
        "problem = fc.Problem(fc.data.load('synthetic', clients=3, samples=20), loss='logistic')\n"
        "figure = fc.simulate(problem, fc.algorithms.FedAvg(1, 0.5), rounds=2).plot()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "try:\n"
        "    from IPython.core.formatters import DisplayFormatter\n"
        "    shown = DisplayFormatter().format(figure)[0]['image/png']\n"
        "except ImportError:\n"
        "    shown = figure._repr_png_()\n"
        "assert figure._repr_html_() is None\n"
        "print(shown[:4], len(shown) > 5000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(b"\x89PNG"), "True"]


def drawn(figure, panel=0):
    return {line.get_label(): line for line in figure.axes[panel].get_lines()}


def test_plots_import_nothing_of_the_package():
    for path in Path(plots.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert all(n.startswith("fedcomposite.plots") for n in names if n.startswith("fedcomposite"))


def test_a_method_looks_the_same_in_every_picture():
    for name in REGISTRY:
        alone = looks([name])[name]
        others = [n for n in REGISTRY if n != name]
        assert looks([*others, name])[name] == alone
        assert looks([name, *others])[name] == alone
        assert looks(["ours"], {"ours": name})["ours"] == alone
    assert len(set(looks(REGISTRY).values())) == len(REGISTRY)
    common = looks(["FedNMap", "FedAvg", "Scaffold", "FedMid", "FedDA", "Zhang", "ProximalGradient", "FedCanon"])
    assert len({look.color for look in common.values()}) == 8


def test_no_two_curves_look_alike():
    names = [f"variant {i}" for i in range(64)]
    seen = [(look.color, look.linestyle) for look in looks(names).values()]
    assert len(set(seen)) == 64
    same = looks([f"FedAvg ({i})" for i in range(1, 9)])
    assert len(set(same.values())) == 8
    assert {look.color for look in same.values()} == {looks(["FedAvg"])["FedAvg"].color}


def test_axes_and_reference():
    runs = {"FedAvg": [history()], "FedNMap": [history(2.0), history(4.0)]}
    factors = {"rounds": 1, "bytes": 0.004, "gradients": 7, "proxes": 5, "seconds": 0.5}
    assert set(factors) == set(plots.AXES)
    for x, factor in factors.items():
        figure = draw_histories(runs, x=x)
        for panel in range(3):
            np.testing.assert_allclose(drawn(figure, panel)["FedAvg"].get_xdata(), factor * np.arange(5))
    gap = drawn(draw_histories(runs, reference=2.0), 1)
    np.testing.assert_allclose(gap["FedAvg"].get_ydata(), 1 / np.arange(1, 6))
    np.testing.assert_allclose(gap["FedNMap"].get_ydata(), np.sqrt(8) / np.arange(1, 6))  # geometric mean of the seeds
    plain = draw_histories(runs)  # without a reference no gap is drawn: it would dive whether a run converges or not
    np.testing.assert_allclose(drawn(plain, 1)["FedAvg"].get_ydata(), 2 + 1 / np.arange(1, 6))
    assert plain.axes[1].get_ylabel() == "objective"
    assert draw_histories(runs, reference=2.0).axes[1].get_ylabel() == "objective − 2"


@pytest.mark.slow
def test_a_suffix_says_the_kind_and_bytes_repeat(tmp_path):
    for suffix, magic in (("pdf", b"%PDF"), ("png", b"\x89PNG"), ("svg", b"<?xml")):
        files = [tmp_path / f"{i}.{suffix}" for i in range(2)]
        for file in files:
            draw_histories({"FedAvg": [history()]}, file)
        assert files[0].read_bytes().startswith(magic)
        assert files[0].read_bytes() == files[1].read_bytes()
    (tmp_path / "plain").write_bytes(b"old")
    draw_histories({"FedAvg": [history()]}, tmp_path / "plain")
    assert (tmp_path / "plain").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no picture is called"):
        draw_histories({"FedAvg": [history()]}, tmp_path / "x.docx")
    assert not list(tmp_path.glob("*.docx"))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_the_command_draws_against_bytes_into_a_pdf(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (
        '[data]\nname = "synthetic"\nclients = 3\nfeatures = 4\nsamples = 10\n[run]\nrounds = 2\n'
        '[[algorithms]]\nname = "FedAvg"\nlocal_steps = 1\nstep = 0.1\n'
        '[[algorithms]]\nname = "FedAvg"\nlabel = "ours"\nlocal_steps = 1\nstep = 0.2\n'
    )
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(text)
        cli("compare", f"{name}.toml", "--out", name, check=0)
    seen = {}

    def spy(histories, path, title, **options):
        seen.update(options, histories=histories)
        return draw_histories(histories, path, title, **options)

    monkeypatch.setattr("fedcomposite.cli.runs.draw_histories", spy)
    cli("plot", "a", "b", "--x", "bytes", "--reference", "0.25", "--out", "p.pdf", check=0)
    assert (tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")
    assert (seen["x"], seen["reference"]) == ("bytes", 0.25)
    assert list(seen["histories"]) == ["FedAvg", "ours", "FedAvg (b)", "ours (b)"]  # not taken for seeds of one another
    assert set(seen["methods"].values()) == {"FedAvg"}
    assert all(len(runs) == 1 for runs in seen["histories"].values())


def test_runs_and_silos_draw_themselves(tmp_path):
    silos = fc.data.load("synthetic", clients=3, features=4, samples=10)
    assert silos.plot(tmp_path / "s.pdf").axes[0].get_ylabel() == "samples"
    run = fc.simulate(fc.Problem(silos, loss="logistic"), fc.algorithms.FedAvg(local_steps=1, step=0.1), rounds=2)
    heights = itertools.chain(*(line.get_ydata() for line in run.plot().axes[0].get_lines()))
    assert np.isfinite(list(heights)).all()


def test_bands_are_what_the_caption_says():
    runs = {"FedAvg": [history(s) for s in (1.0, 2.0, 4.0)]}
    for band, words in (("sd", "one standard deviation over seeds (3)"), ("range", "range over seeds (3)")):
        figure = draw_histories(runs, reference=2.0, band=band, panels=["suboptimality", "objective"])
        assert words in figure._supxlabel.get_text()
        gaps = np.asarray([1.0, 2.0, 4.0])  # at the first round
        logs = np.log(gaps)
        expected = (
            (gaps.min(), gaps.max()) if band == "range" else np.exp(logs.mean() + logs.std(ddof=1) * np.r_[-1, 1])
        )
        at_first = [v[1] for v in figure.axes[0].collections[0].get_paths()[0].vertices if v[0] == 0]
        np.testing.assert_allclose([min(at_first), max(at_first)], expected)


def test_seeds_are_drawn_beside_their_median_and_nothing_below_rounding():
    levels = (1.0, 0.0, 4.0)
    runs = {"FedAvg": [[{"round": r, "gap": v * (r < 3)} for r in range(4)] for v in levels]}
    figure = plots.draw_panels([plots.Panel(runs, "gap", log_y=True)], band="seeds")
    middle, *seeds = figure.axes[0].get_lines()
    np.testing.assert_allclose(middle.get_ydata(), [1.0, 1.0, 1.0, np.nan])
    assert len(seeds) == 3
    np.testing.assert_allclose(seeds[1].get_ydata()[:3], 1e-16)  # it is at or below rounding, where others are not
    assert not figure.axes[0].collections


def test_panels_and_widths_are_chosen(tmp_path):
    runs = {"FedAvg": [history()], "FedNMap": [history(2.0)]}
    for width, inches in (("column", 3.4), ("page", 7.0), (5.0, 5.0)):
        figure = draw_histories(runs, tmp_path / "x.pdf", panels=["nonzeros", "stationarity"], width=width)
        assert figure.get_size_inches()[0] == inches
        assert [axes.get_ylabel() for axes in figure.axes] == ["nonzeros", "stationarity / initial"]
    with pytest.raises(ValueError, match="panel 'auc': not in the records"):
        draw_histories(runs, panels=["auc"])
    with pytest.raises(ValueError, match="needs a reference"):
        draw_histories(runs, panels=["suboptimality"])


def test_stationarity_on_a_sample_is_drawn_only_if_asked_for():
    runs = {"FedAvg": [[{**r, "evaluated_samples": 200} for r in history()]]}
    assert [a.get_ylabel() for a in draw_histories(runs).axes] == ["objective", "nonzeros"]
    asked = draw_histories(runs, panels=["stationarity"])
    assert asked.axes[0].get_ylabel() == "stationarity on 200 samples / initial"


def test_charts_have_the_colours_of_methods_and_an_axis_that_fits():
    panels = {f"{t:g}": {"g": {"FedAvg": (1.0, 0.1), "Zhang": (t, 0.1)}} for t in (2.0, 99.0)}
    figure = plots.draw_bars(panels, methods={})
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "log"]
    assert to_hex(figure.axes[0].patches[0].get_facecolor()) == looks(["FedAvg"])["FedAvg"].color.lower()
    points = {"FedAvg": ([1, 10], [1.0, 0.1], [0.0, 0.0])}
    figure = plots.draw_scatter([plots.Scatter(points, "x", "y", lines={"FedAvg": (-1.0, 0.0)})])
    np.testing.assert_allclose(figure.axes[0].get_lines()[-1].get_ydata(), [1.0, 0.1])


def test_zoom_leaves_the_start_out_and_the_caption_names_the_lines():
    def run(scale):
        return [{"round": r, "accuracy": 0.1 if r == 0 else 0.8 + scale * r} for r in range(4)]

    figure = plots.draw_panels([plots.Panel({"FedAvg": [run(0.01), run(0.02)]}, "accuracy", zoom=True)])
    low, high = figure.axes[0].get_ylim()
    assert 0.8 < low < 0.81
    assert 0.86 < high < 0.87
    runs = {"FedAvg": [history(), history(2.0)], "FedMid": [history(), history(3.0)]}
    (legend,) = plots.draw_panels([plots.Panel(runs)]).legends
    assert legend.get_title().get_text() == "lines: geometric means; bands: one standard deviation over seeds (2)"
