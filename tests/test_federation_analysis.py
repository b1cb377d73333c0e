"""Analyses across sites: the numbers of tables and silos at hand, and nothing that a site's minimum counts forbid."""

import json
import random
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import scipy.special
import tomli_w
import torch
from analyst import PLAIN, compare, inquiry, question, same
from cryptography.hazmat.primitives.asymmetric import ec
from local_federation import LocalSites, make_sites, opened
from sklearn.metrics import r2_score
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite.analysis.prediction import predict_at_sites
from fedcomposite.cli import federation_analysis, federation_jobs
from fedcomposite.cli.federation import federation_app
from fedcomposite.cli.federation_analysis import read
from fedcomposite.cli.main import app
from fedcomposite.data import DataError, Recipe, describe
from fedcomposite.data.describing import look_at, table_of
from fedcomposite.data.queries import Rules
from fedcomposite.experiments import Config, ConfigError
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator import inquiry as inquiries
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.folders import FederationFolder, FolderError
from fedcomposite.federation.orders import Order
from fedcomposite.federation.shape import arrange, parse
from fedcomposite.federation.site import minimum_counts
from fedcomposite.federation.site.approval import Approval, Approvals, Rule, digest
from fedcomposite.federation.site.audit import Audit
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.enrolment import open_site
from fedcomposite.federation.site.minimum_counts import joined
from fedcomposite.federation.site.policy import Limits, RefusalError
from fedcomposite.federation.site.table_files import Newcomers, TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.federation.site_folders import SiteFolder
from fedcomposite.runtime import Driver
from fedcomposite.runtime.protocol import HIGHEST, rates, residuals, scores, silos_of
from fedcomposite.runtime.transports import SiloTransport

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def hospitals():
    return fc.data.load("heart_disease").standardize()


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messy") / "hospitals"
    files, config = fc.data.messy_consortium(folder), folder / "experiment.toml"
    return files, config


def tables(files, folder, limits=None, log=None):
    return [
        TableSite(
            n,
            StateStore(Path(folder) / n),
            limits or opened(min_count=5),
            log or (lambda line: None),
            source=TableFile(n, p),
        )
        for n, p in files.items()
    ]


def learn(asking, target):
    asking.recipe = inquiries.learn(Driver(asking), asking.config, target)
    return asking.recipe


def described(asking):
    return look_at(lambda query: Driver(asking).ask([query])[0], asking.names)


def recipe_text(config):
    content = tomllib.loads(config.read_text())
    content.pop("data")
    content["algorithm"] = {"name": "ProxNewton"}
    return tomli_w.dumps(content)


def on_silos(silos):
    return Config.check({**tomllib.loads(PLAIN), "data": {"name": "heart_disease"}}).make_problem(silos)


def test_a_recipe_its_path_and_cross_validation_are_those_of_files_at_hand(messy, tmp_path):
    files, config = messy
    here = Config.read(config)
    problem = here.make_problem()
    asking, _ = inquiry(tables(files, tmp_path), recipe_text(config))
    learned = learn(asking, here.data["target"])
    assert learned.model_dump() == problem.silos.recipe.model_dump()
    there = asking.meet()
    assert there.coordinate_names == problem.coordinate_names
    options = {"count": 12, "ratio": 0.05}
    ours, theirs = fc.path(problem, **options), fc.path(there, **options, driver=Driver(asking))
    same(theirs.solutions, ours.solutions)
    same(theirs.losses, ours.losses)
    mine = fc.cross_validate(problem, folds=3, seed=here.seed, **options)
    found = fc.cross_validate(there, folds=3, seed=here.seed, **options, driver=Driver(asking))
    same(found.mean, mine.mean)
    same(found.models, mine.models)
    assert (found.lambda_min, found.lambda_1se) == pytest.approx((mine.lambda_min, mine.lambda_1se), rel=1e-12)
    by_site = fc.cross_validate(there, folds="sites", **options, driver=Driver(asking))
    same(by_site.mean, fc.cross_validate(problem, folds="sites", **options).mean)


def test_a_description_of_sites_is_that_of_their_files(messy, tmp_path):
    files, config = messy
    here = Config.read(config)
    asking, _ = inquiry(tables(files, tmp_path), recipe_text(config))
    found = table_of(described(asking), here.data["target"])
    ours = describe(files.values(), target=here.data["target"], recipe=Recipe(**here.recipe), rules=Rules())
    pd.testing.assert_frame_equal(found, ours)


def test_intervals_quality_and_stability_are_those_of_silos_at_hand(hospitals, tmp_path):
    asking, _ = inquiry(make_sites(hospitals, tmp_path, opened(min_count=1)))
    there, here = asking.meet(), on_silos(hospitals)
    x = fc.path(here, count=5, ratio=0.1).solutions[-1]
    pd.testing.assert_frame_equal(fc.confidence(there, x, driver=Driver(asking)), fc.confidence(here, x), rtol=1e-10)
    theirs, ours = fc.quality(there, x, driver=Driver(asking)), fc.quality(here, x)
    pd.testing.assert_frame_equal(theirs.table, ours.table, rtol=1e-10)
    draws = {"draws": 4, "count": 5, "ratio": 0.1, "seed": 3}
    stable, mine = fc.stability(there, **draws, driver=Driver(asking)), fc.stability(here, **draws)
    assert stable.selected == mine.selected
    same(stable.bound, mine.bound)


