"""The networks by name: sizes of the papers, and the published architectures written a second time, as functions."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import fedcomposite as fc
from fedcomposite import DataError, Silos
from fedcomposite.models import MODELS, build

COUNTS = {
    ("linear", "a9a"): 248,
    ("linear", "mnist"): 7_850,
    ("linear", "cifar10"): 30_730,
    ("mlp", "a9a"): 24_258,
    ("mlp", "mnist"): 109_386,
    ("mlp", "cifar10"): 402_250,
    ("cnn", "fashion-mnist"): 268_362,
    ("cnn", "cifar10"): 268_650,
    ("zhang-cnn", "mnist"): 112_394,
    ("resnet18", "mnist"): 11_175_370,
    ("resnet18", "cifar10"): 11_181_642,
    ("mobilenetv3-small", "cifar10"): 1_528_106,
}


@pytest.mark.parametrize(("name", "dataset"), COUNTS)
def test_parameter_counts(name, dataset):
    assert sum(p.numel() for p in build(name, dataset).parameters()) == COUNTS[name, dataset]


def unsettle(module):
    """Statistics and scales away from their initial values, so that an omitted layer shows."""
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and tensor.ndim == 1:
            tensor += 0.3 * torch.rand(tensor.shape, dtype=tensor.dtype)
            assert "running_var" not in name or tensor.min() > 0
    return module.double().eval()


def norm(s, name, x, eps):
    return F.batch_norm(
        x, s[f"{name}.running_mean"], s[f"{name}.running_var"], s[f"{name}.weight"], s[f"{name}.bias"], eps=eps
    )


def resnet18(s, x):
    x = F.max_pool2d(F.relu(norm(s, "bn1", F.conv2d(x, s["conv1.weight"], stride=2, padding=3), 1e-5)), 3, 2, 1)
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            at = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            y = F.relu(norm(s, f"{at}.bn1", F.conv2d(x, s[f"{at}.conv1.weight"], stride=stride, padding=1), 1e-5))
            y = norm(s, f"{at}.bn2", F.conv2d(y, s[f"{at}.conv2.weight"], padding=1), 1e-5)
            if stride == 2:
                x = norm(s, f"{at}.downsample.1", F.conv2d(x, s[f"{at}.downsample.0.weight"], stride=2), 1e-5)
            x = F.relu(x + y)
    return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), s["fc.weight"], s["fc.bias"])


def mobilenet(s, x):
    """Strides, activations and shortcuts of table 2; kernel sizes and widths are read off the weights."""

    def unit(at, x, act, stride=1):
        w = s[f"{at}.0.weight"]
        groups = 1 if w.shape[1] == x.shape[1] else x.shape[1]
        x = F.conv2d(x, w, stride=stride, padding=(w.shape[-1] - 1) // 2, groups=groups)
        return act(norm(s, f"{at}.1", x, 1e-3))

    x = unit("features.0", x, F.hardswish, 2)
    strides = [2, 2, 1, 2, 1, 1, 1, 1, 2, 1, 1]
    squeezed = [8, None, None, 24, 64, 64, 32, 40, 72, 144, 144]
    for i, (stride, inner) in enumerate(zip(strides, squeezed, strict=True), 1):
        act, at, y, part = F.relu if i <= 3 else F.hardswish, f"features.{i}.block", x, 0
        if i > 1:
            y, part = unit(f"{at}.{part}", y, act), part + 1
        y, part = unit(f"{at}.{part}", y, act, stride), part + 1
        if inner is not None:
            a, b = f"{at}.{part}.fc1", f"{at}.{part}.fc2"
            assert len(s[f"{a}.bias"]) == inner
            z = F.relu(F.conv2d(F.adaptive_avg_pool2d(y, 1), s[f"{a}.weight"], s[f"{a}.bias"]))
            y, part = y * F.hardsigmoid(F.conv2d(z, s[f"{b}.weight"], s[f"{b}.bias"])), part + 1
        y = unit(f"{at}.{part}", y, lambda v: v)
        x = x + y if stride == 1 and x.shape == y.shape else y
    x = F.adaptive_avg_pool2d(unit("features.12", x, F.hardswish), 1).flatten(1)
    x = F.hardswish(F.linear(x, s["classifier.0.weight"], s["classifier.0.bias"]))
    return F.linear(x, s["classifier.3.weight"], s["classifier.3.bias"])


@pytest.mark.parametrize(
    ("name", "reference", "entries"), [("resnet18", resnet18, 122), ("mobilenetv3-small", mobilenet, 244)]
)
def test_published_architectures(name, reference, entries):
    torch.manual_seed(0)
    module = unsettle(build(name, "cifar10"))
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(module(x), reference(module.state_dict(), x), rtol=1e-10, atol=1e-12)
    assert len(module.state_dict()) == entries


def test_zhang_cnn_is_conv_relu_pool():
    module = build("zhang-cnn", "mnist").double()
    s, x = list(module.parameters()), torch.randn(3, 1, 28, 28, dtype=torch.float64)
    y = F.max_pool2d(F.relu(F.conv2d(x, s[0], s[1], padding=1)), 2)
    y = F.max_pool2d(F.relu(F.conv2d(y, s[2], s[3], padding=1)), 2).flatten(1)
    y = F.linear(F.relu(F.linear(F.relu(F.linear(y, s[4], s[5])), s[6], s[7])), s[8], s[9])
    torch.testing.assert_close(module(x), y)


@pytest.mark.parametrize("name", ["cnn", "zhang-cnn", "resnet18", "mobilenetv3-small", "mlp", "sigmoid-net"])
def test_image_axes_are_free(name):
    module, x = build(name, "mnist").eval(), torch.randn(2, 1, 28, 28)
    assert module(x).shape == (2, 10)
    for shape in ((2, 28, 28), (2, 784)):
        assert torch.equal(module(x), module(x.view(shape)))


def test_fits_silos():
    flat = Silos.from_arrays([(torch.rand(4, 64), torch.tensor([0, 3, 2, 1]))])
    assert build("cnn", flat)(flat.features).shape == (4, 4)
    signs = Silos.from_arrays([(torch.rand(4, 6), torch.tensor([-1.0, 1, 1, -1]))])
    assert build("mlp", signs, hidden=(3,))(signs.features).shape == (4, 2)
    with pytest.raises(ValueError, match="not square images"):
        build("cnn", signs)
    with pytest.raises(DataError, match="not classes"):
        build("mlp", Silos.from_arrays([(torch.rand(4, 6), torch.rand(4))]))


def test_seed_determines_the_start_and_leaves_the_generator_alone():
    before = torch.get_rng_state()
    a, b, c = (next(build("mlp", "a9a", seed=s).parameters()) for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match="did you mean 'resnet18'"):
        build("resnet", "mnist")
    with pytest.raises(ValueError, match="did you mean 'mnist'"):
        build("mlp", "minst")
    with pytest.raises(ValueError, match="no option 'hiden'; did you mean 'hidden'"):
        build("mlp", "mnist", hiden=3)
    assert set(MODELS) >= {name for name, _ in COUNTS}


@pytest.mark.parametrize(("old", "new"), [((1, 28, 28), 32), ((3, 20, 30), 32), ((1, 40, 32), 32)])
def test_enlarging_is_bilinear_interpolation(old, new):
    """The two matrix products against torch's own interpolation."""
    from fedcomposite.models.small import Images

    x = torch.rand(5, *old)
    expected = torch.nn.functional.interpolate(x, size=(new, new), mode="bilinear", align_corners=False)
    torch.testing.assert_close(Images(old, new)(x), expected, rtol=0, atol=1e-6)
    assert not Images(old, new).state_dict()


