"""MobileNetV3-Small: A. Howard et al., *Searching for MobileNetV3*, ICCV 2019, table 2.

Parameters carry the names of the widely published weights, which can therefore be loaded; batch norms have eps 1e-3
and momentum 0.01, the classifier drops a fifth of its units in training.
"""

from __future__ import annotations

from typing import Annotated

import annotated_types as at
from torch import Tensor, nn

from fedcomposite.models.small import SampleShape, as_image, images

# kernel, expanded channels, output channels, squeeze-and-excitation, hard swish (otherwise ReLU), stride
_BLOCKS = (
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
)


def _eighths(channels: float) -> int:
    """The multiple of 8 nearest to a channel count, never more than a tenth below it."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near if near >= 0.9 * channels else near + 8


def _convolution(
    inputs: int, outputs: int, kernel: int, act: type[nn.Module] | None, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Convolution that keeps the size up to its stride, batch norm, and an activation if there is one."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01),
    ]
    return nn.Sequential(*layers, act()) if act is not None else nn.Sequential(*layers)


class SqueezeExcite(nn.Module):
    """x times hardsigmoid(W2 relu(W1 mean(x))), channel by channel (Hu, Shen & Sun 2018)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.fc2(nn.functional.relu(self.fc1(x.mean((2, 3), keepdim=True))))
        return x * nn.functional.hardsigmoid(scale)


class InvertedResidual(nn.Module):
    """Expand by a 1x1 convolution, filter each channel, squeeze-excite, project; with a shortcut where shapes agree."""

    def __init__(self, inputs: int, kernel: int, inner: int, outputs: int, se: bool, swish: bool, stride: int) -> None:
        super().__init__()
        act = nn.Hardswish if swish else nn.ReLU
        layers: list[nn.Module] = [_convolution(inputs, inner, 1, act)] if inner != inputs else []
        layers.append(_convolution(inner, inner, kernel, act, stride, groups=inner))
        if se:
            layers.append(SqueezeExcite(inner, _eighths(inner // 4)))
        layers.append(_convolution(inner, outputs, 1, None))
        self.block = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.block(x)
        return x + inner if self.shortcut else inner


class MobileNetV3Small(nn.Module):
    """Eleven inverted residuals between two convolutions, mean over the image, two linear layers."""

    def __init__(self, shape: SampleShape, classes: int, dropout: Annotated[float, at.Ge(0), at.Le(1)] = 0.2) -> None:
        super().__init__()
        self.shape = as_image(shape)
        features: list[nn.Module] = [_convolution(self.shape[0], 16, 3, nn.Hardswish, stride=2)]
        channels = 16
        for kernel, inner, outputs, se, swish, stride in _BLOCKS:
            features.append(InvertedResidual(channels, kernel, inner, outputs, se, swish, stride))
            channels = outputs
        features.append(_convolution(channels, 6 * channels, 1, nn.Hardswish))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(
            nn.Linear(6 * channels, 1024), nn.Hardswish(), nn.Dropout(dropout), nn.Linear(1024, classes)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images(x, self.shape)).mean((2, 3)))
        return scores
