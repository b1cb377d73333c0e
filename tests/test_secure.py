"""Secure sums: the same results as ever, and nothing but sums for whoever carries the messages."""

import dataclasses
import math

import pytest
import tomli_w
import torch
from local_federation import L1, LocalSites, alone, federate, make_sites, method, opened, regularizer_of, write
from secure_sites import make_keys, make_site, secure_sites, vault_of

import fedcomposite as fc
from fedcomposite import algorithms
from fedcomposite.data import Silos
from fedcomposite.experiments import Config
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.coordinator.delivery import Settings
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.runtime.protocol import Round
from fedcomposite.runtime.simulator import simulate
from fedcomposite.testing import small_problem

SECURE = Settings(secure=True)
SKIP = Settings("skip", secure=True, patience=0.0)


@pytest.fixture(scope="module")
def silos():
    base = small_problem(method("FedNMap")).silos
    return Silos.from_arrays([base[i] for i in range(4)], names=["a", "b", "c", "d"])


def near(a, b, tolerance=1e-9):
    """Records agree, apart from the clock, the bytes of compressed replies and what only single sites know."""
    hidden = {k for k in b if k.startswith("client_")} | {"evaluated_samples", "seconds", "bytes_up"}
    assert a.keys() - hidden == b.keys() - hidden
    for key in b.keys() - hidden:
        assert math.isclose(a[key], b[key], rel_tol=tolerance, abs_tol=tolerance), (key, a[key], b[key])


# -- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights"),
    [(name, "uniform") for name in algorithms.REGISTRY]
    + [(name, "samples") for name in ("FedNMap", "Scaffold", "FedDR", "EControlDA")],
)
def test_equals_the_simulator(name, weights, tmp_path):
    """Every method, all and some of the sites, sums of all and sums that can be opened: models agree to 1e-9."""
    algorithm = method(name)
    problem = small_problem(algorithm)
    problem = fc.Problem(problem.silos, loss="logistic", regularizer=problem.regularizer, weights=weights)
    partial = algorithm.partial and algorithm.exchanges == 1
    cases = [(1.0, SECURE)] + [(0.5, SECURE)] * algorithm.partial + [(1.0, SKIP)] * partial
    for case, (share, settings) in enumerate(cases):
        text = write(algorithm, regularizer_of(algorithm), participation=share, batch_size=4, rounds=2)
        text = tomli_w.dumps({"problem": {"weights": weights}}) + text
        limits = opened(min_parties=2, changing_cohorts=case > 0)
        grid = LocalSites(secure_sites(problem.silos, tmp_path / str(case), limits))
        _, run = federate(grid, text, settings)
        want = simulate(
            problem, algorithm, rounds=2, batch_size=4, participation=share, stationarity_step=0.1, backend="loop"
        )
        torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-9)
        for a, b in zip(run.history, want.history, strict=True):
            near(a, b)


def test_held_out_parts_and_metrics_are_sums(tmp_path):
    """Sites with and without a test part; counts as in the simulator, and no least or largest over the sites."""
    text = tomli_w.dumps({"problem": {"metrics": ["balanced_accuracy", "log_loss", "auc"]}}) + write(
        method("FedNMap"), L1, rounds=2
    )
    silos = small_problem(method("FedNMap")).silos
    keys = make_keys(silos.names)
    sites = [make_site(silos, i, tmp_path, keys, opened(min_parties=2)) for i in range(len(silos))]
    for i, site in enumerate(sites[:2]):
        X, y = silos[i]
        part = dataclasses.replace(alone(silos, i), test=(X[:5], y[:5]))
        sites[i] = type(site)(site.name, part, site.store, site.limits, vault=vault_of(silos, i, keys))
    _, run = federate(LocalSites(sites), text, SECURE)
    plain = [type(s)(s.name, s.silos, StateStore(tmp_path / f"plain{i}"), s.limits) for i, s in enumerate(sites)]
    _, want = federate(LocalSites(plain), text)
    for a, b in zip(run.history, want.history, strict=True):
        near(a, b)
        assert "test_log_loss" in a
        assert not [k for k in a if k.startswith("client_")]
        assert [k for k in b if k.startswith("client_")]


