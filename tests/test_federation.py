"""Methods over sites in one process, compared with the simulator."""

import contextlib
import itertools
import json
import math
import os
import random
import re
import stat
import time

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import tomli_w
import torch
from cryptography import x509
from local_federation import L1, LocalSites, Lost, alone, federate, make_sites, method, opened, regularizer_of, write
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite import algorithms
from fedcomposite.choice import choose
from fedcomposite.cli.federation import federation_app
from fedcomposite.data import Silos
from fedcomposite.experiments import Config, RunFolder
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.jobs import Job, carry_out
from fedcomposite.federation.folders import FederationFolder, FolderError
from fedcomposite.federation.orders import Introduction, Order
from fedcomposite.federation.shape import AgreementError, parse
from fedcomposite.federation.site.client_states import LostStateError, StateStore
from fedcomposite.federation.site.site import Site
from fedcomposite.federation.site_folders import SiteFolder
from fedcomposite.runtime.client import Client
from fedcomposite.runtime.simulator import simulate
from fedcomposite.testing import small_problem


def close(a, b):
    assert a.keys() == b.keys()
    for key in a.keys() - {"seconds"}:
        assert math.isclose(a[key], b[key], rel_tol=1e-12, abs_tol=1e-12), (key, a[key], b[key])


# -- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights"),
    [(name, "uniform") for name in algorithms.REGISTRY]
    + [(name, "samples") for name in ("FedNMap", "Scaffold", "FedDR", "EControlDA")],
)
def test_equals_the_simulator_round_by_round(name, weights, tmp_path):
    """Every method, with full gradients at all sites and minibatches at some: models and records agree to 1e-12."""
    algorithm = method(name)
    problem = small_problem(algorithm)
    problem = fc.Problem(problem.silos, loss="logistic", regularizer=problem.regularizer, weights=weights)
    cases = [(None, 1.0), (4, 0.5 if algorithm.partial else 1.0)]
    for case, (batch, share) in enumerate(cases):
        text = write(
            algorithm, regularizer_of(algorithm), rounds=4, participation=share, **({"batch_size": 4} if batch else {})
        )
        text = tomli_w.dumps({"problem": {"weights": weights}}) + text
        grid = LocalSites(make_sites(problem.silos, tmp_path / str(case)))
        _, run = federate(grid, text)
        want = simulate(
            problem, algorithm, rounds=4, batch_size=batch, participation=share, stationarity_step=0.1, backend="loop"
        )
        torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-12)
        for a, b in zip(run.history, want.history, strict=True):
            close(a, b)
        for a, b in zip(run.server, want.server, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_replies_whose_size_follows_the_message(tmp_path):
    """A working set that grows: the server expects another length in every round."""
    algorithm = algorithms.ProxNewton(everything=1, grow=2)
    problem = small_problem(algorithm)
    grid = LocalSites(make_sites(problem.silos, tmp_path))
    _, run = federate(grid, write(algorithm, L1, rounds=8))
    want = simulate(problem, algorithm, rounds=8, stationarity_step=0.1, backend="loop")
    assert len({b["bytes_up"] - a["bytes_up"] for a, b in itertools.pairwise(run.history)}) > 2
    for a, b in zip(run.history, want.history, strict=True):
        close(a, b)
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("bias", "loss"), [(False, "logistic"), (True, "logistic"), (True, "least_squares")])
def test_the_method_is_chosen_by_the_coordinator_and_its_answer_certified(bias, loss, tmp_path):
    """The same method, model and duality gap as with all the data in one place; no site is told "auto" in a round."""
    silos = small_problem(algorithms.ProxNewton()).silos
    problem = fc.Problem(silos, loss=loss, regularizer=fc.regularizers.L1(0.003), bias=bias)
    grid = LocalSites(make_sites(silos, tmp_path, opened(methods=["ProxNewton"], models_per_round=50)))
    content = {
        "algorithm": {"name": "auto"},
        "problem": {"loss": loss, "bias": bias},
        "regularizer": L1,
        "run": {"rounds": 30, "tolerance": 1e-9},
    }
    one, run = federate(grid, tomli_w.dumps(content))
    want = fc.solve(problem, tolerance=1e-9)
    assert isinstance(one.algorithm, algorithms.ProxNewton)
    assert run.status == "converged"
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-8)
    assert run.certificate.kind == "duality gap"
    assert "(duality gap)" in run.message
    assert (
        0 <= problem.objective(run.solution) - problem.objective(want.solution) + 1e-14 <= run.certificate.value + 2e-14
    )
    assert run.certificate.value <= 1e-7


def test_sites_that_answer_at_the_runs_own_models_only_leave_the_optimality_measure(tmp_path):
    """The duality gap with an intercept needs further models; a site that refuses them does not cost the answer."""
    silos = small_problem(algorithms.ProxNewton()).silos
    content = {
        "algorithm": {"name": "auto"},
        "problem": {"loss": "logistic", "bias": True},
        "regularizer": L1,
        "run": {"rounds": 30, "tolerance": 1e-9},
    }
    log = []
    _, run = federate(LocalSites(make_sites(silos, tmp_path)), tomli_w.dumps(content), log=log)
    assert run.status == "converged"
    assert run.certificate.kind == "optimality measure"
    assert run.certificate.value <= 1e-8
    assert any(line.startswith("duality gap left out: ") for line in log)


def test_auto_asks_the_sites_for_their_constants(tmp_path):
    silos = small_problem(method("FedNMap")).silos
    content = {
        "algorithm": {"name": "auto", "local_steps": 3},
        "problem": {"weights": "samples"},
        "regularizer": L1,
        "run": {"rounds": 2, "participation": 0.5},
    }
    one, _ = federate(LocalSites(make_sites(silos, tmp_path)), tomli_w.dumps(content))
    problem = fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.003), weights="samples")
    want = choose(problem, participation=0.5, local_steps=3).algorithm
    assert type(one.algorithm) is type(want)
    assert vars(one.algorithm) == pytest.approx(vars(want), rel=1e-12)
    refusing = make_sites(silos, tmp_path / "other", opened(methods=["FedAvg"]))
    with pytest.raises(FederationError, match="FedNMap is not among this site's methods"):
        federate(LocalSites(refusing), tomli_w.dumps(content), Settings(patience=0))


