"""Losses with kinks: smooth ones that approach them, and solve with a duality gap of the problem itself."""

import cvxpy as cp
import numpy as np
import pytest
import torch

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.problems import LOSSES
from fedcomposite.problems.losses import Hinge, Quantile
from fedcomposite.problems.smoothed import KINKED, Smoothed

KINDS = [Hinge(), LOSSES["absolute"], Quantile(0.2)]


@pytest.mark.parametrize("loss", KINDS, ids=str)
@pytest.mark.parametrize("width", [0.01, 0.7, 5.0])
def test_smoothed_is_the_moreau_envelope(loss, width):
    soft, u = Smoothed(loss, width), torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    for b in (-1.0, 1.0) if loss.classifier else (-0.4, 2.0):
        target = torch.tensor(b).double()
        for place in (-3.0, -0.9, 0.3, 0.999, 1.0, 2.004, 6.0):
            z = torch.tensor(place).double()
            want = (loss.value(u, target) + (u - z).square() / (2 * width)).min()
            torch.testing.assert_close(soft.value(z, target), want, rtol=0, atol=1e-7)
            gap = float(loss.value(z, target) - soft.value(z, target))
            assert -1e-12 <= gap <= width * loss.slope**2 / 2 + 1e-12
            slope = (soft.value(z + 1e-6, target) - soft.value(z - 1e-6, target)) / 2e-6
            torch.testing.assert_close(soft.derivative(z, target), slope, rtol=0, atol=2e-4)


def test_every_loss_with_a_kink_is_known_or_refused():
    for name, loss in LOSSES.items():
        assert loss.smooth != isinstance(loss, KINKED), name
    with pytest.raises(ValueError, match="Smoothed is made for Hinge, Absolute, Quantile, not for Logistic"):
        Smoothed(LOSSES["logistic"], 1.0)


def pooled(problem, term):
    """The least objective by cvxpy."""
    X, y = (np.concatenate([np.asarray(problem.silos[i][k]) for i in range(len(problem.silos))]) for k in (0, 1))
    weight = np.repeat(problem.weights / problem.silos.sizes, problem.silos.sizes)
    x, c = cp.Variable(X.shape[1]), cp.Variable()
    z, signs = X @ x + c, np.where(y > 0, 1.0, -1.0)
    loss = {
        "Hinge": lambda: cp.pos(1 - cp.multiply(signs, z)),
        "Absolute": lambda: cp.abs(z - y),
        "Quantile": lambda: cp.maximum(0.8 * (y - z), -0.2 * (y - z)),
    }[type(problem.loss).__name__]()
    made = cp.Problem(cp.Minimize(weight @ loss + term(x)))
    return made.solve(solver=cp.CLARABEL)


@pytest.mark.parametrize("loss", ["hinge", "absolute", "quantile"])
@pytest.mark.parametrize("penalty", ["ridge", "l1"])
def test_solve_comes_within_a_certified_distance(loss, penalty):
    h, term = {
        "ridge": (reg.L2Squared(0.1), lambda x: 0.05 * cp.sum_squares(x)),
        "l1": (reg.L1(0.02), lambda x: 0.02 * cp.norm1(x)),
    }[penalty]
    options = {"tau": 0.8} if loss == "quantile" else None
    problem = fc.Problem(fc.data.load("heart_disease"), loss=loss, loss_options=options, regularizer=h, bias=True)
    seen = []
    run = fc.solve(problem, tolerance=1e-3, on_record=seen.append)
    assert run.status == "converged"
    assert run.certificate.kind == "duality gap"
    over = problem.objective(run.solution) - pooled(problem, term)
    assert -1e-7 <= over <= run.certificate.value + 1e-7 <= 1.1e-3
    assert "has kinks" in run.message
    assert run.history[0].objective == pytest.approx(problem.objective(torch.zeros(problem.dimension)))
    assert run.history[-1].objective == pytest.approx(problem.objective(run.solution))
    assert run.history[-1].round == run.rounds == seen[-1].round
    totals = [r.bytes_up for r in run.history]
    assert totals == sorted(totals)
    short = fc.solve(problem, tolerance=1e-3, rounds=3)
    assert short.status == "not converged"
    assert short.rounds == 3
    assert "allow a larger tolerance" in short.message


def test_kinks_with_an_h_without_conjugate_end_by_what_smoothing_took_away():
    problem = fc.Problem(fc.data.load("heart_disease"), loss="hinge", regularizer=reg.MCP(0.05, 20.0), bias=True)
    run = fc.solve(problem, tolerance=0.02)
    assert run.status == "converged"
    assert run.certificate.kind == "optimality measure"
