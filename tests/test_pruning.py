"""Networks without their dead units: the same outputs, and nothing left that the outputs do not need."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedcomposite as fc
from fedcomposite.exporting import ExportError, fit, planning, prune

pytestmark = pytest.mark.filterwarnings("ignore::fedcomposite.errors.DeadNetworkWarning")  # some are dead on purpose


def kill(module, seed, share=0.5, columns=0.0):
    """Random filters of zeros, and batch norms as after training: statistics, scales and shifts of any sign."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(like, low=-1.0, high=1.0):
        return low + (high - low) * torch.rand(like.shape, generator=generator, dtype=like.dtype)

    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.weight[torch.rand(len(layer.weight), generator=generator) < share] = 0
                layer.weight[:, torch.rand(layer.weight.shape[1], generator=generator) < columns] = 0
                if layer.bias is not None:
                    layer.bias.copy_(drawn(layer.bias))
            elif isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d):
                layer.running_var.copy_(drawn(layer.running_var, 0.5, 2.0))
                for tensor in (layer.running_mean, layer.weight, layer.bias):
                    tensor.copy_(drawn(tensor))
    return module.eval()


def agree(module, pruned, *shape, tolerance=1e-11):
    """Outputs in float64, on inputs that pruning has not seen."""
    x = 3 * torch.randn(5, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        wanted = module.eval()(x)
        torch.testing.assert_close(pruned(x), wanted, rtol=0, atol=tolerance * max(1.0, float(wanted.abs().max())))


def checked(module, *shape, **options):
    """Prune in float64, compare, and give the result back."""
    module = module.double()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    made = prune(module, torch.randn(3, *shape, dtype=torch.float64), **options)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    agree(module, made.module, *shape)
    assert made.pruned_parameters == sum(p.numel() for p in made.module.parameters())
    return made


def sizes(made):
    return {layer.name: layer.pruned[:2] for layer in made.layers}


def reasons(made):
    return {k.layer: (k.count, k.reason) for k in made.kept}


SHAPES = {"mlp": "mnist", "sigmoid-net": "a9a", "cnn": "mnist", "zhang-cnn": "cifar10", "resnet18": "mnist"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHAPES, "mobilenetv3-small"])
def test_the_papers_networks(name):
    data = SHAPES.get(name, "cifar10")
    module = kill(fc.models.build(name, data), 1)
    made = checked(module, *fc.models.SHAPES[data][0])
    assert made.pruned_parameters < 0.65 * made.parameters
    assert made.pruned_flops < 0.7 * made.flops
    assert {type(m) for m in made.module.modules()} == {type(m) for m in module.modules()}  # layers like those before
    outputs = [k for k in made.kept if k.reason == "it is an output of the network"]
    assert [k.layer for k in outputs] == [made.layers[-1].name]
    assert "parameters" in str(made)
    assert list(made.table()["layer"]) == [layer.name for layer in made.layers]


def needed(weights, biases, act, x):
    """Hidden units of an MLP that its outputs need, from activations on some inputs and from the last layer back.

    The activation is strictly monotone, so that no unit is constant by chance.
    """
    alive = [torch.ones(len(w), dtype=torch.bool) for w in weights]
    for i in range(len(weights) - 2, -1, -1):
        a = x
        for w, b in zip(weights[: i + 1], biases[: i + 1], strict=True):
            a = act(a @ w.T + b)
        constant = (a - a[0]).abs().amax(0) == 0
        read = (weights[i + 1][alive[i + 1]] != 0).any(0)
        alive[i] = read & ~constant
        alive[i][0] |= not alive[i].any()  # a layer keeps one unit, and what that one reads
    return [int(a.sum()) for a in alive]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from(["ELU", "Tanh"]))
def test_exactly_what_the_outputs_need_is_left_of_an_mlp(seed, hidden, act):
    torch.manual_seed(seed)
    widths, layers = [4, *hidden, 2], []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), getattr(nn, act)()]
    module = kill(nn.Sequential(*layers[:-1]), seed, share=0.4, columns=0.2).double()
    made = checked(module, 4)
    weights, biases = [m.weight for m in module[::2]], [m.bias for m in module[::2]]
    x = torch.randn(100, 4, dtype=torch.float64)
    with torch.no_grad():
        assert [layer.pruned[0] for layer in made.layers] == needed(weights, biases, module[1], x)