def test_models_by_site_are_those_of_silos_at_hand(hospitals, tmp_path):
    asking, _ = inquiry(make_sites(hospitals, tmp_path, opened(min_count=1)))
    found, right = fc.by_site(asking.meet(), driver=Driver(asking)), fc.by_site(on_silos(hospitals))
    assert found.notes == right.notes
    np.testing.assert_allclose(found.sites["estimate"], right.sites["estimate"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.combined, right.combined, rtol=1e-7, atol=1e-10)


def counts_of_events(seed=2):
    """Counts over exposures at three sites: weights for patients, the logarithm of the exposure as offset."""
    generator = np.random.default_rng(seed)
    pairs, weights, offsets = [], [], []
    for size in (70, 50, 60):
        X, exposure = generator.normal(size=(size, 4)), generator.random(size) + 0.5
        rate = exposure * np.exp(X @ [0.6, -0.4, 0, 0] + 0.3)
        pairs.append((X, generator.poisson(rate).astype(float)))
        weights.append(generator.random(size) + 0.5)
        offsets.append(np.log(exposure))
    return fc.Silos.from_arrays(pairs, feature_names=list("abcd"), weights=weights, margin_offsets=offsets)


@pytest.mark.parametrize("loss", ["poisson", "logistic", "least_squares"])
def test_weighted_samples_with_offsets_are_those_of_silos_at_hand(loss, tmp_path):
    silos = counts_of_events()
    if loss == "logistic":
        silos = replace(silos, targets=(silos.targets > 1).double())
    text = PLAIN.replace('"logistic"', f'"{loss}"')
    here = Config.check({**tomllib.loads(text), "data": {"name": "heart_disease"}}).make_problem(silos)
    asking, _ = inquiry(make_sites(silos, tmp_path, opened(min_count=1)), text)
    there = asking.meet()
    options = {"folds": 3, "count": 6, "ratio": 0.05, "seed": 3}
    ours, theirs = fc.analyse(here, **options), fc.analyse(there, **options, driver=Driver(asking))
    mine, found = ours.content(), theirs.content()
    for part in (mine, found):
        part.pop("communication")
        part.pop("sites")
    compare(found, mine)


def test_a_path_with_offsets_and_weights_is_that_of_scipy():
    """Poisson regression of counts over exposures, at the end of a path without much of a regularizer."""
    silos = counts_of_events()
    problem = fc.Problem(silos, loss="poisson", regularizer=fc.regularizers.L1(1.0), bias=True, weights="samples")
    along = fc.path(problem, lambdas=[1.0, 1e-9], tolerance=1e-12)
    X = np.column_stack([silos.features, np.ones(len(silos.targets))])
    y, w, t = (np.asarray(v) for v in (silos.targets, silos.weights, silos.margin_offsets))

    def deviance(x):
        z = X @ x + t
        return float(w @ (np.exp(z) - y * z)) / w.sum()

    best = scipy.optimize.minimize(deviance, np.zeros(5), method="BFGS", options={"gtol": 1e-10})
    np.testing.assert_allclose(along.solutions[-1], best.x, atol=1e-5)
    saturated = float(w @ (y - scipy.special.xlogy(y, y))) / w.sum()
    null = scipy.optimize.minimize_scalar(lambda b: deviance(np.array([0, 0, 0, 0, b])), tol=1e-12).fun
    explained = 1 - (best.fun - saturated) / (null - saturated)
    assert along.deviance[-1] == pytest.approx(explained, abs=1e-8)


def test_folds_and_halves_are_the_sites_own_secret(hospitals, tmp_path):
    asking, _ = inquiry(make_sites(hospitals, tmp_path, opened(reproducible_parts=False, min_count=1)))
    there = asking.meet()
    x = torch.zeros(there.dimension, dtype=torch.float64)
    local = SiloTransport(on_silos(hospitals))

    def gradient(sites, kind):
        rows = fc.analysis.Rows(kind, 0, 2, seed=3)
        return sites.ask([fc.analysis.Request("information", {"x": x}, {}, rows)])[0]["gradient"]

    for kind in ("fold", "half", "bootstrap"):
        assert float((gradient(asking, kind) - gradient(local, kind)).abs().max()) > 1e-6


@pytest.mark.parametrize(
    ("limits", "rows", "text", "reason"),
    [
        ({"min_samples": 40}, ("fold", 0, 10, False, 3), PLAIN, "fewer than min_samples = 40"),
        ({"min_samples": 40}, ("fold", 0, 10, True, 3), PLAIN, "fewer than min_samples = 40"),
        ({}, ("fold", 0, 10, False, 8), PLAIN, "the experiment's seed is 3"),
        ({"secure": "required"}, (), PLAIN, "secure sums only"),
        ({"epsilon": 1.0}, (), PLAIN, "privacy budget"),
        ({"gradients_per_job": 5}, (), PLAIN, "gradients_per_job = 5"),
        ({"parameter_share": 0.01}, (), PLAIN, "parameter_share"),
    ],
)
def test_what_a_site_refuses(hospitals, tmp_path, limits, rows, text, reason):
    sites = make_sites(hospitals, tmp_path, opened(**limits))
    everything = torch.ones(len(hospitals.feature_names) + 1, dtype=torch.bool)
    with pytest.raises(FederationError, match=re.escape(reason)):
        question(sites, rows=fc.analysis.Rows(*rows), text=text, working=everything)


def test_a_model_that_singles_samples_out_is_refused(hospitals, tmp_path):
    with pytest.raises(FederationError, match="max_margin = 10"):
        question(
            make_sites(hospitals, tmp_path, opened(max_margin=10.0)),
            x=torch.full((len(hospitals.feature_names) + 1,), 1e3, dtype=torch.float64),
        )


def test_bins_below_the_minimum_are_joined(hospitals, tmp_path):
    rare = ("sex", "fbs")  # that few patients of one hospital have: no sum is told with these
    hospitals = arrange(hospitals, [name for name in hospitals.feature_names if name not in rare])
    edges = torch.linspace(-3, 3, 200, dtype=torch.float64)
    x = torch.linspace(-1, 1, len(hospitals.feature_names) + 1, dtype=torch.float64)
    fine, _ = question(make_sites(hospitals, tmp_path / "a", opened(min_count=1)), "scores", x=x, edges=edges)
    told, _ = question(make_sites(hospitals, tmp_path / "b", opened(min_count=5)), "scores", x=x, edges=edges)
    assert any(float(((c := one[0]["counts"][..., 0]) > 0).logical_and(c < 5).sum()) for one in fine)
    for exact, one in zip(fine, told, strict=True):
        counts = one[0]["counts"][..., 0]
        assert not bool(((counts > 0) & (counts < 5)).any())
        for kind in range(2):  # nothing is lost, but for a class that is too small
            if float(counts[kind].sum()):
                same(one[0]["counts"][kind].sum(0), exact[0]["counts"][kind].sum(0))


def ranged(numbers):
    """Counts of two classes in bins, as ``scores`` have them."""
    made = torch.zeros(2, len(numbers[0]), 5, dtype=torch.float64)
    made[..., :2] = torch.tensor(numbers, dtype=torch.float64).unsqueeze(-1)
    return made


def test_joined_bins_keep_sums_and_order():
    counts = ranged([[1, 0, 2, 9, 1, 0, 1], [0, 1, 0, 0, 0, 1, 0]])
    made = joined(counts, 5, counts[..., 0], HIGHEST)
    assert made[0, :, 0].tolist() == [14, 0, 0, 0, 0, 0, 0]  # from the first bin to the last: where nobody is as well
    assert made[0, :, 1].tolist() == [0, 0, 0, 0, 0, 0, 14]
    assert float(made[1].sum()) == 0  # two samples of a class are not told
    assert torch.equal(joined(counts, 1, counts[..., 0], HIGHEST), counts)


def test_ranges_of_joined_bins_do_not_tell_where_samples_are():
    """They reach to the bins that stand for themselves, to the middle of gaps, and to the ends."""
    counts = ranged([[0, 2, 3, 0, 0, 0, 3, 2, 0, 9, 0, 4, 1, 0], [0] * 14])
    made = joined(counts, 5, counts[..., 0], HIGHEST)[0]
    assert torch.nonzero(made[:, 0]).flatten().tolist() == [0, 5, 9, 10]
    assert torch.nonzero(made[:, 1]).flatten().tolist() == [4, 8, 9, 13]
    assert made[[0, 5, 9, 10], 0].tolist() == [5, 5, 9, 5]


@pytest.mark.parametrize("least", [3, 5, 8])
def test_measures_of_joined_bins_are_as_far_off_as_they_say(least):
    """Also over sites, whose joined bins are not the same ones: told in their middle they broke the bound."""
    edges, x = torch.linspace(-3, 3, 300, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for seed in range(8):
        draw = np.random.default_rng(seed)
        z = [draw.normal(0.7 * site, 1.0, (40, 1)) for site in range(3)]
        pairs = [(v, (draw.random(40) < scipy.special.expit(1.5 * v[:, 0] - 0.5)).astype(float)) for v in z]
        problem = fc.Problem(fc.Silos.from_arrays(pairs), loss="logistic", weights="samples")
        exact, told = fc.quality(problem, x, exact=True), []
        for silo in silos_of(problem):
            (made,) = minimum_counts.told(Limits(min_count=least), silo, [scores(x, edges, "train")])
            assert not bool(((made["counts"][..., 0] > 0) & (made["counts"][..., 0] < least)).any())
            told.append(fc.analysis.Quality.told([made], edges, True))
        for ours, theirs in zip(exact.rows.values(), [*told, fc.analysis.Quality.all(told)], strict=True):
            assert theirs.samples == ours.samples
            for name in ("auroc", "auprc", "calibration_slope", "calibration_intercept"):
                off = abs(getattr(theirs, name) - getattr(ours, name))
                assert off <= getattr(theirs, f"{name}_error") + 1e-9, (seed, name)
                assert theirs.bounds(name)[0] - 1e-9 <= getattr(ours, name) <= theirs.bounds(name)[1] + 1e-9
            for threshold in (0.25, 0.5):
                rates = theirs.rates(threshold)
                for name, (value, _) in ours.rates(threshold).items():
                    low, high = rates[name][1]
                    assert np.isnan(value) or low - 1e-9 <= value <= high + 1e-9, (seed, name)


def frames_on_disk(name, folder):
    files = {site: folder / f"{site}.csv" for site in fc.data.frames(name)}
    for site, frame in fc.data.frames(name).items():
        frame.to_csv(files[site], index=False)
    return files


@pytest.mark.parametrize("shipped", ["messy", "heart-recipe"])
def test_what_is_shipped_runs_at_sites_with_default_limits(shipped, messy, tmp_path):
    """The first try of a newcomer: the numbers are those of files at hand.

    The sites have default limits, but for folds that follow from the seed, so that they can be compared with these, and
    for files whose writing the experiment describes.
    """
    files = messy[0] if shipped == "messy" else frames_on_disk("heart_disease", tmp_path)
    here = Config.read(messy[1] if shipped == "messy" else shipped)
    problem = here.make_problem()
    text = tomli_w.dumps({**tomllib.loads(here.text), "algorithm": {"name": "ProxNewton"}})
    asking, _ = inquiry(tables(files, tmp_path, Limits(reproducible_parts=True, foreign_reading=True)), text)
    assert learn(asking, here.data["target"]).model_dump() == problem.silos.recipe.model_dump()
    options = {"folds": 5, "count": 6, "ratio": 0.05, "seed": here.seed}
    there = asking.meet()
    ours, theirs = fc.cross_validate(problem, **options), fc.cross_validate(there, **options, driver=Driver(asking))
    same(theirs.mean, ours.mean)
    exact, told = fc.quality(problem, ours), fc.quality(there, theirs, driver=Driver(asking))
    same(told.table[["samples", "positives"]], exact.table[["samples", "positives"]])
    assert told.overall.brier_error < 0.03
    for name, one in told.rows.items():  # of folds, probabilities have noise
        assert 0 < abs(one.brier - exact.rows[name].brier) <= one.brier_error
        assert np.isnan(told.table.loc[name, "brier"]) == (one.brier_error > 0.05)
        assert f"Brier score \u00b1 {one.brier_error:.2g}" in told.notes[name]
    right = fc.quality(problem, ours, exact=True)
    for name, one in told.rows.items():
        for measure in ("auroc", "auprc", "calibration_slope", "calibration_intercept"):
            low, high = one.bounds(measure)
            truth = getattr(right.rows[name], measure)
            assert np.isnan(truth) or low - 1e-9 <= truth <= high + 1e-9, (name, measure)
            shown = told.table.loc[name, measure]
            assert np.isnan(shown) or abs(shown - truth) <= told.table.loc[name, f"{measure}_error"] + 1e-9
        for threshold in (0.3, 0.5):
            truths = right.rows[name].rates(threshold)
            for measure, (_, (low, high)) in one.rates(threshold).items():
                truth = truths[measure][0]
                assert np.isnan(truth) or low - 1e-9 <= truth <= high + 1e-9, (name, measure)
    assert told.overall.auroc_error < 0.06
    if shipped == "heart-recipe":  # eight without the disease: nothing can be said about ranks
        assert np.isnan(told.table.loc["switzerland", "auroc"])
        assert "AUROC between" in told.notes["switzerland"]
        assert "too wide to tell" in told.notes["switzerland"]
    with pytest.raises(FederationError, match="take fewer folds"):
        fc.cross_validate(there, **options | {"folds": 40}, driver=Driver(asking))


def test_what_a_small_site_cannot_tell_is_left_out_everywhere_and_said(tmp_path):
    """Eight patients without the disease: its AUROC was told as 0.500, sensitivity and specificity as 1 and 0."""
    here = Config.read("heart-recipe")
    text = tomli_w.dumps({**tomllib.loads(here.text), "algorithm": {"name": "ProxNewton"}})
    sites = tables(frames_on_disk("heart_disease", tmp_path), tmp_path, Limits())
    newcomers(sites, tmp_path)
    asking, _ = inquiry(sites, text)
    learn(asking, here.data["target"])
    there = asking.meet()
    found = fc.analyse(there, "fit", seed=here.seed, driver=Driver(asking))
    found.save(tmp_path / "run")
    fc.write_report(tmp_path / "run")
    note = found.quality.notes["switzerland"]
    assert "AUROC between" in note
    assert "counts of scores have noise" in note
    told = json.loads((tmp_path / "run" / "analysis.json").read_text())["quality"]["switzerland"]
    assert told["auroc"] is None
    assert told["roc"] == []
    assert told["note"] == note
    table = pd.read_csv(tmp_path / "run" / "report-quality.csv").set_index("site")
    assert np.isnan(table.loc["switzerland", "AUROC"])
    assert table.loc["switzerland", "note"] == note
    page = (tmp_path / "run" / "report.html").read_text()
    (row,) = re.findall(r"<tr><td>switzerland</td>.*?</tr>", page.partition("<h2>Quality</h2>")[2])
    assert '<td class="n">–</td>' in row
    for name in ("report.html", "report.md"):
        assert f"switzerland: {note}" in (tmp_path / "run" / name).read_text()
    seen = predict_at_sites(there, found.x, Driver(asking)).set_index("site")
    exact = fc.quality(here.make_problem(), found.x, exact=True)
    assert seen.loc[["switzerland"], ["auroc", "specificity"]].isna().all(axis=None)
    assert "specificity between" in seen.loc["switzerland", "note"]
    rates = exact.overall.confusion(0.5)
    for name in ("sensitivity", "specificity"):
        assert abs(seen.loc["all", name] - rates[name]) <= seen.loc["all", f"{name}_error"] + 1e-9
    assert abs(found.quality.overall.auroc - exact.overall.auroc) <= found.quality.overall.auroc_error < 0.05


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ('test = "b.csv"', "patients for `federation predict` are `new"),
    ],
)
def test_what_does_not_go_with_a_recipe_at_a_site_says_what_does(tmp_path, line, remedy):
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, ["north"], engine="local")
    place = fed.path / "sites" / "north"
    text = (place / "site.toml").read_text()
    (place / "site.toml").write_text(text.replace("[data]", f'[data]\nfile = "a.csv"\nrecipe = true\n{line}', 1))
    with pytest.raises(FolderError, match=re.escape(remedy)):
        open_site(SiteFolder(place))


