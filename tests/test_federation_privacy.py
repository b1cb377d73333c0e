"""Sites that noise their answers, and account for them over all jobs; robust means over sites."""

import json
import tomllib

import numpy as np
import pytest
import tomli_w
import torch
from local_federation import LocalSites, federate, make_sites, opened, write
from lone_site import D, ask, experiment, make_site, people

import fedcomposite as fc
from fedcomposite.experiments import ConfigError
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.ledger import Ledger
from fedcomposite.federation.site.policy import Limits, RefusalError
from fedcomposite.privacy import Query, SampleLevel, compose
from fedcomposite.runtime.records import planned_queries

NOISE = {"clip": 1.0, "noise": 4.0}


def noised(text, **privacy):
    return tomli_w.dumps(tomllib.loads(text) | {"privacy": {**NOISE, **privacy}})


def silos(n=4):
    return fc.data.load("synthetic", clients=n, features=4, samples=40, alpha=0.5, beta=0.5)


def test_what_leaves_a_site_is_noised_anew_each_time(tmp_path):
    """The coordinator knows the seed of the experiment, and that tells it nothing about the noise."""
    config = noised(experiment())
    answers = [ask(make_site(tmp_path), config, model=np.zeros(D), message=np.zeros(D)) for _ in range(3)]
    exact = ask(make_site(tmp_path / "other"), experiment(), model=np.zeros(D), message=np.zeros(D))
    for name in ("reply.dx", "gradient", "counts.train/accuracy"):
        seen = [vectors[name] for _, vectors in answers]
        assert not any(torch.equal(a, exact[1][name]) for a in seen)
        assert not torch.equal(seen[0], seen[1])
    losses = [numbers["loss"] for numbers, _ in answers if numbers["loss"] > 0]  # what noise takes below is told as 0
    assert len({*losses, exact[0]["loss"]}) == len(losses) + 1
    assert all(numbers["samples"] == 46 for numbers, _ in answers)


def test_noised_evaluations_are_right_on_average(tmp_path):
    """Gradient, loss and accuracy of many evaluations against the exact ones; deviations as accounted for."""
    X, y = people()
    X[:, 0] += 2 * y
    smooth = fc.Problem(fc.Silos.from_arrays([(X, y)], test=(X[:20], y[:20])), loss="logistic").smooth()
    x = torch.tensor([0.5, 0.0, 0.0, 0.1, 0.0], dtype=torch.float64)
    privacy = SampleLevel(clip=50.0, noise=0.02, rate=0.8, loss_clip=20.0)
    exact = smooth.evaluate(x)
    held = {"test": (torch.as_tensor(X[:20]), torch.as_tensor(y[:20]))}
    found = [
        fc.problems.private.evaluate(smooth, x, privacy, fc.privacy.System(), held, smooth.measures) for _ in range(400)
    ]
    gradient = torch.stack([e.gradient for e in found])
    torch.testing.assert_close(gradient.mean(0), exact.gradient, rtol=0, atol=0.02)
    assert float(torch.stack([e.loss for e in found]).mean()) == pytest.approx(float(exact.loss), abs=0.03)
    for part in ("train", "test"):
        shares = [float(e.counts[f"{part}/accuracy"][0, 0]) for e in found]
        right = float(exact.counts[f"{part}/accuracy"][0, 0])
        assert np.mean(shares) == pytest.approx(right, rel=0.05)
        assert all(0 <= s <= e for s, e in zip(shares, [46 if part == "train" else 20] * 400, strict=True))


def test_a_federation_learns_under_privacy_and_says_what_it_cost(tmp_path):
    data = silos()
    method = fc.algorithms.FedNMap(local_steps=2, step=0.05, gamma=0.2)
    text = noised(write(method, rounds=6), noise=0.5, rate=0.5)
    grid = LocalSites(make_sites(data, tmp_path))
    _, run = federate(grid, text)
    queries = 6 * 2 + 7  # local steps, and evaluations
    expected = SampleLevel(**{**NOISE, "noise": 0.5, "rate": 0.5}).epsilon(queries)
    assert run.history[-1]["epsilon"] == pytest.approx(expected)
    for site in grid.sites.values():
        book = json.loads((site.store.folder / "ledger.json").read_text())
        assert book["privacy"] == [[0.5, 0.5, queries]]
        assert site.ledger.spent() == pytest.approx(expected)
    problem = fc.Problem(data, loss="logistic")
    assert problem.objective(run.solution) < problem.objective(torch.zeros(4))
    told = [str(answer) for _, _, answer in grid.log if "introduction" in str(answer)]
    assert len(told) == 4
    assert all('"smoothness":null' in one and '"scale":null' in one for one in told)


def test_with_next_to_no_noise_a_federation_is_the_simulator(tmp_path):
    data = silos()
    method = fc.algorithms.FedAvg(local_steps=2, step=0.05)
    quiet = {"clip": 1e6, "noise": 1e-14}
    _, run = federate(LocalSites(make_sites(data, tmp_path)), noised(write(method, rounds=4), **quiet))
    plain = fc.simulate(fc.Problem(data, loss="logistic"), method, rounds=4)
    torch.testing.assert_close(run.solution, plain.solution, rtol=1e-6, atol=1e-8)