def test_a_network_with_buffers_equals_the_simulator(tmp_path, monkeypatch):
    """Batch-norm buffers travel beside the vectors, and evaluation uses them."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    silos = small_problem(method("Scaffold")).silos

    def make(self, silos=None, **_):
        return fc.Problem(silos, model=net, loss="cross_entropy", regularizer=self.make_regularizer())

    monkeypatch.setattr(Config, "make_problem", make)
    algorithm = method("Scaffold")
    problem = fc.Problem(silos, model=net, loss="cross_entropy")
    _, run = federate(LocalSites(make_sites(silos, tmp_path)), write(algorithm, batch_size=4, stationarity_step=0.1))
    settings = {"batch_size": 4, "stationarity_step": 0.1, "backend": "loop", "dtype": torch.float64}
    want = simulate(problem, algorithm, rounds=5, **settings)
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-12)
    for a, b in zip(run.history, want.history, strict=True):
        close(a, b)
    assert "client_accuracy_min" in run.history[-1]


def test_a_site_works_with_the_threads_that_fit_a_job(tmp_path, two_threads, monkeypatch):
    """A small job has one thread; the next one may be large, so that what the site's people set comes back."""
    used, train = set(), Client.train
    monkeypatch.setattr(Client, "train", lambda *given: used.add(torch.get_num_threads()) or train(*given))
    algorithm = method("FedAvg")
    federate(LocalSites(make_sites(small_problem(algorithm).silos, tmp_path)), write(algorithm, rounds=2))
    assert used == {1}
    assert torch.get_num_threads() == 2


def test_a_model_of_the_package_equals_the_simulator(tmp_path):
    """[model] is built alike at the server and at sites, also where a site lacks the last class."""
    rng = np.random.default_rng(0)
    arrays = [(rng.normal(size=(20, 4)), rng.integers(0, 3 - (i == 1), 20)) for i in range(3)]
    silos = Silos.from_arrays(arrays, names=["a", "b", "c"])
    spec = {"model": {"name": "mlp", "options": {"hidden": [5, 4]}}}
    text = tomli_w.dumps(spec) + write(method("FedNMap"), L1, batch_size=4, dtype="float64")
    _, run = federate(LocalSites(make_sites(silos, tmp_path)), text)
    config = parse(text)
    settings = {"batch_size": 4, "stationarity_step": 0.1, "backend": "loop", "dtype": torch.float64}
    want = simulate(config.make_problem(silos), method("FedNMap"), rounds=5, **settings)
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-12)
    for a, b in zip(run.history, want.history, strict=True):
        close(a, b)


@pytest.mark.parametrize("structure", ["weights", "filters"])
def test_the_knob_of_sparsity_across_sites(structure, tmp_path):
    """Sites find the same zeros as the simulator, and messages are counted with as many bytes."""
    rng = np.random.default_rng(0)
    silos = Silos.from_arrays([(rng.normal(size=(20, 4)), rng.integers(0, 3, 20)) for _ in range(3)], names=list("abc"))
    spec = {"model": {"name": "mlp", "options": {"hidden": [30, 40]}}}
    knob = {"sparsity": 0.6, "structure": structure, "batch_size": 4, "dtype": "float64", "rounds": 8}
    text = tomli_w.dumps(spec) + write(method("FedMid"), **knob)
    _, run = federate(LocalSites(make_sites(silos, tmp_path)), text)
    settings = knob | {"stationarity_step": 0.1, "backend": "loop", "dtype": torch.float64}
    want = simulate(
        parse(tomli_w.dumps(spec) + write(method("FedMid"))).make_problem(silos), method("FedMid"), **settings
    )
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-12)
    assert run.history[-1].sparsity == pytest.approx(0.6, abs=0.03)
    assert [r.bytes_down for r in run.history] == [r.bytes_down for r in want.history]


def test_a_site_without_one_of_the_classes(tmp_path):
    """The classes are those of all sites together: a site that lacks one still has its coefficients."""
    rng = np.random.default_rng(0)
    arrays = [(rng.normal(size=(20, 3)), rng.integers(0, 3 - (i == 1), 20).astype(float)) for i in range(3)]
    silos = Silos.from_arrays(arrays, names=["a", "b", "c"])
    text = tomli_w.dumps({"problem": {"loss": "multinomial"}}) + write(method("FedNMap"), L1)
    _, run = federate(LocalSites(make_sites(silos, tmp_path)), text)
    problem = fc.Problem(silos, loss="multinomial", regularizer=fc.regularizers.L1(0.003))
    want = simulate(problem, method("FedNMap"), rounds=5, stationarity_step=0.1, backend="loop")
    assert run.solution.shape == (9,)
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-12)
    close(run.history[-1], want.history[-1])


@pytest.fixture(scope="module")
def silos():
    base = small_problem(method("FedNMap")).silos
    names = [f"f{j}" for j in range(8)]
    return Silos.from_arrays([base[i] for i in range(4)], names=["a", "b", "c", "d"], feature_names=names)


@pytest.fixture(scope="module")
def nmap():
    return write(method("FedNMap"), L1, batch_size=4, rounds=6)


def same(one, two):
    """Bit for bit, apart from the clock."""
    assert torch.equal(one.solution, two.solution)
    assert [{**r, "seconds": 0} for r in one.history] == [{**r, "seconds": 0} for r in two.history]


def test_steps_and_stationarity_from_the_sites_constants(silos, tmp_path):
    """steps = "auto" takes the largest site's L; the default step of the measure the weighted mean of them."""
    text = tomli_w.dumps({"algorithm": {"name": "FedNMap", "local_steps": 4, "steps": "auto"}, "run": {"rounds": 1}})
    one, run = federate(LocalSites(make_sites(silos, tmp_path)), text)
    constants = []
    for i in range(len(silos)):
        X = silos[i][0].double().numpy()
        constants.append(0.25 * np.linalg.norm(X, 2) ** 2 / len(X))
    assert math.isclose(one.algorithm.step, 0.5 / max(constants), rel_tol=1e-6)  # in each local step
    assert math.isclose(run.history[0]["stationarity_step"], 1 / np.mean(constants), rel_tol=1e-6)


def test_columns_are_matched_by_name(silos, nmap, tmp_path):
    """A site with its columns in another order is rearranged."""
    _, want = federate(LocalSites(make_sites(silos, tmp_path / "1")), nmap)
    sites = make_sites(silos, tmp_path / "2")
    X, y = silos[2]
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    turned = Silos.from_arrays([(X[:, order], y)], names=["c"], feature_names=[silos.feature_names[j] for j in order])
    sites[2] = Site("c", turned, sites[2].store, opened())
    same(federate(LocalSites(sites), nmap)[1], want)


# -- crashes --------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What a killed process is to its parent."""


@pytest.mark.parametrize(
    ("name", "moment", "dies"),
    [
        ("FedNMap", "before the site works", "server"),
        ("FedNMap", "after the site has saved", "server"),
        ("FedNMap", "after the site has saved", "both"),
        ("Scaffold", "before the site works", "both"),
        ("Scaffold", "after the site has saved", "server"),
        ("TAMUNA", "after the site has saved", "both"),
        ("FedDR", "after the site has saved", "both"),
    ],
)
def test_death_in_the_middle_of_a_round_changes_no_bit(silos, name, moment, dies, tmp_path):
    """The server dies while the second site works on round 4; it, and the sites, come back from their files."""
    algorithm = method(name)
    text = write(algorithm, regularizer_of(algorithm), batch_size=4, rounds=6)
    _, want = federate(LocalSites(make_sites(silos, tmp_path / "1")), text)
    calls = 0

    def kill(site, order, answer):
        nonlocal calls
        calls += site == "b"
        if calls == 5 and site == ("a" if moment == "before the site works" else "b"):
            raise Killed
        return answer

    sites = make_sites(silos, tmp_path / "2")
    with pytest.raises(Killed):
        federate(LocalSites(sites, kill), text, checkpoint=tmp_path / "state.safetensors")
    again = make_sites(silos, tmp_path / "2") if dies == "both" else sites
    _, run = federate(LocalSites(again), text, checkpoint=tmp_path / "state.safetensors")
    same(run, want)


def test_a_site_that_dies_and_comes_back_changes_no_bit(silos, nmap, tmp_path):
    """The engine reports the site's death; the order is sent again to a fresh process with the same files."""
    _, want = federate(LocalSites(make_sites(silos, tmp_path / "1")), nmap)
    grid = LocalSites(make_sites(silos, tmp_path / "2"))
    deaths = []

    def die(site, order, answer):
        if site == "c" and len(deaths) < 2 and wire.kind(answer) == "report" and wire.numbers(answer)["round"] == 3:
            deaths.append(site)
            grid.sites["c"] = make_sites(silos, tmp_path / "2")[2]
            return Lost("node unavailable")
        return answer

    grid.meddle = die
    log = []
    _, run = federate(grid, nmap, log=log)
    assert len(deaths) == 2
    assert "c did not answer: node unavailable" in log
    same(run, want)


def test_resuming_another_experiment_is_refused(silos, nmap, tmp_path):
    federate(LocalSites(make_sites(silos, tmp_path / "1")), nmap, checkpoint=tmp_path / "state.safetensors")
    other = nmap.replace("lam = 0.003", "lam = 0.004")
    with pytest.raises(fc.CheckpointError, match="other data, method or settings"):
        federate(LocalSites(make_sites(silos, tmp_path / "2")), other, checkpoint=tmp_path / "state.safetensors")


def test_a_lost_state_is_noticed(silos, nmap, tmp_path):
    """A site that lost its files cannot go on silently with a fresh control variate."""
    sites = make_sites(silos, tmp_path)

    def lose(site, order, answer):
        if site == "a" and wire.kind(answer) == "report" and wire.numbers(answer)["round"] == 2:
            sites[1].store.forget()
        return answer

    with pytest.raises(FederationError, match="b: refuses: the state after round 2 of job job is not here"):
        federate(LocalSites(sites, lose), nmap)


def test_states_are_atomic_tagged_and_few(tmp_path):
    store = StateStore(tmp_path, keep=2)
    state = algorithms.REGISTRY["Scaffold"].auto(1.0).init(torch.zeros(3), fc.regularizers.Zero())[1]
    store.save("job", 0, -1, state)
    store.save("job", 1, 0, type(state)(*(t + 1 for t in state)))
    assert torch.equal(store.load("job", 0, state)[0], torch.zeros(3))
    store.save("job", 4, 1, type(state)(*(t + 2 for t in state)))
    assert store.rounds("job") == [1, 4]
    with pytest.raises(LostStateError, match="after round 1"):
        store.load("job", 0, state)
    (tmp_path / "job" / "5.safetensors").write_bytes((tmp_path / "job" / "4.safetensors").read_bytes())
    with pytest.raises(LostStateError, match="another job or round"):
        store.load("job", 5, state)
    (tmp_path / "job" / "4.safetensors").write_bytes(b"torn")
    with pytest.raises(LostStateError):
        store.load("job", 4, state)
    with pytest.raises(LostStateError, match="not a job"):
        store.load("../../etc", 0, state)
    for job in ("job2", "job3"):
        store.save(job, 0, -1, state)
    assert (tmp_path / "job").exists()  # it may still be going on
    month = time.time() - 31 * 86400
    os.utime(tmp_path / "job", (month, month))
    store.save("job4", 0, -1, state)
    assert not (tmp_path / "job").exists()
    assert len(list(tmp_path.iterdir())) == 3
    assert (tmp_path / "job3").stat().st_mode & 0o077 == 0


