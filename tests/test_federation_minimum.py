"""Attacks on minimum counts of analyses: each finds a patient where a site opts out, and is refused by default."""

import dataclasses
import itertools
import json

import numpy as np
import pandas as pd
import pytest
import torch
from analyst import PLAIN, inquiry, question, same
from local_federation import LocalSites, make_sites, opened

import fedcomposite as fc
from fedcomposite.analysis import Request, Rows
from fedcomposite.analysis.prediction import predict_at_sites
from fedcomposite.data.queries import Below, Gaps, LevelCounts, Moments, Schema
from fedcomposite.data.steps import Absent, Complete, Impute, Interact, Local, Log, Spline, Standardize
from fedcomposite.federation.coordinator.delivery import FederationError
from fedcomposite.federation.coordinator.inquiry import Inquiry, learn
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.policy import Limits
from fedcomposite.federation.site.table_files import Newcomers, TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.runtime import Driver

DEFAULT = {"min_count": 5, "min_samples": 10, "min_class": 5}


def silos_of(sites=3, size=60, rare=0, seed=0, **more):
    """Samples of three features; at the first site ``rare`` of them have the last one."""
    generator = np.random.default_rng(seed)
    pairs = []
    for i in range(sites):
        X = generator.normal(size=(size, 3))
        X[:, 2] = (np.arange(size) < (rare if i == 0 else 20)).astype(float)
        pairs.append((X, (generator.random(size) < 1 / (1 + np.exp(-X[:, 0]))).astype(float)))
    return fc.Silos.from_arrays(pairs, feature_names=["a", "b", "level"], **more)


def at(x, **arrays):
    return {"x": torch.as_tensor(x, dtype=torch.float64), **arrays}


def test_a_patient_with_a_rare_level_is_a_row_of_the_hessian(tmp_path):
    """What one patient alone has selects that patient from every second moment."""
    silos = silos_of(rare=1)
    [answers, *_], _ = question(make_sites(silos, tmp_path / "a", opened(min_count=1)), "information")
    row = answers[0]["hessian"][2]
    same(row[:2] / row[2], silos[0][0][0, :2])  # the patient, exactly
    for name, arrays in (("information", {}), ("newton", {"working": torch.ones(4, dtype=torch.bool)})):
        with pytest.raises(FederationError, match="min_count = 5 samples differ from the others in a column"):
            question(make_sites(silos, tmp_path / name, opened(**DEFAULT)), name, **arrays)
    question(make_sites(silos_of(rare=5), tmp_path / "five", opened(**DEFAULT)), "information")
    question(make_sites(silos_of(rare=0), tmp_path / "none", opened(**DEFAULT)), "information")


@pytest.mark.parametrize("rare", [2, 5])
def test_the_outcomes_of_a_few_are_no_sum_of_margins(rare, tmp_path):
    """A model of their column alone is 0 for all others: the margins of a class count those of them who have it."""
    silos, alone = silos_of(rare=rare), at([0.0, 0, 1, 0], edges=torch.tensor([5.0], dtype=torch.float64))
    sick = int(silos[0][1][:rare].sum())
    [answers, *_], _ = question(make_sites(silos, tmp_path / "a", opened(min_count=1)), "scores", **alone)
    assert answers[0]["counts"][1, :, 2].sum() == sick
    sites = make_sites(silos, tmp_path / "b", opened(**DEFAULT))
    if rare < 5:
        with pytest.raises(FederationError, match="differ from the others in a column"):
            question(sites, "scores", **alone)
    else:
        question(sites, "scores", **alone)
    for i, site in enumerate(sites):  # the same people as new patients: nothing is told of the first site's
        X, y = silos[i]
        path = tmp_path / f"{i}.csv"
        pd.DataFrame(X.numpy(), columns=["a", "b", "level"]).assign(sick=y.numpy()).to_csv(path, index=False)
        site.newcomers = Newcomers(TableFile(site.name, path), tmp_path / f"scored-{i}", "sick")
    asking, _ = inquiry(sites)
    there = asking.meet()
    assert len(predict_at_sites(there, alone["x"], Driver(asking))) == (4 if rare == 5 else 3)
    assert len(pd.read_csv(tmp_path / "scored-0" / "job.csv")) == 60


def test_a_fold_of_few_is_not_asked_for_directly(tmp_path):
    sites = make_sites(silos_of(rare=6), tmp_path, opened(**{**DEFAULT, "min_samples": 1}))
    question(sites, "information", Rows("fold", 0, 5, False, 3))
    with pytest.raises(FederationError, match="samples of a fold differ"):
        question(sites, "information", Rows("fold", 0, 5, True, 3))