class Joined(nn.Module):
    """Two branches that are added, a depthwise filter, a scale per channel, a concatenation."""

    def __init__(self, seed, bias, padding):
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Conv2d(2, 6, 3, padding=padding, bias=bias)
        self.left = nn.Conv2d(6, 5, 1, bias=bias)
        self.norm = nn.BatchNorm2d(5)
        self.right = nn.Conv2d(6, 5, 1, bias=bias)
        self.deep = nn.Conv2d(5, 10, 3, padding=padding, groups=5, bias=bias)
        self.gate = nn.Linear(10, 10, bias=bias)
        self.last = nn.Linear(15, 3, bias=bias)

    def forward(self, x):
        x = self.stem(x).relu_()
        y = self.norm(self.left(x)) + torch.tanh(self.right(x))
        z = nn.functional.max_pool2d(self.deep(y), 2)
        z = z * self.gate(z.mean((2, 3))).sigmoid()[..., None, None]
        return self.last(torch.cat([z.amax((2, 3)), y.mean((2, 3))], dim=1))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 0.6), st.booleans(), st.sampled_from([0, 1]))
def test_random_patterns_in_a_network_with_branches(seed, share, columns, bias, padding):
    checked(kill(Joined(seed, bias, padding), seed, share, columns), 2, 8, 8)


def test_branches_that_are_added():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Conv2d(1, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False)
            self.last = nn.Conv2d(4, 2, 1)

        def forward(self, x):
            x = self.first(x)
            return self.last(x + self.inner(x).relu())

    module = Residual()
    with torch.no_grad():
        module.first.weight[[0, 1]] = 0
        module.inner.weight[[1, 2]] = 0
    made = checked(module, 1, 3, 3)
    assert sizes(made) == {"first": (3, 1), "inner": (3, 3), "last": (2, 3)}  # 1 is dead in both
    assert reasons(made)["first"] == (1, "last reads it joined with something that is not constant")


def convolutions(padding, constants):
    """Filters 0, 1, ... of zeros whose biases are the constants."""
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=padding, bias=False))
    with torch.no_grad():
        for i, constant in enumerate(constants):
            module[0].weight[i], module[0].bias[i] = 0, constant
    return module


def test_constants_and_padding():
    """Without padding the next layer gets a bias; with padding one of the constants stays and stands for all."""
    made = checked(convolutions(0, [0.5, -0.5, 2.0]), 1, 9, 9)
    assert sizes(made) == {"0": (1, 1), "2": (2, 1)}
    assert made.module[2].bias is not None
    made = checked(convolutions(1, [0.5, -0.5]), 1, 9, 9)
    assert sizes(made) == {"0": (3, 1), "2": (2, 3)}
    assert reasons(made) == {"0": (1, "2 pads its input, at whose border the constant would be missing")}
    made = checked(convolutions(1, [0.5, -0.5, 2.0]), 1, 9, 9)
    assert sizes(made) == {"0": (2, 1), "2": (2, 2)}
    assert reasons(made) == {"0": (1, "2 reads its constant in place of all others")}
    assert made.module[0].bias[0].item() == 2.0


def test_channels_without_a_gain_go_whatever_their_filters_are():
    """The rows of the convolution before them need not be zero; what is left of the channel is its shift."""
    module = kill(nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 3)), 0, share=0.0)
    with torch.no_grad():
        module[1].weight[:4] = 0
        module[1].bias[:4] = torch.tensor([-0.1, 0.0, 0.3, -0.3])
    assert sizes(checked(module, 2, 8, 8)) == {"0": (2, 2), "3": (3, 2)}
    module[3].padding = (1, 1)
    made = checked(module, 2, 8, 8)
    assert sizes(made) == {"0": (3, 2), "3": (3, 3)}
    assert reasons(made) == {"0": (1, "3 pads its input, at whose border the constant would be missing")}
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 3, 3))
    nn.init.zeros_(plain[0].weight[1:])
    assert sizes(checked(plain.eval(), 2, 8, 8)) == {"0": (1, 2), "2": (3, 1)}


