"""Times to an event across sites: the numbers of silos at hand, and no patient's time or features for whoever asks."""

import dataclasses
import json
import math
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from local_federation import LocalSites, make_sites, opened
from secure_sites import secure_sites, secure_tables
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite.analysis.prediction import predict_at_sites
from fedcomposite.analysis.survival_quality import SurvivalQuality
from fedcomposite.cli import federation_analysis
from fedcomposite.cli.federation import federation_app
from fedcomposite.cli.main import app
from fedcomposite.data.sheets import read_sheets
from fedcomposite.experiments import Config
from fedcomposite.federation.coordinator import inquiry as inquiries
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.inquiry import Inquiry
from fedcomposite.federation.coordinator.plans import plan_of
from fedcomposite.federation.folders import FederationFolder, FolderError
from fedcomposite.federation.orders import Question
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site import event_times
from fedcomposite.federation.site.analyses import answer_forms
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.enrolment import open_site
from fedcomposite.federation.site.minimum_counts import told
from fedcomposite.federation.site.policy import Limits
from fedcomposite.federation.site.table_files import Newcomers, TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.federation.site_folders import SiteFolder
from fedcomposite.problems.losses import Cox
from fedcomposite.problems.risk_sets import ENTRY, EVENT, TIME
from fedcomposite.runtime import Driver
from fedcomposite.runtime.protocol import (
    ALL,
    Rows,
    answer_all,
    concordance,
    horizon,
    logrank,
    losses,
    newton,
    risk_sums,
    schoenfeld,
    silos_of,
    timetable,
)

SECURE = Settings(secure=True)
PLAIN = """
seed = 3
[problem]
loss = "cox"
weights = "samples"
loss_options = { least_at_risk = 5 }
[regularizer]
name = "L1"
lam = 0.02
[algorithm]
name = "ProxNewton"
"""
CAREFUL = Limits(max_margin=20.0, min_parties=1)  # some attacks are on one site, which would not answer alone
NONE = torch.zeros(0, dtype=torch.float64)


@pytest.fixture(scope="module")
def silos():
    return fc.data.load("survival", clients=3, samples=150)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("survivors")
    files = fc.data.survivor_files(folder, clients=3, samples=200)
    return files, Config.read(folder / "experiment.toml")


def asking(sites, text=PLAIN, settings=None):
    grid = LocalSites(sites)
    return Inquiry(grid, [s.name for s in sites], grid.permitted, parse(text, recipe=True), "job", settings)


def met(sites, text=PLAIN, settings=None):
    one = asking(sites, text, settings)
    return one.meet(), Driver(one)


def at_hand(silos, text=PLAIN):
    return Config.check({**tomllib.loads(text), "data": {"name": "survival"}, "run": {"rounds": 0}}).make_problem(silos)


def test_what_sites_that_trust_everybody_tell_is_that_of_silos_at_hand(silos, tmp_path):
    trusting = opened(min_count=1, min_events=1, min_at_risk=1)
    there, driver = met(make_sites(silos, tmp_path, trusting))
    here = at_hand(silos)
    times = list(range(6, 127, 6))
    options = {"folds": 3, "count": 5, "ratio": 0.1, "seed": 3, "horizon": 60.0, "times": times}
    ours, theirs = fc.analyse(here, "cv", **options), fc.analyse(there, "cv", **options, driver=driver)
    assert torch.allclose(ours.x, theirs.x, atol=1e-10)
    np.testing.assert_allclose(theirs.cv.mean, ours.cv.mean, rtol=1e-9)
    np.testing.assert_allclose(theirs.intervals.astype(float), ours.intervals.astype(float), rtol=1e-6)
    same = ["samples", "events", "c_index", "brier", "predicted", "observed"]
    np.testing.assert_allclose(theirs.quality.table[same], ours.quality.table[same], rtol=1e-9)
    assert np.abs(theirs.quality.table["auroc"] - ours.quality.table["auroc"]).max() < 0.005  # bins
    left, right = (
        one.curves.table.sort_values(["site", "time"]).drop(columns=["site", "group"]) for one in (theirs, ours)
    )
    np.testing.assert_allclose(left, right, rtol=1e-9)
    assert fc.logrank_test(there, "treated", cuts=[0.0], driver=driver).statistic == pytest.approx(
        fc.logrank_test(here, "treated", cuts=[0.0]).statistic
    )
    one, two = (
        fc.confidence(p, torch.zeros(12), driver=fc.analysis.common_baseline(p, times=times, driver=d))
        for p, d in ((here, None), (there, driver))
    )
    np.testing.assert_allclose(one["estimate"], two["estimate"], atol=1e-9)


def with_few_times(silos, step=30.0, last=3):
    """The same patients, followed in steps that sites need not make any longer."""
    targets = silos.targets.clone()
    targets[:, 0] = (targets[:, 0] / step).ceil().clamp(max=last) * step
    return dataclasses.replace(silos, targets=targets)


@pytest.mark.parametrize("secure", [False, True])
def test_cross_validation_with_one_baseline_is_that_of_files_at_hand(tmp_path, secure):
    """At the limits that sites have by themselves, but with folds of files at hand; times are as coarse already."""
    silos = with_few_times(fc.data.load("survival", clients=3, samples=600))
    here, times = at_hand(silos), [30.0, 60.0, 90.0]
    alike = {"max_margin": 20.0, "reproducible_parts": True, "exact_counts": True}
    asked = risk_sums(torch.zeros(12, dtype=torch.float64), torch.tensor(times), rows=Rows("fold", 0, 3, seed=3))
    for silo in silos_of(here):
        assert torch.equal(event_times.coarse(Limits(**alike), silo, asked, [asked.rows]).b, silo.b)
    sites = secure_sites(silos, tmp_path, Limits(**alike, secure="required")) if secure else (
        make_sites(silos, tmp_path, Limits(**alike)))  # fmt: skip
    there, driver = met(sites, PLAIN, SECURE if secure else None)
    options = {"folds": 3, "count": 5, "ratio": 0.1, "seed": 3, "times": times, "baseline": "common"}
    ours, theirs = fc.analyse(here, "cv", **options), fc.analyse(there, "cv", **options, driver=driver)
    assert torch.allclose(ours.x, theirs.x, atol=1e-8)
    np.testing.assert_allclose(theirs.cv.scores, ours.cv.scores, rtol=1e-7)
    np.testing.assert_allclose(theirs.intervals.astype(float), ours.intervals.astype(float), rtol=1e-5, atol=1e-8)
    assert "one baseline for all sites" in theirs.message
    assert ours.proportional is None  # which is a test of a baseline for each
    assert theirs.quality.overall.c_index == pytest.approx(ours.quality.overall.c_index)
    stratified = fc.analyse(here, "cv", **options | {"baseline": "site"})
    assert np.abs(ours.cv.mean - stratified.cv.mean).max() > 1e-3


