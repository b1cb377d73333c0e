"""Small networks of the papers' experiments; images may come flat, without a channel axis, or with one."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from fedcomposite._validation import Count

SampleShape = tuple[int, ...]


def images(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A batch as ``(batch, channels, height, width)``; one that has these axes stays as it is."""
    return x if x.ndim == 4 else x.reshape(x.shape[0], *shape)  # len(x) would fix the size of a batch in a graph


class Images(nn.Module):
    """Samples with or without an axis for channels, or flat, as images; enlarged to ``size`` when it is given."""

    def __init__(self, shape: tuple[int, int, int], size: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.rows: Tensor
        self.columns: Tensor
        self.enlarged = size is not None and shape[1:] != (size, size)
        if self.enlarged and size is not None:
            self.register_buffer("rows", _bilinear(shape[1], size), persistent=False)
            self.register_buffer("columns", _bilinear(shape[2], size).t().contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Reshape, and enlarge by bilinear interpolation: a product with a matrix from each side.

        ``nn.functional.interpolate`` gives the same and is many times slower on a GPU for small images.
        """
        x = images(x, self.shape)
        return self.rows @ x @ self.columns if self.enlarged else x


def _bilinear(old: int, new: int) -> Tensor:
    """The matrix ``(new, old)`` that interpolates a line linearly, between the centres of its pixels."""
    line = torch.eye(old, dtype=torch.float64).reshape(1, 1, old, old)
    grown = nn.functional.interpolate(line, size=(old, new), mode="bilinear", align_corners=False)
    return grown[0, 0].t().to(torch.get_default_dtype()).contiguous()


def linear(shape: SampleShape, classes: int) -> nn.Module:
    """Softmax regression: W a + b."""
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), classes))


def mlp(shape: SampleShape, classes: int, hidden: tuple[Count, ...] = (128, 64)) -> nn.Module:
    """Linear layers with ReLU between them; the FedCanon paper's has 128 and 64 hidden units."""
    widths = [torch.Size(shape).numel(), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def sigmoid_net(shape: SampleShape, classes: int, hidden: Count = 100) -> nn.Module:
    """One hidden layer of sigmoids, as in the FedNMap paper, which does not say how wide."""
    features = torch.Size(shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.Sigmoid(), nn.Linear(hidden, classes))


def cnn(shape: SampleShape, classes: int) -> nn.Module:
    """The FedCanon paper's: two 3x3 convolutions (16, 32) with ReLU and 2x2 pooling, 2048-128-C, on 32x32 images."""
    image = as_image(shape)
    return nn.Sequential(
        Images(image, size=32),
        *_block(image[0], 16),
        *_block(16, 32),
        nn.Flatten(),
        nn.Linear(2048, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def zhang_cnn(shape: SampleShape, classes: int) -> nn.Module:
    """Zhang, Hu & Johansson's: two 3x3 convolutions of 32 maps with ReLU and 2x2 pooling, then 64-32-C."""
    channels, height, width = image = as_image(shape)
    return nn.Sequential(
        Images(image),
        *_block(channels, 32),
        *_block(32, 32),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, classes),
    )


def _block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)


def as_image(shape: SampleShape) -> tuple[int, int, int]:
    """Channels, height and width of a sample: ``(c, h, w)``, ``(h, w)``, or a flat square with 1 or 3 channels."""
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    for channels in (1, 3):
        side = round((shape[0] / channels) ** 0.5)
        if channels * side * side == shape[0]:
            return channels, side, side
    raise ValueError(f"samples with {shape[0]} features are not square images; reshape them or take the mlp")
