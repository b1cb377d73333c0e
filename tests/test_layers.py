"""Convolutions and pooling with channels last in memory: torch's own values and gradients, for one client and many."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import fedcomposite as fc
from fedcomposite.problems.base import RoundInputs
from fedcomposite.problems.layers import _written, fuse_convolutions, restore_layout, use_channels_last

LAYERS = {
    "single channel": lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    "channels": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 2, stride=2, bias=False)),
    "groups and dilation": lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2, dilation=2), nn.Conv2d(8, 8, 1, groups=8)
    ),
    "rectangles": lambda: nn.Sequential(nn.Conv2d(2, 3, (3, 1), padding=(1, 0)), nn.MaxPool2d((1, 3), (2, 1), (0, 1))),
    "overlapping pools": lambda: nn.Sequential(nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.MaxPool2d(2, dilation=2)),
    "norm": lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, track_running_stats=False), nn.MaxPool2d(2)),
}


def channels(module):
    return next((m.in_channels for m in module.modules() if isinstance(m, nn.Conv2d)), 2)


def value(module):
    return lambda p, x: functional_call(module, p, (x,)).square().sum()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
def test_equal_to_torch(name, ties):
    torch.manual_seed(0)
    plain = LAYERS[name]().double()
    x = torch.randn(5, 6, channels(plain), 11, 10, dtype=torch.float64)
    if ties:
        x = x.round()
    quick = copy.deepcopy(plain)
    assert use_channels_last(quick)
    start = {k: v.detach() for k, v in plain.named_parameters()}
    own = {k: torch.stack([v + 0.1 * torch.randn_like(v) for _ in range(5)]) for k, v in start.items()}
    for argument in (0, 1) if own else (1,):
        expected = [grad(value(plain), argument)({k: v[i] for k, v in own.items()}, x[i]) for i in range(5)]
        stacked = vmap(grad(value(quick), argument))(own, x) if own else vmap(grad(value(quick), 1), (None, 0))({}, x)
        alone = [grad(value(quick), argument)({k: v[i] for k, v in own.items()}, x[i]) for i in range(5)]
        for i in range(5):
            for found in (alone[i], {k: v[i] for k, v in stacked.items()} if argument == 0 else stacked[i]):
                torch.testing.assert_close(found, expected[i], rtol=1e-11, atol=1e-11)
    out = quick(x[0])
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out, plain(x[0]), rtol=1e-12, atol=1e-12)
    restore_layout(quick)
    assert torch.equal(quick(x[0]), plain(x[0]))


def test_clients_may_share_the_weights_or_the_samples():
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2))
    quick = copy.deepcopy(plain)
    use_channels_last(quick)
    weights, x = dict(plain.named_parameters()), torch.randn(4, 5, 2, 8, 8)
    own = {k: torch.stack([v.detach() * (i + 1) for i in range(4)]) for k, v in weights.items()}
    for axes, given in (((None, 0), (weights, x)), ((0, None), (own, x[0]))):
        for argument in (0, 1):
            expected = vmap(grad(value(plain), argument), axes)(*given)
            found = vmap(grad(value(quick), argument), axes)(*given)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_plain_is_left_to_torch():
    odd = nn.Sequential(nn.Conv2d(1, 2, 3, padding_mode="circular", padding=1), nn.MaxPool2d(2, return_indices=True))
    assert not use_channels_last(odd)
    assert not any("forward" in vars(layer) for layer in odd)
    assert not use_channels_last(nn.Conv2d(1, 2, 3, padding="same"))
    single = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2))
    assert use_channels_last(single)
    assert single(torch.randn(1, 8, 8)).shape == (2, 3, 3)  # without a batch


def test_a_layer_with_a_rule_of_its_own_keeps_it():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2))
    module[1].forward = torch.tanh
    use_channels_last(module)
    assert module[1].forward is torch.tanh
    restore_layout(module)
    assert module[1].forward is torch.tanh
    assert "forward" not in vars(module[0])
    module[0].forward = torch.sin
    assert not use_channels_last(module)


class Views(nn.Module):
    """As many write it: a view where a reshape is meant."""

    def __init__(self):
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(1, 2, 3), nn.Linear(72, 3)

    def forward(self, x):
        return self.linear(self.convolution(x).view(len(x), -1))


def test_a_module_that_takes_views_keeps_the_usual_layout():
    rng = np.random.default_rng(0)
    silos = fc.Silos.from_arrays([(rng.normal(size=(20, 1, 8, 8)), rng.integers(0, 3, 20)) for _ in range(3)])
    problem = fc.Problem(silos, model=Views())
    net = problem.smooth(torch.float32)
    assert not net.flat.channels_last
    assert (
        fc.Problem(silos, model=nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)))
        .smooth(torch.float32)
        .flat.channels_last
    )
    assert [net.gradients.mode(3, b) for b in (12, 13)] == ["vmap", "loop"]
    run = fc.simulate(
        problem, fc.algorithms.FedAvg(local_steps=2, step=0.1), rounds=2, batch_size=4, dtype=torch.float32
    )
    assert run.status == "completed"


@pytest.mark.parametrize(("kernel", "padding"), [(3, 1), ((1, 3), (0, 2)), (5, 0)])
def test_convolutions_of_single_channels_written_out(kernel, padding):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, kernel, padding=padding), nn.ReLU(), nn.Conv2d(4, 3, 3)).double()
    quick = copy.deepcopy(plain)
    fuse_convolutions(quick, convert=True)
    assert ["forward" in vars(layer) for layer in quick] == [True, False, False]
    own = {
        k: torch.stack([v.detach() + 0.1 * torch.randn_like(v) for _ in range(5)]) for k, v in plain.named_parameters()
    }
    x = torch.randn(5, 6, 1, 9, 10, dtype=torch.float64)
    found = vmap(grad(value(quick)))(own, x)
    assert _written(True, x[:, :, 0], ((1, 1), (0, 0), (1, 1)), 6)
    torch.testing.assert_close(found, vmap(grad(value(plain)))(own, x), rtol=1e-11, atol=1e-11)
    assert not _written(False, x[:, :, 0], ((1, 1), (0, 0), (1, 1)), 6)


class TrainingViews(nn.Module):
    """A view in training only, and arguments by name."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout, self.convolution, self.pool = nn.Dropout(dropout), nn.Conv2d(1, 2, 3), nn.MaxPool2d(2)
        self.linear = nn.Linear(18, 3)

    def forward(self, x):
        x = self.pool(input=self.convolution(input=self.dropout(x)))
        return self.linear(x.view(len(x), -1) if self.training else x.flatten(1))