def test_batch_norm_makes_a_constant_of_a_dead_filter():
    module = nn.Sequential(nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2))
    with torch.no_grad():
        module[0].weight[1:] = 0
        module[1].bias[1], module[1].bias[2] = 0.7, -0.7
    made = checked(module, 1, 5, 5)
    assert sizes(made) == {"0": (1, 1), "4": (2, 9)}
    assert made.module[1].num_features == len(made.module[1].running_var) == 1
    wanted = module[4].bias + 0.7 * module[4].weight[:, 9:18].sum(1)
    torch.testing.assert_close(made.module[4].bias, wanted)


def test_one_unit_of_a_layer_stays():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.zeros_(module[0].weight)
    made = checked(module, 3)
    assert sizes(made) == {"0": (1, 3), "2": (2, 1)}
    assert reasons(made)["0"] == (1, "it is the last one of its layer")


SIZES = {"seed": st.integers(0, 10**6), "multiple": st.sampled_from([2, 3, 4, 8]), "share": st.floats(0.2, 1.0)}


@settings(max_examples=8, deadline=None)
@given(**SIZES)
def test_sizes_are_multiples_as_far_as_there_are_units(seed, multiple, share):
    """Also behind a flattening, where a channel counts once for each of its pixels, and in residual connections."""
    network = nn.Sequential(
        nn.Conv2d(1, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(72, 24), nn.ReLU(), nn.Linear(24, 3),
    )  # fmt: skip
    module = kill(network, seed, share, 0.2)
    plain, made = (checked(module, 1, 5, 5, multiple=m) for m in (1, multiple))
    whole = {layer.name: layer.shape for layer in made.layers}
    for name, (rows, columns) in sizes(made).items():
        for axis, size in enumerate((rows, columns)):
            assert size % multiple == 0 or size == whole[name][axis]
            assert sizes(plain)[name][axis] <= size
    assert made.pruned_parameters >= plain.pruned_parameters


test_sizes_of_more_networks_are_multiples = pytest.mark.slow(
    settings(max_examples=40, deadline=None)(
        given(**SIZES)(test_sizes_are_multiples_as_far_as_there_are_units.hypothesis.inner_test)
    )
)


def test_as_few_units_as_possible_fill_a_size():
    """Those whose weights are zeros, for which nothing that they read has to stay."""
    module = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    with torch.no_grad():
        module[2].weight[:, 4:] = 0
        module[2].weight[6:9] = 0
        module[2].weight[9:, :4] = 0
        module[2].weight[9:, 5] = 1
        module[4].weight[:, 9:] = 0
    made = checked(module, 3, multiple=4)
    assert sizes(made) == {"0": (4, 3), "2": (8, 4), "4": (2, 8)}
    assert reasons(made)["2"] == (2, "it makes the size of its layer a multiple of 4")
    assert sizes(checked(module, 3)) == {"0": (4, 3), "2": (6, 4), "4": (2, 6)}
    with pytest.raises(ExportError, match="multiple = 0, must be a whole number of at least 1"):
        prune(module, torch.randn(3, 3), multiple=0)


class Concatenated(nn.Module):
    """Its last layer is registered before those that it reads."""

    def __init__(self):
        super().__init__()
        self.last, self.left, self.right = nn.Linear(24, 2), nn.Linear(3, 12), nn.Linear(3, 12)

    def forward(self, x):
        return self.last(torch.cat([self.left(x), self.right(x)], dim=1).relu())


def test_parts_of_a_concatenation_are_filled_before_the_whole():
    """The whole first would take all that it lacks from one part, which may then lack others."""
    module = Concatenated()
    with torch.no_grad():
        module.left.weight[3:], module.right.weight[6:] = 0, 0
    assert sizes(checked(module, 3, multiple=4)) == {"left": (4, 3), "right": (8, 3), "last": (2, 12)}


def test_nothing_is_left_for_a_second_time():
    """Of a convolution that pads, the constant that stands for others goes with the filters that read them."""
    module = nn.Sequential(
        *(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    )
    with torch.no_grad():
        module[0].weight[:2], module[0].bias[:2] = 0, torch.tensor([0.5, 2.0])
        module[2].weight[:3, :2] = 0  # filter 3 alone reads the two constants
        module[4].weight[:, 3] = 0
    made = checked(module, 1, 9, 9)
    assert sizes(made) == {"0": (3, 1), "2": (3, 3), "4": (2, 3)}
    assert made.kept == ()


class Padding(nn.Module):
    """Convolutions that pad, a residual connection and a concatenation."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Conv2d(i, 5, 3, padding=1, bias=False) for i in (2, 5, 5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(5) for _ in range(3))
        self.last = nn.Linear(10, 2)

    def forward(self, x):
        x = self.norms[0](self.layers[0](x)).relu()
        y = self.norms[1](self.layers[1](x)).relu()
        z = self.norms[2](self.layers[2](y)) + x
        return self.last(torch.cat([y.amax((2, 3)), z.relu().mean((2, 3))], dim=1))


@pytest.mark.parametrize("seed", range(20))
def test_a_second_time_removes_nothing(seed):
    made = checked(kill(Padding(seed), seed, 0.5, 0.3), 2, 6, 6)
    again = checked(made.module, 2, 6, 6)
    assert again.pruned_parameters == again.parameters
    assert "no layer reads it" not in {k.reason for k in made.kept}


class Applied(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("pooling", [nn.AdaptiveMaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.MaxPool2d(3, 2)])
def test_pooling(pooling):
    module = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), pooling, nn.Flatten(), nn.Linear(24, 2))
    nn.init.zeros_(module[0].weight[2:])
    assert sizes(checked(module, 1, 8, 8)) == {"0": (2, 1), "4": (2, 8)}


@pytest.mark.parametrize("pooling", [nn.AvgPool1d(2), nn.AdaptiveMaxPool1d(4), nn.AdaptiveAvgPool1d(4)])
def test_pooling_over_features_keeps_them(pooling):
    """Two axes are taken for one sample of several channels: neighbouring features are pooled."""
    module = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), pooling, nn.Linear(4, 2))
    nn.init.zeros_(module[0].weight[1:4])
    made = checked(module, 3)
    assert sizes(made) == {"0": (8, 3), "3": (2, 4)}
    assert "pool1d has no rule" in reasons(made)["0"][1]


def test_conversions_and_gradients_that_are_off_are_followed():
    def without(x):
        with torch.no_grad():
            return x.relu()

    for function in (lambda x: x.float().double().relu(), without):
        module = nn.Sequential(nn.Linear(3, 8), Applied(function), nn.Linear(8, 2))
        nn.init.zeros_(module[0].weight[3:])
        assert sizes(checked(module, 3)) == {"0": (3, 3), "2": (2, 3)}


def test_an_axis_that_would_be_squeezed_away_stays():
    module = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), Applied(torch.squeeze), nn.Linear(4, 3))
    )
    nn.init.zeros_(module[0].weight[1:])
    assert "squeeze" in reasons(checked(module, 1, 5, 5))["0"][1]


def test_a_bias_is_only_given_to_a_layer_that_adds_it():
    class Borrowing(nn.Module):
        """It takes the weight of a layer that it never calls."""

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2, bias=False)

        def forward(self, x):
            return nn.functional.linear(self.first(x).sigmoid(), self.last.weight)

    module = Borrowing()
    nn.init.zeros_(module.first.weight[2:])
    made = checked(module, 3)
    assert sizes(made) == {"first": (3, 3), "last": (2, 3)}
    assert made.module.last.bias is None


def test_dead_units_of_a_layer_that_is_used_twice_are_counted_once():
    module = Tied()
    nn.init.zeros_(module.twice.weight[1:3])
    counts = [k.count for k in checked(module, 3).kept if k.layer == "twice"]
    assert sum(counts) == 2


def test_inputs_of_which_some_give_no_number():
    """Random inputs may be outside of what a module takes; what it makes of them has to be the same."""
    module = nn.Sequential(Applied(torch.log), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.zeros_(module[1].weight[3:])
    made = prune(module, torch.rand(4, 3))
    assert made.module[1].weight.shape == (3, 3)
    assert made.difference < 1e-5
    with pytest.raises(ExportError, match="is a finite number"):
        prune(module, -torch.rand(4, 3))


class Tied(nn.Module):
    """A layer that is used twice, and another that shares its bias."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.other = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.other.bias = self.twice.bias

    def forward(self, x):
        return self.other(self.twice(self.twice(self.first(x).relu()).relu()).relu())[:, :2]


def test_shared_parameters_stay_shared():
    module = kill(Tied(), 3, 0.5)
    made = checked(module, 3)
    assert made.module.other.bias is made.module.twice.bias
    assert len(dict(made.module.named_parameters())) == len(dict(module.named_parameters()))


class Fixed(nn.Module):
    """A reshape with sizes of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(36, 2)

    def forward(self, x):
        return self.last(self.inner(self.first(x).relu()).relu().view(-1, 36))


def test_sizes_that_are_written_down():
    module = Fixed()
    with torch.no_grad():
        module.first.weight[1], module.inner.weight[2] = 0, 0
    made = checked(module, 1, 5, 5)
    assert sizes(made) == {"first": (3, 1), "inner": (4, 3), "last": (2, 36)}
    assert "written down" in reasons(made)["inner"][1]


def test_operations_without_a_rule_keep_what_they_touch():
    inner = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    module = nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), inner, nn.Flatten())
    with torch.no_grad():
        module[1].weight[[0, 3]] = 0
        module[3].weight[2] = 0
    made = prune(module, torch.randint(0, 9, (3, 7)))
    assert made.module[1].weight.shape == (3, 3)
    assert made.module[3].weight.shape == (4, 3)
    x = torch.randint(0, 9, (6, 7))
    torch.testing.assert_close(made.module(x), module.eval()(x))
    grouped = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 1))
    nn.init.zeros_(grouped[0].weight[1])
    assert reasons(checked(grouped, 2, 1, 1))["0"][1] == "a convolution in groups needs groups of equal size"


class Turned(nn.Module):
    """An operation without a rule whose result does not lie in memory row by row, seen as another shape."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(20, 2)

    def forward(self, x):
        turned = self.first(x).transpose(1, 2).frac()
        return self.last(turned.transpose(1, 2).view(-1, 20))


def test_unknown_values_lie_in_memory_as_the_real_ones():
    module = Turned()
    nn.init.zeros_(module.first.weight[1])
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(prune(module, x).module(x), module.eval()(x))


class Branching(nn.Module):
    """Its operations depend on the values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


class Writing(Branching):
    """It writes into a part of a tensor."""

    def forward(self, x):
        y = self.layer(x)
        y[:, 0] = 0
        return y.index_fill_(1, torch.tensor([1]), 2.0)


class Strict(nn.Module):
    """It insists on its sizes, without a word."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        nn.init.zeros_(self.first.weight[1])

    def forward(self, x):
        x = self.first(x)
        if x.shape[1] != 4:
            raise AssertionError
        return self.last(x)


@pytest.mark.filterwarnings("default")
def test_refusals(monkeypatch):
    with pytest.raises(ExportError, match="cannot be listed ahead"):
        prune(Branching(), torch.ones(2, 3))
    with pytest.raises(ExportError, match="in place"):
        prune(Writing(), torch.ones(2, 3))
    with pytest.raises(ExportError, match="needs an example"):
        prune(nn.Linear(3, 2), torch.ones(()))
    with pytest.raises(ExportError, match="no 'inner'"):
        fit(nn.Linear(3, 2), {"inner.weight": torch.ones(2, 3)})
    with pytest.raises(ExportError, match=r"^the module gives torch\.int64"):
        prune(nn.Sequential(nn.Linear(3, 2), Applied(lambda x: x.argmax(1))), torch.ones(2, 3))
    with pytest.raises(ExportError, match=r"^the module gives a tuple"):
        prune(Applied(lambda x: (x, x)), torch.ones(2, 3))
    with pytest.raises(ExportError, match="'meta', which has no numbers"):
        prune(nn.Linear(3, 2, device="meta"), torch.ones(2, 3))
    with pytest.raises(ExportError, match="same dtype"):
        prune(nn.Linear(3, 2), torch.ones(2, 3).double())
    with pytest.raises(ExportError, match="cannot be copied"):
        prune(Applied(nn.Linear(3, 2)(torch.ones(3))), torch.ones(2, 2))  # of a tensor with a gradient
    with pytest.raises(ExportError, match=r"smaller layers \(AssertionError\)"):
        prune(Strict(), torch.ones(2, 3))
    monkeypatch.setattr(planning._Reader, "takes_over", lambda self, gone: (None, None))
    with pytest.raises(ExportError, match="outputs would differ"):
        prune(convolutions(0, [0.5]), torch.randn(2, 1, 9, 9))


class Noting(nn.Module):
    """A module that notes in which precision it is asked to compute."""

    def __init__(self):
        super().__init__()
        self.inner = kill(nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3)), 0)
        self.settings = []

    def __deepcopy__(self, memo):  # the copies that are compared share the list
        made = type(self)()
        made.inner, made.settings = copy.deepcopy(self.inner, memo), self.settings
        return made

    def forward(self, x):
        self.settings.append(precision())
        return self.inner(x)


