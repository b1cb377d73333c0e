"""What a method does between two gradients, listed and cut: the same numbers as its rule."""

import dataclasses
import functools

import pytest
import torch

from fedcomposite.algorithms import REGISTRY, FedNMap, Zhang
from fedcomposite.problems import Batches
from fedcomposite.regularizers import L1, MCP, Blocks, GroupLasso
from fedcomposite.runtime import Simulator, messages
from fedcomposite.runtime.program.fused_rounds import Fused
from fedcomposite.testing import small_problem

CLIENTS, DIMENSION = 3, 6
METHODS = [n for n in REGISTRY if REGISTRY.origin(n) == "fedcomposite" and REGISTRY[n].recordable]


class Gradients:
    """Gradients that tell steps, clients and full ones apart."""

    cohort = CLIENTS
    position = torch.arange(CLIENTS).unsqueeze(1)

    def __call__(self, x, k):
        return torch.sin(x * (k + 1)) + self.position

    def full(self, x):
        return torch.cos(x) - self.position


def given(method, h, seed=0):
    """A message and states as in the middle of a run."""
    generator = torch.Generator().manual_seed(seed)
    server, client = method.init(torch.randn(DIMENSION, dtype=torch.float64, generator=generator), h)

    def shaken(t):
        return t + 0.1 * torch.rand(t.shape, dtype=torch.float64, generator=generator) if t.is_floating_point() else t

    message = messages.each(messages.stack(method.broadcast(server), CLIENTS), torch.Tensor.contiguous)
    return message, messages.each(messages.stack(client, CLIENTS), shaken)


def flat(parts):
    return [t for part in parts for t in part]


@pytest.mark.parametrize("name", METHODS)
def test_a_cut_round_is_the_rule(name):
    h = L1(0.2).on([True] * 4 + [False] * 2)
    method = REGISTRY[name].auto(1.0, local_steps=4)
    fused = Fused(method, *given(method, h), h, compile=lambda stretch: stretch)
    for seed in (0, 1):
        message, clients = given(method, h, seed)
        before = [t.clone() for t in flat((message, clients))]
        expected = method.local_round(message, clients, Gradients(), h)
        found = fused(message, clients, Gradients(), h)
        assert [type(part) for part in found] == [type(part) for part in expected]
        for a, b in zip(flat(found), flat(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
        for a, b in zip(flat((message, clients)), before, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("make", [lambda k, s: FedNMap(k, s, gamma=0.3), lambda k, s: Zhang(k, s)])
def test_steps_of_one_kind_are_compiled_once(make):
    """Neither more local steps nor other sizes of them need another function."""
    h, seen, counts = MCP(0.2, 4.0), [], []

    def compile(stretch):
        seen.append(stretch)
        return stretch

    for steps, step in ((4, 0.1), (12, 0.1), (4, 0.05)):
        method = make(steps, step)
        Fused(method, *given(method, h), h, compile)
        counts.append(len(seen))
    assert counts[0] == counts[1] == counts[2] <= 4


@pytest.mark.parametrize("name", METHODS)
def test_compiled_programs_count_and_compute_as_eager_rounds(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    method = REGISTRY[name].auto(L=0.25, local_steps=3)
    sims = [Simulator(small_problem(method), method, batches=Batches(0, 4), mode=mode) for mode in ("eager", "compile")]
    for sim in sims:
        for _ in range(3):
            sim.step()
    (recorded,) = sims[1].transport._programs.values()
    assert isinstance(recorded._local_round, Fused)
    torch.testing.assert_close(sims[1].solution, sims[0].solution, rtol=0, atol=1e-12)
    assert sims[1].counter == sims[0].counter


@pytest.mark.parametrize(
    "h",
    [
        L1(0.2, weights=(1.0, 2.0, 0.5, 1.0, 3.0, 1.0)),
        GroupLasso(0.2, groups=2),
        Blocks.of(L1(0.2).on(range(2)), MCP(0.1, 4.0).on(range(3, 5))),
    ],
    ids=str,
)
def test_terms_that_were_never_called_are_cut_and_compiled(h):
    """What a formula makes at its first call and keeps is made before operations are listed."""
    method = FedNMap(3, 0.1, gamma=0.3)
    other = dataclasses.replace(h)
    whole = functools.partial(torch.compile, backend="eager", fullgraph=True)
    fused = Fused(method, *given(method, L1(0.1)), other, compile=whole)
    message, clients = given(method, L1(0.1), 1)
    expected = method.local_round(message, clients, Gradients(), h)
    for a, b in zip(flat(fused(message, clients, Gradients(), other)), flat(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
