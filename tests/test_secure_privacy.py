"""Noise under secure sums: each site's own, or a share each; what a site accounts for, and what it refuses."""

import dataclasses
import json
import math
import tomllib

import numpy as np
import pytest
import tomli_w
import torch
from local_federation import LocalSites, alone, federate, make_sites, opened, write
from scipy import stats
from secure_sites import make_keys, secure_sites

import fedcomposite as fc
from fedcomposite.experiments import ConfigError
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.orders import Order
from fedcomposite.federation.site import site as site_module
from fedcomposite.federation.site.approval import Approval, Approvals, Rule
from fedcomposite.federation.site.audit import Audit
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.site import Site
from fedcomposite.privacy import Counters, Query, SampleLevel, System, compose

SECURE = Settings(secure=True)
N, ROUNDS = 4, 3


@pytest.fixture(scope="module")
def silos():
    made = fc.data.load("synthetic", clients=N, features=4, samples=40, alpha=0.5, beta=0.5)
    return fc.Silos.from_arrays([tuple(t[: 40 - 5 * i] for t in made[i]) for i in range(N)], names=list("abcd"))


def text(method, privacy, weights="samples", **run):
    content = tomllib.loads(write(method, rounds=ROUNDS, **run))
    return tomli_w.dumps(content | {"problem": {"weights": weights}, "privacy": privacy})


METHODS = {
    "FedNMap": (fc.algorithms.FedNMap(local_steps=2, step=0.05, gamma=0.2), 1.0),
    "Scaffold": (fc.algorithms.Scaffold(local_steps=2, step=0.05), 1.0),
    "ProximalGradient": (fc.algorithms.ProximalGradient(step=0.2), 1 / N),
    "ChordNewton": (fc.algorithms.ChordNewton(damping=0.3), 1 / N),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_with_the_simulators_noise_it_is_the_simulator(name, rate, silos, tmp_path, monkeypatch):
    """With the counters in place of the system's randomness (never at a real site) models agree to 1e-9."""
    method, share = METHODS[name]
    level = {"clip": 1.0, "noise": 0.3, "rate": rate, "share": share}
    monkeypatch.setattr(site_module, "System", lambda: Counters(0))
    grid = LocalSites(secure_sites(silos, tmp_path, opened(honest_parties=3)))
    _, run = federate(grid, text(method, level), SECURE)
    problem = fc.Problem(silos, loss="logistic", weights="samples")
    want = fc.simulate(problem, method, rounds=ROUNDS, privacy=SampleLevel(**level), backend="loop")
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-9)
    assert run.history[-1]["gradient_evaluations"] == want.history[-1]["gradient_evaluations"]


@pytest.mark.parametrize(("share", "honest"), [(1.0, None), (1 / N, 3), (1 / N, 4), (1 / N, 1)])
def test_a_site_accounts_for_the_noise_that_nobody_can_take_away(share, honest, silos, tmp_path):
    """Its own share and those of the sites that it takes to be honest; the records and the audit log say the same."""
    method = fc.algorithms.ProximalGradient(step=0.2)
    keys = make_keys(silos.names)
    sites = secure_sites(silos, tmp_path, opened(honest_parties=honest), keys)
    for site in sites:
        site._audit = Audit(site.store.folder, keys[site.name])
    _, run = federate(LocalSites(sites), text(method, {"clip": 1.0, "noise": 4.0, "share": share}), SECURE)
    queries = ROUNDS + ROUNDS + 1
    noise = 4.0 * math.sqrt(min(1.0, share * (honest or 1)))
    expected = compose({Query(noise): queries}, 1e-5)
    assert run.history[-1]["epsilon"] == pytest.approx(expected)
    for site in sites:
        book = json.loads((site.store.folder / "ledger.json").read_text())
        assert book["privacy"] == [[pytest.approx(noise), 1.0, queries]]
        spent = [line["epsilon"] for line in site._audit.verify() if "epsilon" in line]
        assert spent == sorted(spent)
        assert spent[-1] == pytest.approx(expected)