def precision():
    return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()


def test_outputs_are_compared_in_full_precision():
    """TF32 differs by far more than float32's rounding explains; the settings come back, also after a refusal."""
    before, module = precision(), Noting()
    assert before == (True, "highest")
    torch.set_float32_matmul_precision("high")
    try:
        prune(module, torch.randn(2, 40))
        assert len(module.settings) >= 4  # two modules on two batches
        assert set(module.settings) == {(False, "highest")}
        with pytest.raises(ExportError, match="needs an example"):
            prune(module, torch.ones(()))
        assert precision() == (True, "high")
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu():
    """Where convolutions are TF32's unless one asks for more."""
    module = kill(fc.models.build("resnet18", "cifar10", stem="small"), 0, share=0.3).cuda()
    made = prune(module, torch.randn(4, 3, 32, 32, device="cuda"))
    assert made.pruned_parameters < 0.9 * made.parameters


def test_tensors_of_a_pruned_module_fit_the_whole_one():
    module = kill(Joined(1, False, 1), 1)
    made = prune(module, torch.randn(3, 2, 8, 8))
    again = fit(copy.deepcopy(module), made.module.state_dict())
    x = torch.randn(4, 2, 8, 8)
    assert torch.equal(again(x), made.module(x))
    assert str(again) == str(made.module)