def test_a_test_part_is_refused_and_not_forgotten(messy, tmp_path):
    """Files at hand would hold patients out: the same experiment would give other numbers in a federation."""
    config = tmp_path / "e.toml"
    config.write_text(messy[1].read_text().replace('target = "sick"', 'target = "sick"\ntest = 0.2', 1))
    read(str(config))  # a description is of all patients, here and there
    with pytest.raises(ConfigError, match=r"\[data\] test: a federation holds no patients out.*federation predict"):
        read(str(config), fitted=True)


def test_an_analysis_needs_no_rounds(messy, tmp_path):
    config = tmp_path / "e.toml"
    config.write_text(messy[1].read_text())
    assert "[run]" not in config.read_text()
    assert read(str(config), fitted=True)[0].run.rounds == 0
    with pytest.raises(ConfigError, match="run is missing"):
        parse(recipe_text(config))
    with pytest.raises(ConfigError, match="run is missing"):
        Config.read(config, rounds=True)


def _written(folder, data):
    """A site's folder with such data in its site.toml."""
    fed = FederationFolder.create(folder, "127.0.0.1", 9093, ["north", "south"], engine="local")
    made = []
    for name, text in data.items():
        place = fed.path / "sites" / name / "site.toml"
        content = tomllib.loads(place.read_text()) | {"limits": opened(min_count=5).model_dump(exclude_none=True)}
        content["data"] = {"file": str(folder.parent / f"{name}.csv"), **text}
        place.write_text(tomli_w.dumps(content))
        made.append(SiteFolder(place.parent))
    return made


