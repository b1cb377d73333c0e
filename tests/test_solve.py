"""solve: the choice of a method, the certificate, and honest statuses."""

import math

import numpy as np
import pytest
import torch

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.algorithms import FedNMap
from fedcomposite.choice import choose
from fedcomposite.problems import LOSSES
from fedcomposite.runtime.certificate import duality_gap

TERMS = [
    reg.L1(0.02),
    reg.L1(0.02, tuple(range(1, 11))),
    reg.ElasticNet(0.02, 0.05),
    reg.GroupLasso(0.02, groups=2),
    reg.GroupLasso(0.02, groups=(3, 3, 4), weights=(1.0, 2.0, 0.5)),
    reg.L2Squared(0.1),
    reg.Box(-0.2, 0.3),
]


@pytest.fixture(scope="module")
def hospitals():
    return fc.data.load("heart_disease")


@pytest.mark.parametrize("name", [n for n, loss in LOSSES.items() if n != "multinomial" and loss.by_sample])
def test_fenchel_and_young_with_equality(name):
    """A sample's conjugate follows from its loss and derivative, and is convex down to minus the least loss."""
    loss = LOSSES[name]
    z = torch.linspace(-40, 40, 800_001, dtype=torch.float64)
    for b in (-1.0, 1.0) if loss.classifier else (0.0, 0.7, 3.0):
        target = torch.tensor(b, dtype=torch.float64)
        lowest = 0.0 if loss.nonnegative else float(loss.lowest(target))
        assert loss.value(z, target).min() == pytest.approx(lowest, abs=1e-8)
        for point in (-1.3, -0.2, 0.4, 2.0):
            at = torch.tensor(point).double()
            t = loss.derivative(at, target)
            want = (t * z - loss.value(z, target)).max()
            torch.testing.assert_close(t * at - loss.value(at, target), want, rtol=0, atol=1e-8)


def test_fenchel_and_young_for_classes():
    loss, b = LOSSES["multinomial"], torch.tensor([0.0, 1.0, 0.0]).double()
    assert loss.nonnegative
    for seed in range(5):
        z = torch.randn(3, generator=torch.Generator().manual_seed(seed)).double()
        t = loss.derivative(z, b)
        torch.testing.assert_close(torch.special.xlogy(t + b, t + b).sum(), t @ z - loss.value(z, b))


@pytest.mark.parametrize("h", TERMS, ids=str)
@pytest.mark.parametrize("loss", ["logistic", "least_squares", "huber", "squared_hinge"])
def test_the_gap_bounds_the_distance_to_the_optimum(hospitals, loss, h):
    for bias, weights in ((True, "uniform"), (False, "samples")):
        problem = fc.Problem(hospitals, loss=loss, regularizer=h, bias=bias, weights=weights)
        run = fc.solve(problem, tolerance=1e-11)
        assert run.status == "converged"
        assert run.certificate.kind == "duality gap"
        assert run.certificate.value <= 1e-9
        best = problem.objective(run.solution)
        for scale in (1e-4, 1e-2, 0.3):
            noise = torch.randn(problem.dimension, generator=torch.Generator().manual_seed(1)).double()
            x = problem.regularizer.prox(run.solution + scale * noise, 1e-9)
            assert duality_gap(problem, x) >= problem.objective(x) - best - 1e-14


def test_counts_and_classes_have_gaps_too():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 5))
    counts, classes = rng.poisson(np.exp(0.3 * X[:, 0])), rng.integers(0, 3, 80)
    for loss, y, bias in (("poisson", counts, True), ("multinomial", classes, False)):
        silos = fc.Silos.from_arrays([(X[:30], y[:30]), (X[30:], y[30:])])
        problem = fc.Problem(silos, loss=loss, regularizer=reg.L1(0.02), bias=bias)
        run = fc.solve(problem, tolerance=1e-10)
        assert run.certificate.kind == "duality gap"
        assert run.certificate.value <= 1e-10
        assert duality_gap(problem, torch.zeros(problem.dimension).double()) >= (
            problem.objective(torch.zeros(problem.dimension)) - problem.objective(run.solution)
        )


def test_without_a_conjugate_the_measure_is_named(hospitals):
    for h in (reg.SCAD(1.0, kappa=0.02), reg.FusedLasso(0.02), reg.Zero()):
        run = fc.solve(fc.Problem(hospitals, regularizer=h, bias=True), tolerance=1e-10)
        assert run.certificate.kind == "optimality measure"
        assert run.certificate.value <= 1e-8
        assert "optimality measure" in run.message
        assert "ProxNewton, since the model is linear" in run.message


