"""A share of zeros by one number: exact where it can be, the same everywhere, and growing with the rounds."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import fedcomposite as fc
from fedcomposite.algorithms import REGISTRY, FedAvg, FedMid, FedNMap, Scaffold
from fedcomposite.errors import DeadNetworkWarning
from fedcomposite.experiments.config import Config
from fedcomposite.problems import Batches
from fedcomposite.regularizers import L1, L2Squared, SparsityTarget, TopK, Zero
from fedcomposite.regularizers import target as module_of_target
from fedcomposite.runtime import Simulator

LAYOUT = [("a", 0, 12, (3, 4)), ("bias", 12, 15, (3,)), ("b", 15, 45, (6, 5))]


def network(silos, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    return fc.Problem(silos, model=model, loss="cross_entropy", **options)


@pytest.fixture(scope="module")
def silos():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4, 30, 5))
    y = (X @ rng.normal(size=(5, 3))).argmax(-1)
    return fc.Silos.from_arrays([(X[i], y[i]) for i in range(4)], test=(X[0], y[0]))


def by_hand(v, share, layout, floor):
    """Sort everything: protected entries first, then the largest of the rest."""
    weights = [(a, b, s) for _, a, b, s in layout if len(s) > 1]
    n, d = sum(b - a for a, b, _ in weights), layout[-1][2]
    keep = 1 - share * d / n
    spread = [sum(s) / np.prod(s) for *_, s in weights]
    scale = n / sum(e * (b - a) for e, (a, b, _) in zip(spread, weights, strict=True))
    kept = np.zeros(d, dtype=bool)
    for e, (a, b, _) in zip(spread, weights, strict=True):
        least = min(b - a, int(np.ceil(np.float32(keep * floor * scale * e * (b - a)))))
        kept[a + np.argsort(-np.abs(v[a:b]), kind="stable")[:least]] = True
    rest = [i for a, b, _ in weights for i in range(a, b) if not kept[i]]
    rest.sort(key=lambda i: -abs(v[i]))
    kept[rest[: int(np.float32(keep) * n) - kept.sum()]] = True
    outside = np.ones(d, dtype=bool)
    for a, b, _ in weights:
        outside[a:b] = False
    return np.where(kept | outside, v, 0.0)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_the_largest_entries_stay(share):
    h = SparsityTarget(share).resolve(LAYOUT)
    v = torch.randn(20, 45, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = h.prox(v, 0.3)
    wanted = [by_hand(row.numpy(), share, LAYOUT, module_of_target.PROTECTED) for row in v]
    torch.testing.assert_close(found, torch.from_numpy(np.stack(wanted)), rtol=0, atol=0)
    torch.testing.assert_close(found, torch.stack([h.prox(row, 0.3) for row in v]), rtol=0, atol=0)


@pytest.mark.parametrize(("share", "pattern"), [(0.2, False), (0.475, True), (0.7, True)])
def test_two_of_every_four_stay(share, pattern):
    """The smaller two of a block go first, the smallest of them first; what is left of the share is single weights."""
    layout = [("a", 0, 96, (4, 6, 4)), ("odd", 96, 106, (2, 5)), ("b", 106, 186, (10, 8))]
    whole = SparsityTarget(max(share, 0.48), "2:4").resolve(layout)
    h = dataclasses.replace(whole, share=share)  # as on the way there
    v = torch.randn(20, 186, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = h.prox(v, 0.3)
    weights = np.r_[0:96, 106:186]
    for row, zeros in zip(v.numpy(), (found == 0).numpy(), strict=True):
        blocks, gone = np.abs(row[weights]).reshape(-1, 4), zeros[weights].reshape(-1, 4)
        smaller = np.argsort(np.argsort(blocks)) < 2
        assert not zeros[96:106].any()
        if pattern:
            assert gone[smaller].all()
        else:
            assert (gone == (smaller & (blocks < np.sort(blocks[smaller])[gone.sum()]))).all()
        assert gone.sum() == pytest.approx(share * 186, abs=1)
    large = SparsityTarget(0.5, "2:4").resolve([("a", 0, 40_000, (200, 200)), ("bias", 40_000, 40_200, (200,))])
    zeros = large.prox(torch.randn(40_200, generator=torch.Generator().manual_seed(3)), 0.1)[:40_000] == 0
    assert bool((zeros.reshape(-1, 4).sum(-1) >= 2).all())
    assert abs(float(zeros.sum()) / 40_200 - 0.5) < 0.005


def test_structures_that_cannot_be():
    with pytest.raises(TypeError, match="network"):
        SparsityTarget(0.5, "filters").resolve([("a", 0, 12, (3, 4))])
    with pytest.raises(ValueError, match="multiple of four"):
        SparsityTarget(0.5, "2:4").resolve([("a", 0, 15, (3, 5))])
    with pytest.raises(ValueError, match=r"0\.4445 or more"):
        SparsityTarget(0.3, "2:4").resolve([("a", 0, 16, (4, 4)), ("bias", 16, 18, (2,))])


@pytest.mark.parametrize(("structure", "share"), [("filters", 0.6), ("2:4", 0.55)])
def test_runs_with_a_structure(structure, share, silos):
    """Reached with some of the clients; whole filters are cut out without a change of what the network says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    problem = fc.Problem(silos, model=model, loss="cross_entropy")
    method = FedNMap(2, 0.1, gamma=1.0, partial_participation=True)
    run = fc.simulate(
        problem,
        method,
        rounds=20,
        batch_size=8,
        participation=0.5,
        sparsity=share,
        structure=structure,
        dtype=torch.float64,
    )
    assert abs(run.history[-1].sparsity - share) < 0.02
    if structure == "2:4":
        zeros = run.solution[64 * 5 + 64 : 64 * 5 + 64 + 64 * 64].reshape(-1, 4) == 0
        assert bool((zeros.sum(-1) >= 2).all())
        return
    trained, X = problem.module(run.solution).double(), torch.randn(7, 5, dtype=torch.float64)
    cut = fc.prune(trained, X)
    assert sum(p.numel() for p in cut.module.parameters()) < 0.5 * len(run.solution)
    torch.testing.assert_close(cut.module(X), trained(X))