def test_levels_of_one_site_are_called_alike_in_its_own_file(tmp_path):
    """1 and 2 at one site, male and female at the other: site.toml, the recipe and clean files give the same."""
    g = np.random.default_rng(3)
    frame = pd.DataFrame({"age": g.normal(60, 9, 160).round(), "sex": g.choice(["male", "female"], 160)})
    frame["sick"] = np.where(g.random(160) < 0.3 + 0.3 * (frame["sex"] == "male"), "yes", "no")
    one, other = frame[:80], frame[80:]
    codes = {"sex": {"1": "male", "2": "female"}, "sick": {"1": "yes", "0": "no"}}
    own = other.replace({k: {b: int(a) for a, b in v.items()} for k, v in codes.items()})
    one.to_csv(tmp_path / "north.csv", index=False)
    own.rename(columns={"sex": "Geschlecht"}).to_csv(tmp_path / "south.csv", index=False)
    recipe = {"one_hot": {"sex": "female"}, "target": {"yes": 1, "no": 0}}
    part = {"rename": {"sex": "Geschlecht"}, "recode": codes}
    clean = Recipe(**recipe).prepare({"north": one, "south": other}, target="sick")
    paths = [tmp_path / "north.csv", tmp_path / "south.csv"]
    here = Recipe(**recipe, sites={"south": part}).prepare(paths, target="sick")
    torch.testing.assert_close(here.features, clean.features, rtol=0, atol=0)
    data = {"north": {"recipe": True}, "south": {"recipe": True, "columns": part["rename"], "recode": codes}}
    sites = [open_site(folder) for folder in _written(tmp_path / "fed", data)]
    asking, _ = inquiry(sites, tomli_w.dumps({**tomllib.loads(PLAIN), "recipe": recipe}))
    learned = learn(asking, "sick")
    assert learned.features == ["age", "sex=male"]
    problem, there = on_silos(clean), asking.meet()
    options = {"count": 6, "ratio": 0.1}
    same(fc.path(there, **options, driver=Driver(asking)).solutions, fc.path(problem, **options).solutions)
    found = table_of(described(asking), "sick")
    pd.testing.assert_frame_equal(found, describe({"north": one, "south": other}, target="sick", rules=Rules()))
    wrong = {**data, "south": {**data["south"], "recode": {"gender": codes["sex"]}}}
    with pytest.raises(DataError, match="south: recode: no column 'gender'"):
        open_site(_written(tmp_path / "wrong", wrong)[1])
    plain = _written(tmp_path / "plain", {"south": {"target": "sick", "recode": codes}})
    with pytest.raises(FolderError, match=r"\[data.recode\] is for recipe = true"):
        open_site(plain[0])
    with pytest.raises(FolderError, match=r"recode.sex.1: input should be a valid string"):
        _written(tmp_path / "odd", {"south": {"recipe": True, "recode": {"sex": {"1": ["male"]}}}})


