"""The surviving weights without their regularizer: pooled least squares on the support, and networks."""

import numpy as np
import pytest
import torch

import fedcomposite as fc
from fedcomposite.algorithms import FedAvg, FedMid, FedNMap, Zhang
from fedcomposite.regularizers import L1, Support
from fedcomposite.runtime.callbacks import BestModel
from fedcomposite.testing import check_regularizer


@pytest.fixture(scope="module")
def sparse():
    rng = np.random.default_rng(0)
    silos = []
    for _ in range(4):
        X = rng.standard_normal((30, 8))
        silos.append((X, X[:, :3] @ [2.0, -1.5, 1.0] + 0.1 * rng.standard_normal(30)))
    h = L1(0.2)
    problem = fc.Problem(fc.Silos.from_arrays(silos), loss="least_squares", regularizer=h, weights="samples")
    return problem, fc.simulate(problem, FedNMap(3, 0.1, gamma=0.3), rounds=300, evaluate_every=300)


def pooled(problem, kept):
    X, y = problem.silos.features.double(), problem.silos.targets.double()
    x = torch.zeros(X.shape[1], dtype=torch.float64)
    x[kept] = torch.linalg.lstsq(X[:, kept], y.unsqueeze(1)).solution.squeeze(1)
    return x


@pytest.mark.parametrize(
    "method", [FedNMap(3, 0.1, gamma=0.3), Zhang(3, 0.1), FedMid(1, 0.3)], ids=lambda m: type(m).__name__
)
def test_least_squares_on_the_support_is_the_pooled_solution(sparse, method):
    problem, run = sparse
    kept = run.solution != 0
    assert 0 < int(kept.sum()) < 8
    want = pooled(problem, kept)
    torch.testing.assert_close(fc.refit(problem, run), want, rtol=0, atol=1e-8)
    again = fc.refit(problem, run, method, rounds=400, evaluate_every=400)
    torch.testing.assert_close(again.solution, want, rtol=0, atol=1e-9)
    assert torch.equal(again.solution == 0, ~kept)
    assert again.history[-1].stationarity < 1e-8
    assert again.history[-1].objective == again.history[-1].loss


def test_a_network_keeps_its_zeros_and_goes_on_with_its_statistics(tmp_path):
    torch.manual_seed(0)
    silos = fc.data.load("synthetic", clients=4, features=6, samples=40).split(0.2, validation=0.2, stratify=True)
    nn = torch.nn
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    problem = fc.Problem(silos, model=module, regularizer=L1(0.02))
    run = fc.simulate(problem, FedNMap(3, 0.1, gamma=0.5), rounds=40, batch_size=8, callbacks=[BestModel("objective")])
    assert run.solution.dtype == torch.float32
    assert problem.module(run.solution, run.buffers)(torch.zeros(1, 6)).shape == (1, 2)
    zero = run.best.solution == 0
    assert 4 < int(zero.sum()) < len(zero) - 4
    settings = {"batch_size": 8, "checkpoint": tmp_path / "c", "resume": True}
    again = fc.refit(problem, run.best, FedMid(3, 0.05), rounds=20, **settings)
    assert torch.equal(again.solution[zero], torch.zeros_like(again.solution[zero]))
    moved = again.solution[~zero] != run.best.solution[~zero]
    assert float(moved.double().mean()) > 0.5  # not those of neurons that are cut off from the outputs
    first, last = again.history[0], again.history[-1]
    assert first.loss == pytest.approx(next(r.loss for r in run.history if r.round == run.best.round), rel=1e-6)
    assert last.loss < first.loss
    whole = fc.refit(problem, run.best, FedMid(3, 0.05), rounds=24, batch_size=8)
    parts = fc.refit(problem, run.best, FedMid(3, 0.05), rounds=24, **settings)
    assert torch.equal(whole.solution, parts.solution)
    for name, start, stop, _ in problem.layout:  # biases and batch norm are not regularized, so they are free
        if not name.endswith("weight") or name.startswith("1."):
            assert (again.solution[start:stop] != 0).all(), name
    with pytest.raises(ValueError, match="a network is refitted in rounds"):
        fc.refit(problem, run)


def test_what_cannot_keep_zeros_is_refused(sparse):
    problem, run = sparse
    with pytest.raises(TypeError, match="Support is a constraint and has no useful subgradient"):
        fc.refit(problem, run, FedAvg(1, 0.1), rounds=2)
    with pytest.raises(ValueError, match="batch_size without a method"):
        fc.refit(problem, run, batch_size=4)


def test_a_support_obeys_the_laws_of_regularizers():
    h = Support(torch.tensor([True, False, True, True, False]))
    check_regularizer(h, 5)
    x = torch.tensor([1.0, 0.0, -2.0, 0.0, 0.0])
    assert float(h.value(x)) == 0
    assert float(h.value(x + 1)) == float("inf")
    with pytest.raises(ValueError, match="must be a mask"):
        Support(torch.ones(3))