def test_no_layer_dies_and_h_acts_as_well():
    h = SparsityTarget(0.8, h=L2Squared(2.0)).resolve(LAYOUT)
    v = torch.cat([torch.full((15,), 1e-6), torch.arange(1.0, 31)])
    found = h.prox(v, 0.5)
    assert found[:12].count_nonzero() > 0
    assert torch.equal(found[12:15], v[12:15] / 2)
    assert float(found.max()) == 15.0
    assert float(h.value(found)) == float(L2Squared(2.0).value(found))


def test_not_a_number_stays():
    v = torch.ones(45)
    v[3] = torch.nan
    assert bool(SparsityTarget(0.5).resolve(LAYOUT).prox(v, 0.1)[3].isnan())


def test_large_layers_are_sampled_within_a_point(monkeypatch):
    monkeypatch.setattr(module_of_target, "SAMPLED", 4096)
    layout = [("a", 0, 60_000, (200, 300)), ("b", 60_000, 100_000, (200, 200))]
    h = SparsityTarget(0.95).resolve(layout)
    v = torch.randn(3, 100_000, generator=torch.Generator().manual_seed(0))
    zeros = (h.prox(v, 0.1) == 0).float().mean(-1)
    assert bool(((zeros - 0.95).abs() < 0.005).all())


METHODS = [
    name for name, cls in REGISTRY.items() if cls.info.regularizer == "weakly convex" and not cls.info.second_order
]


def made(name, cls):
    fields = {"local_steps": 2, "step": 0.05, "server_step": 0.1, "gamma": 0.5, "partial_participation": True,
              "prox_step": 0.2, "alpha": 1.0, "p": 0.5}  # fmt: skip
    known = {f.name for f in dataclasses.fields(cls)}
    if "local_steps" in known and name == "ProxScaffnew":
        fields.pop("p")
    return cls(**{k: v for k, v in fields.items() if k in known})


@pytest.mark.parametrize("name", METHODS)
def test_every_method_with_a_prox_reaches_the_share(name, silos):
    method = made(name, REGISTRY[name])
    share = 0.5 if method.partial else 1.0
    run = fc.simulate(
        network(silos), method, rounds=20, batch_size=8, participation=share, sparsity=0.6, evaluate_every=5
    )
    assert abs(run.history[-1].sparsity - 0.6) < 0.01
    assert run.history[1].sparsity < 0.6


def test_methods_without_a_prox_refuse(silos):
    with pytest.raises(TypeError, match="prox"):
        fc.simulate(network(silos), Scaffold(2, 0.1), rounds=2, sparsity=0.5)


@pytest.mark.parametrize("structure", ["weights", "filters"])
def test_fedavg_trains_the_weights_that_are_left(silos, structure):
    """Gradual pruning by hand: autograd with masked gradients at each client, the largest entries at the server."""
    problem = network(silos, regularizer=L2Squared(0.01).on("*"))
    with torch.no_grad():
        problem.model[2].weight[:, 0] = 0.0  # a start may have zeros, and these may move
    run = fc.simulate(
        problem, FedAvg(3, 0.1), rounds=9, keep_solutions=True, dtype=torch.float64, sparsity=0.4, structure=structure
    )
    target = dataclasses.replace(problem.with_zeros(0.4, structure, rounds=9).regularizer, h=Zero())
    weights = torch.cat([torch.full((s.stop - s.start,), len(s.shape) > 1) for s in problem.layout])
    net, x = copy.deepcopy(problem.model).double(), run.solutions[0]
    for r in range(9):
        now = target.during(r)
        left = (x != 0) | ~weights | (now.prox(torch.where(x == 0, 1e-300, x), 0.0) != 0)
        ends = []
        for X, y in zip(silos.features.split(30), silos.targets.split(30), strict=True):
            z = x.clone()
            for _ in range(3):
                torch.nn.utils.vector_to_parameters(z, net.parameters())
                loss = nn.functional.cross_entropy(net(X.double()), y)
                g = torch.cat([p.flatten() for p in torch.autograd.grad(loss, list(net.parameters()))])
                z = z - 0.1 * left * (g + 0.01 * z)
            ends.append(z)
        x = now.prox(torch.stack(ends).mean(0), 0.0)
        torch.testing.assert_close(run.solutions[r + 1], x, rtol=0, atol=1e-8)
    assert abs(run.history[-1].sparsity - 0.4) < (0.02 if structure == "weights" else 0.1)
    if structure == "weights":
        assert (run.solutions[1][problem.layout[2].start : problem.layout[2].stop : 8] != 0).sum() >= 2


