"""Small modules of many kinds, and silos with data for each of them."""

import numpy as np
import pytest
import torch
from torch import nn

import fedcomposite as fc

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


class Recurrent(nn.Module):
    """Embedding, two recurrent layers, a classifier."""

    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.inner = kind(8, 8, num_layers=2, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.inner(self.embedding(x))[0][:, -1])


class Attention(nn.Module):
    """A small transformer whose output layer is the embedding's own matrix, seen through a projection."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(20, 3)

    def forward(self, x):
        return self.last(self.inner(self.embedding(x)).mean(1) @ self.embedding.weight.T)


class Patches(nn.Module):
    """A small vision transformer."""

    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, 8, 4, stride=4)
        self.place = nn.Parameter(torch.randn(4, 8) / 10)
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.inner(self.cut(x).flatten(2).mT + self.place).mean(1))


class Halve(torch.autograd.Function):
    """A function of one's own, without a rule for vmap."""

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


class Own(nn.Module):
    """A custom function, group norm, and a first layer that is not trained."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3).requires_grad_(False)
        self.norm = nn.GroupNorm(2, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(Halve.apply(self.norm(self.first(x)).relu()).mean((2, 3)))


class Statistics(nn.Module):
    """Batch norm and layer norm around a shortcut."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.norm, self.last = nn.LayerNorm(3), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.norm((x + self.b(self.a(x)).relu()).mean((2, 3))))


MODULES = {
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "transformer": Attention,
    "vit": Patches,
    "own": Own,
    "statistics": Statistics,
}


def silos_for(name, clients=3, samples=12):
    rng = np.random.default_rng(1)
    words = name in ("gru", "lstm", "transformer")

    def features():
        return rng.integers(0, 20, (samples, 5)) if words else rng.standard_normal((samples, 3, 8, 8))

    return fc.Silos.from_arrays([(features(), rng.integers(0, 3, samples)) for _ in range(clients)])