# -- missing sites --------------------------------------------------------------------------------------------------


def test_skip_goes_on_with_the_sites_present(silos, tmp_path):
    """FedAvg without site d from round 3 on: the same as plain NumPy with the mean over those present."""
    algorithm = method("FedAvg")
    text = write(algorithm, rounds=5)
    grid = LocalSites(make_sites(silos, tmp_path))

    def leave(site, order, answer):
        if wire.kind(answer) == "report" and wire.numbers(answer)["round"] == 2:
            grid.away.add("d")
            return answer
        return answer

    grid.meddle = leave
    log = []
    one, run = federate(grid, text, Settings(policy="skip", patience=0.2), log=log)
    x = np.zeros(8)
    for r in range(5):
        moved = []
        for i in range(4 if r < 3 else 3):
            X, y = (t.double().numpy() for t in silos[i])
            z = x.copy()
            for _ in range(algorithm.local_steps):
                z -= algorithm.step * (X.T @ (-y / (1 + np.exp(y * (X @ z))))) / len(y)
            moved.append(z - x)
        x = x + algorithm.server_step * np.mean(moved, 0)
    np.testing.assert_allclose(run.solution, x, atol=1e-12)
    assert [r.get("sites", 4) for r in run.history] == [4, 4, 4, 3, 3, 3]
    assert one.transport.last == [4, 4, 4, 2]
    assert any("going on without d" in line for line in log)


def test_a_late_site_starts_from_its_last_counted_round(silos, tmp_path):
    """A reply that came too late is forgotten at the site too: SCAFFOLD's mean of control variates stays exact."""
    algorithm = method("Scaffold")
    text = write(algorithm, rounds=5)
    grid = LocalSites(make_sites(silos, tmp_path))

    def late(site, order, answer):
        if site == "d" and wire.kind(answer) == "report" and wire.numbers(answer)["round"] == 2:
            grid.away.add("d")  # it has done the work and saved it, but the server does not hear of it
            return Lost("node unavailable")
        if site == "a" and wire.kind(answer) == "report" and wire.numbers(answer)["round"] == 3:
            grid.away.discard("d")
        return answer

    grid.meddle = late
    one, run = federate(grid, text, Settings(policy="skip", patience=0.2))
    assert one.transport.last == [4, 4, 4, 4]
    c = [s.store.load("job", 4, one.algorithm.init(torch.zeros(8).double(), None)[1])[0] for s in grid.sites.values()]
    torch.testing.assert_close(torch.stack(c).mean(0), run.server.c, rtol=0, atol=1e-14)


def test_skip_is_refused_for_methods_that_need_everybody(silos, nmap, tmp_path):
    with pytest.raises(FederationError, match="FedNMap needs every site in every round"):
        federate(LocalSites(make_sites(silos, tmp_path)), nmap, Settings(policy="skip"))


def test_waiting_names_the_missing_site_and_gives_up(silos, nmap, tmp_path):
    grid = LocalSites(make_sites(silos, tmp_path))
    grid.away.add("b")
    log = []
    settings = Settings(give_up=0.6, tell_every=0.2)
    with pytest.raises(FederationError, match="b: no answer for"):
        federate(grid, nmap, settings, log=log)
    assert any(line.startswith("waiting for b (") for line in log)


class SlowSites(LocalSites):
    """An answer arrives when its order was sent a second time."""

    def push(self, orders):
        made = super().push(orders)
        self.orders = getattr(self, "orders", {}) | {made[site]: payload for site, payload in orders.items()}
        return made

    def pull(self, orders):
        sent = list(self.orders.values())
        return super().pull([i for i in orders if sent.count(self.orders[i]) > 1])


def test_a_site_slower_than_the_timeout_is_still_heard(silos, tmp_path):
    """An order is repeated, and the answer to the first one counts."""
    text = write(method("Scaffold"), rounds=2)
    _, want = federate(LocalSites(make_sites(silos, tmp_path / "1")), text)
    log = []
    grid = SlowSites(make_sites(silos, tmp_path / "2"))
    _, run = federate(grid, text, Settings(round_timeout=0.01), log=log)
    assert any(re.fullmatch(r"a has not answered for \d+ s; asked again", line) for line in log)
    same(run, want)


class ForgetfulSites(LocalSites):
    """The first order of round 2 to site b is lost, and b connects anew before the engine has missed it."""

    session = "1"

    def present(self):
        return {**super().present(), "b": self.session}

    def push(self, orders):
        made = super().push(orders)
        for site, payload in orders.items():
            order = Order.read(wire.text(wire.decode(payload), "order"))
            if (site, order.round, self.session) == ("b", 1, "1"):
                del self._replies[made[site]]
                self.session = "2"
        return made


def test_a_site_that_is_back_before_it_was_missed_is_asked_again(silos, nmap, tmp_path):
    _, want = federate(LocalSites(make_sites(silos, tmp_path / "1")), nmap)
    log = []
    _, run = federate(ForgetfulSites(make_sites(silos, tmp_path / "2")), nmap, log=log)
    assert log == ["b has connected anew; asked again"]
    same(run, want)


def test_stopping_keeps_what_was_done(silos, nmap, tmp_path):
    _, want = federate(LocalSites(make_sites(silos, tmp_path / "1")), nmap)
    grid = LocalSites(make_sites(silos, tmp_path / "2"))
    path = tmp_path / "state.safetensors"
    _, run = federate(grid, nmap, checkpoint=path, stop=lambda: len(grid.log) >= 13)
    assert run.status == "interrupted"
    assert 0 < run.rounds < 6
    _, run = federate(LocalSites(make_sites(silos, tmp_path / "2")), nmap, checkpoint=path)
    assert run.status == "completed"
    same(run, want)


