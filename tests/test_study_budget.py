"""A budget for a whole study: sensitivities by brute force, what is charged, and the numbers that come out."""

import json
import math
import tomllib
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from local_federation import LocalSites, make_sites, opened
from secure_sites import secure_sites, secure_tables
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite.cli.main import app
from fedcomposite.data import DataError, Recipe
from fedcomposite.data.describing import look_at, table_of
from fedcomposite.data.queries import Census, Moments, Rules, Schema, answer
from fedcomposite.data.sheets import Sheet
from fedcomposite.data.steps import Standardize
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.inquiry import Inquiry, learn
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site import noised_answers
from fedcomposite.federation.site.approval import Approval, Approvals, Rule
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.privacy import BudgetError, Query, StudyBudget, compose
from fedcomposite.runtime import Driver, StudyDriver
from fedcomposite.runtime.noised_sums import (
    PARTS,
    STRAYED,
    bounds,
    cost,
    lasting,
    noised,
    placed,
    quadratic,
    strayed,
    triangle,
)
from fedcomposite.runtime.protocol import ALL, Rows, newton, silos_of
from fedcomposite.runtime.transports.study_answers import on_simplex

TEXT = """
seed = 3
[problem]
loss = "logistic"
bias = true
weights = "samples"
[regularizer]
name = "L1"
lam = 0.02
[algorithm]
name = "ProxNewton"
[run]
rounds = 1
[privacy]
level = "study"
epsilon = 3.0
requests = 12
row_clip = 3.0
steps = 2
"""


class Still:
    """No noise at all."""

    def chosen(self, clients, sizes, round, query, rate):
        raise AssertionError

    def normal(self, clients, round, query, count):
        return np.zeros((len(clients), count))


class Numbered:
    """Normal numbers that depend on the party and on how often it has asked."""

    def __init__(self):
        self.asked = {}

    def chosen(self, clients, sizes, round, query, rate):
        raise AssertionError

    def normal(self, clients, round, query, count):
        (id,) = clients.tolist()
        self.asked[id] = self.asked.get(id, 0) + 1
        return np.random.default_rng([id, self.asked[id]]).normal(size=(1, count))


def people(n=4, m=40, d=3, seed=0):
    """Sites whose samples follow a logistic model."""
    generator, pairs = np.random.default_rng(seed), []
    truth = np.linspace(1.0, -1.0, d)
    for shift in np.linspace(-0.5, 1.0, n):
        X = generator.normal(size=(m, d)) + shift
        pairs.append((X, (generator.random(m) < 1 / (1 + np.exp(-X @ truth))).astype(float)))
    return fc.Silos.from_arrays(pairs, names=[f"site{i}" for i in range(n)])


def problem_of(silos, loss="logistic", **options):
    l1 = fc.regularizers.L1(0.02)
    return fc.Problem(silos, loss=loss, regularizer=l1, bias=True, weights="samples", **options)


def exactly(silo, requests, budget):
    return noised(silo, requests, budget, True, lambda count: np.zeros(count))


def scaled(sums, most):
    """An answer in coordinates in which its noise has deviation 1 in units of the budget's."""
    parts = []
    for key, value in sums.items():
        bound, part = most.get(key, 1.0), PARTS.get(key, 1.0) if key in most else 1.0
        unit = triangle(round((math.sqrt(8 * len(value) + 1) - 1) / 2))[2] if key == "hessian" else 1.0
        parts.append((value / unit).flatten() * (math.sqrt(part) / bound))
    return torch.cat(parts)


def without(silo, i):
    keep = torch.arange(len(silo.X)) != i
    return replace(silo, X=silo.X[keep], b=silo.b[keep], importance=silo.importance[keep], kept={}, ranked=[])


@pytest.mark.parametrize("loss", ["logistic", "least_squares", "poisson", "huber", "squared_hinge"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e150])
def test_no_neighbour_is_further_than_one(loss, scale):
    """Every sample is taken away in turn, among them such as nobody has; at models near and far."""
    generator = np.random.default_rng(1)
    X = generator.normal(size=(30, 3)) * 3
    X[:8, 0] = [1e300, -1e200, 50.0, 3.0, 1e-300, 0.0, 1e9, -40.0]
    y = generator.integers(0, 2, 30).astype(float)
    if loss in ("least_squares", "huber", "poisson"):
        y = np.abs(generator.normal(size=30)) * 10 ** generator.uniform(-3, 6, 30).round(0)
        y = y.round() if loss == "poisson" else y
    [silo] = silos_of(problem_of(fc.Silos.from_arrays([(X, y)]), loss))
    budget = StudyBudget(epsilon=1.0, row_clip=2.0, slope_clip=1.5, loss_clip=0.7)
    x = torch.tensor(generator.normal(size=4) * scale)
    most = bounds(silo.loss, budget, True)
    [whole] = exactly(silo, [quadratic(x)], budget)
    far = 0.0
    for i in range(30):
        [other] = exactly(without(silo, i), [quadratic(x)], budget)
        move = scaled(whole, most) - scaled(other, most)
        assert bool(torch.isfinite(move).all())
        far = max(far, float(move.norm()))
    assert far <= 1 + 1e-9


