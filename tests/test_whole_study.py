"""A study from SQL to a report: four hospitals' OMOP tables and three commands, at hand and at sites."""

import importlib.util
import json
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w
from analyst import compare
from browser import DESKTOP
from parties import Party, leave
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite.cli.federation import federation_app
from fedcomposite.cli.main import app
from fedcomposite.federation.folders import FederationFolder

pytest.importorskip("duckdb")
FIT = ["--folds", "sites", "--by-site", "--count", "12", "--ratio", "0.05"]


def example():
    path = Path(__file__).resolve().parent.parent / "examples" / "omop.py"
    spec = importlib.util.spec_from_file_location("omop", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(what, *arguments):
    done = CliRunner().invoke(what, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.stdout


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """What the three commands leave."""
    omop, folder = example(), tmp_path_factory.mktemp("omop") / "study"
    experiment = omop.write(folder)
    first = json.loads(
        command(app, "data", "describe", experiment, "--table-one", "--json", "--out", folder / "one.tex")
    )
    command(app, "cv", experiment, *FIT, "--out", folder / "run")
    command(app, "report", folder / "run")
    return omop, folder, first


def test_three_commands_make_a_paper_of_sql_tables(study):
    omop, folder, first = study
    frames = {name: fc.data.read_sql(folder / f"{name}.duckdb", omop.QUERY) for name in omop.HOSPITALS}
    pooled = pd.concat(frames.values())
    numbers = pd.DataFrame(first["numbers"]).set_index(["variable", "level", "group"])
    assert numbers.loc[("age", "", "total"), "mean"] == pytest.approx(pooled["age"].mean())
    assert numbers.loc[("sex", "male", "west"), "count"] == (frames["west"]["sex"] == "male").sum()
    assert numbers.loc[("hba1c", "", "total"), "median"] == pytest.approx(pooled["hba1c"].median())
    assert r"\toprule" in (folder / "one.tex").read_text()
    told = json.loads((folder / "run" / "analysis.json").read_text())
    assert told["cv"]["left_out"] == "sites"
    assert {"north", "south", "east", "west", "all"} == told["quality"].keys()
    combined = pd.DataFrame(told["by_site"]["combined"])
    assert combined["predict_lower"].notna().all()
    assert told["table_one"]["table"] == first["table"]
    page = (folder / "run" / "report.html").read_text()
    for part in ("Table 1", "AUROC", "Coefficients by site", "Data", "missing, n (%)"):
        assert part in page
    assert "\nFROM person p\nLEFT JOIN" in page
    recipe = fc.Recipe(impute={"default": "mean", "sex": "most_frequent"}, one_hot={"sex": "female"}, rare=5)
    silos = recipe.prepare(frames, target="infarction")
    problem = fc.Problem(silos, loss="logistic", bias=True, weights="samples", regularizer=fc.regularizers.L1(0.01))
    mine = fc.cross_validate(problem, folds="sites", count=12, ratio=0.05)
    np.testing.assert_allclose(told["cv"]["mean"], mine.mean, rtol=1e-9)


def drawn(folder):
    """The experiment with gaps that are imputed by draws."""
    content = tomllib.loads((folder / "experiment.toml").read_text())
    content["recipe"] |= {"impute": "chained", "copies": 4, "iterations": 3}
    made = folder / "imputed.toml"
    made.write_text(tomli_w.dumps(content))
    return made


def told_of_gaps(run):
    """What a run with imputed gaps tells, and its report."""
    told = json.loads((run / "analysis.json").read_text())
    assert told["gaps"]["copies"] == 4
    assert {one["filled"] for one in told["gaps"]["columns"].values()} == {"chained"}
    assert max(row["missing_share"] for row in told["intervals"]) > 0.01
    assert told["cv"]["left_out"] == "sites"
    assert {"north", "south", "east", "west", "all"} == told["quality"].keys()
    assert pd.DataFrame(told["by_site"]["combined"])["predict_lower"].notna().all()
    page = (run / "report.html").read_text()
    for part in ("Table 1", "4 completed copies by chained equations", "AUROC", "Coefficients by site"):
        assert part in page
    return told


@pytest.fixture(scope="module")
def imputed(study):
    """The same study with gaps that are imputed."""
    _, folder, _ = study
    experiment = drawn(folder)
    command(app, "data", "describe", experiment, "--table-one")
    command(app, "cv", experiment, *FIT, "--out", folder / "imputed")
    command(app, "report", folder / "imputed")
    return told_of_gaps(folder / "imputed")


def test_the_same_three_commands_impute_by_draws(study, imputed):
    omop, folder, _ = study
    frames = {name: fc.data.read_sql(folder / f"{name}.duckdb", omop.QUERY) for name in omop.HOSPITALS}
    recipe = fc.Recipe(impute="chained", copies=4, iterations=3, one_hot={"sex": "female"}, rare=5)
    silos = recipe.prepare(frames, target="infarction")
    problem = fc.Problem(silos, loss="logistic", bias=True, weights="samples", regularizer=fc.regularizers.L1(0.01))
    mine = fc.cross_validate(problem, folds="sites", count=12, ratio=0.05)
    np.testing.assert_allclose(imputed["cv"]["mean"], mine.mean, rtol=1e-9)


def test_its_report_opens_and_prints(study, browser, tmp_path):
    _, folder, _ = study
    browser.open(folder / "run" / "report.html", DESKTOP)
    assert browser.console() == []
    assert (browser.seen()["cut"], browser.faint()) == ([], [])
    browser.pdf(tmp_path / "report.pdf")
    made = (tmp_path / "report.pdf").read_bytes()
    assert made.startswith(b"%PDF")
    assert made.count(b"/Type /Page\n") + made.count(b"/Type /Page ") + made.count(b"/Type/Page") > 1


@pytest.mark.processes
def test_each_hospital_has_its_own_database(study, imputed, tmp_path):
    """The same three commands where each site has a process, and its word alone says what is asked of its database."""
    omop, folder, first = study
    experiment = folder / "experiment.toml"
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, list(omop.HOSPITALS), engine="local")
    limits = "reproducible_parts = true\nexact_counts = true\nmax_margin = 1e6\n"
    parties = []
    try:
        for name in omop.HOSPITALS:
            place = fed.path / "sites" / name / "site.toml"
            section = f'database = "{folder / name}.duckdb"\nquery = """{omop.QUERY}"""\nrecipe = true'
            text = place.read_text().replace("[data]", f"[data]\n{section}", 1)
            place.write_text(text.replace("[limits]", f"[limits]\n{limits}", 1))
            parties.append(Party(tmp_path / f"{name}.log", "join", place.parent))
        for party in parties:
            party.wait_for("waiting for work")
        told = json.loads(command(federation_app, "describe", fed.path, experiment, "--table-one", "--json"))
        for row, mine in zip(told["numbers"], first["numbers"], strict=True):
            points = [(row.pop(key), mine.pop(key)) for key in ("q1", "median", "q3")]
            assert row["variable"] != "hba1c" or all(abs(a - b) < 0.1 for a, b in points)  # of groups of five
        compare(told["numbers"], first["numbers"])
        command(federation_app, "cv", fed.path, experiment, *FIT, "--out", folder / "there")
        command(app, "report", folder / "there")
        command(federation_app, "cv", fed.path, drawn(folder), *FIT, "--out", folder / "drawn there")
        command(app, "report", folder / "drawn there")
        two = json.loads(
            command(federation_app, "describe", fed.path, experiment, "--sites", "north,west,east", "--json")
        )
        assert {row["site"] for row in two} == {"north", "west", "east"}
    finally:
        leave(parties)
    here, there = (json.loads((folder / run / "analysis.json").read_text()) for run in ("run", "there"))
    np.testing.assert_allclose(there["model"], here["model"], rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(there["cv"]["mean"], here["cv"]["mean"], rtol=1e-9)
    assert "Table 1" in (folder / "there" / "report.html").read_text()
    theirs = told_of_gaps(folder / "drawn there")  # by the sites' own random numbers: alike, not the same
    np.testing.assert_allclose(theirs["cv"]["mean"], imputed["cv"]["mean"], rtol=0.02)
    for one, other in zip(theirs["intervals"], imputed["intervals"], strict=True):
        assert abs(one["estimate"] - other["estimate"]) < 2 * other["se"]