# -- lies -----------------------------------------------------------------------------------------------------------


def tamper(change):
    """A lie about one vector, or about a number, in the report on round 3."""

    def lie(site, order, answer):
        if site != "b" or wire.kind(answer) != "report" or wire.numbers(answer)["round"] != 2:
            return answer
        numbers, vectors = wire.numbers(answer), safetensors.torch.load(answer["vectors"])
        return change(numbers, vectors) or wire.content(report=numbers, vectors=vectors)

    return lie


def put(name, value):
    return tamper(lambda numbers, vectors: vectors.update({name: value(vectors)}))


def say(name, value):
    return tamper(lambda numbers, vectors: numbers.update({name: value}))


LIES = {
    "NaN or infinite": put("reply.dx", lambda v: v["reply.dx"] * math.nan),
    "infinite": put("reply.dx", lambda v: v["reply.dx"] + math.inf),
    "shape": put("reply.dx", lambda v: v["reply.dx"][:-1]),
    r"shape \(\), expected": put("reply.dx", lambda v: v["reply.dx"].sum()),
    "shape .* expected": put("reply.dx", lambda v: v["reply.dx"].repeat(10_000)),
    "dtype float32, expected float64": put("reply.dx", lambda v: v["reply.dx"].float()),
    "'reply.dx' is missing": tamper(lambda numbers, vectors: vectors.pop("reply.dx") is None),
    "'patients' was not asked for": put("patients", lambda v: torch.zeros(3)),
    "answers round 2 in round 3": say("round", 1),
    "'age' was not asked for": say("age", 54.0),
    "another number of samples": say("samples", 1e9),
    "negative, NaN or infinite": say("gradients", math.nan),
    "its loss is NaN": say("loss", math.nan),
    "'loss' is missing": tamper(lambda numbers, vectors: numbers.pop("loss") and None),
    "more than numbers": tamper(lambda n, v: wire.content(report={**n, "loss": [1.0, 2.0]}, vectors=v)),
    "cannot be decoded": tamper(lambda n, v: {"report": json.dumps(n), "vectors": b"\x80\x04pickle"}),
    "no vectors": tamper(lambda n, v: {"report": json.dumps(n)}),
    "weigh .* bytes": tamper(
        lambda n, v: {"report": json.dumps(n), "vectors": safetensors.torch.save(v) + bytes(10**6)}
    ),
    "not a message": tamper(lambda n, v: {"report": {"x": [0.0, 0.0, 0.0]}}),
    "no report|with no text": tamper(lambda n, v: {"vectors": safetensors.torch.save(v)}),
}


@pytest.fixture(scope="module")
def honest(silos, tmp_path_factory):
    """The run in which the liar of round 3 simply sits it out."""

    def absent(site, order, answer):
        gone = site == "b" and wire.kind(answer) == "report" and wire.numbers(answer)["round"] == 2
        return wire.content(refusal="not today") if gone else answer

    grid = LocalSites(make_sites(silos, tmp_path_factory.mktemp("honest")), absent)
    return federate(grid, write(method("FedAvg"), rounds=3), Settings(policy="skip"))[1]


@pytest.mark.parametrize("lie", list(LIES))
def test_a_lie_is_refused_by_name_and_never_counted(silos, honest, lie, tmp_path):
    """With "wait" the run stops with one line; with "skip" the round is that of the honest sites."""
    text = write(method("FedAvg"), rounds=3)
    with pytest.raises(FederationError, match=f"^b: .*({lie})"):
        federate(LocalSites(make_sites(silos, tmp_path / "1"), LIES[lie]), text)
    log = []
    _, run = federate(LocalSites(make_sites(silos, tmp_path / "2"), LIES[lie]), text, Settings(policy="skip"), log=log)
    assert torch.equal(run.solution, honest.solution)
    assert sum(line.startswith("refused: b: ") for line in log) == 1


def test_an_unregistered_or_revoked_site_takes_no_part(silos, nmap, tmp_path):
    """A site that is on the network but not in the registry is never asked; a revoked one stops the run by name."""
    grid = LocalSites(make_sites(silos, tmp_path))
    sites = ["a", "b", "c", "d"]
    registry = list(sites)

    def revoke(site, order, answer):
        if site == "a" and wire.kind(answer) == "report" and wire.numbers(answer)["round"] == 2:
            registry[:] = ["a", "b", "d"]
        return answer

    grid.meddle = revoke
    one = Coordinator(grid, sites, lambda: registry, parse(nmap), "job")
    one.prepare()
    with pytest.raises(FederationError, match="c: is not registered or was revoked"):
        one.run()
    rounds = [wire.numbers(a)["round"] for s, _, a in grid.log if s == "c" and wire.kind(a) == "report"]
    assert max(rounds) == 2


# -- what a site refuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "changes", "reason"),
    [
        ({"max_rounds": 5}, {}, "6 rounds are over this site's max_rounds = 5"),
        ({"methods": ["FedAvg"]}, {}, "FedNMap is not among this site's methods"),
        ({"min_batch": 8}, {}, "batch_size = 4 is below this site's min_batch = 8"),
        ({"max_local_steps": 2}, {}, "local_steps = 3 is over this site's max_local_steps = 2"),
        ({"max_message_mb": 1e-5}, {}, "over this site's max_message_mb"),
    ],
)
def test_limits_of_a_site_are_enforced_there(silos, nmap, limits, changes, reason, tmp_path):
    sites = make_sites(silos, tmp_path)
    sites[1] = Site("b", alone(silos, 1), sites[1].store, opened(**limits))
    with pytest.raises(FederationError, match=f"b: refuses: .*{reason}"):
        federate(LocalSites(sites), nmap)


def test_gradients_are_counted_as_they_happen(silos, tmp_path):
    """A method without a field called local_steps cannot take more steps than the site allows."""
    sites = make_sites(silos, tmp_path, opened(max_local_steps=2))
    text = write(algorithms.REGISTRY["FedMLS"](lambda0=1.0, first_steps=1), L1, rounds=4)
    with pytest.raises(FederationError, match="needs more gradients than this site's max_local_steps = 2"):
        federate(LocalSites(sites), text)