class Noted(nn.Sequential):
    """A module with a state that is no tensor."""

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        assert state == {"version": 3}


def test_states_that_are_no_tensors_are_left_alone():
    module = Noted(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    nn.init.zeros_(module[0].weight[2:])
    made = prune(module, torch.randn(2, 3))
    assert sizes(made) == {"0": (2, 3), "2": (2, 2)}
    assert str(fit(module, made.module.state_dict())) == str(made.module)


def test_dtypes_and_devices_are_kept():
    module = kill(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)), 0)
    module[2].weight.requires_grad_(False)
    made = prune(module, torch.randn(2, 3))
    assert made.difference <= 1e-6
    assert {p.dtype for p in made.module.parameters()} == {torch.float32}
    assert [p.requires_grad for p in made.module.parameters()] == [True, True, False, True]


class Enlarged(nn.Module):
    """Down, and up again by a transposed convolution, beside what was there before."""

    def __init__(self, bias, padding):
        super().__init__()
        self.down, self.norm = nn.Conv2d(1, 8, 3, 2, padding=1), nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 6, 4 if padding else 2, 2, padding=padding, bias=bias)
        self.last = nn.Conv2d(7, 2, 1)

    def forward(self, x):
        return self.last(torch.cat([x, self.up(self.norm(self.down(x)).relu()).relu()], 1))


@pytest.mark.parametrize(("bias", "padding"), [(True, 0), (False, 0), (True, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_transposed_convolutions_lose_what_is_dead(bias, padding, seed):
    """On both sides; constants that it reads are taken over by one of them."""
    torch.manual_seed(seed)
    module = kill(Enlarged(bias, padding), seed)
    with torch.no_grad():
        module.up.weight[3] = 0  # not read
        module.last.weight[:, 1 + 2] = 0
        module.up.weight[:, 4] = 0
    made = fc.prune(module, torch.randn(3, 1, 8, 8))
    x = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(made.module(x), module.eval()(x), rtol=1e-4, atol=1e-5)
    up = made.module.up
    assert up.weight.shape[:2] == (up.in_channels, up.out_channels) == (made.module.down.out_channels, up.out_channels)
    assert up.in_channels < 8
    assert up.out_channels <= 5
    before, after = next((layer.flops, layer.pruned_flops) for layer in made.layers if layer.name == "up")
    assert before == 2 * module.up.weight.numel() * 16
    assert after == 2 * up.weight.numel() * 16
