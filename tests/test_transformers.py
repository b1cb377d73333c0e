"""Transformers and U-Net beside torch's own layers, and without the heads, neurons and filters that are zero."""

import importlib.util

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import fedcomposite as fc
from fedcomposite.data.stories import TOPICS, WORDS
from fedcomposite.exporting.onnx import PACKAGES
from fedcomposite.models import GPT, UNet, ViT, build

COUNTS = {("vit-small", "mnist"): 2_684_170, ("vit-small", "cifar10"): 2_693_194, ("gpt-small", "stories"): 828_280}


@pytest.mark.parametrize(("name", "dataset"), COUNTS)
def test_parameter_counts(name, dataset):
    assert sum(p.numel() for p in build(name, dataset).parameters()) == COUNTS[name, dataset]


def torchs(layer, heads):
    """torch's own layer with the weights of ours."""
    width, a = layer.norm1.weight.numel(), layer.attention
    made = nn.TransformerEncoderLayer(
        width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    three = (a.query, a.key, a.value)
    state = {
        "self_attn.in_proj_weight": torch.cat([m.weight for m in three]),
        "self_attn.in_proj_bias": torch.cat([m.bias for m in three]),
    }
    for theirs, ours in (
        *(("self_attn.out_proj", a.out), ("linear1", layer.first), ("linear2", layer.second)),
        *(("norm1", layer.norm1), ("norm2", layer.norm2)),
    ):
        state |= {f"{theirs}.weight": ours.weight, f"{theirs}.bias": ours.bias}
    made.load_state_dict(state)
    return made.eval()


def unsettled(module):
    torch.manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.3 * torch.randn(p.shape))
        for name, b in module.named_buffers():
            b.copy_(torch.rand(b.shape) + 0.5 if "num" not in name else b)
    return module.double().eval()


def test_a_vision_transformer_has_torchs_layers():
    module, x = unsettled(ViT((3, 8, 8), 5, patch=2, width=12, depth=2, heads=3)), torch.randn(4, 3, 8, 8).double()
    patches = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(4, 16, 12)
    y = patches @ module.patches.weight.reshape(12, 12).T + module.patches.bias + module.places
    for layer in module.layers:
        y = torchs(layer, 3)(y)
    torch.testing.assert_close(module(x), F.linear(module.norm(y).mean(1), module.head.weight, module.head.bias))
    torch.testing.assert_close(module(x.flatten(1)), module(x))


def test_a_language_model_looks_back_only():
    module, words = unsettled(GPT((7,), 9, width=8, depth=2, heads=2)), torch.randint(9, (3, 7))
    y = module.embedding.weight[words] + module.places
    for layer in module.layers:
        y = torchs(layer, 2)(y, src_mask=nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64))
    torch.testing.assert_close(module(words), F.linear(module.norm(y), module.head.weight, module.head.bias))
    torch.testing.assert_close(module(words[:, :4]), module(words)[:, :4])


def test_a_u_net_by_functions():
    module, x = unsettled(UNet((1, 8, 8), 2, width=4, depth=2)), torch.randn(3, 1, 8, 8).double()
    s = module.state_dict()

    def twice(at, x):
        for i in (0, 3):
            n = [s[f"{at}.{i + 1}.{k}"] for k in ("running_mean", "running_var", "weight", "bias")]
            x = (
                F.conv2d(x, s[f"{at}.{i}.weight"], padding=1)
                .sub(n[0].view(-1, 1, 1))
                .div((n[1] + 1e-5).sqrt().view(-1, 1, 1))
            )
            x = (x * n[2].view(-1, 1, 1) + n[3].view(-1, 1, 1)).relu()
        return x

    large = twice("down.0", x)
    middle = twice("down.1", F.max_pool2d(large, 2))
    y = twice("down.2", F.max_pool2d(middle, 2))
    for i, other in enumerate((middle, large)):
        y = twice(f"up.{i}", torch.cat([other, y.repeat_interleave(2, -1).repeat_interleave(2, -2)], 1))
    torch.testing.assert_close(module(x), F.conv2d(y, s["head.weight"], s["head.bias"]))


@pytest.mark.parametrize(("options", "told"), [({"patch": 3}, "divide"), ({"heads": 5}, "multiple")])
def test_sizes_that_cannot_be(options, told):
    with pytest.raises(ValueError, match=told):
        build("vit-small", "cifar10", **options)
    with pytest.raises(ValueError, match="halved"):
        build("unet", "mnist", depth=3)