@pytest.mark.parametrize("recipe", [True, False])
def test_join_refuses_a_column_that_the_file_has_not(recipe, tmp_path):
    """Before anything is written: what, where, and which columns there are."""
    pd.DataFrame({"Alter": [50.0, 60, 70], "rr": [120.0, 130, 140], "sick": [0, 1, 1]}).to_csv(
        tmp_path / "south.csv", index=False
    )
    given = {"recipe": True} if recipe else {"target": "sick"}
    cases = [
        ({"columns": {"age": "alter"}}, "(?s)age = 'alter'.*no column 'alter'.*Alter"),
        ({"drop": ["name"]}, "(?s)drop.*name.*Alter"),
        ({"columns": {"age": "Alter"}, "units": {"bp": {"scale": 2.0}}}, "(?s)units.*'bp'"),
    ]
    for i, (wrong, says) in enumerate(cases):
        (place,) = _written(tmp_path / f"fed{i}", {"south": {**given, **wrong}})
        before = sorted(place.path.rglob("*"))
        with pytest.raises((DataError, FolderError), match=says):
            open_site(place)
        assert sorted(place.path.rglob("*")) == before
    (place,) = _written(tmp_path / "right", {"south": {**given, "columns": {"age": "Alter"}, "drop": ["rr"]}})
    assert open_site(place).name == "south"


def test_a_table_needs_a_recipe_and_a_prepared_file_takes_none(messy, hospitals, tmp_path):
    files, config = messy
    asking, _ = inquiry(tables(files, tmp_path / "a"))
    with pytest.raises(FederationError, match="needs a recipe"):
        asking.meet()
    asking, _ = inquiry(
        make_sites(hospitals, tmp_path / "b"),
        recipe_text(config)
        .replace("south", "cleveland")
        .replace("east", "hungary")
        .replace("west", "va")
        .replace("va", "switzerland"),
    )
    with pytest.raises(FederationError, match="not prepared by recipes"):
        asking.meet()


def newcomers(sites, folder, rows=None):
    """Let sites score patients: their own, or the first of them."""
    for site in sites:
        source = site._source
        if rows is not None:
            path = Path(folder) / f"new-{site.name}.csv"
            path.write_bytes(b"\n".join(source.path.read_bytes().splitlines()[: rows + 1]) + b"\n")
            source = replace(source, path=path)
        site.newcomers = Newcomers(source, Path(folder) / site.name / "scored")


def test_sites_score_their_own_patients(messy, tmp_path):
    """The file that stays at a site is the one of `predict`, and the quality that is told is that of files at hand."""
    files, config = messy
    here = Config.read(config)
    problem = here.make_problem()
    found = fc.analyse(problem, "fit", seed=here.seed)
    found.save(tmp_path / "run")
    sites, lines = tables(files, tmp_path, opened(min_count=1)), []
    newcomers(sites, tmp_path)
    sites[1]._log = lines.append
    asking, grid = inquiry(sites, recipe_text(config))
    asking.recipe = learned = problem.silos.recipe
    there = asking.meet()
    told = predict_at_sites(there, found.x, Driver(asking), threshold=0.3).set_index("site")
    sheets = Recipe(**here.recipe).sheets(files.values(), names=list(files))
    silos = fc.Silos.from_arrays([learned.table(one) for one in sheets], names=list(files))
    ours = fc.quality(fc.Problem(silos, loss="logistic", bias=True), found.x)
    for name in ours.table:
        same(told[name], ours.table[name])
    assert told.loc["all", "sensitivity"] == pytest.approx(ours.overall.confusion(0.3)["sensitivity"], abs=1e-12)
    for name, path in files.items():
        expected = fc.predict(tmp_path / "run", path, site=name, threshold=0.3).table
        (scored,) = (tmp_path / name / "scored").iterdir()
        frame = pd.read_csv(scored)
        assert len(frame) == len(expected)
        for column in ("margin", "prediction", "class"):
            same(frame[column], expected[column])
        assert scored.parent.stat().st_mode & 0o077 == 0
    assert "stays here" in lines[-2]
    assert "scores (new)" in lines[-1]
    assert wire.weight(grid.log[-1][2]) < 100_000  # bins and no rows


def test_few_new_patients_are_scored_and_nothing_is_told(messy, tmp_path):
    files, config = messy
    sites, lines = tables(files, tmp_path, opened(min_samples=10, min_evaluation=10)), []
    newcomers(sites, tmp_path, rows=6)
    sites[0]._log = lines.append
    asking, _ = inquiry(sites, recipe_text(config))
    learn(asking, Config.read(config).data["target"])
    there = asking.meet()
    x = torch.zeros(there.dimension, dtype=torch.float64)
    assert predict_at_sites(there, x, Driver(asking)).empty
    assert len(pd.read_csv(next((tmp_path / "north" / "scored").iterdir()))) == 6
    assert "too few with a known outcome" in lines[-2]
    with pytest.raises(FederationError, match="nothing to be scored"):
        asking.ask([fc.analysis.Request("information", {"x": x}, {}, part="new")])


