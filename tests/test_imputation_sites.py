"""Imputation by draws, and complete cases, at sites of a federation: as at hand, plain and in secure sums."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from analyst import PLAIN, same
from gaps import at_sites, patients
from local_federation import LocalSites, opened
from secure_sites import secure_tables

import fedcomposite as fc
from fedcomposite.data.chained import Drawing
from fedcomposite.data.queries import Conditional, Gaps, Lacking
from fedcomposite.data.sheets import sheets_of
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.inquiry import Inquiry, learn
from fedcomposite.federation.shape import parse
from fedcomposite.runtime import Driver

RECIPE = '[recipe]\nimpute = "chained"\none_hot = ["grade"]\ncopies = 3\niterations = 2\n'


def tables():
    """Three sites; the last lacks one column, and has few values of another."""
    _, seen = patients(900)
    made = at_sites(seen, (350, 600))
    last = made["s2"].copy()
    last["smoker"] = np.nan
    last.loc[last.index[np.flatnonzero(last.pressure.notna())[7:]], "pressure"] = np.nan
    return {**made, "s2": last}


class Asking:
    """A coordinator and its sites in this process."""

    def __init__(self, folder, frames, text=PLAIN + RECIPE, job="job", secure=False, **limits):
        self.folder, self.frames, self.config = folder, frames, parse(text, recipe=True)
        folder.mkdir(exist_ok=True)
        files = {name: folder / f"{name}.csv" for name in frames}
        for name, frame in frames.items():
            frame.to_csv(files[name], index=False)
        self.sites = secure_tables(files, folder, opened(**limits))
        self.inquiry = self.again(job, secure)
        self.driver = Driver(self.inquiry)

    def again(self, job, secure=False, text=None):
        """A further job of the same sites."""
        config = self.config if text is None else parse(text, recipe=True)
        grid = LocalSites(self.sites)
        names = list(self.frames)
        return Inquiry(grid, names, grid.permitted, config, job, Settings(secure=secure))

    def problem(self):
        self.inquiry.recipe = learn(self.driver, self.config, "y")
        return self.inquiry.meet(self.driver)

    def at_hand(self):
        """The same, of the files and by the sites' own random numbers."""
        recipe = fc.Recipe(**{**self.config.recipe, "min_count": self.sites[0].limits.min_count})
        sheets = [
            replace(sheet, drawing=Drawing(site._drawing.seed, site._drawing.least))
            for name, site in zip(self.frames, self.sites, strict=True)
            for sheet in sheets_of(self.folder / f"{name}.csv", text={"grade"})
        ]
        silos = recipe.prepare(sheets, target="y", seed=self.config.seed)
        return self.config.make_problem(silos)


@pytest.mark.parametrize("secure", [False, True])
def test_everything_is_as_at_hand_with_the_same_random_numbers(tmp_path, secure):
    asking = Asking(tmp_path, tables(), secure=secure, min_count=5)
    problem, mine = asking.problem(), asking.at_hand()
    chain = next(step for step in asking.inquiry.recipe.steps if step.kind == "chained").chain
    assert chain.borrowed == ["smoker", "pressure"]
    assert len(chain.draws) == 4
    close = 1e-5 if secure else 1e-9
    driver = {"driver": asking.driver}
    ours, theirs = fc.path(problem, count=6, **driver), fc.path(mine, count=6)
    np.testing.assert_allclose(ours.solutions, theirs.solutions, atol=close)
    zero = torch.zeros(mine.dimension, dtype=torch.float64)
    one, other = fc.confidence(problem, zero, jeffreys=0, **driver), fc.confidence(mine, zero, jeffreys=0)
    assert (other.missing_share[:-1] > 0).any()
    for name in ("estimate", "se", "df", "missing_share"):
        np.testing.assert_allclose(one[name], other[name], rtol=100 * close, atol=100 * close)
    if not secure:
        same(fc.wald_test(problem, ["grade"], **driver), fc.wald_test(mine, ["grade"]), 1e-6)
        folds = {"folds": 3, "count": 4, "seed": 3}
        apart, pooled = fc.cross_validate(problem, **folds, **driver), fc.cross_validate(mine, **folds)
        np.testing.assert_allclose(apart.mean, pooled.mean, rtol=1e-8)


def test_the_same_job_is_drawn_alike_and_ways_of_drawing_are_counted(tmp_path):
    recipe = RECIPE.replace('one_hot = ["grade"]', 'drop = ["grade", "smoker"]')
    asking = Asking(tmp_path, tables(), PLAIN + recipe, min_count=5)
    asking.problem()
    first = asking.inquiry.recipe
    again = asking.again("other")
    assert learn(Driver(again), asking.config, "y").text == first.text
    for i in range(9):
        text = PLAIN + recipe.replace("iterations = 2", f"iterations = {i + 3}")
        other = asking.again(f"job{i}", text=text)
        learn(Driver(other), other.config, "y")
    other = asking.again("more", text=PLAIN + recipe.replace("iterations = 2", "iterations = 40"))
    with pytest.raises(FederationError, match="10 ways already"):
        learn(Driver(other), other.config, "y")


