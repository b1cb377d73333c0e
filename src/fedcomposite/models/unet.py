"""U-Net: O. Ronneberger, P. Fischer & T. Brox, *U-Net: convolutional networks for biomedical image segmentation*,
MICCAI 2015. Here convolutions keep the image's size and have batch norm, and images grow by repeating pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d

from fedcomposite._validation import Count
from fedcomposite.models.small import SampleShape, as_image, images


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Scores of every pixel, ``(batch, classes, height, width)``: down ``depth`` times by two, and up again."""

    def __init__(self, shape: SampleShape, classes: int, *, width: Count = 32, depth: Count = 2) -> None:
        super().__init__()
        self.shape = as_image(shape)
        if self.shape[1] % 2**depth or self.shape[2] % 2**depth:
            raise ValueError(
                f"depth = {depth}, but images of {self.shape[1]} x {self.shape[2]} cannot be halved so often"
            )
        widths = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([self.shape[0], *widths], widths, strict=False))
        self.up = nn.ModuleList(_twice(a + b, a) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Every size's features meet those of the same size on the way up."""
        x, kept = images(x, self.shape), []
        for i, block in enumerate(self.down):
            x = block(max_pool2d(x, 2) if i else x)
            kept.append(x)
        for block, other in zip(self.up, kept[-2::-1], strict=True):
            x = block(torch.cat([other, interpolate(x, scale_factor=2.0)], 1))
        scores: Tensor = self.head(x)
        return scores