def gradient_sums(silos, folder, count, **privacy):
    """Noised mean gradients at zero, as the coordinator opens them."""
    config = text(fc.algorithms.ProximalGradient(step=1.0), {"clip": 1e3, "noise": 1e-3, **privacy})
    found = []
    for i in range(count):
        grid = LocalSites(secure_sites(silos, folder / str(i), opened(honest_parties=N)))
        _, run = federate(grid, config.replace(f"rounds = {ROUNDS}", "rounds = 1"), SECURE)
        found.append(run.solution.numpy())
    return np.stack(found)


@pytest.mark.slow
def test_shares_of_noise_add_up_to_the_whole(silos, tmp_path):
    """The mean reply of many runs: its deviation is that of one whole noise, and not of N of them, nor of a share."""
    samples = int(sum(silos.sizes))
    exact = fc.simulate(
        fc.Problem(silos, loss="logistic", weights="samples"), fc.algorithms.ProximalGradient(step=1.0), rounds=1
    ).solution.numpy()
    found = (gradient_sums(silos, tmp_path, 60, share=1 / N) - exact) * samples  # clip * noise = 1
    low, high = stats.chi2.ppf([1e-5, 1 - 1e-5], found.size)
    assert low < (found**2).sum() < high
    assert stats.kstest(found.ravel(), "norm").pvalue > 1e-5


@pytest.mark.parametrize(
    ("limits", "settings", "reason"),
    [
        ({}, SECURE, "has not said how many honest_parties"),
        ({"honest_parties": 5}, SECURE, "in a sum of 4: its honest_parties = 5 are more"),
        (
            {"honest_parties": 3, "changing_cohorts": True}, Settings("skip", secure=True, patience=0.0),
            "every sum must have all of them",
        ),
    ],
)  # fmt: skip
def test_shared_noise_needs_a_word_about_the_others(limits, settings, reason, silos, tmp_path):
    method = fc.algorithms.ProximalGradient(step=0.2)
    grid = LocalSites(secure_sites(silos, tmp_path, opened(**limits)))
    lines = []
    with pytest.raises(FederationError) as refused:
        federate(grid, text(method, {"clip": 1.0, "noise": 4.0, "share": 1 / N}), settings, log=lines)
    assert any(reason in line for line in [*lines, str(refused.value)]), lines
    assert not any((s.store.folder / "ledger.json").exists() and s.ledger.spent() for s in grid.sites.values())


def test_sites_refuse_shared_noise_that_does_not_add_up(silos, tmp_path):
    """Whatever the coordinator says: uniform weights, replies that are not linear, rounds with some of the sites."""
    private = {"clip": 1.0, "noise": 4.0, "share": 1 / N}
    gradient = fc.algorithms.ProximalGradient(step=0.2)
    for i, (method, weights, run, reason) in enumerate([
        (gradient, "uniform", {}, "only if all count alike"),
        (fc.algorithms.FedAvg(local_steps=2, step=0.1), "samples", {}, "replies that are linear"),
        (gradient, "samples", {"participation": 0.8}, "every sum must have all of them"),
    ]):  # fmt: skip
        grid = LocalSites(secure_sites(silos, tmp_path / str(i), opened(honest_parties=3, changing_cohorts=True)))
        with pytest.raises(FederationError, match=reason):
            federate(grid, text(method, private, weights, **run), SECURE)


def test_what_a_secure_run_was_worth_does_not_carry_over_to_a_plain_order(silos, tmp_path):
    """The same job and experiment, asked for without a sum: accounted for with the site's own share alone."""
    method = fc.algorithms.ProximalGradient(step=0.2)
    config = text(method, {"clip": 1.0, "noise": 4.0, "share": 1 / N})
    sites = secure_sites(silos, tmp_path, opened(honest_parties=4))
    one, _ = federate(LocalSites(sites), config, SECURE)
    vectors = {"buffers": torch.zeros(0, dtype=torch.float64), "model": torch.zeros(4, dtype=torch.float64)}
    order = Order(
        job="job", site="a", config=one.transport.sites.config, shape=one.shape, round=ROUNDS, evaluate=True, last=-1
    )
    answer = sites[0].answer(wire.content(order=order.model_dump_json(), vectors=vectors))
    assert wire.kind(answer) == "report", wire.text(answer, "refusal")
    book = json.loads((sites[0].store.folder / "ledger.json").read_text())
    assert [2.0, 1.0, 1] in book["privacy"]


