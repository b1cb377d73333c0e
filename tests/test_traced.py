"""Gradients from a list of operations: the same bits, and only where that is safe."""

import numpy as np
import pytest
import torch
from torch import nn

import fedcomposite as fc
from fedcomposite.problems.network import gradients as passes
from fedcomposite.problems.traced import trace
from fedcomposite.runtime import process


def silos(clients=4, samples=12, shape=(1, 8, 8)):
    rng = np.random.default_rng(0)
    return fc.Silos.from_arrays(
        [(rng.normal(size=(samples, *shape)).astype(np.float32), rng.integers(0, 3, samples)) for _ in range(clients)]
    )


def convolution(norm=True):
    torch.manual_seed(0)
    middle = [nn.BatchNorm2d(4)] if norm else []
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), *middle, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)
    )


def dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3))


def asked(problem, batch, times):
    net = problem.smooth(torch.float32)
    x = net.start().repeat(4, 1) + 0.01 * torch.randn(4, net.dimension, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(batch).repeat(4, 1) + 12 * torch.arange(4)[:, None]
    net.gradients.check_vectorises()
    return net, [net.minibatch(x, rows) for _ in range(times)]


@pytest.mark.slow
@pytest.mark.parametrize("model", [dense, convolution, lambda: convolution(norm=False)], ids=["mlp", "norm", "cnn"])
@pytest.mark.parametrize(("gradients", "batch"), [("vmap", 5), ("auto", 5), ("loop", 5)])
def test_listing_the_operations_changes_no_bit(model, gradients, batch):
    problem = fc.Problem(silos(), model=model(), gradients=gradients)
    net, found = asked(problem, batch, 2 * passes._REPEATS)
    assert [f.__name__ for f in net.gradients.listed.values()] == ["forward"]  # it was done
    assert all(torch.equal(found[0], g) for g in found)


def test_a_few_passes_are_not_worth_it():
    net, _ = asked(fc.Problem(silos(), model=dense()), 5, passes._REPEATS - 1)
    assert not net.gradients.listed


class Counting(nn.Module):
    """A module whose output depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(64, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x.flatten(1)) * self.calls


def test_a_module_that_changes_from_call_to_call_stays_as_it_is():
    net, found = asked(fc.Problem(silos(), model=Counting()), 5, passes._REPEATS + 3)
    assert [f.__name__ for f in net.gradients.listed.values()] == ["_vectorised"]
    assert not torch.equal(found[-1], found[-2])


def test_what_cannot_be_listed_goes_on_as_before():
    def peek(x):
        return x * (1 if float(x.sum()) > -1e9 else 2)

    problem = fc.Problem(silos(), model=dense(), transform=peek)
    net, found = asked(problem, 5, passes._REPEATS + 3)
    assert [f.__name__ for f in net.gradients.listed.values()] == ["_vectorised"]
    assert torch.equal(found[0], found[-1])


def test_samples_that_leave_torch_are_not_taken_for_constants():
    def through_numpy(x):
        return torch.from_numpy(np.tanh(x.numpy()))

    problem = fc.Problem(silos(), model=dense(), transform=through_numpy)
    net, _ = asked(problem, 5, passes._REPEATS + 1)
    assert [f.__name__ for f in net.gradients.listed.values()] == ["_vectorised"]


def test_compiled_passes_stay_with_their_run(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    problem = fc.Problem(silos(), model=convolution(), gradients="vmap")
    net = problem.smooth(torch.float32)
    net.gradients.check_vectorises()
    view = net.ready(compile=True)
    assert view is not net
    rows = torch.arange(5).repeat(4, 1) + 12 * torch.arange(4)[:, None]
    x = net.start().repeat(4, 1)
    torch.testing.assert_close(view.minibatch(x, rows), net.minibatch(x, rows))
    assert len(view.gradients.listed) == 1
    assert not net.gradients.compile
    assert not net.gradients.listed
    assert net.ready(compile=False) is net


def test_repeated_work_is_done_once_unless_something_is_written():
    x = torch.randn(3, 4)

    def twice(x):
        return torch.sin(x) + torch.sin(x)

    def written(x):
        first = torch.sin(x)
        first.add_(1)
        return first + torch.sin(x)

    def drawn(x):
        return torch.rand_like(x) - torch.rand_like(x)

    assert torch.equal(trace(twice, x)(x), twice(x))
    assert sum("sin" in str(n) for n in trace(twice, x).__self__.graph.nodes) == 1
    assert torch.equal(trace(written, x)(x), written(x))
    assert (trace(drawn, x)(x) != 0).any()


def test_equal_numbers_of_different_types_are_different_arguments():
    x = torch.tensor([1, 2])

    def both(x):
        return torch.add(x, 1).to(torch.float64) + torch.add(x, 1.0).to(torch.float64) + torch.mul(x, True)

    assert torch.equal(trace(both, x)(x), both(x))


@pytest.mark.slow
def test_a_resumed_run_repeats_every_bit_across_the_listing(tmp_path):
    problem = fc.Problem(silos(), model=convolution(), regularizer=fc.regularizers.L1(1e-3))
    options = {"batch_size": 5, "dtype": torch.float32, "evaluate_every": 5}
    method = fc.algorithms.FedMid(local_steps=3, step=0.05)
    whole = fc.simulate(problem, method, rounds=15, **options)
    fc.simulate(problem, method, rounds=9, checkpoint=tmp_path / "c", **options)
    again = fc.Problem(silos(), model=convolution(), regularizer=fc.regularizers.L1(1e-3))
    rest = fc.simulate(again, method, rounds=15, checkpoint=tmp_path / "c", resume=True, **options)
    assert torch.equal(whole.solution, rest.solution)


def test_memory_is_kept_during_runs_and_given_back_after_the_last(monkeypatch):
    calls = []

    class Library:
        def mallopt(self, *given):
            calls.append(given)
            return 1

        def malloc_trim(self, pad):
            calls.append("trim")

    monkeypatch.setattr(process, "_library", Library)
    with process.keep_memory(), process.keep_memory():
        assert len(calls) == 2
    assert calls[2:] == [(process._MMAP, process._USUAL[1]), (process._TRIM, process._USUAL[0]), "trim"]
    monkeypatch.setattr(process, "_library", lambda: None)
    with process.keep_memory():
        pass
    assert len(calls) == 5
