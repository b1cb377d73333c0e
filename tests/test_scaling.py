"""Diagonal scaling: the same problem in other units, which first-order methods solve in few rounds."""

import numpy as np
import pytest
import torch

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.analysis.scaling import rescale, worthwhile
from fedcomposite.regularizers.stretched import Stretched
from fedcomposite.testing import check_regularizer

SCALES = 10.0 ** np.array([-2, 1, 0, 2, -1, 0, 1, 0, -2, 2])
FACTORS = torch.tensor([0.5, 4.0, 1.0, 2**-6, 2.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def badly_scaled():
    hospitals = fc.data.load("heart_disease")
    return fc.Silos.from_arrays([(np.asarray(X) * SCALES, np.asarray(y)) for X, y in (hospitals[i] for i in range(4))])


TERMS = [
    reg.L1(0.3),
    reg.L1(0.3, (1.0, 2.0, 0.0, 0.5, 1.0)),
    reg.ElasticNet(0.2, 0.4),
    reg.L2Squared(0.5),
    reg.MCP(0.3, 20.0),
    reg.Box(-0.2, 0.4),
    reg.L1(0.3).on([True, True, False, True, False]),
]


@pytest.mark.parametrize("h", TERMS, ids=str)
def test_a_stretched_regularizer_keeps_the_laws(h):
    check_regularizer(Stretched(h, FACTORS), 5)


@pytest.mark.parametrize("h", TERMS, ids=str)
def test_its_prox_is_that_of_h_in_another_metric(h):
    """min over u of h(D u) + |u - v|^2/(2 s), by a fine grid per coordinate."""
    step, grid = 0.3, torch.linspace(-4, 4, 160_001, dtype=torch.float64)
    v = torch.tensor([0.7, -0.4, 1.2, 3.0, -2.0], dtype=torch.float64)
    got = Stretched(h, FACTORS).prox(v, step)
    for j in range(5):
        x = torch.zeros(len(grid), 5, dtype=torch.float64)
        x[:, j] = FACTORS[j] * grid
        cost = h.value(x) + (grid - v[j]).square() / (2 * step)
        assert abs(float(got[j]) - float(grid[cost.argmin()])) <= 1e-4


def test_coupled_regularizers_and_networks_are_refused(badly_scaled):
    with pytest.raises(ValueError, match="couples coordinates, and only a separable h has a prox in another metric"):
        rescale(fc.Problem(badly_scaled, loss="logistic", regularizer=reg.GroupLasso(0.1, groups=2)))
    with pytest.raises(ValueError, match="a network has no features to scale"):
        rescale(fc.Problem(badly_scaled, model=torch.nn.Linear(10, 2)))


@pytest.mark.parametrize("loss", ["logistic", "multinomial"])
def test_the_problem_is_the_same_function(badly_scaled, loss):
    problem = fc.Problem(badly_scaled, loss=loss, regularizer=reg.L1(0.01), bias=True, weights="samples")
    other = rescale(problem)
    u = torch.randn(problem.dimension, generator=torch.Generator().manual_seed(0)).double()
    assert other.problem.objective(u) == pytest.approx(problem.objective(other.factors * u), rel=1e-12)
    torch.testing.assert_close(other.problem.gradient(u), other.factors * problem.gradient(other.factors * u))
    X = other.problem.silos.features
    sizes = torch.from_numpy(problem.silos.sizes)
    weight = torch.repeat_interleave(torch.from_numpy(problem.weights) / sizes, sizes)
    squares = weight @ X.square()
    assert 0.49 < float(squares.min()) <= float(squares.max()) < 2.01
    assert set(torch.frexp(other.factors).mantissa.tolist()) == {0.5}  # powers of two do not round


@pytest.mark.parametrize(("h", "share"), [(reg.L1(0.005), 0.5), (reg.L0(0.001), 1.0)], ids=str)
def test_solve_scales_where_it_falls_back_to_first_order(badly_scaled, h, share):
    problem = fc.Problem(badly_scaled, loss="logistic", regularizer=h, bias=True)
    assert worthwhile(problem)
    run = fc.solve(problem, participation=share, rounds=300, tolerance=1e-7)
    assert run.status == "converged", run.message
    assert "in units of the features" in run.message
    assert problem.stationarity(run.solution) == pytest.approx(run.history[-1].stationarity, rel=1e-6, abs=1e-12)
    assert run.history[-1].objective == pytest.approx(problem.objective(run.solution), rel=1e-12)
    if share < 1:
        exact = fc.solve(problem)
        assert run.history[-1].objective == pytest.approx(exact.history[-1].objective, rel=1e-8)
    assert not worthwhile(fc.Problem(fc.data.load("heart_disease"), regularizer=h))