def test_held_out_samples_have_the_whole_noise_of_their_site(silos):
    """Other sites may have no such part, and then add no share to the sum."""
    X = silos[0][0]
    y = torch.where(torch.arange(len(X)) % 3 == 0, 1.0, -1.0).double()
    smooth = fc.Problem(fc.Silos.from_arrays([(X, y)], test=(X, y)), loss="logistic").smooth()
    x = torch.tensor([0.5, 0.0, -0.2, 0.1], dtype=torch.float64)
    level = SampleLevel(clip=1.0, noise=2.0, share=1 / 16)
    right = float(smooth.evaluate(x).counts["test/accuracy"][0, 0])
    seen = [
        fc.problems.private.evaluate(smooth, x, level, System(), {"test": (X, y)}, smooth.measures, bounded=False)
        for _ in range(300)
    ]
    noise = np.array([float(e.counts["test/accuracy"][0, 0]) for e in seen]) - right
    assert stats.kstest(noise / 2.0, "norm").pvalue > 1e-5
    train = np.array([float(e.counts["train/accuracy"][0, 0]) for e in seen]) - right
    assert stats.kstest(train / (2.0 * math.sqrt(3 / 16)), "norm").pvalue > 1e-5  # a share, of three in one query


def test_a_site_does_not_leave_its_noise_out_where_a_model_overflows(silos, tmp_path, monkeypatch):
    """Zeros in place of what is not finite would be zeros without noise: the site refuses, and no sum is opened."""
    method = fc.algorithms.ProximalGradient(step=0.2)
    sites = secure_sites(silos, tmp_path, opened(honest_parties=4))
    exact = site_module.private.evaluate

    def overflowing(*given, **named):
        return dataclasses.replace(exact(*given, **named), gradient=torch.full((4,), math.nan, dtype=torch.float64))

    monkeypatch.setattr(site_module.private, "evaluate", overflowing)
    with pytest.raises(FederationError, match="left the finite range"):
        federate(LocalSites(sites), text(method, {"clip": 1.0, "noise": 4.0, "share": 1 / N}), SECURE)


def test_records_of_a_plain_run_count_a_sites_own_share_only(silos, tmp_path):
    """Whoever sees single replies sees them with a share of the noise."""
    method = fc.algorithms.ProximalGradient(step=0.2)
    grid = LocalSites(make_sites(silos, tmp_path))
    _, run = federate(grid, text(method, {"clip": 1.0, "noise": 8.0, "share": 1 / N}))
    expected = compose({Query(4.0): 2 * ROUNDS + 1}, 1e-5)
    assert run.history[-1]["epsilon"] == pytest.approx(expected)
    assert all(s.ledger.spent() == pytest.approx(expected) for s in grid.sites.values())


def test_robust_means_stay_refused(silos, tmp_path):
    content = write(fc.algorithms.FedAvg(1, 0.1), aggregator={"name": "TrimmedMean", "trim": 1})
    with pytest.raises(ConfigError, match="aggregator needs single replies"):
        federate(LocalSites(secure_sites(silos, tmp_path)), content, SECURE)


def test_noised_sums_tell_counts_that_can_be(silos, tmp_path):
    method = fc.algorithms.ProximalGradient(step=0.2)
    grid = LocalSites(secure_sites(silos, tmp_path, opened(honest_parties=4)))
    _, run = federate(grid, text(method, {"clip": 1.0, "noise": 300.0, "share": 1 / N}), SECURE)
    assert all(0 <= r["train_accuracy"] <= 1 for r in run.history)
    assert all(r["objective"] >= 0 for r in run.history)