def test_one_event_of_a_poisson_regression(tmp_path):
    """The gradient at a low intercept is minus the row of the one patient with an event."""
    silos = silos_of(rare=20)
    rare = torch.zeros(len(silos.targets), dtype=torch.float64)
    rare[[7, 70, 71, 72, 130, 131, 132]] = 1.0
    silos = dataclasses.replace(silos, targets=rare)
    text = PLAIN.replace('"logistic"', '"poisson"')
    low = at([0.0, 0.0, 0.0, -30.0], working=torch.zeros(4, dtype=torch.bool))
    [answers, *_], _ = question(make_sites(silos, tmp_path / "a", opened()), text=text, **low)
    same(-answers[0]["gradient"][:3], silos[0][0][7], 1e-9)
    with pytest.raises(FederationError, match="min_class = 5 targets differ"):
        question(make_sites(silos, tmp_path / "b", opened(min_class=5)), text=text, **low)


def test_bins_are_joined_by_patients_and_not_by_their_weight(tmp_path):
    """A patient who counts a hundred is one patient."""
    heavy = [torch.ones(60, dtype=torch.float64) for _ in range(3)]
    heavy[0][:] = 100.0
    silos = silos_of(rare=20, weights=heavy)
    edges = torch.linspace(-3, 3, 400, dtype=torch.float64)
    sites = make_sites(silos, tmp_path, opened(**DEFAULT))
    [answers, *_], _ = question(sites, "scores", **at([1.0, 0, 0, 0]), edges=edges)
    told = answers[0]["counts"][..., 0]
    assert float(told.sum()) == 6000
    assert float(told[told > 0].min()) >= 500
    models = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
    asking, _ = inquiry(make_sites(silos, tmp_path / "b", opened(**DEFAULT)))
    asking.meet()
    [sums], *_ = Driver(asking).each([Request("losses", {"models": models}, {"bins": 512})])
    assert float(sums["histogram"][sums["histogram"] > 0].min()) >= 500


def test_wrong_predictions_are_counted_where_there_are_many(tmp_path):
    """Counts of errors at planes of the asker's choice are a histogram of single patients."""
    silos = silos_of(rare=20)
    planes = torch.tensor([[1.0, 0.0, 0.0, t] for t in (0.0, 1.0, 5.0)], dtype=torch.float64)

    def errors(limits, models, text=PLAIN, name="x"):
        asking, _ = inquiry(make_sites(silos, tmp_path / name, limits), text)
        asking.meet()
        return asking.ask([Request("losses", {"models": models}, {"bins": 0, "errors": 1})])[0]["error"]

    assert errors(opened(**DEFAULT), planes, name="a").shape == (3,)
    X, y = silos.features, silos.targets
    best = torch.linalg.lstsq(torch.cat([X, torch.ones(len(X), 1)], 1).double(), 2 * y - 1).solution
    few = dataclasses.replace(silos, targets=(torch.cat([X, torch.ones(len(X), 1)], 1) @ best > 0).double())
    flipped = few.targets.clone()
    flipped[0] = 1 - flipped[0]
    silos = dataclasses.replace(few, targets=flipped)
    assert float(errors(opened(min_count=1), best[None], name="b")[0]) == 1
    with pytest.raises(FederationError, match="wrongly or rightly predicted"):
        errors(opened(**DEFAULT), best[None], name="c")
    with pytest.raises(FederationError, match="mae is not among this site's metrics"):
        errors(opened(**DEFAULT, metrics=Limits().metrics), planes, PLAIN.replace('"logistic"', '"least_squares"'), "d")


def test_refusals_are_counted(tmp_path):
    """Whether a margin is too large is an answer as well: asked often enough it finds the largest value."""
    sites = make_sites(silos_of(rare=20), tmp_path, opened(**DEFAULT, max_margin=10.0, gradients_per_job=3))
    asking, _ = inquiry(sites)
    asking.meet()
    asked = Request("newton", at([100.0, 0, 0, 0], working=torch.zeros(4, dtype=torch.bool)), {})
    for _ in range(3):
        with pytest.raises(FederationError, match="max_margin"):
            asking.ask([asked])
    with pytest.raises(FederationError, match="gradients_per_job = 3"):
        asking.ask([asked])


def test_a_rare_class_of_a_held_out_part(tmp_path):
    silos = silos_of(rare=20)
    X, y = silos.features[:20].clone(), torch.zeros(20)
    y[3] = 1
    sites = make_sites(silos, tmp_path / "a", opened(**DEFAULT))
    for site in sites:
        site.silos = dataclasses.replace(site.silos, test=(X, y))
        site.sizes["test"] = 20
    asking, _ = inquiry(sites)
    asking.meet()
    with pytest.raises(FederationError, match="a class has fewer test samples"):
        asking.ask([Request("information", at([0.0, 0, 0, 0]), {}, part="test")])


