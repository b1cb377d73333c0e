"""Robust means: the rules themselves, what they do to methods, and what attacks do to them."""

import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import optimize

import fedcomposite as fc
from fedcomposite.aggregators import REGISTRY, CoordinateMedian, GeometricMedian, NormClipping, TrimmedMean
from fedcomposite.algorithms import REGISTRY as METHODS

RULES = [CoordinateMedian(), TrimmedMean(trim=2), GeometricMedian(), NormClipping()]


def vectors(m=9, d=4, seed=0):
    return torch.randn(m, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_coordinate_rules_are_numpys():
    for m in (1, 2, 5, 8):
        v = vectors(m)
        torch.testing.assert_close(CoordinateMedian().rule(v), torch.from_numpy(np.median(v.numpy(), axis=0)))
    v = vectors(9)
    expected = np.sort(v.numpy(), axis=0)[2:7].mean(0)
    torch.testing.assert_close(TrimmedMean(2).rule(v), torch.from_numpy(expected))


def test_the_geometric_median_has_the_least_sum_of_distances():
    for seed in range(5):
        v = vectors(7, 3, seed)
        found = GeometricMedian().rule(v)

        def total(u, v=v):
            return float((v - torch.as_tensor(u)).norm(dim=1).sum())

        best = optimize.minimize(
            total, v.mean(0).numpy(), method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-12}
        )
        assert total(found.numpy()) <= best.fun + 1e-8
    two = torch.tensor([[0.0], [0.0], [0.0], [5.0]], dtype=torch.float64)  # the median is one of the vectors
    assert float(GeometricMedian().rule(two)) == pytest.approx(0.0, abs=1e-6)


def test_clipping_pulls_far_vectors_back():
    v = vectors(9)
    far = v.clone()
    far[0] = 1e6
    centre = CoordinateMedian().rule(far)
    apart = far - centre
    factor = (0.5 / apart.norm(dim=1)).clamp(max=1.0)
    torch.testing.assert_close(NormClipping(radius=0.5).rule(far), centre + (apart * factor[:, None]).mean(0))
    wide = NormClipping(radius=1e9).rule(v)
    torch.testing.assert_close(wide, v.mean(0))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_equal_vectors_are_their_own_mean_and_order_does_not_matter(rule):
    v = vectors(1).repeat(7, 1)
    torch.testing.assert_close(rule.rule(v), v[0])
    w = vectors(7)
    torch.testing.assert_close(rule.rule(w[torch.randperm(7)]), rule.rule(w))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_two_liars_of_nine_move_the_result_by_no_more_than_the_honest_are_apart(rule):
    v = vectors(9)
    honest = v[2:]
    for size in (1e3, 1e9, 1e15):
        v[:2] = size
        moved = float((rule.rule(v) - honest.mean(0)).norm())
        assert moved <= 2 * float((honest - honest.mean(0)).norm(dim=1).max())


def test_a_reply_is_one_vector():
    class Reply(NamedTuple):
        a: torch.Tensor
        b: torch.Tensor

    v = vectors(7, 6)
    got = GeometricMedian().combine(Reply(v[:, :2].float(), v[:, 2:].reshape(7, 2, 2)))
    assert got.a.dtype == torch.float32
    assert got.b.shape == (2, 2)
    expected = GeometricMedian().rule(torch.cat([v[:, :2].float().double(), v[:, 2:]], dim=1))
    torch.testing.assert_close(torch.cat([got.a.double(), got.b.flatten()]), expected, rtol=1e-5, atol=1e-6)


# -- in runs -------------------------------------------------------------------------------------------------------


def different(n=7, features=5, samples=30, seed=0):
    return fc.data.load("synthetic", clients=n, features=features, samples=samples, alpha=1.0, beta=1.0, seed=seed)


def alike(n=5, seed=0):
    X, y = fc.data.load("synthetic", clients=1, features=5, samples=40, seed=seed)[0]
    return fc.Silos.from_arrays([(X, y)] * n)


def build(name):
    return METHODS[name].auto(1.0, local_steps=3)