def test_few_samples_stay_at_home(silos, tmp_path):
    with pytest.raises(fc.DataError, match="7 samples, fewer than min_samples = 10"):
        Site("d", alone(silos, 3), StateStore(tmp_path))


def order(site="a", config="", **fields):
    return wire.content(order=json.dumps({"job": "job", "site": site, "config": config, **fields}))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (order(site="b"), "the order is for 'b'"),
        (order(config="run = 3"), "run = 3: "),
        (order(config="import os"), "not valid TOML"),
        (order(config="[run]\nrounds = 1\n[algorithm]\nname = 'os.system'\n"), "unknown algorithm 'os.system'"),
        (order(job="../../x"), "not a valid order: job"),
        (order(surprise=1), "not a valid order: surprise"),
        (order(round=-1), "not a valid order: round"),
        (wire.content(report={"round": 1}), "no order in the message"),
        ({}, "a message with no text"),
    ],
)
def test_an_order_is_data_and_is_checked(silos, request_, reason, tmp_path):
    answer = make_sites(silos, tmp_path)[0].answer(request_)
    assert reason in wire.text(answer, "refusal")


def test_error_texts_do_not_quote_samples(tmp_path):
    """Targets that do not fit the loss are described in the site's own log only."""
    rng = np.random.default_rng(0)
    odd = Silos.from_arrays([(rng.normal(size=(20, 3)), rng.normal(size=20) * 1234.5)], names=["a"])
    said = []
    site = Site("a", odd, StateStore(tmp_path), log=said.append)
    answer = site.answer(order(config=write(method("FedAvg"))))
    assert wire.text(answer, "refusal") == "its data do not fit this experiment (see the site's log)"
    assert "labels" in said[0]


def test_sites_whose_columns_differ_are_named(silos, nmap, tmp_path):
    sites = make_sites(silos, tmp_path)
    X, y = silos[2]
    names = [*silos.feature_names[:-1], "f_seven"]
    sites[2] = Site("c", Silos.from_arrays([(X, y)], names=["c"], feature_names=names), sites[2].store, opened())
    with pytest.raises(AgreementError, match="c has no column 'f7', which a has"):
        federate(LocalSites(sites), nmap)


def test_a_message_is_bytes_and_back():
    """What is encoded comes back; of anything else there is one error, whatever it is."""
    content = {"order": "x \u202e", "vectors": b"1234", "more": b""}
    whole = wire.encode(content)
    assert wire.decode(whole) == content
    heads = [
        *(b"{}", b"[1]", b"null", b"[[],[]]", b"\xff", b"[" * 100_000, b'[{"x":{}},{}]', b'[{"x":1},{}]'),
        *(b'[{},{"k":%s}]' % length for length in (b"-1", b"1e999", b"99999", b"true", b'"1"')),
        b'[{"k":"a"},{"k":0}]',
    ]
    for wrong in [b"", b"12345678", whole + b"x", whole[:-1], *(len(h).to_bytes(8, "big") + h for h in heads)]:
        with pytest.raises(wire.WireError, match="not a message of this package"):
            wire.decode(wrong)
    rng = random.Random(0)
    for _ in range(1000):
        one = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            one[rng.randrange(len(one))] = rng.randrange(256)
        with contextlib.suppress(wire.WireError):
            found = wire.decode(bytes(one[: rng.randint(0, len(one))]))
            assert all(isinstance(v, str | bytes) for v in found.values())


# -- what crosses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FedNMap", "Scaffold", "EControlDA"])
def test_only_vectors_of_the_method_counts_and_scalars_cross(silos, name, tmp_path):
    """Every message of a run is captured: names are those of the method, sizes do not depend on the samples,
    no number of the data is among them, and the bytes of the method's vectors are those that the history reports."""
    algorithm = method(name)
    text = write(algorithm, regularizer_of(algorithm), rounds=4)
    grid = LocalSites(make_sites(silos, tmp_path / "1"))
    one, run = federate(grid, text)
    fields = {f"reply.{f}" for f in one.transport.reply._fields}
    secrets = np.unique(np.concatenate([silos.features.double().numpy().ravel()]))
    up = 0
    for _, request, answer in grid.log:
        kind = wire.kind(answer)
        if kind == "introduction":
            met = Introduction.read(wire.text(answer, "introduction"))
            allowed = {"site", "version", "samples", "features", "dtype", "names", "labels", "smoothness", "scale"}
            assert set(met.model_dump()) == allowed | {
                "weight",
                "weighted",
                "honest",
                "head",
                "noised",
                "targets",
                "target_dtype",
            }
            assert (met.targets, met.target_dtype) == (None, "float64")  # what a target looks like, for a network
            assert met.weight is None  # nothing more than before where samples have no weights
            assert met.honest is None  # nor where nothing is noised
            assert met.labels == [-1.0, 1.0] or met.labels in ([-1.0], [1.0])
            assert set(answer) == {"introduction"}
            continue
        assert kind == "report"
        assert set(answer) == {"report", "vectors"}
        asked = Order.read(wire.text(request, "order"))
        numbers = wire.numbers(answer)
        assert set(numbers) <= {"round", "samples", "gradients", "proxes", "loss"}
        vectors = safetensors.torch.load(answer["vectors"])
        counts = {"counts.train/samples", "counts.train/accuracy"}  # samples seen and held, hits and samples
        measured = {"gradient"} | counts if asked.evaluate else set()
        assert set(vectors) == (fields | {"buffers"} if asked.train else set()) | measured
        for tensor in vectors.values():
            assert tensor.numel() <= one.problem.dimension
            assert not np.isin(tensor.double().numpy(), secrets[secrets != 0]).any()
        up += sum(t.nbytes for k, t in vectors.items() if k not in measured)
    assert up == run.history[-1]["bytes_up"]
    more = Silos.from_arrays(
        [(torch.cat([silos[i][0]] * 3), torch.cat([silos[i][1]] * 3)) for i in range(4)],
        names=silos.names, feature_names=silos.feature_names,
    )  # fmt: skip
    again = LocalSites(make_sites(more, tmp_path / "2"))
    federate(again, text)
    assert [wire.nbytes(a) for _, _, a in grid.log] == [wire.nbytes(a) for _, _, a in again.log]