def test_shares_that_cannot_be(silos):
    with pytest.raises(ValueError, match="weights"):
        fc.simulate(network(silos), FedMid(2, 0.1), rounds=2, sparsity=0.95)
    with pytest.raises(ValueError, match="sparsity"):
        fc.simulate(network(silos), FedMid(2, 0.1), rounds=2, sparsity=1.5)
    ramped = network(silos, regularizer=L1(0.1).ramped(fc.schedules.Ramp(0.1, 1.0, rounds=3)))
    with pytest.raises(ValueError, match="ramp"):
        fc.simulate(ramped, FedMid(2, 0.1), rounds=2, sparsity=0.5)


def test_a_resumed_run_has_the_same_bits(silos, tmp_path):
    method = FedNMap(2, 0.1, gamma=1.0, partial_participation=True)
    options = {"rounds": 12, "batch_size": 8, "participation": 0.5, "sparsity": 0.7}
    whole = fc.simulate(network(silos), method, **options)

    def stop(view):
        if view.round == 6:
            view.stop("enough")

    path = tmp_path / "state"
    fc.simulate(network(silos), method, checkpoint=path, callbacks=[stop], **options)
    again = fc.simulate(network(silos), method, checkpoint=path, resume=True, **options)
    assert again.rounds == 12
    assert torch.equal(again.solution, whole.solution)


@pytest.mark.parametrize("mode", ["record", "compile"])
def test_a_recorded_run_needs_one_program(mode, silos, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    problem = network(silos).with_zeros(0.7, rounds=10)
    found = []
    for way in ("eager", mode):
        sim = Simulator(problem, FedNMap(2, 0.1, gamma=1.0), batches=Batches(0, 8), dtype=torch.float64, mode=way)
        for _ in range(10):
            sim.step()
        found.append(sim.solution)
    assert len(sim.transport._programs) == 1
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    assert abs(float((found[1] == 0).double().mean()) - 0.7) < 0.01


def test_linear_models_have_the_knob_as_well(silos):
    run = fc.simulate(fc.Problem(silos, loss="multinomial", bias=True), FedMid(2, 0.1), rounds=10, sparsity=0.5)
    assert abs(run.history[-1].sparsity - 0.5) < 0.06  # 15 weights and 3 intercepts


def test_it_is_what_it_was_after_copies_and_scaling():
    h = SparsityTarget(0.5, h=L1(0.1)).resolve(LAYOUT)
    v = torch.randn(45)
    assert torch.equal(copy.deepcopy(h).prox(v, 1.0), h.prox(v, 1.0))
    assert h.scaled(2.0).h == L1(0.2)
    assert h == dataclasses.replace(h)
    assert SparsityTarget(0.5).h == Zero()


def test_a_dead_network_ends_the_run(silos, tmp_path):
    """A constraint that takes a whole layer: no status that looks sound, and a warning that says what to change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[2].weight *= 1e-3
    problem = fc.Problem(silos, model=model, regularizer=TopK(20).on("*.weight"))
    with pytest.warns(DeadNetworkWarning, match="2.weight"):
        run = fc.simulate(problem, FedMid(1, 1e-6), rounds=10, batch_size=8)
    assert (run.status, run.rounds) == ("dead", 1)
    with pytest.warns(DeadNetworkWarning, match="same for all"):
        fc.prune(problem.module(run.solution), torch.randn(4, 5))
    with pytest.warns(DeadNetworkWarning, match="2.weight") as told:
        fc.export(problem, run, tmp_path / "dead.pt", pruned=True)
    assert len(told) == 1
    assert "dead" not in fc.simulate(network(silos), FedMid(1, 0.1), rounds=3, batch_size=8, sparsity=0.7).message


def test_an_experiment_file_has_the_knob(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(
        """
        [data]
        name = "digits"
        test = 0.2
        [partition]
        name = "iid"
        clients = 3
        [model]
        name = "mlp"
        options = { hidden = [16] }
        [algorithm]
        name = "FedMid"
        local_steps = 2
        step = 0.05
        [run]
        rounds = 10
        batch_size = 16
        sparsity = 0.8
        evaluate_every = 10
        """
    )
    config = Config.read(path, rounds=True)
    problem = config.make_problem()
    settings = {k: v for k, v in config.settings().items() if k != "checkpoint_every"}
    run = fc.simulate(problem, config.make_algorithm(config.specs[0], problem), **settings)
    assert abs(run.history[-1].sparsity - 0.8) < 0.01
    assert isinstance(problem.regularizer, SparsityTarget)