@pytest.mark.parametrize("secure", [False, True])
def test_one_baseline_is_said_in_the_experiment(files, tmp_path, monkeypatch, secure):
    """One command, at hand and for the sites of a federation; what it cannot be asked of says so."""
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, list(files[0]), engine="local")
    limits = opened(min_count=1, min_events=1, min_at_risk=1, min_parties=3)
    grid = LocalSites(secure_tables(files[0], tmp_path / "sites", limits))
    monkeypatch.setattr(federation_analysis, "open_engine", lambda federation, job, log: grid)
    experiment = tmp_path / "experiment.toml"
    text = (Path(files[0]["hospital_1"]).parent / "experiment.toml").read_text()
    text = text.replace("[problem]", '[problem]\nbaseline = "common"').replace("hospital_", f"{tmp_path}/hospital_")
    experiment.write_text(text)
    for name, path in files[0].items():
        shutil.copy(path, tmp_path / f"{name}.csv")
    words = [experiment, "--folds", 3, "--count", 4, "--ratio", 0.1, "--times", "100:10", "--out"]
    there = ["federation", "cv", fed.path, *words, tmp_path / "there", *(["--secure"] if secure else [])]
    found = []
    for asked in (["cv", *words, tmp_path / "here"], there):
        done = CliRunner().invoke(app, [str(word) for word in asked])
        assert done.exit_code == 0, (done.output, done.exception)
        found.append(json.loads((Path(asked[asked.index("--out") + 1]) / "analysis.json").read_text()))
    ours, theirs = found
    np.testing.assert_allclose(theirs["model"], ours["model"], atol=1e-7)
    np.testing.assert_allclose(theirs["cv"]["mean"], ours["cv"]["mean"], rtol=1e-7)
    done = CliRunner().invoke(app, ["cv", str(experiment), "--federation", str(fed.path), "--folds", "3"])
    assert "sites tell counts on a grid only" in done.output + str(done.exception)
    done = CliRunner().invoke(app, ["solve", str(experiment)])
    assert "baseline = 'common' is for fit, path and cv" in done.output + str(done.exception)


def learned(files, sites, settings):
    files, here = files
    one = asking(sites, tomli_w.dumps({**tomllib.loads(here.text), "algorithm": {"name": "ProxNewton"}}), settings)
    driver = Driver(one)
    one.recipe = inquiries.learn(driver, one.config, here.data["target"])
    return one.meet(), driver


def test_a_recipe_and_an_analysis_in_secure_sums_are_the_plain_ones(files, tmp_path):
    """At the limits that sites have by themselves, but with the folds and counts of files at hand."""
    alike = {"max_margin": 20.0, "reproducible_parts": True, "exact_counts": True}
    own = Limits(**alike)
    plain = [TableSite(n, StateStore(tmp_path / n), own, source=TableFile(n, p)) for n, p in files[0].items()]
    masked = secure_tables(files[0], tmp_path / "secure", Limits(**alike, secure="required"))
    found = []
    for sites, settings in ((plain, None), (masked, SECURE)):
        problem, driver = learned(files, sites, settings)
        options = {"folds": 3, "count": 5, "ratio": 0.1, "horizon": 60.0}
        found.append(fc.analyse(problem, "cv", **options, driver=driver))
    ours, theirs = found
    assert torch.allclose(ours.x, theirs.x, atol=1e-9)
    here = files[1].make_problem()
    best = fc.analyse(here, "cv", folds=3, count=5, ratio=0.1, seed=files[1].seed)
    assert torch.allclose(ours.x, best.x, atol=1e-9)
    raw = fc.confidence(here, best.x, jeffreys=0)  # few events for each coefficient: the bias is taken off
    assert np.abs(raw["estimate"] - best.intervals["estimate"]).max() > 1e-3
    for one in (ours, theirs):
        for column in ("estimate", "se"):
            np.testing.assert_allclose(one.intervals[column], best.intervals[column], atol=1e-7)
    assert theirs.quality.overall.c_index == pytest.approx(best.quality.overall.c_index)
    assert theirs.quality.overall.brier == pytest.approx(ours.quality.overall.brier)
    assert theirs.quality.overall.brier == pytest.approx(
        fc.quality(here, best.cv, horizon=60.0).overall.brier, abs=0.02
    )
    exact = fc.event_curves(here, times=sorted(set(ours.curves.table["time"])))
    assert np.abs(theirs.curves.of()["survival"] - ours.curves.of()["survival"]).max() < 1e-9
    assert np.abs(ours.curves.of()["survival"] - exact.of()["survival"]).max() < 0.05  # times are rounded further


