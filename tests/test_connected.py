"""Whole filters as zeros: all that goes with a channel dies together, and what dies is what frees most for least."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import fedcomposite as fc
from fedcomposite.algorithms import FedMid, FedNMap
from fedcomposite.problems import Batches
from fedcomposite.regularizers import connected as module_of_units
from fedcomposite.regularizers.connected import Connected, FilterTarget, Piece
from fedcomposite.runtime import Simulator


class Residual(nn.Module):
    """A stem and two blocks that add to its channels, then a smaller image."""

    def __init__(self, width=12, inner=16):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.first = nn.ModuleList(nn.Conv2d(width, inner, 3, padding=1) for _ in range(2))
        self.second = nn.ModuleList(nn.Conv2d(inner, width, 3, padding=1) for _ in range(2))
        self.down, self.head = nn.Conv2d(width, 2 * width, 3, 2, padding=1), nn.Linear(2 * width, 3)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        for first, second in zip(self.first, self.second, strict=True):
            x = (x + second(first(x).relu())).relu()
        return self.head(self.down(x).relu().mean((2, 3)))


@pytest.fixture(scope="module")
def images():
    X = torch.randn(4, 20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = (X.mean((2, 3, 4)) * 20).long().clamp(-1, 1) + 1
    return fc.Silos.from_arrays([(X[i], y[i]) for i in range(4)], test=(X[0], y[0]))


def problem_of(images, **sizes):
    torch.manual_seed(0)
    return fc.Problem(images, model=Residual(**sizes))


def by_hand(connected, v, entries):
    """One unit after another, by what it is worth, until the next one is too much."""
    size = {p: v[p.start : p.stop].reshape(p.shape) ** 2 for p in connected.pieces}
    lines = {u: [] for u in range(len(connected.moved))}  # of each unit: piece, axis, places
    for p, axis in itertools.product(connected.pieces, (0, 1)):
        labels = np.array((p.rows, p.columns)[axis])
        for u in set(labels.tolist()) - {-1}:
            lines[u].append((p, axis, np.flatnonzero(labels == u)))
    part = {u: sum(size[p].take(at, axis).sum() / size[p].sum() for p, axis, at in found) for u, found in lines.items()}
    kinds = {}
    for u, found in lines.items():
        kinds.setdefault(tuple((p.start, axis, len(at)) for p, axis, at in found), []).append(u)
    worth, cost = {}, connected.cost
    for kind, members in kinds.items():
        members.sort(key=lambda u: -part[u])
        steps = module_of_units.STEPS if len(members) >= module_of_units.MANY else 1
        value = [part[u] / sum(part[w] for w in members[: r + 1]) * len(kind) / cost[u] for r, u in enumerate(members)]
        for r, u in enumerate(members):
            middle = value[min(r // steps * steps + steps // 2, len(members) - 1)]
            worth[u] = np.inf if r < steps else middle * (1 - 1e-5 * (r % steps))

    def left(units):
        lines = [(np.isin(labels, [*units, -1]).sum() for labels in (p.rows, p.columns)) for p in connected.pieces]
        return sum(rows * columns * p.shape[2] for (rows, columns), p in zip(lines, connected.pieces, strict=True))

    alive = {u for u in worth if worth[u] == np.inf}
    tried = sorted(worth, key=lambda u: -worth[u])
    for _ in range(2):  # the second time without the kinds of which one unit more is too much
        for u in tried:
            if left({*alive, u}) > entries:
                break
            alive.add(u)
        small = [m for m in kinds.values() if left({*alive, next((u for u in m if u not in alive), m[0])}) <= entries]
        tried = [u for u in tried if any(u in members for members in small)]
    return [u in alive for u in range(len(connected.moved))]


@pytest.mark.parametrize(("share", "width"), [(0.3, 12), (0.6, 12), (0.8, 12), (0.6, 64)])
def test_units_stay_as_by_hand(share, width, images):
    h = problem_of(images, width=width).with_zeros(share, "filters").regularizer
    v = torch.randn(3, h.connected.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    v[:, ::7] *= 3
    found, allowed = h.alive(v), np.float32(h._kept_share) * h._layers.entries
    for row, alive in zip(v.numpy(), found.tolist(), strict=True):
        assert alive == by_hand(h.connected, row, allowed)
    torch.testing.assert_close(h.prox(v, 0.1), torch.stack([h.prox(row, 0.1) for row in v]), rtol=0, atol=0)


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_all_zeros_are_cut_out(share, images):
    """Every zero is gone from the pruned network, channels that are added among them, and it says the same."""
    problem = problem_of(images, width=64, inner=64)
    x = problem.with_zeros(share, "filters").regularizer.prox(problem.smooth(torch.float64).start(), 0.1)
    assert abs(float((x == 0).double().mean()) - share) < 0.01
    module = problem.module(x)
    made = fc.prune(module, torch.randn(4, 1, 8, 8, dtype=torch.float64))
    assert not made.kept
    assert sum((p == 0).sum() for p in made.module.parameters() if p.ndim > 1) == 0
    sizes = {layer.name: layer.pruned for layer in made.layers}
    assert sizes["stem"][0] == sizes["second.0"][0] == sizes["second.1"][0] == sizes["down"][1] < 64


def test_transposed_convolutions_have_units_on_both_sides(images):
    up = nn.Sequential(
        nn.Conv2d(1, 16, 2, 2), nn.ReLU(), nn.ConvTranspose2d(16, 12, 2, 2), nn.ReLU(), nn.Conv2d(12, 3, 1)
    )
    pixels = images.features.flatten(1).abs().long().clamp(max=2).reshape(-1, 8, 8)
    problem = fc.Problem(fc.Silos.from_arrays([(images.features, pixels)]), model=up)
    x = problem.with_zeros(0.5, "filters").regularizer.prox(problem.smooth(torch.float32).start(), 0.1)
    assert abs(float((x == 0).double().mean()) - 0.5) < 0.06
    made = fc.prune(problem.module(x), images.features[:4])
    assert not made.kept
    sizes = {layer.name: layer.pruned[:2] for layer in made.layers}
    assert sizes["2"] == (sizes["0"][0], sizes["4"][1])
    assert sizes["2"] < (16, 12)


def test_what_takes_longer_goes_first():
    """Two layers of the same weights: the one that is used more often ends up smaller; nothing depends on scales."""
    pieces = tuple(
        Piece(100 * i, 100 * (i + 1), (10, 10, 1), tuple(range(10 * i, 10 * i + 10)), (-1,) * 10, uses)
        for i, uses in enumerate((1, 16))
    )
    v = torch.randn(200, generator=torch.Generator().manual_seed(2)).abs() + 1
    alive = {}
    for scale in (1.0, 100.0):
        h = FilterTarget(0.5, "filters", connected=Connected(pieces, (0.0,) * 20, 200)).resolve([])
        alive[scale] = h.alive(torch.cat([v[:100], scale * v[100:]]))
    assert torch.equal(alive[1.0], alive[100.0])
    assert int(alive[1.0][:10].sum()) > int(alive[1.0][10:].sum()) > 0
    moved = FilterTarget(0.5, "filters", connected=Connected(pieces, (10.0,) * 10 + (0.0,) * 10, 200)).resolve([])
    assert int(moved.alive(v)[:10].sum()) < int(moved.alive(v)[10:].sum())


def test_not_a_number_stays(images):
    h = problem_of(images).with_zeros(0.5, "filters").regularizer
    v = torch.ones(h.connected.dimension)
    v[3] = torch.nan
    assert bool(h.prox(v, 0.1)[3].isnan())


def test_it_is_trained_cut_and_recorded(images, monkeypatch):
    problem = problem_of(images)
    run = fc.simulate(
        problem, FedMid(2, 0.05, server_prox_only=True), rounds=8, batch_size=5, sparsity=0.7, structure="filters"
    )
    assert abs(run.history[-1].sparsity - 0.7) < 0.02
    made = fc.prune(problem.module(run.solution, run.buffers), torch.randn(2, 1, 8, 8))
    assert made.pruned_parameters <= int((run.solution != 0).sum())
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    target, found = problem.with_zeros(0.7, "filters", rounds=6), []
    for way in ("eager", "record"):
        sim = Simulator(target, FedNMap(2, 0.1, gamma=1.0), batches=Batches(0, 8), dtype=torch.float64, mode=way)
        for _ in range(6):
            sim.step()
        found.append(sim.solution)
    assert len(sim.transport._programs) == 1
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.a(x.flatten(1))
        return self.b(x.relu() if x.sum() > 0 else x)


def test_networks_that_cannot_be(images):
    for model, told in ((Branch(), "listed"), (nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), "no filter")):
        with pytest.raises(ValueError, match=told):
            fc.Problem(images, model=model).with_zeros(0.5, "filters")
    with pytest.raises(ValueError, match="do without"):
        problem_of(images, width=64).with_zeros(0.99, "filters")
    with pytest.raises(ValueError, match="network"):
        fc.Problem(fc.data.load("synthetic", clients=2, features=4, samples=9)).with_zeros(0.5, "filters")