def test_the_worst_neighbour_is_as_far_as_that():
    """A row on the bound, hit by the largest slope: the noise is no more than has to be, up to curvature and loss."""
    X, y = np.array([[5.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), np.array([1.0, 0.0])
    silo = without(silos_of(problem_of(fc.Silos.from_arrays([(X, y)])))[0], 1)
    budget = StudyBudget(epsilon=1.0, row_clip=2.0)
    most = bounds(silo.loss, budget, True)
    wrong, middle = torch.tensor([-1e3, 0.0, 0.0, 0.0]).double(), torch.zeros(4).double()
    [seen] = exactly(silo, [quadratic(wrong)], budget)
    assert float(seen["gradient"].norm()) == pytest.approx(most["gradient"], rel=1e-9)
    assert float(seen["loss"]) == pytest.approx(most["loss"])
    [seen] = exactly(silo, [quadratic(middle)], budget)
    unit = triangle(4)[2]
    assert float((seen["hessian"] / unit).norm()) == pytest.approx(most["hessian"], rel=1e-9)


@pytest.mark.parametrize("kind", ["placed", "lasting"])
def test_a_sample_is_in_one_cell(kind):
    generator = np.random.default_rng(0)
    X = generator.normal(size=(20, 2))
    if kind == "placed":
        [silo] = silos_of(problem_of(fc.Silos.from_arrays([(X, generator.integers(0, 2, 20).astype(float))])))
        request = placed(torch.ones(1, 3).double(), torch.tensor([-1.0, 0.0, 1.0]).double())
    else:
        y = np.stack([generator.exponential(5.0, 20), generator.integers(0, 2, 20)], 1)
        [silo] = silos_of(fc.Problem(fc.Silos.from_arrays([(X, y)]), loss="cox", weights="samples"))
        request = lasting(torch.tensor([1.0, 3.0]).double(), torch.zeros(2).double(), torch.zeros(0).double())
    budget = StudyBudget(epsilon=1.0)
    [whole] = noised(silo, [request], budget, False, lambda count: np.zeros(count))
    assert float(whole["counts"].sum()) == 20
    for i in range(20):
        [other] = noised(without(silo, i), [request], budget, False, lambda count: np.zeros(count))
        assert sorted((whole["counts"] - other["counts"]).flatten().tolist())[-2:] == [0.0, 1.0]


def test_noise_has_the_deviation_that_is_accounted_for():
    [silo] = silos_of(problem_of(people(1)))
    budget = StudyBudget(epsilon=2.0, requests=3, row_clip=2.0, share=0.25)
    generator = np.random.default_rng(0)
    x, most = torch.zeros(4).double(), bounds(silo.loss, budget, True)
    [exact] = exactly(silo, [quadratic(x)], budget)
    draws = torch.stack([
        scaled(noised(silo, [quadratic(x)], budget, True, lambda n: generator.normal(size=n))[0], most)
        for _ in range(2000)
    ])  # fmt: skip
    off = draws - scaled(exact, most)
    assert float(off.mean().abs()) < 0.02 * budget.noise
    torch.testing.assert_close(off.std(0), torch.full_like(off[0], budget.noise / 2), rtol=0.1, atol=0)
    correlation = torch.corrcoef(off.T) - torch.eye(off.shape[1])
    assert float(correlation.abs().max()) < 0.12


def test_folds_are_drawn_sample_by_sample_and_cost_as_one():
    [silo] = silos_of(problem_of(people(1, 500)))
    budget = StudyBudget(epsilon=1.0, row_clip=2.0)
    x = torch.ones(4).double()
    folds = [quadratic(x, Rows("fold", k, 5, True, 7)) for k in range(5)]
    each, [whole] = exactly(silo, folds, budget), exactly(silo, [quadratic(x)], budget)
    torch.testing.assert_close(sum(one["hessian"] for one in each), whole["hessian"])
    sizes = [float(one["count"]) for one in each]
    assert sum(sizes) == 500
    assert min(sizes) > 60
    assert cost(folds, silo.loss) == 1
    assert cost([*folds, quadratic(x)], silo.loss) == 2
    assert cost([*folds, folds[2]], silo.loss) == 2
    other = [quadratic(x, Rows("fold", k, 4, True, 7)) for k in range(4)]
    assert cost([*folds, *other], silo.loss) == 2
    scored = x * torch.arange(-2, 3).unsqueeze(1)
    binned = placed(scored, torch.zeros(1).double(), "train", Rows("fold", 0, 5, True, 7))
    assert cost([*folds, binned], silo.loss) == 2
    assert cost([placed(x.unsqueeze(0), torch.zeros(1).double())], silo.loss) == 1
    [seen] = exactly(silo, [binned], budget)
    assert float(seen["counts"].sum()) == 500
    own = sum(  # each fold by its model
        exactly(silo, [placed(scored[k : k + 1], torch.zeros(1).double(), "train", folds[k].rows)], budget)[0]["counts"]
        for k in range(5)
    )
    torch.testing.assert_close(seen["counts"], own)
    for rows in (Rows("fold", 0, 5), Rows("half", 0, 1), Rows("bootstrap", 0, 1), Rows("site", 0)):
        with pytest.raises(BudgetError, match=rows.kind):
            cost([quadratic(x, rows)], silo.loss)
    with pytest.raises(BudgetError, match="newton"):
        cost([newton(x, x > 0, ALL)], silo.loss)


def test_the_budget_is_that_of_all_requests():
    budget = StudyBudget(epsilon=3.0, delta=1e-6, requests=8)
    assert compose({Query(budget.noise): 8}, 1e-6) == pytest.approx(3.0, rel=2e-3)
    assert compose({Query(budget.noise): 8}, 1e-6) <= 3.0
    problem = problem_of(people())
    driver = StudyDriver.at_hand(problem, budget)
    fc.path(problem, count=5, driver=driver)
    assert budget.spent == 5
    fc.cross_validate(problem, folds=3, count=5, driver=driver)  # the fit is known, the folds are not
    assert budget.spent == 6
    x = fc.path(problem, count=5, driver=driver).solutions[-1]
    fc.confidence(problem, x, driver=driver)
    fc.quality(problem, x, driver=driver)
    assert budget.spent == 7
    fc.quality(problem, x, driver=driver)
    with pytest.raises(BudgetError, match="8 of 8 requests are spent"):
        fc.quality(problem, x, driver=driver)
    assert budget.spent == 8
    assert driver.exchanges == 8


@pytest.mark.parametrize("loss", ["logistic", "least_squares"])
def test_without_noise_and_clipping_the_numbers_are_those_of_the_study_itself(loss):
    """Path, folds and intervals of the quadratic; for least squares that is the function itself."""
    silos = people(3, 300)
    problem = problem_of(silos, loss)
    budget = StudyBudget(epsilon=1e12, requests=20, row_clip=1e6, slope_clip=1e6, loss_clip=1e6, steps=8)
    budget.__dict__["noise"] = 0.0
    driver = StudyDriver.at_hand(problem, budget)
    own, plain = fc.path(problem, count=8, ratio=0.01, driver=driver), fc.path(problem, count=8, ratio=0.01)
    if loss == "least_squares":
        np.testing.assert_allclose(own.solutions, plain.solutions, rtol=0, atol=1e-6)
        np.testing.assert_allclose(own.losses, plain.losses, rtol=1e-8)
    else:  # the quadratic is taken at the maximum of the likelihood: the weakest strengths are nearest
        np.testing.assert_allclose(own.solutions[-1], plain.solutions[-1], rtol=0, atol=0.02)
    ours, theirs = (fc.confidence(problem, plain.solutions[-1], driver=d) for d in (driver, None))
    np.testing.assert_allclose(ours[["estimate", "se"]], theirs[["estimate", "se"]], rtol=1e-5, atol=1e-7)
    cv = fc.cross_validate(problem, folds=3, count=8, ratio=0.01, driver=driver)
    other = fc.cross_validate(problem, folds=3, count=8, ratio=0.01)
    np.testing.assert_allclose(cv.mean[-3:], other.mean[-3:], rtol=0.05)


def test_quality_and_curves_come_from_cells():
    silos = people(3, 400)
    problem = problem_of(silos)
    budget = StudyBudget(epsilon=1e12, requests=20)
    budget.__dict__["noise"] = 0.0
    driver = StudyDriver.at_hand(problem, budget)
    x = fc.path(problem, count=5).solutions[-1]
    own, plain = (fc.quality(problem, x, driver=d).overall for d in (driver, None))
    assert (own.samples, own.positives) == pytest.approx((plain.samples, plain.positives))
    assert own.auroc == pytest.approx(plain.auroc, abs=0.01)
    assert own.brier == pytest.approx(plain.brier, abs=0.005)
    assert own.confusion()["accuracy"] == pytest.approx(plain.confusion()["accuracy"])
    assert own.calibration_slope == pytest.approx(plain.calibration_slope, abs=0.05)


def test_the_quality_of_a_regression_comes_from_seven_sums():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(600, 3))
    y = X @ [0.3, -0.2, 0.0] + 0.2 * generator.normal(size=600)
    problem = problem_of(fc.Silos.from_arrays([(X[i::3], y[i::3]) for i in range(3)]), "least_squares")
    budget = StudyBudget(epsilon=1e12, requests=20, row_clip=20.0, slope_clip=5.0, loss_clip=50.0)
    budget.__dict__["noise"] = 0.0
    driver = StudyDriver.at_hand(problem, budget)
    x = torch.tensor([0.25, -0.2, 0.01, 0.0]).double()
    own, plain = (fc.quality(problem, x, driver=d).overall.summary() for d in (driver, None))
    assert own == pytest.approx(plain, rel=1e-9)
    assert budget.spent == 1
    found = fc.analyse(problem, "cv", folds=3, count=5, choice="min", driver=driver)
    assert found.quality.overall.r2 == pytest.approx(0.75, abs=0.1)
    assert budget.spent == 4  # all samples, folds, quality


def test_seven_sums_of_a_sample_have_the_norm_one():
    generator = np.random.default_rng(0)
    X, y = generator.normal(size=(20, 2)) * 10, generator.normal(size=20) * 10.0 ** generator.integers(-3, 9, 20)
    [silo] = silos_of(problem_of(fc.Silos.from_arrays([(X, y)]), "least_squares"))
    budget = StudyBudget(epsilon=1.0, slope_clip=2.5)
    request = strayed(torch.tensor([[3.0, -1.0, 0.5]]).double())
    bound = dict(zip(STRAYED, [1.0, 2.5, 2.5**2, 2.5, 2.5**2, 2.5**2, 5.0], strict=True))
    [whole] = exactly(silo, [request], budget)
    norms = []
    for i in range(20):
        [other] = exactly(without(silo, i), [request], budget)
        norms.append(math.sqrt(sum(float((whole[k] - other[k]) / bound[k]) ** 2 / 7 for k in STRAYED)))
    assert 0.8 < max(norms) <= 1 + 1e-9
    generator = np.random.default_rng(1)
    drawn = [noised(silo, [request], budget, True, lambda n: generator.normal(size=n))[0] for _ in range(1500)]
    for name in STRAYED:
        spread = float(torch.cat([one[name] for one in drawn]).std())
        assert spread == pytest.approx(budget.noise * bound[name] * math.sqrt(7), rel=0.1)


def test_curves_of_times_have_the_numbers_at_risk():
    generator = np.random.default_rng(0)
    pairs = []
    for _ in range(3):
        X = generator.normal(size=(60, 2))
        y = np.stack([generator.exponential(10.0, 60).round(1) + 0.1, generator.integers(0, 2, 60)], 1)
        pairs.append((X, y))
    problem = fc.Problem(fc.Silos.from_arrays(pairs), loss="cox", weights="samples")
    budget = StudyBudget(epsilon=1e12, requests=2)
    budget.__dict__["noise"] = 0.0
    times = [2.0, 5.0, 10.0, 20.0]
    driver = StudyDriver.at_hand(problem, budget)
    own, plain = (fc.event_curves(problem, times=times, driver=d).of("all") for d in (driver, None))
    for name in ("at_risk", "censored", "events", "survival"):
        np.testing.assert_allclose(own[name], plain[name], atol=1e-12)
    assert budget.spent == 1
    with pytest.raises(BudgetError, match="quadratic"):  # a partial likelihood is no sum over samples
        fc.confidence(problem, torch.zeros(2), driver=driver)
    assert budget.spent == 1


def test_counts_are_brought_back_to_what_counts_can_be():
    noisy = torch.tensor([[5.0, -2.0, 30.0], [0.4, -0.1, 0.2]]).double()
    made = on_simplex(noisy)
    assert float(made.min()) >= 0
    assert float(made.sum()) == pytest.approx(float(noisy.sum()))
    brute = min(
        (float((noisy - torch.tensor(c)).square().sum()), c)
        for c in [(noisy + shift).clamp(min=0).tolist() for shift in np.linspace(-3, 3, 60001)]
        if abs(sum(map(sum, c)) - float(noisy.sum())) < 1e-3
    )
    torch.testing.assert_close(made, torch.tensor(brute[1]).double(), atol=1e-3, rtol=0)
    assert float(on_simplex(torch.tensor([-3.0, 1.0])).sum()) == 0


@pytest.mark.slow
def test_intervals_hold_with_their_noise():
    """Coverage of the truth by 95 % intervals, and standard errors against the spread of estimates."""
    truth = torch.tensor([1.0, -0.5, 0.0, 0.3])
    inside, errors, off = [], [], []
    for seed in range(60):
        generator = np.random.default_rng(seed)
        X = generator.uniform(-1, 1, size=(4000, 3))
        y = (generator.random(4000) < 1 / (1 + np.exp(-X @ truth[:3].numpy() - 0.3))).astype(float)
        silos = fc.Silos.from_arrays([(X[i::2], y[i::2]) for i in range(2)])
        problem = fc.Problem(silos, loss="logistic", bias=True, weights="samples")
        budget = StudyBudget(epsilon=2.0, requests=4, row_clip=math.sqrt(3), steps=3)
        driver = StudyDriver.at_hand(problem, budget, seed=seed)
        table = fc.confidence(problem, torch.zeros(4), driver=driver)
        inside.append(((table["lower"] <= truth.numpy()) & (truth.numpy() <= table["upper"])).to_numpy())
        errors.append(table["se"].to_numpy())
        off.append(table["estimate"].to_numpy() - truth.numpy())
    assert 0.90 < np.mean(inside) < 0.99
    ratio = np.std(off, 0) / np.mean(errors, 0)
    assert ((ratio > 0.7) & (ratio < 1.3)).all()
    plain = fc.confidence(problem, torch.zeros(4))["se"].to_numpy()
    assert (np.mean(errors, 0) > [1.2, 1.2, 1.2, 1.1] * plain).all()


# -- at sites ---------------------------------------------------------------------------------------------------------


def asked(sites, text=TEXT, secure=False, job="job", **settings):
    grid = LocalSites(sites)
    one = Inquiry(
        grid,
        [s.name for s in sites],
        grid.permitted,
        parse(text, recipe=True),
        job,
        Settings(secure=secure, **settings),
    )
    problem = one.meet()
    return problem, StudyDriver(Driver(one), one.config.budget, problem.loss, problem.bias), grid


def with_privacy(**fields):
    content = tomllib.loads(TEXT)
    content["privacy"] |= fields
    return tomli_w.dumps(content)


def test_a_federation_is_the_simulator_with_the_same_noise(tmp_path):
    silos = people()
    sites, source = make_sites(silos, tmp_path), Numbered()
    for site in sites:
        site.source = source
    there, driver, _ = asked(sites)
    found = fc.analyse(there, "cv", folds=3, count=6, seed=3, driver=driver)
    budget = parse(TEXT).budget
    here = problem_of(silos)
    own = StudyDriver.at_hand(here, budget, seed=3)
    own.inner.transport._source = Numbered()
    plain = fc.analyse(here, "cv", folds=3, count=6, seed=3, driver=own)
    torch.testing.assert_close(found.path.solutions, plain.path.solutions, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.cv.mean, plain.cv.mean, rtol=1e-9)
    np.testing.assert_allclose(found.intervals["se"], plain.intervals["se"], rtol=1e-9)
    assert found.quality.overall.auroc == pytest.approx(plain.quality.overall.auroc, rel=1e-9)
    assert budget.spent == 5  # two steps, all samples, folds, quality
    for site in sites:
        assert json.loads((site.store.folder / "ledger.json").read_text())["privacy"] == [[budget.noise, 1.0, 5]]


def test_a_site_charges_before_it_computes_and_stops_at_its_budget(tmp_path, monkeypatch):
    silos, noise = people(), parse(TEXT).budget.noise
    limits = opened(epsilon=compose({Query(noise): 4}, 1e-5) * 1.0001, min_parties=3)
    sites = make_sites(silos, tmp_path, limits)
    there, driver, _ = asked(sites)
    seen = []
    real = fc.federation.site.noised_answers.noised

    def watched(*given):
        seen.append(sites[0].ledger.spent())
        return real(*given)

    monkeypatch.setattr(fc.federation.site.noised_answers, "noised", watched)
    fc.path(there, count=4, driver=driver)
    assert len(seen) == 3 * 4
    assert seen[0] == pytest.approx(compose({Query(noise): 1}, 1e-5))
    fc.quality(there, torch.zeros(4), driver=driver)
    with pytest.raises(FederationError, match="is spent"):
        fc.quality(there, torch.zeros(4), driver=driver)
    assert len(seen) == 4 * 4
    _, other, _ = asked(make_sites(silos, tmp_path, limits), job="other")  # another job, after a restart
    with pytest.raises(FederationError, match="is spent"):
        fc.path(there, count=4, driver=other)
    assert len(seen) == 4 * 4


def test_what_a_site_says_beside_the_mechanism_does_not_depend_on_its_samples(tmp_path):
    """Introductions, refusals and logs' texts of neighbours, one with a class of two and one with a row more."""
    told = []
    for k, extra in enumerate(([], [1.0], [1.0, 1.0])):
        X = np.random.default_rng(0).normal(size=(30 + len(extra), 3))
        y = np.array([0.0] * 28 + [1.0] * 2 + extra)
        pairs = [(X, y), *((X[:30], y[:30]) for _ in range(2))]
        silos = fc.Silos.from_arrays(pairs, names=["a", "b", "c"])
        limits = opened(epsilon=3.0, min_class=5, min_count=5, min_parties=3, max_margin=1.0, parameter_share=0.1)
        _, driver, grid = asked(make_sites(silos, tmp_path / str(k), limits))
        x, edges = torch.ones(4).double(), torch.zeros(1).double()
        answers = driver.inner.ask([quadratic(100 * x), placed(x.unsqueeze(0), edges)])
        assert len(answers) == 2
        first = [answer for site, _, answer in grid.log if site == "a"]
        told.append([{key: value for key, value in one.items() if key != "vectors"} for one in first])
        assert not any(wire.kind(one) == "refusal" for one in first)
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize(
    ("change", "limits", "reason"),
    [
        ({"problem": {"weights": "uniform"}}, {}, "weights = 'samples'"),
        ({"privacy": None}, {"epsilon": 1.0}, "level = 'study' is needed"),
        ({"privacy": {"level": "sample", "clip": 1.0, "noise": 1.0}}, {}, "take 'study'"),
        ({"privacy": {"epsilon": 500.0}}, {"epsilon": 1.0}, "over this site's 1"),
    ],
)
def test_what_a_study_cannot_be_is_refused(tmp_path, change, limits, reason):
    content = tomllib.loads(TEXT)
    for name, fields in change.items():
        if fields is None:
            del content[name]
        else:
            content[name] = fields if fields.get("level") == "sample" else content[name] | fields
    sites = make_sites(people(), tmp_path, opened(**limits))
    with pytest.raises(FederationError, match=reason):
        asked_for_a_path(sites, tomli_w.dumps(content))


def asked_for_a_path(sites, text):
    grid = LocalSites(sites)
    one = Inquiry(grid, [s.name for s in sites], grid.permitted, parse(text), "job")
    problem = one.meet()
    return fc.path(problem, count=3, driver=StudyDriver(Driver(one), one.config.budget, problem.loss, problem.bias))


def test_a_site_without_a_budget_tells_nothing_noised_and_takes_part_in_no_round(tmp_path):
    sites = make_sites(people(), tmp_path)
    content = tomllib.loads(TEXT)
    del content["privacy"]
    grid = LocalSites(sites)
    one = Inquiry(grid, [s.name for s in sites], grid.permitted, parse(tomli_w.dumps(content)), "job")
    one.meet()
    with pytest.raises(FederationError, match="told with noise only"):
        one.ask([quadratic(torch.zeros(4).double())])
    run = fc.federation.coordinator.coordinator.Coordinator(
        grid, [s.name for s in sites], grid.permitted, parse(TEXT), "run"
    )
    with pytest.raises(Exception, match="'study' is for analyses"):
        run.prepare()


def test_shares_of_noise_add_up_in_secure_sums(tmp_path):
    """Each of four sites adds a quarter of the variance; the ledger counts what three of them hide."""
    silos = people()
    sites = secure_sites(silos, tmp_path, opened(min_parties=3, epsilon=5.0, honest_parties=3))
    there, driver, _ = asked(sites, with_privacy(share=0.25), secure=True)
    budget = parse(with_privacy(share=0.25)).budget
    source = Numbered()
    for site in sites:
        site.source = source
    found = fc.path(there, count=5, driver=driver)
    own = StudyDriver.at_hand(problem_of(silos), budget)
    own.inner.transport._source = Numbered()
    plain = fc.path(problem_of(silos), count=5, driver=own)
    torch.testing.assert_close(found.solutions, plain.solutions, rtol=1e-6, atol=1e-7)
    for site in sites:
        [[noise, rate, count]] = json.loads((site.store.folder / "ledger.json").read_text())["privacy"]
        assert (noise, rate, count) == (pytest.approx(budget.noise * math.sqrt(0.75)), 1.0, 3)
    dumb = secure_sites(silos, tmp_path / "dumb", opened(min_parties=3, epsilon=5.0))
    there, driver, _ = asked(dumb, with_privacy(share=0.25), secure=True)
    with pytest.raises(FederationError, match="honest_parties"):
        fc.path(there, count=5, driver=driver)


def test_a_study_goes_on_from_its_log_without_paying_twice(tmp_path):
    problem = problem_of(people())
    budget = StudyBudget(epsilon=3.0, requests=6, steps=2)
    seen = []

    def stop(driver):
        seen.append(driver.exchanges)
        if len(seen) == 2:
            raise KeyboardInterrupt

    options = {"count": 5, "checkpoint": tmp_path / "log", "privacy": budget}
    with pytest.raises(KeyboardInterrupt):
        fc.path(problem, **options, on_exchange=stop)
    assert budget.spent == 2
    again = StudyBudget(epsilon=3.0, requests=6, steps=2)
    found = fc.path(problem, **{**options, "privacy": again}, resume=True)
    assert again.spent == 3
    whole = fc.path(problem, count=5, privacy=StudyBudget(3.0, requests=6, steps=2))
    torch.testing.assert_close(found.solutions, whole.solutions)


# -- tables -----------------------------------------------------------------------------------------------------------

COLUMNS = {"age": [20, 90], "sex": ["f", "m"], "dose": [0, 10], "sick": ["0", "1"]}
RECIPE = {"impute": "mean", "one_hot": ["sex"], "missing_target": "drop", "unknown": "reference", "rare": 0}


def table(m=300, seed=0):
    generator = np.random.default_rng(seed)
    age, sex = generator.uniform(30, 80, m), generator.choice(["f", "m"], m, p=[0.3, 0.7])
    dose = np.where(generator.random(m) < 0.1, np.nan, generator.gamma(2.0, 1.5, m))
    risk = 0.05 * (age - 55) + 0.8 * (sex == "m")
    sick = (generator.random(m) < 1 / (1 + np.exp(-risk))).astype(float)
    return pd.DataFrame({"age": age, "sex": sex, "dose": dose, "sick": sick})


@pytest.mark.parametrize("columns", [COLUMNS, {"age": [50, 60]}, {"sex": ["m"], "absent": [0, 1]}])
def test_a_row_is_in_one_cell_of_each_column(columns):
    """Each row is taken away in turn; one has an age that is no number, one a sex of its own."""
    frame = table(25).astype(object)
    frame.loc[3, "age"], frame.loc[4, "age"], frame.loc[5, "sex"], frame.loc[6, "sex"] = "old", -1e300, "x", None
    query = Census(columns=columns, cells=7)

    def counted(one):
        values = {k: np.array([None if v is None or v != v else str(v) for v in one[k]], object) for k in one}
        return np.concatenate(list(query.ask(Sheet("a", values, len(one)), Rules(1, noised=True)).values()))

    whole = counted(frame)
    assert whole.sum() == 25 * len(columns)
    for i in range(25):
        move = whole - counted(frame.drop(index=i))
        assert np.linalg.norm(move) == pytest.approx(math.sqrt(len(columns)))
        assert set(move) <= {0.0, 1.0}


def test_a_census_needs_noise():
    with pytest.raises(DataError, match="with noise only"):
        answer(Sheet("a", {"age": np.arange(9.0)}, 9), Census(columns={"age": [0.0, 9.0]}), Rules())
    with pytest.raises(ValueError, match="two rising"):
        Census(columns={"age": [9.0, 0.0]})
    for wrong in ([1.0], [2.0, 1.0], [], ["a", "a"], "text", [0.0, math.inf], 3):
        with pytest.raises(ValueError, match="columns"):
            StudyBudget(epsilon=1.0, columns={"age": wrong})


def test_descriptions_and_recipes_without_noise_are_those_of_the_tables():
    frames = {name: table(seed=k) for k, name in enumerate("abc")}
    budget = StudyBudget(epsilon=1e12, requests=9, columns=COLUMNS, cells=200)
    budget.__dict__["noise"] = 0.0
    own = fc.data.describe(frames, target="sick", privacy=budget).set_index("feature")
    every = pd.concat(frames.values())
    assert own.loc["age", "mean"] == pytest.approx(every["age"].mean(), abs=0.2)
    assert own.loc["age", "sd"] == pytest.approx(every["age"].std(ddof=0), abs=0.2)
    assert own.loc["age", "50 %"] == pytest.approx(every["age"].median(), abs=1.6)
    assert own.loc["dose", "missing"] == every["dose"].isna().sum()
    counts = every["sex"].value_counts()
    assert own.loc["sex", "levels"] == f"f {counts['f']}, m {counts['m']}"
    assert budget.spent == 1
    learned = Recipe(**RECIPE).fit(frames, target="sick", privacy=budget)
    plain = Recipe(**RECIPE).fit(frames, target="sick")
    assert learned.features == plain.features
    for mine, theirs in zip(learned.steps, plain.steps, strict=True):
        if isinstance(theirs, Standardize):
            np.testing.assert_allclose(list(mine.mean.values()), list(theirs.mean.values()), atol=0.2)
            np.testing.assert_allclose(list(mine.sd.values()), list(theirs.sd.values()), rtol=0.05)
    assert budget.spent == 2


def study_of_tables(tmp_path, frames, secure=False, **privacy):
    content = tomllib.loads(TEXT)
    content["recipe"] = RECIPE
    content["privacy"] |= {"columns": COLUMNS, "requests": 20, **privacy}
    limits = opened(min_parties=3, epsilon=50.0, honest_parties=3)
    files = {}
    for name, frame in frames.items():
        files[name] = tmp_path / f"{name}.csv"
        frame.to_csv(files[name], index=False)
    if secure:
        sites = secure_tables(files, tmp_path, limits)
    else:
        sites = [TableSite(n, StateStore(tmp_path / n), limits, source=TableFile(n, p)) for n, p in files.items()]
    grid = LocalSites(sites)
    given = grid, list(files), grid.permitted, parse(tomli_w.dumps(content), recipe=True), "job"
    one = Inquiry(*given, Settings(secure=secure))
    driver = StudyDriver(Driver(one), one.config.budget, one.config.make_loss(), True)
    return sites, grid, one, driver


@pytest.mark.parametrize("secure", [False, True])
def test_a_whole_study_of_tables_runs_under_one_budget(tmp_path, secure):
    """Description, recipe, path, folds, intervals and quality; six requests at every site, whatever else is made."""
    frames = {name: table(seed=k) for k, name in enumerate(("ash", "elm", "oak", "yew"))}
    sites, _, one, driver = study_of_tables(tmp_path, frames, secure, epsilon=40.0, share=0.25 if secure else 1.0)
    described = table_of(look_at(lambda query: list(driver.ask([query])[0]), driver.names, together=True), "sick")
    assert described.set_index("feature").loc["age", "mean"] == pytest.approx(55, abs=5)
    one.recipe = learn(driver, one.config, "sick")
    problem = one.meet()
    assert problem.coordinate_names[-1] == "(intercept)"
    found = fc.analyse(problem, "cv", folds=4, count=8, seed=3, choice="min", driver=driver)
    assert found.quality.overall.auroc > 0.6
    assert np.isfinite(found.intervals["se"]).all()
    budget = one.config.budget
    for site in sites:
        [[noise, _, count]] = json.loads((site.store.folder / "ledger.json").read_text())["privacy"]
        assert count == 6  # census, two steps, all samples, folds, quality
        assert noise == pytest.approx(budget.noise * (math.sqrt(0.75) if secure else 1.0))


def test_rows_that_cannot_be_prepared_do_not_change_the_others(tmp_path):
    """A missing age, a missing target and a level of its own: no refusal, and one row less."""
    frames = {name: table(60, seed=k) for k, name in enumerate(("ash", "elm", "oak"))}
    frames["ash"].loc[0, "age"], frames["ash"].loc[1, "sex"], frames["ash"].loc[2, "sick"] = None, "other", None
    sites, grid, one, driver = study_of_tables(tmp_path, frames)
    for site in sites:
        site.source = Still()
    one.recipe = learn(driver, one.config, "sick")
    one.meet()
    [sums] = driver.inner.ask([quadratic(torch.zeros(4).double())])
    assert float(sums["count"]) == 3 * 60 - 1  # without the target; the age is a gap, the level the reference
    assert not any(wire.kind(answer) == "refusal" for _, _, answer in grid.log)


def test_rows_are_looked_at_one_by_one_whatever_they_are(tmp_path, monkeypatch):
    """Where the whole was tried first, a site took thirty times as long because of one row: that told of it."""
    asked_for, whole = [], noised_answers._prepares
    monkeypatch.setattr(noised_answers, "_prepares", lambda *given: asked_for.append(given[2]) or whole(*given))
    for place, broken in (("whole", False), ("broken", True)):
        frames = {name: table(60, seed=k) for k, name in enumerate(("ash", "elm", "oak"))}
        if broken:
            frames["ash"].loc[2, "sick"] = None
        (tmp_path / place).mkdir()
        _, _, one, driver = study_of_tables(tmp_path / place, frames)
        one.recipe = learn(driver, one.config, "sick")
        one.meet()
        assert asked_for == [*range(60)] * 3
        asked_for.clear()


@pytest.mark.parametrize("change", [{"missing_target": "refuse"}, {"unknown": "refuse"}, {"rare": 5}])
def test_recipes_that_look_at_single_rows_are_refused(tmp_path, change, monkeypatch):
    monkeypatch.setitem(RECIPE, *change.copy().popitem())
    frames = {name: table(60, seed=k) for k, name in enumerate(("ash", "elm", "oak"))}
    _, _, _, driver = study_of_tables(tmp_path, frames)
    with pytest.raises(FederationError, match=next(iter(change))):
        driver.ask([Schema()])


def test_a_table_under_a_budget_tells_nothing_but_its_census(tmp_path):
    frames = {name: table(60, seed=k) for k, name in enumerate(("ash", "elm", "oak"))}
    _, _, one, _ = study_of_tables(tmp_path, frames)
    for query in (Schema(), Moments(columns=["age"]), Census(columns={"age": [0.0, 40.0]}, cells=2)):
        with pytest.raises(FederationError, match="census of its columns only"):
            one.ask([query])


def test_the_command_line_does_a_study(tmp_path):
    frames = {name: table(200, seed=k) for k, name in enumerate(("ash", "elm", "oak"))}
    for name, frame in frames.items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    content = tomllib.loads(TEXT)
    content["data"] = {"files": [str(tmp_path / f"{name}.csv") for name in frames], "target": "sick"}
    content |= {"recipe": RECIPE}
    content["privacy"] |= {"columns": COLUMNS, "epsilon": 30.0}
    (tmp_path / "study.toml").write_text(tomli_w.dumps(content))
    given = ["cv", str(tmp_path / "study.toml"), "--folds", "3", "--count", "6", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert made["communication"]["exchanges"] == 5
    assert [row["site"] for row in made["description"]] == ["all"] * 4
    done = CliRunner().invoke(app, ["run", str(tmp_path / "study.toml")])
    assert isinstance(done.exception, fc.errors.ConfigError)
    assert "'study' is for" in str(done.exception)


def test_a_class_of_approved_experiments_knows_what_a_study_costs(tmp_path):
    budget = parse(TEXT).budget
    price = compose({Query(budget.noise): 12}, 1e-5)
    for k, (most, waits) in enumerate([(1.01 * price, False), (0.99 * price, True)]):
        sites = make_sites(people(), tmp_path / str(k))
        kind = {"methods": ["ProxNewton"], "losses": ["logistic"], "max_rounds": 10, "max_evaluations": 20}
        allowed = Rule(**kind, max_epsilon=most, secure=False, analyses=True)
        for site in sites:
            site._approvals = Approvals(site.store.folder, Approval(required=True, allow=[allowed]))
        if waits:
            with pytest.raises(FederationError, match="waits for approval"):
                asked(sites, give_up=0.01)
        else:
            there, driver, _ = asked(sites)
            fc.path(there, count=3, driver=driver)