def test_a_network_with_buffers(tmp_path, monkeypatch):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    silos = small_problem(method("Scaffold")).silos
    monkeypatch.setattr(
        Config, "make_problem", lambda self, silos=None, **_: fc.Problem(silos, model=net, loss="cross_entropy")
    )
    sites = secure_sites(silos, tmp_path)
    _, run = federate(LocalSites(sites), write(method("Scaffold"), batch_size=4), SECURE)
    problem = fc.Problem(silos, model=net, loss="cross_entropy")
    want = simulate(
        problem, method("Scaffold"), rounds=5, batch_size=4, stationarity_step=0.1, backend="loop", dtype=torch.float64
    )
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-9)
    for a, b in zip(run.history, want.history, strict=True):
        near(a, b)


def test_constants_of_all_sites_come_as_sums(silos, tmp_path):
    """The step of the measure is that of a plain run; automatic steps are for the sum, a bound of the largest."""
    for weights in ("uniform", "samples"):
        spec = {"algorithm": {"name": "FedNMap", "local_steps": 3, "steps": "auto"}, "run": {"rounds": 1}}
        text = tomli_w.dumps({**spec, "problem": {"weights": weights}})
        one, _ = federate(LocalSites(secure_sites(silos, tmp_path / weights)), text, SECURE)
        other, _ = federate(LocalSites(make_sites(silos, tmp_path / f"plain {weights}")), text)
        assert one.rounds.stationarity_step == pytest.approx(other.rounds.stationarity_step, rel=1e-12)
        assert all(i.samples is None and i.smoothness is None and i.scale is None for i in one.introductions)
        assert one.sums.samples == sum(i.samples for i in other.introductions)
        each = [float(torch.linalg.matrix_norm(X, 2)) ** 2 / (4 * len(X)) for X, _ in map(silos.__getitem__, range(4))]
        assert [i.smoothness for i in other.introductions] == pytest.approx(each, rel=1e-9)
        L = sum(each)
        assert type(one.algorithm) is algorithms.FedNMap
        found = (one.algorithm.local_steps, one.algorithm.step, one.algorithm.gamma)
        assert found == pytest.approx((3, 1 / (2 * L), 3 / (2 * L)), rel=1e-9)  # half of 1/L for each local step


def test_divergence_is_said_by_a_count(silos, tmp_path):
    """A loss that leaves the finite range cannot be summed; that it did is."""
    text = tomli_w.dumps({"problem": {"loss": "poisson"}}) + write(
        algorithms.FedAvg(local_steps=3, step=1e-3), rounds=1
    )
    positive = Silos.from_arrays([(silos[i][0], silos[i][1].abs()) for i in range(4)], names=silos.names)
    grid = LocalSites(secure_sites(positive, tmp_path))
    one = Coordinator(grid, list(silos.names), grid.permitted, parse(text), "job", SECURE)
    one.prepare()
    far = torch.full((8,), 1e5, dtype=torch.float64)
    seen = one.transport.exchange(Round(0, one.rounds.buffers, None, None, far)).measured()
    assert float(seen.loss) == math.inf
    assert seen.gradient.isfinite().all()  # that of the sites whose numbers are


def test_a_sketch_that_learns_comes_to_the_same_end(tmp_path):
    """SketchNewton keeps what every round taught it: rounding of secure sums adds up to nothing by its last one."""
    algorithm = algorithms.SketchNewton()
    problem = small_problem(algorithm)
    problem = fc.Problem(problem.silos, loss="logistic", regularizer=fc.regularizers.L1(L1["lam"]))
    text = write(algorithm, L1, rounds=40, tolerance=1e-10)
    _, run = federate(LocalSites(secure_sites(problem.silos, tmp_path)), text, SECURE)
    want = simulate(problem, algorithm, rounds=40, tolerance=1e-10, stationarity_step=0.1)
    assert run.status == want.status == "converged"
    assert want.rounds > 5
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-9)
    torch.testing.assert_close(run.solution, fc.solve(problem, tolerance=1e-12).solution, rtol=0, atol=1e-9)
