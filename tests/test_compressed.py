"""Compressed replies: the laws of every method, exactness kept, two rules written out, and what is refused."""

import dataclasses
import functools
import math
import tomllib

import numpy as np
import pytest
import torch
from local_federation import LocalSites, federate, make_sites, opened, regularizer_of, write
from secure_sites import secure_sites

import fedcomposite as fc
from fedcomposite import algorithms
from fedcomposite.algorithms import REGISTRY, FedAvg, FedNMap, ProximalGradient
from fedcomposite.compressed import Compressed, unable
from fedcomposite.compressors import Identity, KeepLargest, KeepRandom
from fedcomposite.experiments import Config, ConfigError
from fedcomposite.federation.coordinator.delivery import Settings
from fedcomposite.testing import LAWS, small_problem
from fedcomposite.testing import algorithms as laws

PLAIN = [check for check in LAWS if check.__module__ == laws.__name__]
ABLE = [name for name, cls in REGISTRY.items() if not unable(cls.auto(L=0.25))]
EXACT = [name for name in ABLE if REGISTRY[name].info.exact and name != "FedMLS"]  # its subgradient steps take longer


def method(name):
    return REGISTRY[name].auto(L=0.25, local_steps=3)


def test_methods_whose_replies_are_vectors_can_be_compressed():
    """All but those that send Hessians, are compressed already, or have a step of two exchanges."""
    others = {name: unable(REGISTRY[name].auto(L=0.25)) for name in REGISTRY if name not in ABLE}
    assert {n for n, why in others.items() if "Hessians" in why} == {"ProxNewton", "ChordNewton", "SketchNewton"}
    assert {n for n, why in others.items() if "compressed already" in why} == {"EControlDA", "TAMUNA"}
    two = {"AccSDANE", "Mime", "ProxCSL", "SDANE"}
    assert [n for n, why in others.items() if "diverge" in why] == ["FedDC"]
    assert {n for n, why in others.items() if "two exchanges" in why} == two
    assert len(others) == 10
    with pytest.raises(ValueError, match="compressed already"):
        Compressed(Compressed(method("FedAvg"), Identity()), Identity())


@pytest.mark.parametrize("name", ABLE)
@pytest.mark.parametrize("check", PLAIN, ids=lambda c: c.__name__)
def test_law(name, check):
    """Stacked as one by one, bytes, purity, determinism, resume: for everybody in every round, and for some."""
    check(Compressed(method(name), KeepLargest(0.3)))
    if method(name).partial:
        check(Compressed(method(name), KeepRandom(0.3), everybody=False))


@pytest.mark.parametrize("name", ABLE)
def test_what_is_kept_whole_changes_nothing(name):
    """The identity gives the method's own models; a plain run beside it is the method's."""
    problem = small_problem(method(name))
    plain, whole = (
        fc.simulate(problem, method(name), rounds=20, batch_size=4, compressor=c).solution for c in (None, Identity())
    )
    torch.testing.assert_close(plain, whole, rtol=0, atol=1e-11)


@functools.cache
def targets_apart(composite):
    """Least squares, well conditioned, over sites whose solutions are far apart."""
    random = np.random.default_rng(0)
    tables = []
    for _ in range(5):
        X = random.normal(size=(60, 8))
        tables.append((X, X @ random.normal(size=8) * 3 + random.normal(size=60)))
    h = fc.regularizers.L1(0.2) if composite else fc.regularizers.Zero()
    return fc.Problem(fc.Silos.from_arrays(tables), loss="least_squares", regularizer=h)


@pytest.mark.parametrize(
    ("name", "compressor"),
    [(name, KeepLargest(0.25)) for name in EXACT]
    + [(name, KeepRandom(0.25)) for name in ("FedNMap", "ProximalGradient", "Scaffold")],
)
def test_an_exact_method_stays_exact(name, compressor):
    """A quarter of each reply is sent, and no residual is left that a plain run does not have."""
    problem = targets_apart("convex" in REGISTRY[name].info.regularizer)
    rules = REGISTRY[name].auto(L=4 * problem.smoothness(), local_steps=3)
    settings = {"rounds": 600, "evaluate_every": 600}
    plain, kept = (
        fc.simulate(problem, rules, compressor=c, **settings).history[-1].stationarity for c in (None, compressor)
    )
    assert kept <= max(30 * plain, 1e-6), (plain, kept)


def test_control_of_what_is_owed_is_the_rule():
    """EControl with proximal gradients, in loops over numbers."""
    problem = small_problem(ProximalGradient(1.0), equal=True)
    h, step, n, d, k, rounds = problem.regularizer, 0.5, 6, 8, 2, 12
    run = fc.simulate(problem, ProximalGradient(step), rounds=rounds, compressor=KeepLargest(k / d))
    x, told, owed = torch.zeros(d, dtype=torch.float64), torch.zeros(n, d), torch.zeros(n, d)
    told, owed = told.double(), owed.double()
    delta = k / d
    theta = delta / (3 * math.sqrt(1 - delta) * (1 + math.sqrt(1 - delta)))
    for _ in range(rounds):
        for i in range(n):
            g = fc.Problem(problem.silos.subset([i]), loss="logistic").gradient(x)
            news = g - told[i] - theta * owed[i]
            sent = torch.zeros(d, dtype=torch.float64)
            for j in sorted(range(d), key=lambda j: -abs(float(news[j])))[:k]:
                sent[j] = news[j]
            told[i] += sent
            owed[i] += told[i] - g
        x = h.prox(x - step * told.mean(0), step)
    torch.testing.assert_close(run.solution, x, rtol=0, atol=1e-12)
    numbers = n * k * (8 + 4) + n * 4  # values, places, and the length
    assert run.history[-1].bytes_up == rounds * numbers