# -- tables -----------------------------------------------------------------------------------------------------------

TABLE = PLAIN + '[recipe]\nlog = { c = 1.0 }\nmissing_target = "drop"\ninteractions = [["age", "age"]]\n'


@pytest.fixture
def tables(tmp_path):
    """Three tables; at the first one patient has no target, and one is 97 years old."""
    times = itertools.count()

    def make(**limits):
        place = tmp_path / str(next(times))
        generator, made = np.random.default_rng(1), []
        for name in ("north", "south", "east"):
            frame = pd.DataFrame({"age": generator.integers(20, 60, 40), "c": generator.random(40)})
            frame["sick"] = generator.integers(0, 2, 40).astype(float)
            frame["age"] = frame["age"].astype(float)
            if name == "north":
                frame.loc[3, "age"], frame.loc[3, "sick"] = 97.0, np.nan
            frame.to_csv(tmp_path / f"{name}.csv", index=False)
            store = StateStore(place / name)
            made.append(TableSite(name, store, opened(**limits), source=TableFile(name, tmp_path / f"{name}.csv")))
        grid = LocalSites(made)
        return Inquiry(grid, [s.name for s in made], grid.permitted, parse(TABLE, recipe=True), "job")

    return make


def test_a_table_counts_no_value_that_is_called_missing(tables):
    """Gaps are counted exactly, so nobody but the site may say what a gap is."""
    with pytest.raises(FederationError, match="not those of a recipe"):
        tables().ask([Gaps(columns=["age"], steps=[Local(missing={"age": [97.0]})])])


def test_a_logarithm_that_fails_finds_no_least_value(tables):
    """It is the experiment that says what is added before a logarithm."""
    asking = tables()
    asking.ask([Moments(columns=["log(c + 1)"], steps=[Log(offsets={"c": 1.0})])])[0]
    with pytest.raises(FederationError, match="'log' is not that of the experiment"):
        asking.ask([Moments(columns=["log(age + -20)"], steps=[Log(offsets={"age": -20.0})])])[0]


def test_two_sums_that_differ_by_one_row(tables):
    """The rows without a target are as many as the minimum, or they are in all sums."""
    whole, less = Moments(columns=["age"]), Moments(columns=["age"], steps=[Complete(columns=["sick"])])
    asking = tables(min_count=1)
    found = [asking.ask([query])[0][0]["sum"][0] for query in (whole, less)]
    assert found[0] - found[1] == 97.0  # the patient
    asking = tables(min_count=5)
    asking.ask([whole])[0]
    with pytest.raises(FederationError, match="would tell of fewer than min_count = 5 rows"):
        asking.ask([less])[0]


def test_no_powers_of_a_column(tables):
    """Sums of high powers are the largest value."""
    steps = [Standardize(mean={"age": 20.0}, sd={"age": 1.0}), Interact(pairs=[("age", "age")])]
    more = Interact(pairs=[("age:age", "age:age")])
    asking = tables()
    asking.ask([Schema(steps=[Absent(columns=["age"]), steps[1]])])[0]
    for wrong in (steps, [steps[1], more]):
        with pytest.raises(FederationError, match="not those of a recipe"):
            asking.ask([Moments(columns=["age"], steps=wrong)])[0]


@pytest.fixture
def gappy(tmp_path):
    """Three tables with gaps; at the first, one patient is 97 years old, one has the marker, and one the level."""

    jobs = itertools.count()

    def make(recipe="one_hot = ['kind']\nimpute = 'median'\ninteractions = [['marker', 'marker']]\n", **limits):
        generator, made = np.random.default_rng(2), []
        for name in ("north", "south", "east"):
            age, marker = generator.integers(20, 60, 60).astype(float), np.zeros(60)
            kind = np.where(np.arange(60) % 2, "a", "b").astype(object)
            if name == "north":
                age[3], marker[4], kind[5] = 97.0, 1.0, "rare"
            age[10:18], marker[10:18], kind[10:18] = np.nan, np.nan, None
            frame = pd.DataFrame({"age": age, "marker": marker, "kind": kind, "sick": generator.integers(0, 2, 60)})
            frame.to_csv(tmp_path / f"{name}.csv", index=False)
            store = StateStore(tmp_path / name)
            made.append(TableSite(name, store, opened(**limits), source=TableFile(name, tmp_path / f"{name}.csv")))
        grid = LocalSites(made)
        text = f"{PLAIN}[recipe]\n{recipe}"
        return Inquiry(grid, [s.name for s in made], grid.permitted, parse(text, recipe=True), f"job{next(jobs)}")

    return make