@pytest.mark.parametrize(("clients", "gradients", "dropout"), [(1, "auto", 0), (3, "loop", 0), (3, "auto", 0.5)])
def test_a_view_in_training_is_found_before_the_first_round(clients, gradients, dropout):
    rng = np.random.default_rng(0)
    silos = fc.Silos.from_arrays([(rng.normal(size=(20, 1, 8, 8)), rng.integers(0, 3, 20)) for _ in range(clients)])
    problem = fc.Problem(silos, model=TrainingViews(dropout), gradients=gradients)
    assert not problem.smooth(torch.float32).flat.channels_last
    run = fc.simulate(
        problem, fc.algorithms.FedAvg(local_steps=2, step=0.1), rounds=2, batch_size=4, dtype=torch.float32
    )
    assert run.status == "completed"


def test_views_of_a_problem_agree_on_the_layout():
    rng = np.random.default_rng(0)
    silos = fc.Silos.from_arrays([(rng.normal(size=(20, 1, 8, 8)), rng.integers(0, 3, 20)) for _ in range(3)])
    net = fc.Problem(silos, model=nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))).smooth(
        torch.float32
    )
    view = net.during(RoundInputs(net.buffers().repeat(3, 1)))
    assert net.flat.channels_last
    assert view.flat.restore_layout()
    assert not net.flat.channels_last
    assert not net.flat.restore_layout()


@pytest.mark.parametrize("kind", ["layer twice", "weight twice"])
def test_shared_layers_and_weights(kind):
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1)
    if kind == "weight twice":
        second.weight = first.weight
    else:
        second = first
    module = nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(64, 3))
    rng = np.random.default_rng(0)
    silos = fc.Silos.from_arrays([(rng.normal(size=(9, 1, 8, 8)), rng.integers(0, 3, 9)) for _ in range(3)])
    net = fc.Problem(silos, model=module).smooth(torch.float64)
    x = net.start().repeat(3, 1)
    assert x.shape[1] == net.dimension == sum(p.numel() for p in module.parameters())
    rows = torch.arange(4).repeat(3, 1) + 9 * torch.arange(3)[:, None]
    for _ in range(2):
        found = net.minibatch(x, rows)
    for i in range(3):
        module.zero_grad()
        out = module.double()(silos.features[rows[i]])
        nn.functional.cross_entropy(out, silos.targets[rows[i]].long()).backward()
        expected = torch.cat([p.grad.flatten() for p in module.parameters()])
        torch.testing.assert_close(found[i], expected, rtol=1e-10, atol=1e-12)