NETWORKS = {
    "vit": (lambda: ViT((1, 8, 8), 3, patch=2, width=16, depth=2, heads=4), (1, 8, 8)),
    "gpt": (lambda: GPT((8,), 30, width=16, depth=2, heads=4), (8,)),
    "unet": (lambda: UNet((1, 8, 8), 3, width=8), (1, 8, 8)),
}


def problem_of(name):
    """A small problem for a network."""
    torch.manual_seed(0)
    module, shape = NETWORKS[name][0](), NETWORKS[name][1]
    generator = torch.Generator().manual_seed(1)
    if name == "gpt":
        words = torch.randint(30, (24, 9), generator=generator)
        words[0, 0] = 29  # seen, and followed, but never next
        X, y = words[:, :-1], words[:, 1:]
    else:
        X = torch.randn(24, *shape, generator=generator)
        y = torch.randint(3, (24, 8, 8) if name == "unet" else (24,), generator=generator)
    silos = fc.Silos.from_arrays([(X[:12], y[:12]), (X[12:], y[12:])])
    if name == "gpt":
        assert build("gpt-small", silos, depth=1).embedding.num_embeddings == 30
    return fc.Problem(silos, model=module)


@pytest.mark.parametrize("name", NETWORKS)
def test_trained_pruned_and_exported(name, tmp_path):
    """The share of zeros is made of whole units, which are cut out; the file says what the network says."""
    problem = problem_of(name)
    method = fc.algorithms.FedMid(2, 0.05, server_prox_only=True)
    run = fc.simulate(problem, method, rounds=4, batch_size=4, sparsity=0.5, structure="filters")
    assert abs(run.history[-1].sparsity - 0.5) < 0.03
    format = "onnx" if all(importlib.util.find_spec(p) for p in PACKAGES) else "safetensors"
    made = fc.export(problem, run, tmp_path / f"net.{format}", format=format, pruned=True)
    assert made.parameters < 0.56 * problem.dimension
    assert not made.pruned.kept


@pytest.mark.parametrize("name", ["vit", "gpt"])
def test_heads_that_nobody_reads_go(name):
    """A head whose values are not read is cut out, and so is a neuron that reads nothing."""
    problem = problem_of(name)
    module = problem.module(problem.smooth(torch.float64).start())
    with torch.no_grad():
        module.layers[0].attention.out.weight[:, 4:12] = 0
        module.layers[1].second.weight[:, 10:] = 0
    made = fc.prune(module, problem.silos.features[:4].double() if name == "vit" else problem.silos.features[:4])
    sizes = {layer.name: layer.pruned for layer in made.layers}
    assert [sizes[f"layers.0.attention.{k}"] for k in ("query", "key", "value", "out")] == [(8, 16)] * 3 + [(16, 8)]
    assert sizes["layers.1.first"] == (10, 16)


class Fixed(nn.Module):
    """Attention whose number of heads is written down."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 3)

    def forward(self, x):
        q, k, v = (layer(x.flatten(2)).view(len(x), -1, 4, 4).transpose(1, 2) for layer in self.qkv)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean(1)


def test_heads_that_are_written_down_stay():
    module, x = Fixed(), torch.randn(4, 5, 16)
    with torch.no_grad():
        module.out.weight[:, 4:12] = 0
    made = fc.prune(module, x)
    assert all(layer.pruned == layer.shape for layer in made.layers)


def test_stories():
    """Words of one topic and of the grammar; what follows is what is asked for; skewed topics are skewed."""
    silos = fc.data.load("stories", clients=5, samples=40, length=20, alpha=0.1, test=0.25)
    assert [*silos.sizes] == [30] * 5
    assert torch.equal(silos.features[:, 1:], silos.targets[:, :-1])
    topics = {word: name for name, parts in TOPICS.items() for part in parts for word in part.split()}
    found = [{topics[WORDS[w]] for w in row.tolist() if WORDS[w] in topics} for row in silos.features]
    assert all(len(one) == 1 for one in found)
    of = np.array([next(iter(one)) for one in found]).reshape(5, 30)
    assert np.mean([np.unique(row, return_counts=True)[1].max() / 30 for row in of]) > 0.6
    again = fc.data.load("stories", clients=5, samples=40, length=20, alpha=0.1, test=0.25)
    assert torch.equal(again.features, silos.features)
    assert len(WORDS) == len(set(WORDS)) == fc.models.SHAPES["stories"][1]
