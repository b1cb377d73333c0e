"""Losses, second derivatives and Hessians of linear models against automatic differentiation."""

import numpy as np
import pytest
import torch
from torch import nn

import fedcomposite as fc
from fedcomposite.problems import LOSSES, Batches, ClientGradients, Counter

SMOOTH = sorted(name for name, loss in LOSSES.items() if loss.smooth and loss.by_sample)
SIZES = (9, 4, 13, 5)
CLASSES = 4


def make(name, bias=False, weights="uniform", sizes=SIZES, d=5):
    rng = np.random.default_rng(3)
    arrays = []
    for m in sizes:
        signs = rng.choice([-1.0, 1.0], m)
        special = {"logistic": signs, "squared_hinge": signs, "multinomial": np.arange(m) % CLASSES}
        y = rng.poisson(2.0, m) if name == "poisson" else special.get(name, rng.normal(size=m))
        arrays.append((rng.normal(size=(m, d)), y))
    return fc.Problem(fc.Silos.from_arrays(arrays), loss=name, bias=bias, weights=weights)


def alone(problem, i, x):
    """f_i at x, one sample after another, in differentiable operations."""
    X, y = problem.silos[i]
    X = torch.as_tensor(X).double()
    if problem.bias:
        X = torch.cat([X, torch.ones(len(X), 1, dtype=torch.float64)], 1)
    loss = problem.smooth().loss
    b = loss.prepare(problem.silos, torch.as_tensor(y))
    z = X @ (x if loss.outputs == 1 else x.view(-1, loss.outputs))
    return torch.stack([loss.value(zj, bj) for zj, bj in zip(z, b, strict=True)]).mean()


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivative_is_that_of_the_derivative(name):
    torch.manual_seed(0)
    loss = make(name).smooth().loss
    if loss.outputs == 1:
        z = 3 * torch.randn(50, dtype=torch.float64)
        b = torch.where(torch.arange(50) % 2 == 0, 1.0, -1.0).double() if loss.classifier else torch.rand(50).double()
    else:
        z, b = (
            torch.randn(50, CLASSES, dtype=torch.float64),
            torch.eye(CLASSES, dtype=torch.float64)[torch.arange(50) % 4],
        )
    for zj, bj in zip(z, b, strict=True):
        want = torch.autograd.functional.hessian(lambda u, bj=bj: loss.value(u, bj), zj)
        torch.testing.assert_close(loss.second(zj, bj), want, rtol=1e-12, atol=1e-14)
        if loss.outputs == 1:
            assert float(loss.second(zj, bj)) <= loss.curvature + 1e-15
    assert torch.equal(loss.second(z, b)[7], loss.second(z[7], b[7]))


def test_second_derivative_far_out_is_accurate():
    z = torch.tensor([-700.0, 700.0, 40.0], dtype=torch.float64)
    got = LOSSES["logistic"].second(z, torch.ones(3).double())
    torch.testing.assert_close(got, torch.exp(-z.abs()), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SMOOTH)
def test_oracle_is_automatic_differentiation(name, bias):
    torch.manual_seed(1)
    problem = make(name, bias)
    d, n = problem.dimension, len(SIZES)
    points = torch.randn(n, d, dtype=torch.float64)
    where = torch.rand(d) < 0.6
    where[0], where[-1] = False, True
    for mask in (where, torch.ones(d, dtype=torch.bool), torch.zeros(d, dtype=torch.bool)):
        counter = Counter()
        grad = ClientGradients(problem.smooth(), np.arange(n, dtype=np.uint64), 0, Batches(), counter)
        losses, hessians = grad.loss(points), grad.hessian(points, mask.expand(n, d))
        assert losses.shape == (n, 1)
        assert counter.gradients == n * int(mask.sum())
        for i in range(n):
            x = points[i]
            want = torch.autograd.functional.hessian(lambda u, i=i: alone(problem, i, u), x)
            torch.testing.assert_close(hessians[i], want[mask][:, mask], rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(losses[i, 0], alone(problem, i, x), rtol=1e-13, atol=0)
            one = ClientGradients(problem.smooth(), np.array([i], np.uint64), 0, Batches(), Counter(), stacked=False)
            torch.testing.assert_close(one.hessian(x, mask), hessians[i], rtol=1e-12, atol=1e-15)
            torch.testing.assert_close(one.loss(x), losses[i], rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - set(SMOOTH)))
def test_losses_with_kinks_refuse(name):
    with pytest.raises(TypeError, match="has no second derivative"):
        LOSSES[name].second(torch.zeros(2), torch.ones(2))


def test_networks_refuse():
    silos = fc.data.load("synthetic", clients=2, features=3, samples=5)
    problem = fc.Problem(silos, model=nn.Linear(3, 2), loss=lambda out, y: out.square().sum(1))
    grad = ClientGradients(problem.smooth(), np.arange(2, dtype=np.uint64), 0, Batches(), Counter())
    x = torch.zeros(2, problem.dimension, dtype=torch.float64)
    for ask in (lambda: grad.loss(x), lambda: grad.hessian(x, x == 0)):
        with pytest.raises(TypeError, match=r"a network offers gradients only.*use a first-order method"):
            ask()