OURS = [n for n in METHODS if METHODS.origin(n) == "fedcomposite"]
FITTING = [n for n in OURS if not METHODS[n].info.uniform_only and not METHODS[n].info.lead]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_backends_agree(rule):
    problem = fc.Problem(different(), loss="logistic", regularizer=fc.regularizers.L1(0.01))
    method = fc.algorithms.FedNMap(local_steps=3, step=0.1, gamma=0.5)
    one, two = (
        fc.simulate(problem, method, rounds=5, aggregator=rule, backend=b).solution for b in ("stacked", "loop")
    )
    torch.testing.assert_close(one, two)
    assert not torch.allclose(one, fc.simulate(problem, method, rounds=5).solution)


@pytest.mark.parametrize("name", FITTING)
def test_with_equal_clients_every_method_is_what_it_was(name):
    """Then all replies are the same, and so is any mean of them."""
    problem = fc.Problem(alike(), loss="logistic")
    method = build(name)
    rule = GeometricMedian() if METHODS[name].info.second_order else TrimmedMean(trim=1)
    usual = fc.simulate(problem, method, rounds=6, mode="eager").solution
    robust = fc.simulate(problem, method, rounds=6, aggregator=rule).solution
    if method.info.participation == "full" and name in ("GradSkip", "EControlDA"):
        return  # private coins and compression differ between equal clients
    torch.testing.assert_close(robust, usual, rtol=1e-6, atol=1e-8)


def test_without_correction_a_method_rests_where_the_robust_mean_of_gradients_does():
    """ProximalGradient with a rule M solves 0 in M(grad f_1, ..., grad f_n) + subdifferential of h."""
    problem = fc.Problem(different(), loss="logistic", regularizer=fc.regularizers.ElasticNet(0.01, 0.2))
    step = 1 / problem.smoothness()
    smooth, clients = problem.smooth(), np.arange(7, dtype=np.uint64)
    for rule in (TrimmedMean(trim=2), NormClipping(radius=0.05), GeometricMedian()):
        method = fc.algorithms.ProximalGradient(step=step)
        run = fc.simulate(problem, method, rounds=150, evaluate_every=150, aggregator=rule)
        x = run.solution
        robust = rule.rule(smooth.full(clients)(x.repeat(7, 1)))
        assert float(problem.regularizer.optimality(x, robust)) < 1e-6
        assert problem.optimality(x) > 1e-3  # and that is another point than the optimum


def regression(offsets, seed=0):
    """Clients with the same features and models of their own: their gradients differ by constants."""
    make = np.random.default_rng(seed)
    X = make.normal(size=(40, 4))
    common = make.normal(size=4)
    return fc.Problem(fc.Silos.from_arrays([(X, X @ (common + o)) for o in offsets]), loss="least_squares")


CORRECTED = ["FedNMap", "Zhang", "Scaffnew", "ProxScaffnew", "FedPD", "FedSplit"]
ADDING = ["Scaffold", "FedDyn", "FedDC", "FedDR", "FedADMM"]


def rest(name, problem, rule):
    method = METHODS[name].auto(problem.smoothness(), local_steps=3)
    return fc.simulate(problem, method, rounds=250, evaluate_every=250, aggregator=rule).solution


@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_methods_rest_where_the_robust_mean_of_gradients_does(name):
    """The server takes the whole of the replies anew each round: the same point as ProximalGradient's."""
    problem = regression(np.random.default_rng(1).normal(size=(7, 4)) ** 3)
    rule = TrimmedMean(2)
    x = rest(name, problem, rule)
    torch.testing.assert_close(x, rest("ProximalGradient", problem, rule), rtol=0, atol=1e-4)
    assert problem.optimality(x) > 1e-2


@pytest.mark.parametrize("name", [*CORRECTED, *ADDING])
@pytest.mark.parametrize("rule", [CoordinateMedian(), TrimmedMean(2)], ids=repr)
def test_exactness_is_kept_where_gradients_lie_evenly_around_their_mean(name, rule):
    """Then the robust mean of them is the mean."""
    offsets = np.random.default_rng(2).normal(size=(3, 4))
    problem = regression([*offsets, np.zeros(4), *-offsets])
    assert problem.optimality(rest(name, problem, rule)) < 1e-4


