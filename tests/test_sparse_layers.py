"""Layers that compute with nonzeros only give what the dense ones give."""

import pytest
import torch
from torch import nn

import fedcomposite as fc
from fedcomposite.exporting import CSRLinear, ExportError, sparse_layers
from fedcomposite.exporting.sparse_layers import unsuited

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def network(*widths):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(*widths[:2]), nn.ReLU(), nn.Linear(*widths[1:3]), nn.ReLU(), nn.Linear(*widths[2:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3)])
def test_csr(dtype, shape):
    module = network(100, 40, 30, 4).to(dtype)
    with torch.no_grad():
        for layer in (module[0], module[2]):
            layer.weight *= torch.rand(layer.weight.shape) < 0.03
        module[2].bias = None
    before = {k: v.clone() for k, v in module.state_dict().items()}
    made = sparse_layers(module)
    assert made.layers == ("0", "2")
    assert made.left == {"4": "100% of its weights are not zero, more than 5%"}
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert made.module[0].weight.values().numel() == int((module[0].weight != 0).sum())
    x = torch.randn(*shape, 100, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(made.module(x), module(x))
    assert "density=" in str(made.module)


def test_a_single_layer():
    layer = nn.Linear(50, 3)
    nn.init.zeros_(layer.weight)
    made = sparse_layers(layer)
    assert isinstance(made.module, CSRLinear)
    assert torch.equal(made.module(torch.ones(2, 50)), layer(torch.ones(2, 50)))


def test_layers_that_stay_dense_are_named():
    """Half precision has no product with CSR, and an encoder layer's fused kernel would read CSR weights by itself."""
    half = nn.Linear(50, 3, dtype=torch.float16)
    encoder = nn.TransformerEncoderLayer(8, 2, 50, batch_first=True)
    special = type("Special", (nn.Linear,), {})(50, 50)
    for layer in (half, encoder.linear1, encoder.linear2, special):
        nn.init.zeros_(layer.weight)
    made = sparse_layers(half)
    assert "torch.float16" in made.left[""]
    assert torch.equal(made.module(torch.ones(2, 50).half()), half(torch.ones(2, 50).half()))
    made = sparse_layers(encoder)
    assert sorted(made.left) == ["linear1", "linear2", "self_attn.out_proj"]
    assert made.left["linear1"] == "its TransformerEncoderLayer reads its weights by itself"
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(made.module(x), encoder.eval()(x))
    assert sparse_layers(special).left == {"": "it is a Special, which may do more than a linear layer"}


def test_a_layer_with_two_names():
    layer = nn.Linear(50, 50)
    nn.init.zeros_(layer.weight[1:])
    made = sparse_layers(nn.Sequential(layer, nn.ReLU(), layer))
    assert made.layers == ("0", "2")
    assert made.module[0] is made.module[2]
    x = torch.randn(3, 50)
    with torch.no_grad():
        torch.testing.assert_close(made.module(x), layer(layer(x).relu()))


def test_the_pattern():
    """Exactly the matrices with at most two nonzeros in four consecutive ones of a row, of the right size."""
    generator = torch.Generator().manual_seed(0)
    h = fc.regularizers.Sparsity2to4(5.0)
    weight = h.prox(torch.randn(32 * 64, generator=generator, dtype=torch.float64), 1e3).reshape(32, 64)
    assert unsuited(weight) == ""
    weight[3, 8:11] = 1.0
    weight[5, 0:4] = 1.0
    assert unsuited(weight) == "2 of 512 groups of four have more than two nonzeros"
    assert "not a multiple of 32x64" in unsuited(weight[:, :48])
    assert "not a multiple of 32x64" in unsuited(weight[:10])


def test_refusals():
    with pytest.raises(ValueError, match="did you mean 'csr'"):
        sparse_layers(nn.Linear(3, 2), "crs")
    with pytest.raises(ValueError, match=r"density = nan, must be a number > 0 and <= 1"):
        sparse_layers(nn.Linear(3, 2), density=float("nan"))
    with pytest.raises(ValueError, match="this is a int"):
        sparse_layers(3)
    with pytest.raises(ExportError, match="are a GPU's"):
        sparse_layers(nn.Linear(3, 2), "2:4")
    with pytest.raises(ValueError, match=r"must be torch\.float16"):
        sparse_layers(nn.Linear(3, 2), "2:4", dtype=torch.float32)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_of_four_on_a_gpu(dtype):
    module = network(128, 256, 64, 10).cuda()
    with torch.no_grad():
        for layer in (module[0], module[2]):
            groups = layer.weight.view(-1, 4)
            groups.scatter_(1, groups.abs().topk(2, dim=1, largest=False).indices, 0.0)
    made = sparse_layers(module, "2:4", dtype=dtype)
    assert made.layers == ("0", "2")
    assert made.left == {"4": "10x64 is not a multiple of 32x64"}
    x = torch.randn(64, 128, device="cuda").to(dtype)
    with torch.no_grad():
        wanted = module.to(dtype)(x)
        torch.testing.assert_close(made.module(x), wanted, rtol=0.02, atol=0.02)
        torch.testing.assert_close(made.module(x[:5]), wanted[:5], rtol=0.02, atol=0.02)  # a size that is padded