def test_choices():
    silos = fc.data.load("synthetic", clients=4, features=8, samples=20, seed=1)
    cases = [
        ({"regularizer": reg.L1(0.01)}, 1.0, "ProxNewton", "the model is linear"),
        ({"regularizer": reg.L1(0.01)}, 0.5, "FedNMap", "only some clients"),
        ({"regularizer": reg.TopK(3)}, 1.0, "FedNMap", "not weakly convex"),
        ({"loss": "hinge"}, 1.0, "FedMLS", "kinks"),
        ({"regularizer": reg.L2Ball(1.0)}, 1.0, "ProxNewton", "the model is linear"),
    ]
    for fields, share, name, why in cases:
        method, reason = choose(fc.Problem(silos, **fields), participation=share)
        assert type(method).__name__ == name
        assert why in reason
    wide = fc.Silos.from_arrays([(np.eye(10, 4500), np.sign(np.arange(10) - 4.5))] * 2)
    method, reason = choose(fc.Problem(wide, loss="logistic", regularizer=reg.FusedLasso(0.01)))
    assert type(method).__name__ == "ProxScaffnew"
    assert "couples all 4500 coordinates" in reason
    with pytest.raises(ValueError, match="the smoothness of a network is unknown"):
        choose(fc.Problem(silos, model=torch.nn.Linear(8, 2)))


def test_statuses_are_honest(hospitals):
    problem = fc.Problem(hospitals, regularizer=reg.L1(0.005), bias=True)
    short = fc.solve(problem, rounds=2)
    assert short.status == "not_converged"
    assert "not converged within 2 rounds" in short.message
    assert short.certificate.value > 1e-6
    first = fc.solve(problem, participation=0.5, rounds=30, tolerance=1e-12)
    assert first.status == "not_converged"
    X = np.random.default_rng(0).normal(size=(40, 3))
    y = np.sign(X[:, 0])
    apart = fc.solve(fc.Problem(fc.Silos.from_arrays([(X[:20], y[:20]), (X[20:], y[20:])]), loss="logistic"))
    assert apart.status == "not_converged"
    assert "the classes can be separated" in apart.message
    assert torch.isfinite(apart.solution).all()


@pytest.mark.parametrize("h", [reg.L0(1e-4), reg.TopK(3), reg.MCP(1e-3, 3.0), reg.Zero()], ids=str)
@pytest.mark.parametrize("loss", ["logistic", "poisson"])
def test_far_out_where_nothing_is_left_to_gain_there_is_no_solution(loss, h):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 4))
    apart = np.where(X[:, 0] > 0, 1.0, -1.0)
    counts = rng.poisson(np.exp(X[:, 1] / 2)).astype(float)
    X[:, 0] = X[:, 0] if loss == "logistic" else abs(X[:, 0]) * (counts == 0)
    y = apart if loss == "logistic" else counts
    silos = fc.Silos.from_arrays([(X[:50], y[:50]), (X[50:], y[50:])])
    problem = fc.Problem(silos, loss=loss, regularizer=h, bias=True)
    far = torch.tensor([900.0 if loss == "logistic" else -900.0, 0, 0, 0, 0]).double()
    for start in (None, far):
        run = fc.solve(problem, x0=start)
        assert run.status == "not_converged", run.message
    rng.shuffle(y)  # as many of both, told by nothing
    honest = fc.Problem(fc.Silos.from_arrays([(X[:, 1:], y)]), loss=loss, regularizer=h, bias=True)
    near = fc.solve(honest)
    assert (near.status, fc.solve(honest, x0=near.solution * 3).status) == ("converged", "converged"), near.message


@pytest.mark.parametrize("h", [fc.regularizers.MCP(0.02, 3.0), fc.regularizers.Zero()], ids=["mcp", "zero"])
def test_a_feature_of_one_class_has_no_coefficient_where_h_is_flat(h):
    """Not all samples are right, so the loss stays; but one coefficient grows by a unit with every round."""
    rng = np.random.default_rng(0)

    def silo(m):
        X = rng.normal(size=(m, 4))
        y = np.where(X[:, 0] + rng.normal(size=m) > 0, 1.0, -1.0)
        X[:, 3] = (rng.random(m) < 0.2) * (y > 0)
        return X, y

    silos = fc.Silos.from_arrays([silo(80) for _ in range(3)], feature_names=["a", "b", "c", "rare"])
    run = fc.solve(fc.Problem(silos, loss="logistic", bias=True, regularizer=h))
    assert run.status == "not_converged"
    assert "the coefficients of rare grow without end: regularize more" in run.message
    assert (
        fc.solve(fc.Problem(silos, loss="logistic", bias=True, regularizer=fc.regularizers.L1(0.02))).status
        == "converged"
    )