def test_liars_spoil_the_mean_and_not_the_robust_means():
    """Two of nine clients with flipped labels and huge features: the objective over the honest ones."""
    make = np.random.default_rng(0)
    X = make.normal(size=(270, 5))
    y = np.where(X.sum(1) + make.normal(size=270) > 0, 1.0, -1.0)
    parts = list(zip(np.split(X, 9), np.split(y, 9), strict=True))
    lying = [(100 * X, -y) if i < 2 else (X, y) for i, (X, y) in enumerate(parts)]
    problem = fc.Problem(fc.Silos.from_arrays(lying), loss="logistic")
    judge = fc.Problem(fc.Silos.from_arrays(parts[2:]), loss="logistic")
    method = fc.algorithms.FedAvg(local_steps=3, step=0.5)

    def reached(rule):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fc.GrowthWarning)  # the liars' loss is part of the objective
            return judge.objective(fc.simulate(problem, method, rounds=60, aggregator=rule).solution)

    spoiled = reached(None)
    for rule in RULES:
        assert reached(rule) < 0.8 * spoiled


# -- refusals and configurations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        (fc.algorithms.FedAvg(2, 0.1), {"aggregator": TrimmedMean(trim=4)}, "leaves nothing of 7 clients"),
        (fc.algorithms.FedAvg(2, 0.1), {"aggregator": "median"}, "must be an aggregators.Aggregator"),
        (fc.algorithms.ProxNewton(), {"aggregator": CoordinateMedian()}, "does not keep Hessians positive"),
        (fc.algorithms.TAMUNA(step=0.1, p=0.5), {"aggregator": CoordinateMedian()}, "masked replies"),
        (fc.algorithms.ProxCSL(2, 0.1), {"aggregator": GeometricMedian()}, "hold one client's reply alone"),
        (
            fc.algorithms.FedAvg(2, 0.1),
            {"aggregator": CoordinateMedian(), "privacy": fc.privacy.ClientLevel(clip=1.0, noise=1.0)},
            "choose one of them",
        ),
    ],
)
def test_where_only_the_mean_will_do_a_robust_one_is_refused(method, given, words):
    with pytest.raises(ValueError, match=words):
        fc.simulate(fc.Problem(different(), loss="logistic"), method, rounds=1, **given)


def test_weights_are_refused():
    problem = fc.Problem(different(), loss="logistic", weights="samples")
    with pytest.raises(ValueError, match="takes all clients alike"):
        fc.simulate(problem, fc.algorithms.FedAvg(2, 0.1), rounds=1, aggregator=CoordinateMedian())


def test_it_is_part_of_a_runs_identity(tmp_path):
    problem, method = fc.Problem(different(), loss="logistic"), fc.algorithms.FedAvg(2, 0.1)
    fc.simulate(problem, method, rounds=2, aggregator=TrimmedMean(1), checkpoint=tmp_path / "c")
    with pytest.raises(fc.CheckpointError, match="aggregator"):
        fc.simulate(problem, method, rounds=3, aggregator=TrimmedMean(2), checkpoint=tmp_path / "c", resume=True)


def test_registry():
    assert fc.aggregators.build("trimmedmean", trim=2) == TrimmedMean(2)
    assert set(REGISTRY) >= {"CoordinateMedian", "GeometricMedian", "NormClipping", "TrimmedMean"}
    with pytest.raises(ValueError, match="did you mean 'TrimmedMean'"):
        fc.aggregators.build("TrimedMean")


def test_a_function_is_an_aggregator():
    problem = fc.Problem(fc.data.load("synthetic", clients=5, features=4, samples=20))
    method = fc.algorithms.FedAvg(2, 0.1)

    def middle(vectors):
        return vectors.median(0).values

    one, other = (fc.simulate(problem, method, rounds=4, aggregator=a) for a in (middle, CoordinateMedian()))
    assert torch.equal(one.solution, other.solution)  # an odd number of clients
    with pytest.raises(ValueError, match=r"gives \(5,\) for vectors \(5, 4\), must be one of 4 numbers"):
        fc.simulate(problem, method, rounds=1, aggregator=lambda vectors: vectors.mean(1))
    with pytest.raises(ValueError, match="must be an aggregators"):
        fc.simulate(problem, method, rounds=1, aggregator=CoordinateMedian)