def test_models_of_other_packages(tmp_path, monkeypatch):
    """A package offers a model through an entry point; a configuration names it, and no code travels."""
    import importlib

    import fedcomposite as fc
    from fedcomposite.experiments import Config

    (tmp_path / "hospital_nets.py").write_text(
        "from torch import nn\n"
        "def tiny(shape, classes, width=4):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], width), nn.Tanh(), nn.Linear(width, classes))\n"
    )
    information = tmp_path / "hospital_nets-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: hospital-nets\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[fedcomposite.models]\ntiny-net = hospital_nets:tiny\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    silos = fc.data.load("wine").partition("iid", clients=3)
    assert sum(p.numel() for p in fc.models.build("tiny_net", silos, width=5).parameters()) == 13 * 5 + 5 + 5 * 3 + 3
    content = {
        "data": {"name": "wine"},
        "partition": {"name": "iid", "clients": 3},
        "model": {"name": "tiny-net", "options": {"width": 6}},
        "algorithm": {"name": "FedAvg", "local_steps": 1, "step": 0.1},
        "run": {"rounds": 1},
    }
    assert Config.check(content).make_problem().dimension == 13 * 6 + 6 + 6 * 3 + 3
    with pytest.raises(ValueError, match="model 'tiny-net' has no option 'widht'; did you mean 'width'"):
        fc.models.build("tiny-net", silos, widht=5)
    with pytest.raises(ValueError, match="unknown model 'tinny-net'; did you mean 'tiny-net'"):
        fc.models.build("tinny-net", silos)


@pytest.mark.parametrize("name", ["cnn", "zhang-cnn", "resnet18"])
def test_graphs_of_flat_images_take_any_batch(name):
    """A graph made with five samples serves three: no code of ours fixes the size of a batch."""
    module = build(name, "mnist").eval()
    x = torch.rand(5, 784)
    graph = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    with torch.no_grad():
        torch.testing.assert_close(graph(x[:3]), module(x[:3]), rtol=1e-4, atol=1e-5)


def test_a_function_builds_a_model():
    def narrow(shape, classes, width=2):
        return nn.Sequential(nn.Linear(shape[0], width), nn.Linear(width, classes))

    silos = fc.data.load("wine")
    one, other = (fc.models.build(narrow, silos, seed=3, width=4) for _ in range(2))
    assert one[0].out_features == 4
    assert one[1].out_features == 3
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="model 'narrow' has no option 'widht'; did you mean 'width'"):
        fc.models.build(narrow, silos, widht=4)