def test_sites_score_regressions_with_offsets(tmp_path):
    """Plain columns, a Poisson model, an offset: R2 as scikit-learn has it."""
    silos, text = counts_of_events(), PLAIN.replace('"logistic"', '"poisson"')
    silos = replace(silos, weights=None)
    sites = make_sites(silos, tmp_path, opened())
    frames = []
    for i, site in enumerate(sites):
        (X, y), rows = silos[i], slice(*silos.offsets[i : i + 2])
        frame = pd.DataFrame(X.numpy(), columns=list("abcd")).assign(events=y.numpy())
        frame["log_time"] = silos.margin_offsets[rows].numpy()
        frame.to_csv(tmp_path / f"{site.name}.csv", index=False)
        source = TableFile(site.name, tmp_path / f"{site.name}.csv")
        site.newcomers = Newcomers(source, tmp_path / f"scored-{i}", "events", "log_time")
        frames.append(frame)
    asking, _ = inquiry(sites, text)
    there = asking.meet()
    x = torch.tensor([0.5, -0.4, 0, 0, 0.3], dtype=torch.float64)
    told = predict_at_sites(there, x, Driver(asking))
    assert told["site"].tolist() == [*silos.names, "all"]
    for i, frame in enumerate([*frames, pd.concat(frames)]):
        mean = np.exp(frame[list("abcd")].to_numpy() @ [0.5, -0.4, 0, 0] + 0.3 + frame["log_time"])
        assert told["r2"][i] == pytest.approx(r2_score(frame["events"], mean), abs=1e-10)
        assert told["rmse"][i] == pytest.approx(np.sqrt(np.mean((frame["events"] - mean) ** 2)), rel=1e-10)
        assert told["mae"][i] == pytest.approx(np.mean(np.abs(frame["events"] - mean)), rel=1e-10)
        data = frame[list("abcd")].to_numpy(), frame["events"].to_numpy()
        known = fc.Silos.from_arrays([data], margin_offsets=[frame["log_time"].to_numpy()])
        ours = fc.quality(fc.Problem(known, loss="poisson", bias=True), x).overall
        assert told["deviance_explained"][i] == pytest.approx(ours.deviance_explained, abs=1e-10)
    (first, *_) = frames
    rate = np.exp(first[list("abcd")].to_numpy() @ [0.5, -0.4, 0, 0] + 0.3 + first["log_time"])
    same(pd.read_csv(tmp_path / "scored-0" / "job.csv")["prediction"], rate)


@pytest.mark.parametrize("loss", ["least_squares", "huber", "poisson"])
def test_regressions_are_measured_under_minimum_counts(loss, tmp_path):
    """The sums of silos at hand, curves in joined bins, absolute errors only where a site allows them."""
    silos, text = replace(counts_of_events(), weights=None), PLAIN.replace('"logistic"', f'"{loss}"')
    here = Config.check({**tomllib.loads(text), "data": {"name": "heart_disease"}}).make_problem(silos)
    options = {"folds": 3, "count": 5, "ratio": 0.05, "seed": 3}
    allowed = opened(min_count=8, min_samples=10, metrics=["r2"])
    sites = make_sites(silos, tmp_path, allowed)
    sites[1].limits = opened(min_count=8, min_samples=10, metrics=["r2", "mae"])
    asking, _ = inquiry(sites, text)
    theirs = fc.analyse(asking.meet(), **options, driver=Driver(asking)).quality
    ours = fc.analyse(here, **options).quality
    assert list(theirs.table.index) == list(ours.table.index)
    for name in ours.table:
        if name == "mae":
            assert theirs.table[name].isna().tolist() == [True, False, True, True]
            same(theirs.table[name].iloc[1], ours.table[name].iloc[1])
        else:
            same(theirs.table[name], ours.table[name])
    for name, one in theirs.by_site.items():
        numbers = one.counts[0, :, 0]
        assert set(numbers[numbers > 0].tolist()).isdisjoint(range(1, 8))
        assert float(numbers.sum()) == ours.by_site[name].samples
    sites[2].limits = opened(min_samples=10, metrics=["accuracy"])
    less = fc.quality(here, torch.zeros(5, dtype=torch.float64), driver=Driver(asking))
    assert list(less.by_site) == list(asking.names)[:2]
    assert less.overall.samples == 120


def test_residuals_of_rare_columns_are_refused(tmp_path):
    """At a model of one column alone its sums would be those of the few who have it."""
    silos = replace(counts_of_events(), weights=None)
    X = silos.features.clone()
    X[:, 2] = 0.0
    X[:3, 2] = 1.0
    text = PLAIN.replace('"logistic"', '"least_squares"')
    asking, _ = inquiry(make_sites(replace(silos, features=X), tmp_path, opened(min_count=5)), text)
    asking.meet()
    alone = torch.tensor([0, 0, 1.0, 0, 0], dtype=torch.float64)
    with pytest.raises(FederationError, match="fewer than min_count = 5 samples differ from the others in a column"):
        asking.ask([residuals(alone, torch.zeros(0, dtype=torch.float64), "train")])


FIELDS = {
    "schema": {"columns", "kinds", "rows"},
    "gaps": {"n", "missing", "again"},
    "moments": {"n", "missing", "sum", "squares", "withheld"},
    "below": {"low", "high", "n"},
    "levels": {"levels", "counts", "rest", "many"},
    "outside": {"outside"},
    "newton": {"weight", "loss", "gradient", "hessian"},
    "losses": {"weight", "deviance", "error", "histogram"},
    "information": {"weight", "loss", "gradient", "hessian", "outer"},
    "scores": {"counts", "squares"},
    "residuals": {"sums", "counts"},
    "rates": {"sums"},
}
"""All that a site may say to a query or a question, by its name."""


