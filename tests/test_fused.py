"""What a method does between two gradients, listed and cut: the same numbers as its rule."""

import pytest
import torch

from fedcomposite.algorithms import REGISTRY, FedNMap, Zhang
from fedcomposite.regularizers import L1, MCP
from fedcomposite.runtime import messages
from fedcomposite.runtime.program.fused import Fused

CLIENTS, DIMENSION = 3, 6
OWN = [n for n in REGISTRY if REGISTRY.origin(n) == "fedcomposite" and REGISTRY[n].recordable]
METHODS = [n for n in OWN if n != "EControlDA"]  # reads a number in every round, so that it is not recorded


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


@pytest.mark.parametrize("make", [lambda k: FedNMap(k, 0.1, gamma=0.3), lambda k: Zhang(k, 0.1)])
def test_steps_of_one_kind_are_compiled_once(make):
    h = MCP(0.2, 4.0)
    counts = []
    for steps in (4, 12):
        seen = []
        method = make(steps)
        Fused(method, *given(method, h), h, compile=lambda stretch, seen=seen: seen.append(stretch) or stretch)
        counts.append(len(seen))
    assert counts[0] == counts[1] <= 4
