"""The practical steps are safe: with them no method diverges and all make progress, on very different problems."""

import dataclasses
import functools
import math
import warnings

import numpy as np
import pytest

import fedcomposite as fc
from fedcomposite import theory
from fedcomposite.algorithms import REGISTRY
from fedcomposite.algorithms.base import amplification
from fedcomposite.experiments import Config
from fedcomposite.regularizers import L1, SCAD, Zero


def lopsided():
    silos = fc.data.load("synthetic", clients=8, features=12, samples=60, alpha=2.0, beta=2.0, seed=4)
    return fc.Silos.from_arrays([(silos[i][0][: 60 // (i + 1)], silos[i][1][: 60 // (i + 1)]) for i in range(8)])


PROBLEMS = {
    "two classes, label skew": lambda h: fc.Problem(
        fc.data.load("breast_cancer").partition("dirichlet", clients=6, alpha=0.2), loss="logistic", regularizer=h
    ),
    "regression": lambda h: fc.Problem(
        fc.data.load("diabetes").partition("kmeans", clients=5), loss="least_squares", regularizer=h, bias=True
    ),
    "unequal silos": lambda h: fc.Problem(lopsided(), loss="logistic", regularizer=h, weights="samples"),
    "hospitals": lambda h: fc.Problem(fc.data.load("heart_disease"), loss="squared_hinge", regularizer=h),
}


@functools.cache
def made_of(problem, h):
    """The problem and its smoothness, once for all methods."""
    made = PROBLEMS[problem](h)
    return made, made.smoothness()


@functools.cache
def least_of(problem):
    """Its objective at zero and the least one."""
    made, _ = made_of(problem, L1(0.01))
    return made.objective(np.zeros(made.dimension)), fc.solve(made).history[-1].objective


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", REGISTRY)
def test_auto_steps_are_safe(name, problem):
    cls = REGISTRY[name]
    terms = {"none": [Zero()], "weakly convex": [L1(0.01), SCAD(0.5, kappa=0.02)]}.get(cls.info.regularizer, [L1(0.01)])
    for h in terms:
        made, L = made_of(problem, h)
        if cls.info.uniform_only and made.weighting == "samples":
            with pytest.raises(ValueError, match=f"{name} must weigh all clients alike"):
                fc.simulate(made, cls.auto(1.0), rounds=1)
            continue
        method = cls.auto(L, made.regularizer.rho, local_steps=5)
        run = fc.simulate(made, method, rounds=30 * cls.exchanges, evaluate_every=10)
        assert run.status != "diverged", run.message
        first, last = run.history[0].objective, run.history[-1].objective
        assert math.isfinite(last)
        assert last < first


def uneven():
    """One silo of twenty holds 90 % of the samples and is the stiffest; every silo has a model of its own."""
    rng = np.random.default_rng(3)
    arrays = []
    for m in [900, *[5, 6] * 9, 5]:
        X = rng.normal(size=(m, 8)) * (2.5 if m == 900 else 1.0)
        arrays.append((X, X @ rng.normal(size=8) + 0.1 * rng.normal(size=m)))
    return fc.Silos.from_arrays(arrays)


@pytest.mark.parametrize("name", [k for k, v in REGISTRY.items() if not v.info.uniform_only])
def test_auto_steps_bear_sample_weights_and_small_cohorts(name):
    """A cohort with the heavy silo moves six times as far as on average: the steps allow for it."""
    cls = REGISTRY[name]
    h = Zero() if cls.info.regularizer == "none" else L1(0.01)
    problem = fc.Problem(uneven(), loss="least_squares", regularizer=h, weights="samples")
    constants = theory.constants(problem, participation=0.15)
    assert constants.amplification == pytest.approx(20 / 3 * 912 / problem.silos.sizes.sum())
    method = theory.auto(name, constants, local_steps=10)
    if "partial_participation" in cls.__dataclass_fields__:
        method = dataclasses.replace(method, partial_participation=True)
    if not method.partial:
        return
    run = fc.simulate(problem, method, rounds=200 * cls.exchanges, participation=0.15, evaluate_every=5)
    values = [record.objective for record in run.history]
    assert run.status != "diverged", run.message
    assert values[-1] < values[0]
    assert max(values) <= 1.02 * values[0]


def wide_rows():
    """Samples of 20 features in 8 silos: a batch of two has eight times the curvature of a silo."""
    rng, shared = np.random.default_rng(0), np.random.default_rng(1).normal(size=20) * 2
    arrays = []
    for _ in range(8):
        X = rng.normal(size=(40, 20))
        arrays.append((X, X @ (shared + 0.3 * rng.normal(size=20)) + rng.normal(size=40)))
    return fc.Problem(fc.Silos.from_arrays(arrays), loss="least_squares")


@pytest.mark.parametrize("name", REGISTRY)
def test_auto_steps_bear_minibatches(name):
    """TAMUNA, GradSkip, ProxScaffnew, FedDR, FedADMM, FedMSPP, FedSplit went from 32 to 1e11 and beyond at 1/L."""
    problem = wide_rows()
    c = theory.constants(problem, batch=2)
    assert c.of_batches == pytest.approx(c.L + (c.L_sample - c.L) / 2)
    assert theory.constants(problem).of_batches == c.L
    rounds = 60 * REGISTRY[name].exchanges
    run = fc.simulate(problem, theory.auto(name, c), rounds=rounds, batch_size=2, evaluate_every=rounds)
    assert run.status == "completed", run.message
    assert run.history[-1].objective < 0.9 * run.history[0].objective


COMPOSITE = [k for k, v in REGISTRY.items() if "convex" in v.info.regularizer and not v.info.second_order]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", COMPOSITE)
def test_more_local_steps_do_no_harm(name, problem):
    """After as many rounds 20 local steps are no worse than one; clearly better where the drift is corrected."""
    cls = REGISTRY[name]
    made, L = made_of(problem, L1(0.01))
    start, best = least_of(problem)
    left = []
    for local_steps in (1, 20):
        run = fc.simulate(made, cls.auto(L, local_steps=local_steps), rounds=40, evaluate_every=40)
        assert run.status != "diverged", run.message
        left.append((run.history[-1].objective - best) / (start - best))
    one, twenty = left
    if name in ("FedMid", "FedDA", "FastFedDA"):  # what drift leaves behind them
        assert twenty <= 1.2 * one + 0.01
    else:
        assert twenty <= 1.02 * one + 1e-3
    if name in ("FedNMap", "Zhang", "ProxScaffnew", "FedDR", "FedADMM"):
        assert twenty <= 0.5 * one + 1e-5


def test_amplification():
    assert amplification([0.25] * 4, 2) == 1.0
    assert amplification([0.7, 0.1, 0.1, 0.1], 4) == pytest.approx(1.0)
    assert amplification([0.7, 0.1, 0.1, 0.1], 1) == pytest.approx(2.8)
    assert amplification([0.1, 0.7, 0.1, 0.1], 2) == pytest.approx(1.6)
    even = fc.Problem(fc.data.load("synthetic", clients=4, samples=20), loss="logistic")
    assert theory.constants(even, participation=0.5).amplification == 1.0


def test_auto_and_theory_steps_in_a_configuration():
    content = {
        "data": {"name": "synthetic", "clients": 5, "samples": 20, "seed": 0},
        "regularizer": {"name": "L1", "lam": 0.01},
        "run": {"rounds": 10},
    }
    made = {}
    for steps in ("auto", "theory"):
        config = Config.check({**content, "algorithm": {"name": "Zhang", "local_steps": 4, "steps": steps}})
        problem = config.make_problem()
        made[steps] = config.make_algorithm(config.specs[0], problem)
        assert made[steps].local_steps == 4
        assert bool(config.outside_theory(made[steps], problem)) == (steps == "auto")
    assert made["theory"].round_step < made["auto"].round_step
    fixed = Config.check({**content, "algorithm": {"name": "Zhang", "steps": "auto", "server_step": 3.0}})
    assert fixed.make_algorithm(fixed.specs[0], fixed.make_problem()).server_step == 3.0


def test_smooth_methods_warn_once_about_losses_with_kinks():
    problem = fc.Problem(fc.data.load("wisconsin").partition("iid", clients=4), loss="hinge")
    with pytest.warns(fc.NonSmoothWarning, match=r"FedAvg is made for smooth losses .* FedMLS, FedMSPP") as seen:
        fc.simulate(problem, REGISTRY["FedAvg"](2, 0.01), rounds=5)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fc.simulate(problem, REGISTRY["FedMLS"](lambda0=1.0), rounds=3)
