"""What a problem takes, refuses and says about a model."""

import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import fedcomposite as fc
from fedcomposite import metrics


def split_silos(kind="binary", clients=5):
    rng = np.random.default_rng(0)
    arrays = []
    for i in range(clients):
        X = rng.standard_normal((20 + 9 * i, 4))
        y = X @ [1.0, -2.0, 0.5, 0.0] + rng.standard_normal(len(X))
        arrays.append((X, np.digitize(y, [-1, 1]) if kind == "many" else (y > 0) * 1.0))
    return fc.Silos.from_arrays(arrays)


def point(problem, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(problem.dimension, generator=generator, dtype=torch.float64)


# -- arguments that are not what they should be ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"regularizer": "l1"}, r"regularizer = 'l1', must be a Regularizer, such as .*did you mean 'L1'"),
        ({"regularizer": 0.1}, "regularizer = 0.1, must be a Regularizer"),
        ({"regularizer": ""}, "regularizer = '', must be a Regularizer"),
        ({"bias": "no"}, "bias = 'no', must be True or False"),
        ({"weights": ["samples"]}, "must be 'uniform' or 'samples'"),
        ({"model": "mlp"}, "model = 'mlp', must be a torch.nn.Module"),
        ({"model": nn.Linear(4, 2), "loss": nn.CrossEntropyLoss}, "loss = CrossEntropyLoss is a class"),
        ({"model": nn.Linear(4, 2), "loss": nn.CrossEntropyLoss()}, "class labels are integers"),
        ({"model": nn.Linear(4, 3), "loss": nn.CosineEmbeddingLoss()}, "the loss does not take outputs"),
        ({"evaluation_samples": 5}, "evaluation_samples: only for a problem with a model"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(options, line):
    with pytest.raises(ValueError, match=line) as caught:
        fc.Problem(split_silos(), **options)
    assert "\n" not in str(caught.value)


def test_the_model_chooses_the_kind_of_problem():
    linear = fc.Problem(split_silos(), bias=np.bool_(True))
    network = fc.Problem(split_silos(), model=nn.Linear(4, 2))
    assert type(linear) is fc.problems.LinearProblem
    assert type(network) is fc.problems.NetworkProblem
    for problem in (linear, network):
        assert isinstance(problem, fc.Problem)
        assert copy.deepcopy(problem).objective(point(problem)) == problem.objective(point(problem))
    assert type(fc.problems.LinearProblem(split_silos())) is fc.problems.LinearProblem
    with pytest.raises(ValueError, match="needs a model"):
        fc.problems.NetworkProblem(split_silos())
    with pytest.raises(ValueError, match="takes no model"):
        fc.problems.LinearProblem(split_silos(), model=nn.Linear(4, 2))
    with pytest.raises(ValueError, match="must be Silos"):
        fc.Problem([(np.ones((2, 2)), [0, 1])])


def test_one_class_is_told_of_classifiers_only():
    X = np.random.default_rng(0).standard_normal((6, 2))
    ones = fc.Silos.from_arrays([(X[:3], [1.0, 1, 1]), (X[3:], [1.0, 1, 1])])
    for options in ({}, {"loss": "hinge"}, {"model": nn.Linear(2, 2)}):
        with pytest.warns(fc.OneClassWarning, match="all 6 training samples have the label 1"):
            fc.Problem(ones, **options)
    fc.Problem(ones, loss="least_squares")
    fc.Problem(dataclasses.replace(fc.Silos.from_arrays([ones[0]]), ids=(3,)))  # a part of a federation


def test_lists_are_read_in_double_precision():
    problem = fc.Problem(split_silos(), regularizer=fc.regularizers.L1(0.01))
    x = point(problem)
    assert problem.stationarity(x.tolist()) == problem.stationarity(x)
    assert problem.objective(x.tolist()) == problem.objective(x) == problem.objective(x.numpy())
    assert problem.gradient(x.tolist()).dtype == torch.float64
    assert problem.gradient(x.float()).dtype == torch.float32
    assert metrics.distance(x.tolist(), x) == 0.0
    assert problem.optimality([0, 0, 0, 0]) == problem.optimality(torch.zeros(4, dtype=torch.float64))


def test_distances_of_different_shapes_are_refused():
    for function in (metrics.distance, metrics.support):
        with pytest.raises(ValueError, match=r"shapes \(3,\) and \(1,\) differ"):
            function([1.0, 2.0, 3.0], [1.0])
        with pytest.raises(ValueError, match="differ"):
            function(torch.zeros(3), torch.zeros(3, 1))


def test_numpy_numbers_are_numbers():
    method = fc.algorithms.FedAvg(local_steps=np.int64(3), step=np.float32(0.5))
    assert (method.local_steps, method.step) == (3, 0.5)
    assert type(method.local_steps) is int
    assert type(method.step) is float
    assert fc.regularizers.L1(np.float64(0.1)) == fc.regularizers.L1(0.1)
    assert type(fc.problems.Batches(0, np.int32(5)).size) is int
    assert fc.Problem(split_silos(), model=nn.Linear(4, 2), chunk=np.int64(2)).options.chunk == 2
    with pytest.raises(ValueError, match="local_steps = "):
        fc.algorithms.FedAvg(local_steps=np.float64(3.0), step=0.5)
    with pytest.raises(ValueError, match="step = "):
        fc.algorithms.FedAvg(local_steps=3, step=np.bool_(True))


# -- buffers and samples --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def normed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    h = fc.regularizers.L1(0.01)
    problem = fc.Problem(split_silos("many"), model=model, regularizer=h, evaluation_samples=40)
    method = fc.algorithms.FedMid(local_steps=5, step=0.1)
    return problem, fc.simulate(problem, method, rounds=8, batch_size=8, dtype=torch.float64)


def test_the_objective_with_a_runs_buffers_is_the_historys(normed):
    problem, run = normed
    last = run.history[-1]
    x, buffers = run.solution, run.buffers
    assert problem.objective(x, buffers=buffers) == last.objective
    assert problem.objective(x) != pytest.approx(last.objective, rel=1e-3)
    assert problem.stationarity(x, buffers=buffers) == last.stationarity
    assert metrics.stationarity(problem, x, buffers=buffers) == pytest.approx(last.stationarity, rel=1e-12)
    seen = problem.evaluate(x, buffers)
    assert (float(seen.loss), seen.samples) == (last.loss, last.evaluated_samples) == (last.loss, 40)
    assert torch.equal(problem.gradient(x, buffers=buffers), seen.gradient)
    expected = float(problem.regularizer.optimality(x, seen.gradient))
    assert problem.optimality(x, buffers=buffers) == expected
    with pytest.raises(ValueError, match=r"buffers have shape \(3,\), expected \(17,\): take run.buffers"):
        problem.objective(x, buffers=torch.zeros(3))


def test_evaluation_samples_may_be_chosen_anew(normed):
    problem, run = normed
    x, buffers, silos = run.solution, run.buffers, problem.silos
    module = problem.module(x, buffers)
    with torch.no_grad():
        each = [nn.functional.cross_entropy(module(X.double()), y) for X, y in (silos[i] for i in range(5))]
    everything = problem.evaluate(x, buffers, evaluation_samples=None)
    assert everything.samples == len(silos.targets)
    assert float(everything.loss) == pytest.approx(float(torch.stack(each).mean()), rel=1e-12)
    whole = problem.objective(x, buffers=buffers, evaluation_samples=None)
    assert whole == pytest.approx(float(everything.loss + problem.regularizer.value(x)), rel=1e-14)
    assert problem.evaluate(x, buffers, evaluation_samples=10).samples == 10
    assert problem.evaluate(x, buffers).samples == 40  # the problem's own choice stays
    gradient = problem.gradient(x, buffers=buffers, evaluation_samples=None)
    assert torch.equal(gradient, everything.gradient)
    with pytest.raises(ValueError, match="evaluation_samples = 0, must be an integer >= 1"):
        problem.evaluate(x, evaluation_samples=0)
    linear = fc.Problem(silos, loss="multinomial")
    assert linear.evaluate(torch.zeros(12)).samples == len(silos.targets)
    assert linear.objective(torch.zeros(12), evaluation_samples=None) == linear.objective(torch.zeros(12))
    with pytest.raises(ValueError, match="only for a problem with a model"):
        linear.evaluate(torch.zeros(12), evaluation_samples=3)


def test_a_problem_shows_its_arguments_and_is_of_the_kind_that_its_model_asks_for():
    """Notebooks and editors show `inspect.signature`; a catch-all constructor would hide the arguments."""
    own = inspect.signature(fc.Problem.__init__)
    shown = inspect.signature(fc.Problem)
    assert list(shown.parameters.values()) == list(own.parameters.values())[1:]
    assert {"silos", "loss", "regularizer", "model", "metrics"} <= set(shown.parameters)
    silos = split_silos()
    linear, net = fc.Problem(silos), fc.Problem(silos, model=nn.Linear(4, 2))
    assert (type(linear), type(net)) == (fc.problems.LinearProblem, fc.problems.NetworkProblem)
    for one in (linear, net):
        assert type(copy.copy(one)) is type(pickle.loads(pickle.dumps(one))) is type(one)

    class Own(fc.problems.LinearProblem):
        def __init__(self, wards):
            super().__init__(wards, bias=True)

    assert list(inspect.signature(Own).parameters) == ["wards"]
    assert type(Own(silos)) is Own
    with pytest.raises(TypeError, match="silos"):
        fc.Problem()
