"""ResNet-18: K. He, X. Zhang, S. Ren & J. Sun, *Deep residual learning for image recognition*, CVPR 2016.

The usual arrangement for large images: a 7x7 stem with stride 2, max-pooling, four stages of two blocks with 64, 128,
256 and 512 maps. Parameters carry the names of the widely published weights, which can therefore be loaded. For images
of 32 x 32 pixels the same paper has a 3x3 stem without stride and pooling: ``stem="small"``.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import relu

from fedcomposite.models.small import SampleShape, as_image, images


class Block(nn.Module):
    """relu(shortcut(x) + BN(conv(relu(BN(conv(x)))))), 3x3 convolutions; the first one may halve the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride != 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions around a shortcut."""
        inner: Tensor = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(inner + self.downsample(x))


class ResNet18(nn.Module):
    """Stem, four stages, mean over the image, linear classifier."""

    def __init__(self, shape: SampleShape, classes: int, *, stem: Literal["large", "small"] = "large") -> None:
        super().__init__()
        if stem not in ("large", "small"):
            raise ValueError(f"stem = {stem!r}, must be 'large' (7x7, stride 2, pooling) or 'small' (3x3)")
        self.shape = as_image(shape)
        size, stride = (7, 2) if stem == "large" else (3, 1)
        self.conv1 = nn.Conv2d(self.shape[0], 64, size, stride, padding=size // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stem == "large" else nn.Identity()
        self.layer1 = nn.Sequential(Block(64, 64, 1), Block(64, 64, 1))
        self.layer2 = nn.Sequential(Block(64, 128, 2), Block(128, 128, 1))
        self.layer3 = nn.Sequential(Block(128, 256, 2), Block(256, 256, 1))
        self.layer4 = nn.Sequential(Block(256, 512, 2), Block(512, 512, 1))
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(relu(self.bn1(self.conv1(images(x, self.shape)))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores
