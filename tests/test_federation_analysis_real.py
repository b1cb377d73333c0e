"""Analyses over TLS: four hospitals' files as people have them, a process each, compared with files at hand."""

import json
import re
import time
import tomllib

import numpy as np
import pandas as pd
import pytest
import tomli_w
from analyst import compare

pytest.importorskip("nvflare", reason="the extra [federation] is not installed")

from parties import Party, served
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite.cli.federation import federation_app
from fedcomposite.cli.main import app

pytestmark = pytest.mark.slow

LIMITS = "parameter_share = 1.0\nmax_margin = 1e6\nmin_samples = 10\nmin_count = 5\n"
LIMITS += "reproducible_parts = true\nexact_counts = true\nforeign_reading = true\n"  # compared with files at hand


def command(what, *arguments, code=0):
    done = CliRunner().invoke(what, [str(a) for a in arguments])
    assert done.exit_code == code, done.output + str(done.exception)
    return done.stdout if "--json" in arguments else done.output  # who is waited for is said beside it


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """A served federation of four sites that are waiting for work; its folder, and the experiment."""
    folder = tmp_path_factory.mktemp("tls")
    files = fc.data.messy_consortium(folder / "hospitals")
    experiment = folder / "hospitals" / "experiment.toml"
    said = tomllib.loads(experiment.read_text())
    said["recipe"]["min_count"] = 5  # files at hand are described as they are where nothing else is said
    experiment.write_text(tomli_w.dumps(said))
    with served(folder, files, LIMITS) as fed:
        yield folder, fed.path, experiment


def read(run):
    return json.loads((run / "analysis.json").read_text())


def test_cross_validation_over_tls_is_that_of_files_at_hand(hospitals):
    folder, fed, experiment = hospitals
    options = ["--folds", 3, "--count", 10, "--ratio", 0.05]
    command(federation_app, "cv", fed, experiment, *options, "--out", folder / "there")
    command(app, "cv", experiment, *options, "--out", folder / "here")
    ours, theirs = read(folder / "here"), read(folder / "there")
    for key in ("model", "lambda"):
        np.testing.assert_allclose(theirs[key], ours[key], rtol=1e-10, atol=1e-10)
    for key in ("mean", "se"):
        np.testing.assert_allclose(theirs["cv"][key], ours["cv"][key], rtol=1e-10)
    np.testing.assert_allclose(theirs["path"]["solutions"], ours["path"]["solutions"], rtol=1e-10, atol=1e-10)
    assert (folder / "there" / "recipe.json").read_text() == (folder / "here" / "recipe.json").read_text()
    assert theirs["description"] == ours["description"]
    said = (folder / "north.log").read_text()
    assert "newton (fold)" in said
    assert "moments" in said
    assert "analysis: " in (fed / "sites" / "north" / "state" / "audit.jsonl").read_text()
    command(app, "report", folder / "there")
    page = (folder / "there" / "report.html").read_text()
    assert all(part in page for part in ("Path", "Cross-validation", "ROC", "north", "AUROC"))
    south = folder / "hospitals" / "south.csv"
    command(app, "predict", folder / "there", south, "--site", "south", "--out", folder / "s.csv")
    said = command(federation_app, "predict", fed, folder / "there")
    assert "stays there" in said
    told = pd.read_csv(folder / "there" / "at-sites.csv").set_index("site")
    assert list(told.index) == ["north", "south", "east", "west", "all"]
    assert told.loc["all", "samples"] == 600
    (scored,) = (fed / "sites" / "south" / "scored").glob("*.csv")
    a, b = pd.read_csv(scored), pd.read_csv(folder / "s.csv")
    np.testing.assert_allclose(a["margin"], b["margin"], rtol=1e-10, atol=1e-10)


def test_a_killed_cross_validation_goes_on_with_the_same_bits(hospitals):
    folder, fed, experiment = hospitals
    options = ["--folds", 3, "--count", 10, "--ratio", 0.05]
    if not (folder / "there").exists():
        command(federation_app, "cv", fed, experiment, *options, "--out", folder / "there")
    out = folder / "killed"
    running = Party(folder / "killed.log", "cv", fed, experiment, *options, "--out", out)
    log = out / "answers.log"
    while not log.exists() or log.stat().st_size < 200_000:
        assert running.alive, running.said()
        time.sleep(0.001)
    running.kill()
    asked = {site: exchanges(folder, site) for site in ("north", "west")}
    said = command(federation_app, "status", fed)
    assert "killed: gone (go on with --resume), cv" in said
    said = command(federation_app, "cv", fed, "--resume", out)
    assert "going on after" in said
    assert (out / "model.safetensors").read_bytes() == (folder / "there" / "model.safetensors").read_bytes()
    ours, theirs = read(out), read(folder / "there")
    for key in ("bytes_down", "bytes_up"):  # a later job carries the heads of the sites' logs; numbers of entries grow
        one, other = (part["communication"].pop(key) for part in (ours, theirs))
        assert one == pytest.approx(other, rel=0.01)
    for part in (ours, theirs):
        part.pop("seconds")
    assert ours == theirs
    assert "killed: finished, cv" in command(federation_app, "status", fed)
    job = (out / "job").read_text().strip()
    for site, before in asked.items():
        numbers = [number for one, number in exchanges(folder, site) if one == job]
        assert len(numbers) > len([1 for one, _ in before if one == job]) > 0
        assert len(numbers) - len(set(numbers)) <= 1  # the one that was on its way, if any


def exchanges(folder, site):
    """Jobs and numbers of the exchanges that a site has answered."""
    return re.findall(r"job (\w+): exchange (\d+)", (folder / f"{site}.log").read_text())


@pytest.mark.parametrize("kind", ["fit", "path"])
def test_fits_and_paths_over_tls_are_those_of_files_at_hand(hospitals, kind):
    folder, fed, experiment = hospitals
    options = ["--count", 8, "--ratio", 0.1] if kind == "path" else []
    command(federation_app, kind, fed, experiment, *options, "--out", folder / f"{kind}-there")
    command(app, kind, experiment, *options, "--out", folder / f"{kind}-here")
    ours, theirs = read(folder / f"{kind}-here"), read(folder / f"{kind}-there")
    for part in (ours, theirs):  # bins are joined at sites, so that curves differ
        for key in ("communication", "seconds", "quality"):
            part.pop(key)
    compare(theirs, ours)


def test_a_description_over_tls(hospitals):
    _, fed, experiment = hospitals
    assert "thing(s) to look at" in command(federation_app, "describe", fed, experiment)
    rows = json.loads(command(federation_app, "describe", fed, experiment, "--json"))
    assert {r["site"] for r in rows} == {"north", "south", "east", "west"}


def test_in_secure_sums_over_tls(hospitals):
    """The numbers of files at hand, one row of quality and of each feature, a report, scores that stay; and a run."""
    folder, fed, experiment = hospitals
    options = ["--folds", 3, "--count", 6, "--ratio", 0.1]
    said = command(federation_app, "cv", fed, experiment, *options, "--secure", "--out", folder / "sums")
    assert "secure sums" in said
    command(app, "cv", experiment, *options, "--out", folder / "plain")
    ours, theirs = read(folder / "plain"), read(folder / "sums")
    for key in ("model", "lambda", "intervals", "cv"):
        compare(theirs[key], ours[key])
    compare(json.loads((folder / "sums" / "recipe.json").read_text()), ours_recipe(folder / "plain"))
    assert list(theirs["quality"]) == ["all"]
    assert theirs["quality"]["all"]["brier"] == pytest.approx(ours["quality"]["all"]["brier"], rel=1e-9)
    assert {row["site"] for row in theirs["description"]} == {"all"}
    command(app, "report", folder / "sums")
    assert "secure sums" in (folder / "sums" / "report.html").read_text()
    assert "do not tell how good" in command(federation_app, "predict", fed, folder / "sums", "--secure")
    assert not (folder / "sums" / "at-sites.csv").exists()
    method = {"name": "FedNMap", "local_steps": 2, "step": 0.05, "server_step": 1.0, "gamma": 0.1}
    content = {k: v for k, v in tomllib.loads(experiment.read_text()).items() if k in ("data", "problem", "recipe")}
    rounds = {**content, "algorithm": method, "run": {"rounds": 3}}
    (folder / "rounds.toml").write_text(tomli_w.dumps(rounds))
    command(federation_app, "run", fed, folder / "rounds.toml", "--secure", "--out", folder / "rounds")
    compare(json.loads((folder / "rounds" / "recipe.json").read_text()), ours_recipe(folder / "plain"))
    assert (folder / "rounds" / "coefficients.csv").is_file()


def ours_recipe(folder):
    return json.loads((folder / "recipe.json").read_text())