def test_one_patient_among_filled_gaps(gappy):
    """Whoever says what gaps are filled with can put the eight of them beside a patient: ten less eight is one."""
    with_age, with_marker = Impute(values={"age": 97.0}), Impute(values={"marker": 7.0})
    kinds = Impute(values={"kind": "rare"})
    asked = {
        "age": Below(edges={"age": [90.0, 96.5, 97.5]}, steps=[with_age]),
        "marker": Moments(columns=["marker"], steps=[with_marker]),
        "product": Moments(columns=["marker:marker"], steps=[with_marker, Interact(pairs=[("marker", "marker")])]),
        "kind": LevelCounts(columns=["kind"], steps=[kinds]),
    }
    found = {name: gappy(min_count=1).ask([query])[0][0] for name, query in asked.items()}
    assert found["age"]["low:age"].tolist() == found["age"]["high:age"].tolist() == [51, 51, 60]  # 8 gaps, 1 patient
    assert found["marker"]["sum"][0] == 8 * 7 + 1
    assert dict(zip(found["kind"]["levels:kind"], found["kind"]["counts:kind"], strict=True))["rare"] == 8 + 1
    found = {name: gappy(min_count=5).ask([query])[0][0] for name, query in asked.items()}
    assert (found["age"]["high:age"] - found["age"]["low:age"])[1] >= 5
    assert found["marker"]["withheld"][0] == found["product"]["withheld"][0] == 1
    assert "rare" not in found["kind"]["levels:kind"]
    told = int(found["kind"]["counts:kind"].sum() + found["kind"]["rest:kind"][0])
    assert told == 60 or 60 - told >= 5 + 8


def test_levels_that_are_only_filled_in_are_told(gappy):
    """A level of its own for gaps is nobody's."""
    asking = gappy(min_count=5)
    [found, *_] = asking.ask([LevelCounts(columns=["kind"], steps=[Impute(values={"kind": "unknown"})])])[0]
    assert "unknown" in found["levels:kind"]
    [found, *_] = asking.ask([Moments(columns=["new"], steps=[Absent(columns=["new"]), Impute(values={"new": 3.0})])])[
        0
    ]
    assert found["sum"][0] == 180.0


def test_one_patient_among_filled_gaps_is_no_row_of_the_hessian(gappy):
    """Nor in sums over features; `rare` makes such a feature constant."""
    recipe = "drop = ['age', 'kind']\nimpute = 7.0\nstandardize = false\n"
    information = Request("information", at([0.0, 0.0]), {})

    def ask(recipe, **limits):
        asking = gappy(recipe, **limits)
        asking.recipe = learn(Driver(asking), asking.config, "sick")
        asking.meet()
        return Driver(asking).each([information])[0][0]["hessian"]

    assert float(ask(recipe, min_count=1)[0, 1]) * 4 == pytest.approx(8 * 7 + 1)  # the patient
    with pytest.raises(
        FederationError, match=r"beside filled gaps, fewer than min_count = 5 .* in a column; put rare = 5"
    ):
        ask(recipe, min_count=5)
    assert float(ask(recipe + "rare = 5\n", min_count=5)[0, 0]) == 0


def test_a_shift_finds_no_largest_value(gappy):
    """The outermost cells reach to fixed edges, which a shift would move."""
    asking = gappy(min_count=5)
    shifts = Standardize(mean={"age": 96.5}, sd={"age": 1.0})
    for steps in ([shifts], [Interact(pairs=[("age", "marker")])], [Spline(knots={"age": [20.0, 40.0, 60.0]})]):
        with pytest.raises(FederationError, match="before they are shifted"):
            asking.ask([Below(edges={"age": [-1.0, 0.0, 1.0]}, steps=steps)])[0]


def test_recipes_make_what_is_rare_constant():
    """The same numbers at a site and here; new patients keep what they have."""
    frames = {}
    for i, name in enumerate(("north", "south")):
        generator = np.random.default_rng(i)
        level = np.where(np.arange(60) < (3 if name == "north" else 30), "x", "y")
        frames[name] = pd.DataFrame({"age": generator.normal(50, 9, 60), "kind": level, "sick": np.arange(60) % 2})
    recipe = {"one_hot": {"kind": "y"}, "standardize": ["age"]}
    plain, made = (fc.Recipe(**recipe, **more).prepare(frames, target="sick") for more in ({}, {"rare": 5}))
    column = list(made.feature_names).index("kind=x")
    assert float(plain[0][0][:, column].sum()) == 3
    assert float(made[0][0][:, column].sum()) == 0
    assert torch.equal(made[1][0], plain[1][0])
    assert float(made.recipe.apply(frames["north"].head(6))["kind=x"].sum()) == 3
    assert json.loads(made.recipe.text)["recipe"]["rare"] == 5