@pytest.mark.parametrize("secure", [False, True])
def test_one_command_for_the_sites_of_a_federation(files, tmp_path, monkeypatch, secure):
    """The experiment of the files at hand, with its columns of times, asked of sites; the report and predictions."""
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, list(files[0]), engine="local")
    limits = {"max_margin": 20.0, **({"secure": "required"} if secure else {})}
    grid = LocalSites(secure_tables(files[0], tmp_path / "sites", Limits(**limits)))
    monkeypatch.setattr(federation_analysis, "open_engine", lambda federation, job, log: grid)
    folder, run = Path(files[0]["hospital_1"]).parent, tmp_path / "found"
    words = ["cv", fed.path, folder / "experiment.toml", "--folds", 3, "--count", 6, "--ratio", 0.1, "--segments", 3]
    words += ["--horizon", 60, "--times", "100:10", "--out", run, *(["--secure"] if secure else [])]
    done = CliRunner().invoke(federation_app, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    told = json.loads((run / "analysis.json").read_text())
    assert told["quality"]["all"]["c_index"] > 0.6
    assert sorted({row["time"] for row in told["curves"]}) == list(range(10, 101, 10))
    assert {row["site"] for row in told["curves"]} == ({"all"} if secure else {*files[0], "all"})
    fc.write_report(run)
    assert "Survival curves" in (run / "report.html").read_text()
    scored = fc.predict(run, files[0]["hospital_1"])
    assert scored.table["prediction"].between(0, 1).all()


@pytest.mark.parametrize("secure", [False, True])
def test_sites_score_their_own_patients_times(files, tmp_path, monkeypatch, secure):
    """The files that stay at sites are those of `predict` on files at hand; what is told is their quality there."""
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, list(files[0]), engine="local")
    limits = opened(min_count=1, min_events=1, min_at_risk=1, min_parties=3)
    sites = secure_tables(files[0], tmp_path / "sites", limits)
    new = fc.data.survivor_files(tmp_path / "new", clients=3, samples=80, seed=5)
    for site in sites:
        site.newcomers = Newcomers(TableFile(site.name, new[site.name]), tmp_path / site.name / "scored")
    grid = LocalSites(sites)
    monkeypatch.setattr(federation_analysis, "open_engine", lambda federation, job, log: grid)
    experiment, run = Path(files[0]["hospital_1"]).parent / "experiment.toml", tmp_path / "found"
    words = ["--secure"] if secure else []
    done = CliRunner().invoke(
        federation_app,
        ["fit", str(fed.path), str(experiment), "--horizon", "60", "--times", "60:1", "--out", str(run), *words],
    )
    assert done.exit_code == 0, (done.output, done.exception)
    done = CliRunner().invoke(federation_app, ["predict", str(fed.path), str(run), *words])
    assert done.exit_code == 0, (done.output, done.exception)
    here = files[1].make_problem()
    x = torch.tensor(json.loads((run / "analysis.json").read_text())["model"], dtype=torch.float64)
    for name, path in new.items():
        [scored] = (tmp_path / name / "scored").iterdir()
        mine, expected = pd.read_csv(scored), fc.predict(run, path, site=name)
        np.testing.assert_allclose(mine["margin"], expected.table["margin"], rtol=1e-9, atol=1e-9)
        hazards = fc.baseline_hazard(here, x)
        own = hazards[(hazards["site"] == name) & (hazards["time"] <= 60)]["cumulative_hazard"].iloc[-1]
        np.testing.assert_allclose(mine["prediction"], 1 - np.exp(-own * np.exp(mine["margin"])), rtol=1e-8)
    if secure:
        assert "do not tell how good" in done.output
        assert not (run / "at-sites.csv").exists()
        return
    told = pd.read_csv(run / "at-sites.csv").set_index("site")
    assert list(told.index) == [*new, "all"]
    sheets = {name: here.silos.recipe.all_rows(read_sheets([path])[0], name) for name, path in new.items()}
    silos = dataclasses.replace(
        here.silos,
        test=tuple(torch.from_numpy(np.concatenate(v)) for v in zip(*sheets.values(), strict=True)),
        held_by={"test": torch.arange(3).repeat_interleave(torch.tensor([len(X) for X, _ in sheets.values()]))},
    )
    ours = fc.quality(files[1].make_problem(silos), x, part="test", horizon=60.0).table
    columns = ["samples", "events", "c_index", "brier", "predicted", "observed"]
    np.testing.assert_allclose(told.loc[list(new), columns], ours.loc[list(new), columns], rtol=1e-8)


def test_a_site_names_its_columns_of_times(tmp_path):
    """Without a recipe; `[data] new` has them as well."""
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, ["a"], engine="local")
    rng = np.random.default_rng(0)
    columns = {"u": rng.normal(size=40), "stop": rng.uniform(2, 9, 40), "start": rng.uniform(0, 2, 40)}
    table = pd.DataFrame(columns).assign(died=np.arange(40) % 2, ward=np.arange(40) % 3)
    table.to_csv(tmp_path / "a.csv", index=False)
    place = fed.path / "sites" / "a" / "site.toml"
    said = f'file = "{tmp_path / "a.csv"}"\ntarget = "died"\ntime = "stop"\nentry = "start"\nstrata = "ward"\n'
    place.write_text(place.read_text().replace("[data]", f"[data]\n{said}", 1))
    site = open_site(SiteFolder(place.parent))
    np.testing.assert_allclose(site.silos.targets, table[["stop", "died", "start", "ward"]])
    assert list(site.silos.feature_names) == ["u"]
    np.testing.assert_allclose(site.newcomers.patients(None, ["u"]).outcomes, table[["stop", "died", "start"]])
    place.write_text(place.read_text().replace("[data]", "[data]\nrecipe = true", 1))
    with pytest.raises(FolderError, match="time does not go with recipe"):
        open_site(SiteFolder(place.parent))


def test_few_new_patients_times_are_scored_and_nothing_is_told(files, tmp_path):
    sites = [
        TableSite(n, StateStore(tmp_path / n), Limits(max_margin=20.0), source=TableFile(n, p))
        for n, p in files[0].items()
    ]
    new = fc.data.survivor_files(tmp_path / "new", clients=3, samples=12, seed=5)
    for site in sites:
        site.newcomers = Newcomers(TableFile(site.name, new[site.name]), tmp_path / site.name / "scored")
    problem, driver = learned(files, sites, None)
    x = torch.full((problem.dimension,), 0.05, dtype=torch.float64)
    assert predict_at_sites(problem, x, driver, horizon=60.0, hazard=0.1).empty
    assert len(pd.read_csv(next((tmp_path / "hospital_1" / "scored").iterdir()))) == len(pd.read_csv(new["hospital_1"]))


