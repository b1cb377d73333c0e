"""Every analysis over NVIDIA FLARE, plainly and in secure sums, against the same command on files at hand.

Sites tell all counts here, so that nothing is joined and all numbers can be compared.
"""

import json
import tomllib

import numpy as np
import pandas as pd
import pytest
import tomli_w
from analyst import compare

pytest.importorskip("nvflare", reason="the extra [federation] is not installed")

from parties import served
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite.cli.federation import federation_app
from fedcomposite.cli.main import app

pytestmark = pytest.mark.slow

OPEN = "min_count = 1\nexact_counts = true\nreproducible_parts = true\nforeign_reading = true\nleft_out = true\n"
OPEN += "max_margin = 1e6\nparameter_share = 1.0\nmin_events = 1\n"
SUMS = {"plain": 1e-12, "secure": 1e-9}
"""How a question is asked, and how far answers may be from those at hand: sums in another order, or rounded."""
GRID = ["--count", 6, "--ratio", 0.1]
KINDS = {"fit": [], "path": GRID, "cv": ["--folds", 3, *GRID], "sites": ["--folds", "sites", *GRID]}
OTHER = {"seconds", "communication", "description"}
"""What differs, or is of groups of five patients: the description is in ``test_federation_analysis_real``."""


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """Four hospitals' files as they came; who is sick, without quantiles, which are of groups of five at hand."""
    folder = tmp_path_factory.mktemp("sick")
    files, experiment = fc.data.messy_consortium(folder / "data"), folder / "data" / "experiment.toml"
    content = tomllib.loads(experiment.read_text())
    del content["recipe"]["splines"]
    content["recipe"] |= {"rare": 1, "impute": {"default": "mean", "smoker": "most_frequent"}}
    experiment.write_text(tomli_w.dumps(content))
    with served(folder, files, OPEN) as fed:
        yield folder, fed.path, experiment


@pytest.fixture(scope="module")
def survivors(tmp_path_factory):
    """Four hospitals' times to an event."""
    folder = tmp_path_factory.mktemp("died")
    files = fc.data.survivor_files(folder / "data", clients=4, samples=200)
    for path in files.values():  # so that a grid is no rounding
        table = pd.read_csv(path)
        table.assign(months=np.ceil(table["months"] / 6) * 6).to_csv(path, index=False)
    experiment = folder / "data" / "experiment.toml"
    content = tomllib.loads(experiment.read_text())
    content["recipe"]["impute"] = "mean"
    experiment.write_text(tomli_w.dumps(content))
    with served(folder, files, OPEN) as fed:
        yield folder, fed.path, experiment


def command(what, *arguments):
    done = CliRunner().invoke(what, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.stdout


def both(place, kind, how, *options):
    """What a command finds over FLARE, and at hand; of secure sums what is of all sites."""
    folder, fed, experiment = place
    which, options = ("cv" if kind == "sites" else kind), [*KINDS[kind], *options]
    there, here = folder / f"{kind}-{how}", folder / f"{kind}-here"
    command(
        federation_app, which, fed, experiment, *options, *(["--secure"] if how == "secure" else []), "--out", there
    )
    if not here.exists():
        command(app, which, experiment, *options, "--out", here)
    found = [json.loads((one / "analysis.json").read_text()) for one in (there, here)]
    theirs, ours = ({k: v for k, v in one.items() if k not in OTHER} for one in found)
    if how == "secure" and kind != "sites":  # sites that are left out are told apart there, too
        ours["quality"] = {"all": ours["quality"]["all"]}
    if how == "secure":
        ours |= {k: [row for row in ours[k] if row["site"] == "all"] for k in ("curves", "baseline") if k in ours}
        for one in (theirs, ours):
            del one["quality"]["all"]["note"]  # which says just that
            one.pop("by_site", None)
    return theirs, ours


@pytest.mark.parametrize("how", SUMS)
@pytest.mark.parametrize("kind", KINDS)
def test_who_is_sick(hospitals, kind, how):
    """Path, folds, left-out sites, intervals, quality, models by site: all that a run's folder says."""
    if how == "plain":
        compare(*both(hospitals, kind, how, "--by-site"), SUMS[how])
    else:
        compare(*both(hospitals, kind, how), SUMS[how])


@pytest.mark.parametrize("how", SUMS)
@pytest.mark.parametrize("kind", KINDS)
def test_who_died(survivors, kind, how):
    """Cox's model, its path and folds, hazard ratios, curves, concordance, hazards that are not proportional."""
    theirs, ours = both(survivors, kind, how, "--horizon", 36, "--times", "126:6")
    for site, row in ours["quality"].items():
        found = theirs["quality"][site]
        assert found.pop("auroc") == pytest.approx(row.pop("auroc"), abs=2e-3)  # from bins of margins
    compare(theirs, ours, SUMS[how])


@pytest.mark.parametrize("how", SUMS)
def test_who_they_are(hospitals, how):
    """Table 1 and the description of every column."""
    _, fed, experiment = hospitals
    secure = ["--secure"] if how == "secure" else []
    asked = ["--table-one", "--by", "smoker", "--json"]
    theirs = json.loads(command(federation_app, "describe", fed, experiment, *asked, *secure))
    ours = json.loads(command(app, "data", "describe", experiment, *asked, "--min-count", 1))
    compare(theirs, ours, SUMS[how])
    theirs = json.loads(command(federation_app, "describe", fed, experiment, "--json", *secure))
    ours = json.loads(command(app, "data", "describe", experiment, "--json", "--min-count", 1))
    if secure:
        assert {(row["site"], row["feature"]) for row in theirs} == {("all", row["feature"]) for row in ours}
    else:
        compare(theirs, ours, SUMS[how])
