"""Augmentation of images on the device they are on, from words of the counter-based generator.

An :class:`Augmentation` is a function of a batch and of as many 32-bit words per sample as it says. The words are those
of (seed, client, round, k), so runs repeat on every device and in every backend, and a recorded round on a GPU can hold
it, which no function that draws from torch's generator can.

>>> import fedcomposite as fc
>>> fc.data.augmentation.Chain((fc.data.augmentation.Crop(4), fc.data.augmentation.Flip())).draws
3
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcomposite._validation import Count, validate

__all__ = ["Augmentation", "Chain", "Crop", "Flip"]


class Augmentation(ABC):
    """A random change of training samples; subclasses are frozen dataclasses."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    @abstractmethod
    def draws(self) -> int:
        """Words per sample."""

    @abstractmethod
    def __call__(self, inputs: Tensor, words: Tensor) -> Tensor:
        """The changed samples ``(N, ...)``; ``words`` is ``(N, draws)``, int64 with values below 2**32."""


def _below(words: Tensor, top: int) -> Tensor:
    """Whole numbers below ``top``, as good as uniform."""
    return words * top >> 32


@dataclass(frozen=True)
class Crop(Augmentation):
    """A window of the image's own size, up to ``padding`` pixels off; what lies outside is zero."""

    padding: Count = 4

    @property
    def draws(self) -> int:
        return 2

    def __call__(self, inputs: Tensor, words: Tensor) -> Tensor:
        """Images ``(N, channels, height, width)``."""
        height, width = inputs.shape[-2:]
        wide = torch.nn.functional.pad(inputs, [self.padding] * 4)
        first = _below(words, 2 * self.padding + 1)
        down = first[:, :1] + torch.arange(height, device=inputs.device)
        right = first[:, 1:] + torch.arange(width, device=inputs.device)
        sample = torch.arange(len(inputs), device=inputs.device)
        taken: Tensor = wide.permute(0, 2, 3, 1)[sample[:, None, None], down[:, :, None], right[:, None, :]]
        return taken.permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Flip(Augmentation):
    """Left and right exchanged in every other image."""

    @property
    def draws(self) -> int:
        return 1

    def __call__(self, inputs: Tensor, words: Tensor) -> Tensor:
        """Images whose last axis is the width."""
        heads = _below(words[:, 0], 2).bool().reshape(-1, *[1] * (inputs.ndim - 1))
        return torch.where(heads, inputs.flip(-1), inputs)


@dataclass(frozen=True)
class Chain(Augmentation):
    """One after another."""

    parts: tuple[Augmentation, ...]

    @property
    def draws(self) -> int:
        return sum(part.draws for part in self.parts)

    def __call__(self, inputs: Tensor, words: Tensor) -> Tensor:
        """Each part takes the next words."""
        for part, drawn in zip(self.parts, words.split_with_sizes([p.draws for p in self.parts], 1), strict=True):
            inputs = part(inputs, drawn)
        return inputs
