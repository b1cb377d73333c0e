"""Transformers: of images, A. Dosovitskiy et al., *An image is worth 16x16 words*, ICLR 2021; of text, A. Radford et
al., *Language models are unsupervised multitask learners*, 2019 (GPT-2).

Layers before their normalisation, GELU, learned places. Two simplifications: an image is the mean over its patches and
has no token of its own, and the last layer does not share its weight with the embedding. How many heads an attention
has is read off its weights, so that :func:`fedcomposite.prune` can cut whole heads out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from fedcomposite._validation import Count
from fedcomposite.models.small import SampleShape, as_image, images

_SPREAD = 0.02  # of all weights at the start, as in both papers


class Attention(nn.Module):
    """Heads of ``size`` numbers each; ``causal`` ones look back only."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.size, self.causal = width // heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Every token as a mean of values, weighted by how its query fits their keys."""
        heads = [
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        seen = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=self.causal)
        made: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return made


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then the same with two linear layers, four times as wide between them."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2, self.first, self.second = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        made: Tensor = x + self.second(gelu(self.first(self.norm2(x))))
        return made


class _Transformer(nn.Module):
    def __init__(self, tokens: int, classes: int, width: int, depth: int, heads: int, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width = {width}, must be a multiple of heads = {heads}")
        self.places = nn.Parameter(torch.zeros(tokens, width))
        self.layers = nn.ModuleList(TransformerLayer(width, heads, causal) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def _start(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
                nn.init.normal_(module.weight, std=_SPREAD)
            if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.places, std=_SPREAD)

    def _through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.norm(x)
        return normed


class ViT(_Transformer):
    """Patches of an image as tokens, mean, linear classifier."""

    def __init__(
        self,
        shape: SampleShape,
        classes: int,
        *,
        patch: Count = 4,
        width: Count = 192,
        depth: Count = 6,
        heads: Count = 6,
    ) -> None:
        channels, height, breadth = as_image(shape)
        if height % patch or breadth % patch:
            raise ValueError(f"patch = {patch}, must divide images of {height} x {breadth}")
        super().__init__(height // patch * (breadth // patch), classes, width, depth, heads, causal=False)
        self.shape = channels, height, breadth
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self._start()

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(images(x, self.shape)).flatten(2).transpose(1, 2) + self.places
        scores: Tensor = self.head(self._through(x).mean(1))
        return scores


class GPT(_Transformer):
    """A score for each next token: ``(batch, tokens)`` to ``(batch, tokens, classes)``; fewer tokens will do."""

    def __init__(
        self, shape: SampleShape, classes: int, *, width: Count = 128, depth: Count = 4, heads: Count = 4
    ) -> None:
        if len(shape) != 1:
            raise ValueError(f"samples have shape {shape}, must be tokens by number: (tokens,)")
        super().__init__(shape[0], classes, width, depth, heads, causal=True)
        self.embedding = nn.Embedding(classes, width)
        self._start()

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self._through(self.embedding(tokens) + self.places[: tokens.shape[1]]))
        return scores