# -- approval ---------------------------------------------------------------------------------------------------------


def rule(**more):
    return Rule(methods=["FedAvg"], losses=["logistic"], max_rounds=10, max_evaluations=20, secure=False, **more)


def approving(silos, folder, approval):
    limits, store = opened(), StateStore(folder)
    return Site("a", alone(silos, 0), store, limits, approvals=Approvals(folder, approval))


def introduced(site, config, job="job"):
    order = Order(job=job, site="a", config=config)
    answer = site.answer(wire.content(order=order.model_dump_json()))
    return "" if (kind := wire.kind(answer)) == "introduction" else wire.text(answer, kind)


def test_a_class_of_experiments_has_a_budget(silos, tmp_path):
    method = fc.algorithms.FedAvg(local_steps=2, step=0.1)
    private = {"clip": 1.0, "noise": 4.0}
    cost = compose({Query(4.0): 3 * ROUNDS + 1}, 1e-5)
    for i, (most, reason) in enumerate([(1.01 * cost, ""), (0.99 * cost, "waits for approval")]):
        site = approving(silos, tmp_path / str(i), Approval(required=True, allow=[rule(max_epsilon=most)]))
        assert reason in introduced(site, text(method, private))
        assert "waits for approval" in introduced(site, write(method))  # without noise it is not of this class
        assert not introduced(site, text(method, private)) or reason


def test_an_experiment_whose_steps_are_left_open_is_approved_once(silos, tmp_path):
    """Yes to ``steps = "auto"`` is yes to the steps that follow, and to nothing else."""
    content = {"algorithm": {"name": "FedAvg", "local_steps": 2, "steps": "auto"}, "run": {"rounds": 4}}
    approvals = Approvals(tmp_path, Approval(required=True))
    site = approving(silos, tmp_path, Approval(required=True))
    assert "waits" in introduced(site, tomli_w.dumps(content))
    (name,) = approvals.all()
    filled = content | {"algorithm": {"name": "FedAvg", "local_steps": 2, "step": 0.123}}
    assert "waits" in introduced(site, tomli_w.dumps(filled))
    approvals.decide(name, "approved")
    site = approving(silos, tmp_path / "twin", Approval(required=True))
    site._approvals = approvals
    assert not introduced(site, tomli_w.dumps(content))
    (tmp_path / "approvals" / f"{next(n for n in approvals.all() if n != name)}.json").unlink()
    assert not introduced(site, tomli_w.dumps(filled))
    others = [
        filled | {"run": {"rounds": 5}},
        filled | {"seed": 1},
        filled | {"algorithm": {"name": "FedAvg", "local_steps": 3, "step": 0.123}},
        filled | {"algorithm": {"name": "Scaffold", "local_steps": 2, "step": 0.123}},
    ]
    for other in others:
        assert "waits for approval" in introduced(site, tomli_w.dumps(other)), other
    approvals.decide(name, "rejected")
    assert introduced(site, tomli_w.dumps(filled))


def test_a_run_whose_steps_are_left_open_needs_one_approval_per_site(silos, tmp_path):
    content = tomli_w.dumps({
        "algorithm": {"name": "FedNMap", "local_steps": 2, "steps": "auto"}, "run": {"rounds": 3},
        "regularizer": {"name": "L1", "lam": 0.01},
    })  # fmt: skip
    sites = make_sites(silos, tmp_path)
    for site in sites:
        site._approvals = Approvals(site.store.folder, Approval(required=True))
    for site in sites:  # without patience the run ends
        with pytest.raises(FederationError, match="waits for approval"):
            federate(LocalSites(sites), content, Settings(give_up=0.01))
        for name, entry in site._approvals.all().items():
            assert entry["status"] == "pending"
            site._approvals.decide(name, "approved")
    _, run = federate(LocalSites(sites), content)
    assert len(run.history) == 4
    assert all(len(site._approvals.all()) == 1 for site in sites)