def test_every_message_holds_sums_alone_and_the_docs_list_their_fields(messy, tmp_path):
    files, config = messy
    lines = []
    here = Config.read(config)
    sites = tables(files, tmp_path, log=lines.append)
    newcomers(sites, tmp_path)
    asking, grid = inquiry(sites, recipe_text(config))
    described(asking)
    learn(asking, here.data["target"])
    there = asking.meet()
    cv = fc.cross_validate(there, folds=2, count=4, ratio=0.3, seed=here.seed, scoring="auc", driver=Driver(asking))
    fc.confidence(there, cv.solution(), robust=True, driver=Driver(asking))
    fc.quality(there, cv, driver=Driver(asking))
    predict_at_sites(there, cv.solution(), Driver(asking))
    asking.ask([residuals(cv.solution(), torch.zeros(1, dtype=torch.float64), "train")])
    asking.ask([rates(cv.solution(), torch.ones(2, dtype=torch.float64), "train")])
    told = (DOCS / "federation.md").read_text()
    seen, sizes = set(), set()
    for _, request, answer in grid.log:
        order = Order.read(wire.text(request, "order"))
        assert wire.kind(answer) in ("answers", "report", "introduction")
        assert order.analysis is not None
        if wire.kind(answer) == "introduction":
            continue
        if order.analysis.queries:
            (one,) = json.loads(wire.text(answer, "answers"))
            name = json.loads(order.analysis.queries[0])["name"]
            assert {k.partition(":")[0] for k in json.loads(one)} <= FIELDS[name]
            seen.add(name)
            sizes |= set(json.loads(one).get("rows", []))
            continue
        header = wire._declared(answer["vectors"])
        for i, asked in enumerate(order.analysis.questions):
            mine = {k.partition(".")[2]: f.shape for k, f in header.items() if k.partition(".")[0] == str(i)}
            assert {k.partition("/")[0] for k in mine} == FIELDS[asked.name]
            whole = {k.partition("/")[0]: k for k in mine if k.endswith("/shape")}  # what goes without its zeros
            mine = {k: v for k, v in mine.items() if "/" not in k} | {
                k: wire.deserialise(answer["vectors"])[f"{i}.{part}"].tolist() for k, part in whole.items()
            }
            assert all(not sizes & set(shape) for shape in mine.values())  # none is as long as a site's table
            seen.add(asked.name)
        assert wire.numbers(answer) == {"questions": len(order.analysis.questions)}
    assert seen == FIELDS.keys()
    for name, fields in FIELDS.items():
        row = next(line for line in told.splitlines() if line.startswith(f"| `{name}`"))
        assert all(f"`{field}" in row for field in fields), row
    assert sum("exchange" in line and "kB sent" in line for line in lines) >= asking.exchanges - 1


def test_rare_rows_are_not_told_of_a_table(messy, tmp_path):
    files, config = messy
    asking, _ = inquiry(tables(files, tmp_path, opened(min_samples=10_000)), recipe_text(config))
    with pytest.raises(FederationError, match="fewer rows than its min_samples"):
        described(asking)


def test_an_analysis_has_its_own_approval(messy, tmp_path):
    """A rule for runs of few rounds does not let an analysis through, and nor does an approved run."""
    files, config = messy
    few = {
        "methods": ["ProxNewton"],
        "losses": ["logistic"],
        "max_rounds": 1000,
        "max_evaluations": 1000,
        "secure": False,
    }
    approvals = [Approvals(tmp_path / n, Approval(required=True, allow=[Rule(**few)])) for n in files]
    sites = tables(files, tmp_path)
    for site, own in zip(sites, approvals, strict=True):
        site._approvals = own
    asking, _ = inquiry(sites, recipe_text(config), settings=Settings(give_up=0.01))
    with pytest.raises(FederationError, match="waits for approval"):
        described(asking)
    assert digest(asking.config) not in approvals[0].all()
    (name,) = approvals[0].all()
    assert approvals[0].all()[name]["analysis"]
    for own, site in zip(approvals, sites, strict=True):
        if not own.all():
            order = Order(
                job="job", site=site.name, config=asking._text, analysis={"queries": ["{}"], "plan": asking.plan}
            )
            site.answer(wire.content(order=order.model_dump_json()))
        own.decide(name[:16], "approved")
    target = Config.read(config).data["target"]
    learn(asking, target)
    assert asking.meet().dimension > 3
    other = PLAIN.replace('"ProxNewton"', '"FedAvg"\nstep = 0.1\nlocal_steps = 1')
    # an approved recipe does not stand in its way
    with pytest.raises(RefusalError, match="waits for approval"):
        approvals[0].check(parse(other), Order(job="other", site=sites[0].name, config=other), 3)


def test_what_a_table_tells_is_in_its_audit_log(messy, tmp_path):
    files, config = messy
    sites = tables(files, tmp_path)
    key = ec.generate_private_key(ec.SECP384R1())
    sites[0]._audit = Audit(tmp_path / "audit", key)
    asking, _ = inquiry(sites, recipe_text(config))
    learn(asking, Config.read(config).data["target"])
    there = asking.meet()
    asking.ask([fc.analysis.Request("information", {"x": torch.zeros(there.dimension, dtype=torch.float64)}, {})])
    said = [line["what"] for line in sites[0]._audit.verify()]
    assert len(said) == asking.exchanges
    assert said[0] == "analysis: 1 schema"
    assert said[-2:] == ["analysis: introduction", "analysis: 1 information"]


# -- going on ---------------------------------------------------------------------------------------------------------


class KilledError(BaseException):
    """As if the coordinator's process had been."""


@pytest.fixture
def commanded(messy, tmp_path, monkeypatch):
    """Commands of a coordinator whose four sites are in this process; ``at`` is the exchange after which it dies."""
    files, config = messy
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, list(files), engine="local")

    class Coordinated:
        path, grid, at, experiment = fed.path, None, None, config

        def sites(self, folder):
            self.grid = LocalSites(tables(files, tmp_path / folder))
            self.grid.close = lambda: None

        def __call__(self, *words, at=None):
            self.at = at
            given = [str(word) for word in words]
            return CliRunner().invoke(federation_app, [given[0], str(fed.path), *given[1:]])

        def orders(self):
            """What each site was asked, in order: exchange and job."""
            made = [(site, Order.read(wire.text(content, "order"))) for site, content, _ in self.grid.log]
            return {s.name: [(o.analysis.number, o.job) for site, o in made if site == s.name]
                    for s in self.grid.sites.values()}  # fmt: skip

    one = Coordinated()
    watch = federation_analysis.AtSites._watch

    def dying(self, driver):
        watch(self, driver)
        if driver.exchanges == one.at:
            raise KilledError

    monkeypatch.setattr(federation_analysis.AtSites, "_watch", dying)
    monkeypatch.setattr(federation_analysis, "require_service", lambda federation: None)
    monkeypatch.setattr(federation_analysis, "open_engine", lambda federation, job, log: one.grid)
    return one


