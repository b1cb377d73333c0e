"""Weights of samples: a sample that counts k times is the same as k samples."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.data import DataError
from fedcomposite.problems import Batches, ClientGradients, Counter

LOSSES = ["logistic", "least_squares", "huber", "squared_hinge", "multinomial", "hinge_sum"]


def data(loss="logistic", sizes=(7, 12, 12)):
    generator = np.random.default_rng(0)
    arrays, counts = [], []
    for m in sizes:
        X = generator.normal(size=(m, 4))
        y = generator.integers(0, 3, m) if loss == "multinomial" else np.sign(X[:, 0] + generator.normal(size=m))
        arrays.append((X, y))
        counts.append(generator.integers(0 if m > 7 else 1, 4, m))
    return arrays, counts


def pair(loss, weights="uniform", sizes=(7, 12, 12)):
    """The problem with weights, and the one with repeated samples."""
    arrays, counts = data(loss, sizes)
    repeated = [(np.repeat(X, k, 0), np.repeat(y, k)) for (X, y), k in zip(arrays, counts, strict=True)]
    silos = fc.Silos.from_arrays(arrays, weights=counts), fc.Silos.from_arrays(repeated)
    return [fc.Problem(s, loss=loss, regularizer=reg.L1(0.01), bias=True, weights=weights) for s in silos]


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("sizes", [(7, 12, 12), (12, 12, 12), (9, 200)])
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_are_repetitions(loss, sizes, weights):
    one, two = pair(loss, weights, sizes)
    close = {"rtol": 1e-12, "atol": 1e-12}
    x = torch.linspace(-1, 1, one.dimension, dtype=torch.float64)
    assert one.objective(x) == pytest.approx(two.objective(x), rel=1e-12)
    torch.testing.assert_close(one.gradient(x), two.gradient(x), **close)
    everyone = np.arange(len(sizes), dtype=np.uint64)
    a, b = one.smooth(), two.smooth()
    stacked = x.expand(len(sizes), -1).contiguous()
    torch.testing.assert_close(a.full(everyone)(stacked), b.full(everyone)(stacked), **close)
    torch.testing.assert_close(a.losses(everyone, stacked), b.losses(everyone, stacked), **close)
    for of in ("clients", "mean"):
        assert a.scale(of) == pytest.approx(b.scale(of), rel=1e-9)
    assert a.lipschitz() == pytest.approx(b.lipschitz(), rel=1e-9)
    if loss == "least_squares":
        assert fc.theory.constants(one).mu == pytest.approx(fc.theory.constants(two).mu, rel=1e-9)
    if one.loss.smooth:
        at = torch.arange(one.dimension)
        torch.testing.assert_close(a.hessians(everyone, stacked, at), b.hessians(everyone, stacked, at), **close)
        solved = [fc.solve(problem).solution for problem in (one, two)]
        assert one.objective(solved[0]) == pytest.approx(two.objective(solved[1]), rel=1e-12)
        if loss != "multinomial":  # whose intercepts are known up to a shift
            torch.testing.assert_close(*solved, rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_minibatches_are_unbiased(loss):
    """The mean over all samples of the gradients on single ones is the full gradient."""
    smooth = pair(loss)[0].smooth()
    x = torch.linspace(-1, 1, smooth.dimension, dtype=torch.float64)
    for i, (size, first) in enumerate(zip(smooth.sizes.tolist(), smooth.offsets.tolist(), strict=True)):
        rows = torch.arange(first, first + size).unsqueeze(1)
        mean = smooth.minibatch(x.expand(size, -1).contiguous(), rows).mean(0)
        oracle = ClientGradients(smooth, np.array([i], np.uint64), 0, Batches(), Counter(), stacked=False)
        torch.testing.assert_close(mean, oracle.full(x), rtol=1e-12, atol=1e-12)


def test_balanced_classes_as_in_scikit_learn():
    generator = np.random.default_rng(1)
    X = generator.normal(size=(120, 3))
    y = (X[:, 0] + generator.normal(size=120) > 1.2).astype(int)
    silos = fc.Silos.from_arrays([(X[:50], y[:50]), (X[50:], y[50:])]).class_weighted()
    problem = fc.Problem(silos, loss="logistic", regularizer=reg.L2Squared(0.05), bias=True, weights="samples")
    run = fc.solve(problem, tolerance=1e-11)
    pooled = LogisticRegression(C=1 / (0.05 * 120), class_weight="balanced", tol=1e-12, max_iter=10000).fit(X, y)
    np.testing.assert_allclose(run.solution[:-1], pooled.coef_[0], atol=1e-6)
    np.testing.assert_allclose(run.solution[-1], pooled.intercept_[0], atol=1e-6)
    twice = silos.class_weighted({0: 2.0, 1: 3.0})
    torch.testing.assert_close(twice.weights, silos.weights * torch.where(silos.targets == 1, 3.0, 2.0))


def test_weights_stay_with_their_samples():
    arrays, counts = data()
    silos = fc.Silos.from_arrays(arrays, weights=counts)
    marked = fc.Silos.from_arrays([(X, k) for (X, _), k in zip(arrays, counts, strict=True)], weights=counts)
    for made in (marked.split(0.3), marked.partition("iid", clients=2), marked.standardize()):
        torch.testing.assert_close(made.weights, made.targets.double())
    assert fc.Silos.from_arrays(arrays).weights is None
    assert silos.weights.dtype == torch.float64


def test_refusals():
    arrays, counts = data()
    for wrong in ([[1.0]] * 3, counts[:2], [-1.0 * counts[0], *counts[1:]], [0 * counts[0], *counts[1:]]):
        with pytest.raises(DataError, match="weights"):
            fc.Silos.from_arrays(arrays, weights=wrong)
    silos = fc.Silos.from_arrays(arrays, weights=counts)
    with pytest.raises(ValueError, match="weights of samples are for linear models"):
        fc.Problem(silos, model=torch.nn.Linear(4, 2))
    with pytest.raises(DataError, match="a number for each of -1, 1"):
        silos.class_weighted({1: 2.0})
