"""Times to an event over TLS: four hospitals, a process each, in secure sums; every question is one command."""

import json

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("nvflare", reason="the extra [federation] is not installed")

from parties import served
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite.cli.federation import federation_app
from fedcomposite.cli.main import app

pytestmark = pytest.mark.slow

LIMITS = 'secure = "required"\nleft_out = true\nmax_margin = 20.0\nreproducible_parts = true\nexact_counts = true\n'


def command(what, *arguments):
    done = CliRunner().invoke(what, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.output


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """A served federation of four sites that take part in secure sums only; its folder, and the experiment."""
    folder = tmp_path_factory.mktemp("times")
    files = fc.data.survivor_files(folder / "hospitals", clients=4, samples=200)
    with served(folder, files, LIMITS) as fed:
        yield folder, fed.path, folder / "hospitals" / "experiment.toml", list(files)


def test_a_study_in_secure_sums_over_tls(hospitals):
    """Cross-validation, report, sites that are left out, new patients: the numbers of files at hand."""
    folder, fed, experiment, names = hospitals
    options = ["--folds", 3, "--count", 8, "--ratio", 0.1, "--horizon", 60]
    command(federation_app, "cv", fed, experiment, *options, "--secure", "--out", folder / "there")
    command(app, "cv", experiment, *options, "--out", folder / "here")
    ours, theirs = (json.loads((folder / k / "analysis.json").read_text()) for k in ("here", "there"))
    np.testing.assert_allclose(theirs["model"], ours["model"], atol=1e-8)
    np.testing.assert_allclose(theirs["cv"]["mean"], ours["cv"]["mean"], rtol=1e-8)
    assert theirs["quality"]["all"]["c_index"] == pytest.approx(ours["quality"]["all"]["c_index"], abs=1e-9)
    command(app, "report", folder / "there")
    page = (folder / "there" / "report.html").read_text()
    assert all(part in page for part in ("Survival curves", "Cross-validation", "secure sums"))
    left = ["--folds", "sites", *options[2:]]
    command(federation_app, "cv", fed, experiment, *left, "--secure", "--out", folder / "left")
    command(app, "cv", experiment, *left, "--out", folder / "left here")
    ours, theirs = (json.loads((folder / k / "analysis.json").read_text())["quality"] for k in ("left here", "left"))
    assert [*theirs] == [*ours] == [*names, "all"]
    for name in names:
        assert theirs[name]["c_index"] == pytest.approx(ours[name]["c_index"], abs=1e-9)
    said = command(federation_app, "predict", fed, folder / "there", "--secure")
    assert "do not tell how good" in said
    [scored] = (fed / "sites" / names[0] / "scored").glob("*.csv")
    assert pd.read_csv(scored)["prediction"].between(0, 1).all()