# -- the parts ------------------------------------------------------------------------------------------------------


def test_keys_and_certificates(tmp_path):
    """Private keys are owner-only; FLARE's certificates carry the address and are signed by one authority."""
    pytest.importorskip("nvflare", reason="the extra [federation] is not installed")
    made = FederationFolder.create(tmp_path / "fed", "10.1.2.3", 9443, ["a", "b"])
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    keys = {str(p.relative_to(made.path)) for p in made.path.rglob("*.key")}
    assert keys >= {
        "orders.key",
        "sites/a/site.key",
        "sites/b/flare/startup/client.key",
        "flare/server/startup/server.key",
    }
    for key in keys:
        assert stat.S_IMODE((made.path / key).stat().st_mode) == 0o600, key
    server = x509.load_pem_x509_certificate((made.path / "flare/server/startup/server.crt").read_bytes())
    for kit in ("flare/server", "flare/admin", "sites/a/flare"):
        authority = x509.load_pem_x509_certificate((made.path / kit / "startup/rootCA.pem").read_bytes())
        server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "10.1.2.3" in [str(a) for a in names.get_values_for_type(x509.IPAddress)]
    assert (made.reached, made.address) == ("10.1.2.3:9443", "127.0.0.1:9443")
    site = SiteFolder(made.path / "sites" / "a")
    assert (site.name, site.address, site.engine) == ("a", "10.1.2.3:9443", "nvflare")
    with pytest.raises(FolderError, match="already holds files"):
        FederationFolder.create(tmp_path / "fed", "10.1.2.3", 9443, ["a"])
    with pytest.raises(FolderError, match="different names"):
        FederationFolder.create(tmp_path / "fed2", "10.1.2.3", 9443, ["a", "a"])
    with pytest.raises(FolderError, match="small letters"):
        FederationFolder.create(tmp_path / "fed2", "10.1.2.3", 9443, ["../a"])
    with pytest.raises(FolderError, match="no site 'c'"):
        made.revoke("c")


def site_table(path, name, **options):
    """A site's file, read as ``open_site`` does."""
    return fc.Silos.from_files(path, names=[name], **options)


def test_site_tables(tmp_path):
    """csv and npz give the same samples; columns are renamed, dropped, and mistakes are one line."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 3)), np.tile([0.0, 1.0], 6)
    frame = pd.DataFrame(X, columns=["alter", "chol", "id"]).assign(num=y)
    frame.to_csv(tmp_path / "a.csv", index=False)
    np.savez(tmp_path / "a.npz", X=X[:, :2], num=y)
    one = site_table(tmp_path / "a.csv", name="a", target="num", columns={"age": "alter"}, drop=["id"])
    two = site_table(tmp_path / "a.npz", name="a", target="num", test=tmp_path / "a.npz")
    assert one.feature_names == ("age", "chol")
    assert torch.allclose(one.features, two.features, rtol=0, atol=1e-15)
    assert torch.equal(one.targets, two.targets)
    assert torch.equal(two.test[0], two.features)
    for options, reason in [
        ({"target": "nun"}, "no column 'nun'; did you mean 'num'"),
        ({"target": "num", "columns": {"age": "alder"}}, "no column 'alder'; did you mean 'alter'"),
        ({"target": "num", "columns": {"chol": "alter"}}, "two columns are called 'chol'"),
    ]:
        with pytest.raises(fc.DataError, match=reason):
            site_table(tmp_path / "a.csv", name="a", **options)
    with pytest.raises(fc.DataError, match="no such file"):
        site_table(tmp_path / "b.csv", name="a", target="num")
    with pytest.raises(fc.DataError, match=r"not a \.csv"):
        site_table(tmp_path / "b.xlsx", name="a", target="num")
    frame.assign(num=["?", *y[1:]]).to_csv(tmp_path / "c.csv", index=False)
    with pytest.raises(fc.DataError, match="'num' has 1 missing"):
        site_table(tmp_path / "c.csv", name="a", target="num")
    frame.assign(chol="high").to_csv(tmp_path / "d.csv", index=False)
    with pytest.raises(fc.DataError, match="'chol' is not numeric"):
        site_table(tmp_path / "d.csv", name="a", target="num")


def test_parquet(tmp_path):
    frame = pd.DataFrame({"x": [1.0, 2.0], "num": [0.0, 1.0]})
    try:
        frame.to_parquet(tmp_path / "a.parquet")
    except ImportError:
        (tmp_path / "a.parquet").write_bytes(b"PAR1")
        with pytest.raises(fc.DataError, match="needs pyarrow"):
            site_table(tmp_path / "a.parquet", name="a", target="num")
        return
    assert site_table(tmp_path / "a.parquet", name="a", target="num").feature_names == ("x",)


def test_test_data_at_the_sites(silos, tmp_path):
    """Accuracy on held-out samples is pooled from counts."""
    sites = []
    for i in range(2):
        held = silos[i + 2]
        mine = Silos.from_arrays([silos[i]], names=[silos.names[i]], test=held)
        sites.append(Site(silos.names[i], mine, StateStore(tmp_path / str(i)), opened()))
    _, run = federate(LocalSites(sites), write(method("FedAvg")))
    X, y = (torch.cat([silos[2][k], silos[3][k]]).double() for k in (0, 1))
    assert math.isclose(run.history[-1]["test_accuracy"], float(((X @ run.solution) * y > 0).double().mean()))


def test_a_whole_job_leaves_the_run_folder_of_a_simulation(silos, nmap, tmp_path):
    """The coordinator's entry point: config, history, model, coefficients, summary, plot, and status for others."""
    made = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 9443, ["a", "b", "c", "d"], engine="local")
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.config.write_text(nmap)
    made.job("j1").parent.mkdir()
    made.job("j1").write_text(Job(name="j1", out=str(folder.path)).model_dump_json())
    run = carry_out(LocalSites(make_sites(silos, tmp_path / "s")), made, "j1")
    names = {p.name for p in folder.path.iterdir()}
    assert names >= {
        "config.toml",
        "history.jsonl",
        "model.safetensors",
        "coefficients.csv",
        "summary.json",
        "plot.png",
    }
    assert folder.finished
    assert folder.history() == run.history
    assert set(pd.read_csv(folder.path / "coefficients.csv")["name"]) <= set(silos.feature_names)
    status = json.loads((folder.path / "status.json").read_text())
    assert (status["state"], status["round"], status["rounds"]) == ("finished", 6, 6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["network", "images", "linear"])