def finished(folder):
    """What an analysis leaves, apart from the time that it took."""
    found = json.loads((folder / "analysis.json").read_text())
    found.pop("seconds")
    return found, (folder / "model.safetensors").read_bytes(), (folder / "recipe.json").read_bytes()


def status(folder):
    return json.loads((folder / "status.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fit", "path", "cv"])
def test_a_killed_analysis_goes_on_and_asks_nothing_twice(commanded, tmp_path, kind):
    options = {"fit": [], "path": ["--count", 6], "cv": ["--count", 6, "--folds", 3]}[kind]
    commanded.sites("a")
    done = commanded(kind, commanded.experiment, *options, "--out", tmp_path / "whole")
    assert done.exit_code == 0, done.output
    whole, asked = finished(tmp_path / "whole"), commanded.orders()
    last = whole[0]["communication"]["exchanges"]
    commanded.sites("b")
    out = tmp_path / "part"
    stops = sorted(random.Random(kind).sample(range(1, last), 3))
    for n, stop in enumerate(stops):
        begin = ["--resume", out] if n else [commanded.experiment, *options, "--out", out]
        with pytest.raises(KilledError):
            raise commanded(kind, *begin, at=stop).exception
        assert (out / "answers.log").stat().st_mode & 0o777 == 0o600
        assert not (out / "analysis.json").exists()
    done = commanded(kind, "--resume", out)
    assert done.exit_code == 0, done.output
    assert f"going on after {stops[-1]} exchanges" in done.output
    assert finished(out) == whole
    again = commanded.orders()
    (job,) = {job for orders in again.values() for _, job in orders}
    assert again == {site: [(number, job) for number, _ in orders] for site, orders in asked.items()}
    for site in again:  # what was counted there
        books = [json.loads((tmp_path / part / site / "ledger.json").read_text())["jobs"] for part in "ab"]
        (first,), (second,) = (book.values() for book in books)
        assert first == second
    assert not (out / "answers.log").exists()
    assert status(out)["state"] == "finished"
    assert status(out)["exchanges"] == last
    assert (out / "job").read_text().strip() == job
    assert "finished already" in commanded(kind, "--resume", out).output


def test_an_analysis_that_fails_says_how_to_go_on(commanded, tmp_path):
    commanded.sites("a")
    words = ["path", commanded.experiment, "--count", 6]
    assert commanded(*words, "--out", tmp_path / "whole").exit_code == 0
    commanded.sites("b")
    commanded.grid.meddle = lambda site, order, reply: (
        wire.content(refusal="not today") if site == "south" and len(commanded.grid.log) > 40 else reply
    )
    out = tmp_path / "part"
    done = commanded(*words, "--out", out)
    assert done.exit_code == 1
    assert "not today" in done.output
    assert f"fedcomposite federation path {commanded.path} --resume {out}" in done.output
    assert (status(out)["state"], status(out)["kind"]) == ("failed", "path")
    job = json.loads((commanded.path / "state" / "jobs" / f"{(out / 'job').read_text().strip()}.json").read_text())
    assert (job["kind"], job["out"], job["sites"]) == ("path", str(out), ["north", "south", "east", "west"])
    commanded.grid.meddle = None
    (out / "stop").touch()  # of an earlier attempt: it does not stop this one
    assert commanded("path", "--resume", out).exit_code == 0
    assert finished(out) == finished(tmp_path / "whole")


def test_an_analysis_that_is_asked_to_stop(commanded, tmp_path):
    commanded.sites("a")
    out = tmp_path / "part"

    def asked(site, order, reply):
        if len(commanded.grid.log) == 40:
            (out / "stop").touch()
        return reply

    commanded.grid.meddle = asked
    done = commanded("cv", commanded.experiment, "--count", 6, "--out", out)
    assert done.exit_code == 1
    assert "interrupted after" in done.output
    assert status(out)["state"] == "interrupted"
    kept = {p.name: p.read_bytes() for p in out.iterdir()}
    for words, reason in (
        (["cv", commanded.experiment, "--out", out], "--resume or another --out"),
        (["fit", "--resume", out], "an analysis of `cv`"),
        (["run", "--resume", out], "federation cv --resume"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(federation_jobs, "require_service", lambda federation: {})
            refused = commanded(*words)
        assert refused.exit_code == 2, refused.output
        assert reason in refused.output
    at_hand = CliRunner().invoke(app, ["cv", "--resume", str(out)])
    assert "add --federation" in str(at_hand.exception)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == kept
    there = CliRunner().invoke(app, ["cv", "--federation", str(commanded.path), "--resume", str(out)])
    assert there.exit_code == 0, there.output


def test_skip_leaves_out_who_is_not_there_when_it_begins(commanded, tmp_path):
    commanded.sites("a")
    commanded.grid.away = {"south"}
    out, options = tmp_path / "run", ["--policy", "skip", "--patience", 0.1]
    with pytest.raises(KilledError):
        raise commanded("fit", commanded.experiment, *options, "--out", out, at=3).exception
    commanded.grid.away = set()  # it is back, and too late
    done = commanded("fit", "--resume", out)
    assert done.exit_code == 0, done.output
    assert "without south" in done.output
    found = json.loads((out / "analysis.json").read_text())
    assert (found["sites"], found["absent"]) == (["north", "east", "west"], ["south"])
    assert not commanded.orders()["south"]
    commanded.grid.away = {"north", "south", "east", "west"}
    done = commanded("fit", commanded.experiment, *options, "--out", tmp_path / "none")
    assert done.exit_code == 1
    assert "no site is there" in done.output
    assert not (tmp_path / "none").exists()
