"""Networks over clients, against ``loss.backward()`` on a deep copy of the module per client."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fedcomposite as fc
from fedcomposite.algorithms import REGISTRY
from fedcomposite.models import build
from fedcomposite.problems import Batches, ClientGradients, Counter
from fedcomposite.problems.base import RoundInputs
from fedcomposite.problems.network import LoopWarning
from fedcomposite.runtime.simulator import Simulator

pytestmark = pytest.mark.usefixtures("double")

DTYPE = torch.float64
L1 = fc.regularizers.L1


def make_silos(shape=(6,), sizes=(9, 5, 7), classes=3, seed=0, test=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(m):
        X = torch.randn(m, *shape, generator=generator, dtype=torch.float64)
        return X.to(dtype), torch.randint(0, classes, (m,), generator=generator)

    return fc.Silos.from_arrays([draw(m) for m in sizes], test=draw(test))


def small(normed=False, features=6, classes=3):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(5)] if normed else []
    return nn.Sequential(nn.Linear(features, 5), *middle, nn.Tanh(), nn.Linear(5, classes))


def fill(module, x):
    """Parameters from a flat vector, by hand."""
    at = 0
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(x[at : at + p.numel()].view(p.shape))
            at += p.numel()
    return module


def backward(module, x, X, y, loss=nn.functional.cross_entropy):
    """Gradient, and the module after a pass in training mode."""
    own = fill(copy.deepcopy(module).to(x.dtype).train(), x)
    own.zero_grad()
    loss(own(X.to(x.dtype)), y).backward()
    return torch.cat([p.grad.flatten() for p in own.parameters()]), own


def flat_buffers(module, dtype):
    kept = module.state_dict()
    found = [b.flatten().to(dtype) for k, b in module.named_buffers() if k in kept]
    return torch.cat(found) if found else torch.zeros(0, dtype=dtype)


def points(problem, n, dtype=DTYPE, spread=0.02):
    generator = torch.Generator().manual_seed(5)
    x = problem.smooth(dtype).start()
    return x + spread * torch.randn(n, len(x), generator=generator, dtype=torch.float64).to(dtype)


CASES = {
    "mlp": ((1, 8, 8), {}, (5, 5, 5), 4),
    "cnn": ((1, 8, 8), {}, (5, 5, 5), 4),
    "resnet18": ((3, 32, 32), {}, (6, 6), 6),
    "mobilenetv3-small": ((3, 64, 64), {"dropout": 0.0}, (6, 6), 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("mode", ["vmap", "loop"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_buffers_equal_backward(name, mode, dtype):
    shape, options, sizes, batch = CASES[name]
    silos = make_silos(shape, sizes)
    module = build(name, silos, **options)
    problem = fc.Problem(silos, model=module, gradients=mode)
    smooth, n = problem.smooth(dtype), len(sizes)
    x = points(problem, n, dtype, spread=0.002)
    local = RoundInputs(smooth.buffers().repeat(n, 1), smooth.ids)
    rows = torch.from_numpy(smooth.offsets.astype(np.int64))[:, None] + torch.arange(batch)
    found = smooth.during(local).minibatch(x, rows)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for i in range(n):
        wanted, after = backward(module, x[i], *(t[:batch] for t in silos[i]))
        assert (found[i] - wanted).norm() <= tolerance * wanted.norm()
        buffers = flat_buffers(after, dtype)
        assert (local.buffers[i] - buffers).norm() <= tolerance * buffers.norm()
    assert problem.dimension == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("mode", ["auto", "vmap", "loop"])
def test_full_gradients_of_unequal_silos(mode, normed, monkeypatch):
    monkeypatch.setattr("fedcomposite.problems.network.gradients._PIECE", 8)
    silos, module = make_silos(sizes=(21, 2, 7, 8, 16)), small(normed)
    problem = fc.Problem(silos, model=module, gradients=mode)
    x = points(problem, 5)
    local = RoundInputs(problem.smooth().buffers().repeat(5, 1), problem.smooth().ids)
    found = problem.smooth().during(local).full(np.arange(5, dtype=np.uint64))(x)
    for i in range(5):
        wanted, after = backward(module, x[i], *silos[i])
        torch.testing.assert_close(found[i], wanted, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(local.buffers[i], flat_buffers(after, DTYPE), rtol=1e-12, atol=1e-14)


def mean_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def test_callable_that_gives_a_mean():
    silos, module = make_silos(), small()
    problem = fc.Problem(silos, model=module, loss=mean_loss)
    x = points(problem, 3)
    found = problem.smooth().full(np.arange(3, dtype=np.uint64))(x)
    for i in range(3):
        wanted, _ = backward(module, x[i], *silos[i], mean_loss)
        torch.testing.assert_close(found[i], wanted, rtol=1e-10, atol=1e-13)
    at = x[0]
    mean = torch.stack([backward(module, at, *silos[i], mean_loss)[0] for i in range(3)]).mean(0)
    seen = problem.evaluate(at)
    torch.testing.assert_close(seen.gradient, mean, rtol=1e-10, atol=1e-13)
    assert "train_accuracy" in seen.metrics


def test_chunks_do_not_matter():
    silos, module = make_silos(), small(normed=True)
    found = []
    for chunk in (None, 1, 2):
        problem = fc.Problem(silos, model=module, chunk=chunk, gradients="vmap")
        x = points(problem, 3)
        local = RoundInputs(problem.smooth().buffers().repeat(3, 1), problem.smooth().ids)
        found.append((problem.smooth().during(local).minibatch(x, torch.tensor([[0, 1], [9, 10], [14, 15]])), local))
    for gradient, local in found[1:]:
        torch.testing.assert_close(gradient, found[0][0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(local.buffers, found[0][1].buffers, rtol=1e-12, atol=1e-14)


def test_the_rule_depends_on_shapes_only():
    silos = make_silos((1, 8, 8))
    names = "mlp", "cnn", "mobilenetv3-small"
    modes = {name: fc.Problem(silos, model=build(name, silos)).smooth(torch.float32).gradients.mode for name in names}
    assert [modes["mlp"](10, b) for b in (1, 64)] == ["vmap", "vmap"]
    assert [modes["cnn"](10, b) for b in (1, 64)] == ["vmap", "vmap"]
    double = fc.Problem(silos, model=build("cnn", silos)).smooth(torch.float64).gradients.mode
    assert [double(10, b) for b in (12, 13)] == ["vmap", "loop"]
    assert [modes["mobilenetv3-small"](m, 2) for m in (1, 10)] == ["loop", "loop"]
    assert modes["mlp"](1, 4) == "loop"


# -- the same as linear models --------------------------------------------------------------------------------------


def half_squares(outputs, targets):
    return (outputs[:, 0] - targets).square() / 2


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("batch", [None, 3])
def test_linear_module_equals_linear_problem(weights, batch):
    silos = make_silos()
    silos = fc.Silos.from_arrays([(X, y.double()) for X, y in (silos[i] for i in range(3))])
    module = nn.Linear(6, 1, bias=False)
    a = fc.Problem(silos, loss="least_squares", regularizer=L1(0.01), weights=weights)
    b = fc.Problem(silos, model=module, loss=half_squares, regularizer=L1(0.01), weights=weights)
    method = fc.algorithms.Zhang(local_steps=3, step=0.05, server_step=1.0)
    one, two = (
        fc.simulate(
            p, method, rounds=5, batch_size=batch, x0=torch.zeros(6), keep_solutions=True, stationarity_step=0.1
        )
        for p in (a, b)
    )
    torch.testing.assert_close(one.solutions, two.solutions, rtol=1e-10, atol=1e-13)
    for r, s in zip(one.history, two.history, strict=True):
        for key in ("objective", "loss", "stationarity", "nonzeros", "bytes_up", "bytes_down", "gradient_evaluations"):
            assert r[key] == pytest.approx(s[key], rel=1e-9, abs=1e-12)
    mse = fc.Problem(silos, model=module, loss="mse", weights=weights)
    assert 2 * a.evaluate(one.solution).loss == pytest.approx(float(mse.evaluate(one.solution).loss), rel=1e-12)


# -- rounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_trains_a_network(name):
    method = REGISTRY[name].auto(L=10.0, local_steps=2)
    h = None if method.info.regularizer == "none" else L1(1e-3)
    problem = fc.Problem(make_silos(), model=small(normed=True), regularizer=h)
    if method.info.second_order:
        with pytest.raises(TypeError, match="a network offers gradients only"):
            fc.simulate(problem, method, rounds=1)
        return
    one, two = (fc.simulate(problem, method, rounds=2, batch_size=4, backend=b) for b in ("stacked", "loop"))
    torch.testing.assert_close(one.solution, two.solution, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(one.buffers, two.buffers, rtol=1e-9, atol=1e-12)
    start = fc.simulate(problem, method, rounds=0).solution
    assert not torch.equal(one.solution, start)


@pytest.mark.parametrize("participation", [1.0, 0.7])
def test_resume_with_batch_norm_is_exact(tmp_path, participation):
    problem = fc.Problem(make_silos(), model=small(normed=True), regularizer=L1(1e-3))
    method = fc.algorithms.FedAvg(local_steps=3, step=0.1)
    settings = {"batch_size": 4, "participation": participation, "dtype": torch.float32}
    whole = fc.simulate(problem, method, rounds=5, **settings)
    for rounds in (2, 5):
        fresh = fc.Problem(make_silos(), model=small(normed=True), regularizer=L1(1e-3))
        parts = fc.simulate(fresh, method, rounds=rounds, checkpoint=tmp_path / "state", resume=True, **settings)
    assert torch.equal(whole.solution, parts.solution)
    assert torch.equal(whole.buffers, parts.buffers)
    for a, b in zip(whole.history, parts.history, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    other = fc.Problem(make_silos(), model=small(normed=True), regularizer=L1(1e-3), gradients="loop")
    shifted = small(normed=True)
    shifted[1].running_mean += 1
    for problem in (other, fc.Problem(make_silos(), model=shifted, regularizer=L1(1e-3))):
        with pytest.raises(fc.CheckpointError, match="other data, method or settings"):
            fc.simulate(problem, method, rounds=5, checkpoint=tmp_path / "state", resume=True, **settings)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_buffers_are_averaged_counted_and_used(weights):
    silos, module = make_silos(), small(normed=True)
    problem = fc.Problem(silos, model=module, weights=weights)
    run = fc.simulate(problem, fc.algorithms.FedAvg(local_steps=1, step=0.1), rounds=1)
    x0 = problem.smooth().start()
    own = torch.stack([flat_buffers(backward(module, x0, *silos[i])[1], DTYPE) for i in range(3)])
    shares = torch.tensor([1, 1, 1] if weights == "uniform" else [9, 5, 7], dtype=DTYPE)
    torch.testing.assert_close(run.buffers, shares @ own / shares.sum(), rtol=1e-12, atol=1e-14)
    assert run.buffers[-1] == 1  # num_batches_tracked
    b, d = own.shape[1], problem.dimension
    assert run.history[-1].bytes_down == run.history[-1].bytes_up == 3 * 8 * (d + b)
    trained = problem.module(run.solution, run.buffers)
    torch.testing.assert_close(flat_buffers(trained, DTYPE), run.buffers)
    X, y = silos.test
    accuracy = (trained(X.double()).argmax(1) == y).double().mean()
    assert run.history[-1].test_accuracy == pytest.approx(float(accuracy))
    assert torch.equal(problem.predict(run.solution, X, run.buffers), trained(X.double()))
    losses = [nn.functional.cross_entropy(trained(silos[i][0]), silos[i][1]).detach() for i in range(3)]
    assert run.history[-1].loss == pytest.approx(float(shares @ torch.stack(losses) / shares.sum()), rel=1e-12)


def test_clients_on_their_own_give_the_simulators_buffers():
    problem = fc.Problem(make_silos(), model=small(normed=True))
    method = fc.algorithms.FedAvg(local_steps=2, step=0.1)
    sim = Simulator(problem, method, batches=Batches(seed=0, size=3))
    buffers = []
    for i in range(3):
        grad = ClientGradients(
            sim.smooth, np.asarray([i]), 0, sim.batches, Counter(), stacked=False, place=(i, 3), buffers=sim.buffers
        )
        method.local_round(method.broadcast(sim.server), type(sim.clients)(), grad, problem.regularizer)
        buffers.append(grad.buffers)
    sim.step()
    torch.testing.assert_close(sim.buffers, torch.stack(buffers).mean(0), rtol=1e-12, atol=1e-14)


# -- random layers, data --------------------------------------------------------------------------------------------


def dropping():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.ReLU(), nn.Linear(20, 3))


@pytest.mark.parametrize("batch", [None, 4])
def test_dropout_is_a_function_of_the_counters(batch, monkeypatch):
    monkeypatch.setattr("fedcomposite.problems.network.gradients._PIECE", 4)
    problem = fc.Problem(make_silos(), model=dropping())
    method = fc.algorithms.FedAvg(local_steps=2, step=0.1)
    before = torch.get_rng_state()
    one, again, loop, other = (
        fc.simulate(problem, method, rounds=2, batch_size=batch, seed=seed, backend=backend).solution
        for seed, backend in ((0, "stacked"), (0, "stacked"), (0, "loop"), (1, "stacked"))
    )
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, again)
    torch.testing.assert_close(one, loop, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(one, other)
    plain = nn.Sequential(*(m for m in dropping() if not isinstance(m, nn.Dropout)))
    wet = problem.smooth().evaluate(one).loss
    assert wet == fc.Problem(make_silos(), model=plain).smooth().evaluate(one).loss


def test_dropout_masks_differ_between_clients_steps_and_rounds():
    problem = fc.Problem(make_silos(), model=dropping())
    smooth, x = problem.smooth(), points(problem, 1)
    seen = []
    for client, round, step in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        local = RoundInputs(smooth.buffers()[None], np.asarray([client], np.uint64), 0, round, step)
        seen.append(smooth.during(local).minibatch(x, torch.tensor([[0, 1, 2]])))
    for i in range(4):
        for j in range(i):
            assert not torch.equal(seen[i], seen[j])


def jitter(batch):
    return batch + 0.1 * torch.randn(batch.shape, dtype=batch.dtype)


def test_augmentation_draws_from_the_counters():
    runs = []
    for mode in ("vmap", "loop"):
        problem = fc.Problem(make_silos(), model=small(), augment=jitter, gradients=mode)
        runs.append(
            fc.simulate(problem, fc.algorithms.FedAvg(local_steps=2, step=0.1), rounds=2, batch_size=3).solution
        )
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-10, atol=1e-12)
    plain = fc.Problem(make_silos(), model=small())
    clean = fc.simulate(plain, fc.algorithms.FedAvg(local_steps=2, step=0.1), rounds=2, batch_size=3).solution
    assert not torch.allclose(runs[0], clean)


def test_bytes_are_converted_per_batch():
    generator = torch.Generator().manual_seed(0)
    raw = [torch.randint(0, 256, (5, 2, 4, 4), generator=generator, dtype=torch.uint8) for _ in range(3)]
    y = [torch.randint(0, 3, (5,), generator=generator) for _ in range(3)]
    mean, std = (0.2, 0.6), (0.5, 0.25)
    ready = [
        (X.double() / 255 - torch.tensor(mean, dtype=DTYPE).view(2, 1, 1))
        / torch.tensor(std, dtype=DTYPE).view(2, 1, 1)
        for X in raw
    ]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3))
    a = fc.Problem(fc.Silos.from_arrays(zip(raw, y, strict=True)), model=module, normalization=(mean, std))
    b = fc.Problem(fc.Silos.from_arrays(zip(ready, y, strict=True)), model=module)
    c = fc.Problem(fc.Silos.from_arrays(zip(ready, y, strict=True)), model=module, transform=lambda t: 2 * t)
    assert a.smooth().X.dtype == torch.uint8
    method = fc.algorithms.FedAvg(local_steps=2, step=0.1)
    one, two, three = (fc.simulate(p, method, rounds=2, batch_size=3).solution for p in (a, b, c))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(one, three)


def test_token_inputs_stay_integers():
    torch.manual_seed(0)
    silos = fc.Silos.from_arrays([(torch.randint(0, 7, (6, 4)), torch.randint(0, 2, (6,))) for _ in range(2)])
    module = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(12, 2))
    problem = fc.Problem(silos, model=module)
    x = points(problem, 2)
    found = problem.smooth().full(np.arange(2, dtype=np.uint64))(x)
    for i in range(2):
        own = fill(copy.deepcopy(module).double(), x[i])
        nn.functional.cross_entropy(own(silos[i][0]), silos[i][1]).backward()
        torch.testing.assert_close(found[i], torch.cat([p.grad.flatten() for p in own.parameters()]))


# -- modules that vmap refuses --------------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        y = self.layer(x)
        return y if y.sum() > 0 else 2 * y


class Writing(Branching):
    def forward(self, x):
        out = torch.zeros(len(x), 3, dtype=x.dtype)
        out[:, :] = self.layer(x)
        return out


class Functional(Branching):
    def forward(self, x):
        return nn.functional.dropout(self.layer(x), 0.3, self.training)


@pytest.mark.parametrize("kind", [Branching, Writing, Functional])
def test_fallback_to_the_loop_says_so_once(kind):
    torch.manual_seed(0)
    module, silos = kind(), make_silos()
    method = fc.algorithms.FedAvg(local_steps=2, step=0.1)
    problem = fc.Problem(silos, model=module)
    with pytest.warns(LoopWarning, match="one client at a time") as caught:
        stacked = fc.simulate(problem, method, rounds=2, batch_size=3)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forced = fc.simulate(fc.Problem(silos, model=module, gradients="loop"), method, rounds=2, batch_size=3)
    assert torch.equal(stacked.solution, forced.solution)
    if kind is not Functional:
        x = points(problem, 3)
        found = problem.smooth().full(np.arange(3, dtype=np.uint64))(x)
        for i in range(3):
            torch.testing.assert_close(found[i], backward(module, x[i], *silos[i])[0])


# -- evaluation and the regularizer ---------------------------------------------------------------------------------


def test_evaluation_on_all_samples():
    silos, module = make_silos(sizes=(9, 5, 16), test=11), small()
    problem = fc.Problem(silos, model=module, evaluation_samples=None)
    x = points(problem, 1)[0]
    own = fill(copy.deepcopy(module).double().eval(), x)
    losses = torch.stack([nn.functional.cross_entropy(own(X), y) for X, y in (silos[i] for i in range(3))])
    losses.mean().backward()
    seen = problem.evaluate(x)
    torch.testing.assert_close(seen.loss, losses.mean().detach())
    torch.testing.assert_close(seen.gradient, torch.cat([p.grad.flatten() for p in own.parameters()]))
    per = [float((own(X).argmax(1) == y).double().mean()) for X, y in (silos[i] for i in range(3))]
    got = {k: v.item() for k, v in seen.metrics.items()}
    assert got["evaluated_samples"] == 30
    assert got["client_accuracy_min"] == pytest.approx(min(per))
    assert got["client_accuracy_mean"] == pytest.approx(np.mean(per))
    assert got["client_accuracy_max"] == pytest.approx(max(per))
    assert got["train_accuracy"] == pytest.approx(np.average(per, weights=[9, 5, 16]))
    assert got["test_accuracy"] == pytest.approx(float((own(silos.test[0]).argmax(1) == silos.test[1]).double().mean()))


def test_evaluation_on_a_subset_spread_over_clients():
    silos, module = make_silos(sizes=(20, 3, 11), test=50), small()
    problem = fc.Problem(silos, model=module, evaluation_samples=15)
    run = fc.simulate(problem, fc.algorithms.FedAvg(local_steps=1, step=0.1), rounds=1)
    assert run.history[-1].evaluated_samples == 5 + 3 + 5
    x = run.solution
    own = problem.module(x)
    middle = [np.floor((np.arange(c) + 0.5) * m / c).astype(int) for m, c in ((20, 5), (3, 3), (11, 5))]
    losses = [nn.functional.cross_entropy(own(silos[i][0][r]), silos[i][1][r]).detach() for i, r in enumerate(middle)]
    assert run.history[-1].loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-12)


def test_regularizer_leaves_biases_and_norms_alone():
    problem = fc.Problem(make_silos(), model=small(normed=True), regularizer=L1(0.5))
    method = fc.algorithms.Zhang(local_steps=2, step=0.2, server_step=1.0)
    with pytest.warns(fc.errors.DeadNetworkWarning, match=r"0\.weight, 3\.weight"):
        run = fc.simulate(problem, method, rounds=15, batch_size=4, evaluate_every=15)
    assert run.status == "dead"
    table = problem.layers(run.solution).set_index("name")
    assert list(table.index) == [n for n, _ in small(normed=True).named_parameters()]
    assert table.loc["0.weight", "sparsity"] == table.loc["3.weight", "sparsity"] == 1
    assert (table.loc[["1.weight", "3.bias"], "zeros"] == 0).all()
    trained = problem.module(run.solution)
    assert not trained[0].weight.any()
    everything = L1(0.5).on([True] * problem.dimension)
    assert fc.Problem(make_silos(), model=small(normed=True), regularizer=everything).regularizer is everything


def test_regularizer_by_name():
    silos, module = make_silos(), small()
    named = fc.Problem(silos, model=module, regularizer=L1(0.5).on("2.*"))
    x = torch.arange(1.0, named.dimension + 1, dtype=DTYPE)
    assert named.regularizer.value(x) == 0.5 * x[35:].sum()
    weights = fc.Problem(silos, model=module, regularizer=L1(0.5))
    assert weights.regularizer.value(x) == 0.5 * (x[:30].sum() + x[35:50].sum())
    rows = fc.regularizers.build("GroupLasso", lam=0.5, groups="rows", weights="equal")
    grouped = fc.Problem(silos, model=module, regularizer=rows).regularizer
    norms = x[:30].view(5, 6).norm(dim=1).sum() + x[35:50].view(3, 5).norm(dim=1).sum()
    torch.testing.assert_close(grouped.value(x), 0.5 * norms)
    with pytest.raises(ValueError, match=r"no parameter matches '\*\.kernel'"):
        fc.Problem(silos, model=module, regularizer=L1(0.5).on("*.kernel"))


def test_layers_table():
    problem = fc.Problem(make_silos(), model=small())
    x = torch.zeros(problem.dimension)
    x[3] = 2.0
    x[30:35] = 1.0
    table = problem.layers(x)
    assert table["hoyer"].tolist()[:2] == pytest.approx([1.0, 0.0])
    assert table["zeros"].tolist()[:2] == [29, 0]
    assert table["shape"].tolist()[:2] == [(5, 6), (5,)]
    assert problem.coordinate_names[3] == "0.weight[0,3]"
    assert len(problem.coordinate_names) == problem.dimension


def test_frozen_and_shared_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.b.weight = self.a.weight
            self.c.requires_grad_(False)

        def forward(self, x):
            return self.c(self.b(torch.tanh(self.a(x))))

    torch.manual_seed(0)
    module, silos = Tied(), make_silos()
    problem = fc.Problem(silos, model=module)
    assert [s.name for s in problem.layout] == ["a.weight", "a.bias", "b.bias"]
    x = problem.smooth().start().repeat(3, 1)
    found = problem.smooth().full(np.arange(3, dtype=np.uint64))(x)
    for i in range(3):
        own = copy.deepcopy(module).double()
        nn.functional.cross_entropy(own(silos[i][0]), silos[i][1]).backward()
        torch.testing.assert_close(found[i], torch.cat([own.a.weight.grad.flatten(), own.a.bias.grad, own.b.bias.grad]))


def test_the_module_is_not_modified():
    module = small(normed=True)
    before = copy.deepcopy(module.state_dict())
    problem = fc.Problem(make_silos(), model=module)
    fc.simulate(problem, fc.algorithms.FedAvg(local_steps=1, step=0.1), rounds=1)
    for k, v in module.state_dict().items():
        assert torch.equal(v, before[k])
    assert module.training
    torch.testing.assert_close(
        problem.smooth().start(), torch.cat([p.detach().flatten() for p in module.parameters()]).double()
    )


# -- GPU ------------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_gpu_equals_cpu(mode, tmp_path):
    problem = fc.Problem(make_silos(), model=small(normed=True), regularizer=L1(1e-3), gradients=mode)
    method = fc.algorithms.FedAvg(local_steps=2, step=0.1)
    one, two = (
        fc.simulate(problem, method, rounds=3, batch_size=4, participation=0.7, device=d) for d in ("cpu", "cuda")
    )
    torch.testing.assert_close(one.solution, two.solution.cpu(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(one.buffers, two.buffers.cpu(), rtol=1e-9, atol=1e-12)
    for rounds in (1, 3):
        parts = fc.simulate(
            problem, method, rounds=rounds, batch_size=4, participation=0.7, device="cuda",
            checkpoint=tmp_path / "state", resume=True,
        )  # fmt: skip
    assert torch.equal(two.solution, parts.solution)


@gpu
@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_bfloat16_is_near_and_keeps_the_dtype(mode):
    silos = make_silos((1, 12, 12), sizes=(32, 32))
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.0), nn.Flatten(), nn.Linear(800, 3)
    )
    found = []
    for precision in ("full", "bf16"):
        smooth = fc.Problem(silos, model=module, gradients=mode, precision=precision).smooth(torch.float32, "cuda")
        found.append(smooth.full(np.arange(2, dtype=np.uint64))(smooth.start().repeat(2, 1)))
    assert found[1].dtype == torch.float32
    assert 0 < (found[0] - found[1]).norm() < 0.1 * found[0].norm()


@gpu
def test_dropout_on_a_gpu_is_reproducible():
    problem = fc.Problem(make_silos(), model=dropping())
    before = torch.cuda.get_rng_state()
    one, two, loop = (
        fc.simulate(
            problem, fc.algorithms.FedAvg(local_steps=2, step=0.1), rounds=2, batch_size=4, device="cuda", backend=b
        ).solution
        for b in ("stacked", "stacked", "loop")
    )
    assert torch.equal(one, two)
    torch.testing.assert_close(one, loop, rtol=1e-12, atol=1e-14)
    assert torch.equal(before, torch.cuda.get_rng_state())


# -- errors ---------------------------------------------------------------------------------------------------------


def test_images_need_a_model():
    with pytest.raises(fc.DataError, match="samples that are vectors, these are 1x8x8; flatten them or give a model"):
        fc.Problem(make_silos((1, 8, 8)), loss="logistic")


def test_errors_say_what_to_do():
    silos = make_silos()
    problem = fc.Problem(silos, model=small())
    with pytest.raises(ValueError, match=r"smoothness constant is unknown.*step = 0\.01"):
        problem.smoothness()
    assert problem.default_step() == 0.1
    assert fc.Problem(silos, model=small(), regularizer=fc.regularizers.MCP(0.1, 0.1)).default_step() == 0.05
    with pytest.raises(fc.DataError, match=r"needs labels 0, \.\.\., 1 for a module with 2 outputs, found 0 to 2"):
        fc.Problem(silos, model=small(classes=2)).smooth()
    with pytest.raises(fc.DataError, match=r"does not take these samples \(6,"):
        fc.Problem(silos, model=small(features=5))
    with pytest.raises(fc.DataError, match="one output per sample"):
        fc.Problem(silos, model=small(), loss="mse")
    with pytest.raises(ValueError, match="a sum over samples"):
        fc.Problem(silos, model=small(), loss=nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(ValueError, match="'logistic' is not for a model"):
        fc.Problem(silos, model=small(), loss="logistic")
    with pytest.raises(ValueError, match="chunk: only for a problem with a model"):
        fc.Problem(silos, loss="logistic", chunk=3)
    with pytest.raises(ValueError, match=r"mean_loss gives .* must be a value for each of them"):
        fc.Problem(silos, loss=mean_loss)
    with pytest.raises(ValueError, match="bias is for linear models"):
        fc.Problem(silos, model=small(), bias=True)
    with pytest.raises(ValueError, match="gradients = 'fast', must be one of"):
        fc.Problem(silos, model=small(), gradients="fast")
    with pytest.raises(ValueError, match="std > 0"):
        fc.Problem(silos, model=small(), normalization=(0.0, 0.0))
    with pytest.raises(ValueError, match="no parameters to train"):
        fc.Problem(silos, model=nn.Tanh())


def test_divergence_is_reported():
    problem = fc.Problem(make_silos(), model=small(), loss=lambda o, t: o.square().sum(1).square())
    with pytest.warns(fc.DivergenceWarning, match="step is probably too large"):
        run = fc.simulate(problem, fc.algorithms.FedAvg(local_steps=5, step=1e6), rounds=20)
    assert run.status == "diverged"


# -- batch norm and single samples -----------------------------------------------------------------------------------

METHODS_OF_ONE = [fc.algorithms.FedAvg(2, 0.1), fc.algorithms.Scaffold(2, 0.1), fc.algorithms.MimeLite(2, 0.1)]


@pytest.mark.parametrize("gradients", ["vmap", "loop", "auto"])
@pytest.mark.parametrize("backend", ["stacked", "loop"])
def test_a_batch_norm_refuses_a_silo_of_one_sample_before_any_work(gradients, backend):
    problem = fc.Problem(make_silos(sizes=(9, 1, 7, 1)), model=small(normed=True), gradients=gradients)
    seen = []
    for method in METHODS_OF_ONE:
        for batch in (None, 4):
            with pytest.raises(fc.DataError, match=r"BatchNorm1d '1' .*'client 1' and 1 more .*leave .*nn.GroupNorm"):
                fc.simulate(problem, method, rounds=2, batch_size=batch, backend=backend, on_record=seen.append)
    assert not seen


@pytest.mark.parametrize("gradients", ["vmap", "loop", "auto"])
def test_a_batch_norm_refuses_batches_of_one_sample(gradients):
    problem = fc.Problem(make_silos(), model=small(normed=True), gradients=gradients)
    with pytest.raises(fc.DataError, match=r"BatchNorm1d '1' .*: batch_size = 1; take 2 or more, or use nn.GroupNorm"):
        fc.simulate(problem, METHODS_OF_ONE[0], rounds=2, batch_size=1)
    assert not list(problem.smooth().flat.module.modules())[2]._forward_pre_hooks


def test_one_sample_is_enough_where_a_channel_has_several_values():
    silos = make_silos(shape=(1, 4, 4), sizes=(5, 1))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    for batch in (None, 1):
        run = fc.simulate(fc.Problem(silos, model=model), METHODS_OF_ONE[0], rounds=1, batch_size=batch)
        assert run.status == "completed"


def test_a_comparison_says_it_once_for_all_methods(tmp_path, cli, monkeypatch):
    def normed(shape, classes):
        return nn.Sequential(nn.Linear(shape[0], 4), nn.BatchNorm1d(4), nn.Linear(4, classes))

    monkeypatch.setitem(fc.models.MODELS._own, "normed", normed)
    monkeypatch.setitem(fc.models.MODELS._folded, "normed", "normed")
    methods = "".join(f"[[algorithms]]\nname = '{n}'\nlocal_steps = 1\nstep = 0.1\n" for n in ("FedAvg", "Scaffold"))
    data = "[data]\nname = 'synthetic'\nclients = 3\nfeatures = 5\nsamples = 1\n"
    (tmp_path / "c.toml").write_text(f"{data}{methods}[model]\nname = 'normed'\n[run]\nrounds = 1\n")
    (line,) = cli("compare", tmp_path / "c.toml", "--out", tmp_path / "c", check=2).err.splitlines()
    assert "BatchNorm1d '1'" in line
    assert not (tmp_path / "c").exists()