def test_complete_cases_are_those_at_hand(tmp_path):
    _, seen = patients(900)
    ways = '{ pressure = "complete", smoker = "chained", grade = "most_frequent" }'
    text = PLAIN + f'[recipe]\nimpute = {ways}\none_hot = ["grade"]\ncopies = 2\niterations = 1\n'
    asking = Asking(tmp_path, at_sites(seen, (350, 600)), text=text, min_count=5)
    problem, mine = asking.problem(), asking.at_hand()
    assert asking.inquiry.recipe.rows == int(seen.pressure.notna().sum()) == len(mine.silos.features)
    ours, theirs = fc.path(problem, count=5, driver=asking.driver), fc.path(mine, count=5)
    np.testing.assert_allclose(ours.solutions, theirs.solutions, atol=1e-9)


def test_rows_without_gaps_may_not_differ_from_those_of_another_job_in_a_few(tmp_path):
    whole, seen = patients(600)
    seen = whole.assign(pressure=seen.pressure)
    seen.loc[seen.index[[3, 5]], "smoker"] = np.nan
    text = PLAIN + '[recipe]\nimpute = { pressure = "complete", smoker = "most_frequent" }\ndrop = ["grade"]\n'
    asking = Asking(tmp_path, at_sites(seen), text=text, min_count=5)
    asking.problem()
    other = asking.again("other", text=text.replace('"most_frequent"', '"complete"'))
    with pytest.raises(FederationError, match="fewer than min_count"):
        learn(Driver(other), other.config, "y")


def test_a_site_holds_conditional_models_against_the_recipe(tmp_path):
    asking = Asking(tmp_path, tables(), min_count=5)
    asking.problem()
    chain = next(step for step in asking.inquiry.recipe.steps if step.kind == "chained").chain
    width = chain.outputs("smoker") * chain.width("smoker")
    points = [[0.0] * width] * 3
    strange = ({"copies": 2}, {"iterations": 9}, {"logs": {"age": 0.0}}, {"outcomes": ["y", "age"]})
    for i, one in enumerate(strange):
        bad = chain.model_copy(update={**one, "borrowed": [], "draws": []})
        for query in (Lacking(chain=bad), Gaps(columns=["age"], steps=[{"kind": "chained", "chain": bad}])):
            other = Driver(asking.again(f"job{i}"))
            with pytest.raises(FederationError, match="recipe"):
                other.ask([query])
    asking.driver.ask([Conditional(chain=chain, equation="smoker", points=points)])
    query = Conditional.model_construct(chain=chain, equation="grade", points=points, steps=[], only=None)
    with pytest.raises(FederationError, match="no site lacks"):
        asking.driver.ask([query])


def test_conditional_models_at_steep_points_tell_no_patient(tmp_path):
    """At planes on either side of the oldest patient a category's gradients differ by that patient's row."""
    oldest = {name: frame.age.max() for name, frame in tables().items()}

    def beyond(asking, text=RECIPE):
        asking.problem()
        chain = next(step for step in asking.inquiry.recipe.steps if step.kind == "chained").chain
        mean, sd = chain.scale["age"]
        names = [column for column in chain.columns if column != "smoker"]
        told = []
        for past in (-1e-4, 1e-4):
            point = np.zeros(chain.outputs("smoker") * chain.width("smoker"))
            point[sum(max(len(chain.columns[n]) - 1, 1) for n in names[: names.index("age")])] = 1e7
            point[-1] = -1e7 * ((oldest["s0"] - mean) / sd + past)
            query = Conditional(chain=chain, equation="smoker", points=[point.tolist()] * 3)
            told.append(asking.driver.ask([query])[0][0]["gradient"].reshape(3, -1)[0])
        return told[0] - told[1], mean, sd, chain

    row, mean, sd, _ = beyond(Asking(tmp_path / "open", tables(), min_count=5))
    assert np.abs(row * sd / row[-1] + mean - oldest["s0"]).min() < 1e-6
    with pytest.raises(FederationError, match="margins of the conditional model of 'smoker'"):
        beyond(Asking(tmp_path / "default", tables(), min_count=5, max_margin=10.0))


def test_no_answer_is_about_few_rows_of_a_column_that_few_have(tmp_path):
    """Seven pressures of the last site are drawn anew; gaps that few rows have are alike in all copies."""
    frames = tables()
    frames["s0"].loc[:, "grade"] = frames["s0"].grade.fillna("a")
    frames["s0"].loc[frames["s0"].index[[2, 9]], "grade"] = None
    asking = Asking(tmp_path, frames, min_count=5)
    asking.problem()
    mine = asking.at_hand().silos
    last, own = slice(600, 900), frames["s2"].pressure.to_numpy()
    assert np.isfinite(own).sum() == 7
    raw = mine.recipe.original(np.ones(len(mine.feature_names)))[0]  # 1 / sd
    there = np.isfinite(own)
    for one in mine.copies:
        assert (np.abs(one[last, 1].numpy()[there] - (own[there] - own[there].mean()) * raw[1]) > 1e-6).any()
    assert all(torch.equal(one[:350, 3:5], mine.copies[0][:350, 3:5]) for one in mine.copies)


def test_a_site_without_an_answer_says_so_in_words(tmp_path):
    """A column that nobody has enough of cannot be borrowed."""
    frames = {k: v.assign(smoker=np.where(np.arange(len(v)) < 9, v.smoker, np.nan)) for k, v in tables().items()}
    asking = Asking(tmp_path, frames, min_count=5)
    with pytest.raises(fc.data.DataError, match="sites tell too little about"):
        learn(asking.driver, asking.config, "y")