def test_a_federated_model_is_exported_where_no_data_are(kind, tmp_path, cli, monkeypatch):
    """The run folder alone is enough: the samples are at the sites, under another roof."""
    rng, shape = np.random.default_rng(0), (1, 28, 28) if kind == "images" else (4,)
    draw = rng.integers(0, 256, (3, 12, *shape)).astype(np.uint8) if kind == "images" else rng.normal(size=(3, 12, 4))
    targets = rng.integers(0, 3, (3, 12)).astype(float)
    silos = Silos.from_arrays(list(zip(draw, targets, strict=True)), names=["a", "b", "c"])
    content = {"problem": {"loss": "multinomial"}} if kind == "linear" else {"model": {"name": "mlp"}}
    if kind == "images":
        content["data"] = {"name": "mnist"}  # says how pixels are normalised, and must not be loaded
    made = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 9443, ["a", "b", "c"], engine="local")
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.config.write_text(tomli_w.dumps(content) + write(method("FedNMap"), L1, rounds=2))
    made.job("j1").parent.mkdir()
    made.job("j1").write_text(Job(name="j1", out=str(folder.path), data=content.get("data")).model_dump_json())
    run = carry_out(LocalSites(make_sites(silos, tmp_path / "s")), made, "j1")
    monkeypatch.setattr(fc.data, "load", lambda *a, **k: pytest.fail("export loads data"))
    for form, suffix in (("safetensors", "safetensors"), ("csr", "npz"), ("onnx", "onnx")):
        cli("export", folder.path, "--format", form, check=0)
        assert (folder.path / f"exported.{suffix}").is_file()
    state = safetensors.torch.load_file(folder.path / "exported.safetensors")
    if kind == "linear":
        assert torch.equal(state["weight"].t().reshape(-1), run.solution)
        return
    module = fc.models.build("mlp", silos)
    module.load_state_dict(state)
    assert torch.equal(torch.nn.utils.parameters_to_vector(module.parameters()).detach(), run.solution)


def test_a_job_that_fails_says_why(silos, nmap, tmp_path):
    made = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 9443, ["a", "b"], engine="local")
    made.revoke("b")
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.config.write_text(nmap)
    made.job("j1").parent.mkdir()
    made.job("j1").write_text(Job(name="j1", out=str(folder.path)).model_dump_json())
    with pytest.raises(FederationError):
        carry_out(LocalSites(make_sites(silos, tmp_path / "s")), made, "j1")
    status = json.loads((folder.path / "status.json").read_text())
    assert (status["state"], status["message"]) == ("failed", "b: is not registered or was revoked")
    assert "failed: b: is not registered" in (folder.path / "federation.log").read_text()


# -- the command line --------------------------------------------------------------------------------------------------


def command(*arguments):
    done = CliRunner().invoke(federation_app, list(map(str, arguments)))
    return done.exit_code, done.output


def test_wrong_usage_is_one_line_and_exit_code_2(tmp_path):
    fed = tmp_path / "fed"
    assert command("init", fed, "--sites", "a,b", "--port", 0, "--keys", "--engine", "flower")[0] == 0
    (tmp_path / "a.csv").write_text("x,y\n" + "1.5,0\n2.5,1\n" * 10)
    (tmp_path / "bad.toml").write_text("[run]\nround = 3\n")
    (tmp_path / "good.toml").write_text(write(method("FedNMap"), L1))
    for arguments, code, reason in [
        (("init", fed, "--sites", "a"), 2, "already holds files"),
        (("init", tmp_path / "fed2", "--sites", "A b"), 2, "small letters"),
        (("serve", tmp_path / "nowhere"), 2, "no federation.toml there"),
        (("join", tmp_path / "nowhere"), 2, "no site.toml there"),
        (("join", fed / "sites" / "a"), 2, "give --data FILE"),
        (("join", fed / "sites" / "a", "--data", tmp_path / "a.csv"), 2, "give --target COLUMN"),
        (("join", fed / "sites" / "a", "--data", tmp_path / "a.csv", "--target", "z"), 2, "no column 'z'"),
        (("run", fed), 2, "give a CONFIG, or --resume RUN"),
        (("run", fed, tmp_path / "bad.toml"), 2, "is missing|is not a known field"),
        (("run", fed, "--resume", tmp_path), 2, "not a run of a federation"),
        (("run", fed, tmp_path / "good.toml", "--out", tmp_path / "run"), 1, "is `fedcomposite federation serve` run"),
        (("run", fed, tmp_path / "good.toml", "--round-timeout", -1), 2, "round_timeout = -1"),
        (("status", fed), 1, "is `fedcomposite federation serve` run"),
        (("revoke", fed, "c"), 2, "no site 'c'"),
    ]:
        exit_code, said = command(*arguments)
        assert exit_code == code, said
        assert re.search(reason, " ".join(said.split())), said