def test_a_site_refuses_what_its_budget_does_not_last_for(tmp_path):
    """Before anything is computed; the refusal names what is spent and what is left."""
    data = silos()
    method = fc.algorithms.FedAvg(local_steps=1, step=0.1)
    budget = 1.05 * compose({Query(4.0): 5 + 6}, 1e-5)
    limits = opened(epsilon=budget, jobs_per_day=10)
    grid = LocalSites(make_sites(data, tmp_path, limits))
    federate(grid, noised(write(method, rounds=5)), job="first")
    spent = compose({Query(4.0): 11}, 1e-5)
    with pytest.raises(Exception, match=f"{spent:.3g} is spent, {budget - spent:.3g} left"):
        federate(grid, noised(write(method, rounds=5)), job="second")
    again = LocalSites(make_sites(data, tmp_path, limits))  # after a restart
    with pytest.raises(Exception, match="is spent"):
        federate(again, noised(write(method, rounds=5)), job="third")
    for site in again.sites.values():
        assert site.ledger.spent() == pytest.approx(spent)


def test_a_run_that_is_resumed_is_not_charged_twice_in_advance(tmp_path):
    ledger = Ledger(tmp_path, Limits(epsilon=compose({Query(4.0): 10}, 1e-5) * 1.001), "data")
    ledger.admit("job", 0, {"train": "x"}, gradients=1)
    ledger.afford("job", Query(4.0), 10)
    ledger.charge("job", Query(4.0), 6)
    ledger.afford("job", Query(4.0), 10)
    with pytest.raises(RefusalError, match="this experiment needs epsilon"):
        ledger.afford("other", Query(4.0), 5)
    ledger.charge("job", Query(4.0), 4)
    with pytest.raises(RefusalError, match="this answer needs epsilon"):
        ledger.charge("job", Query(4.0))
    assert Ledger(tmp_path, Limits(), "other data").spent() == ledger.spent()


@pytest.mark.parametrize(
    ("change", "limits", "reason"),
    [
        ({}, {"epsilon": 1.0}, r"privacy budget \(epsilon = 1\): \[privacy\] is needed"),
        ({"privacy": {"level": "client", **NOISE}}, {}, "level = 'client' is for simulations"),
        ({"privacy": NOISE, "run": {"rounds": 5, "batch_size": 10}}, {}, "leave batch_size out"),
        ({"privacy": NOISE, "problem": {"metrics": ["f1"]}}, {}, "only loss and accuracy are told"),
    ],
)
def test_what_cannot_be_noised_is_refused(tmp_path, change, limits, reason):
    config = tomli_w.dumps(tomllib.loads(experiment()) | change)
    with pytest.raises(RefusalError, match=reason):
        ask(make_site(tmp_path, **limits), config, model=np.zeros(D))


def test_steps_are_not_read_off_the_data():
    text = tomli_w.dumps({"algorithm": {"name": "FedNMap", "steps": "auto"}, "run": {"rounds": 5}, "privacy": NOISE})
    with pytest.raises(ConfigError, match="no step may be read off the data"):
        parse(text)


@pytest.mark.parametrize("name", ["FedAvg", "Scaffold", "FedNMap", "ChordNewton", "FedDR", "Mime", "ProximalGradient"])
def test_planned_queries_are_those_of_a_run(name):
    problem = fc.Problem(silos(), loss="logistic")
    method = fc.algorithms.REGISTRY[name].auto(5.0, local_steps=3)
    run = fc.simulate(problem, method, rounds=7, privacy=SampleLevel(clip=1.0, noise=0.01))
    planned = planned_queries(method, torch.zeros(4, dtype=torch.float64), problem.regularizer, 7, 4)
    assert planned == run.history[-1]["gradient_evaluations"] / 4


# -- robust means over sites ---------------------------------------------------------------------------------------


def test_a_federations_robust_mean_is_the_simulators(tmp_path):
    data, rule = silos(5), fc.aggregators.TrimmedMean(1)
    method = fc.algorithms.FedNMap(local_steps=2, step=0.05, gamma=0.2)
    text = write(method, rounds=5, aggregator={"name": "TrimmedMean", "trim": 1})
    _, run = federate(LocalSites(make_sites(data, tmp_path)), text)
    plain = fc.simulate(fc.Problem(data, loss="logistic"), method, rounds=5, aggregator=rule)
    torch.testing.assert_close(run.solution, plain.solution)


def test_a_federation_refuses_a_robust_mean_of_too_few_sites(tmp_path):
    text = write(fc.algorithms.FedAvg(1, 0.1), aggregator={"name": "TrimmedMean", "trim": 2})
    grid = LocalSites(make_sites(silos(), tmp_path))
    names = [s.name for s in grid.sites.values()]
    with pytest.raises(ValueError, match="leaves nothing of 4 clients"):
        Coordinator(grid, names, grid.permitted, parse(text), "job").prepare()