def test_with_some_of_the_clients_what_is_owed_is_sent_later():
    """FedNMap's changes go to zero, and with them what clients owe."""
    problem = targets_apart(True)
    rules = FedNMap.auto_partial(2 * problem.smoothness(), local_steps=3)
    kept = KeepLargest(0.25)
    run = fc.simulate(problem, rules, rounds=800, participation=0.6, compressor=kept, evaluate_every=800)
    assert run.history[-1].stationarity < 1e-7


def test_in_a_configuration_and_back():
    text = """
    [data]
    name = "synthetic"
    clients = 4
    [run]
    rounds = 3
    [algorithm]
    name = "FedAvg"
    local_steps = 2
    step = 0.1
    compressor = { name = "KeepLargest", ratio = 0.5 }
    """
    config = Config.model_validate(tomllib.loads(text))
    made = config.make_algorithm(config.specs[0], None)
    assert made == Compressed(FedAvg(2, 0.1), KeepLargest(0.5))
    again = config.only(algorithms.spec(made), 0)
    assert again.make_algorithm(again.specs[0], None) == made
    wrong = config.only(algorithms.spec(made) | {"compressor": {"name": "KeepLargset"}}, 0)
    with pytest.raises(ConfigError, match="did you mean 'KeepLargest'"):
        wrong.make_algorithm(wrong.specs[0], None)


@pytest.mark.parametrize("secure", [False, True])
def test_across_a_federation(secure, tmp_path):
    """Plainly and in secure sums: the simulator's models."""
    rules = Compressed(REGISTRY["FedNMap"].auto(5.0, local_steps=3), KeepLargest(0.5))
    problem = small_problem(rules)
    text = write(rules, regularizer_of(rules), batch_size=4, rounds=3)
    sites = (
        secure_sites(problem.silos, tmp_path, opened(min_parties=2)) if secure else make_sites(problem.silos, tmp_path)
    )
    _, run = federate(LocalSites(sites), text, Settings(secure=True) if secure else None)
    want = fc.simulate(problem, rules, rounds=3, batch_size=4, stationarity_step=0.1, backend="loop")
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-9)
    if not secure:
        assert run.history[-1]["bytes_up"] == want.history[-1]["bytes_up"]


def test_in_a_comparison():
    problem = small_problem(FedAvg(1, 0.1))
    found = fc.compare(problem, [FedAvg(2, 0.5), FedNMap(2, 0.5, gamma=1.0)], budget=5, compressor=KeepLargest(0.25))
    plain = fc.compare(problem, [FedAvg(2, 0.5), FedNMap(2, 0.5, gamma=1.0)], budget=5)
    assert (found.to_frame()["method"] == plain.to_frame()["method"]).all()
    assert (found.to_frame()["MB"] < plain.to_frame()["MB"]).all()


def test_refused():
    problem = small_problem(FedAvg(1, 0.1))
    settings = {"rounds": 1, "compressor": KeepLargest(0.5)}
    with pytest.raises(ValueError, match="compressed replies add up"):
        fc.simulate(problem, FedAvg(1, 0.1), aggregator=fc.aggregators.TrimmedMean(1), **settings)
    noise = fc.privacy.ClientLevel(clip=1.0, noise=1.0)
    with pytest.raises(ValueError, match="make up for"):
        fc.simulate(problem, FedAvg(1, 0.1), privacy=noise, **settings)
    with pytest.raises(ValueError, match="FedNMap needs every client"):
        fc.simulate(problem, FedNMap(1, 0.1, gamma=1.0), participation=0.5, **settings)
    with pytest.raises(ValueError, match="compressor"):
        fc.simulate(problem, FedAvg(1, 0.1), rounds=1, compressor="KeepLargest")
    fixed = dataclasses.replace(Compressed(FedAvg(1, 0.1), Identity()), everybody=False)
    assert fixed.partial
    assert np.isfinite(fc.simulate(problem, fixed, rounds=2, participation=0.5).history[-1].objective)


def test_a_compressed_method_follows_its_schedule():
    """Its steps are the method's of each round: with all entries kept, the method's own run."""
    problem = fc.Problem(fc.data.load("synthetic", clients=4, features=5, samples=20))
    method = fc.algorithms.FedAvg(2, fc.schedules.Inverse(0.5))
    plain = fc.simulate(problem, method, rounds=6)
    whole = fc.simulate(problem, method, rounds=6, compressor=fc.compressors.Identity())
    torch.testing.assert_close(whole.solution, plain.solution, rtol=0, atol=1e-12)
    still = fc.simulate(problem, fc.algorithms.FedAvg(2, 0.5), rounds=6, compressor=fc.compressors.Identity())
    assert float((still.solution - plain.solution).abs().max()) > 1e-3