@pytest.mark.parametrize("secure", [False, True])
def test_quality_at_sites_that_are_left_out(files, tmp_path, monkeypatch, secure):
    """One command: each site by the model, and the baseline, of the others; in secure sums where all sites agree."""
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, list(files[0]), engine="local")
    limits = {"min_count": 1, "min_events": 1, "min_at_risk": 1, "min_parties": 3}
    limits |= {"secure": "required", "left_out": True} if secure else {}
    grids = [LocalSites(secure_tables(files[0], tmp_path / "sites", opened(**limits)))]
    monkeypatch.setattr(federation_analysis, "open_engine", lambda federation, job, log: grids[-1])
    experiment, options = Path(files[0]["hospital_1"]).parent / "experiment.toml", {"count": 5, "ratio": 0.1}

    def asked(run):
        words = ["cv", fed.path, experiment, "--folds", "sites", "--count", 5, "--ratio", 0.1, "--horizon", 60]
        words += ["--out", run, *(["--secure"] if secure else [])]
        return CliRunner().invoke(federation_app, [str(word) for word in words])

    done = asked(tmp_path / "found")
    assert done.exit_code == 0, (done.output, done.exception)
    told = json.loads((tmp_path / "found" / "analysis.json").read_text())
    here = files[1].make_problem()
    cv = fc.cross_validate(here, folds="sites", **options, seed=files[1].seed)
    ours = fc.quality(here, cv, choice=told["lambda"], horizon=60.0)
    assert told["lambda"] == pytest.approx(cv.lambda_1se, rel=1e-9)
    assert {name: told["quality"][name]["c_index"] for name in files[0]} == pytest.approx(
        {name: ours.by_site[name].c_index for name in files[0]}, rel=1e-8
    )
    assert {name: told["quality"][name]["brier"] for name in files[0]} == pytest.approx(
        {name: ours.by_site[name].brier for name in files[0]},
        abs=0.01,  # the others' baseline is on a grid
    )
    fc.write_report(tmp_path / "found")
    page = (tmp_path / "found" / "report.html").read_text()
    assert "Survival curves" in page
    assert "as a new site would be" in page
    if secure:
        grids.append(LocalSites(secure_tables(files[0], tmp_path / "no", opened(**limits | {"left_out": False}))))
        done = asked(tmp_path / "refused")
        assert done.exit_code == 1
        assert "left_out" in str(done.exception or "") + done.output


def test_the_docs_list_what_is_told():
    told = (Path(__file__).parents[1] / "docs" / "federation.md").read_text().splitlines()
    for name in event_times.QUESTIONS:
        question = Question(name=name, products=True)
        row = next(line for line in told if line.startswith(f"| `{name}`"))
        fields = {key.partition(".")[2] for key in answer_forms(question, {"x": torch.zeros(2)}, 0)}
        assert all(f"`{field}" in row for field in fields), row


# -- attacks: they work where a site opts out, and not by default ------------------------------------------------------


def few_events(count, m=60):
    rng = np.random.default_rng(0)
    X, time = rng.normal(size=(m, 2)), rng.uniform(1, 100, m).round(2)
    event = np.zeros(m)
    event[np.argsort(time)[m // 2 : m // 2 + count]] = 1
    pair = X, np.c_[time, event]
    return fc.Silos.from_arrays([pair], names=["a"], feature_names=["u", "v"])


def sums_of(silos, folder, limits, request, text=PLAIN):
    _, driver = met(make_sites(silos, folder, limits), text)
    [made] = driver.ask([request])
    return made


OPEN_TEXT = PLAIN.replace("least_at_risk = 5", "least_at_risk = 1")
TRUSTING = opened(min_count=1, min_events=1, min_at_risk=1)


def test_one_event_names_a_patients_features(tmp_path):
    """The gradient at zero with one event is the mean at risk less that patient's features; the mean is no secret."""
    silos = few_events(1)
    request = newton(torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bool), ALL)
    told = sums_of(silos, tmp_path / "open", TRUSTING, request, OPEN_TEXT)
    X, y = silos[0]
    event = int(y[:, 1].argmax())
    at_risk = X[y[:, 0] >= y[event, 0]].mean(0)
    assert torch.allclose(at_risk - told["gradient"], X[event], atol=1e-9)
    with pytest.raises(FederationError, match="fewer than 10"):
        sums_of(silos, tmp_path / "default", CAREFUL, request)


def test_the_last_events_risk_set_names_patients(tmp_path):
    """An event with one other at risk gives the difference of both patients' features; such events do not count."""
    rng = np.random.default_rng(0)
    X, time = rng.normal(size=(60, 2)), np.arange(1.0, 61.0)
    event = (np.arange(60) < 20).astype(float)
    silos = fc.Silos.from_arrays([(X, np.c_[time, event])], names=["a"], feature_names=["u", "v"])
    more = event.copy()
    more[58] = 1.0  # one other is left
    late = fc.Silos.from_arrays([(X, np.c_[time, more])], names=["a"], feature_names=["u", "v"])
    request = newton(torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bool), ALL)

    def gradients(limits, text, folder):
        each = enumerate((late, silos))
        return [sums_of(s, tmp_path / folder / str(i), limits, request, text)["gradient"] for i, s in each]

    with_it, without = gradients(TRUSTING, OPEN_TEXT, "open")
    assert torch.allclose(with_it - without, torch.from_numpy((X[59] - X[58]) / 2), atol=1e-9)
    with_it, without = gradients(CAREFUL, PLAIN, "default")
    assert torch.equal(with_it, without)
    with pytest.raises(FederationError, match="least_at_risk = 5"):
        sums_of(late, tmp_path / "other", CAREFUL, request, OPEN_TEXT)