def test_a_network_gets_steps_that_lower_its_objective():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    arrays = [(rng.normal(size=(20, 3)).astype(np.float32) * 30, rng.integers(0, 2, 20)) for _ in range(2)]
    problem = fc.Problem(fc.Silos.from_arrays(arrays), model=torch.nn.Linear(3, 2), regularizer=reg.L1(1e-3))
    run = fc.solve(problem, rounds=20, local_steps=2)
    assert run.status in ("converged", "not_converged")
    assert "rounds of trying steps came first" in run.message
    assert run.history[-1].objective < run.history[0].objective
    assert math.isfinite(run.certificate.value)


@pytest.mark.slow
@pytest.mark.parametrize(("h", "share"), [(reg.L1(0.005), 0.5), (reg.L0(0.001), 1.0)], ids=str)
def test_first_order_methods_arrive_sooner_than_with_safe_steps(hospitals, h, share):
    problem = fc.Problem(hospitals, regularizer=h, bias=True)
    run = fc.solve(problem, participation=share)
    assert run.status == "converged"
    assert "FedNMap" in run.message
    assert problem.stationarity(run.solution) <= 1e-8
    safe = FedNMap.auto_partial(problem.smoothness())  # local steps that share 1/(2 L)
    slow = fc.simulate(problem, safe, rounds=2 * run.rounds, participation=share, evaluate_every=run.rounds)
    assert slow.history[-1].stationarity > 1e-8
    if share < 1:
        torch.testing.assert_close(run.solution, fc.solve(problem).solution, rtol=0, atol=1e-5)


def test_path_equals_single_solutions_in_few_exchanges():
    rng = np.random.default_rng(1)
    p, truth = 1500, np.zeros(1500)
    truth[:10] = rng.normal(size=10) * 2
    arrays = []
    for _ in range(4):
        X = rng.normal(size=(40, p))
        arrays.append((X, np.sign(X @ truth + rng.normal(size=40))))
    problem = fc.Problem(fc.Silos.from_arrays(arrays), loss="logistic", regularizer=reg.L1(1.0), bias=True)
    start = fc.solve(problem)  # with lam = 1 there is nothing but an intercept
    top = float(problem.gradient(start.solution)[:-1].abs().max())
    factors = [top * 0.8**k for k in range(1, 9)]
    found = fc.path(problem, lambdas=factors)
    assert found.converged.all()
    assert found.rounds.sum() <= 5 * len(factors)
    for factor, x in zip(factors, found.solutions, strict=True):
        one = fc.Problem(problem.silos, loss="logistic", regularizer=reg.L1(factor), bias=True)
        assert one.optimality(x) <= 1e-6
    alone = fc.solve(one, tolerance=1e-9)
    torch.testing.assert_close(found.solutions[-1], alone.solution, rtol=0, atol=1e-5)
    assert problem.regularizer.h.lam == 1.0


@pytest.mark.parametrize("unit", [1e-5, 1e5])
def test_tolerance_of_a_first_order_method_does_not_depend_on_the_unit_of_targets(unit):
    """It is relative to the start: an absolute one would call small targets' zero model the solution."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(60, 4))
    y = unit * (X @ [1.0, -2.0, 0.0, 0.5] + 0.1 * generator.normal(size=60))
    silos = fc.Silos.from_arrays([(X[:30], y[:30]), (X[30:], y[30:])])
    problem = fc.Problem(silos, loss="least_squares", regularizer=fc.regularizers.L1(0.05 * unit))
    exact = fc.solve(problem, tolerance=1e-12).solution
    run = fc.solve(problem, tolerance=1e-6, participation=0.99)
    assert run.status == "converged"
    assert float((run.solution - exact).abs().max() / exact.abs().max()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("far", [-1e4, -10.0, 30.0, 1e8])
@pytest.mark.parametrize("loss", ["logistic", "poisson", "hinge"])
def test_a_start_far_out_does_not_matter(loss, far):
    """Where the curvature vanishes, or overflows, steps would end nowhere, or say that there is no solution."""
    g = np.random.default_rng(0)
    X = g.normal(size=(200, 5))
    y = (X[:, 0] + g.logistic(size=200) > 0).astype(float)
    silos = fc.Silos.from_arrays([(X[:90], y[:90]), (X[90:], y[90:])])
    problem = fc.Problem(silos, loss=loss, regularizer=reg.L1(0.01), bias=True, weights="samples")
    usual, run = fc.solve(problem), fc.solve(problem, x0=far * torch.ones(6, dtype=torch.float64))
    assert (usual.status, run.status) == ("converged", "converged")
    assert "x0" in run.message
    assert "x0" not in usual.message
    torch.testing.assert_close(run.solution, usual.solution, rtol=1e-5, atol=1e-5)
    near = fc.solve(problem, x0=usual.solution)
    assert near.rounds <= 2 or loss == "hinge"
    assert "x0" not in near.message
