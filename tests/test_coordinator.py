"""The coordinator on the one driver: what the simulator has, a federation has too."""

import math

import pytest
import tomli_w
import torch
from local_federation import LocalSites, federate, make_sites

import fedcomposite as fc
from fedcomposite import algorithms, callbacks
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.site import Site
from fedcomposite.regularizers.base import StepError
from fedcomposite.testing import small_problem


@pytest.fixture
def problem():
    return small_problem(algorithms.FedNMap(2, 0.5, gamma=1.0))


def experiment(method, regularizer, **run):
    content = {"algorithm": algorithms.spec(method), "regularizer": regularizer, "run": {"rounds": 6, **run}}
    return tomli_w.dumps(content)


@pytest.mark.parametrize(
    "regularizer", [{"name": "L0", "lam": 0.01}, {"name": "TopK", "k": 3}, {"name": "Sparsity2to4", "lam": 0.01}]
)
def test_stationarity_where_h_has_no_modulus(problem, regularizer, tmp_path):
    """A regularizer that is not even weakly convex leaves the step of the measure at 1/L."""
    method = algorithms.ProximalGradient(step=0.5)
    _, run = federate(LocalSites(make_sites(problem.silos, tmp_path)), experiment(method, regularizer))
    assert all(math.isfinite(r.stationarity) and r.stationarity_step > 0 for r in run.history)


def test_callbacks_run_at_the_coordinator(problem, tmp_path):
    method = algorithms.FedNMap(2, 0.5, gamma=1.0)
    text = experiment(method, {"name": "L1", "lam": 0.003}, stationarity_step=0.1)
    grid = LocalSites(make_sites(problem.silos, tmp_path))
    one = Coordinator(grid, [s.name for s in grid.sites.values()], grid.permitted, parse(text), "job")
    one.prepare()
    seen = []
    stop = callbacks.EarlyStopping("objective", patience=2, min_delta=10.0)
    run = one.run(tmp_path / "c", seen.append, [stop, callbacks.JsonLines(str(tmp_path / "h.jsonl"))])
    assert (run.status, run.rounds) == ("stopped", 2)
    assert "objective has not improved for 2 records" in run.message
    assert len(seen) == len((tmp_path / "h.jsonl").read_text().splitlines()) == 3
    again = Coordinator(grid, [s.name for s in grid.sites.values()], grid.permitted, parse(text), "job")
    again.prepare()
    rest = again.run(tmp_path / "c")
    want = fc.simulate(
        fc.Problem(problem.silos, regularizer=fc.regularizers.L1(0.003)), method, rounds=6, stationarity_step=0.1,
        backend="loop",
    )  # fmt: skip
    torch.testing.assert_close(rest.solution, want.solution, rtol=0, atol=1e-12)


def test_metrics_of_a_federation_are_the_simulators(tmp_path):
    """AUC and calibration over sites, from their counts alone."""
    problem = small_problem(algorithms.FedNMap(2, 0.5, gamma=1.0))
    method = algorithms.FedNMap(2, 0.5, gamma=1.0)
    names = ["auc", "log_loss", "calibration_error", "f1"]
    text = tomli_w.dumps({"problem": {"metrics": names}}) + experiment(
        method, {"name": "L1", "lam": 0.003}, stationarity_step=0.1
    )
    _, run = federate(LocalSites(make_sites(problem.silos, tmp_path)), text)
    here = fc.Problem(problem.silos, regularizer=fc.regularizers.L1(0.003), metrics=names)
    want = fc.simulate(here, method, rounds=6, stationarity_step=0.1, backend="loop")
    for name in names:
        assert run.history[-1][f"train_{name}"] == pytest.approx(want.history[-1][f"train_{name}"], rel=1e-12)


def test_a_site_reads_an_experiment_once(problem, tmp_path, monkeypatch):
    from fedcomposite.federation.site import site as module

    read, real = [], module.parse
    monkeypatch.setattr(module, "parse", lambda text, **options: read.append(text) or real(text, **options))
    sites = make_sites(problem.silos, tmp_path)
    assert isinstance(sites[0], Site)
    method = algorithms.FedNMap(2, 0.5, gamma=1.0)
    federate(LocalSites(sites), experiment(method, {"name": "L1", "lam": 0.003}, stationarity_step=0.1))
    assert len(read) <= 2 * len(sites)  # the introduction, and the experiment with its steps chosen


def test_auto_steps_of_a_federation_are_the_simulators_under_sample_weights(problem, tmp_path):
    """One silo with most of the samples, half of the sites in a round: the same smaller steps."""
    from fedcomposite.experiments import Config

    content = {
        "data": {"name": "synthetic"},
        "problem": {"weights": "samples"},
        "algorithm": {"name": "FedAvg", "local_steps": 3, "steps": "auto"},
        "run": {"rounds": 1, "participation": 0.5},
    }
    here = Config.check(content)
    pooled = fc.Problem(problem.silos, weights="samples")
    want = here.make_algorithm(here.specs[0], pooled)
    one, _ = federate(LocalSites(make_sites(problem.silos, tmp_path)), tomli_w.dumps(content))
    assert one.algorithm.step == pytest.approx(want.step, rel=1e-6)
    assert want.step < here.make_algorithm(here.specs[0], fc.Problem(problem.silos)).step


def test_a_step_past_one_over_rho_is_refused_when_the_sites_are_met(problem, tmp_path):
    """By the check of every run; it used to end the federation's first round."""
    grid = LocalSites(make_sites(problem.silos, tmp_path))
    method = algorithms.FedDR(prox_step=10.0, alpha=1.0, local_steps=2, step=0.1)
    config = parse(experiment(method, {"name": "SCAD", "lam": 0.01, "a": 3.0}))
    names = [site.name for site in grid.sites.values()]
    coordinator = Coordinator(grid, names, grid.permitted, config, "j")
    with pytest.raises(StepError, match="1/rho"):
        coordinator.prepare()