def test_a_fine_grid_does_not_tell_when_somebody_left(silos, tmp_path):
    """Counts a twentieth of a month apart show single patients' times; a site's own steps are of five or more."""
    one = fc.Silos.from_arrays([silos[0]], names=["a"], feature_names=silos.feature_names)
    y = one.targets.numpy()
    times = torch.arange(20, 1020, dtype=torch.float64) / 20
    request = timetable(times, torch.zeros(12, dtype=torch.float64), NONE)

    def leaving(limits, folder, text=PLAIN):
        counts = sums_of(one, tmp_path / folder, limits, request, text)["counts"][0]
        return (counts[1] + counts[2]).numpy()

    found = leaving(TRUSTING, "open", OPEN_TEXT)
    alone = times.numpy()[1:][found[1:] == 1]
    assert len(alone) > 20
    assert all(np.abs(y[:, 0] - t).min() <= 0.05 + 1e-9 for t in alone)
    told = leaving(CAREFUL, "default")
    assert told[told > 0].min() >= 5
    step = event_times.lattice(torch.from_numpy(y[:, 0]))
    assert np.allclose(np.round(times.numpy()[told > 0] / step), times.numpy()[told > 0] / step)


@pytest.mark.parametrize("make", ["schoenfeld", "horizon", "risk_sums"])
def test_functions_of_time_do_not_single_an_event_out(silos, tmp_path, make):
    """Two askings that differ by one event's time give its share; rounded times make both the same."""
    one = fc.Silos.from_arrays([silos[0]], names=["a"], feature_names=silos.feature_names)
    y, x = one.targets.numpy(), torch.zeros(12, dtype=torch.float64)
    x[0] = 0.3
    events = np.sort(y[y[:, 1] > 0, 0])
    steps = events / event_times.lattice(torch.from_numpy(y[:, 0]))
    inside = events[np.abs(steps - np.round(steps)) > 0.01]
    chosen = inside[len(inside) // 2]
    before, behind = chosen - 1e-4, chosen + 1e-4

    def asked(t):
        if make == "schoenfeld":
            return schoenfeld(x, torch.tensor([t], dtype=torch.float64), torch.ones(1, dtype=torch.float64))
        if make == "horizon":
            return horizon(x, float(t), torch.tensor([0.0]).double(), torch.tensor([0.5]).double())
        return risk_sums(x, torch.tensor([t, 200.0], dtype=torch.float64), torch.ones(12, dtype=torch.bool))

    def difference(limits, folder, text=PLAIN):
        key = {"schoenfeld": "residuals", "horizon": "scores", "risk_sums": "events"}[make]
        pair = [
            sums_of(one, tmp_path / folder / str(i), limits, asked(t), text)[key]
            for i, t in enumerate((before, behind))
        ]
        return float((pair[0] - pair[1]).abs().max())

    assert difference(TRUSTING, "open", OPEN_TEXT) > 1e-3
    assert difference(CAREFUL, "default") < 1e-9


def named_by(sums, X):
    """How many patients' features are the difference of sums over those at risk at two times."""
    steps, ones = sums["firsts"].diff(dim=0).abs(), sums["sizes"].diff().abs()
    alone = steps[(ones - 1).abs() < 1e-9]
    return sum(bool(((alone - x.abs()).abs() < 1e-6).all(1).any()) for x in X)


def test_late_entries_do_not_single_a_patient_out(tmp_path):
    """Who enters by himself is the difference of the sums before and behind; so are few who are there before others."""
    rng = np.random.default_rng(0)
    X, time = rng.normal(size=(300, 3)), rng.exponential(size=300) * 40 + 2
    entry = np.where(rng.random(300) < 0.9, time * rng.random(300), -1e30)
    entry[entry < 0] = np.where(np.arange((entry < 0).sum()) < 2, -1e30, 1.0)  # two are there from the start
    y = np.c_[time, rng.random(300) < 0.6, np.where(entry < time, entry, -1e30)]
    silos = fc.Silos.from_arrays([(X, y)], names=["a"], feature_names=["u", "v", "w"])
    times, x = torch.arange(1, 300, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    asked = risk_sums(x, times, torch.ones(3, dtype=torch.bool)), timetable(times, x, NONE)

    def told(limits, folder, text=PLAIN):
        _, driver = met(make_sites(silos, tmp_path / folder, limits), text)
        sums, table = driver.ask(list(asked))
        at_risk, censored, events = table["counts"][0]
        entered = at_risk.diff() + (censored + events)[:-1]
        return named_by(sums, silos.features), sums["sizes"], at_risk, entered

    named, *_, entered = told(TRUSTING, "open", OPEN_TEXT)
    assert named > 10
    assert float(entered[entered > 0].min()) == 1
    named, sizes, at_risk, entered = told(CAREFUL, "default")
    assert named == 0
    assert all(float(n[n > 0].min()) >= 5 for n in (sizes, at_risk, entered))
    for least, group in ((5, None), (10, None), (5, torch.arange(300) % 3)):
        [silo] = silos_of(at_hand(silos))
        made = event_times.rounded(silo.b, least, 5, group)
        assert bool((made[:, 1:2] == silo.b[:, 1:2]).all())
        assert bool((made[:, ENTRY] <= silo.b[:, ENTRY] + 1e-6).all())
        at = torch.unique(made[:, [TIME, ENTRY]]).unsqueeze(1)
        for mine in [made] if group is None else [made[group == k] for k in range(3)]:
            there = ((mine[:, ENTRY] <= at) & (at < mine[:, TIME])).sum(1)
            assert int(there[there > 0].min()) >= least


def in_folds(silos, folder, limits, text=PLAIN, plan=None, grid=None):
    """A driver that has said that it would cross-validate, or what else."""
    grid, config = grid or LocalSites(make_sites(silos, folder, limits)), parse(text, recipe=True)
    asking = Inquiry(
        grid, silos.names, grid.permitted, config, "job", plan=plan_of("cv", config) if plan is None else plan
    )
    asking.meet()
    return Driver(asking)


def test_parts_of_the_rows_have_enough_at_every_time(tmp_path):
    """A fold, and all less those outside it: of the ten who leave at a time a single one may be in the fold."""
    silos = fc.data.load("survival", clients=3, samples=600)
    one = fc.Silos.from_arrays([silos[0]], names=["a"], feature_names=silos.feature_names)
    times, x = torch.arange(1, 261, dtype=torch.float64) / 2, torch.zeros(12, dtype=torch.float64)
    parts = [ALL, *(Rows("fold", k, 5, held, seed=3) for k in range(5) for held in (False, True))]

    def named(limits, folder, text=PLAIN):
        driver = in_folds(one, tmp_path / folder, limits, text)
        every, *told = driver.ask([risk_sums(x, times, torch.ones(12, dtype=torch.bool), r) for r in parts])
        less = [{key: every[key] - sums[key] for key in ("sizes", "firsts")} for sums in told]
        return [named_by(sums, one.features) for sums in (*told, *less)]

    assert min(named(TRUSTING, "open", OPEN_TEXT)) > 10
    assert max(named(CAREFUL, "default")) == 0


def test_folds_of_two_divisions_do_not_single_a_patient_out(tmp_path):
    """Of ten folds two are one of five: at times of their own their difference may be one patient."""
    silos = fc.data.load("survival", clients=3, samples=600)
    one = fc.Silos.from_arrays([silos[0]], names=["a"], feature_names=silos.feature_names)
    times, x = torch.arange(1, 261, dtype=torch.float64) / 2, torch.zeros(12, dtype=torch.float64)

    def asked(driver, *rows):
        told = driver.ask([risk_sums(x, times, torch.ones(12, dtype=torch.bool), part) for part in rows])
        return {key: sum(sums[key] for sums in told) for key in ("sizes", "firsts")}

    coarse, fine = Rows("fold", 0, 5, True, seed=3), [Rows("fold", k, 10, True, seed=3) for k in (0, 5)]
    trusting = in_folds(one, tmp_path / "open", TRUSTING, OPEN_TEXT)
    fifth, tenths = asked(trusting, coarse), asked(trusting, *fine)
    less = {key: torch.stack([fifth[key][1:], tenths[key][:-1]], 1).flatten(0, 1) for key in fifth}
    assert named_by(less, one.features) > 10
    grid = LocalSites(make_sites(one, tmp_path / "default", CAREFUL))
    careful = in_folds(one, None, CAREFUL, plan={}, grid=grid)
    fifth, tenths = asked(careful, coarse), asked(careful, *fine)
    steps = torch.cat([sums["sizes"].diff().abs() for sums in (fifth, tenths)])
    assert int(steps[steps > 0.5].min()) >= 10
    with pytest.raises(FederationError, match="not of samples that count several times"):
        asked(careful, Rows("bootstrap", 0, 2, seed=3))
    asked(careful, coarse.others, ALL)
    [silo] = silos_of(at_hand(one))
    [site] = grid.sites.values()
    own = site.gate.divide(silo, fine[0], site.kept)  # as the site deals its samples out, by its secret
    assert [rows.of for rows in own] == [5, 10]
    assert all(len(event_times.part_of(silo, rows).unique()) == rows.of for rows in own)
    request = risk_sums(x, times, rows=coarse)
    for divisions in ([coarse, fine[0], Rows("fold", 0, 3, True, seed=3)], own):
        before = silo.b
        for k in range(1, len(divisions) + 1):
            made = event_times.coarse(CAREFUL, silo, request, divisions[:k]).b
            pairs = torch.unique(torch.stack([before[:, TIME], made[:, TIME]]), dim=1)
            assert pairs.shape[1] == len(before[:, TIME].unique())  # each time goes to one
            common = torch.stack([event_times.part_of(silo, rows) for rows in divisions[:k]])
            counts = torch.unique(torch.cat([common, made[:, TIME].view(1, -1)]), dim=1, return_counts=True)[1]
            assert int(counts.min()) >= CAREFUL.min_samples
            before = made


def test_horizons_of_a_fold_do_not_single_a_patient_out(tmp_path):
    """Two horizons between which one patient of a fold died: the squared errors differ by that one's prediction."""
    silos = fc.data.load("survival", clients=3, samples=600)
    one = fc.Silos.from_arrays([silos[0]], names=["a"], feature_names=silos.feature_names)
    x, edges = torch.full((12,), 0.1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    fold = Rows("fold", 0, 5, held=True, seed=3)

    def asked(driver, at, rows=fold):
        [told] = driver.ask([horizon(x, at, edges, edges + 0.5, 0.5, rows=rows)])
        return float(told["error"][0])

    trusting = in_folds(one, tmp_path / "open", TRUSTING, OPEN_TEXT)
    errors = np.array([asked(trusting, at) for at in (20.0, 22.0, 24.0, 26.0)])
    assert (np.diff(errors) != 0).sum() >= 3
    careful = in_folds(one, tmp_path / "default", CAREFUL)
    assert asked(careful, 60.0) == asked(careful, 60.0)
    refused = []
    for at in range(48, 74, 2):  # some are rounded to the same time, or have enough in between
        try:
            asked(careful, float(at))
        except FederationError as error:
            refused.append(str(error))
    assert len(refused) > 3
    assert all("until another horizon" in why for why in refused)
    asked(careful, 12.0, fold.others)
    other = Rows("fold", 0, 3, held=True, seed=3)
    assert asked(careful, 60.0, other) > 0
    with pytest.raises(FederationError, match="at its horizons only"):
        asked(careful, 30.0, other)
    for at in (58.0, 56.0, 54.0):
        asked(careful, at, ALL)


def test_counts_of_events_do_not_single_one_out(silos, tmp_path):
    """Curves, in all and in groups: a cell with one event tells when that patient died."""
    one = fc.Silos.from_arrays([silos[0]], names=["a"], feature_names=silos.feature_names)
    column = torch.zeros(12, dtype=torch.float64)
    column[silos.feature_names.index("treated")] = 1.0
    times = torch.arange(1, 261, dtype=torch.float64) / 2

    def cells(limits, folder, edges, text=PLAIN):
        counts = sums_of(one, tmp_path / folder, limits, timetable(times, column, edges), text)["counts"]
        return counts[:, 2].flatten(), counts.sum(0)[0]

    for name, edges in (("all", NONE), ("groups", torch.tensor([0.0], dtype=torch.float64))):
        events, _ = cells(TRUSTING, f"open {name}", edges, OPEN_TEXT)
        assert int((events == 1).sum()) > 10
        events, at_risk = cells(CAREFUL, f"default {name}", edges)
        assert float(events[events > 0].min()) >= 5
        assert float(at_risk[at_risk > 0].min()) >= 5
    rare = one.targets.clone()
    rare[(rare[:, 1] > 0).nonzero()[:2], 1] = 2.0  # two who died of something else
    causes = fc.Silos.from_arrays([(one.features, rare)], names=["a"], feature_names=silos.feature_names)
    text = PLAIN.replace("least_at_risk = 5", "least_at_risk = 5, cause = 1")
    with pytest.raises(FederationError, match="or a cause, has fewer events"):
        sums_of(causes, tmp_path / "causes", CAREFUL, timetable(times, column, NONE, 2), text)


def test_an_edge_moved_past_a_patient_does_not_tell_when_it_died(silos, tmp_path):
    """Two log-rank tests whose groups differ by one patient: their difference is its event and its hazard until then.

    With the Nelson-Aalen curve that is its time.
    """
    one = fc.Silos.from_arrays([silos[0]], names=["a"], feature_names=silos.feature_names)
    X, y = one[0]
    age = torch.zeros(12, dtype=torch.float64)
    age[silos.feature_names.index("age")] = 1.0
    values = X[:, silos.feature_names.index("age")].double()
    order = values.argsort()
    place = next(i for i in range(60, 100) if values[order[i - 1]] < values[order[i]] < values[order[i + 1]])
    who = int(order[place])
    edges = [(values[order[place + k]] + values[order[place + k - 1]]) / 2 for k in (0, 1)]

    def asked(driver, sign, edge):
        [told] = driver.ask([logrank(sign * age, (sign * edge).view(1))])
        return told["observed"][int(sign > 0)], told["expected"][int(sign > 0)]

    _, driver = met(make_sites(one, tmp_path / "open", TRUSTING), OPEN_TEXT)
    (o, e), (o1, e1) = (asked(driver, 1, edge) for edge in edges)
    curve = fc.event_curves(fc.Problem(one, loss="cox")).of()
    assert float(o - o1) == float(y[who, 1])
    wanted = curve[curve["time"] <= float(y[who, 0])]["cumulative_hazard"].iloc[-1]
    assert float(e - e1) == pytest.approx(wanted, abs=1e-9)
    for k, signs in enumerate([(1, 1), (1, -1), (-1, 1)]):  # the other group's side as well
        _, driver = met(make_sites(one, tmp_path / f"default {k}", CAREFUL))
        asked(driver, signs[0], edges[0])
        asked(driver, signs[0], edges[0])  # the same groups again are no other question
        with pytest.raises(FederationError, match="differ from those of an earlier answer"):
            asked(driver, signs[1], edges[1])


def test_few_at_risk_are_in_no_test_and_in_no_pair(tmp_path):
    """The last event with one other at risk: its pair tells who of both left first, its term who was in which group."""
    rng = np.random.default_rng(0)
    X, time = rng.normal(size=(60, 2)), np.arange(1.0, 61.0)
    x, edges = torch.tensor([0.5, -0.2], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    event = (np.arange(60) < 20).astype(float)
    more = event.copy()
    more[58] = 1.0

    def told(request, limits, text, folder):
        made = []
        for i, events in enumerate((event, more)):
            silos = fc.Silos.from_arrays([(X, np.c_[time, events])], names=["a"], feature_names=["u", "v"])
            made.append(sums_of(silos, tmp_path / folder / str(i), limits, request, text))
        return made

    for name, request, key in (("pairs", concordance(x), "pairs"), ("test", logrank(x, edges), "expected")):
        without, with_it = told(request, TRUSTING, OPEN_TEXT, f"open {name}")
        assert float((with_it[key] - without[key]).sum()) == 1.0 if name == "test" else float(with_it[key][2]) > 0
        assert not torch.equal(without[key], with_it[key])
        without, with_it = told(request, CAREFUL.model_copy(update={"exact_counts": True}), PLAIN, f"default {name}")
        assert torch.equal(without[key], with_it[key])


def test_pairs_do_not_tell_who_left_first(silos, tmp_path):
    """Two models between which two patients change places: the pairs in order differ by one, up or down."""
    one = fc.Silos.from_arrays([silos[0]], names=["a"], feature_names=silos.feature_names)
    X, y = one[0]
    X, (time, event), rng = X.double(), y.T, np.random.default_rng(0)
    right = {"open": 0, "default": 0}
    drivers = {
        "open": met(make_sites(one, tmp_path / "open", TRUSTING), OPEN_TEXT)[1],
        "default": met(make_sites(one, tmp_path / "default", CAREFUL))[1],
    }
    tried = 0
    while tried < 30:
        i, j = rng.choice(len(X), 2, replace=False)
        if event[i] == 0 or event[j] == 0 or time[i] == time[j]:
            continue
        gap, tried = X[i] - X[j], tried + 1
        x = torch.from_numpy(rng.normal(size=12)) * 0.05
        x = x - (x @ gap) / (gap @ gap) * gap
        models = [x + sign * 1e-7 * gap for sign in (1, -1)]  # i above j, and below
        for name, driver in drivers.items():
            first, second = (float(driver.ask([concordance(at)])[0]["pairs"][0]) for at in models)
            right[name] += (first > second) == bool(time[i] < time[j]) and first != second
    assert right["open"] == 30
    assert right["default"] < 24  # chance is half, less those of equal counts


def test_margins_of_a_cox_model_count_from_the_least(silos, tmp_path):
    """A constant changes no sum; of margins from -9 to 9 the largest has nearly all weight among those at risk."""
    one = fc.Silos.from_arrays([silos[0]], names=["a"], feature_names=silos.feature_names)
    X = torch.as_tensor(one.features).double()
    u = torch.zeros(12, dtype=torch.float64)
    u[0] = 9.0 / float((X[:, 0] - X[:, 0].mean()).abs().max())
    limits, flags = Limits(min_parties=1, exact_counts=True), torch.zeros(12, dtype=torch.bool)
    with pytest.raises(FederationError, match="max_margin"):
        sums_of(one, tmp_path / "steep", limits, newton(u, flags, ALL))
    sums_of(one, tmp_path / "flat", limits, newton(u / 2, flags, ALL))
    far = fc.Silos.from_arrays(
        [(X.to(one.features) + 40.0, one.targets)], names=["a"], feature_names=silos.feature_names
    )
    sums_of(far, tmp_path / "far", limits, newton(u / 2, flags, ALL))


def test_scores_at_a_horizon_are_told_of_all_folds_together(silos, tmp_path):
    """A fold alone has few with an event: joined bin by bin, its scores hardly rank anybody."""
    silo = silos_of(fc.Problem(silos, loss=Cox(least_at_risk=5)))[0]
    x = torch.full((12,), 0.3, dtype=torch.float64)
    edges = torch.linspace(-3, 3, 200, dtype=torch.float64)
    asked = [horizon(x, 40.0, edges, edges[:1], 0.5, rows=Rows("fold", k, 5, True, 3)) for k in range(5)]
    together, exact = told(Limits(), silo, asked), answer_all(silo, asked)
    apart = [told(Limits(), silo, [one])[0] for one in asked]
    assert not any(one["scores"].any() or one["groups"].any() for one in together[1:])

    def area(answers):
        zero = torch.zeros(3)
        return SurvivalQuality(zero, zero, 40.0, torch.stack([one["scores"] for one in answers]).sum(0)).auroc

    assert abs(area(together) - area(exact)) < abs(area(apart) - area(exact)) / 2


def test_what_a_site_refuses(silos, tmp_path):
    few = fc.Silos.from_arrays([silos[0]], names=["a"], feature_names=silos.feature_names)
    x, flags = torch.zeros(12, dtype=torch.float64), torch.zeros(12, dtype=torch.bool)
    column = x.clone()
    column[6] = 1.0
    for request, reason in (
        (newton(x, flags, Rows("fold", 0, 60, seed=3)), "take fewer"),
        (losses(x[None], Rows("fold", 0, 20, held=True, seed=3)), "take fewer"),
        (timetable(torch.tensor([2.0, 1.0]).double(), x, NONE), "must rise"),
        (timetable(torch.tensor([12.0]).double(), column, torch.tensor([5.0]).double()), "min_samples|finite|group"),
    ):
        if reason == "min_samples|finite|group":
            sums_of(few, tmp_path / "fine", CAREFUL, request)  # an empty group is none
            continue
        with pytest.raises(FederationError, match=reason):
            sums_of(few, tmp_path / f"{request.name} {reason}", CAREFUL, request)
    rare, event = few.features.clone(), few.targets[:, 1] > 0
    rare[:, 6] = 0.0
    rare[torch.cat([event.nonzero()[:6, 0], (~event).nonzero()[:6, 0]]), 6] = 1.0
    text = PLAIN
    own = fc.Silos.from_arrays([(rare, few.targets)], names=["a"], feature_names=silos.feature_names)
    sums_of(
        own,
        tmp_path / "twelve",
        CAREFUL,
        timetable(torch.tensor([12.0]).double(), column, torch.tensor([0.5]).double()),
        text,
    )
    rare = rare.clone()
    rare[:, 6] = 0.0
    rare[torch.cat([event.nonzero()[:4, 0], (~event).nonzero()[:20, 0]]), 6] = 1.0
    four = fc.Silos.from_arrays([(rare, few.targets)], names=["a"], feature_names=silos.feature_names)
    with pytest.raises(FederationError, match="fewer events here"):
        sums_of(four, tmp_path / "four", CAREFUL,
                timetable(torch.tensor([12.0]).double(), column, torch.tensor([0.5]).double()))  # fmt: skip
    rare[:, 6] = 0.0
    rare[torch.cat([event.nonzero()[:6, 0], (~event).nonzero()[:6, 0]]), 6] = 1.0
    wide = fc.Silos.from_arrays([(rare, few.targets)], names=["a"], feature_names=silos.feature_names)
    with pytest.raises(FederationError, match="min_samples"):
        sums_of(wide, tmp_path / "wide", Limits(max_margin=20.0, min_samples=13, min_events=5, min_parties=1),
                timetable(torch.tensor([12.0]).double(), column, torch.tensor([0.5]).double()))  # fmt: skip
    logistic = text.replace('"cox"', '"least_squares"').replace("loss_options = { least_at_risk = 5 }", "")
    plain = fc.Silos.from_arrays([(few.features, few.targets[:, 0])], names=["a"], feature_names=silos.feature_names)
    with pytest.raises(FederationError, match="about something else"):
        sums_of(plain, tmp_path / "plain", CAREFUL, timetable(torch.tensor([12.0]).double(), x, NONE), logistic)


def test_rounded_times_have_enough_of_each(silos):
    [silo, *_] = silos_of(at_hand(silos))
    made = event_times.rounded(silo.b, 5)
    counts = torch.unique(made[:, TIME], return_counts=True)[1]
    assert int(counts.min()) >= 5
    for group in (torch.zeros(len(silo.b), dtype=torch.long), torch.arange(len(silo.b)) % 2):
        for least, events in ((5, 5), (10, 5)):
            made = event_times.rounded(silo.b, least, events, group)
            for k in torch.unique(group):
                mine = made[group == k]
                happened = torch.stack([(mine[mine[:, TIME] == t, EVENT] > 0).sum() for t in mine[:, TIME].unique()])
                assert int(torch.unique(mine[:, TIME], return_counts=True)[1].min()) >= least
                assert all(int(n) == 0 or int(n) >= events for n in happened)
    alone = event_times.rounded(silo.b, 5)
    cells = [int((alone[alone[:, TIME] == t, EVENT] > 0).sum()) for t in alone[:, TIME].unique()]
    assert 0 < min(n for n in cells if n) < 5  # which the number of events forbids
    assert bool((made[:, TIME] >= silo.b[:, TIME] - 1e-6).all())
    assert torch.equal(event_times.rounded(silo.b, 1), silo.b)
    assert event_times.lattice(torch.tensor([130.0])) == 2.0
    assert math.isclose(event_times.lattice(torch.tensor([0.9])), 0.01)
